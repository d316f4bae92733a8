"""Measures the methods' speed relative to full attention: the same random weights, in one process, in turn.

    python benchmarks/methods.py                                             # every method at 8,192 tokens
    python benchmarks/methods.py --methods full,dca --lengths 8192,32768 --repeats 1

    python benchmarks/methods.py --before ../lce-before --lengths 3072       # each method beside an older checkout's

Prints, for each length, prefill and decode speeds and their time relative to `full` of the same run: medians of the
repeats; below 1 is faster than full attention.

With `--before`, both checkouts run in one process, in turn, so that a drift of the machine's speed affects both. Prints
the median of the pairwise ratios of times, now / before: below 1 is faster now.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import ModuleType

from models import SHAPES, make_checkpoint, token_ids

import lce
from lce_lab.bench import machine

NEEDS = {"esa": {"compress": "pca"}}  # random weights have no learned maps


def main() -> None:
    warnings.filterwarnings("ignore", message=".* that the method full can read")  # `full` is timed at any length
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(sorted(lce.methods.available(), key=lambda name: name != "full")))
    parser.add_argument("--lengths", default="8192")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=17)
    parser.add_argument("--before", help="a folder with an older checkout, to compare each method with its own past")
    args = parser.parse_args()
    names = args.methods.split(",")
    if "full" not in names:
        names = ["full", *names]
    print(f"{machine()}; {args.shape}, {args.dtype}, window {args.window}; medians of {args.repeats}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), SHAPES[args.shape], args.dtype)
        if args.before:
            for length in map(int, args.lengths.split(",")):
                compare_before(args, names, folder, length)
            return
        engines = {
            name: lce.load(folder, lce.methods.make(name, NEEDS.get(name)), window=args.window, dtype=args.dtype)
            for name in names
        }
        for engine in engines.values():
            engine.generate(list(range(2, 66)), max_tokens=2)
        for length in map(int, args.lengths.split(",")):
            compare(engines, length, args.repeats, args.new_tokens)


def compare_before(args: argparse.Namespace, names: list[str], folder: str, length: int) -> None:
    print(f"\n### {length:,} tokens, now / before\n\n| method | prefill | decode |\n|---|---:|---:|")
    ids = token_ids(length)
    for name in names:
        roots = [str(Path(args.before).resolve()), str(Path(__file__).parent.parent)]
        engines, modules = zip(*(load_from(root, name, folder, args) for root in roots), strict=True)
        times: dict[str, list[list[float]]] = {"prefill": [[], []], "decode": [[], []]}
        contexts = []
        for engine, own in zip(engines, modules, strict=True):
            sys.modules.update(own)  # of the checkout whose code runs: what is imported late comes from there
            contexts.append(engine.prefill(ids, length=length + 64 * args.repeats))
        for repeat in range(args.repeats):
            for which in (0, 1) if repeat % 2 else (1, 0):
                sys.modules.update(modules[which])
                started = time.perf_counter()
                engines[which].prefill(ids)
                times["prefill"][which].append(time.perf_counter() - started)
        for repeat in range(3 * args.repeats):
            for which in (0, 1) if repeat % 2 else (1, 0):
                sys.modules.update(modules[which])
                stats = engines[which].generate([7], context=contexts[which], max_tokens=args.new_tokens).stats
                times["decode"][which].append(stats.decode_s)
        ratios = [statistics.median(b / a for a, b in zip(before, now, strict=True)) for before, now in times.values()]
        print(f"| `{name}` | {ratios[0]:.3f} | {ratios[1]:.3f} |", flush=True)


def load_from(root: str, name: str, folder: str, args: argparse.Namespace) -> tuple[lce.Engine, dict[str, ModuleType]]:
    """Load an engine of the checkout at `root`, whose modules replace those imported already; return both."""
    for module in [module for module in sys.modules if module.partition(".")[0] == "lce"]:
        del sys.modules[module]
    sys.path.insert(0, root)
    package = importlib.import_module("lce")
    assert Path(package.__file__ or "").is_relative_to(root), f"{root} is no checkout of lce"
    engine: lce.Engine = package.load(
        folder, package.methods.make(name, NEEDS.get(name)), window=args.window, dtype=args.dtype
    )
    engine.generate(list(range(2, 66)), max_tokens=2)
    sys.path.remove(root)
    return engine, {module: found for module, found in sys.modules.items() if module.partition(".")[0] == "lce"}


def compare(engines: dict[str, lce.Engine], length: int, repeats: int, new_tokens: int) -> None:
    ids = token_ids(length)
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
