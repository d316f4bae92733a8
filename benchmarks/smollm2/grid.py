"""Asks a published model for facts hidden in essays, with methods and with pairs of selection and placement.

    python benchmarks/smollm2/grid.py --essays ESSAYS --record grid.jsonl
    python benchmarks/smollm2/grid.py --essays ESSAYS --record grid.jsonl --lengths 16000 --select bounds,summary \
        --placement side_by_side,dual --page 16,64 --budget 2048,4096 --methods "dca; longheads chunk_size=64 chunks=64"
    python benchmarks/smollm2/grid.py --essays ESSAYS --record grid.jsonl --lengths 16000 --page "" \
        --methods "pages budget=2048 prefill_method=self_extend; pages share=group budget=2944"

ESSAYS is a folder of .txt files. A document has eight facts in words (`several_facts` of `lce eval`), asked one by one
of forks. The first row is the ceiling: `full` at the largest length that the window holds. Answers are recorded one by
one; the same command continues where it was interrupted, and another command may add cells to the same record. Prints
a row a cell: right answers, their interval of 95%, and the bytes that a decode step reads.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import lce
from lce.terminal.reading import named_methods
from lce_lab.bench import machine
from lce_lab.eval.record import Record
from lce_lab.eval.running import Asking
from lce_lab.eval.suite import MadeSuite, make_tasks

CEILING = 7680  # tokens; the largest length whose questions and answers fit a window of 8,192 with some space
METHODS = "dca; self_extend; rerope; longheads; quest; infllm; esa compress=pca"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--essays", required=True)
    parser.add_argument("--record", required=True)
    parser.add_argument("--lengths", default="12000")
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--methods", default=METHODS, help="separated by ';', each with its knobs; prefill_method=NAME is one"
    )
    for axis, values in (("select", "bounds"), ("placement", "side_by_side"), ("page", "16,32,64"), ("budget", "4096")):
        parser.add_argument(f"--{axis}", default=values, help="values of a knob of the method pages, or '' for none")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".* that the method .* can read")
    suite = MadeSuite(
        samples=args.documents, questions=8, seed=args.seed, filler=f"essays:{args.essays}", asking=Asking("shared")
    )
    (task,) = make_tasks(["several_facts"])
    print(f"{machine()}; {args.model}, {args.dtype}; {args.documents} documents of 8 facts, seed {args.seed}")
    print(f"{'tokens':>7}  {'right':>7}  {'interval':>14}  {'read':>9}  cell", flush=True)
    for length, name, knobs in cells(args):
        own = {key: value for key, value in knobs.items() if key != "prefill_method"}
        engine = lce.load(args.model, **named_methods(name, own, knobs.get("prefill_method")), dtype=args.dtype)
        score = suite.evaluate(engine, task, length, record=Record(args.record))
        interval, cell = (
            f"{score.low:.0%} to {score.high:.0%}",
            " ".join([name, *(f"{k}={v}" for k, v in knobs.items())]),
        )
        read = f"{(score.read_bytes or 0) / 2**20:.1f} MiB"
        print(f"{length:>7,}  {score.mean:>7.0%}  {interval:>14}  {read:>9}  {cell}", flush=True)


def cells(args: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield each cell's length, its method, and the method's knobs."""
    yield CEILING, "full", {}
    axes = [(axis, getattr(args, axis).split(",")) for axis in ("select", "placement", "page", "budget")]
    for length in map(int, args.lengths.split(",")):
        for each in filter(None, map(str.strip, args.methods.split(";"))):
            name, *knobs = each.split()
            yield length, name, dict(knob.split("=", 1) for knob in knobs)
        for values in itertools.product(*(values for _, values in axes)):
            if all(values):
                yield length, "pages", dict(zip((axis for axis, _ in axes), values, strict=True))


if __name__ == "__main__":
    main()
