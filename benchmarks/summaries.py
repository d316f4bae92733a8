"""How far LongHeads' summaries are from the chunks' mean keys, layer by layer.

    python benchmarks/summaries.py --model demo

Reads one text of pass keys. For each layer it prints the median over chunks and heads of `|c - mean| / |mean|`: c is
the summary, mean the mean of the chunk's keys at their offsets.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

import lce
from lce.eval.passkey import samples

FOUND: list[Tensor] = []  # a block's distances in one layer, layer by layer, block by block


@dataclass(frozen=True)
class Measured(lce.methods.LongHeads):
    """LongHeads that notes its summaries' distances from the mean keys."""

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: lce.methods.Step) -> Tensor:
        summary = super().summarise(q, k, v, step)
        mean = k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)
        FOUND.append(((summary - mean).norm(dim=-1) / mean.norm(dim=-1)).flatten())
        return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine = lce.load(args.model, method=Measured())

    def count(text: str) -> int:
        return len(engine.tokenizer.encode(text, bos=False))

    engine.prefill(next(samples("passkey", "prose", args.tokens, 1, args.seed, count)).prompt)
    n_layers = engine.model.config.n_layers
    for layer in range(n_layers):
        print(f"layer {layer}: {torch.cat(FOUND[layer::n_layers]).median():.3f}")


if __name__ == "__main__":
    main()
