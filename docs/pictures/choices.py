"""What a real model's heads chose of a text: pictures of docs/methods.md, and what they show in words.

    python docs/pictures/choices.py longheads --out docs/pictures/longheads_choices.png

The text is a task of `lce eval`: a fact hidden in prose, and a question about it. Left: what every head of every layer
chose for the last token, the one after which the answer comes. Right: what one head chose for every token, the head
that ranks the fact highest for the last one. The band is where the fact stands. Tokens that every query attends are not
drawn: they are no choice. Needs lce[plot].
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import lce
from lce_lab.eval.sample import Sample
from lce_lab.eval.tasks import TASKS
from lce_lab.eval.tasks.making import samples

LEAST_BIN = 16  # tokens of a cell, where a choice is smaller
FACT, CHOSEN = "#D55E00", "Blues"


def shares(trace: lce.Trace, layer: int, n_tokens: int, size: int) -> Tensor:
    """`[H, T, bins]`: which share of each bin's `size` tokens a query of a head chose."""
    chosen = trace.chosen[layer]
    tokens = torch.zeros(*chosen.shape[:2], n_tokens + 1)  # the last one is for no choice
    for offset in range(trace.chunk_size):
        index = trace.first + chosen * trace.chunk_size + offset
        tokens.scatter_(-1, torch.where((chosen < 0) | (index >= n_tokens), n_tokens, index), 1.0)
    padded = torch.nn.functional.pad(tokens[..., :n_tokens], (0, -n_tokens % size))
    return padded.unflatten(-1, (-1, size)).mean(-1)


def fact_tokens(engine: lce.Engine, sample: Sample) -> range:
    """Where the sample's first fact stands in its prompt, in tokens."""
    start = sample.prompt.index(sample.facts[0])
    stop = start + len(sample.facts[0])
    return range(*(len(engine.tokenizer.encode(sample.prompt[:end].rstrip())) for end in (start, stop)))


def best_head(trace: lce.Trace, fact: range) -> tuple[int, int, int] | None:
    """The layer, the head, and the rank it gave the fact for the last token; None where no head chose it."""
    found = []
    for layer, (chosen, ranks) in enumerate(zip(trace.chosen, trace.ranks, strict=True)):
        start = trace.first + chosen[:, -1] * trace.chunk_size
        hit = (chosen[:, -1] >= 0) & (start < fact.stop) & (start + trace.chunk_size > fact.start)
        for head, slot in hit.nonzero().tolist():
            found.append((int(ranks[head, -1, slot]), -layer, head))  # of equal ranks the deepest layer
    rank, layer, head = min(found, default=(-1, 0, 0))
    return (-layer, head, rank) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("method")
    parser.add_argument("-o", dest="knobs", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--task", default="passkey")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    knobs = dict(knob.split("=", 1) for knob in args.knobs)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error("a picture needs the matplotlib package: pip install 'lce[plot]'")
    engine = lce.load(args.model, lce.methods.make(args.method, knobs))
    count = lambda text: len(engine.tokenizer.encode(text, bos=False))  # noqa: E731
    (sample,) = samples(TASKS[args.task](), length=args.length, n=1, seed=args.seed, count=count, depths=[0.4])
    ids = engine.tokenizer.encode(sample.prompt)
    trace, fact = engine.trace(ids), fact_tokens(engine, sample)
    best = best_head(trace, fact)
    layer, head, rank = best or (len(trace.chosen) - 1, 0, -1)
    answer = engine.generate(ids, max_tokens=count(sample.answer) + 2).text.strip()
    choosing = [index for index, chosen in enumerate(trace.chosen) if chosen.shape[-1]]
    size = max(trace.chunk_size, LEAST_BIN)
    if not choosing:
        parser.error(f"{args.method} chooses nothing: there is nothing to draw")
    by_layer = {index: shares(trace, index, len(ids), size) for index in choosing}
    draw(args.out, by_layer, (layer, head), fact, size, f"{engine.method.name}, {args.model}: {len(ids):,} tokens")
    where = f"layer {layer}, head {head} ranks it {rank + 1}" if best else "no head chose it"
    print(
        f"{engine.method}\nasked for {sample.answer.strip()!r}, answered {answer!r}; the fact: tokens {fact}; {where}"
    )


def draw(out: Path, shares: dict[int, Tensor], at: tuple[int, int], fact: range, size: int, title: str) -> None:
    """Both pictures side by side. `shares [H, T, bins]` of each layer that chooses; `at` is a layer and a head."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    last = torch.cat([x[:, -1] for x in shares.values()])  # [layers · H, bins]
    n_heads, n_tokens, n_bins = next(iter(shares.values())).shape
    one = shares[at[0]][at[1]]  # [T, bins]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    extent = (0, n_bins * size)
    left.imshow(
        last.numpy(), cmap=CHOSEN, vmin=0, vmax=1, aspect="auto", extent=(*extent, len(last), 0), interpolation="none"
    )
    right.imshow(
        one.numpy(), cmap=CHOSEN, vmin=0, vmax=1, aspect="auto", extent=(*extent, n_tokens, 0), interpolation="none"
    )
    left.set_yticks([(i + 0.5) * n_heads for i in range(len(shares))], [f"layer {layer}" for layer in shares])
    for i in range(1, len(shares)):
        left.axhline(i * n_heads, color="black", linewidth=0.6)
    left.set_title(f"the last token, every head ({n_heads} a layer)", fontsize="medium")
    right.set_title(f"every token, layer {at[0]}, head {at[1]}", fontsize="medium")
    right.set_ylabel("query i")
    for axes in (left, right):
        axes.set_xlabel("key j, in tokens")
        low, high = axes.get_ylim()
        start = fact.start // size * size
        width = -(-fact.stop // size) * size - start
        axes.add_patch(Rectangle((start, high), width, low - high, fill=False, edgecolor=FACT, linewidth=1.6))
    figure.suptitle(title)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
