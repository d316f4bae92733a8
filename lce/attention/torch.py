"""The backend of PyTorch's flash kernels, on CPUs and on CUDA."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lce.attention.attention import Attended, Attention, combine, join
from lce.attention.int8_rows import readable
from lce.attention.reference import Reference
from lce.attention.scores import SCORES_AT_ONCE
from lce.attention.tiles import SlotQueries
from lce.attention.turn import Turn, rotate

FEW_ROWS = 4  # the largest number of query rows of a tile that a CPU computes by plain batched products
MASKED = 1024  # queries of a call with a window on a CPU
MOST_BLOCKS = 65_535  # the largest size of a CUDA grid along its second and third axis


class Torch(Attention):
    """The backend of PyTorch's operators.

    On CUDA the flash kernels take half precision with some head dimensions. All else there is plain float32 arithmetic.
    """

    name = "torch"
    speed = 1

    def softmax(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        q, (k, v) = q if turn is None else rotate(q, turn), readable(q, k, v)
        if flash_takes(q):
            return self._flash_of_all_heads(q, k, v, causal, window)
        (n_heads, n_queries, dim), (n_kv_heads, n_keys, _) = q.shape, k.shape
        if q.is_cuda:
            return softmax_of_slices(q, k, v, causal, window)
        if causal and window is not None and window < n_keys:
            return join([_windowed(some, k[:, :n], v[:, :n], window) for some, n in _ends(q, n_keys)], 1)
        if not causal or n_queries == 1:  # all queries see all keys: query heads that share keys are rows of a problem
            out, lse = _flash_cpu(q.reshape(n_kv_heads, 1, -1, dim), k[:, None], v[:, None])
            return out.view(q.shape), lse.view(q.shape[:-1])
        first = n_keys - n_queries
        own = (x[:, None, first:].expand(-1, n_heads // n_kv_heads, -1, -1) for x in (k, v))
        part = _flash_cpu(q.unflatten(0, (n_kv_heads, -1)), *own, causal=True)
        before = [self.softmax(q, k[:, :first], v[:, :first], causal=False)] if first else []
        return combine([*before, (part[0].flatten(0, 1), part[1].flatten(0, 1))])

    def _flash_of_all_heads(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Attended:
        """Attend as one problem of all heads: for few queries the kernel splits the keys among more thread blocks."""
        n_queries = q.shape[1]
        if causal and window is not None and (unseen := k.shape[1] - n_queries - window + 1) > 0:
            k, v = k[:, unseen:], v[:, unseen:]
        causal = causal and n_queries > 1  # one query sees all keys
        if not causal or (window is not None and window >= k.shape[1]):
            window = None
        out, lse = self.flash(*(x.transpose(0, 1)[None] for x in (q, k, v)), causal=causal, window=window)
        return out[0].transpose(0, 1), lse[0]

    def flash(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> Attended:
        """Call PyTorch's CUDA flash kernel: `q [B, T, H, D]`, `k v [B, N, G, D]` to `[B, T, H, D]`, lse `[B, H, T]`."""
        sizes = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0 if causal else -1}
        vectors, lengths = (_dense_last(x) for x in (q, k, v)), (q.shape[1], k.shape[1])
        run = torch.ops.aten._flash_attention_forward
        out, lse, *_ = run(*vectors, None, None, *lengths, 0.0, causal, False, **sizes)
        return out, lse

    def softmax_of_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """For few rows take plain products, faster in half precision: flash's bits depend on alignment there."""
        if q.is_cuda or len(q) == 1 or q.shape[1] > FEW_ROWS:
            return super().softmax_of_tiles(q, k, v)
        k, v = readable(q, k, v)
        scores = torch.bmm(q.float() * q.shape[-1] ** -0.5, k.mT.float())
        lse = scores.logsumexp(-1, keepdim=True)
        return torch.bmm((scores - lse).exp_(), v.float()).to(q.dtype), lse.squeeze(-1)

    def grouped(self, queries: SlotQueries, count: Tensor, order: Tensor, k: Tensor, v: Tensor, into: Attended) -> None:
        """Compute `grouped` on CUDA by the variable-length kernel, without waiting. Memory: three copies of q."""
        k, v = readable(queries.q, k, v)
        if not flash_takes(k):
            super().grouped(queries, count, order, k, v, into)
            return
        n_rows, (n_tiles, size, _) = len(order), k.shape
        if not n_rows:
            return
        n_busy = min(n_tiles, n_rows)
        if n_busy < n_tiles:  # the tiles that have rows, ascending, then `n_tiles` as padding
            tiles = torch.nonzero_static(count, size=n_busy, fill_value=n_tiles).squeeze(1)
            count = torch.nn.functional.pad(count, (0, 1)).index_select(0, tiles)
        else:
            tiles = torch.arange(n_tiles, device=k.device)
        ends = count.cumsum(0).to(torch.int32)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        first_keys = torch.nn.functional.pad(tiles, (0, 1), value=n_tiles).mul_(size).to(torch.int32)
        sizes = torch.full_like(ends, size)
        q, rows = queries.take(order), torch.arange(n_rows, device=k.device)
        out, lse = into[0].index_select(0, order), into[1].index_select(0, order)
        flat, most_rows = [_dense_last(x).flatten(0, 1)[:, None] for x in (k, v)], min(queries.most_rows, n_rows)
        for start in range(0, n_busy, MOST_BLOCKS):
            stop = min(start + MOST_BLOCKS, n_busy)
            cuts = bounds[start : stop + 1], first_keys[start : stop + 1], most_rows, size
            run = torch.ops.aten._flash_attention_forward  # tile b: rows `bounds[b]` on of q, `sizes[b]` rows of keys
            part, part_lse, *_ = run(q[:, None], *flat, *cuts, 0.0, False, False, seqused_k=sizes[start:stop])
            here = (rows >= bounds[start]) & (rows < bounds[stop])  # the kernel leaves other rows undefined
            out = torch.where(here[:, None], part.squeeze(1), out)
            lse = torch.where(here, part_lse.view(-1), lse)
        into[0].index_copy_(0, order, out)
        into[1].index_copy_(0, order, lse)


def flash_takes(x: Tensor) -> bool:
    """Return whether PyTorch's CUDA flash kernels accept queries or keys such as `x`."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256


def softmax_of_slices(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Attended:
    """Compute `Reference.softmax` for a slice of the queries at a time. Memory: about `SCORES_AT_ONCE` numbers."""
    k, v, past = k.float(), v.float(), k.shape[1] - q.shape[1]
    parts, start = [], 0
    for some in q.split(max(1, SCORES_AT_ONCE // (len(q) * k.shape[1])), dim=1):
        stop = start + some.shape[1]
        seen = slice(0 if window is None else max(0, past + start - window + 1), past + stop) if causal else slice(None)
        parts.append(Reference().softmax(some, k[:, seen], v[:, seen], causal=causal, window=window))
        start = stop
    return join(parts, 1)


def _dense_last(x: Tensor) -> Tensor:
    """Return `x`, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _ends(q: Tensor, n_keys: int) -> Iterator[tuple[Tensor, int]]:
    """Yield up to `MASKED` queries at a time, and the number of keys that the last of them sees, causally."""
    stop = n_keys - q.shape[1]
    for some in q.split(MASKED, dim=1):
        stop += some.shape[1]
        yield some, stop


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Attended:
    """Attend causally in a window on a CPU: `q [H, T, D]`, `k v [G, N, D]`. Only keys that some miss have a mask."""
    (n_heads, n_queries, dim), (n_kv_heads, n_keys, _) = q.shape, k.shape
    own, last = n_keys - n_queries, n_keys - window  # the own key of query 0, the first key of the last query
    first = max(0, own - window + 1)
    keys = torch.arange(first, n_keys)
    keys, found = keys[(keys < last) | (keys > own)], list[Attended]()
    if last <= own:
        every = (x[:, None, max(last, 0) : own + 1] for x in (k, v))
        out, lse = _flash_cpu(q.reshape(n_kv_heads, 1, -1, dim), *every)
        found.append((out.view(q.shape), lse.view(n_heads, n_queries)))
    if len(keys):
        at = torch.arange(own, n_keys)[:, None]
        mask = torch.zeros(n_queries, len(keys), dtype=q.dtype)
        mask = mask.masked_fill_((keys > at) | (keys <= at - window), -torch.inf)
        some = (x[:, keys][:, None].expand(-1, n_heads // n_kv_heads, -1, -1) for x in (k, v))
        out, lse = _flash_cpu(q.unflatten(0, (n_kv_heads, -1)), *some, mask=mask)
        found.append((out.flatten(0, 1), lse.flatten(0, 1)))
    return combine(found)


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> Attended:
    """Call PyTorch's CPU flash kernel: `q [B, heads, T, D]`, `k v [B, heads, N, D]`; causal: query t sees keys 0..t.

    The `mask [T, N]` is added to scores.
    """
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = run(q, k, v, 0.0, causal, attn_mask=mask)
    return out, lse.float().contiguous()
