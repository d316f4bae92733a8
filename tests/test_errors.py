"""The errors: one tree, one exit code a kind, and the nearest valid name."""

from __future__ import annotations

import re

import pytest

from lce import errors
from lce.errors import CapacityError, DataError, LceError, ModelError, UsageError, nearest, shown

EXIT_CODES = {LceError: 1, UsageError: 2, ModelError: 3, DataError: 3, CapacityError: 4}


@pytest.mark.parametrize(("error", "code"), EXIT_CODES.items())
def test_every_kind_has_its_exit_code(error: type[LceError], code: int) -> None:
    assert error.exit_code == code
    assert issubclass(error, LceError)
    assert not issubclass(error, ValueError | OSError)


def test_the_tree_at_the_top_is_the_tree() -> None:
    drawn = re.findall(r"(\w+Error) +(\d)", errors.__doc__ or "")
    assert drawn == [(error.__name__, str(code)) for error, code in EXIT_CODES.items()]


def test_the_nearest_name() -> None:
    assert nearest("longhead", ["full", "longheads"]) == "did you mean 'longheads'? valid: full, longheads"
    assert nearest("zzz", ["b", "a"]) == "valid: a, b"
    assert nearest("zzz", []) == "valid: "


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, "a\nb\x1b[2J\u202e\0", 10**4000, [["deep"] * 100] * 100, {"\n" * 500: "\x07" * 500}, b"\xff" * 9999],
)
def test_a_shown_value_is_one_printable_short_line(value: object) -> None:
    text = shown(value)
    assert text.isprintable()
    assert len(text) <= 300
