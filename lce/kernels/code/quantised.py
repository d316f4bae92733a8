"""Weight matrices of 8-bit or 4-bit codes: packing, unpacking, and products of a few rows with them.

A matrix `[out, in]` is stored in blocks of 16 rows. A code is a weight as an integer. Codes are stored as vectors of 64
bytes: 16 words, one for each row of a block. A word has the codes of 4 (8 bits) or 8 (4 bits) neighbouring inputs of a
row. A group is some neighbouring inputs of a row, which share a scale. A `Layout` says how large groups are, and what
stands beside the codes. Rows and inputs are padded with zeros to whole blocks and groups. The stored tensors are:

    codes   [blocks, in / 4, 64]     int8, with 8 bits: bytes 0, 2, 1, 3 of a word are inputs 0, 1, 2, 3
            [blocks, in / 8, 64]     uint8, with 4 bits: nibbles n of a word's halfwords are inputs 2·n, 2·n + 1
    scales  [blocks, groups, 16]     one for each group and row
    zeros   [blocks, groups, 16]     uint8, in sixteenths of a code
    mins    [blocks, groups, 16]     what is added to each weight of a group
    supers  [blocks, in / 256, n, 16]  float16: what scales, and mins if n is 2, are multiplied with

Products multiply integers. Each group of an input row x is scaled so that its largest number uses all of 16 bits, and
is rounded to 16-bit integers, called halfwords. Products of codes and halfwords are added in pairs of inputs, without
error. If x is float32, a second halfword holds the next 16 bits of each number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int8, int16, types, uint8, uint16, uint32

from lce.kernels.code.compiling import ByDtype, by_dtype, features, inner, intrinsic_of, kernel, number_of
from lce.kernels.code.numbers import (
    STORED,
    bits_of_float,
    float_of_bits,
    pointer,
    read,
    read_row,
    write,
)
from lce.kernels.code.products import around_of, begins, finish_row
from lce.kernels.code.shared import BEGUN_BYTES, INT4, INT8, ITEMSIZE, LANES, LAYOUTS, QUANTISED_TASK, SUPER, Layout
from lce.kernels.code.vectors import call_llvm, i64, loop, multiply_add, splat, transposed

_ROWS = 4  # rows of x that are multiplied with a block at a time; a single row is multiplied alone


_WIDE = "avx512bw" in features()  # whether a register has 32 halfwords


_STEP = 4 if _WIDE else 1  # the most vectors of codes in one step of the innermost loop, so that registers suffice


_CHAINS = 4 if _WIDE else 2  # partial sums of a dot product, kept apart so that no addition waits for the one before it


_VECTOR = 4 * LANES  # bytes of a vector


_PLANES = {"float32": 2, "bfloat16": 1, "float16": 1}  # number of planes: halfwords per number


_SHRINKS = 4  # ranges of weights that 4-bit quantisation tries for each group


_SHRINK = np.float32(0.06)  # each range tried is narrower than the last by this part of the group's whole range


_FITS = 2  # least-squares corrections of a group's scale and zero for each range tried


_F16, _F32, _I8, _I16, _I32 = ir.HalfType(), ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32))


_HALF_FLOATS, _FLOATS, _BYTES, _HALVES, _WORDS = (ir.VectorType(kind, LANES) for kind in (_F16, _F32, _I8, _I16, _I32))


_PAIRED = ir.VectorType(_I16, 2 * LANES)


def _const(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _load(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """Emit a load of vector number `index` from an array of vectors of type `kind` at an address."""
    return builder.load(builder.gep(builder.inttoptr(address, ir.PointerType(kind)), [index]), align=1)


def _codes(builder: Any, bits: int, offset: int, words: Any) -> list[tuple[Any, int]]:
    """Emit the extraction of the codes from a vector of 16 words, one word for each row of a block.

    Returns, for each input of a word in order, the 16 rows' codes minus `offset`, times `2^exponent`, as float32, and
    the exponent. To save shifts, a 4-bit code is masked at its place in the word, except the highest, which is shifted
    down. An 8-bit code is moved to the highest byte of its word, for its sign.
    """
    found = []
    for n in range(32 // bits):
        place = (0, 16, 8, 24)[n] if bits == 8 else 16 * (n % 2) + 4 * (n // 2)
        if bits == 8:
            left = builder.shl(words, _const(_WORDS, 24 - place)) if place < 24 else words
            code, exponent = builder.and_(left, _const(_WORDS, 0xFF << 24)) if place else left, 24
        elif place == 28:
            code, exponent = builder.lshr(words, _const(_WORDS, place)), 0
        else:
            code, exponent = builder.and_(words, _const(_WORDS, 15 << place)), place
        if offset:
            code = builder.sub(code, _const(_WORDS, offset << exponent))
        found.append((builder.sitofp(code, _FLOATS), exponent))
    return found


def _pairs(builder: Any, bits: int, in_place: bool, words: Any) -> list[Any]:
    """Emit the extraction of codes from 16 words, one per row: vectors of halfwords, two inputs' codes per row.

    With `in_place`, codes of 4 bits are not shifted where a mask suffices: vectors 1 and 2 have `2^4` and `2^8` times
    the codes.
    """
    halves = builder.bitcast(words, _PAIRED)
    if bits == 8:
        eight = _const(_PAIRED, 8)
        return [builder.ashr(builder.shl(halves, eight), eight), builder.ashr(halves, eight)]
    if in_place:
        masked = [builder.and_(halves, _const(_PAIRED, 15 << 4 * n)) for n in range(3)]
        return [*masked, builder.lshr(halves, _const(_PAIRED, 12))]
    found = [builder.lshr(halves, _const(_PAIRED, 4 * n)) if n else halves for n in range(4)]
    return [builder.and_(each, _const(_PAIRED, 15)) for each in found[:3]] + found[3:]


def _add_products(builder: Any, total: Any, first: Any, second: Any) -> Any:
    """Emit 32 products of halfwords, added in pairs to the 16 words of `total`: one instruction with AVX512_VNNI."""
    if _WIDE:
        return builder.add(total, call_llvm(builder, "llvm.x86.avx512.pmaddw.d.512", _WORDS, [first, second]))
    if "avx2" in features():
        sums = []
        for start in (0, LANES):
            numbers = ir.Constant(_WORDS, list(range(start, start + LANES)))
            halves = [builder.shuffle_vector(each, each, numbers) for each in (first, second)]
            sums.append(call_llvm(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_I32, LANES // 2), halves))
        return builder.add(total, builder.shuffle_vector(*sums, ir.Constant(_WORDS, list(range(LANES)))))
    words = builder.bitcast(first, _WORDS), builder.bitcast(second, _WORDS)
    sixteen = _const(_WORDS, 16)
    low = [builder.ashr(builder.shl(each, sixteen), sixteen) for each in words]
    high = [builder.ashr(each, sixteen) for each in words]
    return builder.add(total, builder.add(builder.mul(*low), builder.mul(*high)))


def _group_numbers(builder: Any, layout: Layout, beside: list[Any], group: Any) -> tuple[Any, Any]:
    """Emit loads of a group's scales and of its zeros or mins, one for each of 16 rows, as float32; None for no low.

    `beside` are the addresses of a block's scales, of its zeros or mins, and of its supers. A min has the sign with
    which it is added. No product is rounded.
    """
    scales, lows, supers = beside
    n_supers = 2 if layout.low else 1

    def whole(address: Any, signed: bool) -> Any:
        extend = builder.sext if signed else builder.zext
        return builder.sitofp(extend(_load(builder, address, group, _BYTES), _WORDS), _FLOATS)

    def half(address: Any, index: Any) -> Any:
        return builder.fpext(_load(builder, address, index, _HALF_FLOATS), _FLOATS)

    def superior(number: int) -> Any:
        first = builder.mul(builder.udiv(group, i64(SUPER // layout.group)), i64(n_supers))
        return half(supers, builder.add(first, i64(number)))

    if layout.nested:
        scale = builder.fmul(whole(scales, layout.scale == "int8"), superior(0))
    elif layout.scale == "float16":
        scale = half(scales, group)
    else:
        words = builder.zext(_load(builder, scales, group, _HALVES), _WORDS)
        scale = builder.bitcast(builder.shl(words, _const(_WORDS, 16)), _FLOATS)
    if layout.low == "zeros":
        return scale, whole(lows, False)
    if layout.low and layout.nested:
        return scale, builder.fneg(builder.fmul(whole(lows, False), superior(1)))
    return scale, half(lows, group) if layout.low else None


def _load_splat(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """Emit a load of number `offset` from an array at the address `base` into all lanes of a vector of type `kind`."""
    return splat(
        builder, builder.load(builder.gep(builder.inttoptr(base, ir.PointerType(kind.element)), [offset])), kind
    )


def _dot(layout: Layout, rows: int, planes: int) -> Callable[..., Any]:
    """Return the intrinsic `(x, factors, codes, scales, lows, supers, n_groups, out)`: some rows of x times one block.

    All arguments but `n_groups` are addresses: of x as integers `[planes, rows, inputs]` (int16, a plane for each
    halfword of a number), of `factors [2, rows, n_groups]`, of the block's codes, scales, zeros or mins, and supers,
    and of the result `out [rows, 16]`; numbers other than x and the block are float32. For each row and group of x,
    `factors[0]` is the number that the integer 1 stands for, and `factors[1]` is the sum of the integers times
    `_of_sum(layout)`, which is multiplied with the zeros or mins. Instructions per 64 bytes of codes: 3 to extract the
    codes with 8 bits or 6 with 4 bits (4 for a single row with AVX-512), and for each row and plane of x, 2 with 8 bits
    or 4 with 4 bits.
    """
    size, bits = layout.group, layout.bits
    n_vectors, n_pairs = size * bits // 32, 16 // bits  # vectors of a group; pairs of inputs in a vector
    n_unrolled = min(_STEP, n_vectors)
    in_place = _WIDE and bits == 4 and rows == 1  # with a sum for each place; 64 inputs of a group would not overflow
    n_chains = 4 if in_place else max(1, _CHAINS // rows)
    cells = [(plane, t) for plane in range(planes) for t in range(rows)]
    no_sums = {(*cell, chain): _const(_WORDS, 0) for cell in cells for chain in range(n_chains)}

    def emit(builder: Any, x: Any, factors: Any, codes: Any, *others: Any) -> None:
        *beside, n_groups, out = others
        row_pairs = builder.mul(n_groups, i64(size // 2))

        def add_group(group: Any, totals: Any) -> Any:
            first, pair = builder.mul(group, i64(n_vectors)), builder.mul(group, i64(size // 2))
            starts = {cell: builder.add(builder.mul(row_pairs, i64(cell[0] * rows + cell[1])), pair) for cell in cells}

            def add_vectors(step: Any, before: Any) -> Any:
                sums, vector = dict(before), builder.mul(step, i64(n_unrolled))
                number = builder.mul(vector, i64(n_pairs))
                for j in range(n_unrolled):
                    words = _load(builder, codes, builder.add(first, builder.add(vector, i64(j))), _WORDS)
                    for n, weights in enumerate(_pairs(builder, bits, in_place, words), j * n_pairs):
                        for cell in cells:
                            place = builder.add(starts[cell], builder.add(number, i64(n)))
                            numbers = builder.bitcast(_load_splat(builder, x, place, _WORDS), _PAIRED)
                            chain = (*cell, n % n_chains)
                            sums[chain] = _add_products(builder, sums[chain], weights, numbers)
                return sums

            sums = loop(builder, i64(n_vectors // n_unrolled), no_sums, add_vectors)
            scale, low = _group_numbers(builder, layout, beside, group)
            after = {}
            for t in range(rows):
                dots = []
                for plane in range(planes):
                    dot = sums[plane, t, 0]
                    for chain in range(1, n_chains):
                        part = sums[plane, t, chain]
                        if in_place and chain < 3:
                            part = builder.ashr(part, _const(_WORDS, 4 * chain))  # exact
                        dot = builder.add(dot, part)
                    dots.append(builder.sitofp(dot, _FLOATS))
                dot = dots[0]
                if planes == 2:
                    dot = multiply_add(builder, False, dots[1], _const(_FLOATS, 2.0**-15), dot)
                at = builder.add(builder.mul(n_groups, i64(t)), group)
                factor = _load_splat(builder, factors, at, _FLOATS)
                if layout.low or layout.offset:
                    sum_at = builder.add(at, builder.mul(n_groups, i64(rows)))
                    of_sum = _load_splat(builder, factors, sum_at, _FLOATS)
                    if layout.low == "zeros":
                        dot = multiply_add(builder, False, low, of_sum, dot)
                    elif layout.low:
                        total = multiply_add(builder, False, builder.fmul(low, of_sum), factor, totals[t])
                        after[t] = multiply_add(builder, False, builder.fmul(scale, factor), dot, total)
                        continue
                    else:
                        dot = builder.fadd(dot, of_sum)
                after[t] = multiply_add(builder, False, builder.fmul(scale, factor), dot, totals[t])
            return after

        totals = loop(builder, n_groups, dict.fromkeys(range(rows), _const(_FLOATS, 0.0)), add_group)
        place = builder.inttoptr(out, ir.PointerType(_FLOATS))
        for t in range(rows):
            builder.store(totals[t], builder.gep(place, [i64(t)]), align=4)

    return intrinsic_of(f"dot {layout} {rows} {planes}", types.void(*[types.intp] * 8), emit)


def _of_sum(layout: Layout) -> np.float32:
    """Return the number with which `_as_integers` multiplies the sums of a group's integers."""
    return np.float32(-1 / 16 if layout.low == "zeros" else 1 if layout.low else -layout.offset)


def _weights(builder: Any, layout: Layout, codes: Any, beside: list[Any], n: Any) -> list[Any]:
    """Emit the unpacking of inputs `32·n .. 32·n + 31` of a block: for each input, its 16 rows' weights, in float32.

    `codes` and `beside` are addresses of the block's codes, scales, zeros or mins, and supers. Nothing but the sum of a
    product and a min is rounded.
    """
    bits, n_groups, weights = layout.bits, max(1, 32 // layout.group), []
    for part in range(n_groups):
        group = builder.add(builder.mul(n, i64(n_groups)), i64(part))
        if layout.group > 32:
            group = builder.udiv(n, i64(layout.group // 32))
        scale, low = _group_numbers(builder, layout, beside, group)
        first = builder.add(builder.mul(n, i64(bits)), i64(part * bits // n_groups))
        words = [_load(builder, codes, builder.add(first, i64(j)), _WORDS) for j in range(bits // n_groups)]
        exponents = {24} if bits == 8 else set(range(0, 28, 4))
        factors = {e: builder.fmul(scale, _const(_FLOATS, 2.0**-e)) for e in exponents}
        in_order = [code for each in words for code in _codes(builder, bits, layout.offset, each)]
        if layout.low == "zeros":  # none of these products and sums is rounded
            low = builder.fmul(builder.fmul(low, _const(_FLOATS, -1 / 16)), scale)
        if layout.low:
            weights += [multiply_add(builder, False, code, factors[e], low) for code, e in in_order]
        else:
            weights += [builder.fmul(code, factors[e]) for code, e in in_order]
    return weights


def _rows(layout: Layout, dtype: str) -> Callable[..., Any]:
    """Return the intrinsic `(codes, scales, lows, supers, n, out, stride)`: unpacks 32 inputs of a block's 16 rows.

    It writes what `_weights` unpacks to `out [16, 32]` as `dtype`. `stride` is the number of bytes between rows of
    `out`. Two-byte numbers are joined in pairs to words; 16 words of each of 16 rows are transposed in registers.
    Instructions: about 0.4 per weight.
    """

    def emit(builder: Any, codes: Any, *others: Any) -> None:
        *beside, n, out, stride = others
        weights = _weights(builder, layout, codes, beside, n)
        if dtype == "float32":
            words = [builder.bitcast(each, _WORDS) for each in weights]
        else:
            words = [_rounded(builder, *pair, dtype) for pair in zip(weights[::2], weights[1::2], strict=True)]
        for start in range(0, len(words), LANES):
            for i, row in enumerate(transposed(builder, words[start : start + LANES])):
                at = builder.add(builder.add(out, builder.mul(stride, i64(i))), i64(4 * start))
                builder.store(row, builder.inttoptr(at, ir.PointerType(_WORDS)), align=1)

    return intrinsic_of(f"rows {layout} {dtype}", types.void(*[types.intp] * 7), emit)


def _rounded(builder: Any, low: Any, high: Any, dtype: str) -> Any:
    """Emit the rounding of two vectors of 16 finite float32 numbers to a two-byte dtype, joined as 16 words."""
    if dtype == "float16":
        halves = (builder.fptrunc(each, ir.VectorType(ir.HalfType(), LANES)) for each in (low, high))
        low, high = (builder.zext(builder.bitcast(each, _HALVES), _WORDS) for each in halves)
        return builder.or_(low, builder.shl(high, _const(_WORDS, 16)))
    words = []
    for each in (builder.bitcast(low, _WORDS), builder.bitcast(high, _WORDS)):
        odd = builder.and_(builder.lshr(each, _const(_WORDS, 16)), _const(_WORDS, 1))
        words.append(builder.add(each, builder.add(odd, _const(_WORDS, 0x7FFF))))
    return builder.or_(builder.lshr(words[0], _const(_WORDS, 16)), builder.and_(words[1], _const(_WORDS, 0xFFFF0000)))


KINDS = tuple((layout, dtype) for layout in LAYOUTS for dtype in ITEMSIZE)  # the kinds of this module's kernels
PACK_KINDS = tuple((layout, dtype) for layout in (INT8, INT4) for dtype in ITEMSIZE)  # those of `pack`

# Values and functions for each kind of kernel, `(layout, dtype)`: a matrix's layout, and the dtype of x or the output.
_bits = ByDtype(lambda kind: kind[0].bits)


_size = ByDtype(lambda kind: kind[0].group)


_scale_bytes = ByDtype(lambda kind: 1 if kind[0].nested else 2)


_low_bytes = ByDtype(lambda kind: 2 if kind[0].low == "mins" and not kind[0].nested else 1)


_super_bytes = ByDtype(lambda kind: (4 if kind[0].low else 2) * LANES if kind[0].nested else 0)  # for 256 inputs


_sum_factor = ByDtype(lambda kind: _of_sum(kind[0]))


_planes = ByDtype(lambda kind: _PLANES[kind[1]])


_stored = ByDtype(lambda kind: STORED[kind[1]])


_read = ByDtype(lambda kind: read[kind[1]])


_read_row = ByDtype(lambda kind: read_row[kind[1]])


_finish_row = ByDtype(lambda kind: finish_row[kind[1]])


_dot_1 = ByDtype(lambda kind: _dot(kind[0], 1, _PLANES[kind[1]]))


_dot_4 = ByDtype(lambda kind: _dot(kind[0], _ROWS, _PLANES[kind[1]]))


_unpacked = ByDtype(lambda kind: _rows(*kind))


_itemsize = ByDtype(lambda kind: ITEMSIZE[kind[1]])


_read_scale, _write_scale = read["bfloat16"], write["bfloat16"]


@by_dtype(kernel)
def product(
    begin, end, memory, x_at, codes, scales, lows, supers, bias_at, norm_at, out_at, n, n_out, n_in, around, eps
):
    gate, adds, wide_x, wide_out = around_of(around)
    n_parts = 2 if gate else 1
    n_groups, n_blocks = (n_in + _size - 1) // _size, (n_out + LANES - 1) // LANES
    rows = 1 if n == 1 else _ROWS
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
            block = part * n_blocks + first
            group = block * n_groups * LANES
            codes_at, scales_at = codes + group * _size * _bits // 8, scales + _scale_bytes * group
            lows_at, supers_at = lows + _low_bytes * group, supers + block * (n_in // SUPER) * _super_bytes
            for tile in range(n_tiles):
                numbers_at = integers_at + 2 * _planes * tile * tile_size * _size
                of_tile, to = factors_at + 8 * tile * tile_size, dots[part, tile * rows].ctypes.data
                if rows == 1:
                    _dot_1(numbers_at, of_tile, codes_at, scales_at, lows_at, supers_at, n_groups, to)
                else:
                    _dot_4(numbers_at, of_tile, codes_at, scales_at, lows_at, supers_at, n_groups, to)
        row = first * LANES
        n_here = min(LANES, n_out - row)
        for part in range(n_parts if bias_at else 0):
            bias = carray(pointer(bias_at + (part * n_out + row) * _itemsize, _stored), (LANES,))
            for i in range(n):
                for lane in range(n_here):
                    dots[part, i, lane] += _read(bias[lane])
        for i in range(n):
            _finish_row(out_at, i * n_out + row, n_here, gate, adds, wide_out, dots[0, i], dots[1, i])


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
            factors[tile, 0, row, g] = down if finite else np.float32(np.nan)
            factors[tile, 1, row, g] = total * _sum_factor


@by_dtype(kernel)
def unpack(begin, end, memory, codes, scales, lows, supers, out_at, first, n_rows, n_in):
    n_groups = (n_in + _size - 1) // _size
    out, edge = carray(pointer(out_at, _stored), (n_rows, n_in)), carray(pointer(memory, _stored), (LANES, 32))
    for task in range(begin, end):
        block = first // LANES + task
        group = block * n_groups * LANES
        codes_at, scales_at = codes + group * _size * _bits // 8, scales + _scale_bytes * group
        lows_at, supers_at = lows + _low_bytes * group, supers + block * (n_in // SUPER) * _super_bytes
        height = min(LANES, n_rows - task * LANES)
        n_whole = n_in // 32 if height == LANES else 0
        for n in range(n_whole):
            at = out_at + (task * LANES * n_in + n * 32) * _itemsize
            _unpacked(codes_at, scales_at, lows_at, supers_at, n, at, n_in * _itemsize)
        for n in range(n_whole, (n_in + 32 - 1) // 32):
            _unpacked(codes_at, scales_at, lows_at, supers_at, n, edge.ctypes.data, 32 * _itemsize)
            for i in range(height):
                for j in range(min(32, n_in - n * 32)):
                    out[task * LANES + i, n * 32 + j] = edge[i, j]


@by_dtype(kernel)
def rows_of(begin, end, memory, ids_at, codes, scales, lows, supers, out_at, n_in):
    n_groups = (n_in + _size - 1) // _size
    ids = carray(pointer(ids_at, types.int64), (end,))
    out, rows = carray(pointer(out_at, _stored), (end, n_in)), carray(pointer(memory, _stored), (LANES, 32))
    for i in range(begin, end):
        block = ids[i] // LANES
        group = block * n_groups * LANES
        codes_at, scales_at = codes + group * _size * _bits // 8, scales + _scale_bytes * group
        lows_at, supers_at = lows + _low_bytes * group, supers + block * (n_in // SUPER) * _super_bytes
        for n in range((n_in + 31) // 32):
            _unpacked(codes_at, scales_at, lows_at, supers_at, n, rows.ctypes.data, 32 * _itemsize)
            for j in range(min(32, n_in - n * 32)):
                out[i, n * 32 + j] = rows[ids[i] % LANES, j]


@by_dtype(kernel)
def pack(begin, end, memory, weight_at, codes_at, scales_at, zeros_at, n_out, n_in):
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
