"""What a method does with positions: which keys each query attends, and the distance at which it sees each of them.

Nothing here knows a method. One is run, as the engine would run it, on made-up vectors whose values are a one and
zeros, a place for each token, so that an output is a row of attention weights: a key without weight is not attended.

Distances are read off how the weights answer to a faint signal. In a first run nothing turns: all frequencies of RoPE
are zero, and the choice of keys that is shown is made by content. In each further run one pair of dimensions carries
equal vectors in all tokens and turns by `w` a position. It adds `A cos(w d - phase)` to the logit of a key that is seen
at distance d, so the logarithms of a query's weights change by just that, but for a constant that they share. Phases 0
and 90° together give `exp(i w d)`, less a constant, and some frequencies together give d, as digits give a number.
Content and biases cancel. A factor that the method puts on a query's logits is measured in the same way, by vectors
that stand still at known phases, another for each key.

A signal could tip a choice that hangs in the balance. So a row is only compared with a run in which it attends the very
same keys; else it is asked again with the signal reversed, which tips it the other way, and with a fainter one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.errors import UsageError
from lce.methods import Method, Rope, RopeConfig, run

HEADS, KV_HEADS = 4, 2
MOST_TOKENS = 512
SIGNAL = 2**-9  # the most that the turning pair adds to a logit: a thousand times what float32 rounds away
SIZES = (1.0, -1.0, 1 / 8, -1 / 8)  # of a change, until it tips no choice
# No whole multiples of each other, or a distance beyond reach would be taken for one within.
FREQUENCIES = tuple(8.7**-n for n in range(5))
REACH = int(0.9 * math.pi / FREQUENCIES[-1])  # less than half of the slowest turn
PATTERNS = 4  # of phases, so that no two keys have nearly the same in all
TOLERANCE = 0.02  # how far off a code may be: rounding puts it 0.001 off; no wrong reading is nearer than 0.06

Change = Callable[[float], tuple[Tensor, Tensor]]  # a size to changed queries and keys


@dataclass(frozen=True)
class Explanation:
    """What was found: `attended [N, N]`, True where query i attends key j, and the `distance [N, N]` at which it sees
    it there; -1 elsewhere. `factor [N]` is what the method multiplies a query's logits by.
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
        """The method as it was resolved: `dca(chunk_size=6, temperature=False)`."""
        knobs = (f"{field.name}={getattr(self.method, field.name)}" for field in dataclasses.fields(self.method))
        return f"{self.method.name}({', '.join(knobs)})"

    @property
    def setting(self) -> str:
        """What it was run on."""
        return f"window {self.window}, {self.tokens} tokens, block {self.block}, head {self.head}"

    def rows(self) -> list[list[int | None]]:
        """The distances, None where a key is not attended."""
        pairs = zip(self.distance.tolist(), self.attended.tolist(), strict=True)
        return [[d if seen else None for d, seen in zip(*row, strict=True)] for row in pairs]


def explain(
    method: Method, *, tokens: int = 24, window: int = 12, block: int | None = None, head: int = 0, seed: int = 0
) -> Explanation:
    """Run `method` on `tokens` made-up tokens, as in the first layer of a model that can be trusted on `window`
    positions, and read off what query head `head` of 4 (over 2 KV heads) does.

    `block` is how many queries are prefilled in one step, by default what the engine would take; `seed` makes other
    vectors, by which methods that choose may choose otherwise. A query whose keys are all at one distance does not
    depend on it: its nearest key is then taken to be where it is in the text. Raises `UsageError` for a method whose
    weights depend on positions otherwise than by whole distances.
    """
    limits = (("tokens", tokens, 1, MOST_TOKENS), ("window", window, 1, REACH), ("head", head, 0, HEADS - 1))
    for what, value, least, most in limits:
        if not least <= value <= most:
            raise UsageError(f"{what} is {value}; expected {least} to {most}")
    if block is not None and block < 1:
        raise UsageError(f"block is {block}; expected 1 or more")
    method = method.resolve(window)
    block = min(block or method.block, tokens)
    bench = _Bench(method, *vectors(tokens, seed), window, block, head)
    factor = bench.factor()
    return Explanation(method, window, tokens, block, head, seed, bench.attended, _distances(bench, factor), factor)


def vectors(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """`q [H, N, D]`, `k v [G, N, D]`: random but for the pair that is to turn, which is empty, and values of one 1."""
    random = torch.Generator().manual_seed(seed)
    dim = max(32, tokens + tokens % 2)
    q = torch.randn(HEADS, tokens, dim, generator=random)
    k = torch.randn(KV_HEADS, tokens, dim, generator=random)
    for x in (q, k):
        _pair(x).zero_()
    return q, k, torch.eye(tokens, dim).repeat(KV_HEADS, 1, 1)


def _pair(x: Tensor) -> Tensor:
    """The two dimensions of `x [..., D]` that RoPE turns first, a view `[..., 2]`."""
    return x[..., :: x.shape[-1] // 2]


class _OnePair(Rope):
    """RoPE that turns the first pair of dimensions and leaves all others as they are."""

    def __init__(self, head_dim: int, frequency: float) -> None:
        super().__init__(RopeConfig(), head_dim, window=1)
        self.inv_freq = torch.zeros_like(self.inv_freq)
        self.inv_freq[0] = frequency


class _Bench:
    """A resolved method, the vectors it is run on, and its log-weights when nothing turns."""

    def __init__(self, method: Method, q: Tensor, k: Tensor, v: Tensor, window: int, block: int, head: int) -> None:
        self.method, self.window, self.block, self.head = method, window, block, head
        self.q, self.k, self.v = q, k, v
        self.rest = self.log_weights(q, k, 0.0)
        self.attended = self.rest > -torch.inf

    def log_weights(self, q: Tensor, k: Tensor, frequency: float) -> Tensor:
        """The logarithm of each key's weight for each query, `[N, N]`; -inf where it is not attended."""
        rope = _OnePair(q.shape[-1], frequency)
        out = run(self.method, q, k, self.v, window=self.window, blocks=self.block, rope=rope, attention="reference")
        weights = out[self.head].double()
        total = weights.sum(dim=-1)
        sees_nothing = total == 0
        if not (weights.ge(0).all() and (sees_nothing | ((total - 1).abs() < TOLERANCE)).all()):
            raise self.refusal("its output is no weighted mean of values")
        return weights[:, : q.shape[1]].log()

    def answer(self, change: Change, frequency: float) -> Tensor:
        """By how much each log-weight changes with a change of the vectors, per unit of its size: `[N, N]`.

        For each row but for a constant; 0 where a key is not attended.
        """
        answer = torch.zeros_like(self.rest)
        open_rows = torch.ones(len(answer), dtype=torch.bool)
        for size in SIZES:
            found = self.log_weights(*change(size), frequency)
            same = open_rows & ((found > -torch.inf) == self.attended).all(dim=-1)
            answer[same] = ((found - self.rest) / size)[same]
            open_rows &= ~same
            if not open_rows.any():
                return answer.masked_fill(~self.attended, 0.0)
        row = int(open_rows.nonzero()[0])
        raise self.refusal(f"query {row} attends other keys at the slightest change; its choice is random, or a tie")

    def turning(self, frequency: float, phase: Tensor) -> Tensor:
        """How the log-weights answer to a pair that turns, `[N, N]`: `cos(w d - phase)`, for the `phase [N]` of each
        key, times the factor of the query and but for a constant a row.
        """
        length = math.sqrt(SIGNAL * math.sqrt(self.q.shape[-1]))

        def change(size: float) -> tuple[Tensor, Tensor]:
            q, k = self.q.clone(), self.k.clone()
            _pair(q)[:] = torch.tensor([length, 0.0])
            _pair(k)[:] = torch.stack((phase.cos(), phase.sin()), dim=-1) * (length * size)
            return q, k

        return self.answer(change, frequency) / SIGNAL

    def factor(self) -> Tensor:
        """What the method multiplies each query's logits by, `[N]`; 1 where a query attends one key only."""
        n = len(self.attended)
        phases = 2 * math.pi * torch.rand(PATTERNS, n, generator=torch.Generator().manual_seed(0))
        known = torch.stack([self.centred(phase.double().cos().expand(n, n)) for phase in phases])
        answer = torch.stack([self.centred(self.turning(0.0, phase)) for phase in phases])
        fitted = (answer * known).sum(dim=(0, 2)) / known.square().sum(dim=(0, 2))
        factor = torch.where(self.attended.sum(dim=-1) > 1, fitted, 1.0)
        if not ((answer - factor[:, None] * known).abs().max() < TOLERANCE * factor.max() and (factor > 0).all()):
            raise self.refusal("its weights are no softmax over products of queries and keys")
        return factor

    def centred(self, x: Tensor) -> Tensor:
        """Each row of `x [N, N]` less its mean over the attended keys; 0 at the others."""
        n_seen = self.attended.sum(dim=-1, keepdim=True).clamp(min=1)
        return (x - (x * self.attended).sum(dim=-1, keepdim=True) / n_seen) * self.attended

    def refusal(self, why: str) -> UsageError:
        return UsageError(f"{self.method.name}: the distances cannot be read off its output: {why}")


def _distances(bench: _Bench, factor: Tensor) -> Tensor:
    """The distance at which each query sees each key that it attends, `[N, N]`; -1 at the others."""
    phase = torch.zeros(len(factor))
    turns = [torch.complex(bench.turning(w, phase), bench.turning(w, phase + math.pi / 2)) for w in FREQUENCIES]
    turned = torch.stack(turns, dim=-1) / factor[:, None, None]  # exp(i w d), but for a constant a row
    i = torch.arange(len(turned))
    nearest = (bench.attended * i).argmax(dim=-1)
    turned = (turned - turned[i, nearest][:, None]).masked_fill(~bench.attended[..., None], 0.0)
    distance = torch.full(turned.shape[:2], -1)
    anchor = i - nearest  # the distance of the nearest key: its true one, or as far off as that of other rows
    unread = torch.ones_like(i, dtype=torch.bool)
    while unread.any():
        found, miss = _read(turned + _code(anchor)[:, None])
        fits = unread & (miss.amax(dim=-1) < TOLERANCE)
        distance[fits] = found[fits]
        unread &= ~fits
        for row in unread.nonzero().flatten()[:1].tolist():
            at = _anchor(turned[row])
            if at is None:
                raise bench.refusal(f"query {row} sees keys at distances that are not whole, or beyond {REACH:,}")
            anchor = anchor + (at - anchor[row])
    return distance.masked_fill(~bench.attended, -1)


def _anchor(turned: Tensor) -> int | None:
    """The distance of the nearest key that makes sense of all that a query sees, `[N, R]` less that key's code."""
    tried = torch.arange(-REACH, REACH + 1)
    strangest = turned[turned.abs().sum(dim=-1).argmax()]
    tried = tried[_read(strangest + _code(tried))[1] < TOLERANCE]
    if not len(tried):
        return None
    miss, best = _read(turned + _code(tried)[:, None])[1].amax(dim=-1).min(dim=0)
    return int(tried[best]) if miss < TOLERANCE else None


def _code(distance: Tensor) -> Tensor:
    """`exp(i w d)` for distances `[...]` and every frequency, `[..., R]`."""
    angle = distance.double()[..., None] * torch.tensor(FREQUENCIES, dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle)


def _read(code: Tensor) -> tuple[Tensor, Tensor]:
    """The distances of codes `[..., R]`, slowest turn first, and how far off the codes are: `[...]` each."""
    distance = torch.zeros(code.shape[:-1], dtype=torch.float64)
    for n, w in reversed(list(enumerate(FREQUENCIES))):
        behind = torch.polar(torch.ones_like(distance), -w * distance)
        distance = distance + (code[..., n] * behind).angle() / w
    whole = distance.round().long()
    return whole, (code - _code(whole)).abs().amax(dim=-1)
