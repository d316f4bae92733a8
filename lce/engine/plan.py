"""Planning: from a model's config.json and a few options to what a context will take, before anything is loaded."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from lce.cache.tiering import CacheShape, Tiering
from lce.engine.capacity import Plan, Planner
from lce.engine.loading import DEMO, DTYPES, budgets_of, check_sizes, device_of, dtype_of
from lce.errors import UsageError
from lce.methods.base import Method
from lce.methods.registry import make
from lce.methods.step import Surroundings
from lce.models.config import ModelConfig
from lce.models.llama import weight_specs
from lce.weights.checkpoint import Checkpoint


def plan(
    model: str | Path,
    method: str | Method = "full",
    *,
    tokens: int,
    device: str = "auto",
    dtype: str = "auto",
    block: int | None = None,
    window: int | None = None,
    kv_device_budget: int | str | None = None,
    kv_host_budget: int | str | None = None,
    spill_dir: str | Path | None = None,
) -> Plan:
    """What a context of `tokens` tokens will take of each tier, and the longest that fits; options as of `load`.

    Only config.json is read, not the weights, which the plan counts in. `dtype` "auto" is the one that config.json
    announces, float32 where it announces none. A method that learns from a file is planned as if it had it.
    """
    folder = DEMO if str(model) == "demo" else Path(model)
    config = ModelConfig.from_folder(folder)
    if tokens < 1:
        raise UsageError(f"tokens is {tokens}; expected 1 or more")
    check_sizes(block, window)
    surroundings = Surroundings(config.published, folder, lambda: Checkpoint.open(folder).fingerprint())
    chosen = (make(method) if isinstance(method, str) else method).unlearned()
    chosen = chosen.for_model(surroundings).resolve(window or config.window)
    shape = CacheShape(
        n_layers=config.n_layers,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        chunk_size=chosen.cache_chunk,
        dtype=dtype_of(dtype, partial(DTYPES.__getitem__, config.dtype or "float32")),
        device=device_of(device),
    )
    budgets = budgets_of(kv_device_budget, kv_host_budget, spill_dir)
    tiering = Tiering.of(budgets, chosen, block or chosen.block)
    weights = sum(math.prod(spec.shape) for spec in weight_specs(config).values()) * shape.dtype.itemsize
    return Planner.of(shape, config.n_heads, chosen, tiering, weights).plan(tokens)
