"""Blocks on GPUs: as large as the GPU's memory allows, and smaller beside answers. GPUs are pretended."""

from pathlib import Path
from typing import Any

import pytest

import lce
from lce.engine import running, scheduler
from lce.methods import ESA, DualChunk, Full, LongHeads, Method, Streaming
from tests.checkpoints import tokens
from tests.pretended import Gpus, pretended_gpus

GPU: dict[str, Any] = {"device": "cuda", "attention": "torch"}
TOKEN = 4 * (3 * 64 + (2 * 4 + 2 * 2) * 16 + 2 * 96)  # bytes of the tiny model's widest step


def largest(memory: int, weights: int) -> int:
    """The largest power of two up to 16,384 that a sixteenth of the memory and a fourth of the rest hold."""
    sizes = (1 << i for i in range(15))
    return max(n for n in sizes if n * TOKEN * 16 <= memory and n * TOKEN * 4 <= memory - weights)


@pytest.mark.parametrize("memory", [16 << 30, 400 << 20, 8192 * 16 * TOKEN, 8192 * 16 * TOKEN - 1, 140 << 20])
def test_a_block_fills_a_share_of_the_memory(memory: int, tiny_model: Path) -> None:
    with pretended_gpus(memory=memory):
        engine = lce.load(tiny_model, **GPU)
        weights = sum(engine.setup.weight_bytes.values())
        assert engine.setup.block == max(2048, largest(memory, weights))
        assert engine.setup.layout.read_size == max(8192, 2 * engine.setup.block)
        plan = lce.plan(tiny_model, tokens=1 << 20, device="cuda").tiers["device"]
        assert plan.activations == engine.setup.block * TOKEN


@pytest.mark.parametrize("method", [Full(), DualChunk(), Streaming(), LongHeads(), ESA(compress="none")], ids=str)
def test_methods_that_choose_keep_their_block(gpus: Gpus, tiny_model: Path, method: Method) -> None:
    chooses = method.name in ("longheads", "esa")
    setup = lce.load(tiny_model, method, **GPU).setup
    assert setup.block == (setup.method.block if chooses else 16_384)
    assert lce.load(tiny_model, method, device="cpu").setup.block == setup.method.block
    assert lce.load(tiny_model, method, **GPU, block=7).setup.block == 7


def test_a_budget_holds_eight_blocks(gpus: Gpus, tiny_model: Path) -> None:
    budget = 8 * 4096 * lce.load(tiny_model, **GPU).setup.layout.token_bytes
    for given, block in ((budget, 4096), (budget - 1, 2048), (budget // 8, 2048)):
        assert lce.load(tiny_model, **GPU, kv_device_budget=given).setup.block == block


def test_beside_answers_blocks_are_small(gpus: Gpus, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, bool]] = []
    append = running.append

    def noted(setup: Any, context: Any, parts: Any, **how: Any) -> Any:
        read.append((len(parts[0]), any(each.state == "decode" for each in now)))
        return append(setup, context, parts, **how)

    monkeypatch.setattr(scheduler, "append", noted)
    monkeypatch.setattr(scheduler, "BESIDE", 16)
    engine = lce.load(tiny_model, **GPU)
    with engine.batch() as batch:
        now = batch._scheduler._running
        first = batch.stream(tokens(40), max_tokens=60)
        next(first)
        list(batch.stream(tokens(60, seed=1), max_tokens=2))
        list(first)
    assert read[0] == (40, False)
    assert all(n <= 16 for n, beside in read[1:] if beside)
    assert any(beside for _, beside in read)
