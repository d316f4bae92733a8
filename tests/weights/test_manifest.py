"""Manifests that contradict their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lce.errors import ModelError
from lce.weights.manifest import Manifest
from lce.weights.safetensors_file import TensorInfo

FILE = Path("model.safetensors")


def tensors() -> dict[str, TensorInfo]:
    shapes = {"a.codes": ("U8", (2, 8, 64)), "a.scales": ("BF16", (2, 2, 16)), "a.zeros": ("U8", (2, 2, 16))}
    return {name: TensorInfo(FILE, dtype, shape, 0, 0) for name, (dtype, shape) in shapes.items()}


def manifest(**changed: Any) -> str:
    whole = Manifest("int4", "bfloat16", "f" * 64, "0" * 64, {"a": ("int4", (32, 64))}, "1.0").text()
    return json.dumps({**json.loads(whole), **changed})


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert Manifest.read(manifest(), FILE, tensors()).shapes == {"a": (32, 64)}


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2}, {"weights": "int3"}, {"weights": None}, {"dtype": "int8"}, {"source": 3}, {"matrices": 3},
        {"matrices": {"a": ["int4", [32, 65]]}}, {"matrices": {"a": ["int8", [32, 64]]}},
        {"matrices": {"a": ["int4", [32, -64]]}}, {"matrices": {"b": ["int4", [32, 64]]}},
        {"matrices": {"a": [["int4"], [32, 64]]}}, {"matrices": {"a": ["int4", [True, 64]]}}, {"samples": ""},
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="quantize the checkpoint again"):
        Manifest.read(manifest(**changed), FILE, tensors())


def test_text_that_is_no_manifest_is_refused() -> None:
    for text in ("", "[]", "{}", "3", "{", '{"format": 1}'):
        with pytest.raises(ModelError):
            Manifest.read(text, FILE, tensors())
