"""Parts of attention that methods share: which keys, seen how, by the queries of a block.

Each returns `out [H, T, D]` and `lse [H, T]`, to be merged with the others; a query that sees none of a part's keys
has lse -inf there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lce.attention import Part, Turn, combine, rotate
from lce.cache.layer import LayerCache
from lce.cache.method_state import RecentRows
from lce.methods.step import Step

RECENT = "recent keys"
SCORES_AT_ONCE = 1 << 24  # bounds the scores of a slice of queries: 64 MiB in float32


def is_like(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor of a file has this shape and dtype."""
    return tuple(x.shape) == shape and x.dtype == dtype


def spans_of(*spans: tuple[Tensor | int, Tensor | int], like: Tensor) -> Tensor:
    """Spans of tokens, `start` and `stop` `[T]` or one for all queries, as `Method.spans` returns them: `[T, S, 2]`."""
    edges = [torch.as_tensor(edge, device=like.device).expand(like.shape) for span in spans for edge in span]
    stacked: Tensor = torch.stack(edges, dim=-1)  # [T, 2 S]
    return stacked.view(len(like), len(spans), 2)


def sinks_and_local(sinks: int, local: int, index: Tensor) -> Tensor:
    """The first `sinks` tokens, and the last `local` of each query `index [T]`: `[T, 2, 2]`."""
    first = (index + 1 - local).clamp(min=0)
    return spans_of((0, first.clamp(max=sinks)), (first, index + 1), like=index)


def mask_of(spans: Tensor, n_tokens: int) -> Tensor:
    """Which of `n_tokens` tokens are in spans `[T, S, 2]`: `[T, N]` bool."""
    index = torch.arange(n_tokens, device=spans.device)
    inside = (index >= spans[..., :1]) & (index < spans[..., 1:])  # [T, S, N]
    return inside.any(dim=1)


def products(a: Tensor, b: Tensor) -> Tensor:
    """The products of `a [S, T, D]` and `b [S, D, M]`, which scores are made of: `[S, T, M]`.

    On CUDA those of half precision are float32: scores in half precision overflow or tie. Nothing is converted first.
    """
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a @ b


def keep_recent(k: Tensor, cache: LayerCache, step: Step) -> None:
    """Keep the block's unrotated keys `[G, T, D]` at their absolute positions too.

    So are those before it that a truncation took away: they are in the cache, unrotated, and come out the same.
    """
    recent = cache.kept(RecentRows, RECENT)
    if step.at is not None:
        recent.write_at(rotate(k, step.true_turn(k)), step.at)
        return
    if lost := recent.missing(step.start):
        old = cache.span(lost.start, lost.stop)[0]
        positions = torch.arange(lost.start, lost.stop, device=k.device)
        recent.write(rotate(old, step.rope.turn(positions, k.dtype)), lost.start)
    recent.write(rotate(k, step.true_turn(k)), step.start)


def attend_span(
    q: Tensor, cache: LayerCache, step: Step, *, causal: bool, first: int = 0, stop: int | None = None,
    window: int | None = None, turn: Turn | None = None,
) -> Part:  # fmt: skip
    """Tokens `first..stop-1` as they are cached, by placed queries `[H, T, D]`; all of the cache by default.

    With a turn `[T, D/2]` the queries are unrotated, and placed by it.

    Causal: the last query sees the last token, and with `window` no query one that many or more behind it. However long
    the span, it is read in the pieces of `cache.segments`. Time: O(H · T · N · D).
    """
    stop = cache.stop if stop is None else stop
    if window is not None:
        first = max(first, stop - q.shape[1] - window + 1)
        return step.attention.dense(q, *cache.span(first, stop), causal=causal, window=window, turn=turn)
    own = max(first, stop - q.shape[1]) if causal else stop  # the last piece holds the block's own tokens
    segment = cache.layout.segment
    if own <= (first // segment + 1) * segment:  # one piece
        return step.attention.dense(q, *cache.span(first, stop), causal=causal, turn=turn)
    spans = list(cache.segments(first, own)) or [(first, first)]
    spans[-1] = (spans[-1][0], stop)
    parts = [step.attention.dense(q, *cache.span(a, b), causal=causal and b == stop, turn=turn) for a, b in spans]
    return combine(parts)


def attend_local(q: Tensor, cache: LayerCache, step: Step, *, window: int | None = None, first: int = 0) -> Part:
    """Each query attends the tokens from `first` on, and of these the last `window`, at their true distances.

    `q [H, T, D]` is unrotated. The method must keep that many recent keys. Time: O(H · T · window · D).
    """
    if window is not None:
        first = max(first, step.start - window + 1)
    keys = cache.kept(RecentRows, RECENT).span(first, step.stop)
    placed = rotate(q, step.true_turn(q))
    return step.attention.dense(placed, keys, cache.span(first, step.stop)[1], causal=True, window=window)


def attend_tokens(q: Tensor, cache: LayerCache, step: Step, index: Tensor) -> Part:
    """Placed queries `[H, T, D]` attend the tokens `index [n]`, ascending, as they are cached. Time: O(H · T · n · D).

    The tokens' keys and values are copied, every layer's to the same memory.
    """
    n = 2 * cache.layout.n_kv_heads * len(index) * cache.layout.head_dim
    buffer: Tensor = step.once(f"{len(index)} tokens", lambda: q.new_empty(n))
    return step.attention.dense(q, *cache.tokens(index, buffer), causal=False)


def attend_behind(
    q: Tensor, cache: LayerCache, step: Step, gap: int, *, first: int = 0, stop: int | None = None
) -> Part:
    """Each query attends those of tokens `first..stop-1` that are at least `gap` behind it, as they are cached.

    `q [H, T, D]` is placed; query i sees those up to `i - gap`. The block is cut in three: queries that see none,
    queries that see one more each, queries that see all. Time: O(H · T · N · D).
    """
    n_queries = q.shape[1]
    stop = min(step.stop if stop is None else stop, step.stop)
    begin = min(max(gap + first - step.start, 0), n_queries)
    whole = min(max(gap + stop - 1 - step.start, begin), n_queries)
    parts = [(torch.zeros_like(q[:, :begin]), q.new_full((q.shape[0], begin), -torch.inf, dtype=torch.float32))]
    if whole > begin:
        seen = step.start + whole - gap
        parts.append(attend_span(q[:, begin:whole], cache, step, causal=True, first=first, stop=seen))
    if n_queries > whole:
        parts.append(attend_span(q[:, whole:], cache, step, causal=False, first=first, stop=stop))
    return concat_queries(parts)


def attend_own_chunk(q: Tensor, cache: LayerCache, step: Step) -> Part:
    """Causal attention of each query to its own chunk alone: `q [H, T, D]` rotated as the keys are.

    Those are the cached keys, or the recent ones at their true positions where keys are cached unrotated. The block is
    cut at chunk borders: an end, whole chunks side by side, and a beginning. Time: O(H · T · L · D).
    """
    size = cache.layout.chunk_size
    first_border = min(-(-step.start // size) * size, step.stop)
    last_border = max(step.stop // size * size, first_border)

    def span(start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v = cache.span(start, stop)
        return (cache.kept(RecentRows, RECENT).span(start, stop) if RECENT in cache.state else k), v

    parts = []
    for start, stop in ((step.start, first_border), (first_border, last_border), (last_border, step.stop)):
        if start == stop:
            continue
        queries = q[:, start - step.start : stop - step.start]
        if start == first_border and stop == last_border:
            n_chunks = (stop - start) // size
            k, v = (x.unflatten(1, (n_chunks, size)) for x in span(start, stop))
            folded = fold_chunks(queries.unflatten(1, (n_chunks, size)), k.shape[0])
            out, lse = step.attention.dense(folded, k.flatten(0, 1), v.flatten(0, 1), causal=True)
            out = unfold_chunks(out, k.shape[0], n_chunks).flatten(1, 2)
            parts.append((out, unfold_chunks(lse, k.shape[0], n_chunks).flatten(1, 2)))
        else:
            parts.append(step.attention.dense(queries, *span(start // size * size, stop), causal=True))
    return concat_queries(parts)


def concat_queries(parts: Sequence[Part]) -> Part:
    """Parts of successive queries as one part of them all."""
    parts = [part for part in parts if part[0].shape[1]]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)


def fold_chunks(x: Tensor, n_kv_heads: int) -> Tensor:
    """`[H, m, …]` to `[G·m·R, …]`: chunks beside KV heads, so that each is a problem of its own to `dense`."""
    folded: Tensor = x.unflatten(0, (n_kv_heads, -1)).transpose(1, 2).flatten(0, 2)
    return folded


def unfold_chunks(x: Tensor, n_kv_heads: int, n_chunks: int) -> Tensor:
    """`fold_chunks` undone: `[G·m·R, …]` to `[H, m, …]`."""
    unfolded: Tensor = x.unflatten(0, (n_kv_heads, n_chunks, -1)).transpose(1, 2).flatten(0, 1)
    return unfolded
