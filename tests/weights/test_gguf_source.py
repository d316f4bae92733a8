"""A GGUF file is a model as a folder is one: for commands, contexts, maps, plans and quantisation."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lce
from lce.errors import DataError, UsageError
from lce.methods.lowdim import LearnedFor, LowDimMap, LowDimMaps
from lce.methods.map_file import save_maps
from lce.sizes import size_text
from tests.checkpoints import tokens
from tests.command import PROMPT, assert_error, run
from tests.gguf_files import Q4_K_M, write_gguf
from tests.gguf_models import as_saved, save_gguf, sizes, tensors, vocabulary

IDS = tokens(40)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> SimpleNamespace:
    return as_saved(tiny_model)


@pytest.fixture
def tmp_path(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder with the tokenizer that `save_gguf` takes."""
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def gguf(model: SimpleNamespace, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `tiny-F32.gguf` and `tiny-Q8_0.gguf`."""
    folder = tmp_path_factory.mktemp("gguf")
    shutil.copy(tiny_model / "tokenizer.json", folder)
    for types in ("F32", "Q8_0"):
        save_gguf(folder / f"tiny-{types}.gguf", model, types)
    (folder / "tokenizer.json").unlink()
    return folder


def test_a_file_answers_as_its_folder_does(tiny_model: Path, gguf: Path) -> None:
    engine, expected = lce.load(gguf / "tiny-F32.gguf"), lce.load(tiny_model)
    assert torch.equal(engine.logits(IDS), expected.logits(IDS))
    assert engine.tokenizer.encode(PROMPT) == expected.tokenizer.encode(PROMPT)
    assert engine.generate(PROMPT, max_tokens=9).text == expected.generate(PROMPT, max_tokens=9).text


def test_a_turn_ends_at_a_token_that_only_the_vocabulary_knows(model: Any, gguf: Path, tmp_path: Path) -> None:
    free = lce.load(gguf / "tiny-F32.gguf").generate(IDS, max_tokens=4).token_ids
    assert len(free) == 4
    metadata = vocabulary(tmp_path)
    old, tokens = metadata["tokenizer.ggml.tokens"][free[2]], metadata["tokenizer.ggml.tokens"]
    tokens[free[2]], metadata["tokenizer.ggml.token_type"][free[2]] = "<|eot_id|>", 3
    pairs = metadata["tokenizer.ggml.merges"]
    metadata["tokenizer.ggml.merges"] = [x for x in pairs if old not in (*x.split(), x.replace(" ", ""))]
    engine = lce.load(save_gguf(tmp_path / "ends.gguf", model, **metadata))
    assert engine.setup.model.config.eos_ids == (1, free[2])
    ended = engine.generate(IDS, max_tokens=4)
    assert (ended.finish_reason, ended.token_ids) == ("stop", free[: free.index(free[2])])


def test_plans_count_weights_as_they_are_stored(tiny_model: Path, gguf: Path) -> None:
    models = gguf / "tiny-F32.gguf", tiny_model, gguf / "tiny-Q8_0.gguf"
    plain, expected, packed = (lce.plan(path, tokens=50) for path in models)
    assert replace(plain.tiers["device"], available=0) == replace(expected.tiers["device"], available=0)
    stored = lce.info(gguf / "tiny-Q8_0.gguf")
    assert stored.weight_bytes
    assert stored.weight_bytes * 0.99 < packed.tiers["device"].weights < stored.weight_bytes * 1.05
    assert lce.load(gguf / "tiny-Q8_0.gguf").setup.dtype == torch.bfloat16


def test_types_are_listed_by_kind_of_tensor(model: Any, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "mixture.gguf", model, Q4_K_M)  # rows of 64: Q5_0 for Q4_K, Q8_0 for Q6_K
    found = lce.info(path)
    assert found.weights == "Q8_0"
    low = ("attention q", "attention k", "attention o", "mlp gate", "mlp up")
    mixed = {(kind, of): 1 for kind in ("attention v", "mlp down") for of in ("Q5_0", "Q8_0")}
    whole = {("embedding", "Q8_0"): 1, ("head", "Q8_0"): 1, ("norms", "F32"): 5}
    expected = {(kind, "Q5_0"): 2 for kind in low} | mixed | whole
    assert {(group.kind, group.type): group.count for group in found.tensors} == expected
    lines = [line.split() for line in run("info", path).stdout.splitlines()]
    assert ["attention", "v", "1", "Q8_0", "2.1", "KiB"] in lines
    assert ["weights", *size_text(found.weight_bytes or 0).split(), "in", "Q8_0"] in lines


def test_a_folder_stands_for_its_only_file_and_any_shard_for_all(model: Any, gguf: Path, tmp_path: Path) -> None:
    expected = lce.load(gguf / "tiny-F32.gguf").setup.fingerprint
    (tmp_path / "one").mkdir()
    shutil.copy(gguf / "tiny-F32.gguf", tmp_path / "one")
    shutil.copy(gguf / "tiny-F32.gguf", tmp_path / "sha256-0123")  # as Ollama calls its files
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": x for key, x in sizes(model.config).items()}
    (tmp_path / "split").mkdir()
    metadata |= vocabulary(tmp_path)
    first, _ = write_gguf(tmp_path / "split" / "x.gguf", tensors(model, "llama"), "F32", metadata, per_file=8)
    shards = sorted(first.parent.iterdir())
    assert len(shards) == 3
    for path in (tmp_path / "one", tmp_path / "sha256-0123", first.parent, *shards):
        assert lce.load(path).setup.fingerprint == expected
    shards[1].unlink()
    assert_error(run("info", shards[2]), 3, "1 of 3 shards are missing")


def test_contexts_know_their_file_by_what_it_holds(tiny_model: Path, gguf: Path, tmp_path: Path) -> None:
    lce.load(gguf / "tiny-F32.gguf").prefill(IDS).save(tmp_path / "c.lce")
    moved = shutil.copy(gguf / "tiny-F32.gguf", tmp_path / "moved.gguf")
    assert lce.load(moved).open_context(tmp_path / "c.lce").token_ids == IDS
    for other in (gguf / "tiny-Q8_0.gguf", tiny_model):
        with pytest.raises(DataError, match="was made with another model"):
            lce.load(other, dtype="float32").open_context(tmp_path / "c.lce")
    found = lce.info(tmp_path / "c.lce")
    assert found.model == lce.info(moved).identity


def test_plain_weights_can_be_quantised_and_blocks_cannot(gguf: Path, tmp_path: Path) -> None:
    out = lce.quantize(gguf / "tiny-F32.gguf", tmp_path / "out", "int8")
    saved, rounded = lce.load(out), lce.load(gguf / "tiny-F32.gguf", weights="int8")
    assert torch.equal(saved.logits(IDS), rounded.logits(IDS))
    assert saved.tokenizer.encode(PROMPT) == rounded.tokenizer.encode(PROMPT)
    rounded.prefill(IDS).save(tmp_path / "c.lce")
    assert saved.open_context(tmp_path / "c.lce").token_ids == IDS
    result = run("quantize", "-m", gguf / "tiny-Q8_0.gguf", "--out", tmp_path / "again")
    assert_error(result, 3, "tiny-Q8_0.gguf is quantised already")
    assert not (tmp_path / "again").exists()
    with pytest.raises(UsageError, match=r"tiny-Q8_0.gguf are stored as Q8_0; leave weights='int4' out"):
        lce.load(gguf / "tiny-Q8_0.gguf", weights="int4")


def test_maps_beside_a_file_are_its_own(gguf: Path, tmp_path: Path) -> None:
    for name in ("tiny-F32.gguf", "tiny-Q8_0.gguf"):
        shutil.copy(gguf / name, tmp_path)
    engine = lce.load(tmp_path / "tiny-F32.gguf")
    layers = [LowDimMap.unbiased(torch.randn(64, 8), torch.randn(32, 8)) for _ in range(2)]
    learned_for = LearnedFor(engine.setup.fingerprint, 8, 32, engine.window, engine.setup.rope)
    save_maps(LowDimMaps(layers), tmp_path / "tiny-F32.esa_maps.safetensors", learned_for)
    assert lce.load(tmp_path / "tiny-F32.gguf", lce.methods.ESA(low_dim=8)).generate(IDS, max_tokens=2).token_ids
    with pytest.raises(UsageError, match="this model has no calibrated maps"):
        lce.load(tmp_path / "tiny-Q8_0.gguf", lce.methods.ESA(low_dim=8))
    shutil.copy(tmp_path / "tiny-F32.esa_maps.safetensors", tmp_path / "tiny-Q8_0.esa_maps.safetensors")
    with pytest.raises(DataError, match="another model"):
        lce.load(tmp_path / "tiny-Q8_0.gguf", lce.methods.ESA(low_dim=8))
