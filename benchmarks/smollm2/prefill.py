"""Times prefill of a published model, and decode behind it, by several methods in turn, beside full attention.

    python benchmarks/smollm2/prefill.py --lengths 8000,12000
    python benchmarks/smollm2/prefill.py --lengths 12000 --repeats 1 --methods "dca; longheads; longheads preset=paper"
    python benchmarks/smollm2/prefill.py --lengths 16000 --repeats 1 --methods "pages prefill_method=full"  # for decode

Random tokens. Prints, for each length and method, seconds of a prefill (a median of the repeats), their ratio to those
of `full`, and milliseconds of a token of decode (a median of 23 tokens a repeat).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from random import Random

import lce
from lce.terminal.reading import named_methods
from lce_lab.bench import machine

METHODS = "longheads; esa compress=pca; infllm; dca"  # the model has no learned maps for esa


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--methods", default=METHODS, help="separated by ';', each with its knobs")
    parser.add_argument("--lengths", default="8000")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".* that the method full can read")  # `full` is timed at any length
    cells = ["full", *filter(None, map(str.strip, args.methods.split(";")))]
    engines = {cell: loaded(cell, args) for cell in cells}
    print(f"{machine()}; {args.model}, {args.dtype}, kv {args.kv_dtype}; medians of {args.repeats}")
    random = Random(0)
    for length in map(int, args.lengths.split(",")):
        ids = [random.randrange(1000, 40_000) for _ in range(length)]
        prefill, decode = ({cell: list[float]() for cell in cells} for _ in range(2))
        for _ in range(args.repeats):
            for cell, engine in engines.items():
                started = time.perf_counter()
                with engine.prefill(ids) as context:
                    prefill[cell].append(time.perf_counter() - started)
                    decode[cell] += gaps(engine, context)
        for cell in cells:
            seconds, step = statistics.median(prefill[cell]), statistics.median(decode[cell])
            ratio = seconds / statistics.median(prefill["full"])
            print(
                f"{length:>7,}  {seconds:7.2f} s  {ratio:6.3f} x full  {1000 * step:6.1f} ms a token  {cell}",
                flush=True,
            )


def loaded(cell: str, args: argparse.Namespace) -> lce.Engine:
    name, *words = cell.split()
    knobs = dict(word.split("=", 1) for word in words)
    before = knobs.pop("prefill_method", None)
    methods = named_methods(name, knobs, before)
    return lce.load(args.model, **methods, dtype=args.dtype, kv_dtype=args.kv_dtype)


def gaps(engine: lce.Engine, context: lce.Context) -> list[float]:
    """Return the seconds between the tokens of an answer."""
    times = [time.perf_counter() for _ in engine.stream([5, 6, 7], context=context, max_tokens=24)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    main()
