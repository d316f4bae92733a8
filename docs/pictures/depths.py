"""Facts by method and depth, a picture of docs/findings.md, and the counts of its first table.

    python docs/pictures/depths.py benchmarks/record/smollm2/answers.jsonl --length 16384 --out docs/pictures/depths.png

Draws one task of one record or several at one length, as `lce eval report --plots` draws every task, and prints how
many answers of each method are right, and how many of the first half of the text. Needs lce[plot].
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib import rc_context

from lce_lab.eval.plots import DPI, STYLE, by_depth
from lce_lab.eval.report import Report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    parser.add_argument("--task", default="several_facts")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    (table,) = (each for each in Report.read(args.records, ranked=True).tables if args.task in each.title)
    table.cells = {key: cell for key, cell in table.cells.items() if key[1] == args.length}
    print("| method | right | of the first half |\n|---|---:|---:|")
    for (method, _), cell in sorted(table.cells.items(), key=lambda each: -each[1].score.mean):
        scores = filter(None, (cell.score, cell.between(0, 0.5)))
        counts = (f"{score.mean * score.samples:.0f} of {score.samples}" for score in scores)
        print("|", " | ".join([f"`{method}`", *counts]), "|")
    with rc_context(STYLE):
        figure = by_depth(table)
        assert figure is not None
        figure.savefig(args.out, dpi=DPI)


if __name__ == "__main__":
    main()
