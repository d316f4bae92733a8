"""Measures decoding 1, 2, 4 and 8 lanes in one pass: the speed, and whether each lane has the bits it has alone.

    python benchmarks/lanes.py
    python benchmarks/lanes.py --lengths 512 --method longheads --dtype bfloat16

Weights are random, of a named shape. Each lane has its own context and text. Prints, for each length and number of
lanes, tokens a second of all lanes together, beside one lane, and whether each lane's logits equal, to the bit, its
logits in the same steps alone. Figures are medians of the repeats, of steps in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from models import SHAPES, make_checkpoint, token_ids
from torch import Tensor

import lce
from lce.engine.lanes import forward
from lce.engine.running import lane_of
from lce_lab.bench import machine


def main() -> None:
    warnings.filterwarnings("ignore", message=".* that the method full can read")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="1,2,4,8")
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--method", default="full")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    counts = [int(n) for n in args.lanes.split(",")]
    print(f"{machine()}; {args.shape}, {args.dtype}, {args.method}; medians of {args.steps} steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), SHAPES[args.shape], args.dtype)
        engine = lce.load(folder, args.method, dtype=args.dtype)
        for length in (int(n) for n in args.lengths.split(",")):
            compare(engine, length, counts, args.steps)


def compare(engine: lce.Engine, length: int, counts: list[int], n_steps: int) -> None:
    print(f"\n### {length:,} tokens\n\n| lanes | tokens/s | of one lane | bits of its own |\n|---:|---:|---:|---|")
    ids = token_ids(length + max(counts))
    contexts = [engine.prefill(ids[i : i + length], length=length + 2 * n_steps) for i in range(max(counts))]
    truth = [steps(engine, [context.fork()], n_steps)[1] for context in contexts]
    one = 0.0
    for n in counts:
        seconds, logits = steps(engine, [context.fork() for context in contexts[:n]], n_steps)
        same = all(torch.equal(row[i], truth[i][k][0]) for k, row in enumerate(logits) for i in range(n))
        speed = n / statistics.median(seconds)
        one = one or speed / n
        print(f"| {n} | {speed:.4g} | {speed / one:.2f} | {'yes' if same else 'NO'} |", flush=True)


def steps(engine: lce.Engine, contexts: list[lce.Context], n_steps: int) -> tuple[list[float], list[Tensor]]:
    """Decode the same tokens in every context; return each step's seconds and logits `[B, vocab]`."""
    seconds, found = [], []
    for step in range(n_steps):
        lanes = [lane_of(engine.setup, context, [7 + step]) for context in contexts]
        started = time.perf_counter()
        found.append(torch.stack(forward(engine.setup.model, lanes, engine.setup.replays)))
        seconds.append(time.perf_counter() - started)
        for lane in lanes:
            lane.check()
    return seconds, found


if __name__ == "__main__":
    main()
