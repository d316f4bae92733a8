"""The formats of keys and values in tiers below the device: as the model computes them, or in 8 bits.

A format is one class, and its name in `FORMATS`. The class rounds and packs pages and counts their bytes. No other code
knows what is in a packed page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lce.errors import DataError, UsageError, shown

# Pages: on the device `(k, v)`, both `[n, P, L, D]`; elsewhere one tensor of packed pages.
Parts = tuple[Tensor, ...]
FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class KVFormat:
    """The way to pack pages of `heads` KV heads P, `size` tokens L and head dimension D, computed in `dtype`.

    A packed page is the same in the host's memory and in a file: a tensor of `page_rows` rows, one row for each token
    and `extra_rows` behind them. In this format, from which other formats derive, a row has the keys and values of a
    token, `[2, P, D]`, as the model computes them.
    """

    heads: int
    size: int
    head_dim: int
    dtype: torch.dtype

    rounds: ClassVar[bool] = False  # whether old chunks are rounded to numbers that the format can store
    extra_rows: ClassVar[int] = 0

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return (2, self.heads, self.head_dim)

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of a row."""
        return self.dtype

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return torch.Size(self.row_shape).numel() * self.row_dtype.itemsize

    @property
    def page_rows(self) -> int:
        """The number of rows of a packed page."""
        return self.size + self.extra_rows

    @property
    def page_bytes(self) -> int:
        """The bytes of a packed page."""
        return self.page_rows * self.row_bytes

    def round(self, k: Tensor, v: Tensor) -> None:
        """Round whole chunks `k v [G, m · L, D]` in place to numbers that the format packs exactly.

        May be repeated: rounded numbers do not change, so a call after an interruption gives the same result.
        """

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Pack m pages of each head group, `k v [n, P, m · L, D]`, as `[n, m · page_rows, *row_shape]`.

        If the format does not round, the number of tokens need not be a multiple of L. Time: O(n · P · m · L · D).
        """
        return torch.stack((k, v), dim=1).permute(0, 3, 1, 2, 4)  # [n, 2, P, m·L, D] -> [n, m·L, 2, P, D]

    def unpack(self, pages: Tensor) -> Parts:
        """Return packed pages `[n, page_rows, *row_shape]` as `k v [n, P, L, D]` in the model's dtype."""
        k, v = (x.transpose(1, 2) for x in pages.unbind(dim=2))
        return k, v

    def tokens(self, rows: Tensor, extra: Tensor) -> Tensor:
        """Return keys and values `[n, …, 2, P, D]` of rows `[n, …, *row_shape]` and their pages' extra rows."""
        return rows

    def check(self, rows: Tensor, extra: Tensor, name: str) -> None:
        """Raise `DataError` if rows `[n, …, *row_shape]` or their extra rows, from the file `name`, are impossible."""


@dataclass(frozen=True)
class Int8(KVFormat):
    """Pages in 8 bits. In each KV head, a channel of a chunk's keys has one scale, and so has the value of a token.

    A number x becomes `round(x / scale)`, with the scale `peak / 127`, where `peak` is the largest magnitude of the
    channel or the token. A token's row has the keys and values in int8, `[2, P, D]`, and the scales of the values in
    float32, `[P]`. It is filled up to whole words of 8 bytes, for the row's check. The two extra rows of a page have
    the scales of the keys, `[P, D]`.

    A number that was rounded, and is in the model's dtype again, is rounded to itself. So a page may be packed and
    unpacked any number of times, and tiers never change what is attended. Scales have only 16 significant bits for
    this purpose: their products with -127..127 are exact in float32, so the peak of rounded numbers is the same.
    """

    rounds: ClassVar[bool] = True
    extra_rows: ClassVar[int] = 2
    most: ClassVar[int] = 127  # the largest magnitude of an int8 number
    least_peak: ClassVar[float] = 2.0**-100  # smaller peaks count as zero
    largest_peak: ClassVar[float] = 2.0**127  # larger peaks count as this one
    by_channel: ClassVar[int] = -2  # the dimension of tokens: the tokens of a chunk share a scale of each channel
    by_token: ClassVar[int] = -1  # the dimension of channels: the channels of a token share a scale

    @property
    def _number_bytes(self) -> int:
        """The bytes of a token's keys and values in int8."""
        return 2 * self.heads * self.head_dim

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (-(-(self._number_bytes + self.heads * FLOAT) // 8) * 8,)

    @property
    def row_dtype(self) -> torch.dtype:
        return torch.uint8

    @torch.inference_mode()  # the buffer may have been made in inference mode
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
        key_scales = k_scale.flatten().view(torch.uint8).view(n * m, self.heads * self.head_dim * FLOAT)
        rows.flatten(1)[:, self.size * self.row_bytes :][:, : key_scales.shape[1]] = key_scales
        return rows.view(n, m * self.page_rows, self.row_bytes)

    def _quantised(self, x: Tensor, shared: int) -> Parts:
        """Return `x` in 8 bits, and the scales; numbers along the dimension `shared` have one scale."""
        low, high = x.aminmax(dim=shared, keepdim=True)
        peak = torch.maximum(-low, high).float()
        peak = peak.nan_to_num_(nan=0.0).clamp_(max=self.largest_peak).masked_fill_(peak < self.least_peak, 0.0)
        bits = (peak / self.most).view(torch.int32)
        scale = ((bits + 0x80) & ~0xFF).view(torch.float32)  # rounds 24 significant bits to 16
        divisor = scale.masked_fill(scale == 0, 1.0)
        return (x / divisor).round_().clamp_(-self.most, self.most).to(torch.int8), scale

    def unpack(self, pages: Tensor) -> Parts:
        k, v = (x.transpose(1, 2) for x in self._numbers(pages[:, : self.size], pages[:, self.size :]))
        return k, v

    def tokens(self, rows: Tensor, extra: Tensor) -> Tensor:
        return torch.stack(self._numbers(rows, extra), dim=-3)

    def _numbers(self, rows: Tensor, extra: Tensor) -> Parts:
        """Return the keys and the values, `[n, …, P, D]`, of tokens' rows."""
        halves = rows[..., : self._number_bytes].view(torch.int8).unflatten(-1, (2, self.heads, self.head_dim))
        k_scale, v_scale = self._scales(rows, extra)
        return (halves.select(-3, 0) * k_scale).to(self.dtype), (halves.select(-3, 1) * v_scale).to(self.dtype)

    def _scales(self, rows: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales of the keys, `[n, …, P, D]`, and of the values, `[n, …, P, 1]`, of tokens' rows."""
        k_scale = extra.flatten(1)[:, : self.heads * self.head_dim * FLOAT].contiguous().view(torch.float32)
        v_scale = rows[..., self._number_bytes :][..., : self.heads * FLOAT].contiguous().view(torch.float32)
        shape = len(rows), *[1] * (rows.ndim - 2), self.heads, self.head_dim
        return k_scale.view(shape), v_scale[..., None]

    def check(self, rows: Tensor, extra: Tensor, name: str) -> None:
        for scale in self._scales(rows, extra):
            if not bool(((scale >= 0) & (scale * self.most).to(self.dtype).isfinite()).all()):
                raise DataError(f"{name} was altered since it was written; prefill the text again")


FORMATS: dict[str, type[KVFormat]] = {"auto": KVFormat, "int8": Int8}  # the names are those of the option `kv_dtype`


def kv_dtype_of(option: object) -> str:
    """Return the name of the format that a user gives by name or dtype; None: "auto". Raises `UsageError`."""
    name = "auto" if option is None else str(option).removeprefix("torch.")
    if name not in FORMATS or not isinstance(option, str | torch.dtype | None):
        raise UsageError(f"unknown kv_dtype {shown(option)}; expected {' or '.join(FORMATS)}")
    return name
