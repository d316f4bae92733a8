"""Measures which tokens a method attends, and the weight of these tokens under full attention.

`lce.methods.Observed` runs a method unchanged, in its usual blocks of queries. In every layer and head, an
`AttentionMeter` finds the tokens that the watched queries attend, and the weight of these tokens under full attention.
This full attention is called the judge (`lce_lab.analysis.mass`). The next layer gets the method's own output
(`states="own"`), or the judge's output (`states="judge"`), so that errors of earlier layers do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lce.errors import UsageError
from lce.methods import ESA, Observation, Step, rotate
from lce.methods.lowdim import best_tokens
from lce_lab.analysis.distances import attended_tokens, observed_always, scored_bytes
from lce_lab.analysis.mass import Judge, TrueMass
from lce_lab.eval.record import Attended
from lce_lab.eval.scores import mean_of

States = Literal["own", "judge"]


@dataclass
class _Tally:
    queries: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    facts: int = 0  # the number of (query, fact) pairs where the query could choose the fact's chunk
    found: list[float] = field(default_factory=list)  # ESA's recall per block of queries; `Attended.found` is the mean

    def add(self, name: str, values: Tensor) -> None:
        """Sum `values [heads, ...]` over all dimensions except heads, and add the sums to `sums[name]`."""
        total = values.float().flatten(1).sum(1).cpu()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def mean(self, name: str, n: int | None = None) -> list[float]:
        n = self.queries if n is None else n
        return [float(x) / n for x in self.sums[name]] if name in self.sums and n else []


class AttentionMeter:
    """A meter of what some queries of one text attend. Call `begin`, run the engine, then call `end`."""

    def __init__(self, judge: Judge = "constant", states: States = "own") -> None:
        self.judge, self.states = judge, states
        self.begin(0)

    def begin(self, first: int, positions: Sequence[int] | None = None, facts: Sequence[tuple[int, int]] = ()) -> None:
        """Watch the queries from `first` on, or at `positions` if given. `facts` are token spans (start, stop)."""
        self.first, self.positions, self.facts = first, positions, facts
        self.layers: dict[int, _Tally] = {}
        self.bytes = {"read": 0.0, "scored": 0.0, "full": 0.0}
        self.times: dict[int, Tensor] = {}  # by query position: how often each chunk was chosen

    def rows(self, step: Step) -> Tensor:
        """Return the indices of the watched queries within the block."""
        if self.positions is None:
            return torch.arange(max(step.start, self.first), max(step.stop, self.first)) - step.start
        return torch.tensor([i - step.start for i in self.positions if step.start <= i < step.stop], dtype=torch.int64)

    def end(self) -> Attended:
        """Return the means over the watched queries. Raises `UsageError` if no query was watched."""
        if not self.layers:
            raise UsageError("no query was watched: the text is empty, or the context was not read by this engine")
        layers = [self.layers[index] for index in sorted(self.layers)]
        queries = layers[0].queries
        spread = [cover_and_gini(times) for times in self.times.values()]
        means: dict[str, Any] = {n: [tally.mean(n) for tally in layers] for n in ("recall", "tokens", "fact")}
        means |= {f"{name}_bytes": n / queries for name, n in self.bytes.items()}
        if any("hit1" in tally.sums for tally in layers):
            means |= {name: [tally.mean(name, tally.facts) for tally in layers] for name in ("hit1", "hit5")}
        if not self.facts:
            del means["fact"]
        return Attended(
            queries=queries,
            **means,
            cover=mean_of(cover for cover, _ in spread),
            gini=mean_of(gini for _, gini in spread),
            found=[mean_of(tally.found) or 0.0 for tally in layers] if any(tally.found for tally in layers) else None,
        )

    def observe(self, seen: Observation, out: Tensor) -> Tensor:
        """Count what the watched queries attended. Return `out`, or full attention's output for `states="judge"`."""
        if len(seen.rows):
            self._count(seen)
        return out if self.states == "own" else TrueMass(seen.method, seen.cache, seen.step, self.judge).attend(seen.q)

    def _count(self, seen: Observation) -> None:
        always = observed_always(seen)
        if always is None:
            why = f"{seen.method.label} does not say which tokens it always attends"
            raise UsageError(f"{why}, so what it selects cannot be measured; define parts_of")
        tally, q = self.layers.setdefault(seen.layer, _Tally()), seen.q
        mass = TrueMass(seen.method, seen.cache, seen.step, self.judge)
        layout = seen.cache.layout
        vector = layout.token_bytes // (layout.n_layers * layout.n_kv_heads)  # of keys and of values
        for some in mass.slices(len(seen.rows), len(q)):
            positions = seen.positions[some]
            chosen = None if seen.picked is None else seen.picked[:, some]
            attended = attended_tokens(always[some], chosen, *seen.method.choices, len(q))
            weights = mass.weights(q[:, seen.rows[some]], positions)
            tally.queries += len(positions)
            tally.add("recall", (weights * attended).sum(-1))
            tally.add("tokens", attended)
            for start, stop in self.facts:
                tally.add("fact", attended[..., start:stop].float().mean(-1) / len(self.facts))
            # A token that several query heads of one KV head attend is read once.
            read = attended.unflatten(0, (seen.step.n_kv_heads, -1)).any(1).sum()
            self.bytes["read"] += float(read) * vector
            self.bytes["full"] += float((positions + 1).sum()) * seen.step.n_kv_heads * vector
            if seen.scores is not None:
                self._count_hits(tally, seen, seen.scores[:, some])
                if seen.picked is not None:
                    self._count_choices(seen.picked[:, some], seen.scores[0, some] > -torch.inf, positions)
        for query in seen.positions.tolist():
            self.bytes["scored"] += scored_bytes(seen.method, query, q, seen.cache, seen.step)
        if isinstance(seen.method, ESA):
            self._count_found(tally, seen, seen.method)

    def _count_hits(self, tally: _Tally, seen: Observation, scores: Tensor) -> None:
        """Count how often a fact's chunk is best, or in the top 5, by `scores [heads or groups, queries, chunks]`."""
        (first, size), known = seen.method.choices, scores > -torch.inf
        for start, stop in self.facts:
            a, b = max(0, (start - first) // size), (stop - 1 - first) // size + 1
            if stop <= first or not scores[..., a:b].numel():
                continue
            best = scores[..., a:b].amax(-1, keepdim=True)  # [heads or groups, queries, 1]
            rank = (scores > best).sum(-1).masked_fill(~known[..., a:b].any(-1), scores.shape[-1])
            tally.facts += int(known[0, :, a:b].any(-1).sum())
            tally.add("hit1", rank < 1)
            tally.add("hit5", rank < 5)

    def _count_choices(self, chosen: Tensor, known: Tensor, positions: Tensor) -> None:
        """Add how often each chunk in `chosen [heads, queries, n]` (-1: none) was chosen, of those `known` to it."""
        for t, position in enumerate(positions.tolist()):
            times = torch.bincount(chosen[:, t].flatten().clamp(min=-1) + 1, minlength=known.shape[-1] + 1)[1:]
            times = times[: known.shape[-1]][known[t]].cpu()
            before = self.times.get(position)
            self.times[position] = times if before is None or len(before) != len(times) else before + times

    def _count_found(self, tally: _Tally, seen: Observation, method: ESA) -> None:
        """Add the share of the `top_k` tokens of the best exact scores that low-dim scores also find (ESA's recall)."""
        step, n = seen.step, method.top_k
        if method.compress == "none" or method.far is None or n is None or method.n_candidates(step.start) <= n:
            return
        far = rotate(seen.q, step.far_turn(method.far, seen.q))
        exact = replace(method, compress="none", maps=None)
        ours, best = (best_tokens(each.relevance(seen.q, far, seen.cache, step), n) for each in (method, exact))
        tally.found.append(float(torch.isin(ours, best).sum()) / n)


def cover_and_gini(times: Tensor) -> tuple[float, float]:
    """Return the share of chunks ever chosen, and the Gini coefficient of `times`: 2, 2, 0, 0 give 0.5 and 0.5."""
    x, n = times.double().sort().values, len(times)
    total = float(x.sum())
    if not n or not total:
        return 0.0, 0.0
    order = 2 * torch.arange(1, n + 1) - n - 1
    return float((times > 0).double().mean()), float((order * x).sum()) / (n * total)
