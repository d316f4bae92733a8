"""The slow, obvious truth: attention straight from the definitions, in float64, sharing no code with lce.

Each method is a function from a text's `q [H, N, D]`, `k v [G, N, D]` and a setting to explicit tables, for every head:
which keys a query attends (`mask [H, N, N]`), at which distance (`distance [H, N, N]`), and for some methods a factor
on each query's logits (`scale [N]`). `attention` then takes one softmax over each row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Tables(NamedTuple):
    mask: Tensor
    distance: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class Setting:
    """The inputs of a definition besides the vectors: the window, RoPE, and the sizes of the blocks."""

    window: int
    blocks: Sequence[int] = ()
    frequencies: Tensor | None = None  # of a scaled RoPE; `factor` is its factor on rotated vectors
    factor: float = 1.0
    sliding_window: int | None = None

    def angles(self, dim: int) -> Tensor:
        if self.frequencies is not None:
            return self.frequencies.double()
        return torch.tensor([10000.0 ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def as_complex(x: Tensor) -> Tensor:
    """Return the pairs (x_i, x_{i + D/2}), which RoPE rotates, as complex numbers."""
    half = x.shape[-1] // 2
    return torch.complex(x[..., :half].double(), x[..., half:].double())


def turned(x: Tensor, position: Tensor, setting: Setting) -> Tensor:
    """Rotate `x [..., N, D]` at `position [N]`; return complex numbers."""
    angle = position.double()[:, None] * setting.angles(x.shape[-1])
    return as_complex(x) * torch.polar(torch.full_like(angle, setting.factor), angle)


def turns(distance: Tensor, freq: Tensor) -> Tensor:
    """Return the turn `[..., D/2]` of each distance, as complex numbers; each distance is computed once."""
    first, last = distance.aminmax()
    angle = torch.arange(int(first), int(last) + 1).double()[:, None] * freq
    return torch.polar(torch.ones_like(angle), angle)[distance - first]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the real dot product of complex vectors."""
    return (a * b.conj()).real.sum(-1)


def attention(q: Tensor, k: Tensor, v: Tensor, tables: Tables, setting: Setting) -> Tensor:
    """Return `[H, N, D]`: each row's softmax over its attended keys, each key rotated by its distance."""
    n_heads, n, dim = q.shape
    rep = n_heads // k.shape[0]
    freq = setting.angles(dim)
    out = torch.zeros(n_heads, n, dim, dtype=torch.float64)
    for h in range(n_heads):
        queries, keys = as_complex(q[h]), as_complex(k[h // rep])
        product = queries[:, None] * keys[None].conj()  # [N, N, D/2]
        scores = (product * turns(tables.distance[h], freq)).real.sum(-1) / math.sqrt(dim)
        scores *= setting.factor**2
        if tables.scale is not None:
            scores *= tables.scale[:, None]
        scores[~tables.mask[h]] = -math.inf
        out[h] = scores.softmax(-1) @ v[h // rep].double()
    return out


UNSEEN = 1 << 40  # the distance of a token that is not attended


class Text:
    """A text's vectors and their setting. `rep` query heads share a KV head; `i`, `j` index queries and keys."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> None:
        self.q, self.k, self.v, self.setting, self.window = q, k, v, setting, setting.window
        (self.n_heads, self.n, self.dim), self.rep = q.shape, len(q) // len(k)
        self.at = torch.arange(self.n)
        self.i, self.j = self.at[:, None], self.at[None]

    def everyone(self, table: Tensor) -> Tensor:
        """Repeat one head's table `[N, N]` for all heads."""
        return table.expand(self.n_heads, self.n, self.n)

    def keys(self, h: int) -> Tensor:
        return self.k[h // self.rep]

    def seen_at(self, h: int, position: int | Tensor) -> Tensor:
        """Return a head's queries rotated at one position, or at one for each."""
        return turned(self.q[h], torch.as_tensor(position).expand(self.n), self.setting)


DEFINITIONS: dict[str, Callable[..., Tables]] = {}  # of `q`, `k`, `v`, a setting, and knobs


def definition(define: Callable[..., Tables]) -> Callable[..., Tables]:
    """Register a definition by its name, as a function of `q`, `k`, `v` and a setting in place of a `Text`."""

    def tables(q: Tensor, k: Tensor, v: Tensor, setting: Setting, **knobs: Any) -> Tables:
        return define(Text(q, k, v, setting), **knobs)

    DEFINITIONS[define.__name__] = tables
    return tables


@definition
def full(text: Text) -> Tables:
    """Define full attention: causal, distance i - j, within the checkpoint's sliding window, if any."""
    i, j, sliding = text.i, text.j, text.setting.sliding_window
    mask = (j <= i) if sliding is None else (j <= i) & (i - j < sliding)
    return Tables(text.everyone(mask), text.everyone(i - j))


@definition
def streaming(text: Text, sinks: int = 4, local: int | None = None) -> Tables:
    """Define StreamingLLM: positions count only the tokens that the query attends."""
    local = local or text.window - sinks

    def seen(_: int, i: int) -> dict[int, int]:
        kept = [j for j in range(i + 1) if j < sinks or i - j < local]
        return {j: len(kept) - 1 - place for place, j in enumerate(kept)}

    mask, distance, *_ = tables_of(1, text.n, seen)
    return Tables(text.everyone(mask), text.everyone(distance))


@definition
def lm_infinite(text: Text, sinks: int = 10, local: int | None = None, top_k: int = 0, from_layer: int = 0) -> Tables:
    """Define LM-Infinite: a Lambda-shaped mask, distances up to `local`, the best of the middle as if at `local`."""
    local, i, j = local or text.window, text.i, text.j
    mask = text.everyone((j <= i) & ((j < sinks) | (i - j < local))).clone()
    for h in range(text.n_heads if top_k and from_layer == 0 else 0):
        logits = dot(text.seen_at(h, local)[:, None], as_complex(text.keys(h))[None])
        for row in range(text.n):
            middle = range(sinks, row - local + 1)
            best = best_first(middle, logits[row].tolist())[:top_k]
            mask[h, row, best] = True
    return Tables(mask, text.everyone((i - j).clamp(max=local)))


@definition
def rerope(text: Text, local: int | None = None, log_scale: bool = False) -> Tables:
    """Define ReRoPE: all tokens, at a distance of at most `local`."""
    i, j, distance = text.i, text.j, (text.i - text.j).clamp(max=local or text.window // 2)
    scale = [max(1.0, math.log(row + 1) / math.log(text.window)) for row in range(text.n)]
    return Tables(text.everyone(j <= i), text.everyone(distance), torch.tensor(scale).double() if log_scale else None)


@definition
def self_extend(text: Text, local: int | None = None, group: int | str = 8, far: int | None = None) -> Tables:
    """Define Self-Extend: true distances below `local`, distances of groups beyond.

    With `group="auto"` each query has the smallest group for which no distance exceeds `far`.
    """
    local, i, j = local or text.window // 4, text.i, text.j
    far = text.window - 1 if far is None else far
    sizes = [group] * text.n
    if group == "auto":
        for row in range(text.n):
            sizes[row] = 1
            while row // sizes[row] + local - local // sizes[row] > far:
                sizes[row] += 1
    size = torch.tensor(sizes)[:, None]
    grouped = i // size - j // size + local - local // size
    return Tables(text.everyone(j <= i), text.everyone(torch.where(i - j < local, i - j, grouped)))


@definition
def dca(
    text: Text, chunk_size: int | None = None, parts: str = "all", temperature: bool = False, far: int | None = None
) -> Tables:
    """Define Dual Chunk Attention, case by case (Eq. 2-7)."""
    size, i, j = chunk_size or 3 * text.window // 4, text.i, text.j
    behind = i // size - j // size
    own, last = i % size, torch.full_like(i, text.window - 1 if far is None else far)
    successive = torch.minimum(own + size, last) if parts == "all" else last
    place = torch.where(behind == 0, own, torch.where(behind == 1, successive, last))
    mask, distance = (j <= i) & ((behind == 0) | (parts != "intra")), place - j % size
    scale = [max(1.0, 1 + 0.05 * math.log((row + 1) / text.window)) ** 2 for row in range(text.n)]
    return Tables(text.everyone(mask), text.everyone(distance), torch.tensor(scale).double() if temperature else None)


@definition
def longheads(
    text: Text,
    chunk_size: int | None = None,
    chunks: int | None = None,
    share: str = "group",
    rank: str = "top",
    keep_first: bool = True,
    local: int | None = None,
    fix_head: bool = False,
    placement: str = "side_by_side",
    top_p: float | None = None,
    summary: str = "keys",
) -> Tables:
    """Define LongHeads, query by query and head by head."""
    size = chunk_size or min(8, max(2, text.window // 128), max(1, text.window // 32))
    budget = chunks or max(min(8, text.window // size), text.window // (2 * size))
    n_last = math.ceil((max(size, min(text.window // 16, budget * size // 4)) if local is None else local) / size)
    scores = longheads_scores(text, size, placement, summary)

    def choose(h: int, i: int) -> list[int]:
        own = i // size
        if own < budget and top_p is None:
            return list(range(own))
        heads = {
            "head": [0] if fix_head else [h],
            "group": [0] if fix_head else [g for g in range(text.n_heads) if g // text.rep == h // text.rep],
            "layer": list(range(text.n_heads)),
        }[share]
        total = scores[heads, i].sum(0)[:own]
        weights = (total / len(heads) / math.sqrt(text.dim)).exp().tolist()
        order = (total if rank == "top" else -total).tolist()
        return choice(order, always(own, int(keep_first), n_last), budget - 1, top_p, weights)

    return placed(text.n_heads, text.n, size, choose, placement)


def always(own: int, n_first: int, n_last: int) -> list[int]:
    """Return the chunks before a query's own that are attended whatever their scores: the first and the last ones."""
    return [c for c in range(own) if c < n_first or c >= own - n_last]


def best_first(ids: Sequence[int], scores: Sequence[float] | Mapping[int, float]) -> list[int]:
    """Return ids by falling scores; of ids with equal scores, but for the rounding of sums, the later one first."""
    return sorted(ids, key=lambda i: (-round(scores[i], 9), -i))


def reaching(top_p: float | None, fixed: list[int], free: list[int], weights: Mapping[int, float]) -> list[int]:
    """Return the fixed choices and the fewest free ones, best first, that bring the weights' share to `top_p`.

    If nothing is fixed, at least one is returned.
    """
    if top_p is None:
        return fixed + free
    taken, order, total = list(fixed), list(free), sum(weights.values())
    while order and (not taken or sum(weights[c] for c in taken) < top_p * total):
        taken.append(order.pop(0))
    return taken


def choice(
    order: Sequence[float], fixed: list[int], most: int, top_p: float | None, weights: Sequence[float]
) -> list[int]:
    """Return the fixed chunks and the best others by `order`, at most `most`, cut to a share of the weights."""
    free = best_first([c for c in range(len(order)) if c not in fixed], order)
    return sorted(reaching(top_p, fixed, free[: max(0, most - len(fixed))], dict(enumerate(weights))))


def true_mass(q: Tensor, k: Tensor, setting: Setting, judge: str) -> Tensor:
    """Return full attention's weights `[H, N, N]`, at distances i - j, or at most half of the window."""
    return log_mass(q, k, setting, judge).exp()


def log_mass(q: Tensor, k: Tensor, setting: Setting, judge: str) -> Tensor:
    """Return the logarithms of `true_mass`, which tell masses apart that are 0 in double precision."""
    text = Text(q, k, k, setting)
    distance = text.i - text.j
    distance = distance if judge == "true" else distance.clamp(max=text.window // 2)
    turn, weights = turns(distance, setting.angles(text.dim)), []
    for h in range(text.n_heads):
        product = as_complex(q[h])[:, None] * as_complex(text.keys(h))[None].conj()
        logits = (product * turn).real.sum(-1) * setting.factor**2
        weights.append((logits / math.sqrt(text.dim)).masked_fill(text.j > text.i, -math.inf).log_softmax(-1))
    return torch.stack(weights)


@definition
def oracle(text: Text, judge: str = "constant", **knobs: Any) -> Tables:
    """Define `oracle`: the chunks with most true mass, query by query and head by head."""
    mass = log_mass(text.q, text.k, text.setting, judge)

    def weigh(h: int, i: int, own: int, size: int) -> list[float]:
        return mass[h, i, : own * size].unflatten(0, (own, size)).logsumexp(1).tolist()

    return by_weight(text, weigh, **knobs)


@definition
def random(text: Text, seed: int = 0, **knobs: Any) -> Tables:
    """Define `random`: chunks by a hash of seed, head, query and chunk (of layer 0), all of one weight."""

    def weigh(h: int, i: int, own: int, _: int) -> list[float]:
        return [draw(seed, h, i, c) for c in range(own)]

    return by_weight(text, weigh, alike=True, **knobs)


def by_weight(
    text: Text,
    weigh: Callable[[int, int, int, int], list[float]],
    alike: bool = False,
    chunk_size: int | None = None,
    chunks: int | None = None,
    placement: str = "side_by_side",
    top_p: float | None = None,
    budget: int | None = None,
    keep_first: bool = True,
    keep_last: bool = True,
) -> Tables:
    """Take the chunks of most weight, where `weigh(h, i, own, size)` gives the logarithm for the `own` chunks before.

    With `alike`, the weights order the chunks, and all chunks count the same for `top_p`.
    """
    size = chunk_size or min(32, text.window // 32)
    most = budget // size if budget else chunks or text.window // size

    def choose(h: int, i: int) -> list[int]:
        own = i // size
        order = weigh(h, i, own, size)
        fixed = always(own, int(keep_first), int(keep_last))
        return choice(order, fixed, most - 1, top_p, [1.0] * own if alike else [*map(math.exp, order)])

    return placed(text.n_heads, text.n, size, choose, placement)


def draw(seed: int, h: int, i: int, c: int) -> int:
    """Draw a number for a head, a query and a chunk (of layer 0)."""
    bits = (((seed * 1_000_037 + h) * 1_000_033 + i) * 0x9E3779B1 + c * 0x85EBCA77) & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ (bits >> 15)) * factor & 0xFFFFFFFF
    return (bits ^ (bits >> 16)) >> 8


def tables_of(n_heads: int, n: int, seen: Callable[[int, int], dict[int, int]]) -> Tables:
    """Make tables of the tokens that each query of each head sees, with the distance of each."""
    rows = [[[row.get(j, UNSEEN) for j in range(n)] for row in map(seen, [h] * n, range(n))] for h in range(n_heads)]
    distance = torch.tensor(rows)
    return Tables(distance != UNSEEN, distance.where(distance != UNSEEN, 0))


def placed(
    n_heads: int, n: int, size: int, choose: Callable[[int, int], list[int]], placement: str = "side_by_side"
) -> Tables:
    """Place the chosen chunks and the query's own: side by side from position 0, at true distances, or the chosen at a
    chunk's distance.
    """

    def seen(h: int, i: int) -> dict[int, int]:
        own, row, found = i // size, choose(h, i), {}
        for slot, chunk in enumerate([*row, own]):
            to_first = {"side_by_side": (len(row) - slot) * size + i % size, "true": i - chunk * size}.get(placement)
            for offset in range(size if chunk < own else i % size + 1):
                if placement == "constant":
                    found[chunk * size + offset] = size if chunk < own else i % size - offset
                else:
                    found[chunk * size + offset] = to_first - offset
        return found

    return tables_of(n_heads, n, seen)


def longheads_scores(text: Text, size: int, placement: str, summary: str) -> Tensor:
    """Return `[H, N, M]`: the query against each complete chunk's representation (Eq. 1-3).

    Side by side: the chunk at its offsets, the query unrotated. True: both at their positions. Constant: the chunk
    unrotated, the query at position L, both with the factor of RoPE's scaling. With the summary `keys`, a key weighs as
    much as any query of its chunk attends it, in the mean of a KV head's query heads.
    """
    q, setting, n_chunks, root = text.q, text.setting, text.n // size, math.sqrt(text.dim)
    scores = torch.zeros(text.n_heads, text.n, n_chunks, dtype=torch.float64)
    index = torch.arange(n_chunks * size)
    at = index if placement == "true" else index % size
    of_head, asking_of = dict[int, Tensor](), dict[int, Tensor]()

    def chunked(x: Tensor) -> Tensor:
        return x.unflatten(0, (n_chunks, size))  # [M, L, ...]

    for h in range(text.n_heads):
        asking = {
            "side_by_side": as_complex(q[h]),
            "true": text.seen_at(h, text.at),
            "constant": text.seen_at(h, size) * setting.factor,
        }[placement]
        queries, keys = (
            chunked(as_complex(x) if placement == "constant" else turned(x, at, setting))
            for x in (q[h, : len(index)], text.keys(h)[: len(index)])
        )
        received = (dot(queries[:, :, None], keys[:, None]) / root).softmax(-1)  # [M, L, L]
        most = received.amax(1)  # that any query gives a key
        of_head[h] = ((most / most.sum(-1, keepdim=True))[..., None] * keys).sum(1)
        if summary == "values":
            out = received @ chunked(text.v[h // text.rep, : len(index)].double())
            weights = (dot(as_complex(out.mean(1))[:, None], keys) / root).softmax(-1)
            of_head[h] = (weights[..., None] * keys).sum(1)
        asking_of[h] = asking
    for h in range(text.n_heads):
        first = h // text.rep * text.rep
        one = of_head[h] if summary == "values" else sum(of_head[first + g] for g in range(text.rep)) / text.rep
        scores[h] = dot(asking_of[h][:, None], one[None])
    return scores


@definition
def quest(
    text: Text, page: int = 16, budget: int | None = None, dense_layers: int = 2, top_p: float | None = None
) -> Tables:
    """Define Quest, query by query and head by head, in the first layer."""
    if dense_layers > 0:
        return full(text.q, text.k, text.v, text.setting)
    budget = budget or max(text.window // 4, 2 * page)
    queries = [torch.view_as_real(text.seen_at(h, text.at)).flatten(1) for h in range(text.n_heads)]
    keys = [torch.view_as_real(turned(x, text.at, text.setting)).flatten(1) for x in text.k]
    pages = [tokens[: text.n // page * page].unflatten(0, (-1, page)) for tokens in keys]  # [M, P, D]
    bounded = [(tokens.amin(1), tokens.amax(1)) for tokens in pages]

    def choose(h: int, i: int) -> list[int]:
        low, high = (queries[h][i] * bound[: i // page] for bound in bounded[h // text.rep])
        bounds = torch.maximum(low, high).sum(-1)
        return choice(bounds.tolist(), [], budget // page - 1, top_p, (bounds / math.sqrt(text.dim)).exp().tolist())

    return placed(text.n_heads, text.n, page, choose, "true")


@definition
def pages(text: Text, **knobs: Any) -> Tables:
    """Define `pages`. Knobs of its selector, placement and budget have dots."""
    return page_tables(text, **{name.rpartition(".")[2]: value for name, value in knobs.items()})


def page_tables(
    text: Text,
    select: str = "bounds",
    placement: str = "side_by_side",
    page: int | None = None,
    budget: int | None = None,
    sinks: int | None = None,
    local: int | None = None,
    share: str | None = None,
    group: int = 8,
    chunk_size: int | None = None,
    far: int | None = None,
    top_p: float | None = None,
    repr_tokens: int = 4,
    growth: str | None = None,
    grows_from: int | None = None,
    grows_to: int | None = None,
    queries: str = "alone",
    **knobs: Any,
) -> Tables:
    """Define `pages`, query by query and head by head. `knobs` are those of `lowdim`, `oracle` and `random`."""
    window, n_heads, n = text.window, text.n_heads, text.n
    page = page or min(16, max(1, window // 32))
    first, last = (-(-(page if tokens is None else tokens) // page) for tokens in (sinks, local))
    near = last if placement in ("constant", "grouped") else 0  # local pages that are seen with the own page
    budget = budget or max(window // 2, page * (1 + near + max(1, first + last - near)))
    reach, size = (last + 1) * page, chunk_size or max(page, 3 * window // 4 // page * page)
    far = (reach if placement == "constant" else window - 1) if far is None else far
    repr_tokens, sample = min(repr_tokens, page), budget // page * page

    def budget_at(i: int) -> int:
        ratio = i / (grows_from or window)
        if growth is None or ratio < 1:
            return budget
        return min(int(budget * (math.sqrt(ratio) if growth == "sqrt" else ratio)), grows_to or max(window, budget))

    def seen_from(i: int, j: int) -> int:
        """The position from which query i sees the chosen key j."""
        behind = i // size - j // size
        return {
            "side_by_side": 0,  # for scores; where the key is seen depends on what else is chosen
            "true": i,
            "constant": far,
            "grouped": i // group + reach - reach // group,
            "dual": i % size if behind == 0 else min(i % size + size, far) if behind == 1 else far,
        }[placement]

    def key_at(j: int) -> int:
        return {"side_by_side": j % page, "true": j, "constant": 0, "grouped": j // group, "dual": j % size}[placement]

    scores = page_scores(text, select, page, repr_tokens, seen_from, key_at, placement, sample, **knobs)
    share = share or ("layer" if select == "lowdim" else "head")
    heads = {"head": 1, "group": text.rep, "layer": n_heads}[share]
    together, start = {i: [i] for i in range(n)}, 0  # the queries that choose with query i
    for n_queries in text.setting.blocks if queries == "page" else ():
        for p in range(-(-start // page), (start + n_queries) // page):
            whole = [*range(p * page, (p + 1) * page)]
            together |= dict.fromkeys(whole, whole)
        start += n_queries

    def choose(h: int, i: int) -> list[int]:
        end = max(0, i // page - near)
        mine = scores[h // heads * heads : h // heads * heads + heads, together[i], :end].flatten(0, 1)
        sums = {"random": lambda: mine[0], "oracle": lambda: mine.logsumexp(0)}.get(select, lambda: mine.sum(0))()
        total, most = sums.tolist(), float(sums.max()) if end else 0.0
        fixed = [c for c in range(end) if c < first or c >= end - (last - near)]
        scale = heads * math.sqrt(text.dim) * (repr_tokens if select == "representatives" else 1)
        scale = 1.0 if select == "oracle" else scale
        weights = [1.0 if select == "random" else math.exp((x - most) / scale) for x in total]
        return choice(total, fixed, budget_at(i) // page - 1 - near, top_p, weights)

    def seen(h: int, i: int) -> dict[int, int]:
        row = choose(h, i)
        found = {j: i - j for j in range(max(0, i // page - near) * page, i + 1)}
        for slot, c in enumerate(row):
            side_by_side = (len(row) - slot) * page + i % page
            at = side_by_side if placement == "side_by_side" else seen_from(i, c * page)  # of all keys of a page
            found |= {j: at - key_at(j) for j in range(c * page, (c + 1) * page)}
        return found

    return tables_of(n_heads, n, seen)


@definition
def reattention(
    text: Text,
    span: int | None = None,
    top_k: int | None = None,
    sinks: int | None = None,
    local: int | None = None,
    share: str = "head",
    top_p: float | None = None,
) -> Tables:
    """Define ReAttention, query by query and head by head: spans with the best `q · k` without positions."""
    span = span or min(32, max(1, text.window // 16))
    first = -(-(span if sinks is None else sinks) // span)
    last = -(-(local or text.window // 2) // span) - 1
    top_k = top_k or text.window // span - first - last - 1
    logits = [text.q[h].double() @ text.keys(h).double().T for h in range(text.n_heads)]
    best = torch.stack(logits)[..., : text.n // span * span].unflatten(2, (-1, span)).amax(3)  # [H, N, M]
    heads = {"head": 1, "group": text.rep, "layer": text.n_heads}[share]

    def choose(h: int, i: int) -> list[int]:
        end, together = i // span, slice(h // heads * heads, h // heads * heads + heads)
        total = best[together, i, :end].sum(0)
        fixed = [c for c in range(end) if c < first or c >= end - last]
        most = max(total.tolist(), default=0.0)
        weights = ((total - most) / heads / math.sqrt(text.dim)).exp().tolist()
        return choice(total.tolist(), fixed, first + top_k + last, top_p, weights)

    return placed(text.n_heads, text.n, span, choose, "side_by_side")


def page_scores(
    text: Text,
    select: str,
    page: int,
    repr_tokens: int,
    seen_from: Callable[[int, int], int],
    key_at: Callable[[int], int],
    place: str,
    sample: int,
    compress: str = "pca",
    low_dim: int = 128,
    maps: Mapping[str, Tensor] | None = None,
    judge: str = "constant",
    seed: int = 0,
    of: str = "values",
) -> Tensor:
    """Return `[H, N, M]`: each query's scores of the complete pages, by one of the selectors."""
    q, setting, root = text.q, text.setting, math.sqrt(text.dim)

    def asked(h: int, rows: slice, at: Tensor) -> Tensor:
        return as_complex(q[h, rows]) if place == "constant" else turned(q[h, rows], at, setting)

    def sharing(h: int) -> range:
        return range(h // text.rep * text.rep, (h // text.rep + 1) * text.rep)

    found = torch.zeros(text.n_heads, text.n, text.n // page).double()
    if select == "oracle":
        mass = log_mass(q, text.k, setting, judge)[..., : found.shape[2] * page]
        return mass.unflatten(2, (-1, page)).logsumexp(3)
    if select == "lowdim":
        return low_dim_scores(text, page, low_dim, maps, sample)
    for h in range(text.n_heads):
        for c in range(found.shape[2]):
            rows = slice(c * page, (c + 1) * page)
            own = text.keys(h)[rows]
            if select == "best_key":
                found[h, :, c] = dot(as_complex(q[h])[:, None], as_complex(own)[None]).amax(1)
                continue
            if select == "random":
                found[h, :, c] = torch.tensor([draw(seed, h, i, c) for i in range(text.n)])
                continue
            asking = text.seen_at(h, torch.tensor([seen_from(i, c * page) for i in range(text.n)]))
            at = torch.tensor([key_at(j) for j in range(c * page, (c + 1) * page)])
            queries, keys = asked(h, rows, at), turned(own, at, setting)
            if place == "side_by_side":
                asking = as_complex(q[h])
            if place == "constant":
                asking, keys = asking * setting.factor, as_complex(own)
            if select == "bounds":
                channels = torch.view_as_real(keys).flatten(1)
                bounds = torch.stack([channels.amin(0), channels.amax(0)])
                found[h, :, c] = (torch.view_as_real(asking).flatten(1)[:, None] * bounds).amax(1).sum(1)
                continue
            inner = (dot(queries[:, None], keys[None]) / root).softmax(-1)
            if select == "summary" and of == "keys":
                shares = [(dot(asked(g, rows, at)[:, None], keys[None]) / root).softmax(-1) for g in sharing(h)]
                most = torch.stack(shares).amax(1)
                one = ((most / most.sum(-1, keepdim=True)).mean(0)[:, None] * keys).sum(0)
            elif select == "summary":
                average = as_complex((inner @ text.v[h // text.rep, rows].double()).mean(0))
                one = ((dot(average, keys) / root).softmax(-1)[:, None] * keys).sum(0)
            elif select == "representatives":
                received = inner.sum(0).tolist()
                one = keys[best_first(range(page), received)[:repr_tokens]].sum(0)
            else:
                one = keys.mean(0)
            found[h, :, c] = dot(asking, one)
    return found


def low_dim_scores(text: Text, page: int, low_dim: int, maps: Mapping[str, Tensor] | None, sample: int) -> Tensor:
    """Return `[H, N, M]`: ESA's f of a page's best token, an equal share for every head."""
    k, n_heads, n_pages, far = text.k, text.n_heads, text.n // page, max(1, text.window // 2)
    queries = [text.seen_at(h, far) * text.setting.factor for h in range(n_heads)]
    keys = k.transpose(0, 1).flatten(1)  # [N, G * D]
    if maps is None:
        basis = torch.tensor(directions(k[:, :sample], low_dim))
        back = (keys.double() @ basis @ basis.T).unflatten(1, (len(k), text.dim))
        f = torch.stack([dot(queries[h][:, None], as_complex(back[:, h // text.rep])[None]) for h in range(n_heads)])
        f = f.sum(0)
    else:
        f = mapped(queries, keys, maps)
    best = f[:, : n_pages * page].unflatten(1, (n_pages, page)).amax(2)
    return best.expand(n_heads, text.n, n_pages) / n_heads


def mapped(queries: list[Tensor], keys: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
    """Return `f_q(q) · f_k(k)`, `[N, M]`, of all heads' rotated queries and of keys `[M, G * D]`, by learned maps."""
    low_q = torch.cat([torch.cat((x.real, x.imag), 1) for x in queries], 1) @ maps["query"].double()
    low_k = keys.double() @ maps["key"].double()
    return (low_q + maps["query_bias"].double()) @ (low_k + maps["key_bias"].double()).T


@definition
def infllm(
    text: Text,
    block_size: int = 128,
    repr_tokens: int = 4,
    top_k: int = 16,
    sinks: int = 128,
    local: int | None = None,
    far: int | None = None,
    top_p: float | None = None,
) -> Tables:
    """Define InfLLM, block of queries by block of queries."""
    setting, n_heads, n, rep, i, j = text.setting, text.n_heads, text.n, text.rep, text.i, text.j
    local = local or text.window // 2
    far = local if far is None else far
    q_far, k_plain = turned(text.q, torch.full((n,), far), setting), as_complex(text.k)
    mask = (j <= i) & (i - j < local)

    attended = torch.zeros(n_heads, n, dtype=torch.float64)  # by the local attention of all queries
    for h in range(n_heads):
        keys = turned(text.keys(h), text.at, setting)
        logits = dot(text.seen_at(h, text.at)[:, None], keys[None]) / math.sqrt(text.dim)
        attended[h] = logits.masked_fill(~mask, -math.inf).softmax(-1).sum(0)

    def representatives(h: int, first: int) -> Tensor:
        best = best_first(range(first, first + block_size), attended[h].tolist())
        return k_plain[h // rep, best[:repr_tokens]]

    represented: dict[int, Tensor] = {}  # by a block's first token: [H, R, D/2]
    start = 0
    for size in setting.blocks:
        rows = range(start, start + size)
        n_blocks = max(0, start - local + 1 - sinks) // block_size
        firsts = [sinks + block * block_size for block in range(n_blocks)]
        if n_blocks > top_k or top_p is not None:
            asked = q_far[:, start : start + size].mean(1)
            for first in firsts:
                if first not in represented:
                    represented[first] = torch.stack([representatives(h, first) for h in range(n_heads)])
            relevance = {first: float(dot(asked[:, None], represented[first]).sum()) for first in firsts}
            memory = best_first(firsts, relevance)[:top_k]
            n_products = n_heads * min(repr_tokens, block_size) * math.sqrt(text.dim)
            most = max(relevance.values(), default=0.0)
            weights = {first: math.exp((relevance[first] - most) / n_products) for first in firsts}
            memory = reaching(top_p, [], memory, weights)
        else:
            memory = firsts
        memory_end = sinks + n_blocks * block_size
        for row in rows:
            old = range(max(0, row - local + 1))
            blocks = [(token - sinks) // block_size * block_size + sinks for token in old]
            seen = [token < sinks or token >= memory_end or blocks[token] in memory for token in old]
            mask[row, : len(old)] = torch.tensor(seen, dtype=torch.bool)
        start += size
    return Tables(text.everyone(mask), text.everyone(torch.where(i - j < local, i - j, far)))


@definition
def esa(
    text: Text,
    sinks: int = 128,
    local: int | None = None,
    top_k: int | None = None,
    eps: int = 3,
    low_dim: int = 128,
    compress: str = "none",
    far: int | None = None,
    maps: Mapping[str, Tensor] | None = None,
    top_p: float | None = None,
    heads: str = "sum",
) -> Tables:
    """Define ESA, block of queries by block of queries; `maps` are one layer's, with biases."""
    k, setting, n_heads = text.k, text.setting, text.n_heads
    local = local or text.window // 2
    far = local if far is None else far
    top_k = top_k or text.window // 4
    mask, distance = text.j <= text.i, text.i - text.j
    turned_at_far = [text.seen_at(h, far) for h in range(n_heads)]
    basis: np.ndarray | None = None
    start = 0
    for size in setting.blocks:
        border = start - local
        if border > sinks:
            if compress == "pca" and basis is None:
                basis = directions(k[:, :start], low_dim)
            rows = k[:, sinks:border].transpose(0, 1).flatten(1)  # key heads side by side
            asking = [x[start : start + size] for x in turned_at_far]
            if basis is not None:  # projected to the low dimension and back
                rows = torch.tensor(rows.double().numpy() @ basis @ basis.T)
            if maps is not None:
                f = mapped(asking, rows, maps)
            else:
                keys = as_complex(rows.unflatten(1, (len(k), text.dim)).repeat_interleave(text.rep, 1))
                found = torch.stack([dot(asking[h][:, None], keys[None, :, h]) for h in range(n_heads)])
                f = found.sum(0) if heads == "sum" else found.amax(0)
            score = (f - f.max(dim=1, keepdim=True).values).max(dim=0).values.tolist()
            wide = [max(score[max(0, m - eps) : m + eps + 1]) for m in range(len(score))]
            best = best_first(range(len(wide)), wide)[:top_k]
            scale = (n_heads if heads == "sum" else 1) * math.sqrt(text.dim)
            weights = dict(enumerate(math.exp((x - max(score)) / scale) for x in score))
            chosen = {*range(sinks), *(sinks + m for m in reaching(top_p, [], best, weights))}
            mask[start : start + size, :border] = torch.tensor([token in chosen for token in range(border)])
            distance[start : start + size, :border] = far
        start += size
    return Tables(text.everyone(mask), text.everyone(distance))


def directions(k: Tensor, low_dim: int) -> np.ndarray:
    """Return the principal components of keys `[G, N, D]` with heads side by side: `[G·D, low_dim]`."""
    rows = k.transpose(0, 1).flatten(1).double().numpy()
    return np.linalg.svd(rows - rows.mean(axis=0))[2][: min(low_dim, len(rows) - 1)].T
