"""Measures which keys each query attends under a method, and at which distances.

This file knows no method by name. It runs any method with `lce.methods.run` on random queries and keys. The values are
one-hot vectors, one dimension per token, so an output is a row of attention weights. A key of weight 0 is not attended.

A small signal measures the distances. In the first run all frequencies of RoPE are zero, so nothing rotates and content
alone decides which keys are chosen. In each further run, one pair of dimensions has the same vector in all tokens and
rotates by `w` radians per position. This adds `A cos(w d - phase)` to the logit of a key at distance d. A query's
log-weights change by this term, plus one constant per row. Two runs, with phases 0 and 90°, give `exp(i w d)` up to
that constant. Runs at several frequencies `w` together give d, as digits give a number. Content and biases cancel,
because the log-weights of the first run are subtracted. The factor by which a method multiplies a query's logits is
measured in the same way, with vectors that do not rotate and have a known phase for each key.

The signal can change which of two keys with nearly equal scores is chosen. So a query's measurement is used only if the
query attends the same keys as in the first run. Otherwise the query is measured with the signal reversed, then weaker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lce.errors import UsageError, shown
from lce.methods import Example, Method, Rope, RopeConfig, find, make, run, settings
from lce.sizes import count

HEADS, KV_HEADS = 4, 2
MOST_TOKENS = 512
SIGNAL = 2**-9  # The most that the rotating pair of dimensions adds to a logit: 1,000 float32 rounding errors.
SIZES = (1.0, -1.0, 1 / 8, -1 / 8)  # The signal is multiplied by these factors in turn until the same keys are chosen.
# `FREQUENCIES` of the rotation, in radians per position: none is a multiple of another, so that a distance beyond
# REACH is not mistaken for a shorter distance.
FREQUENCIES = tuple(8.7**-n for n in range(5))
REACH = int(0.9 * math.pi / FREQUENCIES[-1])  # The largest measurable distance: 0.9 of half the longest period.
PATTERNS = 4  # The number of sets of random phases, one phase per key. No two keys have similar phases in all sets.
TOLERANCE = 0.02  # The largest accepted error of `exp(i w d)`: rounding causes 0.001, a wrong distance 0.06 or more.


@dataclass(frozen=True)
class Explanation:
    """Measurements of a method on N tokens.

    `attended [N, N]` is True where query i attends key j. `distance [N, N]` is the distance at which query i sees key
    j, and -1 for a key that is not attended. `factor [N]` is the factor by which the method multiplies query logits.
    """

    method: Method
    window: int
    tokens: int
    block: int
    head: int
    seed: int
    attended: Tensor
    distance: Tensor
    factor: Tensor

    @property
    def title(self) -> str:
        """The method with its knobs, such as `rerope(local=6, log_scale=False)`."""
        knobs = (f"{name}={value}" for name, value in settings(self.method).items())
        return f"{self.method.name}({', '.join(knobs)})"

    @property
    def setting(self) -> str:
        """The window, text length, block size and head of the measurement, as text."""
        return f"window {self.window}, {self.tokens} tokens, block {self.block}, head {self.head}"

    def rows(self) -> list[list[int | None]]:
        """Return the distances as lists, a row for each query, with None where a key is not attended."""
        pairs = zip(self.distance.tolist(), self.attended.tolist(), strict=True)
        return [[d if seen else None for d, seen in zip(*row, strict=True)] for row in pairs]


def explain(
    method: str | Method,
    *,
    knobs: Mapping[str, Any] | None = None,
    tokens: int = 24,
    window: int | None = None,
    block: int | None = None,
    head: int = 0,
    seed: int = 0,
) -> Explanation:
    """Measure which keys a method attends, and at which distances, on `tokens` random tokens.

    The method, a name or an instance, runs as in the first layer of a model with a window of `window` positions and 4
    query heads over 2 KV heads. Query head `head` is measured. A method given by name has the knobs of its `example` if
    `window` is None, else its defaults; `knobs` override both. `block` is the number of queries prefilled per step,
    by default that of the example or of the method. Another `seed` makes other vectors, so a method may choose other
    keys. If a query sees all keys at one distance, the output does not depend on that distance; the nearest key's
    distance in the text is then reported.
    Raises `UsageError` for a method whose weights depend on positions otherwise than through distances in whole tokens.
    """
    method, window, block = _setting(method, {} if knobs is None else knobs, window, block)
    tokens, window = count(tokens, "tokens", 1, MOST_TOKENS), count(window, "window", 1, REACH)
    head, seed = count(head, "head", 0, HEADS - 1), count(seed, "seed", 0, 2**63 - 1)
    block = None if block is None else count(block, "block")
    method = method.resolve(window)
    block = min(block or method.block, tokens)
    probe = _Probe(method, *vectors(tokens, seed), window, block, head)
    factor = probe.factor()
    return Explanation(method, window, tokens, block, head, seed, probe.attended, _distances(probe, factor), factor)


def _setting(
    method: str | Method, knobs: object, window: int | None, block: int | None
) -> tuple[Method, int, int | None]:
    """Return the method, window and block. If `window` is None, the method's example supplies missing values."""
    if not isinstance(knobs, Mapping):
        raise UsageError(f"knobs is {shown(knobs)}; expected a mapping of names to values, such as {{'chunk_size': 4}}")
    if isinstance(method, Method):
        if knobs:
            raise UsageError("knobs are for a method's name; give an instance its knobs when it is made")
        return method, Example().window if window is None else window, block
    if window is not None:
        return make(method, knobs), window, block
    example = find(method).example
    under = {} if "preset" in knobs else example.knobs  # a preset replaces the example's knobs
    return make(method, {**under, **knobs}), example.window, example.block if block is None else block


def vectors(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random `q [H, N, D]` and `k [G, N, D]` with zeros in the first RoPE pair, and one-hot `v [G, N, D]`."""
    random = torch.Generator().manual_seed(seed)
    dim = max(32, tokens + tokens % 2)
    q, k = (torch.randn(heads, tokens, dim, generator=random) for heads in (HEADS, KV_HEADS))
    _pair(q).zero_()
    _pair(k).zero_()
    return q, k, torch.eye(tokens, dim).repeat(KV_HEADS, 1, 1)


def _pair(x: Tensor) -> Tensor:
    """Return the first pair of dimensions that RoPE rotates, a view `[..., 2]` of `x [..., D]`."""
    return x[..., :: x.shape[-1] // 2]


class _Probe:
    """A method to measure, and its input vectors. `rest [N, N]` has the log-weights of a run without rotation."""

    def __init__(self, method: Method, q: Tensor, k: Tensor, v: Tensor, window: int, block: int, head: int) -> None:
        self.method, self.window, self.block, self.head = method, window, block, head
        self.q, self.k, self.v = q, k, v
        self.rest = self.log_weights(q, k, 0.0)
        self.attended = self.rest > -torch.inf

    def log_weights(self, q: Tensor, k: Tensor, frequency: float) -> Tensor:
        """Return the logarithm of each key's weight for each query, `[N, N]`; -inf for keys that are not attended."""
        rope = Rope(RopeConfig(), q.shape[-1], window=1)
        rope.inv_freq = torch.zeros_like(rope.inv_freq)  # only the first pair rotates
        rope.inv_freq[0] = frequency
        out = run(self.method, q, k, self.v, window=self.window, blocks=self.block, rope=rope, attention="reference")
        weights = out[self.head].double()
        total = weights.sum(dim=-1)  # 0 for a query that sees nothing
        if not (weights.ge(0).all() and ((total == 0) | ((total - 1).abs() < TOLERANCE)).all()):
            raise self.refusal("its output is no weighted mean of values")
        return weights[:, : q.shape[1]].log()

    def turning(self, frequency: float, phase: Tensor) -> Tensor:
        """Return the change of the log-weights, `[N, N]`, if the first RoPE pair rotates by `frequency` per position.

        The change, divided by the signal, is `factor cos(w d - phase)` plus one constant per row: w is `frequency`, d
        the distance, and `phase [N]` has a phase for each key. Keys that are not attended have 0.
        """
        length = math.sqrt(SIGNAL * math.sqrt(self.q.shape[-1]))
        q, k, answer = self.q.clone(), self.k.clone(), torch.zeros_like(self.rest)
        _pair(q)[:] = torch.tensor([length, 0.0])
        open_rows = torch.ones(len(answer), dtype=torch.bool)
        for size in SIZES:
            _pair(k)[:] = torch.stack((phase.cos(), phase.sin()), dim=-1) * (length * size)
            found = self.log_weights(q, k, frequency)
            same = open_rows & ((found > -torch.inf) == self.attended).all(dim=-1)
            answer[same] = ((found - self.rest) / (size * SIGNAL))[same]
            open_rows &= ~same
            if not open_rows.any():
                return answer.masked_fill(~self.attended, 0.0)
        row = int(open_rows.nonzero()[0])
        raise self.refusal(f"query {row} attends other keys at the slightest change; its choice is random, or a tie")

    def factor(self) -> Tensor:
        """Return the factor by which the method multiplies each query's logits, `[N]`; 1 if a query attends one key."""
        n = len(self.attended)
        phases = 2 * math.pi * torch.rand(PATTERNS, n, generator=torch.Generator().manual_seed(0))
        expected = torch.stack([self.centred(phase.double().cos().expand(n, n)) for phase in phases])
        answer = torch.stack([self.centred(self.turning(0.0, phase)) for phase in phases])
        fitted = (answer * expected).sum(dim=(0, 2)) / expected.square().sum(dim=(0, 2))
        factor = torch.where(self.attended.sum(dim=-1) > 1, fitted, 1.0)
        if not ((answer - factor[:, None] * expected).abs().max() < TOLERANCE * factor.max() and (factor > 0).all()):
            raise self.refusal("its weights are no softmax over products of queries and keys")
        return factor

    def centred(self, x: Tensor) -> Tensor:
        """Return `x [N, N]` minus each row's mean over the keys that the row attends; other keys get 0."""
        n_seen = self.attended.sum(dim=-1, keepdim=True).clamp(min=1)
        return (x - (x * self.attended).sum(dim=-1, keepdim=True) / n_seen) * self.attended

    def refusal(self, why: str) -> UsageError:
        return UsageError(f"{self.method.name}: the distances cannot be read off its output: {why}")


def _distances(probe: _Probe, factor: Tensor) -> Tensor:
    """Return the distance at which each query sees each attended key, `[N, N]`; -1 at other keys."""
    phase = torch.zeros(len(factor))
    turns = [torch.complex(probe.turning(w, phase), probe.turning(w, phase + math.pi / 2)) for w in FREQUENCIES]
    turned = torch.stack(turns, dim=-1) / factor[:, None, None]  # exp(i w d), plus one constant per row
    i = torch.arange(len(turned))
    nearest = (probe.attended * i).argmax(dim=-1)
    turned = (turned - turned[i, nearest][:, None]).masked_fill(~probe.attended[..., None], 0.0)
    distance = torch.full(turned.shape[:2], -1)
    anchor = i - nearest  # the assumed distance of each query's nearest key: at first its distance in the text
    unread = torch.ones_like(i, dtype=torch.bool)
    while unread.any():
        found, miss = _read(turned + _code(anchor)[:, None])
        fits = unread & (miss.amax(dim=-1) < TOLERANCE)
        distance[fits] = found[fits]
        unread &= ~fits
        for row in unread.nonzero().flatten()[:1].tolist():
            at = _anchor(turned[row])
            if at is None:
                raise probe.refusal(f"query {row} sees keys at distances that are not whole, or beyond {REACH:,}")
            anchor = anchor + (at - anchor[row])
    return distance.masked_fill(~probe.attended, -1)


def _anchor(turned: Tensor) -> int | None:
    """Return a distance of the nearest key for which all distances of a query are whole numbers; None if there is none.

    `turned [N, frequencies]` are the codes of the N keys (see `_code`) minus the code of the nearest key.
    """
    tried = torch.arange(-REACH, REACH + 1)
    farthest = turned[turned.abs().sum(dim=-1).argmax()]
    tried = tried[_read(farthest + _code(tried))[1] < TOLERANCE]
    if not len(tried):
        return None
    miss, best = _read(turned + _code(tried)[:, None])[1].amax(dim=-1).min(dim=0)
    return int(tried[best]) if miss < TOLERANCE else None


def _code(distance: Tensor) -> Tensor:
    """Return the code of each distance d `[...]`: `exp(i w d)` for every w of `FREQUENCIES`, `[..., frequencies]`."""
    angle = distance.double()[..., None] * torch.tensor(FREQUENCIES, dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle)


def _read(code: Tensor) -> tuple[Tensor, Tensor]:
    """Decode codes `[..., frequencies]`, lowest frequency first. Return whole distances and their errors, `[...]`."""
    distance = torch.zeros(code.shape[:-1], dtype=torch.float64)
    for n, w in reversed(list(enumerate(FREQUENCIES))):
        behind = torch.polar(torch.ones_like(distance), -w * distance)
        distance = distance + (code[..., n] * behind).angle() / w
    whole = distance.round().long()
    return whole, (code - _code(whole)).abs().amax(dim=-1)
