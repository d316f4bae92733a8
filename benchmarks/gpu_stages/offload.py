"""Stage 5: Llama-3-8B's shape at 128k, keys and values under a budget of 4 GiB of the GPU, beside all of them on it."""

from __future__ import annotations

import tempfile
from typing import Any

import lce
from gpu_stages.drawn import engine_of, methods, weight_bytes
from gpu_stages.setup import Setup
from gpu_stages.speed import REST, free, measure, warm_up

METHODS = ("longheads", "infllm")
LENGTH, BUDGET, NEW_TOKENS = 131072, "4GiB", 64


def run(setup: Setup) -> None:
    """Resident first. The share of the time that each prefill may take leaves some for what follows."""
    names = METHODS[:1] if setup.tiny else METHODS
    length = 300 if setup.tiny else LENGTH
    shape = "tiny" if setup.tiny else "llama-3-8b"
    first = None
    runs = [(name, method, kept) for name, method in methods(names).items() for kept in ("resident", "offloaded")]
    for index, (name, method, kept) in enumerate(runs):
        with setup.record.attempt(f"{name} {kept}") as cell:
            budgets = {} if kept == "resident" else tiny_budget(first) if setup.tiny else {"kv_device_budget": BUDGET}
            engine = engine_of(shape, method, setup.device, sharing=first, **budgets)
            first = first or engine
            warm_up(engine, setup)
            seconds = setup.left() / (len(runs) - index) - (0.0 if setup.tiny else REST / 2)
            cell.update(method=name, kept=kept, budget=budgets.get("kv_device_budget"), length=length)
            cell["context bytes"] = length * engine.layout.token_bytes
            cell["weight bytes"] = weight_bytes(engine)
            measure(setup, engine, length, 4 if setup.tiny else NEW_TOKENS, max(0.1, seconds), cell)
        free(setup)


def tiny_budget(engine: lce.Engine | None) -> dict[str, Any]:
    """Twice the least, and a file below it: on a CPU device and host are one memory."""
    assert engine is not None
    return {"kv_device_budget": 2 * engine.layout.least_budget, "spill_dir": tempfile.gettempdir()}
