"""Asks a published model for facts in essays, from contexts of which KVzip evicted keys: `lce prefill --keep SHARE`.

    python benchmarks/smollm2/eviction.py --essays ESSAYS
    python benchmarks/smollm2/eviction.py --essays ESSAYS --length 6000 --documents 5 --keep 1,0.7,0.5

ESSAYS is a folder of .txt files. A document has eight facts in words (`several_facts` of `lce eval`), asked one by one
of forks. For each share that is kept, prints right answers, the bytes of the context's file, and the seconds of prefill
and of `Engine.evict`. The rows `random` keep the same number of keys, drawn at random in each head, the first four of
the text among them.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import lce
from lce_lab.bench import machine
from lce_lab.eval.metrics import METRICS
from lce_lab.eval.prefixes import n_common
from lce_lab.eval.running import Asking, answer_tokens
from lce_lab.eval.sample import Sample
from lce_lab.eval.suite import MadeSuite, make_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--essays", required=True)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", default="1,0.7,0.5,0.3")
    parser.add_argument("--random", default="0.7,0.5", help="shares to keep at random, or '' for none")
    args = parser.parse_args()
    suite = MadeSuite(
        samples=args.documents, questions=8, seed=args.seed, filler=f"essays:{args.essays}", asking=Asking("shared")
    )
    engine = lce.load(args.model, dtype=args.dtype)
    print(f"{machine()}; {args.model}, {args.dtype}; {args.documents} documents of 8 facts, seed {args.seed}")
    cells = [("KVzip", x) for x in shares(args.keep)] + [("random", x) for x in shares(args.random)]
    right, figures = defaultdict[Any, list[bool]](list), defaultdict[Any, list[Sequence[float]]](list)
    made = suite.make(engine, make_tasks(["several_facts"])[0], args.length)
    for _, group in itertools.groupby(made, key=lambda sample: sample.beginning):
        ids, questions = split(engine, list(group))
        began = time.perf_counter()
        with engine.prefill(ids) as context, tempfile.TemporaryDirectory() as folder:
            prefill_s = time.perf_counter() - began
            for cell in cells:
                began = time.perf_counter()
                with chosen_by(cell[0]), engine.evict(context, cell[1]) as kept:
                    seconds = time.perf_counter() - began
                    kept.save(path := Path(folder) / "kept.lce", force=True)
                    figures[cell].append((path.stat().st_size / 2**20, prefill_s, seconds))
                    for sample, question in questions:
                        right[cell].append(answered(engine, kept, sample, question))
                print(f"  {len(ids):,} tokens, {cell}: {sum(right[cell])} of {len(right[cell])} so far", flush=True)
    print(f"{'tokens':>7}  {'kept':>12}  {'right':>9}  {'file':>10}  {'prefill':>8}  {'evict':>8}")
    for cell in cells:
        n_bytes, prefill_s, seconds = (sum(x) / len(x) for x in zip(*figures[cell], strict=True))
        print(
            f"{args.length:>7,}  {cell[0]:>7} {cell[1]:>4g}  {sum(right[cell]):>3} of {len(right[cell])}  "
            f"{n_bytes:>6.1f} MiB  {prefill_s:>6.1f} s  {seconds:>6.1f} s"
        )


def shares(text: str) -> list[float]:
    return [float(each) for each in text.split(",") if each]


def split(engine: lce.Engine, group: Sequence[Sample]) -> tuple[list[int], list[tuple[Sample, list[int]]]]:
    """Return the tokens of a document, and each question with its tokens, as `lce eval` splits them."""
    prompts = [engine.tokenizer.encode(sample.prompt) for sample in group]
    ids = engine.tokenizer.encode(group[0].beginning)
    ids = ids[: min(n_common(ids, prompt[:-1]) for prompt in prompts)]
    return ids, [(sample, prompt[len(ids) :]) for sample, prompt in zip(group, prompts, strict=True)]


def answered(engine: lce.Engine, context: lce.Context, sample: Sample, question: list[int]) -> bool:
    """Return whether a fork of the context answers the question."""
    with context.fork() as fork:
        said = engine.generate(question, context=fork, max_tokens=answer_tokens(engine, sample))
    return METRICS[sample.metric](said.text, sample.answers) == 1


@contextmanager
def chosen_by(name: str) -> Iterator[None]:
    """Replace the scores of keys by random numbers inside `with`, if `name` is "random"."""
    if name != "random":
        yield
        return
    generator = torch.Generator().manual_seed(0)

    def scores(setup: Any, context: lce.Context, *_: Any) -> list[torch.Tensor]:
        return [torch.rand(len(x.buffer.k), len(context), generator=generator) for x in context.cache.layers]

    with patch("lce.engine.eviction.attention_peaks", scores):
        yield


if __name__ == "__main__":
    main()
