"""The header of a context file: read whole and exactly, or refused in a line, whatever somebody wrote there."""

import json
import os
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.cache import manifest as module
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.manifest import FORMAT, Header, Manifest, read_header, read_tensors, signed, tensor_entries, tensors_of
from lce.cache.method_state import FileTensor, MethodState, OpenChunk, RecentRows, Staged, Summaries, TokenRows
from lce.errors import CapacityError, DataError

GOOD: dict[str, Any] = {"format": FORMAT, "lce": "1", "file_id": "0123456789abcdef", "identity": {}, "pages": {}}
GOOD |= {"text": "", "capacity": 9, "read": 5, "announced": 7}
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
    assert (header.manifest.raw, header.entries) == (GOOD, {"tokens": 3})
    assert header.start + 5 == header.file_bytes == (tmp_path / "file").stat().st_size


HOSTILE = {
    "nesting": "[" * 5000,
    "closed nesting": '{"a":' * 3000 + "1" + "}" * 3000,
    "NaN": '{"a": NaN}',
    "inf": '{"a": 1e999}',
    "-inf": '{"a": -Infinity}',
    "huge": '{"a": 1' + "0" * 5000 + "}",
    "twice": '{"a": 1, "a": 2}',
    "list": "[1]",
    "text": '"a"',
    "number": "3",
    "nothing": "",
    "lone quote": '{"',
    "surrogate": '{"\\ud800": 1}',
    "NUL": "\0",
}


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


@settings(deadline=None)
@given(name=st.sampled_from(sorted(GOOD.keys() - {"format", "lce"})), value=VALUES)
def test_every_entry_is_of_its_kind(name: str, value: object) -> None:
    kind, number = type(GOOD[name]), value if type(value) is int else -1
    fits = {"capacity": 5 <= number <= 1 << 40, "read": 0 <= number <= 9, "announced": 0 <= number <= 1 << 40}
    fits["file_id"] = False  # 16 hexadecimal digits
    if type(value) is kind and fits.get(name, True):
        assert getattr(Manifest.of(GOOD | {name: value}, PATH), name) == value
        return
    with pytest.raises(DataError, match="its header contradicts its contents"):
        Manifest.of(GOOD | {name: value}, PATH)
    with pytest.raises(DataError):
        Manifest.of({key: x for key, x in GOOD.items() if key != name}, PATH)


@pytest.mark.parametrize("value", [-1, 6, True, None, "5"])
def test_at_most_the_cached_tokens_were_read(value: object) -> None:
    assert (Manifest.of(GOOD, PATH).only_read, Manifest.of(GOOD | {"only_read": 5}, PATH).only_read) == (0, 5)
    with pytest.raises(DataError, match="its header contradicts its contents"):
        Manifest.of(GOOD | {"only_read": value}, PATH)


# The small tensors: each is what a context may have there, before a byte of it is read.
N = 21  # tokens; a chunk has 8


def states(layout: CacheLayout) -> Mapping[str, MethodState]:
    return {
        "rows": TokenRows(4 * 4),
        "summaries": Summaries(2 * 4 * 4, 8),
        "recent": RecentRows(6, 2 * 4 * 4),
        "open": OpenChunk(8, 2 * 4 * 4),
        "staged": Staged(lambda n_tokens, block: 12),
    }


LAYOUT = CacheLayout(2, 2, 2, 4, torch.float32, torch.device("cpu"), AccessPattern(8), make_state=states)
KEPT = {
    f"layers/{layer}/{name}": tensor
    for layer in range(2)
    for name, tensor in (
        (f"rows/{N}", torch.rand(N, 4)),
        ("summaries/2", torch.rand(2, 2, 4)),
        (f"recent/{N - 6}", torch.rand(2, 6, 4)),
        ("open/2", torch.rand(2, 8, 4)),
        ("staged/0", torch.rand(3)),
    )
}


def check(tensors: Mapping[str, Tensor], layout: CacheLayout = LAYOUT, n: int = N) -> None:
    found = {name: FileTensor(x.dtype, tuple(x.shape), 0, x.nbytes) for name, x in tensors.items()}
    module.check_state(layout, n, found, PATH)


def test_what_a_method_keeps_is_accepted() -> None:
    check(KEPT)
    check({})
    check({name: x for name, x in KEPT.items() if "/open/" not in name})


def test_keys_at_other_positions_are_refused() -> None:
    """A file of before, when the same method cached keys at their positions, and one that such an lce would misread."""
    turned = replace(LAYOUT, access=replace(LAYOUT.access, turned=True))
    for written, reader in ((LAYOUT, turned), (turned, LAYOUT)):
        manifest = Manifest.of({**GOOD, "pages": module.page_facts(written)}, PATH)
        with pytest.raises(DataError, match="has keys at other positions than this lce caches them; prefill the text"):
            module.read_small(Header(0, PATH, {}, manifest, 16, 16), reader, lambda *_: None)


WRONG: dict[str, tuple[str, Tensor]] = {
    "a layer that is not there": (f"2/rows/{N}", torch.rand(N, 4)),
    "no name of a state": ("0/other/3", torch.rand(3)),
    "no name of a layer": (f"00/rows/{N}", torch.rand(N, 4)),
    "no name at all": ("x", torch.rand(3)),
    "no number": ("0/rows", torch.rand(N, 4)),
    "another part": (f"0/rows/more/{N}", torch.rand(N, 4)),
    "too many bytes": ("0/staged/0", torch.rand(4)),
    "too many bytes in a row": (f"0/rows/{N}", torch.rand(N, 5)),
    "a number of another kind": (f"0/rows/{N}.0", torch.rand(N, 4)),
    "a number written otherwise": (f"0/rows/0{N}", torch.rand(N, 4)),
    "no dimension": ("0/rows/0", torch.tensor(1.0)),
    "whole numbers": (f"1/rows/{N}", torch.ones(N, 4, dtype=torch.int32)),
    "a row too few": (f"1/rows/{N}", torch.rand(N - 1, 4)),
    "more rows than tokens": (f"1/rows/{N + 1}", torch.rand(N + 1, 4)),
    "recent rows from elsewhere": (f"0/recent/{N - 7}", torch.rand(2, 6, 4)),
    "recent rows of other heads": (f"0/recent/{N - 6}", torch.rand(1, 6, 4)),
    "too few recent rows": (f"0/recent/{N - 5}", torch.rand(2, 5, 4)),
    "a chunk that is not open": ("0/open/1", torch.rand(2, 8, 4)),
    "an open chunk of another size": ("0/open/2", torch.rand(2, 4, 4)),
    "made after more tokens than there are": ("0/staged/1000000", torch.rand(3)),
    "a number below all": ("0/rows/-1", torch.rand(N, 4)),
}


@pytest.mark.parametrize(("name", "tensor"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(name: str, tensor: Tensor) -> None:
    with pytest.raises(DataError, match="its header contradicts its contents"):
        check({f"layers/{name}" if name != "x" else name: tensor})


def test_a_state_is_there_once() -> None:
    check(KEPT | {"layers/0/staged/0": torch.rand(3)})
    with pytest.raises(DataError):
        check(KEPT | {"layers/0/staged/1": torch.rand(3)})


def header_with(entries: Mapping[str, Any], file_bytes: int, start: int = 16) -> Header:
    return Header(0, PATH, entries, Manifest.of(GOOD, PATH), start, file_bytes)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 5), max_size=5), before=st.integers(0, 40))
def test_entries_are_read_as_they_were_written(sizes: list[int], before: int) -> None:
    kinds = (torch.int32, torch.bfloat16)
    tensors = {f"t{i}": torch.zeros(size, 2, dtype=kinds[i % 2]) for i, size in enumerate(sizes)}
    n_bytes = sum(x.nbytes for x in tensors.values())
    entries, start = tensor_entries(tensors, before), 16 + before
    found = tensors_of(header_with(entries, start + n_bytes), start, {})
    assert {name: (x.dtype, x.shape, x.n_bytes) for name, x in found.items()} == {
        name: (x.dtype, tuple(x.shape), x.nbytes) for name, x in tensors.items()
    }
    for wrong in (-1, 1):
        with pytest.raises(DataError, match="it is damaged or incomplete: prefill the text again"):
            tensors_of(header_with(entries, start + n_bytes + wrong), start, {})


ODD = [None, 3, -1, "", "F33", [], {}, [1], [-1], [2**62], [2**17] * 3, [1.0], [True], [[1]], [1] * 99, {"a": 1}]


@pytest.mark.parametrize("value", ODD, ids=str)
def test_an_entry_that_is_none_is_refused(value: object) -> None:
    entry = tensor_entries({"x": torch.zeros(4)})["x"]
    for other in (value, *({**entry, key: value} for key in entry), {**entry, "more": value}):
        with pytest.raises(DataError, match="contradicts its contents"):
            tensors_of(header_with({"x": other}, 32), 16, {})


def test_what_is_read_is_what_was_signed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(torch.arange(4.0).numpy().tobytes())
    tensors, truth = {"x": FileTensor(torch.float32, (2, 2), 0, 16)}, torch.arange(4.0).view(2, 2)
    made = json.loads(signed(GOOD, {"x": truth}))
    with (tmp_path / "file").open("rb") as file:
        header = replace(header_with({}, 16), descriptor=file.fileno(), manifest=Manifest.of(made, PATH))
        assert torch.equal(read_tensors(header, tensors)["x"], truth)
        for other in (made | {"text": "a"}, GOOD, made | {"digest": None}):
            with pytest.raises(DataError, match="was altered since it was written"):
                read_tensors(replace(header, manifest=Manifest.of(other, PATH)), tensors)
        with pytest.raises(DataError, match="was cut short since it was opened"):
            read_tensors(header, {"x": FileTensor(torch.float32, (5,), 0, 20)})


def test_what_memory_cannot_hold_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda device: 1 << 20)
    with pytest.raises(CapacityError, match=r"needs 8\.0 GiB of memory"):
        read_tensors(header_with({}, 1 << 33), {"x": FileTensor(torch.float32, (1 << 31,), 0, 1 << 33)})
