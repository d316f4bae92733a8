"""Storage formats of keys and values: in the model's dtype, or in 8 bits, below the device or on the device, too.

A format is one class, listed by name in `FORMATS`. The class quantises and packs pages and counts their bytes. No other
code knows what is in a packed page.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lce.attention import row_scales
from lce.errors import DataError

# The tensors of n pages: `(k, v)` on the device, both `[n, P, L, stored_dim]`; elsewhere one tensor of packed pages.
Parts = tuple[Tensor, ...]
FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class KVFormat:
    """The format "auto", which does not quantise, and the base class of the other formats.

    A page has the keys and values of `heads` KV heads (P) and `size` tokens (L). The device has a vector, a token's key
    or value in one KV head, as `stored_dim` elements of `stored_dtype`: D numbers of the model's dtype, unless the
    format is `on_device`. A packed page is a tensor of `page_rows` rows, the same in host memory and in a file: one row
    for each token, then `extra_rows`. In this format a token's row is its keys and values, `[2, P, D]`.
    """

    heads: int
    size: int
    stored_dim: int
    stored_dtype: torch.dtype

    on_device: ClassVar[bool] = False  # whether the device's memory, too, has rows of `lce.attention.int8_rows`
    rounds: ClassVar[bool] = False  # whether the format is lossy; then old chunks are rounded before they are packed
    extra_rows: ClassVar[int] = 0

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of a packed page."""
        return (2, self.heads, self.stored_dim)

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of a packed page."""
        return self.stored_dtype

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of a packed page."""
        return torch.Size(self.row_shape).numel() * self.row_dtype.itemsize

    @property
    def page_rows(self) -> int:
        """The number of rows of a packed page, extra rows included."""
        return self.size + self.extra_rows

    @property
    def page_bytes(self) -> int:
        """The bytes of a packed page."""
        return self.page_rows * self.row_bytes

    def round(self, k: Tensor, v: Tensor) -> None:
        """Round m chunks `k v [G, m · L, D]` in place to numbers that the format packs exactly. May be repeated."""

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Pack m pages of each of n head groups: `k v [n, P, m · L, D]` become `[n, m · page_rows, *row_shape]`.

        If the format is not lossy, the number of tokens need not be a multiple of L. Time: O(n · P · m · L · D).
        """
        return torch.stack((k, v), dim=1).permute(0, 3, 1, 2, 4)  # [n, 2, P, m·L, D] -> [n, m·L, 2, P, D]

    def unpack(self, pages: Tensor) -> Parts:
        """Unpack n pages, `[n, page_rows, *row_shape]`, to `k v [n, P, L, D]` in the model's dtype."""
        k, v = (x.transpose(1, 2) for x in pages.unbind(dim=2))
        return k, v

    def tokens(self, rows: Tensor, extra: Tensor) -> Tensor:
        """Unpack tokens' rows `[n, …, *row_shape]` and their pages' `extra` rows to keys, values `[n, …, 2, P, D]`."""
        return rows

    def check(self, rows: Tensor, extra: Tensor, name: str) -> None:
        """Raise `DataError` if `pack` cannot have made these rows, or their pages' `extra` rows, of the file `name`."""


@dataclass(frozen=True)
class Int8(KVFormat):
    """Pages quantised to 8 bits. In each KV head, keys have one scale per chunk and channel, values one per token.

    A number x becomes `round(x / scale)`, where `scale` is `peak / 127` and `peak` is the largest magnitude of the
    numbers that share the scale. A token's row has the keys and values in int8, `[2, P, D]`, and the scales of the
    values in float32, `[P]`. The row is padded to a multiple of 8 bytes for its checksum. The two extra rows of a page
    have the scales of the keys, `[P, D]` in float32.

    A rounded number, converted back to the model's dtype, is rounded to itself. So a page may be packed and unpacked
    any number of times, and the attended numbers do not depend on the tier. For this purpose scales have only 16
    significant bits: their products with -127..127 are exact in float32, so rounded numbers have the same peak.
    """

    rounds: ClassVar[bool] = True
    extra_rows: ClassVar[int] = 2
    most: ClassVar[int] = 127  # the largest magnitude of a quantised number
    least_peak: ClassVar[float] = 2.0**-100  # a smaller peak (largest magnitude under one scale) counts as zero
    largest_peak: ClassVar[float] = 2.0**127  # a larger peak counts as this one
    by_channel: ClassVar[int] = -2  # for keys: the tokens of a chunk, dimension -2, share a scale
    by_token: ClassVar[int] = -1  # for values: the channels of a token, dimension -1, share a scale

    @property
    def _number_bytes(self) -> int:
        """The bytes that a token's keys and values take in int8, without the scales."""
        return 2 * self.heads * self.stored_dim

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (-(-(self._number_bytes + self.heads * FLOAT) // 8) * 8,)

    @property
    def row_dtype(self) -> torch.dtype:
        return torch.uint8

    @torch.inference_mode()  # `k` and `v` may have been allocated in inference mode
    def round(self, k: Tensor, v: Tensor) -> None:
        for x, shared in ((k, self.by_channel), (v, self.by_token)):
            chunks = x.unflatten(1, (-1, self.size))
            numbers, scale = self._quantised(chunks, shared)
            chunks.copy_(numbers * scale)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        n, m = len(k), k.shape[2] // self.size
        k, v = (x.unflatten(2, (m, self.size)).transpose(1, 2).flatten(0, 1) for x in (k, v))  # [n·m, P, L, D]
        (k, k_scale), (v, v_scale) = self._quantised(k, self.by_channel), self._quantised(v, self.by_token)
        rows = k.new_zeros(n * m, self.page_rows, self.row_bytes, dtype=torch.uint8)
        numbers, rest = rows[:, : self.size].tensor_split([self._number_bytes], dim=-1)
        for half, x in zip(numbers.view(torch.int8).chunk(2, dim=-1), (k, v), strict=True):
            half.unflatten(-1, (self.heads, -1)).copy_(x.transpose(1, 2))
        scales = rest[..., : self.heads * FLOAT]
        scales.copy_(v_scale.transpose(1, 2).flatten().view(torch.uint8).view(scales.shape))
        key_scales = k_scale.flatten().view(torch.uint8).view(n * m, self.heads * self.stored_dim * FLOAT)
        rows.flatten(1)[:, self.size * self.row_bytes :][:, : key_scales.shape[1]] = key_scales
        return rows.view(n, m * self.page_rows, self.row_bytes)

    def _quantised(self, x: Tensor, shared: int) -> Parts:
        """Quantise `x` to int8, with one scale for all numbers along dimension `shared`. Return numbers and scales."""
        low, high = x.aminmax(dim=shared, keepdim=True)
        peak = torch.maximum(-low, high).float()
        peak = peak.nan_to_num_(nan=0.0).clamp_(max=self.largest_peak).masked_fill_(peak < self.least_peak, 0.0)
        bits = (peak / self.most).view(torch.int32)
        scale = ((bits + 0x80) & ~0xFF).view(torch.float32)  # rounds a float's 24 significant bits to 16
        return (x / scale.masked_fill(scale == 0, 1.0)).round_().clamp_(-self.most, self.most).to(torch.int8), scale

    def unpack(self, pages: Tensor) -> Parts:
        k, v = (x.transpose(1, 2) for x in self._numbers(pages[:, : self.size], pages[:, self.size :]))
        return k, v

    def tokens(self, rows: Tensor, extra: Tensor) -> Tensor:
        return torch.stack(self._numbers(rows, extra), dim=-3)

    def _numbers(self, rows: Tensor, extra: Tensor) -> Parts:
        """Dequantise tokens' rows to keys and values, `[n, …, P, D]` each; `extra` are their pages' extra rows."""
        halves = rows[..., : self._number_bytes].view(torch.int8).unflatten(-1, (2, self.heads, self.stored_dim))
        k_scale, v_scale = self._scales(rows, extra)
        k, v = halves.select(-3, 0) * k_scale, halves.select(-3, 1) * v_scale
        return k.to(self.stored_dtype), v.to(self.stored_dtype)

    def _scales(self, rows: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales of tokens' keys, `[n, …, P, D]` from `extra`, and values, `[n, …, P, 1]` from `rows`."""
        k_scale = extra.flatten(1)[:, : self.heads * self.stored_dim * FLOAT].contiguous().view(torch.float32)
        v_scale = rows[..., self._number_bytes :][..., : self.heads * FLOAT].contiguous().view(torch.float32)
        return k_scale.view(len(rows), *[1] * (rows.ndim - 2), self.heads, self.stored_dim), v_scale[..., None]

    def check(self, rows: Tensor, extra: Tensor, name: str) -> None:
        for scale in self._scales(rows, extra):
            if not bool(((scale >= 0) & (scale * self.most).to(self.stored_dtype).isfinite()).all()):
                raise DataError(f"{name} was altered since it was written; prefill the text again")


@dataclass(frozen=True)
class Int8Device(KVFormat):
    """Keys and values in 8 bits as soon as they are written, on the device, too.

    Each vector has a scale of its own, so pages are packed, moved and saved as they are, and nothing is rounded later.
    """

    on_device: ClassVar[bool] = True

    def check(self, rows: Tensor, extra: Tensor, name: str) -> None:
        scales = row_scales(rows)
        if not bool(((scales >= 0) & scales.isfinite()).all()):
            raise DataError(f"{name} was altered since it was written; prefill the text again")


# By the value of the option `kv_dtype`.
FORMATS: dict[str, type[KVFormat]] = {"auto": KVFormat, "int8": Int8, "int8-device": Int8Device}
