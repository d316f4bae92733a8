"""Slices of checkpoints: the rows and the columns that are asked for, to the bit, of any type and order."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lce.errors import UsageError
from lce.weights.checkpoint import Checkpoint
from lce.weights.packed import ROUNDED
from lce.weights.slices import Slice, block_size, check_cuts, sliced
from tests.gguf_files import write_gguf
from tests.weights.test_gguf_packed import array, loaded, opened, unpacked

SLICES = {"rows": Slice([(16, 48)]), "runs of rows": Slice([(0, 16), (32, 64), (80, 96)])}
SLICES |= {"columns": Slice(columns=(256, 768)), "rows and columns": Slice([(32, 96)], (0, 256))}
each_slice = pytest.mark.parametrize("part", [pytest.param(part, id=name) for name, part in SLICES.items()])
ORDER = np.arange(96).reshape(6, 2, 8).swapaxes(1, 2).reshape(-1)  # exchanges rows within heads of 16


def cut(whole: Tensor, part: Slice) -> Tensor:
    rows = whole if part.rows is None else torch.cat([whole[first:stop] for first, stop in part.rows])
    return rows if part.columns is None else rows[:, slice(*part.columns)]


@each_slice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ordered", [False, True])
def test_slices_of_safetensors(part: Slice, dtype: torch.dtype, ordered: bool, tmp_path: Path) -> None:
    whole = torch.from_numpy(array(96, 1024)).to(dtype)
    save_file({"w": whole, "other": whole[:1].clone()}, tmp_path / "model.safetensors")
    checkpoint = replace(Checkpoint.open(tmp_path), orders={"w": ORDER} if ordered else {})
    found = loaded(sliced(checkpoint, {"w": part}), dtype)
    assert torch.equal(found["w"], cut(whole[torch.from_numpy(ORDER)] if ordered else whole, part))
    assert torch.equal(found["other"], whole[:1])


@each_slice
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_slices_of_quantised_matrices(part: Slice, kind: str, tmp_path: Path) -> None:
    path, values = write_gguf(tmp_path / "a.gguf", {"w": array(96, 1024)}, kind)
    checkpoint = opened(path, {"w": ORDER})
    matrix = loaded(sliced(checkpoint, {"w": part}))["w"]
    assert torch.equal(unpacked(matrix), cut(torch.from_numpy(values["w"][ORDER]), part))


def test_a_slice_of_a_vector(tmp_path: Path) -> None:
    save_file({"bias": torch.arange(96.0)}, tmp_path / "model.safetensors")
    checkpoint = replace(Checkpoint.open(tmp_path), orders={"bias": ORDER})
    found = loaded(sliced(checkpoint, {"bias": Slice([(16, 48)])}), torch.float32)["bias"]
    assert found.tolist() == ORDER[16:48].tolist()


def test_no_block_of_weights_is_cut(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "a.gguf", {"q": array(32, 512), "f": array(32, 512)}, {"q": "Q4_K"})
    checkpoint = opened(path)
    assert [block_size(checkpoint, name, None) for name in ("q", "f")] == [256, 1]
    assert [block_size(checkpoint, "f", ROUNDED[name]) for name in ("int8", "int4")] == [128, 32]
    check_cuts(checkpoint, "q", 256, [0, 256])
    with pytest.raises(UsageError, match="at column 128, within a block of 256"):
        check_cuts(checkpoint, "q", 256, [128])
