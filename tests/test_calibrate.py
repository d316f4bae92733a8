"""Learning low-dim maps: what is learned, what is measured, and resuming after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lce
import lce.calibrate as calibration
from lce.calibrate import Calibration, calibrate
from lce.errors import CapacityError, DataError, UsageError
from lce.methods.lowdim import LowDimMaps
from tests.checkpoints import save_tiny
from tests.command import assert_error, run

TEXT = "the quick brown fox jumps over the lazy dog, and then over the moon. " * 120
SMALL = Calibration(low_dim=8, tokens=1024, epochs=2, batch=64)
KNOBS = {"sinks": 2, "local": 8, "top_k": 6}


def test_maps_are_learned_and_used(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps.safetensors"
    stages: list[tuple[str, int, int]] = []
    recalls = calibrate(tiny_model, TEXT, out, SMALL, progress=lambda *stage: stages.append(stage))
    assert [recall.layer for recall in recalls] == [0, 1]
    assert all(0 < recall.calibrated <= 1 and 0 < recall.pca <= 1 for recall in recalls)
    assert stages[-1] == ("learning", 4, 4)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    engine = lce.load(tiny_model, method=lce.methods.ESA(maps=str(out), low_dim=8, **KNOBS))
    assert engine.generate(TEXT[:400], max_tokens=4).token_ids


def test_as_many_dimensions_as_the_keys_lose_nothing(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps.safetensors"
    recalls = calibrate(tiny_model, TEXT, out, Calibration(low_dim=32, tokens=1024, epochs=1, lr=1e-9))
    assert [(recall.calibrated, recall.pca) for recall in recalls] == [(1.0, 1.0)] * 2
    exact = lce.load(tiny_model, method=lce.methods.ESA(compress="none", **KNOBS), block=50)
    ids = exact.tokenizer.encode(TEXT)[:150]
    for knobs in ({"maps": str(out), "low_dim": 32}, {"compress": "pca"}):
        engine = lce.load(tiny_model, method=lce.methods.ESA(**knobs, **KNOBS), block=50)
        assert (engine.logits(ids) - exact.logits(ids)).abs().max() < 1e-4


@pytest.mark.parametrize("at", [1, 5, 16, 17, 19])
def test_an_interrupted_calibration_goes_on(tiny_model: Path, tmp_path: Path, at: int) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    recalls = calibrate(tiny_model, TEXT, whole, SMALL)
    steps = 0

    def interrupt(what: str, done: int, total: int) -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_model, TEXT, cut, SMALL, progress=interrupt)
    assert not cut.exists()
    with pytest.raises(UsageError, match="begun with other options"):
        calibrate(tiny_model, TEXT, cut, Calibration(low_dim=9, tokens=1024))
    assert calibrate(tiny_model, TEXT, cut, SMALL) == recalls
    fingerprint = lce.load(tiny_model).fingerprint
    for ours, theirs in zip(
        LowDimMaps.open(whole, fingerprint).layers, LowDimMaps.open(cut, fingerprint).layers, strict=True
    ):
        assert torch.equal(ours.query, theirs.query)
        assert torch.equal(ours.key, theirs.key)
    assert not cut.with_name(cut.name + ".work").exists()


def test_what_is_refused(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "maps.safetensors"
    with pytest.raises(DataError, match="expected 512 or more: give a longer one"):
        calibrate(tiny_model, TEXT[:300], out, SMALL)
    with pytest.raises(DataError, match="a folder that exists"):
        calibrate(tiny_model, TEXT, tmp_path / "none" / "maps", SMALL)
    with pytest.raises(UsageError, match="epochs is 0; expected 1 or more"):
        Calibration(epochs=0)
    with pytest.raises(UsageError, match="lr is nan"):
        Calibration(lr=float("nan"))
    monkeypatch.setattr(calibration.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CapacityError, match="1,000 are free; give fewer --tokens"):
        calibrate(tiny_model, TEXT, out, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_maps_of_another_model_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps.safetensors"
    calibrate(tiny_model, TEXT, out, SMALL)
    (tmp_path / "other").mkdir()
    other = save_tiny(tmp_path / "other", seed=5)
    with pytest.raises(DataError, match="another model's weights"):
        lce.load(other, method=lce.methods.ESA(maps=str(out), low_dim=8))


def test_the_command(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    common = ("--model", tiny_model, "--text", tmp_path / "text.txt", "--out", tmp_path / "maps.safetensors")
    small = ("--low-dim", "8", "--tokens", "1024", "--epochs", "1")
    shown = run("calibrate", *common, *small)
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].split()[:3] == ["layer", "calibrated", "pca"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "mean"]
    told = json.loads(run("calibrate", *common, *small, "--json", "--force").stdout)
    assert [set(recall) for recall in told] == [{"layer", "top_k", "calibrated", "pca"}] * 2
    assert_error(run("calibrate", *common, "--epochs", "0"), 2, "--epochs is '0'")
    esa = ("generate", "--model", tiny_model, "--prompt", TEXT[:300], "--max-tokens", "2", "--method", "esa")
    assert_error(run(*esa), 2, "lce calibrate", "compress=pca", "compress=none")
    maps = ("-o", f"maps={tmp_path / 'maps.safetensors'}")
    assert_error(run(*esa, *maps), 2, "low_dim is 128", "-o low_dim=8")
    used = run(*esa, *maps, "-o", "low_dim=8", "-o", "sinks=2", "--json")
    assert json.loads(used.stdout)["method"]["knobs"]["maps"].startswith("LowDimMaps('maps.safetensors', ")
