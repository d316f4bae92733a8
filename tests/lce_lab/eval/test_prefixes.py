"""Texts with common beginnings: read as each is read alone, to the last bit, and no token twice without need."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.engine import running
from lce_lab.eval.prefixes import read_all
from tests.checkpoints import tokens

BLOCK = 16
SHARED = tokens(100)
TEXTS = [
    [*SHARED, *tokens(90, 1)],
    [*SHARED[:40], *tokens(100, 2)],
    [*SHARED, *tokens(90, 1)],  # equal to the first
    tokens(70, 3),
    [*SHARED, *tokens(30, 4)],
    SHARED,
    SHARED[:32],
    [5],
]
ADDED = tokens(9, 5)
KINDS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": lce.methods.LongHeads(chunk_size=4, chunks=8)},
    {"method": lce.methods.InfLLM(block_size=8, top_k=2, sinks=4, local=16)},
    {"method": lce.methods.ESA(sinks=4, local=16, top_k=8, low_dim=16, compress="pca")},
    {"method": lce.methods.Streaming(local=16)},
    {"method": lce.methods.LongHeads(chunk_size=4, chunks=8), "kv_device_budget": "32KiB", "kv_dtype": "int8"},
    {"method": "full", "rope": "dynamic", "rope_factor": 4.0},
]


def alone(engine: lce.Engine, text: list[int]) -> tuple[Tensor, Tensor]:
    """The logits after a text, and the scores of what is added to it."""
    context = engine.prefill(text, length=len(text) + len(ADDED))
    return context.logits.clone(), engine.score(ADDED, context=context).logprobs


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(str(value) for value in kind.values())[:40])
def test_every_text_is_read_as_alone(tiny_model: Path, kind: dict[str, Any]) -> None:
    if "kv_device_budget" in kind:
        kind = {**kind, "spill_dir": tiny_model.parent}
    engine, seen = lce.load(tiny_model, block=BLOCK, **kind), []
    for number, context in read_all(engine, TEXTS, [len(text) + len(ADDED) for text in TEXTS]):
        logits, scores = alone(engine, TEXTS[number])
        assert context.token_ids == TEXTS[number]
        assert torch.equal(context.logits, logits)
        assert torch.equal(engine.score(ADDED, context=context).logprobs, scores)
        seen.append(number)
    assert (sorted(seen), [TEXTS[number] for number in seen]) == (list(range(len(TEXTS))), sorted(TEXTS))


@pytest.mark.parametrize(("rope", "expected"), [("none", 32 + 64 + 4 + 34 + 94 + 108 + 70 + 1), ("dynamic", None)])
def test_prefixes(tiny_model: Path, rope: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lce.load(tiny_model, block=BLOCK, rope=rope, rope_factor=None if rope == "none" else 2.0)
    read, lane_of = [], running.lane_of
    monkeypatch.setattr(running, "lane_of", lambda *given, **how: read.append(len(given[2])) or lane_of(*given, **how))
    contexts = [context for _, context in read_all(engine, TEXTS)]
    different = [text for number, text in enumerate(TEXTS) if text not in TEXTS[:number]]
    assert sum(read) == (sum(map(len, different)) if expected is None else expected)
    with pytest.raises(lce.UsageError, match="closed"):
        _ = contexts[0].cache


def test_the_longest_is_refused_before_any_work(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lce.load(tiny_model)
    monkeypatch.setattr(running, "lane_of", None)
    with pytest.raises(lce.CapacityError):
        next(read_all(engine, TEXTS, [1 << 50] * len(TEXTS)))
    assert list(read_all(engine, [])) == []
