"""A quantised checkpoint computes what weights that are rounded at load do, and its contexts are its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lce
from lce.errors import DataError, ModelError, UsageError

IDS = list(range(5, 45))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_saved_weights_are_those_rounded_at_load(tmp_path: Path, weights: str) -> None:
    out = lce.quantize("demo", tmp_path / "out", weights)
    saved, rounded = lce.load(out), lce.load("demo", weights=weights)
    assert torch.equal(saved.logits(IDS), rounded.logits(IDS))
    rounded.prefill(IDS).save(tmp_path / "c.lce")
    assert saved.open_context(tmp_path / "c.lce").token_ids == IDS
    with pytest.raises(DataError, match=f"other weights, {weights}"):
        lce.load("demo").open_context(tmp_path / "c.lce")
    with pytest.raises(UsageError, match=f"stored as {weights}"):
        lce.load(out, weights="int8" if weights == "int4" else "int4")
    found = lce.info(out)
    assert isinstance(found, lce.ModelInfo)
    assert found.weights == weights
    planned = [lce.plan(model, tokens=10, **more) for model, more in ((out, {}), ("demo", {"weights": weights}))]  # type: ignore[arg-type]
    assert {plan.tiers["device"].weights for plan in planned} == {found.weight_bytes}


def test_logits_stay_close() -> None:
    """On text: the divergence of the predictions, in nats a token."""
    engine = lce.load("demo")
    text = (Path(__file__).parents[2] / "examples" / "haystack.txt").read_text(encoding="utf-8")[:2000]
    ids = engine.tokenizer.encode(text)[:300]
    exact = engine.logits(ids).log_softmax(-1)
    for weights, most in (("int8", 2e-4), ("int4", 1e-2)):
        rounded = lce.load("demo", weights=weights).logits(ids).log_softmax(-1)
        assert (exact.exp() * (exact - rounded)).sum(-1).mean() < most


def test_other_tensors_than_those_of_the_manifest_are_refused(tmp_path: Path) -> None:
    out = lce.quantize("demo", tmp_path / "out")
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match="not those of its manifest"):
        lce.load(out)


def test_what_cannot_be_quantised(tmp_path: Path) -> None:
    out = lce.quantize("demo", tmp_path / "out")
    with pytest.raises(UsageError, match="no empty folder"):
        lce.quantize("demo", out)
    with pytest.raises(ModelError, match="quantised already"):
        lce.quantize(out, tmp_path / "again")
    with pytest.raises(UsageError, match="expected int8 or int4"):
        lce.quantize("demo", tmp_path / "x", "auto")
