"""The slow, obvious truth: attention straight from the definitions, in float64, sharing no code with lce.

Each method is a function from a whole sequence's `q [H, N, D]`, `k v [G, N, D]` to explicit tables, for every head:
which keys a query attends (`mask [H, N, N]`), at which distance (`distance [H, N, N]`), and for some methods a factor
on each query's logits (`scale [N]`). `attention` then takes one softmax over each row. With a `correction`, other
tables and a row for each query (-1: none), a query's output also gets that row's output minus its output by the others.
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
    correction: "tuple[Tables, Tensor] | None" = None


@dataclass(frozen=True)
class Setting:
    """The inputs of a definition besides the vectors: the window, RoPE, and the sizes of the blocks."""

    window: int
    blocks: Sequence[int] = ()
    theta: float = 10000.0
    frequencies: Tensor | None = None  # of a scaled RoPE; `factor` is its factor on rotated vectors
    factor: float = 1.0
    sliding_window: int | None = None

    def angles(self, dim: int) -> Tensor:
        if self.frequencies is not None:
            return self.frequencies.double()
        return torch.tensor([self.theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


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
    if tables.correction is not None:
        others, rows = tables.correction
        difference = out - attention(q, k, v, others, setting)
        out = out + torch.where(rows[:, None] < 0, 0.0, difference[:, rows])
    return out


def indices(q: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return queries `i [N, 1]`, keys `j [1, N]`, and a function that repeats one head's table for all."""
    n_heads, n = q.shape[:2]
    return torch.arange(n)[:, None], torch.arange(n)[None], lambda table: table.expand(n_heads, n, n)


def full(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tables:
    """Define full attention: causal, distance i - j, within the checkpoint's sliding window, if any."""
    i, j, everyone = indices(q)
    mask = j <= i
    if setting.sliding_window is not None:
        mask = mask & (i - j < setting.sliding_window)
    return Tables(everyone(mask), everyone(i - j))


def streaming(q: Tensor, k: Tensor, v: Tensor, setting: Setting, sinks: int = 4, local: int | None = None) -> Tables:
    """Define StreamingLLM: positions count only the tokens that the query attends."""
    local = local or setting.window - sinks
    n = q.shape[1]
    mask, distance = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.int64)
    for i in range(n):
        kept = [j for j in range(i + 1) if j < sinks or i - j < local]
        for place, j in enumerate(kept):
            mask[i, j] = True
            distance[i, j] = len(kept) - 1 - place
    everyone = indices(q)[2]
    return Tables(everyone(mask), everyone(distance))


def lm_infinite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    sinks: int = 10,
    local: int | None = None,
    top_k: int = 0,
    from_layer: int = 0,
) -> Tables:
    """Define LM-Infinite: a Lambda-shaped mask, distances up to `local`, the best of the middle as if at `local`."""
    local = local or setting.window
    i, j, everyone = indices(q)
    mask = everyone((j <= i) & ((j < sinks) | (i - j < local))).clone()
    if top_k and from_layer == 0:
        n_heads, n = q.shape[:2]
        rep = n_heads // k.shape[0]
        for h in range(n_heads):
            seen_from = turned(q[h], torch.full((n,), local), setting)
            logits = dot(seen_from[:, None], as_complex(k[h // rep])[None])
            for row in range(n):
                middle = range(sinks, row - local + 1)
                best = sorted(middle, key=logits[row].tolist().__getitem__, reverse=True)[:top_k]
                mask[h, row, best] = True
    return Tables(mask, everyone((i - j).clamp(max=local)))


def rerope(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, local: int | None = None, log_scale: bool = False
) -> Tables:
    """Define ReRoPE: all tokens, at a distance of at most `local`."""
    local = local or setting.window // 2
    i, j, everyone = indices(q)
    scale = [max(1.0, math.log(row + 1) / math.log(setting.window)) for row in range(q.shape[1])]
    return Tables(
        everyone(j <= i), everyone((i - j).clamp(max=local)), torch.tensor(scale).double() if log_scale else None
    )


def self_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    local: int | None = None,
    group: int | str = 8,
    far: int | None = None,
) -> Tables:
    """Define Self-Extend: true distances below `local`, distances of groups beyond.

    With `group="auto"` each query has the smallest group for which no distance exceeds `far`.
    """
    local = local or setting.window // 4
    i, j, everyone = indices(q)
    far = setting.window - 1 if far is None else far
    sizes = [group] * len(i)
    if group == "auto":
        for row in range(len(i)):
            sizes[row] = 1
            while row // sizes[row] + local - local // sizes[row] > far:
                sizes[row] += 1
    size = torch.tensor(sizes)[:, None]
    grouped = i // size - j // size + local - local // size
    return Tables(everyone(j <= i), everyone(torch.where(i - j < local, i - j, grouped)))


def dca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    chunk_size: int | None = None,
    parts: str = "all",
    temperature: bool = False,
    far: int | None = None,
) -> Tables:
    """Define Dual Chunk Attention, case by case (Eq. 2-7)."""
    size = chunk_size or 3 * setting.window // 4
    i, j, everyone = indices(q)
    behind = i // size - j // size
    own, last = i % size, torch.full_like(i, setting.window - 1 if far is None else far)
    successive = torch.minimum(own + size, last) if parts == "all" else last
    place = torch.where(behind == 0, own, torch.where(behind == 1, successive, last))
    mask = (j <= i) & ((behind == 0) | (parts != "intra"))
    scale = [max(1.0, 1 + 0.05 * math.log((row + 1) / setting.window)) ** 2 for row in range(q.shape[1])]
    return Tables(everyone(mask), everyone(place - j % size), torch.tensor(scale).double() if temperature else None)


def longheads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    chunk_size: int | None = None,
    chunks: int | None = None,
    share: str = "head",
    rank: str = "top",
    keep_first: bool = True,
    keep_last: bool = True,
    fix_head: bool = False,
    placement: str = "side_by_side",
    top_p: float | None = None,
) -> Tables:
    """Define LongHeads, query by query and head by head."""
    size = chunk_size or min(32, setting.window // 32)
    budget = chunks or setting.window // size
    n_heads, n = q.shape[:2]
    scores = longheads_scores(q, k, v, size, setting, placement)
    rep = n_heads // k.shape[0]

    def choose(h: int, i: int) -> list[int]:
        own = i // size
        if own < budget and top_p is None:
            return list(range(own))
        heads = {
            "head": [0] if fix_head else [h],
            "group": [g for g in range(n_heads) if g // rep == h // rep],
            "layer": list(range(n_heads)),
        }[share]
        total = scores[heads, i].sum(0)
        fixed = always(own, keep_first, keep_last)
        free = [c for c in range(own) if c not in fixed]
        free.sort(key=total.tolist().__getitem__, reverse=rank == "top")
        weights = dict(enumerate((total[:own] / len(heads) / math.sqrt(q.shape[-1])).exp().tolist()))
        return sorted(reaching(top_p, fixed, free[: budget - 1 - len(fixed)], weights))

    return placed(n_heads, n, size, choose, placement)


def always(own: int, keep_first: bool, keep_last: bool) -> list[int]:
    """Return the chunks before a query's own that are attended whatever their scores."""
    return sorted({c for c, kept in ((0, keep_first), (own - 1, keep_last)) if kept and 0 <= c < own})


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


def true_mass(q: Tensor, k: Tensor, setting: Setting, judge: str) -> Tensor:
    """Return full attention's weights `[H, N, N]`, at distances i - j, or at most half of the window."""
    n_heads, dim = len(q), q.shape[-1]
    i, j, _ = indices(q)
    distance = (i - j) if judge == "true" else (i - j).clamp(max=setting.window // 2)
    turn, weights = turns(distance, setting.angles(dim)), []
    for h in range(n_heads):
        product = as_complex(q[h])[:, None] * as_complex(k[h // (n_heads // len(k))])[None].conj()
        logits = (product * turn).real.sum(-1) * setting.factor**2
        weights.append((logits / math.sqrt(dim)).masked_fill(j > i, -math.inf).softmax(-1))
    return torch.stack(weights)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    chunk_size: int | None = None,
    chunks: int | None = None,
    placement: str = "side_by_side",
    top_p: float | None = None,
    budget: int | None = None,
    judge: str = "constant",
    keep_first: bool = True,
    keep_last: bool = True,
) -> Tables:
    """Define `oracle`: the chunks with most true mass, query by query and head by head."""
    size = chunk_size or min(32, setting.window // 32)
    most = budget // size if budget else chunks or setting.window // size
    mass = true_mass(q, k, setting, judge)

    def choose(h: int, i: int) -> list[int]:
        own = i // size
        weights = dict(enumerate(mass[h, i, : own * size].unflatten(0, (own, size)).sum(1).tolist()))
        fixed = always(own, keep_first, keep_last)
        free = sorted((c for c in range(own) if c not in fixed), key=lambda c: -weights[c])
        return sorted(reaching(top_p, fixed, free[: most - 1 - len(fixed)], weights))

    return placed(len(q), q.shape[1], size, choose, placement)


def random(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    chunk_size: int | None = None,
    chunks: int | None = None,
    placement: str = "side_by_side",
    top_p: float | None = None,
    budget: int | None = None,
    seed: int = 0,
    keep_first: bool = True,
    keep_last: bool = True,
) -> Tables:
    """Define `random`: chunks by a hash of seed, head, query and chunk (of layer 0)."""
    size = chunk_size or min(32, setting.window // 32)
    most = budget // size if budget else chunks or setting.window // size

    def choose(h: int, i: int) -> list[int]:
        own = i // size
        fixed = always(own, keep_first, keep_last)
        free = sorted((c for c in range(own) if c not in fixed), key=lambda c: -draw(seed, h, i, c))
        return sorted(reaching(top_p, fixed, free[: most - 1 - len(fixed)], dict.fromkeys(range(own), 1.0)))

    return placed(len(q), q.shape[1], size, choose, placement)


def draw(seed: int, h: int, i: int, c: int) -> int:
    """Draw a number for a head, a query and a chunk (of layer 0)."""
    bits = (((seed * 1_000_037 + h) * 1_000_033 + i) * 0x9E3779B1 + c * 0x85EBCA77) & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ (bits >> 15)) * factor & 0xFFFFFFFF
    return (bits ^ (bits >> 16)) >> 8


def placed(
    n_heads: int, n: int, size: int, choose: Callable[[int, int], list[int]], placement: str = "side_by_side"
) -> Tables:
    """Place the chosen chunks and the query's own: side by side from position 0, at true distances, or the chosen at a
    chunk's distance.
    """
    mask = torch.zeros(n_heads, n, n, dtype=torch.bool)
    distance = torch.zeros(n_heads, n, n, dtype=torch.int64)
    for h in range(n_heads):
        for i in range(n):
            row = [*choose(h, i), i // size]
            at = (len(row) - 1) * size + i % size
            seen = {
                chunk * size + offset: {
                    "side_by_side": at - slot * size - offset,
                    "true": i - chunk * size - offset,
                    "constant": i % size - offset if chunk == i // size else size,
                }[placement]
                for slot, chunk in enumerate(row)
                for offset in range(size if chunk < i // size else i % size + 1)
            }
            mask[h, i, [*seen]] = True
            distance[h, i, [*seen]] = torch.tensor([*seen.values()])
    return Tables(mask, distance)


def longheads_scores(
    q: Tensor, k: Tensor, v: Tensor, size: int, setting: Setting, placement: str = "side_by_side"
) -> Tensor:
    """Return `[H, N, M]`: the query against each complete chunk's representation (Eq. 1-3).

    Side by side: the chunk at its offsets, the query unrotated. True: both at their positions. Constant: the chunk
    unrotated, the query at position L, both with the factor of RoPE's scaling.
    """
    n_heads, n, dim = q.shape
    rep = n_heads // k.shape[0]
    scores = torch.zeros(n_heads, n, n // size, dtype=torch.float64)
    index = torch.arange(n // size * size)
    at = index if placement == "true" else index % size

    def chunked(x: Tensor) -> Tensor:
        return x.unflatten(0, (n // size, size))  # [M, L, ...]

    for h in range(n_heads):
        asking = {
            "side_by_side": as_complex(q[h]),
            "true": turned(q[h], torch.arange(n), setting),
            "constant": turned(q[h], torch.full((n,), size), setting) * setting.factor,
        }[placement]
        queries, keys = (
            chunked(as_complex(x) if placement == "constant" else turned(x, at, setting))
            for x in (q[h, : len(index)], k[h // rep, : len(index)])
        )
        inner = dot(queries[:, :, None], keys[:, None]) / math.sqrt(dim)
        out = inner.softmax(-1) @ chunked(v[h // rep, : len(index)].double())
        summary_query = as_complex(out.mean(1))
        weights = (dot(summary_query[:, None], keys) / math.sqrt(dim)).softmax(-1)
        representation = (weights[..., None] * keys).sum(1)
        scores[h] = dot(asking[:, None], representation[None])
    return scores


def quest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    page: int = 16,
    budget: int | None = None,
    dense_layers: int = 2,
    top_p: float | None = None,
) -> Tables:
    """Define Quest, query by query and head by head, in the first layer."""
    if dense_layers > 0:
        return full(q, k, v, setting)
    budget = budget or max(setting.window // 4, 2 * page)
    n_heads, n, _ = q.shape
    rep = n_heads // k.shape[0]
    positions = torch.arange(n)
    queries = [torch.view_as_real(turned(q[h], positions, setting)).flatten(1) for h in range(n_heads)]
    keys = [torch.view_as_real(turned(k[g], positions, setting)).flatten(1) for g in range(k.shape[0])]
    pages = [tokens[: n // page * page].unflatten(0, (-1, page)) for tokens in keys]  # [M, P, D]
    bounded = [(tokens.amin(1), tokens.amax(1)) for tokens in pages]

    def choose(h: int, i: int) -> list[int]:
        low, high = (queries[h][i] * bound[: i // page] for bound in bounded[h // rep])
        bounds = torch.maximum(low, high).sum(-1).tolist()
        best = sorted(range(len(bounds)), key=lambda c: -bounds[c])[: budget // page - 1]
        return sorted(reaching(top_p, [], best, dict(enumerate(math.exp(x / math.sqrt(q.shape[-1])) for x in bounds))))

    return placed(n_heads, n, page, choose, "true")


def pages(q: Tensor, k: Tensor, v: Tensor, setting: Setting, **knobs: Any) -> Tables:
    """Define `pages`. Knobs of its selector, placement and budget have dots."""
    return page_tables(q, k, v, setting, **{name.rpartition(".")[2]: value for name, value in knobs.items()})


def page_tables(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
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
    window, (n_heads, n, dim) = setting.window, q.shape
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

    scores = page_scores(q, k, v, setting, select, page, repr_tokens, seen_from, key_at, placement, sample, **knobs)
    heads = {"head": 1, "group": n_heads // len(k), "layer": n_heads}[
        share or ("layer" if select == "lowdim" else "head")
    ]

    together, start = {i: [i] for i in range(n)}, 0  # the queries that choose with query i
    for n_queries in setting.blocks if queries == "page" else ():
        for p in range(-(-start // page), (start + n_queries) // page):
            whole = [*range(p * page, (p + 1) * page)]
            together |= dict.fromkeys(whole, whole)
        start += n_queries

    def choose(h: int, i: int) -> list[int]:
        end = max(0, i // page - near)
        mine = scores[h // heads * heads : h // heads * heads + heads, together[i], :end].flatten(0, 1)
        total = (mine[0] if select == "random" else mine.sum(0)).tolist()
        fixed = [c for c in range(end) if c < first or c >= end - (last - near)]
        free = sorted((c for c in range(end) if c not in fixed), key=lambda c: -total[c])
        scale = heads * math.sqrt(dim) * (repr_tokens if select == "representatives" else 1)
        weights = {
            c: x if select == "oracle" else 1.0 if select == "random" else math.exp(x / scale)
            for c, x in enumerate(total)
        }
        return sorted(reaching(top_p, fixed, free[: budget_at(i) // page - 1 - near - len(fixed)], weights))

    mask, distance = torch.zeros(n_heads, n, n, dtype=torch.bool), torch.zeros(n_heads, n, n, dtype=torch.int64)
    for h in range(n_heads):
        for i in range(n):
            row = choose(h, i)
            seen = {j: i - j for j in range(max(0, i // page - near) * page, i + 1)}
            for slot, c in enumerate(row):
                for j in range(c * page, (c + 1) * page):
                    in_row = (len(row) - slot) * page + i % page - j % page
                    seen[j] = in_row if placement == "side_by_side" else seen_from(i, j) - key_at(j)
            mask[h, i, [*seen]] = True
            distance[h, i, [*seen]] = torch.tensor([*seen.values()])
    return Tables(mask, distance)


def reattention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    span: int | None = None,
    top_k: int | None = None,
    sinks: int | None = None,
    local: int | None = None,
    share: str = "head",
    top_p: float | None = None,
) -> Tables:
    """Define ReAttention, query by query and head by head: spans with the best `q · k` without positions."""
    (n_heads, n, dim), window, rep = q.shape, setting.window, len(q) // len(k)
    span = span or min(32, max(1, window // 16))
    first = -(-(span if sinks is None else sinks) // span)
    last = -(-(local or window // 2) // span) - 1
    top_k = top_k or window // span - first - last - 1
    logits = [q[h].double() @ k[h // rep].double().T for h in range(n_heads)]
    heads = {"head": 1, "group": rep, "layer": n_heads}[share]

    def choose(h: int, i: int) -> list[int]:
        end, together = i // span, range(h // heads * heads, h // heads * heads + heads)
        best = {
            c: sum(float(logits[each][i, c * span : (c + 1) * span].max()) for each in together) for c in range(end)
        }
        fixed = [c for c in best if c < first or c >= end - last]
        free = sorted((c for c in best if c not in fixed), key=lambda c: -best[c])
        weights = {c: math.exp(x / heads / math.sqrt(dim)) for c, x in best.items()}
        return sorted(reaching(top_p, fixed, free[: first + top_k + last - len(fixed)], weights))

    return placed(n_heads, n, span, choose, "side_by_side")


def page_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
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
) -> Tensor:
    """Return `[H, N, M]`: each query's scores of the complete pages, by one of the selectors."""
    (n_heads, n, dim), rep, found = q.shape, len(q) // len(k), torch.zeros(*q.shape[:2], q.shape[1] // page).double()
    if select == "oracle":
        mass = true_mass(q, k, setting, judge)[..., : found.shape[2] * page]
        return mass.unflatten(2, (-1, page)).sum(3)
    if select == "lowdim":
        return low_dim_scores(q, k, setting, page, low_dim, maps, sample)
    index = torch.arange(n)
    for h in range(n_heads):
        for c in range(found.shape[2]):
            rows = slice(c * page, (c + 1) * page)
            if select == "best_key":
                found[h, :, c] = dot(as_complex(q[h])[:, None], as_complex(k[h // rep, rows])[None]).amax(1)
                continue
            if select == "random":
                found[h, :, c] = torch.tensor([draw(seed, h, i, c) for i in range(n)])
                continue
            asking = turned(q[h], torch.tensor([seen_from(i, c * page) for i in range(n)]), setting)
            at = torch.tensor([key_at(j) for j in index[rows].tolist()])
            queries, keys = turned(q[h, rows], at, setting), turned(k[h // rep, rows], at, setting)
            if place == "side_by_side":
                asking = as_complex(q[h])
            if place == "constant":
                asking, queries, keys = asking * setting.factor, as_complex(q[h, rows]), as_complex(k[h // rep, rows])
            if select == "bounds":
                channels = torch.view_as_real(keys).flatten(1)
                products = torch.view_as_real(asking).flatten(1)[:, None] * torch.stack(
                    [channels.amin(0), channels.amax(0)]
                )
                found[h, :, c] = products.amax(1).sum(1)
                continue
            inner = (dot(queries[:, None], keys[None]) / math.sqrt(dim)).softmax(-1)
            if select == "summary":
                average = as_complex((inner @ v[h // rep, rows].double()).mean(0))
                one = ((dot(average, keys) / math.sqrt(dim)).softmax(-1)[:, None] * keys).sum(0)
            elif select == "representatives":
                received = inner.sum(0).tolist()
                one = keys[sorted(range(page), key=received.__getitem__, reverse=True)[:repr_tokens]].sum(0)
            else:
                one = keys.mean(0)
            found[h, :, c] = dot(asking, one)
    return found


def low_dim_scores(
    q: Tensor, k: Tensor, setting: Setting, page: int, low_dim: int, maps: Mapping[str, Tensor] | None, sample: int
) -> Tensor:
    """Return `[H, N, M]`: ESA's f of a page's best token, an equal share for every head."""
    (n_heads, n, dim), n_pages = q.shape, q.shape[1] // page
    far = torch.full((n,), max(1, setting.window // 2))
    queries = [turned(q[h], far, setting) * setting.factor for h in range(n_heads)]
    keys = k.transpose(0, 1).flatten(1).double()  # [N, G * D]
    if maps is None:
        basis = torch.tensor(directions(k[:, :sample], low_dim))
        back = (keys @ basis @ basis.T).unflatten(1, (len(k), dim))
        f = torch.stack(
            [dot(queries[h][:, None], as_complex(back[:, h * len(k) // n_heads])[None]) for h in range(n_heads)]
        ).sum(0)
    else:
        low_q = torch.cat([torch.cat((x.real, x.imag), 1) for x in queries], 1) @ maps["query"].double()
        f = (low_q + maps["query_bias"].double()) @ (keys @ maps["key"].double() + maps["key_bias"].double()).T
    best = f[:, : n_pages * page].unflatten(1, (n_pages, page)).amax(2)
    return best.expand(n_heads, n, n_pages) / n_heads


def infllm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    block_size: int = 128,
    repr_tokens: int = 4,
    top_k: int = 16,
    sinks: int = 128,
    local: int | None = None,
    far: int | None = None,
    top_p: float | None = None,
) -> Tables:
    """Define InfLLM, block of queries by block of queries."""
    local = local or setting.window // 2
    far = local if far is None else far
    n_heads, n = q.shape[:2]
    rep = n_heads // k.shape[0]
    positions = torch.arange(n)
    q_true = [turned(q[h], positions, setting) for h in range(n_heads)]
    k_true = [turned(k[g], positions, setting) for g in range(k.shape[0])]
    q_far, k_plain = turned(q, torch.full((n,), far), setting), as_complex(k)
    i, j, everyone = indices(q)
    mask = (j <= i) & (i - j < local)

    attended = torch.zeros(n_heads, n, dtype=torch.float64)  # by the local attention of all queries
    for h in range(n_heads):
        logits = dot(q_true[h][:, None], k_true[h // rep][None]) / math.sqrt(q.shape[-1])
        attended[h] = logits.masked_fill(~mask, -math.inf).softmax(-1).sum(0)

    def representatives(h: int, first: int) -> Tensor:
        best = sorted(range(first, first + block_size), key=attended[h].tolist().__getitem__, reverse=True)
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
            memory = sorted(firsts, key=lambda first: -relevance[first])[:top_k]
            n_products = n_heads * min(repr_tokens, block_size) * math.sqrt(q.shape[-1])
            weights = {first: math.exp(relevance[first] / n_products) for first in firsts}
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
    return Tables(everyone(mask), everyone(torch.where(i - j < local, i - j, far)))


def esa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
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
    local = local or setting.window // 2
    far = local if far is None else far
    top_k = top_k or setting.window // 4
    n_heads, _, dim = q.shape
    i, j, everyone = indices(q)
    mask, distance = (j <= i).clone(), (i - j).clone()
    rep = n_heads // k.shape[0]
    basis: np.ndarray | None = None
    start = 0
    for size in setting.blocks:
        border = start - local
        if border > sinks:
            if compress == "pca" and basis is None:
                basis = directions(k[:, :start], low_dim)
            if basis is not None:  # key heads side by side, projected to the low dimension and back
                rows = k[:, sinks:border].transpose(0, 1).flatten(1).double().numpy()
                back = torch.tensor(rows @ basis @ basis.T)
            f = torch.full((size, border - sinks), 0.0 if heads == "sum" else -math.inf, dtype=torch.float64)
            if maps is not None:
                placed = [turned(q[h, start : start + size], torch.full((size,), far), setting) for h in range(n_heads)]
                low_q = torch.cat([torch.cat((x.real, x.imag), 1) for x in placed], 1) @ maps["query"].double()
                low_k = torch.cat([k[g, sinks:border].double() for g in range(len(k))], 1) @ maps["key"].double()
                f = (low_q + maps["query_bias"].double()) @ (low_k + maps["key_bias"].double()).T
            for h in range(n_heads if maps is None else 0):
                queries = turned(q[h, start : start + size], torch.full((size,), far), setting)
                keys = as_complex(k[h // rep, sinks:border])
                if basis is not None:
                    keys = as_complex(back.unflatten(1, (k.shape[0], dim))[:, h // rep])
                found = dot(queries[:, None], keys[None])
                f = f + found if heads == "sum" else torch.maximum(f, found)
            score = (f - f.max(dim=1, keepdim=True).values).max(dim=0).values.tolist()
            wide = [max(score[max(0, m - eps) : m + eps + 1]) for m in range(len(score))]
            best = sorted(range(len(wide)), key=lambda m: (-wide[m], m))[:top_k]
            weights = dict(enumerate(math.exp(x / (n_heads if heads == "sum" else 1) / math.sqrt(dim)) for x in score))
            chosen = {*range(sinks), *(sinks + m for m in reaching(top_p, [], best, weights))}
            mask[start : start + size, :border] = torch.tensor([token in chosen for token in range(border)])
            distance[start : start + size, :border] = far
        start += size
    return Tables(everyone(mask), everyone(distance))


def directions(k: Tensor, low_dim: int) -> np.ndarray:
    """Return the principal components of keys `[G, N, D]` with heads side by side: `[G·D, low_dim]`."""
    rows = k.transpose(0, 1).flatten(1).double().numpy()
    return np.linalg.svd(rows - rows.mean(axis=0))[2][: min(low_dim, len(rows) - 1)].T


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    method: str = "streaming",
    every: int = 64,
    dense: str | None = None,
    dense_up_to: int = 1,
    correct: bool = True,
) -> Tables:
    """Define delta attention: small blocks and firsts of groups are dense; others get their first's error."""
    name, knobs = spelled(method)
    if name in ("streaming", "lm_infinite"):
        knobs = {"local": setting.window // 4} | knobs
    sparse = DEFINITIONS[name](q, k, v, setting, **knobs)
    dense_name, dense_knobs = spelled(dense or {"lm_infinite": "rerope", "esa": "rerope"}.get(name, "full"))
    whole = DEFINITIONS[dense_name](q, k, v, setting, **dense_knobs)
    n, is_dense, rows, start = q.shape[1], [], [], 0
    for size in setting.blocks or [q.shape[1]]:
        for i in range(start, start + size):
            is_dense.append(size <= dense_up_to or i % every == 0)
            rows.append(-1 if is_dense[-1] or not correct else i - i % every)
        start += size
    each = torch.tensor(is_dense)
    one = torch.ones(n, dtype=torch.float64)
    scales = [one if tables.scale is None else tables.scale for tables in (whole, sparse)]
    mask, distance = (torch.where(each[:, None], a, b) for a, b in zip(whole[:2], sparse[:2], strict=True))
    first = Tables(mask, distance, torch.where(each, *scales))
    return first._replace(correction=(sparse, torch.tensor(rows)))


def xattention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    stride: int = 8,
    block_size: int | None = None,
    top_p: float = 0.9,
) -> Tables:
    """Define XAttention, block of queries by block of queries; queries of a block that a pass cuts attend all keys."""
    size = block_size or max(stride, 2, min(128, setting.window // 32) // stride * stride)
    n_heads, n, dim = q.shape
    i, j, everyone = indices(q)
    mask, at, n_tiles = everyone(j <= i).clone(), torch.arange(n), n // stride
    for h in range(n_heads):
        queries, keys = turned(q[h], at, setting), turned(k[h // (n_heads // len(k))], at, setting)
        logits = torch.zeros(n_tiles, n_tiles, dtype=torch.float64)
        for offset in range(stride):
            asking, asked = (
                torch.arange(n_tiles) * stride + stride - 1 - offset,
                torch.arange(n_tiles) * stride + offset,
            )
            logits += dot(queries[asking][:, None], keys[asked][None]) / stride / math.sqrt(dim)
        start = 0
        for n_queries in setting.blocks or [n]:
            for b in range(n // size):
                if b * size < start or (b + 1) * size > start + n_queries:
                    continue
                weights = dict.fromkeys(range(b + 1), 0.0)
                for row in range(b * size // stride, (b + 1) * size // stride):
                    for column, share in enumerate(logits[row, : row + 1].softmax(0).tolist()):
                        weights[column * stride // size] += share
                others = sorted(range(1, b), key=weights.__getitem__, reverse=True)
                chosen = reaching(None if top_p == 1 else top_p, sorted({0, b}), others, weights)
                for c in set(range(b)) - set(chosen):
                    mask[h, b * size : (b + 1) * size, c * size : (c + 1) * size] = False
            start += n_queries
    return Tables(mask, everyone(i - j))


def spelled(text: str) -> tuple[str, dict[str, Any]]:
    """Return the method and the knobs of a text such as `streaming:sinks=4`."""
    name, *pairs = text.split(":")
    words = {"true": True, "false": False, "none": None}
    knobs: dict[str, Any] = {}
    for key, _, value in (pair.partition("=") for pair in pairs):
        knobs[key] = words[value] if value in words else int(value) if value.isdigit() else value
    return name, knobs


DEFINITIONS: dict[str, Callable[..., Tables]] = {
    "dca": dca,
    "delta": delta,
    "esa": esa,
    "full": full,
    "infllm": infllm,
    "lm_infinite": lm_infinite,
    "longheads": longheads,
    "oracle": oracle,
    "pages": pages,
    "quest": quest,
    "random": random,
    "reattention": reattention,
    "rerope": rerope,
    "self_extend": self_extend,
    "streaming": streaming,
    "xattention": xattention,
}
