"""Gathers rows with all threads."""

from __future__ import annotations

import torch
from numba import carray, int64, uint64
from torch import Tensor

from lce.kernels.cpu.compiling import kernel
from lce.kernels.cpu.numbers import pointer
from lce.kernels.cuda import launching

_WORD = 8  # bytes that are copied at once
_ROWS = 64  # rows that a thread takes at a time


def take_rows(tensors: tuple[Tensor, Tensor], index: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Copy the rows `index [n]` (int64, in range) of two tensors `[G, N, D]` alike: `[G, n, D]`.

    On CPUs by all threads, on GPUs in one launch; elsewhere, and for rows of odd sizes, by `index_select`. Bytes: O(n).
    `into`, flat and with space for both copies, may be overwritten by them on a CPU: memory that a layer used before is
    in the processor's caches.
    """
    one, two = tensors
    n_groups, _, dim = one.shape
    if launching.runs_on(one) and one.stride(2) == 1 and two.stride() == one.stride():
        from lce.kernels.cuda import elementwise

        return elementwise.take_rows(one, two, index)
    words, odd = divmod(dim * one.element_size(), _WORD)
    strides = one.stride()
    if odd or one.device.type != "cpu" or strides[1:] != (dim, 1) or two.stride() != strides:
        return one.index_select(1, index), two.index_select(1, index)
    assert two.shape == one.shape, two.shape
    assert index.dtype == torch.int64, index.dtype
    index = index.contiguous()
    shape = (2, n_groups, len(index), dim)
    if into is None or into.numel() < 2 * n_groups * len(index) * dim:
        taken = one.new_empty(shape)
    else:
        assert into.dtype == one.dtype, into.dtype
        assert into.is_contiguous(), into.stride()
        taken = into[: 2 * n_groups * len(index) * dim].view(shape)
    addresses = one.data_ptr(), two.data_ptr(), index.data_ptr(), taken.data_ptr()
    stride, n = strides[0] * one.element_size(), len(index)
    _take_rows(2 * n_groups * -(-n // _ROWS), *addresses, n_groups, n, words, stride)
    return taken[0], taken[1]


@kernel
def _take_rows(begin, end, one_at, two_at, index_at, taken_at, n_groups, n, words, stride):
    index = carray(pointer(index_at, int64), (n,))
    n_pieces = (n + _ROWS - 1) // _ROWS
    for task in range(begin, end):
        which, piece = task // n_pieces, task % n_pieces
        source = (one_at if which < n_groups else two_at) + which % n_groups * stride
        for i in range(piece * _ROWS, min(n, piece * _ROWS + _ROWS)):
            row = carray(pointer(source + index[i] * words * _WORD, uint64), (words,))
            out = carray(pointer(taken_at + (which * n + i) * words * _WORD, uint64), (words,))
            for w in range(words):
                out[w] = row[w]
