"""Watches a method in a real run: what every query chooses, and what is needed to look at some queries more closely.

`Inspected` runs a method as it is, or with heads switched off. A `Watch` keeps the choices of all queries, and of those
that are looked at their scores, their spans and the queries themselves. True attention is computed after the run
(`lce.lab.study.looking`): all keys are in the cache still, and are rotated once for all queries that are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lce.lab.study.packing import MOST_BYTES, Choices, SpanRuns, Spans
from lce.methods import LayerCache, Method, Step, Wrapped
from lce.methods.mass import spans_by_query

Piece = tuple[int, int, int | None, int | None]  # tokens start..stop-1, and their least and largest distance
MOST_PIECES = 128  # of what a query always attends


@dataclass
class Noted:
    """One query in one layer, as it was when the method attended it."""

    query: int
    q: Tensor  # [H, D], unrotated
    chosen: Tensor  # [H, K], -1 for none
    scores: Tensor | None  # [C, M] by which it chose; -inf for what it does not have
    spans: Spans | None  # what it attends whatever is chosen
    near: list[Piece]  # at which distances it sees them
    distances: Tensor | None  # [H, K, 2], the least and the largest distance of each choice


@dataclass
class LayerNotes:
    """What was noted of a layer, and what its keys can be read by after the run."""

    method: Method
    cache: LayerCache
    step: Step
    spans: SpanRuns | None  # None: the method does not say
    noted: dict[int, Noted] = field(default_factory=dict)


class Watch:
    """What is kept of a run. `begin`, run, and read the fields."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.begin()

    def begin(
        self, n_prompt: int = 0, looked: Iterable[int] = (), off: Sequence[tuple[int, int]] = (),
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Watch a prompt of `n_prompt` tokens. Looked at are the queries `looked`, and all of generated tokens.

        The heads `off`, pairs of a layer and a head, are switched off. `check` is called often, and ends the run by
        what it raises.
        """
        self.n_prompt, self.looked, self.off = n_prompt, sorted(looked), tuple(off)
        self.check = check or (lambda: None)
        self.layers: dict[int, LayerNotes] = {}
        self.choices: Choices | None = None
        self.shared = SpanRuns()  # of all layers, until one differs
        self.pieces: dict[Any, list[Piece]] = {}

    def rows(self, step: Step) -> Tensor:
        """Which of the block's queries are looked at, counted from its first."""
        if step.start >= self.n_prompt:
            return torch.arange(step.stop - step.start)
        return torch.tensor([i - step.start for i in self.looked if step.start <= i < step.stop], dtype=torch.int64)

    def attend(self, method: Method, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """What the method gives for a block; notes what it chose."""
        self.check()
        layer, rows = cache.index, self.rows(step)
        if self.choices is None:
            self.choices = Choices(len(q), step.n_kv_heads, self.most_bytes)
        if layer == 0:
            self.choices.begin(step.start, step.stop)
        chosen: list[Tensor] = []
        scores: list[Tensor] = []
        noted = replace(step, note=lambda _, x: chosen.append(x))
        if len(rows):
            noted = replace(noted, note_scores=lambda _, x: scores.append(x), noted=rows.to(q.device))
        out = method.attend(q, cache, noted)
        if chosen and chosen[-1].shape[-1]:
            self.choices.add(layer, chosen[-1])
        notes = self.layers.setdefault(layer, LayerNotes(method, cache, step, self.shared))
        notes.step = step
        spans = self._spans(notes, step)
        if len(rows):
            self._note(notes, q, rows, chosen[-1] if chosen else None, scores[-1] if scores else None, spans)
        off = [head for at, head in self.off if at == layer]
        return out.index_fill(0, torch.tensor(off, device=out.device), 0.0) if off else out

    def _spans(self, notes: LayerNotes, step: Step) -> list[Spans] | None:
        """What each query of the block attends whatever is chosen; kept as runs, once for layers that are alike."""
        spans = spans_by_query(notes.method, notes.cache, step)
        block = step.start, step.stop
        if spans is None or notes.spans is None:
            notes.spans = None
        elif notes.spans.block != block:
            notes.spans.extend(block, spans)
        elif notes.spans.latest != spans:  # another layer had these runs too, and goes another way
            notes.spans = notes.spans.copy()
            notes.spans.extend(block, spans)
        return spans

    def _near(self, method: Method, step: Step, query: int, spans: Spans, device: torch.device) -> list[Piece]:
        """`distances_of`, once for all layers in which a query has these spans."""
        key = query, tuple(map(tuple, spans))
        if key not in self.pieces:
            self.pieces[key] = distances_of(method, step, query, spans, device)
        return self.pieces[key]

    def _note(
        self, notes: LayerNotes, q: Tensor, rows: Tensor, chosen: Tensor | None, scores: Tensor | None,
        spans: list[Spans] | None,
    ) -> None:  # fmt: skip
        """Keep the block's queries `rows`: their scores `[C, T, M]` may be those of all its queries."""
        method, step = notes.method, notes.step
        n = step.stop - step.start
        if scores is not None and scores.shape[1] == n != len(rows):
            scores = scores[:, rows.to(scores.device)]
        here = rows.to(q.device)
        picked = q.new_empty(len(q), len(rows), 0, dtype=torch.int64) if chosen is None else chosen[:, here]
        distances = None if chosen is None else method.choice_distance(chosen, step)
        distances = None if distances is None else distances[:, here].cpu()
        shared = scores is not None and scores.shape[1] > 1 and scores.stride(1) == 0  # the block chose together
        kept = None if scores is None else (scores[:, :1] if shared else scores).cpu().clone()
        if kept is not None and self.choices is not None:
            self.choices.count(kept.nbytes)
        queries = q[:, here].clone()
        for at, row in enumerate(rows.tolist()):
            query, own = step.start + row, None if spans is None else spans[row]
            near = [] if own is None else self._near(method, step, query, own, q.device)
            notes.noted[query] = Noted(
                query, queries[:, at], picked[:, at].cpu(), None if kept is None else kept[:, 0 if shared else at],
                own, near, None if distances is None else distances[:, at],
            )  # fmt: skip


def distances_of(method: Method, step: Step, query: int, spans: Spans, device: torch.device) -> list[Piece]:
    """The distances at which a query sees the tokens of its spans, in pieces.

    In a piece the distance falls by 1 from each token to the next, or is one for all. Where that makes too many pieces,
    each is a part of a span, with its least and largest distance.
    """
    index, found = torch.tensor([[query]], device=device), list[Piece]()
    for start, stop in spans:
        distance = method.distance(index, torch.arange(start, stop, device=device), step)
        if distance is None:
            found.append((start, stop, None, None))
            continue
        row = distance[0].cpu()
        found += [(start + a, start + b, int(row[a:b].min()), int(row[a:b].max())) for a, b in _pieces(row)]
    return found


def _pieces(distance: Tensor) -> list[tuple[int, int]]:
    """Cuts of the distances of `n` tokens: in each piece they are one, or fall by 1 from token to token.

    Example: 5, 4, 3, 9, 8, 8, 8 is cut in 5, 4, 3; 9, 8; 8, 8.
    """
    n, (steps, counts) = len(distance), distance.diff().unique_consecutive(return_counts=True)
    edges, at = [0], 0
    if len(steps) <= 4 * MOST_PIECES:
        for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
            if step not in (0, -1):
                edges += range(at + 1, at + 1 + count)
            elif edges[-1] != at:  # the token before the step is in another piece
                edges.append(at + 1)
            at += count
    if len(steps) > 4 * MOST_PIECES or len(edges) > MOST_PIECES:
        edges = list(range(0, n, -(-n // MOST_PIECES)))
    return list(zip(edges, [*edges[1:], n], strict=True))


@dataclass(frozen=True)
class Inspected(Wrapped):
    """A method that runs as it is while a `Watch` looks on and switches heads off."""

    watch: Watch = field(repr=False, compare=False)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        return self.watch.attend(self.inner, q, cache, step)
