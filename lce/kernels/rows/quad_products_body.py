"""Products of few rows with keys and values in 8 bits, four bytes at a time (AVX512-VNNI); else see `pair_products`.

An instruction multiplies 64 unsigned bytes with 64 signed ones, and adds four products to each of 16 words. A word is a
key's score, or the sum of a column of values, so no sum runs over a vector's lanes: four columns of 16 keys, or four
values of 16 columns, are put side by side in registers, once for up to four rows. A 16-bit integer of a row is
`256 · high + low`; a row has the high bytes first, then the low ones, then 128 times their sum as int32. Keys and
values that are read next are brought to the L2 cache meanwhile, evenly: more requests at once stall the processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, int8, int32

from lce.kernels.runtime import vectors as emit
from lce.kernels.runtime.compiling import features, inner
from lce.kernels.runtime.numbers import pointer
from lce.kernels.runtime.shared import KEYS
from lce.kernels.runtime.tiles import by_shape, cells, tile
from lce.kernels.runtime.vectors import F32, FLOATS, I32, WORDS

USABLE = {"avx512vnni", "avx512bw"} <= features()
LEAST = 16  # the least number of keys
COLUMNS = 16  # a row's length is a multiple
MOST_SIGNED, MOST_UNSIGNED = 32639, 65535  # the high byte of the first is 127, with a signed low byte

_BLOCK, _ZEROS = ir.VectorType(I32, 4), emit.const(WORDS, 0)
_SIGNS = emit.const(WORDS, 0x80808080 - (1 << 32))  # flips the highest bit of each byte: adds 128
_SHAPES = [(rows,) for rows in (4, 3, 2, 1)]


def _add_quads(builder: Any, unsigned: Any, signed: Any, total: Any) -> Any:
    return emit.call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [total, unsigned, signed])


def _whole(builder: Any, high: Any, low: Any) -> Any:
    return builder.add(builder.shl(high, emit.const(WORDS, 8)), low)


def _fetch_rows(builder: Any, first: Any, stride: Any) -> None:
    """Emit requests for the line at an address and those of three more rows; a row may end in another line."""
    for i in range(4):
        emit.fetch(builder, emit.at(builder, first, (stride, i)), 2)
    emit.fetch(builder, emit.at(builder, first, (stride, 3), 64), 2)


def _emit_scores(builder: Any, rows: int, *args: Any) -> None:
    """Emit the scores of 16 keys for some rows of queries, and requests for the lines of the keys' values."""
    q, q_row, q_scales, k, k_row, out, out_row, dim, next_at, next_row = args

    def operands(step: Any) -> Iterator[Any]:
        # Four steps are 64 columns, a line of each of 16 rows.
        here, first, vectors = (
            builder.shl(step, emit.i64(4)),
            builder.shl(builder.and_(step, emit.i64(3)), emit.i64(2)),
            [],
        )
        line = emit.at(builder, next_at, (next_row, first), builder.and_(here, emit.i64(-64)))
        _fetch_rows(builder, line, next_row)
        for i in range(4):
            parts = [emit.load(builder, _BLOCK, k, (k_row, 4 * block + i), here) for block in range(4)]
            left, right = (emit.shuffle(builder, parts[e], parts[e + 1], range(8)) for e in (0, 2))
            vectors.append(builder.xor(emit.shuffle(builder, left, right, range(16)), _SIGNS))
        for word, keys in enumerate(emit.transposed(builder, vectors)):
            places = [(q, (q_row, i), here, 4 * word, *[dim] * part) for i in range(rows) for part in (0, 1)]
            yield 0, [keys], (emit.load_splat(builder, WORDS, *place) for place in places)

    add = partial(_add_quads, builder)
    sums = tile(builder, builder.lshr(dim, emit.i64(4)), cells(_ZEROS, 1, 1, 2 * rows), operands, add)
    scales = ir.Constant(FLOATS, ir.Undefined)
    for key in range(16):
        scales = builder.insert_element(scales, emit.load(builder, F32, k, (k_row, key), dim), I32(key))
    for i in range(rows):
        too_much = emit.load_splat(builder, WORDS, q, (q_row, i), dim, dim)
        dots = builder.sub(_whole(builder, sums[0, 0, 2 * i], sums[0, 0, 2 * i + 1]), too_much)
        factor = builder.fmul(scales, emit.load_splat(builder, FLOATS, q_scales, 4 * i))
        emit.store(builder, builder.fmul(builder.sitofp(dots, FLOATS), factor), out, (out_row, i))


def _interleaved(builder: Any, values: list[Any], quarter: int) -> Any:
    """Emit a vector of words with the same column of four values: columns `4·quarter .. 4·quarter + 3` of each 16."""

    def mixed(x: Any, y: Any, size: int, half: int) -> Any:  # within 16 bytes, because such shuffles are fast
        lanes, each = 64 // size, 16 // size
        first = [each * block + each // 2 * half + e for block in range(4) for e in range(each // 2)]
        kind = ir.VectorType(ir.IntType(8 * size), lanes)
        x, y = builder.bitcast(x, kind), builder.bitcast(y, kind)
        return emit.shuffle(builder, x, y, [i for e in first for i in (e, lanes + e)])

    left, right = (mixed(values[i], values[i + 1], 1, quarter // 2) for i in (0, 2))
    return builder.bitcast(mixed(left, right, 2, quarter % 2), WORDS)


def _first_lanes(builder: Any, n: Any) -> Any:
    """Emit a mask of the first n of 16 lanes: all if n is larger, none if n is negative."""
    lanes = ir.Constant(WORDS, [*range(16)])
    return builder.icmp_signed("<", lanes, emit.splat(builder, builder.trunc(n, I32), WORDS))


def _load_masked(builder: Any, kind: Any, mask: Any, *place: Any) -> Any:
    """Emit a load of the lanes in a mask; the others are 0, and their memory is not touched."""
    name = f"llvm.masked.load.v16{'i' if kind is WORDS else 'f'}32.p0"
    return emit.call_llvm(
        builder, name, kind, [emit.pointer_at(builder, kind, *place), I32(4), mask, emit.const(kind, 0)]
    )


def _emit_sums(builder: Any, rows: int, *args: Any) -> None:
    """Emit the addition of n weighted values to sums, and requests for the lines of the next keys."""
    weights, w_row, v, v_row, n, sums, sums_row, factors, dim, next_at, next_row = args
    last, plane = builder.sub(n, emit.i64(1)), builder.and_(builder.add(n, emit.i64(15)), emit.i64(-16))
    at_once = 4 if rows < 4 else 2  # quarters of 64 columns, so that registers suffice
    add = partial(_add_quads, builder)

    def columns(here: Any, first: int, mask: Any) -> dict[Any, Any]:
        """Emit the sums of quarters `first ..` of the 64 columns from byte `here` of a value on."""

        def operands(step: Any) -> Iterator[Any]:
            value, values = builder.shl(step, emit.i64(2)), []
            if first == 0:
                _fetch_rows(builder, emit.at(builder, next_at, (next_row, value), here), next_row)
            for i in range(4):  # behind the last value, that value with the weight 0
                index = builder.add(value, emit.i64(i))
                index = builder.select(builder.icmp_signed("<", index, last), index, last)
                values.append(_load_masked(builder, WORDS, mask, v, (index, v_row), here))
            right = [_interleaved(builder, values, e) for e in range(first, first + at_once)]
            places = [(weights, (w_row, i), value, *[plane] * part) for i in range(rows) for part in (0, 1)]
            yield 0, (emit.load_splat(builder, WORDS, *place) for place in places), right

        steps = builder.lshr(builder.add(n, emit.i64(3)), emit.i64(2))
        return tile(builder, steps, cells(_ZEROS, 1, 2 * rows, at_once), operands, add)

    def add_columns(block: Any, _: Any) -> Any:
        here = builder.shl(block, emit.i64(6))
        mask = _first_lanes(builder, builder.lshr(builder.sub(dim, here), emit.i64(2)))
        found = {
            (i, first + e): total
            for first in range(0, 4, at_once)
            for (_, i, e), total in columns(here, first, mask).items()
        }
        for i in range(rows):
            factor = emit.load_splat(builder, FLOATS, factors, 4 * i)
            quarters = [_whole(builder, found[2 * i, e], found[2 * i + 1, e]) for e in range(4)]
            for e, integers in enumerate(emit.transposed(builder, quarters, 4)):
                column = builder.add(here, emit.i64(16 * e))
                inside, place = _first_lanes(builder, builder.sub(dim, column)), (sums, (sums_row, i), (column, 4))
                numbers = builder.sitofp(integers, FLOATS), factor, _load_masked(builder, FLOATS, inside, *place)
                new = emit.call_llvm(builder, "llvm.fma.v16f32", FLOATS, [*numbers])
                written = [new, emit.pointer_at(builder, FLOATS, *place), I32(4), inside]
                emit.call_llvm(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), written)
        return {}

    emit.loop(builder, builder.lshr(builder.add(dim, emit.i64(63)), emit.i64(6)), {}, add_columns)


_score_16 = by_shape("scores of integers", _SHAPES, 10, _emit_scores)
_add_columns = by_shape("sums of integers", _SHAPES, 11, _emit_sums)


@inner
def write_integers(numbers, per, to, signed):
    """Write `per` times numbers, rounded to 16-bit integers, as a row at the address `to`."""
    n, total, carry = len(numbers), int32(0), int32(128) if signed else int32(0)
    high, low = carray(pointer(to, int8), (n,)), carray(pointer(to + n, int8), (n,))
    for i in range(n):
        integer = int32(np.rint(numbers[i] * per))
        high[i], low[i] = int8((integer + carry) >> int32(8)), int8(integer)
        total += integer
    carray(pointer(to + 2 * n, int32), (1,))[0] = total * int32(128)


@inner
def score_keys(rows, q_at, q_row, scales_at, k_at, k_row, n, out_at, dim, v_at, v_row, _spare_at):
    """Write the scores of n ≥ 16 keys to rows of `KEYS` numbers, and fetch the keys' values."""
    key = 0
    while key < n:
        key = min(key, n - 16)  # the last step computes some scores again
        to, keys_at, values_at = out_at + 4 * key, k_at + key * k_row, v_at + key * v_row
        _score_16(rows, q_at, q_row, scales_at, keys_at, k_row, to, 4 * KEYS, dim, values_at, v_row)
        key += 16


@inner
def add_values(rows, weights_at, w_row, v_at, v_row, n, sums_at, sums_row, factors_at, dim, k_at, k_row, _n_next):
    """Add n weighted values to sums, and fetch as many next keys."""
    _add_columns(rows, weights_at, w_row, v_at, v_row, n, sums_at, sums_row, factors_at, dim, k_at, k_row)
