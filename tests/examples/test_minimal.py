"""The one file in examples/minimal.py: it stays small and alone, and its tokens are the engine's, one by one."""

import json
import operator
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

import lce
from lce.weights.source import DEMO, source_of
from tests.checkpoints import save_tiny, tokens
from tests.command import Process
from tests.docs.scripts import load

FILE = Path(__file__).parents[2] / "examples" / "minimal.py"
TOUR = FILE.parents[1] / "docs" / "tour" / "README.md"
SHORTER = 2048  # tokens: at the window of SmolLM2, 8,192, the file takes over ten minutes
HAYSTACK = (FILE.parent / "haystack.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    return load(FILE)


@pytest.fixture(scope="module")
def smollm2_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as safetensors, of a shorter window. The weights of its GGUF are unpacked, and rounded to bfloat16."""
    source, folder = source_of(smollm2), tmp_path_factory.mktemp("smollm2")
    wanted = {name: (name, shape) for name, shape in source.checkpoint.shapes.items()}
    found = source.checkpoint.load(wanted, dtype=torch.float32, device=torch.device("cpu"))
    plain = {name: x if isinstance(x, Tensor) else x.unpacked(0, torch.empty(x.shape)) for name, x in found.items()}
    save_file({name: x.bfloat16() for name, x in plain.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**source.config, "max_position_embeddings": SHORTER}), encoding="utf-8"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(source.read(name) or b"")
    return folder


def ids_of(folder: Path, text: str) -> list[int]:
    """A text's ids, as the file makes them."""
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def same(model: Any, folder: Path) -> lce.Engine:
    """An engine with the file's chunks, and with the paper's summaries, and heads that choose alone."""
    sizes = {"chunk_size": model.config.chunk_size, "chunks": model.config.chunks}
    paper = lce.methods.LongHeads(**sizes, local=sizes["chunk_size"], summary="values", share="head")
    return lce.load(folder, method=paper, dtype="float32")


def compare(minimal: ModuleType, folder: Path, ids: list[int], n_tokens: int, block: int = 512) -> None:
    """The file's tokens are the engine's, and its probabilities of the first one are close to the engine's."""
    model = minimal.Llama(folder)
    truth = same(model, folder).generate(ids, max_tokens=n_tokens, logprobs=20)
    cache = model.new_cache(len(ids) + n_tokens)
    logits = minimal.prefill(model, ids, cache, block)
    assert truth.logprobs is not None
    best, expected = (torch.tensor(column) for column in zip(*truth.logprobs[0].top, strict=True))
    assert (logits.softmax(-1)[best] - expected.exp()).abs().max() < 0.01
    found = minimal.decode(model, logits, cache, n_tokens)
    assert found == truth.token_ids
    assert len(found) > 5


def test_it_is_small_and_imports_nothing_of_lce() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    named = re.findall(r"^\s*(?:from|import) (.+?)(?: import .*)?$", text, re.MULTILINE)
    imported = {name.partition(".")[0] for name in named}
    assert imported - sys.stdlib_module_names == {"torch", "safetensors", "tokenizers"}


def test_the_tour_begins_with_its_functions(minimal: ModuleType) -> None:
    table = TOUR.read_text(encoding="utf-8").partition("| function |")[2].partition("\n\n")[0]
    names = re.findall(r"`([\w.]+)`", table)
    assert "LongHeads.choose" in names
    for name in names:
        assert callable(operator.attrgetter(name)(minimal)), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"num_key_value_heads": 4, "max_position_embeddings": 128},
        {"num_key_value_heads": 1, "rope_theta": 500.0},
    ],
    ids=repr,
)
def test_all_logits_are_those_of_the_engine(minimal: ModuleType, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Random weights, beyond the window, each token in a block of its own."""
    folder, ids = save_tiny(tmp_path, **changes), tokens(200)
    model = minimal.Llama(folder)
    engine, cache = same(model, folder), model.new_cache(len(ids))
    with torch.inference_mode():
        found = torch.stack([model(torch.tensor([token_id]), cache) for token_id in ids])
    assert (found - engine.logits(ids)).abs().max() < 1e-3


def test_logits_do_not_depend_on_the_block(minimal: ModuleType, tiny_model: Path) -> None:
    model, ids = minimal.Llama(tiny_model), tokens(200)
    whole, *found = (minimal.prefill(model, ids, model.new_cache(200), block) for block in (200, 1, 7, 64, 1000))
    assert max((each - whole).abs().max() for each in found) < 1e-4


DEEP = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "n_chars", [pytest.param(2_800, id="2 windows"), pytest.param(17_000, id="12 windows", marks=DEEP)]
)
def test_tokens_on_the_demo_are_those_of_the_engine(minimal: ModuleType, n_chars: int) -> None:
    """A story that is broken off in the middle."""
    compare(minimal, DEMO, ids_of(DEMO, HAYSTACK[:n_chars]), 32)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_on_smollm2_are_those_of_the_engine(minimal: ModuleType, smollm2_folder: Path) -> None:
    """Beyond the window, with real weights."""
    compare(minimal, smollm2_folder, ids_of(smollm2_folder, HAYSTACK)[: SHORTER + 500], 32)


@pytest.mark.slow
def test_its_command_finds_a_pass_key_beyond_the_window(tmp_path: Path) -> None:
    """Two windows, with the key in the middle."""
    (tmp_path / "prompt.txt").write_text(HAYSTACK[32_600:35_400] + HAYSTACK[-43:], encoding="utf-8")
    line = [sys.executable, FILE, DEMO, "--prompt-file", tmp_path / "prompt.txt", "--tokens", "7"]
    with Process(line) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (0, " 81728.\n")
    assert err.endswith("each head of each query attended at most 32 of 67 chunks of 16 tokens\n")
