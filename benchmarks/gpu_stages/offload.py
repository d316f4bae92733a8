"""Stage 5: Llama-3-8B's shape at 128k, with 4 GiB of keys and values on the GPU, beside all on the GPU."""

from __future__ import annotations

import tempfile
from typing import Any

import lce
from gpu_stages.drawn import engine_of, weight_bytes
from gpu_stages.setup import Setup
from gpu_stages.speed import REST, free, measure, warm_up
from lce.cache.limits import Limits

METHOD = "longheads"
LENGTH, BUDGET, NEW_TOKENS = 131072, "4GiB", 64
SHARE = 0.65  # of the time, for the slower run


def run(setup: Setup) -> None:
    """Measure under the budget first. If time runs out, the run without budget stops at the same length."""
    length, new_tokens = (700, 4) if setup.tiny else (LENGTH, NEW_TOKENS)
    shape = "tiny" if setup.tiny else "llama-3-8b"
    resident = engine_of(shape, METHOD, setup.device)
    budgets = tiny_budget(resident) if setup.tiny else {"kv_device_budget": BUDGET}
    setup.record["model"] = {
        "shape": shape, "weight bytes": weight_bytes(resident), "budgets": budgets,
        "context bytes": length * resident.setup.layout.token_bytes,
    }  # fmt: skip
    with setup.record.attempt("warm up"):
        warm_up(resident, setup)
    with setup.record.attempt(f"{METHOD} offloaded") as cell:
        engine = engine_of(shape, METHOD, setup.device, sharing=resident, **budgets)
        warm_up(engine, setup)
        measure(setup, engine, length, new_tokens, max(0.1, SHARE * setup.left() - REST / 2), cell)
        length = cell["decoded at"]
    free(setup)
    with setup.record.attempt(f"{METHOD} resident") as cell:
        measure(setup, resident, length, new_tokens, max(0.1, setup.left() - REST / 2), cell)


def tiny_budget(engine: lce.Engine) -> dict[str, Any]:
    """Return a small budget and a spill folder, since on a CPU device and host share memory."""
    layout = engine.setup.layout
    return {"kv_device_budget": Limits(layout).least_budget + 8 * layout.page_bytes, "spill_dir": tempfile.gettempdir()}
