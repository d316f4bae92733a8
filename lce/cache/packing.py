"""Keys and values in 8 bits: how pages are rounded, and how they lie in the rows of a file.

Keys are rounded by channel of a chunk, values by token, each KV head for itself. A number x becomes `round(x / scale)`,
with the scale `peak / 127`, where `peak` is the largest magnitude of the channel or the token.

Rounding changes numbers once: rounded numbers, in the model's dtype, are rounded to themselves. So a page may be packed
and unpacked any number of times, and tiers never change what is attended. For that a scale has 16 significant bits:
its products with -127..127 are exact in float32, and `peak` stays what it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lce.cache.layout import SCALE_ROWS, CacheLayout
from lce.errors import DataError

Parts = tuple[Tensor, ...]  # pages: `k v [n, P, L, D]`, or packed: see `pack`
MOST = 127  # the largest magnitude of a number of 8 bits
_KEYS, _VALUES = -2, -1  # what a scale is shared by: the tokens of a chunk, the channels of a token
_LEAST, _LARGEST = 2.0**-100, 2.0**127  # peaks beyond these bounds are taken as zero, and as the bound


def pack(k: Tensor, v: Tensor) -> Parts:
    """Pages `k v [n, P, L, D]` in 8 bits: keys int8 with scales `[n, P, 1, D]`, values int8 with `[n, P, L, 1]`.

    Scales are float32. Time: O(n · P · L · D); bytes: about half of 16-bit pages.
    """
    return (*_quantised(k, _KEYS), *_quantised(v, _VALUES))


def unpack(parts: Parts, dtype: torch.dtype) -> Parts:
    """Packed pages as `k v [n, P, L, D]` in the model's dtype. Bytes: that and a copy in float32."""
    k, k_scale, v, v_scale = parts
    return (k * k_scale).to(dtype), (v * v_scale).to(dtype)


@torch.inference_mode()  # the buffer may have been made in it
def round_chunks(k: Tensor, v: Tensor, size: int) -> None:
    """Round whole chunks `k v [G, m · size, D]` in place, as if they had been packed. May be repeated.

    An interruption may leave some of them rounded: the next call has the same result.
    """
    for x, shared in ((k, _KEYS), (v, _VALUES)):
        chunks = x.unflatten(1, (-1, size))
        numbers, scale = _quantised(chunks, shared)
        chunks.copy_(numbers * scale)


def _quantised(x: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits, and its scales, which are shared along a dimension."""
    low, high = x.aminmax(dim=shared, keepdim=True)
    peak = torch.maximum(-low, high).float()
    peak = peak.nan_to_num_(nan=0.0).clamp_(max=_LARGEST).masked_fill_(peak < _LEAST, 0.0)
    bits = (peak / MOST).view(torch.int32)
    scale = ((bits + 0x80) & ~0xFF).view(torch.float32)  # 16 of 24 significant bits, to the nearest
    divisor = scale.masked_fill(scale == 0, 1.0)
    return (x / divisor).round_().clamp_(-MOST, MOST).to(torch.int8), scale


def to_rows(parts: Parts, layout: CacheLayout) -> Tensor:
    """Pages as rows of a file, `[n, page_rows, *row_shape]`: a row a token, and packed pages' key scales behind them.

    A token's row of packed pages is its keys, its values and its values' scales; see `CacheLayout.row_bytes`.
    """
    if not layout.packed:
        return torch.stack(parts, dim=1).permute(0, 3, 1, 2, 4)  # [n, 2, P, L, D] -> [n, L, 2, P, D]
    k, k_scale, v, v_scale = (x.cpu() for x in parts)
    n, size = len(k), layout.chunk_size
    rows = torch.zeros(n, layout.page_rows, layout.row_bytes, dtype=torch.uint8)
    numbers, scales = rows[:, :size, : layout.scale_at], rows[:, :size, layout.scale_at : layout.scale_stop]
    for half, x in zip(numbers.view(torch.int8).chunk(2, dim=-1), (k, v), strict=True):
        half.unflatten(-1, (layout.page_heads, -1)).copy_(x.transpose(1, 2))
    scales.copy_(_bytes(v_scale.squeeze(-1).transpose(1, 2)).view(scales.shape))
    key_scales = _bytes(k_scale).view(n, layout.page_heads * layout.head_dim * torch.float32.itemsize)
    rows.view(n, -1)[:, size * layout.row_bytes :][:, : key_scales.shape[1]].copy_(key_scales)
    return rows


def _bytes(x: Tensor) -> Tensor:
    """The bytes of all numbers, in order."""
    return x.reshape(-1).view(torch.uint8)


def from_rows(rows: Tensor, layout: CacheLayout, name: str) -> Parts:
    """The pages that were written as rows `[n, page_rows, *row_shape]`; views, but for scales.

    Raises `DataError` for scales that no number has: those of the file `name` were altered.
    """
    if not layout.packed:
        k, v = (x.transpose(1, 2) for x in rows.unbind(dim=2))
        return k, v
    size = layout.chunk_size
    k, v, v_scale = _token_parts(rows[:, :size], layout, name)
    key_scales = key_scales_of(rows[:, size:], layout, name)
    return k.transpose(1, 2), key_scales[:, :, None], v.transpose(1, 2), v_scale.transpose(1, 2)[..., None]


def tokens_of_rows(rows: Tensor, key_scales: Tensor, layout: CacheLayout, name: str) -> Tensor:
    """Single tokens of packed pages, rows `[n, row_bytes]` with key scales `[n, P, D]`, as `[n, 2, P, D]`."""
    k, v, v_scale = _token_parts(rows, layout, name)
    return torch.stack((k * key_scales, v * v_scale[..., None]), dim=1).to(layout.dtype)


def key_scales_of(rows: Tensor, layout: CacheLayout, name: str) -> Tensor:
    """The key scales `[n, P, D]` in the last rows `[n, SCALE_ROWS, row_bytes]` of packed pages."""
    n_bytes = layout.page_heads * layout.head_dim * torch.float32.itemsize
    assert rows.shape[1] == SCALE_ROWS, "the last rows of pages"
    scales = rows.flatten(1)[:, :n_bytes].contiguous().view(torch.float32)
    return _checked(scales.view(-1, layout.page_heads, layout.head_dim), layout.dtype, name)


def _token_parts(rows: Tensor, layout: CacheLayout, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values `[…, P, D]` int8 and value scales `[…, P]` of rows `[…, row_bytes]`."""
    numbers = rows[..., : layout.scale_at].view(torch.int8).unflatten(-1, (2, layout.page_heads, layout.head_dim))
    scales = rows[..., layout.scale_at : layout.scale_stop].contiguous().view(torch.float32)
    return numbers.select(-3, 0), numbers.select(-3, 1), _checked(scales, layout.dtype, name)


def _checked(scales: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """These scales. Raises `DataError` for negative ones, and where a number of 8 bits would become none of `dtype`."""
    if not bool(((scales >= 0) & (scales * MOST).to(dtype).isfinite()).all()):
        raise DataError(f"{name} was altered since it was written; prefill the text again")
    return scales
