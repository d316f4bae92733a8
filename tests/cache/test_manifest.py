"""What a context file says of itself: read whole and exactly, or refused in a line, whatever somebody wrote there."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lce.cache.manifest import FORMAT, Header, Manifest, is_signed, read_header, signed, strict_object
from lce.errors import DataError

GOOD: dict[str, Any] = {
    "format": FORMAT, "lce": "1", "identity": {}, "pages": {}, "text": "", "capacity": 9, "read": 5, "announced": 7,
}  # fmt: skip
PATH = Path("document.lce")


def header_of(path: Path, text: str | bytes, *, length: int | None = None, padding: int = 0) -> Header:
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(padding))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor, path)
    finally:
        os.close(descriptor)


def with_manifest(text: str) -> str:
    return json.dumps({"__metadata__": {"lce": text}, "tokens": 3})


def test_a_header_is_read(tmp_path: Path) -> None:
    header = header_of(tmp_path / "file", with_manifest(json.dumps(GOOD)), padding=5)
    assert (header.manifest, header.entries) == (GOOD, {"tokens": 3})
    assert header.start + 5 == header.file_bytes == (tmp_path / "file").stat().st_size


HOSTILE = {
    "nesting": "[" * 5000, "closed nesting": '{"a":' * 3000 + "1" + "}" * 3000, "NaN": '{"a": NaN}',
    "inf": '{"a": 1e999}',
    "-inf": '{"a": -Infinity}', "huge": '{"a": 1' + "0" * 5000 + "}",
    "twice": '{"a": 1, "a": 2}', "list": "[1]",
    "text": '"a"', "number": "3", "nothing": "", "lone quote": '{"', "surrogate": '{"\\ud800": 1}', "NUL": "\0",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_manifest_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    for raw in (text, with_manifest(text)):
        with pytest.raises(DataError) as caught:
            header_of(tmp_path / "file", raw)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600


def test_a_header_that_lies_about_its_length_is_refused(tmp_path: Path) -> None:
    for length in (0, 1, 10, 1 << 30, (1 << 63) - 1, (1 << 64) - 1):
        with pytest.raises(DataError):
            header_of(tmp_path / "file", with_manifest(json.dumps(GOOD)), length=length)
    for n in range(9):
        (tmp_path / "short").write_bytes(b"\x08" + bytes(n))
        with (tmp_path / "short").open("rb") as file, pytest.raises(DataError, match=r"incomplete|not a context"):
            read_header(file.fileno(), tmp_path / "short")


@pytest.mark.parametrize("part", ['{"a":{}},', "[],", '"a",', "1,"])
def test_a_hostile_header_takes_little_memory(part: str, tmp_path: Path) -> None:
    """A few times its own bytes at most, whatever many small things it is made of."""
    text = with_manifest("x")[:-1] + ', "b": [' + part * ((1 << 20) // len(part)) + "1]}"
    tracemalloc.start()
    with pytest.raises(DataError):
        header_of(tmp_path / "file", text)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 << 20


def test_a_header_of_numbers_without_end_is_refused_unparsed(tmp_path: Path) -> None:
    """Python reads some million of them a second."""
    for text in ('{"a": [' + "1.5," * (3 << 20) + "1]}", with_manifest('{"a": [' + "12," * (1 << 20) + "1]}")):
        with pytest.raises(DataError, match=r"is not a context|the header is not JSON"):
            header_of(tmp_path / "file", text)


def test_a_sparse_file_with_a_long_header_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write((1 << 33).to_bytes(8, "little"))
        file.truncate(1 << 34)
    with (tmp_path / "file").open("rb") as file, pytest.raises(DataError, match="is not a context"):
        read_header(file.fileno(), tmp_path / "file")


@pytest.mark.parametrize("format_", ["lce context 2", None, 3, "x" * 300, "\0\x1b[2J", [1], {"a": 1}])
def test_another_format_is_named_shortly(format_: object, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"this lce reads {FORMAT!r}; prefill the text again") as caught:
        header_of(tmp_path / "file", with_manifest(json.dumps(GOOD | {"format": format_})))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.just({})


@given(name=st.sampled_from(sorted(GOOD.keys() - {"format", "lce"})), value=VALUES)
def test_every_entry_is_of_its_kind(name: str, value: object) -> None:
    kind, number = type(GOOD[name]), value if type(value) is int else -1
    fits = {"capacity": 5 <= number <= 1 << 40, "read": 0 < number <= 9, "announced": 0 <= number <= 1 << 40}
    if type(value) is kind and fits.get(name, True):
        assert getattr(Manifest.of(GOOD | {name: value}, PATH), name) == value
        return
    with pytest.raises(DataError, match="its header contradicts its contents"):
        Manifest.of(GOOD | {name: value}, PATH)
    with pytest.raises(DataError):
        Manifest.of({key: x for key, x in GOOD.items() if key != name}, PATH)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(), x, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(st.text(), JSON, max_size=5))
@settings(max_examples=50, deadline=None)
def test_honest_json_is_read_as_it_is(value: dict[str, Any]) -> None:
    assert strict_object(json.dumps(value).encode()) == value


@given(value=st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), min_size=1))
def test_a_signature_is_of_everything(value: dict[str, Any]) -> None:
    small = {"x": torch.arange(3)}
    made = json.loads(signed(value, small))
    assert is_signed(made, small)
    assert not is_signed(made, {"x": torch.arange(3) + 1})
    assert not is_signed(made | {"a": 9}, small)
    assert not is_signed(value, small)
