"""Stored tensors read into memory: every number at its place, whatever the pieces, and what cannot be read refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.errors import CapacityError, ModelError
from lce.weights import safetensors_file as reading
from lce.weights.safetensors_file import DTYPES, TensorInfo, allocate, fill

CPU = torch.device("cpu")
KINDS = sorted(DTYPES)


def stored(path: Path, tensors: list[tuple[str, Tensor]], gap: int = 0) -> tuple[int, list[TensorInfo]]:
    """The tensors behind each other in a file, `gap` bytes between them: its descriptor, and where each lies."""
    infos, data = [], b""
    for kind, tensor in tensors:
        data += bytes(gap)
        raw = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        infos.append(TensorInfo(path, kind, tuple(tensor.shape), len(data), len(data) + len(raw)))
        data += raw
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY), infos


def bits(kind: str, pattern: int) -> Tensor:
    """The number of this kind with these bits."""
    width = DTYPES[kind].itemsize
    raw = torch.frombuffer(bytearray(pattern.to_bytes(width, "little")), dtype=torch.uint8)
    return raw.view(DTYPES[kind])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 24)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)), min_size=5, max_size=5),
    gap=st.integers(0, 3),
    piece=st.sampled_from([8, 24, 4096]),
)
def test_every_number_comes_to_its_place(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]], kinds: list[tuple[str, str]], gap: int, piece: int,
) -> None:  # fmt: skip
    draw, path = torch.Generator().manual_seed(0), tmp_path_factory.getbasetemp() / "stored"
    tensors = [
        (a, torch.randn(shape, generator=draw).to(DTYPES[a])) for shape, (a, _) in zip(shapes, kinds, strict=False)
    ]
    wanted = [DTYPES[b] for _, (_, b) in zip(shapes, kinds, strict=False)]
    descriptor, infos = stored(path, tensors, gap)
    outs = allocate([(info.shape, dtype) for info, dtype in zip(infos, wanted, strict=True)], CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", piece)
        fill(
            {f"{i}": out for i, out in enumerate(outs)},
            {f"{i}": info for i, info in enumerate(infos)},
            {path: descriptor},
        )
    os.close(descriptor)
    for (_, tensor), out, dtype in zip(tensors, outs, wanted, strict=True):
        assert (out.dtype, out.shape) == (dtype, tensor.shape)
        assert torch.equal(out, tensor.to(dtype))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("out_kind", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_refused_where_they_are_not_finite_as_loaded(tmp_path: Path, kind: str, out_kind: str) -> None:
    """Around the border, of both signs: a number is refused if and only if torch makes NaN or infinity of it."""
    dtype, sign = DTYPES[kind], 1 << (8 * DTYPES[kind].itemsize - 1)
    special = torch.tensor([math.inf, 65504.0, 65519.0, 65520.0, 65536.0, 3.3895e38, 3.396e38, 1e-40, 0.0]).to(dtype)
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    edges = [int(x) + d for x in special.view(width).tolist() for d in (-1, 0, 1)]
    for pattern in sorted({(edge | s) % (2 * sign) for edge in edges for s in (0, sign)}):
        number = bits(kind, pattern)
        row = torch.ones(20, dtype=dtype)
        row[13] = number
        descriptor, (info,) = stored(tmp_path / "stored", [(kind, row)])
        out = torch.empty(20, dtype=DTYPES[out_kind])
        if torch.isfinite(number.to(out.dtype)).all():
            fill({"w": out}, {"w": info}, {info.file: descriptor})
            assert torch.equal(out, row.to(out.dtype))
        else:
            message = "numbers" if torch.isfinite(number).all() else "NaN"
            with pytest.raises(ModelError, match=f"stored: tensor 'w' has .*{message}"):
                fill({"w": out}, {"w": info}, {info.file: descriptor})
        os.close(descriptor)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("length", range(0, 160, 13))
def test_a_file_that_is_too_short(tmp_path: Path, length: int) -> None:
    descriptor, (info,) = stored(tmp_path / "stored", [("F32", torch.ones(40))])
    os.truncate(tmp_path / "stored", length)
    with pytest.raises(ModelError, match="stored: the file was cut short while it was read"):
        fill({"w": torch.empty(40)}, {"w": info}, {info.file: descriptor})
    os.close(descriptor)


def test_a_disk_that_fails(tmp_path: Path) -> None:
    descriptor, (info,) = stored(tmp_path / "stored", [("F32", torch.ones(40))])
    os.close(descriptor)
    with pytest.raises(ModelError, match=r"stored cannot be read \(Bad file descriptor\)"):
        fill({"w": torch.empty(40)}, {"w": info}, {info.file: descriptor})


def test_memory_that_is_not_there() -> None:
    with pytest.raises(CapacityError, match=r"no memory for 1048576\.0 TiB of weights"):
        allocate([((1 << 58,), torch.float32)], CPU)
