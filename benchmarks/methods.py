"""The speed of the methods relative to full attention: the same random weights, in one process, in turn.

    python benchmarks/methods.py                                             # every method at 8,192 tokens
    python benchmarks/methods.py --methods full,dca --lengths 8192,32768 --repeats 1

Prints, for each length, prefill and decode speeds and their time relative to `full` of the same run: medians of the
repeats; below 1 is faster than full attention.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from vs_transformers import SHAPES, machine, make_checkpoint

import lce

NEEDS = {"esa": {"compress": "pca"}}  # random weights have no learned maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(sorted(lce.methods.available(), key=lambda name: name != "full")))
    parser.add_argument("--lengths", default="8192")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=17)
    args = parser.parse_args()
    names = args.methods.split(",")
    if "full" not in names:
        names = ["full", *names]
    print(f"{machine()}; {args.shape}, {args.dtype}, window {args.window}; medians of {args.repeats}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), SHAPES[args.shape], args.dtype)
        engines = {
            name: lce.load(folder, lce.methods.make(name, NEEDS.get(name)), window=args.window, dtype=args.dtype)
            for name in names
        }
        for engine in engines.values():
            engine.generate(list(range(2, 66)), max_tokens=2)
        for length in map(int, args.lengths.split(",")):
            compare(engines, length, args.repeats, args.new_tokens)


def compare(engines: dict[str, lce.Engine], length: int, repeats: int, new_tokens: int) -> None:
    ids = [(i * 7919) % 31000 + 2 for i in range(length)]
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, engine in engines.items():
            stats = engine.generate(ids, max_tokens=new_tokens).stats
            speeds[name].append((stats.prefill_tokens_per_s, stats.decode_tokens_per_s))
    medians = {name: [statistics.median(run[i] for run in runs) for i in (0, 1)] for name, runs in speeds.items()}
    print(f"\n### {length:,} tokens\n\n| method | prefill tok/s | time / full | decode tok/s | time / full |")
    print("|---|---:|---:|---:|---:|")
    for name, (prefill, decode) in medians.items():
        ratios = [best / own for best, own in zip(medians["full"], (prefill, decode), strict=True)]
        print(f"| `{name}` | {prefill:.4g} | {ratios[0]:.2f} | {decode:.4g} | {ratios[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
