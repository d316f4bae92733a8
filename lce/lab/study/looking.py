"""A closer look at some queries of a run, when it is over: true attention beside what was chosen, and why it misses.

The keys of the whole text are in the cache by then. They are rotated once for many queries, and queries are taken so
many at a time that their weights over all keys stay bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lce.lab.study.given import given
from lce.lab.study.packing import Numbers
from lce.lab.study.watching import LayerNotes, Noted, Watch
from lce.methods.mass import Judge, TrueMass, scored_bytes

BEST = 8  # choices with most true attention that are listed
ENOUGH = 0.9  # of true attention: a head that attends as much misses nothing
MOVED = 0.5  # of its attention: a head that gives so much to other tokens than the true one is misled by distances
COMPARED = 16  # last tokens of the prompt whose own attention is computed too, and all generated ones
NUMBERS_AT_ONCE = 1 << 23  # weights of a slice of queries

Mark = tuple[int, int]  # tokens start..stop-1
Look = dict[str, Any]


class Looks:
    """Makes the looks at the queries that a `Watch` kept."""

    def __init__(
        self, watch: Watch, choices: tuple[int, int], marks: Sequence[Mark] = (), judge: Judge = "constant",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.watch, (self.first, self.size), self.marks, self.judge = watch, choices, marks, judge
        self.compared_from = watch.n_prompt - COMPARED
        self.progress = progress or (lambda done, total: None)

    @torch.inference_mode()
    def made(self) -> dict[int, Look]:
        """The looks, by the query's index."""
        looks: dict[int, Look] = {}
        choosers = self.watch.choices.choosers if self.watch.choices is not None else 1
        for layer in sorted(self.watch.layers):
            notes = self.watch.layers[layer]
            for some in self._slices(notes):
                self.watch.check()
                weights = self._weights(notes, some)
                masses = self._masses(weights)
                numbers = weights.numpy()
                for at, noted in enumerate(some):
                    look = looks.setdefault(noted.query, _empty_look())
                    row = _Row(self, notes, noted, numbers[:, at, : noted.query + 1], masses[:, at])
                    row.add_to(look, choosers)
            self.progress(layer + 1, len(self.watch.layers))
        return looks

    def _slices(self, notes: LayerNotes) -> Iterator[list[Noted]]:
        """The layer's queries in order, some at a time."""
        some: list[Noted] = []
        for query in sorted(notes.noted):
            noted = notes.noted[query]
            if some and (len(some) + 1) * (query + 1) * len(noted.q) > NUMBERS_AT_ONCE:
                yield some
                some = []
            some.append(noted)
        if some:
            yield some

    def _weights(self, notes: LayerNotes, some: Sequence[Noted]) -> Tensor:
        """True attention of some queries, `[H, T, N]`, on the CPU."""
        first, stop = some[0].query, some[-1].query + 1
        step = replace(notes.step, start=first, stop=stop, memo={}, all_devices={}, note=None, note_scores=None)
        q = torch.stack([noted.q for noted in some], dim=1)
        positions = torch.tensor([noted.query for noted in some], device=q.device)
        return TrueMass(notes.method, notes.cache, step, self.judge).weights(q, positions).cpu()

    def _masses(self, weights: Tensor) -> Numbers:
        """The sums of weights `[H, T, N]` over each choice: `[H, T, M]`."""
        n = weights.shape[-1] - self.first
        if n <= 0:
            return np.zeros((*weights.shape[:2], 0))
        size = min(self.size, n)  # a choice may be far longer than the text
        padded = torch.nn.functional.pad(weights[..., self.first :], (0, -n % size))
        masses: Numbers = padded.unflatten(-1, (-1, size)).sum(-1).numpy()
        return masses


def _empty_look() -> Look:
    return {"bytes": {"read": 0, "scored": 0, "full": 0}, "always": [], "distances": [], "layers": []}


class _Row:
    """One query in one layer: `weights [H, n]` is its true attention to the n tokens up to itself."""

    def __init__(self, looks: Looks, notes: LayerNotes, noted: Noted, weights: Numbers, masses: Numbers) -> None:
        self.looks, self.notes, self.noted, self.weights = looks, notes, noted, weights
        (self.n_heads, n), first, size = weights.shape, looks.first, looks.size
        self.n_chunks = max(0, -(-(n - first) // size))
        self.masses = masses[:, : self.n_chunks]  # [H, M]
        self.chosen: Numbers = noted.chosen.numpy()  # [H, K]
        self.taken = self.chosen >= 0
        self.scores, self.ranks = self._by_head()

    def _by_head(self) -> tuple[Numbers | None, Numbers | None]:
        """Scores and ranks of all choices, `[H, M]`: NaN and -1 for those that the query does not have."""
        scores = self.noted.scores
        if scores is None or not scores.shape[-1]:
            return None, None
        own = scores.numpy()
        order = np.argsort(-own, axis=-1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(own.shape[1])[None], axis=-1)
        ranks[own == -np.inf] = -1
        shape = self.n_heads, self.n_chunks
        all_scores, all_ranks = np.full(shape, np.nan), np.full(shape, -1)
        n, repeat = min(own.shape[1], shape[1]), self.n_heads // len(own)
        all_scores[:, :n] = np.where(own == -np.inf, np.nan, own)[:, :n].repeat(repeat, 0)
        all_ranks[:, :n] = ranks[:, :n].repeat(repeat, 0)
        return all_scores, all_ranks

    def add_to(self, look: Look, choosers: int) -> None:
        """Add what is known of this layer to a look. `choosers` of the run's heads choose on their own."""
        spans = self.noted.spans
        always = None if spans is None else _number_of(look["always"], [list(piece) for piece in self.noted.near])
        layer: dict[str, Any] = {"always": always, "chosen": [], "scores": [], "ranks": []}
        if self.taken.any():
            for head in range(0, self.n_heads, self.n_heads // choosers):
                picked = self.chosen[head][self.taken[head]]
                none = [None] * len(picked)
                layer["chosen"].append(picked.tolist())
                layer["scores"].append(none if self.scores is None else rounded(self.scores[head, picked], digits=4))
                layer["ranks"].append(none if self.ranks is None else self.ranks[head, picked].tolist())
        layer["heads"] = self._heads(look)
        look["layers"].append(layer)
        self._count_bytes(look["bytes"])

    def _heads(self, look: Look) -> list[dict[str, Any]]:
        """What each head attended, beside its true attention."""
        safe = np.where(self.taken, self.chosen, 0)
        mass = np.where(self.taken, np.take_along_axis(self.masses, safe, 1), 0.0) if self.n_chunks else safe * 0.0
        recalls, bests, shares = self._recalls(mass, safe), self._bests(), rounded(mass)
        distances = None if self.noted.distances is None else self.noted.distances.numpy()
        patterns: dict[bytes, int] = {}
        own_share, moved = self._given(mass)
        marks = [self._mark(number) for number in self._marks_before()]
        found = []
        for head in range(self.n_heads):
            own = self.taken[head].tolist()
            pattern = None
            if distances is not None and any(own):
                pairs = distances[head][self.taken[head]]
                if (key := pairs.tobytes()) not in patterns:
                    patterns[key] = _number_of(look["distances"], pairs.tolist())
                pattern = patterns[key]
            extra = (
                {} if own_share is None else {"given": [x for x, yes in zip(own_share[head], own, strict=True) if yes]}
            )
            if recalls[head]["why"] is None and moved is not None and moved[head] > MOVED:
                recalls[head] = {**recalls[head], "why": "placement"}
            found.append({
                **extra, "distances": pattern, "mass": [x for x, there in zip(shares[head], own, strict=True) if there],
                "best": bests[head], "marked": [mark[head] for mark in marks], **recalls[head],
            })  # fmt: skip
        return found

    def _given(self, mass: Numbers) -> tuple[Any, Any]:
        """The method's own attention to each choice, `[H][K]`, and how far it is from the true one, by head.

        That is half the sum of differences (total variation) between both, among what is attended. None and None where
        it is not computed.
        """
        looks, noted = self.looks, self.noted
        if noted.query < looks.compared_from or not self.taken.any():
            return None, None
        found = given(self.notes, noted, looks.first, looks.size)
        if found is None:
            return None, None
        pieces = [self.weights[:, a:b].sum(-1) for a, b, *_ in noted.near]
        true = np.concatenate([mass, np.stack(pieces, axis=1)], axis=1)
        true = true / np.maximum(true.sum(-1, keepdims=True), 1e-9)
        own = torch.cat((found.of_choices, found.of_pieces), dim=1).numpy()
        return rounded(own[:, : mass.shape[1]]), np.abs(own - true).sum(-1) / 2

    def _bests(self) -> list[list[list[Any]]]:
        """The choices with most true attention, best first: `[choice, mass, rank or -1, 1 if chosen]`, by head."""
        n = min(BEST, self.n_chunks)
        some = np.argpartition(-self.masses, n - 1, axis=-1)[:, :n] if n else np.zeros((self.n_heads, 0), np.int64)
        order = np.argsort(-np.take_along_axis(self.masses, some, 1), axis=-1, kind="stable")
        best = np.take_along_axis(some, order, 1)
        shares = rounded(np.take_along_axis(self.masses, best, 1))
        ranks = np.full_like(best, -1) if self.ranks is None else np.take_along_axis(self.ranks, best, 1)
        chosen = (best[:, :, None] == self.chosen[:, None]).any(-1).astype(int)
        rows = zip(best.tolist(), shares, ranks.tolist(), chosen.tolist(), strict=True)
        return [[list(one) for one in zip(*row, strict=True)] for row in rows]

    def _recalls(self, mass: Numbers, safe: Numbers) -> list[dict[str, Any]]:
        """The share of true attention that each head attends, and what the best choice of as many would."""
        spans = self.noted.spans
        if spans is None:
            return [{"recall": None, "always_mass": None, "reachable": None, "why": None}] * self.n_heads
        always = sum((self.weights[:, a:b].sum(-1) for a, b in spans), np.zeros(self.n_heads))
        recall = always + mass.sum(-1) - self._twice(safe)
        reachable, counts = recall, self.taken.sum(-1)
        if self.scores is not None and counts.any():
            could = np.where(np.isnan(self.scores), 0.0, self.masses)
            most = min(int(counts.max()), could.shape[1])
            best = -np.sort(np.partition(-could, most - 1, axis=-1)[:, :most], axis=-1)
            sums = np.concatenate([np.zeros((self.n_heads, 1)), best.cumsum(-1)], axis=1)
            within = np.take_along_axis(sums, counts[:, None].clip(max=most), 1)[:, 0]
            reachable = np.maximum(recall, always + within)
        missed, lost = 1 - recall, reachable - recall
        found = []
        for head in range(self.n_heads):
            why = None
            if missed[head] > 1 - ENOUGH:
                why = "selection" if counts[head] and lost[head] >= missed[head] / 2 else "budget"
            numbers = (round(min(float(x[head]), 1.0), 4) for x in (recall, always, reachable))
            found.append({**dict(zip(("recall", "always_mass", "reachable"), numbers, strict=True)), "why": why})
        return found

    def _twice(self, safe: Numbers) -> Numbers:
        """True attention to chosen tokens that are always attended too, by head."""
        first, size, twice = self.looks.first, self.looks.size, np.zeros(self.n_heads)
        starts = first + safe * size
        for a, b in self.noted.spans or ():
            for head, slot in zip(*(self.taken & (starts < b) & (starts + size > a)).nonzero(), strict=True):
                start = int(starts[head, slot])
                twice[head] += self.weights[head, max(a, start) : min(b, start + size)].sum()
        return twice

    def _marks_before(self) -> list[int]:
        return [number for number, (start, _) in enumerate(self.looks.marks) if start < self.weights.shape[1]]

    def _mark(self, number: int) -> list[list[Any]]:
        """By head: the mark, true attention to its tokens, the best rank of its choices or -1, the share attended."""
        start, stop = self.looks.marks[number]
        stop, first, size = min(stop, self.weights.shape[1]), self.looks.first, self.looks.size
        mass, ranks = rounded(self.weights[:, start:stop].sum(-1)), [-1] * self.n_heads
        a, b = max(0, (start - first) // size), max(0, (stop - 1 - first) // size + 1)
        if self.ranks is not None and b > a:
            most = self.n_chunks
            best = np.where(self.ranks[:, a:b] < 0, most, self.ranks[:, a:b]).min(-1)
            ranks = np.where(best == most, -1, best).tolist()
        token = np.arange(start, stop)
        always = np.zeros(len(token), bool)
        for x, y in self.noted.spans or ():
            always |= (token >= x) & (token < y)
        of = np.where(token >= first, (token - first) // size, -2)
        attended = ((of[None, :, None] == self.chosen[:, None]).any(-1) | always).mean(-1)
        return [[number, *rest] for rest in zip(mass, ranks, rounded(attended), strict=True)]

    def _count_bytes(self, counts: dict[str, float]) -> None:
        """Add the bytes of keys and values that this query reads in this layer, each KV head's token once."""
        noted, notes, n = self.noted, self.notes, self.weights.shape[1]
        n_kv_heads, vector = notes.step.n_kv_heads, 2 * noted.q.shape[-1] * notes.cache.layout.dtype.itemsize
        first, size = self.looks.first, self.looks.size
        spans = [[0, n]] if noted.spans is None else noted.spans
        for group in self.chosen.reshape(n_kv_heads, -1):
            ids = np.unique(group[group >= 0])
            starts, stops = first + ids * size, np.minimum(first + (ids + 1) * size, n)
            read = int((stops - starts).sum()) + sum(b - a for a, b in spans)
            for a, b in spans:
                read -= int(np.clip(np.minimum(stops, b) - np.maximum(starts, a), 0, None).sum())
            counts["read"] += read * vector
        counts["full"] += n * n_kv_heads * vector
        counts["scored"] += int(scored_bytes(notes.method, n - 1, noted.q[:, None], notes.cache, notes.step))


def _number_of(patterns: list[Any], pattern: Any) -> int:
    """Where a pattern is in a list, to which it is added if it is new."""
    if pattern not in patterns:
        patterns.append(pattern)
    return patterns.index(pattern)


def rounded(values: Numbers, *, digits: int | None = None) -> Any:
    """Numbers as JSON has them: 4 decimals, or so many digits of the largest; None for NaN."""
    x = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(x)
    most = float(np.abs(x[finite]).max()) if digits and finite.any() else 0.0
    decimals = 4 if not digits or not most else digits - 1 - math.floor(math.log10(most))
    kept = np.round(x, decimals)
    return kept.tolist() if finite.all() else _without_nan(np.where(finite, kept, np.nan).tolist())


def _without_nan(x: Any) -> Any:
    if isinstance(x, list):
        return [_without_nan(each) for each in x]
    return x if x == x else None
