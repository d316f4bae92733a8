"""Products with GGUF blocks on a GPU, or in Triton's interpreter, beside the weights of the gguf package in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lce.kernels.product.blocks import BLOCK_TYPES, BlockMatrix
from lce.weights.checkpoint import Checkpoint
from lce.weights.gguf_file import read_gguf
from lce.weights.gguf_packed import GPU_SCHEMES, Blocks, fill_blocks
from lce.weights.safetensors_file import opened
from tests.gguf_files import write_gguf
from tests.kernels import truth
from tests.kernels.truth import DEVICE, EPS, ON_GPU, random

pytestmark = ON_GPU


def matrix_of(path: Path, kind: str, n_rows: int, size: int) -> tuple[BlockMatrix, Tensor]:
    """Return a matrix, and the weights that the gguf package unpacks from its file."""
    file, values = write_gguf(path / "a.gguf", {"w": random(n_rows, size).numpy() / size**0.5}, kind)
    checkpoint = Checkpoint(file, (found := read_gguf(file)).tensors, found.stamps)
    info, scheme = checkpoint.tensors["w"], GPU_SCHEMES[kind]
    assert scheme.n_bytes((n_rows, size)) == info.stop - info.start, "as many bytes as in the file"
    parts = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in scheme.parts((n_rows, size)).items()}
    with opened(checkpoint.stamps) as files:
        fill_blocks([Blocks("w", info, None, parts, torch.bfloat16)], files)
    matrix = scheme.matrix((n_rows, size), {name: part.to(DEVICE) for name, part in parts.items()})
    assert isinstance(matrix, BlockMatrix)
    return matrix, torch.from_numpy(values["w"]).to(DEVICE)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_weights_and_products_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    size = 1280 if BLOCK_TYPES[kind].size == 256 else 1120  # more than one step, the last one ragged
    matrix, weights = matrix_of(tmp_path, kind, 6, size)
    torch.testing.assert_close(matrix.unpacked(2, weights.new_empty(3, size)), weights[2:5], rtol=1e-6, atol=1e-7)
    ids = torch.tensor([5, 0, 5], device=DEVICE)
    torch.testing.assert_close(matrix.rows(ids, torch.float32), weights[ids], rtol=1e-6, atol=1e-7)
    x = random(2, size).to(DEVICE)
    torch.testing.assert_close(matrix.product(x).double(), truth.product(x, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "kind"), [(1, "Q4_K"), (3, "Q6_K"), (4, "Q8_0")])
def test_what_is_around_a_product(tmp_path: Path, n: int, kind: str) -> None:
    size, rows = 256, 10
    matrix, weights = matrix_of(tmp_path, kind, rows, size)
    x, bias, norm, onto = (random(*s, seed=i).to(DEVICE) for i, s in enumerate([(n, size), (rows,), (size,), (n, 5)]))
    expected = truth.product(x, weights, bias, norm=norm, gate="silu", onto=onto)
    out = matrix.product(x, bias, norm=norm, eps=EPS, gated=True, onto=onto)
    assert out is onto
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    half = matrix.product(x.bfloat16(), norm=norm.bfloat16(), eps=EPS)
    assert half.dtype is torch.bfloat16
    expected = truth.product(x.bfloat16(), weights, norm=norm.bfloat16())
    torch.testing.assert_close(half.double(), expected, rtol=2e-2, atol=2e-2)


def test_a_fields_order_of_rows(tmp_path: Path) -> None:
    file, values = write_gguf(tmp_path / "a.gguf", {"w": random(8, 64).numpy()}, "Q5_1")
    found, scheme, order = read_gguf(file), GPU_SCHEMES["Q5_1"], np.random.default_rng(1).permutation(8)
    parts = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in scheme.parts((8, 64)).items()}
    with opened(found.stamps) as files:
        fill_blocks([Blocks("w", found.tensors["w"], order, parts, torch.float16)], files)
    matrix = scheme.matrix((8, 64), {name: part.to(DEVICE) for name, part in parts.items()})
    out = matrix.unpacked(0, torch.empty(8, 64, device=DEVICE))
    torch.testing.assert_close(out.cpu(), torch.from_numpy(values["w"][order]), rtol=1e-6, atol=1e-7)
