"""Measures which summaries of chunks find what full attention attends, within a model's window.

    python benchmarks/choices.py --model smollm2 --essays ESSAYS
    python benchmarks/choices.py --model MODEL.gguf --essays ESSAYS --length 5000 --facts 1 --every 3

A text of `--length` tokens has facts and ends with a question and its answer. The queries are the last 12 tokens. For
each size of chunks and each kind of summary, a head takes the chunks that score best, as many as hold an eighth of the
text; with "together" the heads of a KV head take the same. Printed is the part of the attention to the fact's tokens
that the taken chunks hold, and of the attention to all chunks between the first and the last one: the mean over layers,
heads and queries, weighted by attention. `values` is the paper's summary, `keys` lce's, `mean` the mean key, `bounds`
those of Quest, and `oracle` the attention itself. A model that fails at the text's distances is no judge.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import lce
from lce.attention import Turn
from lce.methods import Rope, Step, rotate
from lce_lab.bench import machine
from lce_lab.eval.suite import MadeSuite, make_tasks

GRAB, QUERIES, SHARE = 32, 12, 8  # tokens of a chunk that is recorded, queries, and the text's part that is taken
SEEN: list[tuple[Tensor, Tensor, Tensor]] = []  # q, k, v of the chunks that a block completes, layer by layer


@dataclass(frozen=True)
class Seen(lce.methods.LongHeads):
    """LongHeads that notes the chunks it is given."""

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        SEEN.append((q.float(), k.float(), v.float()))
        return k.mean(2).repeat_interleave(len(q) // len(k), dim=0)


def summaries(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield kinds of summaries `[H, M, D]` of chunks `q k v [H, M, L, D]`, rotated to their offsets."""
    root = math.sqrt(q.shape[-1])
    own = (q @ k.mT / root).softmax(-1)
    most = own.amax(2)
    yield "keys", ((most / most.sum(-1, keepdim=True)).unsqueeze(2) @ k).squeeze(2)
    yield "values", (((own @ v).mean(2, keepdim=True) @ k.mT / root).softmax(-1) @ k).squeeze(2)
    yield "mean", k.mean(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--essays", required=True, help="a folder of .txt files")
    parser.add_argument("--length", type=int, default=5000)
    parser.add_argument("--facts", type=int, default=3, help="questions, each a text of its own")
    parser.add_argument("--every", type=int, default=1, help="layers between those that are measured")
    parser.add_argument("--sizes", default="4,8,16,32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine = lce.load(args.model, method=Seen(chunk_size=GRAB, chunks=10**6), dtype=args.dtype)
    config, rope = engine.setup.config, engine.setup.rope_of(args.length)
    suite = MadeSuite(samples=1, questions=8, seed=args.seed, filler=f"essays:{args.essays}")
    (task,) = make_tasks(["several_facts"])
    sums: dict[tuple[int, str], Tensor] = defaultdict(lambda: torch.zeros(4))
    for sample in suite.make(engine, task, args.length)[: args.facts]:
        ids = engine.tokenizer.encode(f"{sample.prompt} {sample.answer}")
        cut = len(ids) % GRAB  # tokens behind the first one that are left out, so that all chunks are complete
        start, stop = (
            len(engine.tokenizer.encode(sample.prompt[: sample.prompt.index(sample.facts[0]) + n])) - cut
            for n in (0, len(sample.facts[0]))
        )
        SEEN.clear()
        engine.prefill(ids[:1] + ids[1 + cut :]).close()
        for layer in range(0, config.n_layers, args.every):
            q, k, v = (torch.cat(some, dim=1) for some in zip(*SEEN[layer :: config.n_layers], strict=True))
            for size in map(int, args.sizes.split(",")):
                for kind, found in recall(q, k, v, rope, size, slice(start, stop)):
                    sums[size, kind] += found
    print(f"{machine()}; {args.model}, {args.dtype}; {args.length:,} tokens, {args.facts} facts, seed {args.seed}")
    print(f"{'chunk':>5}  {'summary':<16}  {'fact':>5}  {'all':>5}")
    for (size, kind), (fact, all_fact, mass, all_mass) in sums.items():
        print(f"{size:>5}  {kind:<16}  {fact / all_fact:>5.2f}  {mass / all_mass:>5.2f}")


def recall(q: Tensor, k: Tensor, v: Tensor, rope: Rope, size: int, fact: slice) -> Iterator[tuple[str, Tensor]]:
    """Yield for each kind of summary the attention to the fact that is taken, all of it, and the same of all chunks."""
    (_, n_grabbed, _, dim), rep = q.shape, len(q) // len(k)
    n, back = n_grabbed * GRAB, rope.turn(torch.arange(GRAB), torch.float32)
    q, k = (rotate(x, Turn(back.cos, -back.sin)).flatten(1, 2) for x in (q, k))
    k, v = k.repeat_interleave(rep, 0), v.flatten(1, 2).repeat_interleave(rep, 0)  # [H, N, D], unrotated
    i, m, true = torch.arange(n - QUERIES, n), n // size, rope.turn(torch.arange(n), torch.float32)
    logits = rotate(q, true)[:, i] @ rotate(k, true).mT / math.sqrt(dim)
    mass = logits.masked_fill(torch.arange(n) > i[:, None], -math.inf).softmax(-1)[..., : m * size]
    offsets = rope.turn(torch.arange(size), torch.float32)
    chunks = [x[:, : m * size].unflatten(1, (m, size)) for x in (q, k, v)]
    keys = rotate(chunks[1], offsets)
    asked, candidates = q[:, i], torch.arange(m) * (torch.arange(m) < i[:, None] // size - 1)
    scores = {kind: asked @ c.mT for kind, c in summaries(rotate(chunks[0], offsets), keys, chunks[2])}
    low, high = keys.aminmax(dim=2)
    scores["bounds"] = asked.clamp(min=0) @ high.mT + asked.clamp(max=0) @ low.mT
    scores["oracle"] = mass.unflatten(-1, (m, size)).sum(-1)
    for kind in ("keys", "values", "bounds"):
        both = scores[kind].unflatten(0, (-1, rep)).sum(1).repeat_interleave(rep, 0)
        scores[f"{kind} together"] = both
    for kind, found in scores.items():
        best = found.masked_fill(candidates == 0, -math.inf).topk(m // SHARE, dim=-1).indices
        taken = torch.zeros_like(found, dtype=torch.bool).scatter_(-1, best, True)
        held = mass * taken.repeat_interleave(size, dim=-1)
        of_chunks = scores["oracle"]
        parts = held[..., fact].sum(), mass[..., fact].sum(), held.sum(), (of_chunks * (candidates > 0)).sum()
        yield kind, torch.stack(parts)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
