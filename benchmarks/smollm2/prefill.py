"""Times prefill of a published model by several methods in turn, beside full attention.

    python benchmarks/smollm2/prefill.py --lengths 8000,12000
    python benchmarks/smollm2/prefill.py --lengths 32768 --repeats 1

Random tokens. Prints, for each length and method, seconds (a median of the repeats) and their ratio to those of `full`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from random import Random

import lce
from lce.lab.bench import machine

OPTIONS = {"esa": {"compress": "pca"}}  # the model has no learned maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default="longheads,esa,infllm,dca")
    parser.add_argument("--lengths", default="8000")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".* that the method full can read")  # `full` is timed at any length
    names = ["full", *args.methods.split(",")]
    engines = {
        name: lce.load(args.model, lce.methods.make(name, OPTIONS.get(name)), dtype=args.dtype) for name in names
    }
    print(f"{machine()}; {args.model}, {args.dtype}; medians of {args.repeats}")
    for length in map(int, args.lengths.split(",")):
        ids, taken = [Random(0).randrange(1000, 40_000) for _ in range(length)], {name: list[float]() for name in names}
        for _ in range(args.repeats):
            for name, engine in engines.items():
                started = time.perf_counter()
                engine.prefill(ids).close()
                taken[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        for name, seconds in medians.items():
            print(f"{length:>7,}  {name:<12} {seconds:7.2f} s  {seconds / medians['full']:6.3f} x full", flush=True)


if __name__ == "__main__":
    main()
