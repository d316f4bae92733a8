"""Times the questions about one document: each read by itself, of forks one after another, and of forks at once.

    python benchmarks/smollm2/questions.py --essays ESSAYS --length 7680

A document of `medley`, 27 questions. Prints seconds a question, without and with its share of the document's prefill,
and checks that the answers of one lane and of eight are the same.
"""

from __future__ import annotations

import argparse
import time

import lce
from lce_lab.bench import machine
from lce_lab.eval.running import Asking, answers
from lce_lab.eval.suite import MadeSuite, make_tasks

ALONE = 3  # questions that are asked with a prefill of their own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--essays", required=True)
    parser.add_argument("--length", type=int, default=7680)
    parser.add_argument("--method", default="full")
    args = parser.parse_args()
    engine = lce.load("smollm2", args.method, dtype="bfloat16")
    suite = MadeSuite(samples=1, questions=40, filler=f"essays:{args.essays}")
    made, said = suite.make(engine, *make_tasks(["medley"]), args.length), {}
    print(f"{machine()}; {args.method}, {args.length:,} tokens, {len(made)} questions")
    for name, asking, asked in (
        ("each alone", Asking(), made[:ALONE]), ("forks, 1 lane", Asking("shared", lanes=1), made),
        ("forks, 8 lanes", Asking("shared"), made),
    ):  # fmt: skip
        started = time.perf_counter()
        found = answers(engine, asked, setting={"task": "medley"}, asking=asking)
        seconds, prefill = time.perf_counter() - started, found[0][1].prefill_s or 0.0
        own = (seconds - prefill) / len(asked)
        print(f"{name:>15}: {own:6.2f} s a question, {seconds / len(asked):6.2f} s with its share of the prefill")
        said[name] = [answer.answer for _, answer in found]
    assert said["forks, 1 lane"] == said["forks, 8 lanes"]


if __name__ == "__main__":
    main()
