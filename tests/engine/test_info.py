"""What a model folder holds, in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import lce
from lce.engine.info import describe_model


def test_methods_are_those_that_load_makes(tiny_model: Path) -> None:
    info = describe_model(tiny_model)
    assert set(info.methods) | set(info.refused) == set(lce.methods.available())
    for name, method in info.methods.items():
        assert method == lce.load(tiny_model, name).method


def test_the_demo_has_its_maps() -> None:
    info = describe_model("demo")
    assert info.refused == {}
    assert info.parameters * 4 == info.weight_bytes


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(lce.ModelError, match=r"config\.json"):
        describe_model(tmp_path)
