"""Watches which tokens some queries of a run attend, and how full attention would weigh each token.

`Observed` runs any method unchanged. In every layer and head, a `Watch` compares the tokens that watched queries attend
with the true mass (`lce.methods.mass`). The method is measured in a real run: in its own blocks, on the hidden states
of its own layers or of the judge's full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lce.errors import UsageError
from lce.methods import ESA, LayerCache, Observation, Step, rotate
from lce.methods.lowdim import first_best
from lce.methods.mass import Judge

States = Literal["own", "judge"]
PerHead = list[list[float]]  # layers, and their heads


@dataclass(frozen=True)
class Look:
    """What the watched queries of one text attended; shares are means over queries, by layer and head.

    `recall` is the attended share of true mass, `tokens` the number of attended tokens, and `fact` the attended share
    of the facts' tokens. `hit1` and `hit5` say whether a choice with a fact has the best, or one of the five best,
    scores of the query's choices; layers that choose nothing have no heads. `cover` is the share of choices that some
    head of some layer makes; `gini` is Gini's coefficient of how often each choice is made. `found` is, by layer, the
    share of the best tokens by exact scores that low-dim scores find. None: nothing to measure.

    Bytes are a query's reads in all layers: keys and values, each KV head's token once; the data to choose by; and the
    reads of full attention.
    """

    positive: ClassVar = ("queries", "window", "full_bytes")
    shares: ClassVar = ("score",)

    queries: int
    recall: PerHead
    tokens: PerHead
    read_bytes: float
    scored_bytes: float
    full_bytes: float
    fact: PerHead | None = None
    hit1: PerHead | None = None
    hit5: PerHead | None = None
    cover: float | None = None
    gini: float | None = None
    found: list[float] | None = None
    score: float | None = None  # of the answer, if any
    prompt: str | None = None  # a hash of the text
    method: str | None = None
    window: int | None = None
    checkpoint: str | None = None  # what the user called the model


@dataclass
class _Tally:
    """Sums over the watched queries of one layer, by head."""

    queries: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    facts: int = 0  # facts that a query could have chosen, summed over queries
    numbers: dict[str, float] = field(default_factory=dict)
    blocks: int = 0

    def add(self, name: str, values: Tensor) -> None:
        """Add `values [H, …]`, summed over all axes but the heads."""
        total = values.float().flatten(1).sum(1).cpu()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def count(self, name: str, value: float) -> None:
        self.numbers[name] = self.numbers.get(name, 0.0) + value

    def mean(self, name: str, n: int | None = None) -> list[float]:
        n = self.queries if n is None else n
        return [float(x) / n for x in self.sums[name]] if name in self.sums and n else []


class Watch:
    """The watched queries, and what they attended so far. One text at a time: `begin`, a run, `end`."""

    def __init__(self, judge: Judge = "constant", states: States = "own") -> None:
        self.judge, self.states = judge, states
        self.begin(0)

    def begin(self, first: int, positions: Sequence[int] | None = None, facts: Sequence[tuple[int, int]] = ()) -> None:
        """Watch the queries from index `first` on, or only at `positions`. `facts` are spans of tokens."""
        self.first, self.positions, self.facts = first, positions, facts
        self.layers: dict[int, _Tally] = {}
        self.times: dict[int, Tensor] = {}  # how often each choice of a query was made, by its index

    def rows(self, step: Step) -> Tensor:
        """Return the indices of the watched queries within the block."""
        if self.positions is None:
            return torch.arange(max(step.start, self.first), max(step.stop, self.first)) - step.start
        return torch.tensor([i - step.start for i in self.positions if step.start <= i < step.stop], dtype=torch.int64)

    def end(self) -> Look:
        """Return the observation. Raises `UsageError` if no query was watched."""
        if not self.layers:
            raise UsageError("no query was watched: the text is empty, or the context was not read by this engine")
        layers = [self.layers[index] for index in sorted(self.layers)]
        total = {name: sum(tally.numbers.get(name, 0.0) for tally in layers) for name in ("read", "scored", "full")}
        queries = layers[0].queries
        spread = [_cover_and_gini(times) for times in self.times.values()]
        found = [tally.numbers["found"] / tally.blocks if tally.blocks else 0.0 for tally in layers]
        has_choices = any("hit1" in tally.sums for tally in layers)
        return Look(
            queries=queries,
            recall=[tally.mean("recall") for tally in layers],
            tokens=[tally.mean("tokens") for tally in layers],
            read_bytes=total["read"] / queries,
            scored_bytes=total["scored"] / queries,
            full_bytes=total["full"] / queries,
            fact=[tally.mean("fact") for tally in layers] if self.facts else None,
            hit1=[tally.mean("hit1", tally.facts) for tally in layers] if has_choices else None,
            hit5=[tally.mean("hit5", tally.facts) for tally in layers] if has_choices else None,
            cover=sum(cover for cover, _ in spread) / len(spread) if spread else None,
            gini=sum(gini for _, gini in spread) / len(spread) if spread else None,
            found=found if any(tally.blocks for tally in layers) else None,
        )

    def observe(self, seen: Observation, out: Tensor) -> Tensor:
        """Count what the watched queries attended. Return the layer's output, or of the judge's attention."""
        if len(seen.rows):
            self._count(seen)
        return out if self.states == "own" else seen.mass(self.judge).attend(seen.q)

    def _count(self, seen: Observation) -> None:
        always, picked = seen.always(), seen.picked
        if always is None:
            raise UsageError(
                f"{seen.method.label} does not say which tokens it always attends, so what it selects cannot be "
                "measured; define parts_of"
            )
        tally, mass, q, n_kv_heads = (
            self.layers.setdefault(seen.layer, _Tally()),
            seen.mass(self.judge),
            seen.q,
            seen.step.n_kv_heads,
        )
        first, size = seen.method.choices
        vector = 2 * q.shape[-1] * seen.cache.layout.dtype.itemsize
        for some in mass.slices(len(seen.rows), len(q)):
            positions = seen.positions[some]
            attended = seen.attended(some, always)
            weights = mass.weights(q[:, seen.rows[some]], positions)
            tally.queries += len(positions)
            tally.add("recall", (weights * attended).sum(-1))
            tally.add("tokens", attended)
            for start, stop in self.facts:
                tally.add("fact", attended[..., start:stop].float().mean(-1) / len(self.facts))
            read = attended.unflatten(0, (n_kv_heads, -1)).any(1).sum()  # a KV head's token is read once
            tally.count("read", float(read) * vector)
            tally.count("full", float((positions + 1).sum()) * n_kv_heads * vector)
            if seen.scores is not None:
                chosen = None if picked is None else picked[:, some]
                self._look_at_choices(tally, seen.scores[:, some], chosen, positions, first, size)
        tally.count("scored", seen.scored_bytes())
        if isinstance(seen.method, ESA):
            self._look_at_maps(tally, seen.method, q, seen.cache, seen.step)

    def _look_at_choices(
        self, tally: _Tally, scores: Tensor, chosen: Tensor | None, positions: Tensor, first: int, size: int
    ) -> None:
        """Count hits, and how often each choice was made: `scores [C, T, M]`, `chosen [H, T, K]`."""
        known = scores > -torch.inf
        for start, stop in self.facts:
            a, b = max(0, (start - first) // size), (stop - 1 - first) // size + 1
            if stop <= first or not scores[..., a:b].numel():
                continue
            best = scores[..., a:b].amax(-1, keepdim=True)  # [C, T, 1]
            rank = (scores > best).sum(-1).masked_fill(~known[..., a:b].any(-1), scores.shape[-1])
            tally.facts += int(known[0, :, a:b].any(-1).sum())  # facts that a query could choose
            tally.add("hit1", rank < 1)
            tally.add("hit5", rank < 5)
        if chosen is None:
            return
        for t, position in enumerate(positions.tolist()):
            times = torch.bincount(chosen[:, t].flatten().clamp(min=-1) + 1, minlength=scores.shape[-1] + 1)[1:]
            times = times[: int(known[0, t].sum())] if known[0, t].all() else times[: len(known[0, t])][known[0, t]]
            times = times.cpu()
            before = self.times.get(position)
            self.times[position] = times if before is None or len(before) != len(times) else before + times

    def _look_at_maps(self, tally: _Tally, method: ESA, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Count how many of the best tokens by exact scores low-dim scores find (ESA's recall)."""
        border = step.start - method.n_local
        if method.compress == "none" or method.far is None or method.top_k is None:
            return
        n = method.top_k
        if border - method.sinks <= n:
            return
        far = rotate(q, step.far_turn(method.far, q))
        exact = replace(method, compress="none", maps=None)
        ours, best = (first_best(each.relevance(q, far, cache, step, border), n) for each in (method, exact))
        tally.count("found", float(torch.isin(ours, best).sum()) / n)
        tally.blocks += 1


def _cover_and_gini(times: Tensor) -> tuple[float, float]:
    """Return the share of choices made at all, and Gini's coefficient of `times`: 0 is even, near 1 is one choice.

    Example: 2, 2, 0, 0 has a share of 0.5 and Gini's coefficient 0.5.
    """
    x, n = times.double().sort().values, len(times)
    total = float(x.sum())
    if not n or not total:
        return 0.0, 0.0
    order = 2 * torch.arange(1, n + 1) - n - 1
    return float((times > 0).double().mean()), float((order * x).sum()) / (n * total)
