"""Safetensors files: damaged headers are refused, and tensors are read number by number, whatever the pieces."""

import json
import math
import os
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from lce.errors import CapacityError, ModelError
from lce.weights import safetensors_file as reading
from lce.weights.checkpoint import Checkpoint
from lce.weights.safetensors_file import DTYPES, LARGEST_HEADER, TensorInfo, allocate, fill, read_header
from tests.checkpoints import raw_safetensors, tensor_entry

PAIR = {"a": tensor_entry("F32", [2], 0, 8), "b": tensor_entry("F32", [2], 8, 16)}


def one(dtype: Any, shape: Any, start: Any, stop: Any, n_bytes: int = 8, **more: Any) -> bytes:
    """A file of one tensor, with this many bytes of data."""
    return raw_safetensors({"a": tensor_entry(dtype, shape, start, stop) | more}, bytes(n_bytes))


def second(start: int, stop: int) -> bytes:
    """A file of two tensors, of which the second one lies where it is said."""
    return raw_safetensors(PAIR | {"b": tensor_entry("F32", [2], start, stop)}, bytes(stop))


DAMAGED: list[tuple[bytes, str]] = [
    *((b"", "a header of 0 bytes does not fit in a file of 0"), (b"\x02\0\0", "does not fit in a file of 3")),
    (struct.pack("<Q", 2**64 - 1) + b"{}", "a header of 18446744073709551615 bytes does not fit"),
    (struct.pack("<Q", 3) + b"{}", "a header of 3 bytes does not fit"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer.*git lfs pull"),
    *((raw_safetensors(header), "does not begin with '{'") for header in (b"", b" {}", [])),
    *((raw_safetensors(header), "not valid JSON") for header in (b"{]", b'{"\xff": 1}', b'{"a":' * 100_000)),
    (raw_safetensors(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"), "not valid JSON"),
    (raw_safetensors(b'{"a": 1, "a": 2}'), "a name appears twice"),
    (raw_safetensors(b'{"__metadata__": {"x": "1", "x": "2"}}'), "a name appears twice"),
    *(
        (raw_safetensors({"__metadata__": x}), "__metadata__ is not an object of strings")
        for x in ({"format": 1}, "pt")
    ),
    *((raw_safetensors({"a": x}), "tensor 'a' is not described by") for x in ([1], {"dtype": "F32", "shape": [0]})),
    (one("F32", [0], 0, 0, 0, more=1), "tensor 'a' is not described by"),
    *((one("F33", [0], 0, 0, 0), "unknown dtype 'F33'"), (one(32, [0], 0, 0, 0), "unknown dtype 32")),
    (one(["F32"], [0], 0, 0, 0), r"unknown dtype \['F32'\]"),
    *((one("F32", x, 0, 8), f"impossible shape {re.escape(str(x))}") for x in (2, [-2, -1], [2.0], [True, 2])),
    (one("F32", [2**62, 4], 0, 0, 0), r"impossible shape \[4611686018427387904, 4\]"),
    (one("F32", [2**47, 2**17], 0, 0, 0), "shape and dtype take 73786976294838206464"),
    (one("F32", [1] * 100, 0, 4, 4), "impossible shape"),
    *((one("F32", [2], *ends), "impossible data_offsets") for ends in ((8, 0), (-8, 0), (0.0, 8), (False, 8))),
    (one("F32", [2], 0, 8, data_offsets=[8]), "impossible data_offsets"),
    (one("F32", [3], 0, 8), "has 8 bytes; its shape and dtype take 12"),
    (one("BF16", [2], 0, 8), "has 8 bytes; its shape and dtype take 4"),
    *((second(start, start + 8), "tensor 'b' overlaps the one before it") for start in (4, 0)),
    (second(12, 20), "tensor 'b' leaves a hole before it"),
    (one("F32", [2], 4, 12, 12), "tensor 'a' leaves a hole before it"),
    (raw_safetensors(PAIR, bytes(17)), "has bytes that belong to no tensor"),
    *((raw_safetensors(PAIR, data), "the file is cut short") for data in (bytes(15), b"")),
]


@pytest.mark.parametrize(("raw", "message"), DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(tmp_path / "model.safetensors")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", LARGEST_HEADER + 1))
        file.truncate(200_000_000)  # sparse
    with pytest.raises(ModelError, match=f"a header of {LARGEST_HEADER + 1} bytes; expected at most {LARGEST_HEADER}"):
        read_header(tmp_path / "model.safetensors")


UNBOUNDED: dict[str, bytes] = {
    "empty objects": b'{%s"z":{}}' % b"".join(b'"%d":{},' % i for i in range(350_000)),
    "a list of lists": b'{"a":[[%s]}' % (b"],[" * 1_300_000 + b"]"),
    "a list of numbers": b'{"a":[0%s]}' % (b",0" * 3_000_000),
    "names": b'{%s"z":0}' % b"".join(b'"%d":0,' % i for i in range(400_000)),
    "empty tensors": b'{%s"z":{}}'
    % b"".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' % i for i in range(60_000)),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_headers_that_would_fill_memory(tmp_path: Path, kind: str) -> None:
    """Refused in a moment, and before anything is built of them."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw_safetensors(UNBOUNDED[kind]))
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(ModelError, match="more than 600000 JSON values; expected far fewer"):
        read_header(file)
    assert time.process_time() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 2 * file.stat().st_size + (1 << 20)
    tracemalloc.stop()


def test_tensors_without_number_in_the_shards_of_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce.weights.folder.MOST_TENSORS", 30)
    weight_map = {}
    for shard in range(4):
        names = [f"{shard}.{i}" for i in range(10)]
        save_file({name: torch.ones(1) for name in names}, tmp_path / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(names, f"{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="its shards have more than 30 tensors"):
        Checkpoint.open(tmp_path)


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
def test_every_number_comes_to_its_place(tmp_path_factory: Any, shapes: Any, kinds: Any, gap: int, piece: int) -> None:
    draw, path = torch.Generator().manual_seed(0), tmp_path_factory.getbasetemp() / "stored"
    kinds = kinds[: len(shapes)]
    tensors = [(a, torch.randn(x, generator=draw).to(DTYPES[a])) for x, (a, _) in zip(shapes, kinds, strict=True)]
    wanted = [DTYPES[b] for _, b in kinds]
    descriptor, infos = stored(path, tensors, gap)
    outs = allocate([(info.shape, dtype) for info, dtype in zip(infos, wanted, strict=True)], CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", piece)
        names = [f"{i}" for i in range(len(outs))]
        fill(dict(zip(names, outs, strict=True)), dict(zip(names, infos, strict=True)), {path: descriptor})
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
        raw = bytearray(pattern.to_bytes(dtype.itemsize, "little"))
        number = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
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
