"""Stage 4: Llama-2-7B's shape with drawn weights, methods by lengths: prefill, decode, memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lce
from gpu_stages.drawn import attended_bytes, engine_of, methods, prefill_flops, random_ids, weight_bytes
from gpu_stages.setup import Setup, graph_figures

METHODS = (("longheads", "full"), ("dca", "infllm", "esa"))  # all lengths of the first ones come first
LENGTHS = (4096, 16384, 32768, 131072)
NEW_TOKENS = 64
QUADRATIC = {"full", "dca"}  # methods with quadratic prefill, which cache only keys and values
PIECE = 8192  # tokens of a prefill timed together
REST = 8.0  # seconds that a cell needs besides its prefill


def run(setup: Setup) -> None:
    lengths = (128, 300) if setup.tiny else LENGTHS
    shape = "tiny" if setup.tiny else "llama-2-7b"
    new_tokens = 4 if setup.tiny else NEW_TOKENS
    last: dict[str, tuple[int, float]] = {}
    first: lce.Engine | None = None
    for names in METHODS[:1] if setup.tiny else METHODS:
        engines: dict[str, lce.Engine] = {}
        for name, method in methods(names).items():
            with setup.record.attempt(f"warm up {name}"):
                engine = engine_of(shape, method, setup.device, sharing=first)
                first = first or engine
                engines[name] = engine
                warm_up(engine, setup)
        assert first is not None
        setup.record["model"] = {"shape": shape, "dtype": str(first.setup.dtype), "weight bytes": weight_bytes(first)}
        for length in lengths:
            for name, engine in engines.items():
                with setup.record.attempt(f"{name} at {length}") as cell:
                    cell.update(method=name, length=length)
                    seconds = max(0.1, setup.left() - (0.1 if setup.tiny else REST))
                    too_long = predicted(name, length, last) > seconds or (setup.tiny and length == lengths[-1])
                    if name in QUADRATIC and too_long:
                        seconds = 0.0  # all keys and values are drawn
                    measure(setup, engine, length, new_tokens, seconds, cell)
                    last[name] = (cell["prefilled"], cell["prefill s"])


def predicted(name: str, length: int, last: dict[str, tuple[int, float]]) -> float:
    """Predict the seconds of a prefill from a shorter text's."""
    before, seconds = last.get(name, (1, 0.0))
    if not before:
        return math.inf
    return seconds * (length / before) ** (2 if name in QUADRATIC else 1)


def warm_up(engine: lce.Engine, setup: Setup) -> None:
    """Compile the kernels of a prefill beyond the window and of a decode step."""
    free(setup)  # the memory of closed contexts may wait for Python's collector
    n = 2 * engine.window + min(engine.setup.block, 2048) + 3
    context = engine.prefill(random_ids(engine, n), length=n + 64)
    engine.generate([], context=context, max_tokens=4)
    context.close()
    setup.synchronize()


class KeepOnly:
    """A method that caches keys and values as another method and attends nothing, to fill a cache fast."""

    def __init__(self, method: lce.Method) -> None:
        self.method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def attend(self, q: Tensor, cache: Any, step: Any) -> Tensor:
        return q


@torch.inference_mode()
def fill(engine: lce.Engine, context: lce.Context, ids: Sequence[int]) -> None:
    """Append tokens with random keys, values and logits, for a method that keeps nothing else."""
    config = engine.setup.model.config
    driver = replace(engine.setup.driver, method=KeepOnly(engine.method))
    for start in range(0, len(ids), engine.setup.block):
        some = ids[start : start + engine.setup.block]

        def draw(attend: Any, n: int = len(some)) -> None:
            shape = (config.n_kv_heads, n, config.head_dim)
            for layer in range(config.n_layers):
                k, v = (torch.randn(shape, dtype=engine.setup.dtype, device=engine.setup.device) for _ in range(2))
                attend(layer, k, k, v)

        driver.forward(context.cache, context.rope, len(some), draw)
        context.token_ids.extend(some)
    context._last = context.cache.length, torch.randn(config.vocab_size, device=engine.setup.device)


def prefill(setup: Setup, engine: lce.Engine, context: lce.Context, ids: list[int], seconds: float) -> dict[str, Any]:
    """Prefill by pieces while time is left; return the seconds of each piece."""
    piece = max(engine.setup.block, PIECE // engine.setup.block * engine.setup.block)
    pieces: list[float] = []
    while len(context) < len(ids) and sum(pieces) < seconds:
        setup.synchronize()
        started = time.perf_counter()
        engine.prefill(ids[len(context) : len(context) + piece], context=context)
        setup.synchronize()
        pieces.append(time.perf_counter() - started)
    n = len(context)
    found: dict[str, Any] = {"prefilled": n, "prefill s": sum(pieces), "pieces s": [round(x, 4) for x in pieces]}
    if pieces:
        found["prefill tok/s"] = n / sum(pieces)
        found["prefill flop/s"] = prefill_flops(engine, n) / sum(pieces)
    return found


def free(setup: Setup) -> None:
    """Free unused memory and reset its peak."""
    gc.collect()
    if setup.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(
    setup: Setup, engine: lce.Engine, length: int, new_tokens: int, seconds: float, cell: dict[str, Any]
) -> None:
    """Measure one method at one length; each figure goes into `cell` at once."""
    free(setup)
    ids = random_ids(engine, length)
    with engine.new_context(length + 3 * new_tokens + 16) as context:
        cell.update(prefill(setup, engine, context, ids, seconds))
        setup.record.write()
        if (rest := ids[len(context) :]) and engine.method.name in QUADRATIC:
            fill(engine, context, rest)
            cell["note"] = f"out of time: the last {len(rest):,} tokens have random keys and values"
        elif rest:
            cell["note"] = f"out of time: decode is measured at {len(context):,} tokens"
        cell["decoded at"] = len(context)
        setup.record.write()
        cell.update(decode(setup, engine, context, new_tokens))
    if setup.cuda:
        cell["peak memory bytes"] = torch.cuda.max_memory_allocated()


def decode(setup: Setup, engine: lce.Engine, context: lce.Context, new_tokens: int) -> dict[str, Any]:
    """Return the milliseconds a token, by the clock and by GPU events around the same call, after an untimed one."""
    engine.generate([], context=context, max_tokens=min(8, new_tokens))
    setup.synchronize()
    started = time.perf_counter()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if setup.cuda else []
    for event in events[:1]:
        event.record()
    result = engine.generate([], context=context, max_tokens=new_tokens)
    for event in events[1:]:
        event.record()
    setup.synchronize()
    whole = time.perf_counter() - started
    n, stats = len(result.token_ids), result.stats
    return {
        "decode ms": stats.decode_s / max(1, n - 1) * 1e3,
        "call ms a token": whole / n * 1e3,
        "events ms a token": events[0].elapsed_time(events[1]) / n if events else None,
        "decode bytes": weight_bytes(engine) + attended_bytes(engine, len(context)),
        "decoded": n,
        **graph_figures(engine),
    }
