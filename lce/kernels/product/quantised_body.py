"""Weight matrices of 8-bit or 4-bit codes: packing, unpacking, and products of a few rows with them.

A matrix `[out, in]` is stored in blocks of 16 rows. A code is a weight as an integer. Codes are stored as vectors of 64
bytes: 16 words, one for each row of a block. A word has the codes of 4 (8 bits) or 8 (4 bits) neighbouring inputs of a
row. With 5 or 6 bits, a word has the lowest four of 8 inputs, and behind 4 or 2 such vectors one has the bits above. A
group is some neighbouring inputs of a row, which share a scale. A `Layout` says how large groups are, and what
stands beside the codes. Rows and inputs are padded with zeros to whole blocks and groups. The stored tensors are:

    codes   [blocks, in / 4, 64]     int8, with 8 bits: bytes 0, 2, 1, 3 of a word are inputs 0, 1, 2, 3
            [blocks, in / 8, 64]     uint8, with 4 bits: nibbles n of a word's halfwords are inputs 2·n, 2·n + 1
            [blocks, bits · in / 32, 64]     uint8: those, and of vector j the bits above nibble n, from bit
                                     4·((n + 1) mod 4) + (bits - 4)·j of a halfword on
    scales  [blocks, groups, 16]     one for each group and row
    zeros   [blocks, groups, 16]     uint8, in sixteenths of a code
    mins    [blocks, groups, 16]     what is added to each weight of a group
    supers  [blocks, in / 256, n, 16]  float16: what scales, and mins if n is 2, are multiplied with

Products multiply integers. Each group of an input row x is scaled so that its largest number uses all of 16 bits, and
is rounded to 16-bit integers, called halfwords. Products of codes and halfwords are added in pairs of inputs, without
error. If x is float32, a second halfword holds the next 16 bits of each number.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32, int8, int16, int64, uint8, uint16, uint32

from lce.kernels.product.codes_body import BLOCKS, dot, row_times_blocks, rows_of_block, sum_factor, words_of_block
from lce.kernels.product.few_rows_body import add_words, in_pairs
from lce.kernels.product.products_body import around_of, begins, finish_row
from lce.kernels.runtime.compiling import ByDtype, by_dtype, inner, kernel, number_of
from lce.kernels.runtime.numbers import STORED, bits_of_float, float_of_bits, pointer, read, read_row, write
from lce.kernels.runtime.shared import (
    BEGUN_BYTES,
    FEW_INPUTS,
    FEW_ROWS,
    INT4,
    INT8,
    ITEMSIZE,
    LANES,
    LAYOUTS,
    MOST_ROWS,
    QUANTISED_TASK,
    SUPER,
)

_FEW = 4  # rows of x that are multiplied with a block at a time; more are multiplied eight at a time, one alone
_PLANES = {"float32": 2, "bfloat16": 1, "float16": 1}  # number of planes: halfwords per number
_SHRINKS = 4  # ranges of weights that 4-bit quantisation tries for each group
_SHRINK = np.float32(0.06)  # each range tried is narrower than the last by this part of the group's whole range
_FITS = 2  # least-squares corrections of a group's scale and zero for each range tried

KINDS = tuple((layout, dtype) for layout in LAYOUTS for dtype in ITEMSIZE)  # the kinds of this module's kernels
PACK_KINDS = tuple((layout, dtype) for layout in (INT8, INT4) for dtype in ITEMSIZE)  # those of `pack`
SUMS_KINDS = tuple((layout, dtype) for layout in LAYOUTS for dtype in ("float32", "bfloat16"))  # those of `sums`

# Values and functions for each kind of kernel, `(layout, dtype)`: a matrix's layout, and the dtype of x or the output.
_bits = ByDtype(lambda kind: kind[0].bits)
_size = ByDtype(lambda kind: kind[0].group)
_scale_bytes = ByDtype(lambda kind: 1 if kind[0].nested else 2)
_low_bytes = ByDtype(lambda kind: 2 if kind[0].low == "mins" and not kind[0].nested else 1)
_super_bytes = ByDtype(lambda kind: (4 if kind[0].low else 2) * LANES if kind[0].nested else 0)  # for 256 inputs
_sum_factor = ByDtype(lambda kind: sum_factor(kind[0]))
_planes = ByDtype(lambda kind: _PLANES[kind[1]])
_stored = ByDtype(lambda kind: STORED[kind[1]])
_read = ByDtype(lambda kind: read[kind[1]])
_read_row = ByDtype(lambda kind: read_row[kind[1]])
_finish_row = ByDtype(lambda kind: finish_row[kind[1]])
_dot = ByDtype(lambda kind: dot(kind[0], (1, _FEW, MOST_ROWS), _PLANES[kind[1]]))
_unpacked = ByDtype(lambda kind: rows_of_block(*kind))
_unpacked_words = ByDtype(lambda kind: words_of_block(*kind))
_row_times_blocks = ByDtype(lambda kind: row_times_blocks(kind[0]))
_itemsize = ByDtype(lambda kind: ITEMSIZE[kind[1]])
_read_scale, _write_scale = read["bfloat16"], write["bfloat16"]


@by_dtype(kernel)
def product(
    begin, end, memory, x_at, codes, scales, lows, supers, bias_at, norm_at, out_at, out_row, n, n_out, n_in, flags, eps
):
    gate, adds, wide_x, wide_out = around_of(flags)
    n_parts = 2 if gate else 1
    n_groups, n_blocks = (n_in + _size - 1) // _size, (n_out + LANES - 1) // LANES
    rows = 1 if n == 1 else _FEW if n <= _FEW else MOST_ROWS
    n_tiles = (n + rows - 1) // rows
    tile_size = rows * n_groups  # groups in a tile; a tile is `rows` rows of x, multiplied with a block together.
    # Each thread has its own memory for x as integers, for factors, for one row of x as float32, and for dot products.
    integers_at = memory + BEGUN_BYTES
    factors_at = integers_at + 2 * _planes * n_tiles * tile_size * _size
    wide_at = factors_at + 8 * n_tiles * tile_size
    dots_at = wide_at + 4 * n_groups * _size
    dots = carray(pointer(dots_at, float32), (2, n_tiles * rows, LANES))
    if begins(memory):
        _as_integers(x_at, wide_x, norm_at, number_of(eps), integers_at, factors_at, wide_at, rows, n_tiles, n, n_in)
    for first in range(begin * QUANTISED_TASK, min(n_blocks, end * QUANTISED_TASK)):
        for part in range(n_parts):
            of_block = _block_of(codes, scales, lows, supers, part * n_blocks + first, n_in)
            for tile in range(n_tiles):
                numbers_at = integers_at + 2 * _planes * tile * tile_size * _size
                of_tile, to = factors_at + 8 * tile * tile_size, dots[part, tile * rows].ctypes.data
                _dot(rows, numbers_at, of_tile, *of_block, n_groups, to)
        row = first * LANES
        n_here = min(LANES, n_out - row)
        for part in range(n_parts if bias_at else 0):
            bias = carray(pointer(bias_at + (part * n_out + row) * _itemsize, _stored), (LANES,))
            for i in range(n):
                for lane in range(n_here):
                    dots[part, i, lane] += _read(bias[lane])
        for i in range(n):
            _finish_row(out_at, i * out_row + row, n_here, gate, adds, wide_out, dots[0, i], dots[1, i])


@by_dtype(inner)
def _as_integers(x_at, wide_x, norm_at, eps, integers_at, factors_at, wide_at, rows, n_tiles, n, n_in):
    """Round `x [n, n_in]`, after RMSNorm if `norm_at` is not 0, to the integers and the factors that `_dot` takes.

    Rows and inputs are padded with zeros. In each group of inputs, the integer 1 stands for a power of two, so a
    bfloat16 number is exact if it is at least 1/128 of the group's largest number.
    """
    n_groups = (n_in + _size - 1) // _size
    padded = n_groups * _size
    norm = carray(pointer(norm_at, _stored), (n_in,))
    integers = carray(pointer(integers_at, int16), (n_tiles, _planes, rows, padded))
    factors = carray(pointer(factors_at, float32), (n_tiles, 2, rows, n_groups))
    wide = carray(pointer(wide_at, float32), (padded,))
    for i in range(n_tiles * rows):
        tile, row = i // rows, i % rows
        used = n_in if i < n else 0
        _read_row(x_at, i * n_in, used, wide_x, wide)
        for j in range(used, padded):
            wide[j] = np.float32(0)
        if norm_at and i < n:
            total = np.float32(0)
            for j in range(n_in):
                total += wide[j] * wide[j]
            scale = np.float32(1) / np.sqrt(total / np.float32(n_in) + eps)
            for j in range(n_in):
                wide[j] *= scale * _read(norm[j])
        for g in range(padded // _size):
            largest = uint32(0)
            for j in range(g * _size, g * _size + _size):
                largest = max(largest, bits_of_float(wide[j]) & uint32(0x7FFF_FFFF))
            exponent = largest >> uint32(23)
            finite = exponent < uint32(255)
            exponent = min(max(exponent, uint32(15)), uint32(254))
            up = float_of_bits((uint32(268) - exponent) << uint32(23)) if finite else np.float32(0)
            total = np.float32(0)
            for j in range(g * _size, g * _size + _size):
                number = wide[j] * up if finite else np.float32(0)
                high = min(np.floor(number + np.float32(0.5)), np.float32(32767))
                integers[tile, 0, row, j] = int16(high)
                total += high
                if _planes == 2:
                    low = np.floor((number - high) * np.float32(32768) + np.float32(0.5))
                    integers[tile, 1, row, j] = int16(low)
                    total += low * np.float32(1 / 32768)
            down = float_of_bits((exponent - uint32(14)) << uint32(23))
            if not largest:  # products with a scale below the normal numbers take a hundred times as long
                down = np.float32(0)
            factors[tile, 0, row, g] = down if finite else np.float32(np.nan)
            factors[tile, 1, row, g] = total * _sum_factor


@by_dtype(inner)
def _block_of(codes, scales, lows, supers, block, n_in):
    """Return the addresses of a block's codes, scales, zeros or mins, and supers."""
    group = block * ((n_in + _size - 1) // _size) * LANES
    of_groups = codes + group * _size * _bits // 8, scales + _scale_bytes * group, lows + _low_bytes * group
    return *of_groups, supers + block * (n_in // SUPER) * _super_bytes


@by_dtype(kernel)
def unpack(begin, end, memory, codes, scales, lows, supers, out_at, first, n_rows, n_in):
    """Write rows `first..` of a matrix to `out [n_rows, n_in]`. A task is a block of 16 rows."""
    out, edge = carray(pointer(out_at, _stored), (n_rows, n_in)), carray(pointer(memory, _stored), (LANES, 32))
    for task in range(begin, end):
        of_block = _block_of(codes, scales, lows, supers, first // LANES + task, n_in)
        height = min(LANES, n_rows - task * LANES)
        n_whole = n_in // 32 if height == LANES else 0
        for n in range(n_whole):
            at = out_at + (task * LANES * n_in + n * 32) * _itemsize
            _unpacked(*of_block, n, at, n_in * _itemsize)
        for n in range(n_whole, (n_in + 32 - 1) // 32):
            _unpacked(*of_block, n, edge.ctypes.data, 32 * _itemsize)
            for i in range(height):
                for j in range(min(32, n_in - n * 32)):
                    out[task * LANES + i, n * 32 + j] = edge[i, j]


@by_dtype(kernel)
def sums(begin, end, memory, x_at, codes, scales, lows, supers, sums_at, n, n_out, n_in):
    """Do what `few_rows.plain` does, for a few rows of x of the kind's dtype, with the weights that `unpack` writes."""
    n_blocks = (n_out + LANES - 1) // LANES
    sums_row, word_bytes = (n_out + FEW_ROWS - 1) // FEW_ROWS * FEW_ROWS, 4 * FEW_ROWS
    per_word = 2 if in_pairs else 1
    results = carray(pointer(sums_at, float32), (n, sums_row))
    if n == 1 and per_word == 1 and n_in % 32 == 0:
        last = min(n_blocks, end * FEW_ROWS // LANES) - 1
        for first in range(begin * FEW_ROWS // LANES, last + 1, BLOCKS):
            a, b, c, d = first, min(first + 1, last), min(first + 2, last), min(first + 3, last)
            _row_times_blocks(
                x_at,
                n_in // 32,
                *_block_of(codes, scales, lows, supers, a, n_in),
                sums_at + 4 * LANES * a,
                *_block_of(codes, scales, lows, supers, b, n_in),
                sums_at + 4 * LANES * b,
                *_block_of(codes, scales, lows, supers, c, n_in),
                sums_at + 4 * LANES * c,
                *_block_of(codes, scales, lows, supers, d, n_in),
                sums_at + 4 * LANES * d,
            )
        return
    for task in range(begin, end):
        row = task * FEW_ROWS
        results[:, row : row + FEW_ROWS] = np.float32(0)
        for first in range(0, n_in, FEW_INPUTS):
            n_here = min(FEW_INPUTS, n_in - first)
            for lane in range(0, min(FEW_ROWS, n_blocks * LANES - row), LANES):
                of_block = _block_of(codes, scales, lows, supers, (row + lane) // LANES, n_in)
                for i in range(0, n_here, 32):
                    to = memory + i // per_word * word_bytes + 4 * lane
                    _unpacked_words(*of_block, (first + i) // 32, to, word_bytes)
            at, to = x_at + 4 * first // per_word, sums_at + 4 * row
            add_words(at, 4 * n_in // per_word, memory, to, 4 * sums_row, n, n_here // per_word)


@by_dtype(kernel)
def rows_of(begin, end, memory, ids_at, codes, scales, lows, supers, out_at, n_in):
    """Write the rows `ids` of a matrix to `out [ids, n_in]`; 16 rows are unpacked for each."""
    ids = carray(pointer(ids_at, int64), (end,))
    out, rows = carray(pointer(out_at, _stored), (end, n_in)), carray(pointer(memory, _stored), (LANES, 32))
    for i in range(begin, end):
        of_block = _block_of(codes, scales, lows, supers, ids[i] // LANES, n_in)
        for n in range((n_in + 31) // 32):
            _unpacked(*of_block, n, rows.ctypes.data, 32 * _itemsize)
            for j in range(min(32, n_in - n * 32)):
                out[i, n * 32 + j] = rows[ids[i] % LANES, j]


@by_dtype(kernel)
def pack(begin, end, memory, weight_at, codes_at, scales_at, zeros_at, n_out, n_in):
    """Quantise `weight [n_out, n_in]`, a block of 16 rows a task.

    With 8 bits, the largest magnitude of a group is 127. With 4 bits, scale and zero have the smallest squared error of
    some ranges, each corrected by least squares. Time per weight: see `QuantisedMatrix.pack`.
    """
    n_groups, n_blocks = (n_in + _size - 1) // _size, (n_out + LANES - 1) // LANES
    weight = carray(pointer(weight_at, _stored), (n_out, n_in))
    codes = carray(pointer(codes_at, uint8), (n_blocks, n_groups * _size * _bits // 32, LANES, 4))
    scales = carray(pointer(scales_at, uint16), (n_blocks, n_groups, LANES))
    zeros = carray(pointer(zeros_at, uint8), (n_blocks, n_groups, LANES))
    w = carray(pointer(memory, float32), (_size,))
    code = carray(pointer(memory + 4 * _size, float32), (_size,))
    for block in range(begin, end):
        for lane in range(LANES):
            row = block * LANES + lane
            for g in range(n_groups):
                n_used = min(_size, n_in - g * _size) if row < n_out else 0
                low = high = np.float32(0)
                for j in range(n_used):
                    w[j] = _read(weight[row, g * _size + j])
                for j in range(n_used, _size):
                    w[j] = np.float32(0)
                for j in range(_size):
                    low, high = min(low, w[j]), max(high, w[j])
                if _bits == 8:
                    bits_of_scale = _write_scale(max(high, -low) / np.float32(127))
                    scale = _read_scale(bits_of_scale)
                    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
                    scales[block, g, lane] = bits_of_scale
                    for j in range(_size):
                        rounded = np.floor(w[j] * inverse + np.float32(0.5))
                        rounded = min(max(rounded, np.float32(-127)), np.float32(127))
                        place = g * _size + j
                        codes[block, place // 4, lane, 2 * (j & 1) + ((j >> 1) & 1)] = uint8(int8(rounded))
                    continue
                best, best_scale, best_zero = np.float32(np.inf), uint16(0), np.float32(0)
                for attempt in range(_SHRINKS):
                    factor = np.float32(1) - _SHRINK * np.float32(attempt)
                    step, least = (high / 15 - low / 15) * factor, low * factor
                    for _fit in range(_FITS + 1):
                        bits_of_scale = _write_scale(step)
                        scale = _read_scale(bits_of_scale)
                        if not scale > np.float32(1e-30):
                            break
                        inverse = np.float32(1) / scale
                        zero = np.floor(np.float32(-16) * least * inverse + np.float32(0.5))
                        zero = min(max(zero, np.float32(0)), np.float32(255)) * np.float32(0.0625)
                        error = sum_w = sum_c = sum_wc = sum_cc = np.float32(0)
                        for j in range(_size):
                            c = np.floor(w[j] * inverse + zero + np.float32(0.5))
                            c = min(max(c, np.float32(0)), np.float32(15))
                            missed = w[j] - scale * (c - zero)
                            error += missed * missed
                            sum_w += w[j]
                            sum_c += c
                            sum_wc += w[j] * c
                            sum_cc += c * c
                        if error < best:
                            best, best_scale, best_zero = error, bits_of_scale, zero
                        spread = sum_cc * np.float32(_size) - sum_c * sum_c
                        if not spread > 0:
                            break
                        step = (sum_wc * np.float32(_size) - sum_c * sum_w) / spread
                        least = (sum_w - step * sum_c) / np.float32(_size)
                scales[block, g, lane] = best_scale
                zeros[block, g, lane] = uint8(best_zero * np.float32(16))
                scale = _read_scale(best_scale)
                inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
                for j in range(_size):
                    c = np.floor(w[j] * inverse + best_zero + np.float32(0.5))
                    code[j] = min(max(c, np.float32(0)), np.float32(15))
                for j in range(0, _size, 8):
                    for k in range(4):
                        n = j + 4 * (k & 1) + (k >> 1)
                        codes[block, (g * _size + j) // 8, lane, k] = uint8(code[n]) | (uint8(code[n + 2]) << 4)
