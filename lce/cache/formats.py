"""The formats of keys and values below the device: as the model computes them, or in 8 bits.

A format is one class, and its name in `FORMATS`. The class rounds, packs and unpacks pages, lays them out as rows of a
file, and counts their bytes. No other code knows the parts of a stored page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lce.errors import DataError, UsageError, shown

Parts = tuple[Tensor, ...]  # n pages: `k v [n, P, L, D]`, or a format's stored tensors `[n, …]`
Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]  # of the parts of one page
FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class KVFormat:
    """How a page of `heads` KV heads P, `size` tokens L and head dimension D is stored. The model computes in `dtype`.

    A page is a tuple of parts in memory, and `page_rows` rows in a file: one row a token, and `extra_rows` behind them.
    This format stores pages as the model computes them, `k v [n, P, L, D]`; a row has the keys and values of a token,
    `[2, P, D]`. Other formats derive from it.
    """

    heads: int
    size: int
    head_dim: int
    dtype: torch.dtype

    rounds: ClassVar[bool] = False  # whether old chunks are rounded to numbers that the format can store
    extra_rows: ClassVar[int] = 0

    @property
    def name(self) -> str:
        """The name of the dtype of stored numbers."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def shapes(self) -> Shapes:
        """The shape and dtype of each part of a page."""
        return [((self.heads, self.size, self.head_dim), self.dtype)] * 2

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row in a file."""
        return (2, self.heads, self.head_dim)

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of a row in a file."""
        return self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a file."""
        return torch.Size(self.row_shape).numel() * self.row_dtype.itemsize

    @property
    def page_rows(self) -> int:
        """Rows of a page in a file."""
        return self.size + self.extra_rows

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, in memory (at most) and in a file."""
        return self.page_rows * self.row_bytes

    def round(self, k: Tensor, v: Tensor) -> None:
        """Round whole chunks `k v [G, m · L, D]` in place to numbers that the format stores exactly.

        May be repeated: after an interruption some chunks are rounded, and the next call gives the same result.
        """

    def pack(self, k: Tensor, v: Tensor) -> Parts:
        """Pack pages `k v [n, P, L, D]` for storage. Time: O(n · P · L · D)."""
        return k, v

    def unpack(self, parts: Parts) -> Parts:
        """Return stored pages as `k v [n, P, L, D]` in the model's dtype."""
        return parts

    def tokens(self, parts: Parts, page: Tensor, offset: Tensor) -> Tensor:
        """Return single tokens of stored pages, `[n, 2, P, D]`: at `offset [n]` of `page [n]`."""
        return torch.stack([x[page, :, offset] for x in parts], dim=1)

    def to_rows(self, parts: Parts) -> Tensor:
        """Return stored pages as rows of a file, `[n, page_rows, *row_shape]`."""
        return torch.stack(parts, dim=1).permute(0, 3, 1, 2, 4)  # [n, 2, P, L, D] -> [n, L, 2, P, D]

    def span_to_rows(self, k: Tensor, v: Tensor) -> Tensor:
        """Return tokens `k v [G, n, D]` as rows of a file, `[G / P, rows, *row_shape]`; if rounded, whole chunks."""
        return self.to_rows(tuple(x.unflatten(0, (-1, self.heads)) for x in (k, v)))

    def from_rows(self, rows: Tensor, name: str) -> Parts:
        """Return the pages of rows `[n, page_rows, *row_shape]`. Raises `DataError` for impossible rows of `name`."""
        k, v = (x.transpose(1, 2) for x in rows.unbind(dim=2))
        return k, v

    def tokens_of_rows(self, rows: Tensor, extra: Tensor, name: str) -> Tensor:
        """Return single tokens, `[n, 2, P, D]`, of their rows and their pages' extra rows; otherwise as `from_rows`."""
        return rows


@dataclass(frozen=True)
class Int8(KVFormat):
    """Pages in 8 bits: keys rounded by channel of a chunk, values by token, each KV head for itself.

    A number x becomes `round(x / scale)`, with the scale `peak / 127`, where `peak` is the largest magnitude of the
    channel or the token. The parts are keys int8 `[n, P, L, D]` with scales `[n, P, 1, D]`, and values int8 with scales
    `[n, P, L, 1]`; scales are float32. A token's row in a file has its keys, its values and its values' scales, filled
    up to whole words of 8 bytes for the row's check. Two rows behind the tokens have the scales of the page's keys.

    Rounding changes numbers once: rounded numbers, in the model's dtype, are rounded to themselves. So a page may be
    packed and unpacked any number of times, and tiers never change what is attended. For that a scale has 16
    significant bits: its products with -127..127 are exact in float32, and `peak` stays what it was.
    """

    rounds: ClassVar[bool] = True
    extra_rows: ClassVar[int] = 2
    most: ClassVar[int] = 127  # the largest magnitude of a stored number
    least_peak: ClassVar[float] = 2.0**-100  # smaller peaks are taken as zero
    largest_peak: ClassVar[float] = 2.0**127  # larger ones as this
    by_channel: ClassVar[int] = -2  # the dimension that shares a scale: the tokens of a chunk
    by_token: ClassVar[int] = -1  # the channels of a token

    @property
    def name(self) -> str:
        return "int8"

    @property
    def shapes(self) -> Shapes:
        numbers = (self.heads, self.size, self.head_dim), torch.int8
        by_channel, by_token = (self.heads, 1, self.head_dim), (self.heads, self.size, 1)
        return [numbers, (by_channel, torch.float32), numbers, (by_token, torch.float32)]

    @property
    def _numbers(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.heads * self.head_dim

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (-(-(self._numbers + self.heads * FLOAT) // 8) * 8,)

    @property
    def row_dtype(self) -> torch.dtype:
        return torch.uint8

    @torch.inference_mode()  # the buffer may have been made in it
    def round(self, k: Tensor, v: Tensor) -> None:
        for x, shared in ((k, self.by_channel), (v, self.by_token)):
            chunks = x.unflatten(1, (-1, self.size))
            numbers, scale = self._quantised(chunks, shared)
            chunks.copy_(numbers * scale)

    def pack(self, k: Tensor, v: Tensor) -> Parts:
        return (*self._quantised(k, self.by_channel), *self._quantised(v, self.by_token))

    def _quantised(self, x: Tensor, shared: int) -> Parts:
        """Return `x` in 8 bits, and its scales, one along the dimension `shared`."""
        low, high = x.aminmax(dim=shared, keepdim=True)
        peak = torch.maximum(-low, high).float()
        peak = peak.nan_to_num_(nan=0.0).clamp_(max=self.largest_peak).masked_fill_(peak < self.least_peak, 0.0)
        bits = (peak / self.most).view(torch.int32)
        scale = ((bits + 0x80) & ~0xFF).view(torch.float32)  # 16 of 24 significant bits, to the nearest
        divisor = scale.masked_fill(scale == 0, 1.0)
        return (x / divisor).round_().clamp_(-self.most, self.most).to(torch.int8), scale

    def unpack(self, parts: Parts) -> Parts:
        k, k_scale, v, v_scale = parts
        return (k * k_scale).to(self.dtype), (v * v_scale).to(self.dtype)

    def tokens(self, parts: Parts, page: Tensor, offset: Tensor) -> Tensor:
        k, k_scale, v, v_scale = parts
        rows = k[page, :, offset] * k_scale[page, :, 0], v[page, :, offset] * v_scale[page, :, offset]
        return torch.stack(rows, dim=1).to(self.dtype)

    def to_rows(self, parts: Parts) -> Tensor:
        k, k_scale, v, v_scale = (x.cpu() for x in parts)
        n, size = len(k), self.size
        rows = torch.zeros(n, self.page_rows, self.row_bytes, dtype=torch.uint8)
        numbers, scales = rows[:, :size, : self._numbers], rows[:, :size, self._numbers :][..., : self.heads * FLOAT]
        for half, x in zip(numbers.view(torch.int8).chunk(2, dim=-1), (k, v), strict=True):
            half.unflatten(-1, (self.heads, -1)).copy_(x.transpose(1, 2))
        scales.copy_(v_scale.squeeze(-1).transpose(1, 2).reshape(-1).view(torch.uint8).view(scales.shape))
        key_scales = k_scale.reshape(-1).view(torch.uint8).view(n, self.heads * self.head_dim * FLOAT)
        rows.view(n, -1)[:, size * self.row_bytes :][:, : key_scales.shape[1]].copy_(key_scales)
        return rows

    def span_to_rows(self, k: Tensor, v: Tensor) -> Tensor:
        # [G, m·L, D] -> [groups, P, m, L, D] -> [groups, m, P, L, D]
        k, v = (x.unflatten(1, (-1, self.size)).unflatten(0, (-1, self.heads)).transpose(1, 2) for x in (k, v))
        rows = self.to_rows(self.pack(k.flatten(0, 1), v.flatten(0, 1)))
        found: Tensor = rows.unflatten(0, k.shape[:2]).flatten(1, 2)
        return found

    def from_rows(self, rows: Tensor, name: str) -> Parts:
        k, v, v_scale = self._of_tokens(rows[:, : self.size], name)
        k_scale = self._of_keys(rows[:, self.size :], name)
        return k.transpose(1, 2), k_scale[:, :, None], v.transpose(1, 2), v_scale.transpose(1, 2)[..., None]

    def tokens_of_rows(self, rows: Tensor, extra: Tensor, name: str) -> Tensor:
        k, v, v_scale = self._of_tokens(rows, name)
        return torch.stack((k * self._of_keys(extra, name), v * v_scale[..., None]), dim=1).to(self.dtype)

    def _of_tokens(self, rows: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values `[…, P, D]` int8 and value scales `[…, P]` of tokens' rows `[…, row_bytes]`."""
        numbers = rows[..., : self._numbers].view(torch.int8).unflatten(-1, (2, self.heads, self.head_dim))
        scales = rows[..., self._numbers :][..., : self.heads * FLOAT].contiguous().view(torch.float32)
        return numbers.select(-3, 0), numbers.select(-3, 1), self._checked(scales, name)

    def _of_keys(self, extra: Tensor, name: str) -> Tensor:
        """Return the key scales `[n, P, D]` in pages' extra rows."""
        scales = extra.flatten(1)[:, : self.heads * self.head_dim * FLOAT].contiguous().view(torch.float32)
        return self._checked(scales.view(-1, self.heads, self.head_dim), name)

    def _checked(self, scales: Tensor, name: str) -> Tensor:
        """Return `scales`. Raise `DataError` if one is negative, or makes a stored number infinite in `dtype`."""
        if not bool(((scales >= 0) & (scales * self.most).to(self.dtype).isfinite()).all()):
            raise DataError(f"{name} was altered since it was written; prefill the text again")
        return scales


FORMATS: dict[str, type[KVFormat]] = {"auto": KVFormat, "int8": Int8}  # by the user's `kv_dtype`


def kv_dtype_of(option: object) -> str:
    """Return the name of the format that a user gives by name or dtype; None: "auto". Raises `UsageError`."""
    name = "auto" if option is None else str(option).removeprefix("torch.")
    if name not in FORMATS or not isinstance(option, str | torch.dtype | None):
        raise UsageError(f"unknown kv_dtype {shown(option)}; expected {' or '.join(FORMATS)}")
    return name


def converted(parts: Parts, have: KVFormat, want: KVFormat) -> Parts:
    """Return pages that are stored in one format as another one stores them; the same parts if it is the same one."""
    return parts if type(have) is type(want) else want.pack(*have.unpack(parts))
