"""The engine on a pretended GPU says what it says on the CPU: in blocks, forked, saved, and in any tier."""

from pathlib import Path
from typing import Any

import pytest

import lce
from lce.methods import DualChunk, Full, LongHeads
from tests.checkpoints import tokens
from tests.pretended import Gpus

METHODS = {"full": Full(), "longheads": LongHeads(chunk_size=8, chunks=4), "dca": DualChunk(chunk_size=16)}
GPU: dict[str, Any] = {"device": "cuda", "attention": "torch", "block": 32}


def answer(engine: lce.Engine, context: lce.Context) -> list[int]:
    return engine.generate(tokens(5, 1), max_tokens=4, context=context).token_ids


@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("longheads", "dca"))]
)
def test_says_what_it_says_on_the_cpu(gpus: Gpus, tiny_model: Path, name: str) -> None:
    prompt, method = tokens(90), METHODS[name]
    cpu, gpu = lce.load(tiny_model, method, device="cpu", block=32), lce.load(tiny_model, method, **GPU)
    assert (gpu.logits(prompt).cpu() - cpu.logits(prompt)).abs().max() <= 1e-3
    assert answer(gpu, gpu.prefill(prompt)) == answer(cpu, cpu.prefill(prompt))


LONG, SHORT = (700, 164_000, 100_000), (140, 22_000, 12_000)  # tokens, and bytes of the tiers


@pytest.mark.parametrize(("name", "sizes"), [("full", LONG), pytest.param("longheads", SHORT, marks=pytest.mark.slow)])
def test_forks_files_and_tiers_change_nothing(
    gpus: Gpus, tiny_model: Path, name: str, sizes: Any, tmp_path: Path
) -> None:
    length, device, host = sizes
    options = {**GPU, "method": METHODS[name], "dtype": "bfloat16"}
    engine, prompt = lce.load(tiny_model, **options), tokens(length)
    context = engine.prefill(prompt)
    expected = answer(engine, context.fork())
    context.save(tmp_path / "text.lce")
    assert (answer(engine, engine.open_context(tmp_path / "text.lce")), answer(engine, context)) == (expected, expected)
    for budgets in ({"kv_device_budget": device}, {"kv_device_budget": device, "kv_host_budget": host}):
        small = lce.load(tiny_model, **options, **budgets, spill_dir=tmp_path)
        context = small.prefill(prompt)
        assert [tier.name for tier in context.cache.tiers][:2] == ["device", "host"]
        fork = context.fork()
        assert answer(small, context) == expected, budgets
        assert answer(small, fork) == expected, budgets
        assert answer(small, small.open_context(tmp_path / "text.lce")) == expected, budgets


def test_what_a_token_costs_beside_tiers(gpus: Gpus, tiny_model: Path, tmp_path: Path) -> None:
    """Bounds of what it was when this was written, to be lowered."""
    options = {**GPU, "kv_device_budget": 22_000, "kv_host_budget": 12_000, "spill_dir": tmp_path}
    engine = lce.load(tiny_model, METHODS["longheads"], dtype="bfloat16", **options)
    context = engine.prefill(tokens(140))
    with gpus.counting() as counts:
        engine.prefill(tokens(1), context=context)
    assert counts.syncs <= 12, counts.at
    assert counts.uploads <= 24, counts.at


@pytest.mark.parametrize("name", ["full", "longheads"])
def test_a_pass_waits_for_the_device_once(gpus: Gpus, tiny_model: Path, name: str) -> None:
    """To read whether a number is not finite; the token ids are uploaded."""
    engine = lce.load(tiny_model, METHODS[name], dtype="bfloat16", **GPU)
    context = engine.prefill(tokens(64))
    for n in (32, 1, 1):
        with gpus.counting() as counts:
            context = engine.prefill(tokens(n), context=context)
        assert counts.syncs <= 1, counts.at
        assert counts.uploads <= 1, counts.at
    with gpus.counting() as counts:
        engine.generate(tokens(1), max_tokens=5, context=context)
    assert counts.syncs <= 11, counts.at
    assert counts.uploads <= 6, counts.at
