"""The header of a safetensors file: what it says of a good file, and that a damaged one is refused."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lce.errors import ModelError
from lce.weights.checkpoint import Checkpoint
from lce.weights.safetensors_file import LARGEST_HEADER, TensorInfo, pread, read_header
from tests.checkpoints import raw_safetensors, tensor_entry


def test_every_tensor_and_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"norm": torch.tensor([1.5, -2.0]), "embed": torch.arange(6.0).view(2, 3).to(torch.bfloat16)}
    save_file(tensors, path, metadata={"format": "pt", "note": "é"})
    infos, metadata, _ = read_header(path)
    assert metadata == {"format": "pt", "note": "é"}
    assert infos["norm"] == TensorInfo(path, "F32", (2,), infos["norm"].start, infos["norm"].start + 8)
    assert (infos["embed"].dtype, infos["embed"].shape) == ("BF16", (2, 3))
    with path.open("rb") as file:
        for name, info in infos.items():
            raw = pread(file.fileno(), info.stop - info.start, info.start, path)
            assert raw == bytes(tensors[name].contiguous().view(torch.uint8).flatten().tolist())


PAIR = {"a": tensor_entry("F32", [2], 0, 8), "b": tensor_entry("F32", [2], 8, 16)}
DAMAGED: list[tuple[bytes, str]] = [
    (b"", "a header of 0 bytes does not fit in a file of 0"),
    (b"\x02\0\0", "does not fit in a file of 3"),
    (struct.pack("<Q", 2**64 - 1) + b"{}", "a header of 18446744073709551615 bytes does not fit"),
    (struct.pack("<Q", 3) + b"{}", "a header of 3 bytes does not fit"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer.*git lfs pull"),
    (raw_safetensors(b""), "does not begin with '{'"),
    (raw_safetensors(b" {}"), "does not begin with '{'"),
    (raw_safetensors([]), "does not begin with '{'"),
    (raw_safetensors(b"{]"), "not valid JSON"),
    (raw_safetensors(b'{"\xff": 1}'), "not valid JSON"),
    (raw_safetensors(b'{"a":' * 100_000), "not valid JSON"),
    (raw_safetensors(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"), "not valid JSON"),
    (raw_safetensors(b'{"a": 1, "a": 2}'), "a name appears twice"),
    (raw_safetensors(b'{"__metadata__": {"x": "1", "x": "2"}}'), "a name appears twice"),
    (raw_safetensors({"__metadata__": {"format": 1}}), "__metadata__ is not an object of strings"),
    (raw_safetensors({"__metadata__": "pt"}), "__metadata__ is not an object of strings"),
    (raw_safetensors({"a": [1]}), "tensor 'a' is not described by"),
    (raw_safetensors({"a": {"dtype": "F32", "shape": [0]}}), "tensor 'a' is not described by"),
    (raw_safetensors({"a": tensor_entry("F32", [0], 0, 0) | {"more": 1}}), "tensor 'a' is not described by"),
    (raw_safetensors({"a": tensor_entry("F33", [0], 0, 0)}), "unknown dtype 'F33'"),
    (raw_safetensors({"a": tensor_entry(32, [0], 0, 0)}), "unknown dtype 32"),
    (raw_safetensors({"a": tensor_entry(["F32"], [0], 0, 0)}), r"unknown dtype \['F32'\]"),
    (raw_safetensors({"a": tensor_entry("F32", 2, 0, 8)}, bytes(8)), "impossible shape 2"),
    (raw_safetensors({"a": tensor_entry("F32", [-2, -1], 0, 8)}, bytes(8)), r"impossible shape \[-2, -1\]"),
    (raw_safetensors({"a": tensor_entry("F32", [2.0], 0, 8)}, bytes(8)), r"impossible shape \[2.0\]"),
    (raw_safetensors({"a": tensor_entry("F32", [True, 2], 0, 8)}, bytes(8)), r"impossible shape \[True, 2\]"),
    (raw_safetensors({"a": tensor_entry("F32", [2**62, 4], 0, 0)}), r"impossible shape \[4611686018427387904, 4\]"),
    (raw_safetensors({"a": tensor_entry("F32", [2**47, 2**17], 0, 0)}), "shape and dtype take 73786976294838206464"),
    (raw_safetensors({"a": tensor_entry("F32", [1] * 100, 0, 4)}, bytes(4)), "impossible shape"),
    (raw_safetensors({"a": tensor_entry("F32", [2], 8, 0)}, bytes(8)), "impossible data_offsets"),
    (raw_safetensors({"a": tensor_entry("F32", [2], -8, 0)}, bytes(8)), "impossible data_offsets"),
    (raw_safetensors({"a": tensor_entry("F32", [2], 0.0, 8)}, bytes(8)), "impossible data_offsets"),
    (raw_safetensors({"a": tensor_entry("F32", [2], False, 8)}, bytes(8)), "impossible data_offsets"),
    (raw_safetensors({"a": tensor_entry("F32", [2], 0, 8) | {"data_offsets": [8]}}, bytes(8)), "impossible data_off"),
    (raw_safetensors({"a": tensor_entry("F32", [3], 0, 8)}, bytes(8)), "has 8 bytes; its shape and dtype take 12"),
    (raw_safetensors({"a": tensor_entry("BF16", [2], 0, 8)}, bytes(8)), "has 8 bytes; its shape and dtype take 4"),
    (raw_safetensors(PAIR | {"b": tensor_entry("F32", [2], 4, 12)}, bytes(12)), "'b' overlaps the one before it"),
    (raw_safetensors(PAIR | {"b": tensor_entry("F32", [2], 0, 8)}, bytes(8)), "tensor 'b' overlaps the one before it"),
    (raw_safetensors(PAIR | {"b": tensor_entry("F32", [2], 12, 20)}, bytes(20)), "tensor 'b' leaves a hole before it"),
    (raw_safetensors({"a": tensor_entry("F32", [2], 4, 12)}, bytes(12)), "tensor 'a' leaves a hole before it"),
    (raw_safetensors(PAIR, bytes(17)), "has bytes that belong to no tensor"),
    (raw_safetensors(PAIR, bytes(15)), "the file is cut short"),
    (raw_safetensors(PAIR), "the file is cut short"),
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
    monkeypatch.setattr("lce.weights.safetensors_file.MOST_TENSORS", 30)
    weight_map = {}
    for shard in range(4):
        names = [f"{shard}.{i}" for i in range(10)]
        save_file({name: torch.ones(1) for name in names}, tmp_path / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(names, f"{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="its shards have more than 30 tensors"):
        Checkpoint.open(tmp_path)
