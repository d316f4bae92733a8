"""Times a method's work around attention: milliseconds a layer of a prefill block and a decode step, by part.

    python benchmarks/selection.py
    python benchmarks/selection.py --methods longheads,esa --lengths 8192,131072 --shape tinyllama

Some layers of random queries, keys and values, bfloat16, W = 4,096. `attention` is the time in `dense` and `routed`
outside summaries; `outside` is everything else that the method does: `keep`, summaries and votes, scores and choices,
copies of chosen tokens, merging. Medians.
The cache is filled without attention, so a filled cache chooses as random vectors do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from vs_transformers import machine

import lce.methods
from lce.attention import Attended, Attention
from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.methods import attending, esa, infllm, selective, selectors
from lce.methods.run import Driver
from lce.models.config import RopeConfig
from lce.models.rope import Rope

SHAPES = {"small": (12, 12, 64), "tinyllama": (32, 4, 64)}  # query heads, KV heads, head dimension
KNOBS: dict[str, dict[str, Any]] = {"esa": {"compress": "pca"}}
PARTS = [  # parts to time: a class or module, the name of its function, and the name of the part
    (selective.ChunkMethod, "keep_queries", "summaries"),
    (selective.ChunkMethod, "choose", "choice"),
    (infllm.InfLLM, "memorise", "summaries"),
    (infllm.InfLLM, "select", "choice"),
    (esa.ESA, "select", "choice"),
    (esa, "find_basis", "summaries"),
    (attending, "merge", "merge"),
    (LayerCache, "tokens", "gather"),
    (type(Attention.choose()), "dense", "attention"),
    (type(Attention.choose()), "routed", "attention"),
]


class Clock:
    """A clock that sums the seconds of parts. A part inside another counts for itself, except in summaries."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.stack: list[str] = []
        self.last = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self.stack.append("summaries" if "summaries" in self.stack else name)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.stack.pop()

        return call

    def switch(self) -> None:
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] = self.seconds.get(self.stack[-1], 0.0) + now - self.last
        self.last = now


class Blank(Attention):
    """A backend that attends nothing, to fill a cache quickly."""

    def attend(self, q: Tensor, *_: Any, **__: Any) -> Attended:
        return q, q.new_zeros(q.shape[:-1], dtype=torch.float32)

    def routed(self, q: Tensor, *_: Any) -> Attended:
        return q, q.new_zeros(q.shape[:-1], dtype=torch.float32)


@contextmanager
def shortcuts() -> Iterator[None]:
    """Replace functions so that filling a cache takes less than quadratic time."""

    def few(self: Any, q: Tensor, far: Tensor, cache: Any, step: Any) -> Tensor:
        return torch.arange(1)

    def random_votes(self: Any, q: Tensor, lse: Tensor, first: int, cache: Any, step: Any) -> Tensor:
        return torch.rand(len(q), step.stop - first)

    def random_summaries(self: Any, q: Tensor, k: Tensor, v: Tensor, step: Any) -> Tensor:
        return torch.randn(len(q), k.shape[1], k.shape[-1]).to(k.dtype)

    def none(*_: Any) -> None:
        return None

    with (
        patch.object(esa.ESA, "select", few), patch.object(infllm.InfLLM, "votes", random_votes),
        patch.object(selectors.Summary, "summarise", random_summaries),
        patch.object(selective.ChunkMethod, "choose", none),
    ):  # fmt: skip
        yield


def measure(name: str, n: int, args: argparse.Namespace) -> dict[str, tuple[int, list[dict[str, float]]]]:
    """Return each repeat's seconds by part, and a block's queries, for `prefill` and `decode` after n tokens."""
    n_heads, n_kv_heads, dim = SHAPES[args.shape]
    dtype, random = getattr(torch, args.dtype), torch.Generator().manual_seed(n)
    method = lce.methods.make(name, KNOBS.get(name)).resolve(args.window)
    block = args.block or method.block
    layout = CacheLayout(
        args.layers, n_heads, n_kv_heads, dim, dtype, torch.device("cpu"), method.access, make_state=method.state
    )
    longest = n + (args.repeats + 1) * block + 64
    rope, cache = Rope(RopeConfig(), dim, args.window, longest), KVCache.empty(layout, longest)
    blank = Driver(method, Blank(), args.window, n_kv_heads)
    driver = Driver(method, Attention.choose(args.attention), args.window, n_kv_heads)

    def vectors(heads: int, t: int) -> Tensor:
        return torch.randn(heads, t, dim, generator=random).to(dtype)

    def feed(driver: Driver, t: int, clock: Clock | None = None) -> None:
        q, k, v = vectors(n_heads, t), vectors(n_kv_heads, t), vectors(n_kv_heads, t)
        forward = driver.forward if clock is None else clock.timed("rest", driver.forward)
        forward(cache, rope, t, lambda attend: [attend(layer, q, k, v) for layer in range(args.layers)])

    with shortcuts():
        while cache.length < n:
            feed(blank, min(2048, n - cache.length))
    result: dict[str, tuple[int, list[dict[str, float]]]] = {}
    for phase, t, repeats in (("prefill", block, args.repeats), ("decode", 1, 4 * args.repeats)):
        runs = []
        for _ in range(repeats + 1):
            clock = Clock()
            patches = [patch.object(o, f, method_of(clock, part, getattr(o, f))) for o, f, part in PARTS]
            for one in patches:
                one.start()
            feed(driver, t, clock)
            for one in patches:
                one.stop()
            runs.append({part: seconds / args.layers for part, seconds in clock.seconds.items()})
        result[phase] = t, runs[1:]
    return result


def method_of(clock: Clock, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    timed = clock.timed(name, function)
    return lambda *args, **kwargs: timed(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="longheads,esa,infllm,streaming")
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--block", type=int, help="tokens of a prefill block; what suits the method")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    names = ["attention", "summaries", "choice", "gather", "merge", "rest"]
    print(f"{machine()}; {args.shape}, {args.dtype}, window {args.window}; medians of {args.repeats}; ms a layer\n")
    print(
        f"| method | after | step of | outside, a token | outside | {' | '.join(names)} |\n|---|---:|---:|"
        + "---:|" * 8
    )
    for name in args.methods.split(","):
        for n in map(int, args.lengths.split(",")):
            with torch.no_grad():
                found = measure(name, n, args)
            for t, runs in found.values():
                median = {x: 1000 * statistics.median(run.get(x, 0.0) for run in runs) for x in names}
                outside = 1000 * statistics.median(sum(run.values()) - run.get("attention", 0.0) for run in runs)
                cells = " | ".join(f"{median[x]:.3f}" for x in names)
                print(f"| `{name}` | {n:,} | {t} | {outside / t:.4f} | {outside:.3f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
