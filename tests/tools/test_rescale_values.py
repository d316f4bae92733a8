"""Rescaled values: the same model under full attention, to the bit; another one for LongHeads' summary."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lce
from lce.weights.source import DEMO
from tools.rescale_values import rescale

IDS = list(range(2, 402))


@pytest.mark.parametrize("factor", [64.0, 2.0**-20])
def test_full_attention_is_the_same_to_the_bit(factor: float, tmp_path: Path) -> None:
    changed = rescale(DEMO, factor, tmp_path / "new")
    old, new = lce.load("demo"), lce.load(tmp_path / "new")
    assert changed == 2 * old.setup.model.config.n_layers
    assert old.setup.fingerprint != new.setup.fingerprint
    assert torch.equal(old.logits(IDS), new.logits(IDS))


def test_longheads_is_not(tmp_path: Path) -> None:
    rescale(DEMO, 64, tmp_path / "new")
    method = lce.methods.make("longheads", {"chunk_size": 16, "chunks": 4, "summary": "values"})
    old, new = (lce.load(model, method=method).logits(IDS) for model in ("demo", tmp_path / "new"))
    assert torch.equal(old[:64], new[:64])  # everything is selected
    assert not torch.allclose(old[200:], new[200:], atol=0.1)


def test_what_would_change_the_model_is_refused(tmp_path: Path) -> None:
    for factor in (0.0, -2.0, 3.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="expected a power of two"):
            rescale(DEMO, factor, tmp_path / "new")
    (tmp_path / "half").mkdir()
    save_file({"v_proj.weight": torch.full((2,), 6e4, dtype=torch.float16)}, tmp_path / "half" / "model.safetensors")
    with pytest.raises(ValueError, match="leave its range"):
        rescale(tmp_path / "half", 2, tmp_path / "new")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"has no v_proj\.weight"):
        rescale(tmp_path / "other", 2, tmp_path / "another")
