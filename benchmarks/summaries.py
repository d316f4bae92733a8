"""Measures the distance of LongHeads' summaries from the chunks' mean keys, and its effect.

    python benchmarks/summaries.py --model demo
    python benchmarks/summaries.py --model demo --samples 50 --length 8k

Reads one text of pass keys and prints, for each layer, the median over chunks and heads of `|c - mean| / |mean|`: c is
the summary, mean the mean of the keys at their offsets. `--samples N` also asks N pass keys twice: of `longheads`, and
of `longheads` with the mean key instead of the summary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

import lce
from lce import sizes
from lce_lab.eval.suite import MadeSuite, make_tasks

FOUND: list[Tensor] = []  # a block's distances in one layer, layer by layer, block by block


def mean_key(q: Tensor, k: Tensor) -> Tensor:
    """Return the mean of each chunk's keys for each query head: `k [G, M, L, D]` to `[H, M, D]`."""
    return k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)


@dataclass(frozen=True)
class Measured(lce.methods.LongHeads):
    """LongHeads that notes its summaries' distances from the mean keys."""

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: lce.methods.Step) -> Tensor:
        summary = super().summarise(q, k, v, step)
        mean = mean_key(q, k)
        FOUND.append(((summary - mean).norm(dim=-1) / mean.norm(dim=-1)).flatten())
        return summary


@dataclass(frozen=True)
class MeanKeys(lce.methods.LongHeads):
    """LongHeads whose summary is the mean key."""

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: lce.methods.Step) -> Tensor:
        return mean_key(q, k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--length", default="8k")
    args = parser.parse_args()
    length = sizes.count(args.length, "--length")
    engine = lce.load(args.model, method=Measured())
    (task,) = make_tasks(["passkey"])
    engine.prefill(MadeSuite(samples=1, seed=args.seed).make(engine, task, args.tokens)[0].prompt)
    n_layers = engine.setup.model.config.n_layers
    for layer in range(n_layers):
        print(f"layer {layer}: {torch.cat(FOUND[layer::n_layers]).median():.3f}")
    for name, method in (("summary", lce.methods.LongHeads()), ("mean key", MeanKeys())) if args.samples else ():
        score = MadeSuite(args.samples, args.seed).evaluate(lce.load(args.model, method=method), task, length)
        print(f"{name}: {score.mean:.2f} of {args.samples} pass keys, {score.low:.2f} to {score.high:.2f}")


if __name__ == "__main__":
    main()
