"""What is small in a context file: each tensor is what a context may have there, before a byte of it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lce.cache import file_tensors as module
from lce.cache.file_tensors import FileTensor, check_numbers, check_state, read_tensors, tensor_entries, tensors_of
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.manifest import Header, digest
from lce.cache.method_state import MethodState, OpenChunk, RecentRows, Staged, Summaries, TokenRows
from lce.errors import CapacityError, DataError

N = 21  # tokens; a chunk has 8
PATH = Path("document.lce")


def states(layout: CacheLayout) -> Mapping[str, MethodState]:
    return {
        "rows": TokenRows(4 * 4), "summaries": Summaries(2 * 4 * 4, 8), "recent": RecentRows(6, 2 * 4 * 4),
        "open": OpenChunk(8, 2 * 4 * 4), "staged": Staged(lambda n_tokens, block: 12),
    }  # fmt: skip


LAYOUT = CacheLayout(2, 2, 2, 4, torch.float32, torch.device("cpu"), AccessPattern(8), make_state=states)
GOOD = {
    f"layers/{layer}/{name}/{part}": x
    for layer in range(2)
    for name, tensor, number in (
        ("rows", torch.rand(N, 4), N), ("summaries", torch.rand(2, 2, 4), 2), ("recent", torch.rand(2, 6, 4), N - 6),
        ("open", torch.rand(2, 8, 4), 2), ("staged", torch.rand(3), 0),
    )
    for part, x in (("tensor", tensor), ("number", torch.tensor(number)))
}  # fmt: skip


def described(tensors: Mapping[str, Tensor]) -> dict[str, FileTensor]:
    return {name: FileTensor(x.dtype, tuple(x.shape), 0, x.nbytes) for name, x in tensors.items()}


def check(tensors: Mapping[str, Tensor], layout: CacheLayout = LAYOUT, n: int = N) -> None:
    check_state(layout, n, described(tensors), PATH)
    check_numbers(layout, n, tensors, PATH)


def test_what_a_method_keeps_is_accepted() -> None:
    check(GOOD)
    check({})
    check({name: x for name, x in GOOD.items() if "/open/" not in name})


SCALAR, PARTS = torch.tensor(3), ("tensor", "number")
WRONG: dict[str, Mapping[str, Tensor]] = {
    "a layer that is not there": {
        f"layers/{at}/rows/{part}": GOOD[f"layers/0/rows/{part}"] for part in ("tensor", "number") for at in (2,)
    },
    "no name of a state": {"layers/0/other/tensor": torch.rand(3), "layers/0/other/number": SCALAR},
    "no name of a layer": {"layers/00/rows/tensor": torch.rand(N, 4), "layers/00/rows/number": SCALAR},
    "no name at all": {"x": torch.rand(3)},
    "another part": {"layers/0/rows/more": SCALAR},
    "too many bytes": {"layers/0/staged/tensor": torch.rand(4)},
    "a number of another kind": {"layers/0/rows/number": torch.tensor(21.0)},
    "a number that is several": {"layers/0/rows/number": torch.tensor([21])},
    "rows that are no numbers": {"layers/1/rows/tensor": torch.full((N, 4), torch.nan)},
    "whole numbers": {"layers/1/rows/tensor": torch.ones(N, 4, dtype=torch.int32)},
    "a row too few": {"layers/1/rows/tensor": torch.rand(N - 1, 4)},
    "more rows than tokens": {
        "layers/1/rows/tensor": torch.rand(N + 1, 4),
        "layers/1/rows/number": torch.tensor(N + 1),
    },
    "recent rows from elsewhere": {"layers/0/recent/number": torch.tensor(N - 7)},
    "recent rows of other heads": {"layers/0/recent/tensor": torch.rand(1, 6, 4)},
    "too few recent rows": {
        "layers/0/recent/tensor": torch.rand(2, 5, 4),
        "layers/0/recent/number": torch.tensor(N - 5),
    },
    "a chunk that is not open": {"layers/0/open/number": torch.tensor(1)},
    "an open chunk of another size": {"layers/0/open/tensor": torch.rand(2, 4, 4)},
    "made after more tokens than there are": {"layers/0/staged/number": torch.tensor(10**6)},
    "a number below all": {"layers/0/rows/number": torch.tensor(-1)},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(changes: Mapping[str, Tensor]) -> None:
    with pytest.raises(DataError, match="its header contradicts its contents"):
        check(GOOD | dict(changes))


def test_half_a_state_is_refused() -> None:
    for name in GOOD:
        with pytest.raises(DataError):
            check({other: x for other, x in GOOD.items() if other != name})


def header_of(entries: Mapping[str, Any], file_bytes: int, start: int = 16) -> Header:
    return Header(entries, {}, start, file_bytes)


@given(sizes=st.lists(st.integers(0, 5), max_size=5), before=st.integers(0, 40))
def test_entries_are_read_as_they_were_written(sizes: list[int], before: int) -> None:
    tensors = {
        f"t{i}": torch.zeros(size, 2, dtype=(torch.int32, torch.bfloat16)[i % 2]) for i, size in enumerate(sizes)
    }
    n_bytes = sum(x.nbytes for x in tensors.values())
    entries, start = tensor_entries(tensors, before), 16 + before
    found = tensors_of(header_of(entries, start + n_bytes), start, {}, PATH)
    assert {name: (x.dtype, x.shape, x.n_bytes) for name, x in found.items()} == {
        name: (x.dtype, tuple(x.shape), x.nbytes) for name, x in tensors.items()
    }
    for wrong in (-1, 1):
        with pytest.raises(DataError, match="it is damaged or incomplete: prefill the text again"):
            tensors_of(header_of(tensor_entries(tensors, before), 16 + before + n_bytes + wrong), 16 + before, {}, PATH)


ODD = [
    None,
    3,
    -1,
    "",
    "F33",
    [],
    {},
    [1],
    [-1],
    [2**62],
    [2**17, 2**17, 2**17],
    [1.0],
    [True],
    [[1]],
    [1] * 99,
    {"a": 1},
]


@pytest.mark.parametrize("value", ODD, ids=str)
def test_an_entry_that_is_none_is_refused(value: object) -> None:
    entry = tensor_entries({"x": torch.zeros(4)})["x"]
    others = [value, *({**entry, key: value} for key in entry), {**entry, "more": value}]
    for other in others:
        with pytest.raises(DataError, match="contradicts its contents"):
            tensors_of(header_of({"x": other}, 32), 16, {}, PATH)


def test_what_is_read_is_what_was_signed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(torch.arange(4.0).numpy().tobytes())
    tensors, manifest = {"x": FileTensor(torch.float32, (2, 2), 0, 16)}, {"a": 1}
    signed = manifest | {"digest": digest({"x": torch.arange(4.0).view(2, 2)}, manifest)}
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    assert torch.equal(read_tensors(descriptor, PATH, tensors, signed)["x"], torch.arange(4.0).view(2, 2))
    for other in (signed | {"a": 2}, manifest, signed | {"digest": None}):
        with pytest.raises(DataError, match="was altered since it was written"):
            read_tensors(descriptor, PATH, tensors, other)
    with pytest.raises(DataError, match="was cut short while it was read"):
        read_tensors(descriptor, PATH, {"x": FileTensor(torch.float32, (5,), 0, 20)}, signed)
    os.close(descriptor)


def test_what_memory_cannot_hold_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda device: 1 << 20)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 33)
    with (tmp_path / "file").open("rb") as file, pytest.raises(CapacityError, match=r"needs 8\.0 GiB of memory"):
        read_tensors(file.fileno(), PATH, {"x": FileTensor(torch.float32, (1 << 31,), 0, 1 << 33)}, {})


@pytest.mark.parametrize("n", [1, 6, 7, 8, 16])
def test_states_of_short_texts(n: int) -> None:
    """What the kinds themselves save of them."""
    layout, tensors = replace(LAYOUT, n_layers=1), {}
    for name, state in states(LAYOUT).items():
        if isinstance(state, TokenRows):
            state.write(torch.rand(n, 4), 0)
        elif isinstance(state, RecentRows):
            state.write(torch.rand(2, n, 4), 0)
        elif isinstance(state, Summaries) and n >= 8:
            state.write(torch.rand(2, n // 8, 4), 0)
        elif isinstance(state, OpenChunk) and n % 8:
            state.write(torch.rand(2, n % 8, 4), n // 8 * 8)
        state.commit()
        tensors |= {f"layers/0/{name}/{part}": x for part, x in state.tensors(n).items()}
    check(tensors, layout, n)
