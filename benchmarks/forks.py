"""Measures the memory and time of forks of one context that each read some tokens.

    python benchmarks/forks.py --forks 10

The cache has the shape of a model of 135 million parameters: 30 layers, 3 KV heads of 64 numbers, bfloat16. Numbers are
random. "process" is the growth of this process's private memory, as Linux counts it (`smaps_rollup`).
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch

from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout


def private_bytes() -> int:
    """Return the bytes of this process's own pages and of file pages in memory, each once."""
    counts = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, count = line.split()[:2]
        counts[name.rstrip(":")] = int(count) * 1024
    return counts["Anonymous"] + counts.get("Pss_Shmem", 0)


def append(cache: KVCache, n_tokens: int, block: int = 512) -> None:
    """Append random tokens, in blocks."""
    for start in range(0, n_tokens, block):
        n = min(block, n_tokens - start)
        for layer in cache.layers:
            layer.write(*torch.randn(2, cache.layout.n_kv_heads, n, cache.layout.head_dim))
        cache.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forks", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=3600, help="of the context that is forked")
    parser.add_argument("--appended", type=int, default=100, help="tokens that each fork reads")
    args = parser.parse_args()
    layout = CacheLayout(30, 9, 3, 64, torch.bfloat16, torch.device("cpu"))
    cache = KVCache.empty(layout, args.tokens)
    append(cache, args.tokens)
    before, forks, times = private_bytes(), [], []
    for _ in range(args.forks):
        start = time.perf_counter()
        forks.append(cache.fork() if hasattr(cache, "fork") else cache.copy())
        times.append(time.perf_counter() - start)
    forked = private_bytes()
    for fork in forks:
        append(fork, args.appended)
    added, mib = private_bytes() - before, 1 << 20
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    print(f"{args.forks} forks of {args.tokens:,} tokens ({cache.length * layout.token_bytes / mib:.0f} MiB)")
    print(f"first fork {times[0] * 1e3:.0f} ms, then {sum(times[1:]) / max(1, len(times) - 1) * 1e3:.1f} ms each")
    print(
        f"process: {(forked - before) / mib:+.1f} MiB, and {added / mib:+.1f} MiB when each read {args.appended} tokens"
    )


if __name__ == "__main__":
    main()
