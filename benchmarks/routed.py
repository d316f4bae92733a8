"""Compares `Attention.routed`, which turns queries while gathering, with turning a copy for every choice first.

    python benchmarks/routed.py
    python benchmarks/routed.py --dtype bfloat16 --queries 2048

Prints, for one layer's shape, the time of both (medians of alternating repeats) and each one's peak memory besides
inputs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from lce.attention import Attention, Tiles, Turn, tiles
from lce.lab.bench import machine

TURNED_FIRST, AS_GATHERED = 1 << 62, tiles.AT_ONCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 12), ("kv-heads", 12), ("dim", 64), ("queries", 512), ("choices", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    dtype, random = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
    q = torch.randn(args.heads, args.queries, args.dim, generator=random).to(dtype)
    k, v = (
        torch.randn(args.kv_heads, args.chunks, args.chunk_size, args.dim, generator=random).to(dtype) for _ in range(2)
    )
    angles = torch.randn(args.queries, args.choices, args.dim // 2, generator=random)
    turns = Turn(angles.cos().to(dtype), angles.sin().to(dtype))
    order = torch.rand(args.heads, args.queries, args.chunks, generator=random).argsort(-1)
    chosen, attention = order[..., : args.choices].contiguous(), Attention.choose("torch")

    def run(at_once: int) -> float:
        tiles.AT_ONCE = at_once
        started = time.perf_counter()
        attention.routed(q, turns, chosen, [Tiles.of_chunks(k, v)])
        return time.perf_counter() - started

    print(f"{machine()}; {args}")
    times: dict[int, list[float]] = {TURNED_FIRST: [], AS_GATHERED: []}
    for repeat in range(args.repeats + 1):
        for at_once, taken in times.items():
            seconds = run(at_once)
            taken += [seconds] * (repeat > 0)
    for name, at_once in (("turned first", TURNED_FIRST), ("turned as gathered", AS_GATHERED)):
        median = statistics.median(times[at_once])
        print(f"{name:<20} {1000 * median:8.1f} ms  {peak_bytes(lambda at=at_once: run(at)) / 2**20:8.1f} MiB")


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak bytes of tensors made during `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():  # in order of time
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


if __name__ == "__main__":
    main()
