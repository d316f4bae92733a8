"""Scores by which methods choose keys, and the choices by scores.

Scores are products of queries with low-dim keys, chunk summaries and page bounds. Chosen are the best chunks of each
query, the best tokens of a block, and the runs of a decode step.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from lce import gpu
from lce.attention.attention import causal_mask
from lce.kernels.choose import choices
from lce.kernels.choose.scores import (
    add_weights,
    compiled_for,
    products_of_many,
    scores_of_few,
    scores_of_many,
    weight_sums,
)
from lce.kernels.choose.scores import best_below_top as compiled_best_below_top
from lce.kernels.product import panels
from lce.kernels.runtime.launching import Rows
from lce.kernels.runtime.shared import LANES, MOST_ROWS

SCORES_AT_ONCE = 1 << 24  # the largest number of scores to compute at a time: 64 MiB in float32
IN_CACHES = 1 << 22  # the number of scores that CPU kernels compute at a time, so that scores stay in the caches
FEW_OF_MANY = 8  # GPUs iterate instead of calling `eigh` if dimensions / wanted directions is at least this


def scores_at_once(x: Tensor) -> int:
    """Return the number of scores to compute at a time from tensors like `x`."""
    return IN_CACHES if compiled_for(x) else SCORES_AT_ONCE


def _few(n_queries: int, generated: bool | None) -> bool:
    """Return whether the kernel for few queries scores: for `generated` tokens, or if None for up to `MOST_ROWS`."""
    return n_queries <= MOST_ROWS if generated is None else generated


def products(a: Tensor, b: Tensor, generated: bool | None = None) -> Tensor:
    """Multiply `a [heads, T, D]` by `b [heads, D, M]`, to float32 if possible: half-precision scores overflow or tie.

    On CPUs the order of a sum depends on D and on whether the queries are `generated`, but not on T, M or a key's
    place. If `generated` is None, up to `MOST_ROWS` queries are taken for generated ones.
    """
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    if _compiled_for_both(a, b):
        return scores_of_few(a, b.mT.contiguous()) if _few(a.shape[1], generated) else products_of_many(a, b.mT)
    dtype = score_dtype(a)
    return a.to(dtype) @ b.to(dtype)


def _compiled_for_both(a: Tensor, b: Tensor) -> bool:
    """Return whether the CPU's kernels multiply vectors of `a [heads, T, D]` with some such as `b`."""
    return compiled_for(b) and a.dtype is b.dtype and a.shape[2] % 2 == 0 and a.numel() > 0 and b.numel() > 0


def score_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which this machine multiplies tensors like `x` fastest: the dtype of `x`, or float32."""
    return torch.float32 if x.is_cpu and x.dtype in panels.slow_dtypes() else x.dtype


def affine(x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """Return `x @ matrix + bias`, `[n, R]`, rounded once to the dtype of `x [n, F]`. Bits do not depend on n."""
    trains = torch.is_grad_enabled() and any(part.requires_grad for part in (x, matrix, bias))
    if compiled_for(x) and not trains and (computed := panels.arithmetic(x.dtype)):
        weight = matrix.T.contiguous()
        return panels.product(x.to(computed).contiguous(), weight, bias, None, None, x.dtype)
    dtype = score_dtype(x)
    return torch.addmm(bias.to(dtype), x.to(dtype), matrix.to(dtype)).to(x.dtype)


def dot_products(q: Tensor, vectors: Tensor, together: int = 1, generated: bool | None = None) -> Tensor:
    """Return the products `[H / n, T, M]` of `q [H, T, D]` with `vectors [S, M, D]`.

    H / S neighbouring heads share vectors, and products are summed over n = `together` neighbouring heads. The dtype is
    that of `products`, as is `generated`. For few queries a kernel reads each vector once.
    """
    if (few := _scores_of_few(q, vectors, together, generated)) is not None:
        return few
    shared = q.reshape(len(vectors), -1, q.shape[-1])  # queries that share a KV head's vectors follow each other
    if _compiled_for_both(shared, vectors):
        scores = products_of_many(shared, vectors)
    else:
        scores = products(shared, vectors.mT, generated=False)
    return sum_heads(scores.view(*q.shape[:2], -1), together)


def bound_scores(q: Tensor, bounds: Tensor, together: int = 1, generated: bool | None = None) -> Tensor:
    """Return a bound of `q · k` for the keys of M pages: `Σ_d max(q_d · min_d, q_d · max_d)`, `[H / n, T, M]`.

    `bounds [G, M, 2, D]` are each channel's minimum and maximum. Bounds are summed over n = `together` heads.
    """
    if (few := _scores_of_few(q, bounds, together, generated)) is not None:
        return few
    signed = torch.cat((q.clamp(max=0), q.clamp(min=0)), dim=-1)  # [H, T, 2·D], as a page's bounds lie
    return dot_products(signed, bounds.flatten(2), together, generated=False)


def _scores_of_few(q: Tensor, keys: Tensor, together: int, generated: bool | None) -> Tensor | None:
    """Return the scores of few queries by a kernel that reads keys or bounds once; None: no kernel suits."""
    if (keys.is_cuda and q.shape[1] > MOST_ROWS) or (not keys.is_cuda and not _few(q.shape[1], generated)):
        return None
    if compiled_for(keys) and q.dtype in (keys.dtype, torch.float32):
        within = together if len(q) // len(keys) % together == 0 else 1  # heads that share a row of keys
        return sum_heads(scores_of_few(q, keys, within), together // within)
    if gpu.launching.runs_on(keys):
        return sum_heads(gpu.choices.scores_of_few(q, keys), together)
    return None


def sum_heads(scores: Tensor, together: int) -> Tensor:
    """Sum the scores `[H, T, M]` of n = `together` neighbouring heads, in float32: `[H / n, T, M]`.

    Heads are added one by one, because the order of the sums of PyTorch's `sum` depends on the place in a row.
    """
    if together == 1:
        return scores
    first, *others = scores.float().unflatten(0, (-1, together)).unbind(1)
    total: Tensor = first.clone()
    for some in others:
        total += some
    return total


def token_scores(q: Tensor, k: Tensor, into: Tensor | None = None, generated: bool | None = None) -> Tensor:
    """Return the products `[t, n]` of low-dim queries `q [t, R]` with keys `k [n, R]`, stored token by token.

    On CPUs they are float32, written to `into`, if given: `scores_size` numbers, reused because new memory is slow.
    `generated` is that of `products`; if it is None, a single query is taken for a generated one.
    """
    generated = len(q) == 1 if generated is None else generated
    if generated or not compiled_for(k) or k.shape[1] % 2:
        return dot_products(q[None], k[None], generated=generated)[0]
    return scores_of_many(q.contiguous(), k, into).T


def scores_size(n_queries: int, n_tokens: int) -> int:
    """Return the numbers of a buffer for `token_scores`."""
    return -(-n_queries // LANES) * LANES * n_tokens


def best_below_top(scores: Tensor) -> Tensor:
    """Return `max_c (s[c, m] - max_m' s[c, m'])` for scores `s [t, n]` of queries c and tokens m: `[n]`, at most 0."""
    if compiled_for(scores) and scores.stride(0) == 1:
        return compiled_best_below_top(scores.T)
    scores = scores.float()
    return (scores - scores.amax(dim=-1, keepdim=True)).amax(dim=0)


def spread(scores: Tensor, eps: int) -> Tensor:
    """Replace each of the scores `[M]` by the largest score at most `eps` places away."""
    return max_pool1d(scores[None], 2 * eps + 1, stride=1, padding=eps)[0] if eps else scores


def attention_sums(q: Tensor, k: Tensor, lse: Tensor, window: int) -> Tensor:
    """Return the causal attention weights of each key, summed over all queries: `[H, N]`, float32.

    `q [H, T, D]` and `k [G, N, D]` are rotated; the last query sees the last key, and no query sees a key `window` or
    more tokens before it. Weights are recomputed from logits and their `lse [H, T]`. Time: O(H · T · N · D).
    """
    (n_heads, n_queries, dim), n_keys, compiled = q.shape, k.shape[1], compiled_for(k)
    if compiled and n_queries > MOST_ROWS and dim % 2 == 0:
        return weight_sums(q, k, lse, 1 / math.sqrt(dim), window)
    total = q.new_zeros(n_heads, n_keys, dtype=torch.float32)
    unseen = None if compiled else ~causal_mask(n_queries, n_keys, window, q.device)
    rows = max(1, min(n_queries, scores_at_once(k) // (n_heads * n_keys)))
    grouped = (q / math.sqrt(dim)).unflatten(0, (len(k), -1))  # [G, H/G, T, D]
    for start in range(0, n_queries, rows):
        some = slice(start, start + rows)
        here, part = grouped[:, :, some].flatten(1, 2), lse[:, some]
        if unseen is None:
            logits = dot_products(here, k).reshape(n_heads, -1, n_keys).contiguous()
            add_weights(logits, part.contiguous(), 1.0, total, n_keys - n_queries + start, window)
        else:
            logits = products(here, k.mT).float().view(n_heads, -1, n_keys)
            total += (logits - part[..., None]).masked_fill_(unseen[some], -torch.inf).exp_().sum(dim=1)
    return total


def principal_directions(scatter: Tensor, n: int) -> Tensor:
    """Return the eigenvectors `[F, n]` of the n largest eigenvalues of the symmetric `scatter [F, F]`, ascending.

    On GPUs, if n is small, iteration in O(F² · n) finds the eigenvectors, because `eigh` takes a second or more.
    """
    if scatter.is_cuda and len(scatter) >= FEW_OF_MANY * n:
        return leading(scatter, n)
    vectors: Tensor = torch.linalg.eigh(scatter)[1][:, -n:]
    return vectors


def leading(x: Tensor, n: int) -> Tensor:
    """Return `principal_directions` by subspace iteration (Rutishauser, 1970). Nearly equal directions may be mixed."""
    vectors = torch.randn(len(x), 2 * n, dtype=x.dtype, generator=torch.Generator().manual_seed(0)).to(x.device)
    x = x / x.diagonal().sum().clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(3):
        vectors = torch.linalg.qr(x @ (x @ (x @ vectors)))[0]
    best: Tensor = vectors @ torch.linalg.eigh(vectors.T @ x @ vectors)[1][:, -n:]
    return best


def best_chunks(scores: Tensor, forced: Tensor, n: int, start: int | Tensor, size: int) -> Tensor:
    """Return the n best of the chunks before each query's own chunk: `[C, T, min(n, M)]`, ascending, then -1.

    Row t of `scores [C, T, M]` is the query at index `start + t`; `start` is a number, or one int64 on the device. The
    chunks `forced [T, M]` (bool) come first; others that score -inf are never taken. Time: O(C · T · M).
    """
    if compiled_for(scores) and not isinstance(start, Tensor):
        return choices.best_chunks(scores.contiguous(), forced, n, start, size)
    if gpu.launching.runs_on(scores) and scores.shape[-1] <= gpu.launching.MOST_CHUNKS:
        return gpu.choices.best_chunks(scores.contiguous(), forced, n, start, size)
    own = ((start + torch.arange(scores.shape[1], device=scores.device)) // size)[:, None]
    unseen = torch.arange(scores.shape[-1], device=scores.device) >= own
    scores = scores.float().masked_fill(forced, torch.inf).masked_fill_(unseen, -torch.inf)
    best, none = best_first(scores, min(n, scores.shape[-1])), torch.iinfo(torch.int64).max
    chosen = best.masked_fill(scores.gather(-1, best) == -torch.inf, none).sort(dim=-1).values
    return chosen.masked_fill(chosen == none, -1)


def best_first(scores: Tensor, n: int) -> Tensor:
    """Return the indices of the n largest of `scores [..., M]`, best first; of equal scores, the later one first.

    NaN counts as inf. `topk` orders equal numbers in no stated way, so rows with equal numbers are chosen again.
    """
    if not scores.is_cpu or n >= scores.shape[-1]:
        return _later_first(scores, n)
    values, best = scores.topk(n + 1, dim=-1)
    best, tied = best[..., :n], ~(values[..., 1:] < values[..., :-1]).all(-1)  # NaN is less than nothing
    best[tied] = _later_first(scores[tied], n)
    return best


def _later_first(scores: Tensor, n: int) -> Tensor:
    """Return what `best_first` returns, by integers that have a score in the upper bits and its index in the lower."""
    bits = scores.float().nan_to_num(torch.inf, torch.inf, -torch.inf).view(torch.int32).long()
    ordered = bits ^ ((bits >> 31) & 0x7FFF_FFFF)  # in the order of the scores
    return ((ordered << 32) | torch.arange(scores.shape[-1], device=scores.device)).topk(n, dim=-1).indices


def best_tokens(scores: Tensor, n: int, eps: int = 0) -> Tensor:
    """Return indices `[n]`, ascending, of the largest scores `[M]` after `spread`; among equal scores the last."""
    if compiled_for(scores):
        return choices.best_tokens(scores.float().contiguous(), n, eps)
    scores = spread(scores, eps)
    if gpu.launching.runs_on(scores) and n:
        return gpu.best.best_tokens(scores, n)
    return best_first(scores, n).sort().values


def best_runs(q: Tensor, summaries: Rows, at: Tensor, size: int, n: int, **how: Any) -> tuple[Tensor, Tensor] | None:
    """Choose chunks as runs by a GPU kernel: `lce.kernels.choose.choices_triton.best_runs`. None: no kernel suits."""
    able = not isinstance(summaries, Tensor) or gpu.launching.runs_on(summaries)
    if not able or summaries.shape[1] > gpu.launching.MOST_CHUNKS:
        return None
    return gpu.choices.best_runs(q, summaries, at, size, n, **how)


def runs_of_chunks(chosen: Tensor, size: int, at: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return chosen chunks `[C, T, K]`, -1 for none, as runs of tokens: first tokens and counts, `[C, T, K]` each.

    If the queries' indices `at [T]` are given, a query's own chunk up to it is one more run. `like` is as keys are.
    """
    if gpu.launching.runs_on(like):
        return gpu.choices.runs_of_chunks(chosen, size, at)
    first, counts = chosen * size, (chosen >= 0) * size
    if at is not None:
        begin = at // size * size
        own = (x[:, None].expand(len(chosen), -1, 1) for x in (begin, at + 1 - begin))
        first, counts = (torch.cat(pair, dim=2) for pair in zip((first, counts), own, strict=True))
    return first, counts
