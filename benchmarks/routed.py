"""Compares `Attention.routed` by PyTorch, which turns queries while gathering or turns a copy for every choice first,
and by lce's own kernel.

    python benchmarks/routed.py
    python benchmarks/routed.py --heads 9 --kv-heads 3 --chunks 750 --chunk-size 16 --choices 256 --threads 1

Prints, for one layer's shape, the time of each (medians of alternating repeats), GFLOP/s, and PyTorch's peak memory
besides inputs. Each query of each head has random choices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from lce.attention import Attention, SlotTurns, Tiles, Turn, tiles
from lce_lab.bench import machine

TURNED_FIRST, AS_GATHERED = 1 << 62, tiles.AT_ONCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 12), ("kv-heads", 12), ("dim", 64), ("queries", 512), ("choices", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    dtype, random = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
    q = torch.randn(args.heads, args.queries, args.dim, generator=random).to(dtype)
    k, v = (
        torch.randn(args.kv_heads, args.chunks, args.chunk_size, args.dim, generator=random).to(dtype) for _ in range(2)
    )
    angles = torch.randn(args.queries * args.choices, args.dim // 2, generator=random)
    rows = torch.arange(len(angles)).view(args.queries, args.choices)
    turns = SlotTurns(Turn(angles.cos().to(dtype), angles.sin().to(dtype)), rows)
    order = torch.rand(args.heads, args.queries, args.chunks, generator=random).argsort(-1)
    chosen = order[..., : args.choices].sort(-1).values
    flops = 4 * chosen.numel() * args.chunk_size * args.dim
    torch.set_num_threads(args.threads)

    def run(backend: str, at_once: int) -> float:
        tiles.AT_ONCE = at_once
        started = time.perf_counter()
        Attention.choose(backend).routed(q, turns, chosen, [Tiles.of_chunks(k, v)])
        return time.perf_counter() - started

    print(f"{machine()}; {args}")
    ways = {
        "turned first": ("torch", TURNED_FIRST),
        "turned as gathered": ("torch", AS_GATHERED),
        "lce's kernel": ("compiled", AS_GATHERED),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):
        for name, way in ways.items():
            seconds = run(*way)
            times[name] += [seconds] * (repeat > 0)
    for name, way in ways.items():
        median = statistics.median(times[name])
        peak = f"{peak_bytes(lambda way=way: run(*way)) / 2**20:8.1f} MiB" if way[0] == "torch" else ""
        print(f"{name:<20} {1000 * median:8.1f} ms  {flops / median / 1e9:7.1f} GFLOP/s  {peak}")


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
