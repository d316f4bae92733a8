"""Schemes by name, matrices of unlike types one beneath the other, and manifests that contradict their file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lce.errors import ModelError, UsageError
from lce.models.products import Gate, linear
from lce.weights.packed import ROUNDED, Manifest, PackedMatrix, Stacked, scheme_of
from lce.weights.safetensors_file import TensorInfo

WIDTH = 48


def test_schemes_by_name() -> None:
    assert (scheme_of("auto"), scheme_of("int4")) == (None, ROUNDED["int4"])
    with pytest.raises(UsageError, match="did you mean 'int8'"):
        scheme_of("int9")


@pytest.mark.parametrize(("name", "bits"), [("int8", 8 + 16 / 128), ("int4", 4 + 24 / 32)])
def test_bytes_of_a_matrix(name: str, bits: float) -> None:
    assert ROUNDED[name].n_bytes((256, 1024)) == 256 * 1024 * bits / 8


def packed(name: str, weight: Tensor) -> PackedMatrix:
    shape = len(weight), WIDTH
    parts = {part: torch.empty(size, dtype=dtype) for part, (size, dtype) in ROUNDED[name].parts(shape).items()}
    matrix = ROUNDED[name].matrix(shape, parts)
    matrix.pack(weight)
    return matrix


@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_a_product_with_stacked_matrices_is_the_products_with_each(rows: int, gate: Gate | None) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(n, WIDTH) for n in (20, 32, 16)]
    stacked = Stacked([packed("int8", weights[0]), weights[1], packed("int4", weights[2])])
    first, plain, last = stacked.parts
    whole = torch.cat([first.unpacked(0, torch.empty(first.shape)), plain, last.unpacked(0, torch.empty(last.shape))])
    onto = torch.randn(rows, 34 if gate else 68)
    x, norm, bias = torch.randn(rows, WIDTH), torch.rand(WIDTH), torch.randn(68)
    assert stacked.shape == (68, WIDTH)
    around = {"norm": norm, "eps": 1e-5, "gate": gate}
    expected = linear(x, whole, bias, onto=onto.clone(), **around)
    found = linear(x, stacked, bias, onto=onto.clone(), **around)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    if rows == 3:
        alone = linear(x[1:2], stacked, bias, onto=onto[1:2].clone(), **around)
        assert torch.equal(alone, found[1:2])


FILE = Path("model.safetensors")


def tensors() -> dict[str, TensorInfo]:
    shapes = {"a.codes": ("U8", (2, 8, 64)), "a.scales": ("BF16", (2, 2, 16)), "a.zeros": ("U8", (2, 2, 16))}
    return {name: TensorInfo(FILE, dtype, shape, 0, 9) for name, (dtype, shape) in shapes.items()}


def manifest(**changed: Any) -> str:
    checks = {name: ["0" * 16] for name in tensors()}
    whole = Manifest("int4", "bfloat16", "f" * 64, {"a": ("int4", (32, 64))}, checks, {"config.json": "0" * 64})
    return replace(whole, **changed).text()


ENTRIES = [["int4", [32, 65]], ["int8", [32, 64]], ["int4", [32, -64]], [["int4"], [32, 64]], ["int4", [True, 64]]]


@pytest.mark.parametrize(
    "changed",
    [
        *({"format": 1}, {"weights": "int3"}, {"weights": None}, {"dtype": "int8"}, {"source": 3}, {"source": ""}),
        *({"matrices": {"a": entry}} for entry in ENTRIES),
        *({"matrices": 3}, {"matrices": {"b": ["int4", [32, 64]]}}, {"checks": {}}, {"checks": 3}),
        {"checks": {"a.codes": ["0"], "a.scales": ["0"], "a.zeros": []}},
        *({"files": {"config.json": 3}}, {"files": {"": "0"}}, {"files": 3}),
    ],
)
def test_a_damaged_manifest_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="quantize the checkpoint again"):
        Manifest.read(manifest(**changed), FILE, tensors())


def test_a_manifest_is_read_as_it_was_written_or_refused() -> None:
    assert Manifest.read(manifest(), FILE, tensors()).matrices == {"a": ("int4", (32, 64))}
    for at in range(len(manifest())):
        changed = manifest()[:at] + chr(ord(manifest()[at]) ^ 1) + manifest()[at + 1 :]
        with pytest.raises(ModelError, match=r"quantize the checkpoint again|not valid JSON|appears twice"):
            Manifest.read(changed, FILE, tensors())
    for text in ("", "[]", "{}", "3", "{", '{"format": 1}'):
        with pytest.raises(ModelError):
            Manifest.read(text, FILE, tensors())
