"""What a model folder holds, in Python."""

from __future__ import annotations

from pathlib import Path

import lce
from lce.engine.info import describe_model


def test_methods_are_those_that_load_makes(tiny_model: Path) -> None:
    info = describe_model(tiny_model)
    assert set(info.methods) | set(info.refused) == set(lce.methods.available())
    for name, method in info.methods.items():
        assert method == lce.load(tiny_model, name).method


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
