"""Weight matrices of 8-bit or 4-bit codes, as `lce.kernels.product.quantised_body` stores and multiplies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.kernels.product.products import around_product
from lce.kernels.runtime.kernel import Kernels
from lce.kernels.runtime.shared import (
    BEGUN_BYTES,
    FEW_INPUTS,
    FEW_ROWS,
    LANES,
    MIXED,
    MOST_ROWS,
    QUANTISED_TASK,
    SUPER,
    Layout,
)

_TASK_ROWS = QUANTISED_TASK * LANES  # rows of a matrix that a thread takes at a time
_BYTES = 0x0101_0101_0101_0101  # 1 in each byte
_EDGE = 4 * LANES * 32  # bytes of the memory of kernels that unpack

_product, _unpack, _sums = (Kernels(f"quantised.{name}") for name in ("product", "unpack", "sums"))
_rows_of, _pack = Kernels("quantised.rows_of"), Kernels("quantised.pack")


def parts_of(layout: Layout, n_out: int, n_in: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each stored tensor of a matrix `[n_out, n_in]`."""
    return {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in layout.parts(n_out, n_in).items()}


class QuantisedMatrix:
    """A quantised matrix `[out, in]`; the tensors in `parts` are those that its layout names."""

    def __init__(self, layout: Layout, shape: tuple[int, ...], stored: Mapping[str, Tensor]) -> None:
        self.layout = layout
        self.shape = shape[0], shape[1]
        self.parts = stored
        for name, expected in parts_of(layout, *self.shape).items():
            assert (stored[name].shape, stored[name].dtype) == expected, (name, stored[name].shape, expected)
            assert stored[name].is_contiguous(), name
        assert not layout.nested or self.shape[1] % SUPER == 0, self.shape
        at = {name: stored[name].data_ptr() for name in stored}
        self._addresses = at["codes"], at["scales"], at.get(layout.low, 0), at.get("supers", 0)

    def pack(self, weight: Tensor) -> None:
        """Quantise `weight [out, in]`, contiguous, into the tensors of this matrix; only for `INT8` and `INT4`.

        With 4 bits, the scale and zero of each group are fitted to its weights by least squares. Time per weight on one
        thread: about 0.3 ns with 8 bits, 4 ns with 4 bits.
        """
        assert weight.shape == self.shape, weight.shape
        assert weight.is_contiguous()
        n_blocks = -(-self.shape[0] // LANES)
        _pack[self.layout, weight.dtype](
            n_blocks, weight.data_ptr(), *self._addresses[:3], *self.shape, memory=8 * self.layout.group
        )

    def product(self, x: Tensor, bias: Tensor | None = None, **around: Any) -> Tensor:
        """Multiply `x [T, in]` with the matrix transposed; options are those of `products.product`.

        With `gate`, each half of the matrix's rows must be whole blocks. x is rounded to 16 bits, or to 32 bits if the
        dtype of `norm`, or of x without a norm, is float32. Products within a group are then added exactly, and groups
        are added in float32. A row of the result has the same bits for any T and number of threads; it is NaN if its
        row of x is not finite. Bytes moved: the packed weights once.
        """
        dtype, out, n_out, given = around_product(x, *self.shape, bias, **around)
        assert not around.get("gate") or n_out % LANES == 0, self.shape
        padded = -(-self.shape[1] // self.layout.group) * self.layout.group
        memory = BEGUN_BYTES + MOST_ROWS * (4 * padded + 8 * padded // self.layout.group + 8 * LANES) + 4 * padded
        kernel = _product[self.layout, dtype]
        kernel(-(-n_out // _TASK_ROWS), x.data_ptr(), *self._addresses, *given, memory=memory)
        return out

    def unpacked(self, first: int, out: Tensor) -> Tensor:
        """Unpack rows, from row `first` (a multiple of 16) on, into `out [rows, in]`, of any dtype; return `out`."""
        n_rows, n_in = out.shape
        fits = first % LANES == 0 and first + n_rows <= -(-self.shape[0] // LANES) * LANES and n_in == self.shape[1]
        assert fits, (first, out.shape, self.shape)
        assert out.is_contiguous()
        _unpack[self.layout, out.dtype](
            -(-n_rows // LANES), *self._addresses, out.data_ptr(), first, n_rows, n_in, memory=_EDGE
        )
        return out

    def sums(self, x: Tensor, out: Tensor) -> None:
        """Write `x @ weight.T`, `[T, -]` with padding to `FEW_ROWS` behind a row, for T ≤ `MOST_ROWS`, to `out`.

        The bits are those of `panels.product` with unpacked weights, before anything is added.
        """
        addresses, memory = (x.data_ptr(), *self._addresses, out.data_ptr()), 4 * FEW_INPUTS * FEW_ROWS
        _sums[self.layout, x.dtype](-(-self.shape[0] // FEW_ROWS), *addresses, len(x), *self.shape, memory=memory)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the unpacked rows `ids [T]` (int64): `[T, in]`."""
        assert ids.dtype == torch.int64, ids.dtype
        assert ids.is_contiguous()
        assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < self.shape[0]), self.shape
        out = torch.empty(len(ids), self.shape[1], dtype=dtype)
        addresses = ids.data_ptr(), *self._addresses, out.data_ptr()
        _rows_of[self.layout, dtype](len(ids), *addresses, self.shape[1], least=LANES, memory=_EDGE)
        return out


def arrange(layout: Layout, codes: NDArray[np.int8], out: Tensor) -> None:
    """Write codes `[rows, in]` to the blocks `out`, a part of a matrix's `codes` that is all zeros.

    Codes of fewer than 8 bits are from `-offset` on. Time per weight: about 0.3 ns, with 5 or 6 bits 1.3 ns. A kernel
    would not be faster, and takes time and memory to load.
    """
    n_rows, n_in = codes.shape
    assert out.shape == parts_of(layout, n_rows, n_in)["codes"][0], (out.shape, codes.shape)
    if layout.bits == 8:
        words = codes.view(np.uint32)
        middle = words & 0x00FF_FF00  # bytes 1 and 2 of a word, which change places
        put(words ^ middle | middle << 8 & 0x00FF_0000 | middle >> 8 & 0xFF00, out.view(torch.uint32))
    else:
        mask = np.uint64(((1 << layout.bits) - 1) * _BYTES)
        eight = codes.view(np.uint64) & mask
        if layout.offset:
            eight += np.uint64(layout.offset * _BYTES)
            eight &= mask
        high = eight >> np.uint64(4) & np.uint64(3 * _BYTES)
        eight &= np.uint64(15 * _BYTES)
        eight |= eight >> np.uint64(12)  # bytes 0, 1, 4, 5 have inputs 0 and 2, 1 and 3, 4 and 6, 5 and 7
        odd = eight & np.uint64(0xFF00_0000_FF00)
        eight &= np.uint64(0x00FF_0000_00FF)
        eight |= odd << np.uint64(8)
        eight |= eight >> np.uint64(24)
        words = eight.astype(np.uint32)
        if layout.bits in MIXED:
            pieces = words.reshape(n_rows, -1, 4 // (layout.bits - 4)), _above(high, layout.bits - 4)[:, :, None]
            words = np.concatenate(pieces, axis=2).reshape(n_rows, -1)
        put(words, out.view(torch.uint32))


def _above(high: NDArray[np.uint64], bits: int) -> NDArray[np.uint32]:
    """Return words `[rows, in / 32 · bits]` of codes of 1 or 2 bits, eight bytes `[rows, in / 8]` each.

    A product moves those of bytes 0, 2, 4, 6 to bits 4, 8, 12, 0 of its highest halfword; no others fall there.
    """
    moves = np.uint64(1 << 52 | 1 << 40 | 1 << 28 | 1)
    even, odd = ((high >> np.uint64(move) & np.uint64(0x00FF_00FF_00FF_00FF)) * moves for move in (0, 8))
    even >>= np.uint64(48)
    odd >>= np.uint64(32)
    odd &= np.uint64(0xFFFF_0000)
    even |= odd
    found = even[:, :: 4 // bits].astype(np.uint32)
    for j in range(1, 4 // bits):
        found |= even[:, j :: 4 // bits].astype(np.uint32) << np.uint32(bits * j)
    return found


def put(numbers: NDArray[Any], part: Tensor) -> None:
    """Write numbers `[rows, n]` to a part of a matrix, `[blocks, n, 16]`, that is all zeros."""
    out, whole = part.numpy(), len(numbers) // LANES
    out[:whole] = numbers[: whole * LANES].reshape(whole, LANES, -1).swapaxes(1, 2)
    if rest := len(numbers) % LANES:
        out[whole, :, :rest] = numbers[-rest:].T
