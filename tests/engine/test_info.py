"""What a model folder holds, in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_info_tells_models_from_contexts(tiny_model: Path, tmp_path: Path) -> None:
    engine = lce.load(tiny_model)
    engine.prefill([2, 3, 4]).save(tmp_path / "c.lce")
    context = lce.info(tmp_path / "c.lce")
    assert isinstance(context, lce.ContextInfo)
    assert (context.tokens, context.model) == (3, describe_model(tiny_model).identity)
    assert lce.info(tiny_model) == lce.info(str(tiny_model)) == describe_model(tiny_model)
    demo = lce.info("demo")
    assert isinstance(demo, lce.ModelInfo)
    assert demo.fingerprint == describe_model("demo").fingerprint


@pytest.mark.parametrize("path", [b"demo", 3, None, "", "a\0b", "\ud800", "x" * 300])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(lce.UsageError, match="path is "):
        lce.info(path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(lce.DataError, match="No such file"):
        lce.info(tmp_path / "none")
