"""`lce.load`, `plan`, `info` and `quantize`: what they take from a folder and from options, and what they refuse."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lce
from lce.engine.options import SizeOptions
from lce.errors import DataError, ModelError, UsageError
from lce.methods import LongHeads
from lce.weights.checkpoint import Checkpoint
from tests.checkpoints import TINY, save_tiny, tokens

TOKEN = 2 * 2 * 2 * 16 * 4  # bytes of keys and values in the tiny model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block": 0}, "block is 0; expected 1 or more"),
        ({"window": 1}, "window is 1; expected 2 or more"),
        ({"window": 0}, "window is 0"),
        ({"method": "longhead"}, "unknown method 'longhead'; did you mean 'longheads'"),
        ({"device": "gpu"}, "unknown device 'gpu'; expected auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device 'meta' is not available here; expected auto, cpu"),
        ({"dtype": "float23"}, "unknown dtype 'float23'; did you mean 'float32'"),
        ({"attention": "torh"}, "unknown attention backend 'torh'; did you mean 'torch'"),
        ({"rope": "lineer", "rope_factor": 2}, "unknown rope 'lineer'; did you mean 'linear'"),
        ({"rope": "yarn", "rope_factor": "automatic"}, "rope_factor is 'automatic'; expected 1 or more"),
        ({"rope_factor": "auto"}, "rope_factor=auto has no scaling to belong to; add rope="),
        ({"rope": "linear", "rope_factor": 0.5}, "rope_factor is 0.5; expected 1 or more"),
        ({"rope": "linear", "rope_factor": float("nan")}, "rope_factor is nan"),
        ({"rope_factor": 4}, "rope_factor=4 has no scaling to belong to; add rope="),
        ({"rope": "none", "rope_factor": 4}, "rope_factor=4 has no scaling"),
        ({"kv_host_budget": "8Gi"}, "kv_host_budget is '8Gi'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_weights_are_loaded(
    tiny_model: Path, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "load", None)
    with pytest.raises(lce.UsageError, match=message):
        lce.load(tiny_model, **values)
    if values.keys() <= SizeOptions.__annotations__.keys() | {"method"}:
        with pytest.raises(lce.UsageError, match=message):
            lce.plan(tiny_model, tokens=1, **values)
    with pytest.raises(lce.UsageError, match="tokens is 0"):
        lce.plan(tiny_model, tokens=0)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_fifo_in_a_model_folder_is_refused_and_does_not_block(tmp_path: Path, name: str) -> None:
    folder = save_tiny(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(lce.ModelError, match=f"{name} is a FIFO; expected a regular file"):
        lce.load(folder)


def test_contexts_are_tied_to_the_numbers_of_the_config(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    lce.load(folder).prefill(tokens(20)).save(tmp_path / "c.lce")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    with pytest.raises(lce.DataError, match="was made with another model: load that one"):
        lce.load(folder).open_context(tmp_path / "c.lce")


def test_the_window_may_be_overridden(tiny_model: Path) -> None:
    engine = lce.load(tiny_model, "longheads", window=32)
    assert engine.window == 32
    assert engine.method == LongHeads(chunk_size=1, chunks=16, local=2)


def test_rope_may_be_overridden(tiny_model: Path) -> None:
    ids = tokens(100)
    plain = lce.load(tiny_model).logits(ids)
    assert torch.equal(lce.load(tiny_model, rope="none").logits(ids), plain)
    assert (lce.load(tiny_model, rope="linear", rope_factor=1).logits(ids) - plain).abs().max() <= 1e-5
    kinds = ("linear", "ntk", "dynamic", "yarn", "llama3")
    scaled = [lce.load(tiny_model, rope=kind, rope_factor=4).logits(ids) for kind in kinds]
    for i, logits in enumerate(scaled):
        assert all((logits - other).abs().max() > 1e-2 for other in [plain, *scaled[:i]]), kinds[i]


def test_a_config_is_enough(tmp_path: Path) -> None:
    config = TINY | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("full", "longheads", "esa"):
        assert lce.plan(tmp_path, name, tokens=1000).fits
    plan = lce.plan(tmp_path, tokens=1000)
    assert (plan.tokens, plan.method, plan.dtype, plan.device) == (1000, "full", "bfloat16", "cpu")
    assert plan.tiers["device"].keys_and_values == 1024 * TOKEN // 2
    del config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert lce.plan(tmp_path, tokens=1000).dtype == "float32"
    assert lce.plan(tmp_path, tokens=1000, dtype="float16").dtype == "float16"


def test_esa_is_planned_as_if_it_had_its_maps() -> None:
    need = lce.plan("demo", "esa", tokens=3000).tiers["device"]
    held = lce.load("demo", "esa").prefill(tokens(3000)).cache.bytes_by_tier["device"]
    assert held <= need.keys_and_values + need.besides <= held * 1.6


def test_methods_are_those_that_load_makes(tiny_model: Path) -> None:
    info = lce.info(tiny_model)
    assert set(info.methods) | set(info.refused) == set(lce.methods.available())
    for name, method in info.methods.items():
        assert method == lce.load(tiny_model, name).method


def test_info_tells_models_from_contexts(tiny_model: Path, tmp_path: Path) -> None:
    engine = lce.load(tiny_model)
    engine.prefill([2, 3, 4]).save(tmp_path / "c.lce")
    context = lce.info(tmp_path / "c.lce")
    assert isinstance(context, lce.ContextInfo)
    assert (context.tokens, context.model) == (3, lce.info(tiny_model).identity)
    assert lce.info(tiny_model) == lce.info(str(tiny_model))
    assert isinstance(lce.info("demo"), lce.ModelInfo)


def test_a_file_of_a_checkpoint_stands_for_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    whole = lce.load(tiny_model).setup.fingerprint
    for name in ("model.safetensors", "config.json"):
        assert lce.load(tiny_model / name).setup.fingerprint == whole
        assert lce.info(tiny_model / name) == lce.info(tiny_model)
        assert lce.plan(tiny_model / name, tokens=5).fits
    shards = shutil.copytree(tiny_model, tmp_path / "shards")
    first = (shards / "model.safetensors").rename(shards / "model-00001-of-00001.safetensors")
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(first), first.name)}))
    assert lce.load(first).setup.fingerprint == lce.load(index).setup.fingerprint == whole
    shutil.copy(tiny_model / "model.safetensors", tmp_path)
    with pytest.raises(ModelError, match="is not a folder; expected a checkpoint's folder with a config"):
        lce.load(tmp_path / "model.safetensors")


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
    lce.load("demo").prefill(IDS).save(tmp_path / "plain.lce")
    with pytest.raises(DataError, match="load the folder before `lce quantize`, without --weights"):
        saved.open_context(tmp_path / "plain.lce")
    with pytest.raises(UsageError, match=f"stored as {weights}"):
        lce.load(out, weights="int8" if weights == "int4" else "int4")
    found = lce.info(out)
    assert isinstance(found, lce.ModelInfo)
    assert found.weights == weights
    planned = [lce.plan(model, tokens=10, **more) for model, more in ((out, {}), ("demo", {"weights": weights}))]
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


def test_what_cannot_be_quantised(tmp_path: Path) -> None:
    out = lce.quantize("demo", tmp_path / "out")
    with pytest.raises(UsageError, match="no empty folder"):
        lce.quantize("demo", out)
    with pytest.raises(ModelError, match="quantised already"):
        lce.quantize(out, tmp_path / "again")
    with pytest.raises(UsageError, match="expected int8 or int4"):
        lce.quantize("demo", tmp_path / "x", "auto")
    assert not (tmp_path / "x").exists()


def test_no_more_threads_than_cores(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for cores, asked, found in ((2, 99, 2), (2, 99, 2), (8, 3, 3)):
        monkeypatch.setattr("lce.engine.loading.usable_cores", lambda cores=cores: cores)
        lce.load(tiny_model, threads=asked)
        assert torch.get_num_threads() == found
    said = "lce: 99 threads were asked for, and this process may use 2 of the cores: 2 compute\n"
    assert capsys.readouterr().err == said


def test_a_methods_knobs_are_given_beside_its_name(tiny_model: Path) -> None:
    knobs = {"chunk_size": 8, "chunks": 4}
    engine = lce.load(tiny_model, method="longheads", method_options=knobs, block=32)
    assert engine.method == lce.load(tiny_model, LongHeads(**knobs), block=32).method
    assert engine.setup.using("full").method.name == "full"
    assert lce.plan(tiny_model, "longheads", tokens=64, method_options=knobs).method == "longheads"
    for wrong, line in [
        ({"method": "longheads", "chunk_size": 8}, "a method's knobs go in method_options"),
        (
            {"method": "longheads", "method_options": {"chunk": 8}},
            "no option 'chunk'; valid, with defaults: chunk_size",
        ),
        ({"method": LongHeads(), "method_options": knobs}, "give the method its knobs"),
        ({"method": "full", "method_options": 8}, "method_options is 8; expected a mapping"),
        ({"method": "auto", "method_options": knobs}, "auto stands for a method"),
    ]:
        with pytest.raises(UsageError, match=line):
            lce.load(tiny_model, **wrong)  # type: ignore[arg-type]
