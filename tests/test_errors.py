"""The errors: one tree, one exit code a kind, and the nearest valid name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lce
from lce import errors
from lce.errors import BusyError, CapacityError, DataError, LceError, ModelError, RankError, UsageError, nearest, shown

EXIT_CODES = {LceError: 1, UsageError: 2, ModelError: 3, DataError: 3, CapacityError: 4, BusyError: 1, RankError: 1}


def test_the_tree_at_the_top_is_the_tree() -> None:
    drawn = re.findall(r"(\w+Error) +(\d)", errors.__doc__ or "")
    assert drawn == [(error.__name__, str(code)) for error, code in EXIT_CODES.items()]
    assert all(error.exit_code == code for error, code in EXIT_CODES.items())
    assert [error for error in EXIT_CODES if issubclass(error, ValueError | OSError | MemoryError)] == [UsageError]
    assert {name for name in lce.__all__ if name.endswith("Error")} == {error.__name__ for error in EXIT_CODES}


def test_the_nearest_name() -> None:
    assert nearest("longhead", ["full", "longheads"]) == "did you mean 'longheads'? valid: full, longheads"
    assert (nearest("zzz", ["b", "a"]), nearest("zzz", [])) == ("valid: a, b", "valid: ")
    assert nearest("LongHeads", ["full", "longheads"]).startswith("did you mean 'longheads'? ")
    assert nearest("stream", ["full", "streaming"]).startswith("did you mean 'streaming'? ")


NAMES = ["full", "esa", "dca", "longheads", "lm_infinite", "rerope", "auto", "torch", "compiled", "bfloat16", "Q4_K"]


@given(name=st.sampled_from(NAMES), at=st.integers(0, 10), slip=st.sampled_from(["drop", "double", "swap", "other"]))
def test_one_slip_is_mended(name: str, at: int, slip: str) -> None:
    at %= len(name)
    first, letter, rest = name[:at], name[at], name[at + 1 :]
    if slip == "drop" and len(name) < 4:
        return  # two letters may be anything
    wrong = {
        "drop": first + rest,
        "double": first + 2 * letter + rest,
        "swap": first + rest[:1] + letter + rest[1:],
        "other": first + "#" + rest,
    }[slip]
    assert nearest(wrong, NAMES).startswith(f"did you mean {name!r}? ")


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, "a\nb\x1b[2J\u202e\0", 10**4000, [["deep"] * 100] * 100, {"\n" * 500: "\x07" * 500}, b"\xff" * 9999],
)
def test_a_shown_value_is_one_printable_short_line(value: object) -> None:
    text = shown(value)
    assert text.isprintable()
    assert len(text) <= 300
