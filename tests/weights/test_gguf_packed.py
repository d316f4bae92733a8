"""GGUF tensors in memory: the weights of the gguf package to the bit, products with them, and what is refused."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.errors import ModelError
from lce.models.products import linear
from lce.weights.checkpoint import Checkpoint
from lce.weights.gguf_file import read_gguf
from lce.weights.gguf_packed import SCHEMES
from lce.weights.inspection import verify
from lce.weights.packed import ROUNDED, PackedMatrix, Stacked
from tests.command import output
from tests.gguf_files import write_gguf
from tests.pretended import Gpus

CPU = torch.device("cpu")
QUICK = ("Q4_K", "Q6_K")  # kernels of a layout compile for some seconds
FLOAT32 = ("Q4_0", "Q4_1", "Q4_K", "Q6_K")  # each way to add a group's sum of x, and none
each_type = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(kind, torch.bfloat16, marks=() if kind in QUICK else pytest.mark.slow) for kind in SCHEMES),
        *(pytest.param(kind, torch.float32, marks=pytest.mark.slow) for kind in FLOAT32),
    ],
)


def array(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def opened(path: Path, orders: Mapping[str, NDArray[np.int64]] | None = None) -> Checkpoint:
    file = read_gguf(path)
    return Checkpoint(path, file.tensors, file.stamps, orders=orders or {})


def loaded(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    wanted = {name: (name, shape) for name, shape in checkpoint.shapes.items()}
    return checkpoint.load(wanted, dtype=dtype, device=CPU, **options)


def unpacked(matrix: PackedMatrix) -> Tensor:
    return matrix.unpacked(0, torch.empty(matrix.shape))


def same_bits(got: Tensor, expected: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(got.numpy().view(np.uint32), expected.view(np.uint32)))


@each_type
@pytest.mark.parametrize("shape", [(40, 512), (21, 576), (300, 768)])
def test_weights_are_the_files_and_products_use_them(tmp_path: Path, kind: str, dtype: Any, shape: Any) -> None:
    """Rows in an order of their own, too, and a number of rows that is no whole number of blocks."""
    path, values = write_gguf(tmp_path / "a.gguf", {"w": array(*shape)}, kind)
    order = np.random.default_rng(1).permutation(shape[0])
    for orders in ({}, {"w": order}):
        checkpoint = opened(path, orders)
        if checkpoint.tensors["w"].dtype not in SCHEMES:
            pytest.skip("the type does not fit these rows")
        matrix = loaded(checkpoint, dtype)["w"]
        expected = values["w"][order] if orders else values["w"]
        assert same_bits(unpacked(matrix), expected)
    truth = torch.from_numpy(expected)
    ids = torch.tensor([shape[0] - 1, 3, 3, 0])
    assert torch.equal(matrix.rows(ids, torch.float32), truth[ids])
    assert torch.equal(matrix.unpacked(16, torch.empty(4, shape[1], dtype=dtype)), truth[16:20].to(dtype))
    for n, generated in ((1, True), (3, True), (1, False), (3, False), (40, False)):
        x = torch.from_numpy(array(n, shape[1], seed=2)).to(dtype)
        exact = x.double() @ truth.double().T
        got = linear(x, matrix, generated=generated)
        few = 1 if generated else 2  # read rows are multiplied with weights that are rounded to the dtype
        assert (got.double() - exact).norm() < few * 4 * torch.finfo(dtype).eps * exact.norm()
        if n == 3:
            assert torch.equal(linear(x[:1], matrix, generated=generated), got[:1])


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_bytes_of_a_matrix_are_as_planned(tmp_path: Path, kind: str) -> None:
    path, _ = write_gguf(tmp_path / "a.gguf", {"w": array(32, 512)}, kind)
    checkpoint = opened(path)
    scheme, parts = checkpoint.schemes["w"], loaded(checkpoint)["w"].parts
    assert scheme.n_bytes((32, 512)) == sum(part.nbytes for part in parts.values())
    if kind in ("Q4_0", "Q4_1", "Q8_0"):
        assert scheme.n_bytes((32, 512)) == checkpoint.tensors["w"].stop - checkpoint.tensors["w"].start
    assert (checkpoint.quantised, checkpoint.dtype()) == (kind, torch.bfloat16)


def test_tensors_of_one_layout_are_joined_and_others_stacked(tmp_path: Path) -> None:
    types = {"q": "Q8_0", "k": "Q5_0", "v": "Q4_1"}
    path, values = write_gguf(tmp_path / "a.gguf", {name: array(32, 64) for name in types}, types)
    order = np.random.default_rng(1).permutation(32)
    checkpoint = opened(path, {"k": order})
    found = loaded(checkpoint, joined={"qk": ("q", "k")})
    assert same_bits(unpacked(found["qk"]), np.concatenate([values["q"], values["k"][order]]))
    qkv = loaded(checkpoint, joined={"qkv": ("q", "k", "v")})["qkv"]
    assert isinstance(qkv, Stacked)
    assert same_bits(unpacked(qkv.parts[2]), values["v"])


def test_plain_tensors_and_vectors_get_the_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"norm": array(64), "half": array(32, 64), "bias": array(32), "w": array(16, 64)}
    path, values = write_gguf(tmp_path / "a.gguf", tensors, {"half": "F16", "w": "MXFP4"})
    order = np.arange(32)[::-1].copy()
    found = loaded(opened(path, {"half": order, "bias": order}), torch.float32)
    for name in ("half", "bias"):
        assert same_bits(found[name], values[name][order])
    for name in ("norm", "w"):  # a type without products of its own is unpacked
        assert same_bits(found[name], values[name])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "matrices of MXFP4 (1) are unpacked to float32" in said


def test_on_a_gpu_matrices_are_unpacked(tmp_path: Path, gpus: Gpus, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"a": array(48, 64), "b": array(32, 64), "norm": array(64)}
    path, values = write_gguf(tmp_path / "a.gguf", tensors, {"a": "Q8_0", "b": "Q4_1"})
    checkpoint = opened(path, {"a": np.arange(48)[::-1].copy()})
    wanted = {name: (name, shape) for name, shape in checkpoint.shapes.items()}
    found = checkpoint.load(wanted, dtype=torch.float32, device=torch.device("cuda:0"), joined={"ab": ("a", "b")})
    assert found["ab"].is_cuda
    assert same_bits(found["ab"].cpu(), np.concatenate([values["a"][::-1], values["b"]]))
    assert same_bits(found["norm"].cpu(), values["norm"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "matrices of Q8_0 (1), Q4_1 (1) are unpacked to float32, which takes 15.6 KiB more memory: lce has" in said


MEASURED = """
import sys
import torch
from lce.weights.source import source_of

def memory(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return 1024 * int(line.split()[1])

def load(n):
    wanted = {name: (name, shape) for name, shape in list(checkpoint.shapes.items())[-n:]}
    return checkpoint.load(wanted, dtype=torch.bfloat16, device=torch.device("cpu"), ignore=["*"])

checkpoint = source_of(sys.argv[1]).checkpoint
load(9)  # the libraries
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak is from now on
weights = load(1000)
print(memory("VmRSS") - before, memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_weights_take_the_bytes_of_their_file(smollm2: Path) -> None:
    """The peak is a few pieces more, and no second copy."""
    taken, peak = (int(word) / smollm2.stat().st_size for word in output(MEASURED, smollm2).split())
    assert taken < 1.05
    assert peak < 1.3


def test_a_vector_of_blocks_is_unpacked(tmp_path: Path) -> None:
    path, values = write_gguf(tmp_path / "a.gguf", {"w": array(1, 64)}, "Q8_0")
    checkpoint, order = opened(path), np.random.default_rng(1).permutation(64)
    vector = {"w": replace(checkpoint.tensors["w"], shape=(64,))}
    found = loaded(replace(checkpoint, tensors=vector, orders={"w": order}), torch.float32)["w"]
    assert same_bits(found, values["w"][0, order])


def test_plain_weights_in_an_order_are_quantised_as_they_are_loaded(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "a.gguf", {"w": array(32, 64)}, "F16")
    order, schemes = np.random.default_rng(1).permutation(32), {"w": ROUNDED["int8"]}
    straight = loaded(opened(path), schemes=schemes)["w"]
    turned = loaded(opened(path, {"w": order}), schemes=schemes)["w"]
    assert (opened(path).quantised, opened(path).dtype()) == (None, torch.float16)
    assert torch.equal(unpacked(turned), unpacked(straight)[torch.from_numpy(order)])


def changed(path: Path, name: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(read_gguf(path).tensors[name].start + at)
        file.write(data)


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 170), ("Q4_1", 62), ("Q4_K", 146), ("Q6_K", 418), ("F16", 50)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, kind: str, at: int, value: float) -> None:
    path, _ = write_gguf(tmp_path / "a.gguf", {"good": array(32, 64), "w": array(32, 256)}, {"w": kind})
    changed(path, "w", at, np.float16(value).tobytes())
    for step in (loaded, lambda checkpoint: verify(checkpoint, lambda done, total: None)):
        with pytest.raises(ModelError, match="tensor 'w' has NaN or infinite numbers; the checkpoint is damaged"):
            step(opened(path))


def test_weights_beyond_float16_are_refused_in_float16_alone(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "a.gguf", {"w": array(32, 64)}, "Q8_0")
    changed(path, "w", 0, np.float16(60000).tobytes() + bytes([0] * 32))
    loaded(opened(path), torch.float16)  # the scale alone is large
    changed(path, "w", 2, bytes([2]))
    loaded(opened(path), torch.bfloat16)
    with pytest.raises(ModelError, match="numbers too large for float16; use another dtype"):
        loaded(opened(path), torch.float16)
