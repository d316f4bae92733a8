"""Products of few rows with keys and values in 8 bits, four bytes at a time (AVX512-VNNI); else see `pair_products`.

An instruction multiplies 64 unsigned bytes with 64 signed ones, and adds four products to each of 16 words. A word is a
key's score, or the sum of a column of values, so no sum runs over a vector's lanes: four columns of 16 keys, or four
values of 16 columns, are put side by side in registers, once for up to four rows. A 16-bit integer of a row is
`256 · high + low`; a row has the high bytes first, then the low ones, then 128 times their sum as int32. Keys and
values that are read next are brought to the L2 cache meanwhile, evenly: more requests at once stall the processor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, int8, int32, types

from lce.kernels.code.compiling import features, inner, intrinsic_of
from lce.kernels.code.numbers import pointer
from lce.kernels.code.shared import KEYS
from lce.kernels.code.vectors import _at, call_llvm, fetch, i64, loop, splat, switch

USABLE = {"avx512vnni", "avx512bw"} <= features()
LEAST = 16  # the least number of keys
COLUMNS = 16  # a row's length is a multiple
MOST_SIGNED, MOST_UNSIGNED = 32639, 65535  # the high byte of the first is 127, with a signed low byte

_I1, _I32, _F32 = ir.IntType(1), ir.IntType(32), ir.FloatType()
_BLOCK, _WORDS, _FLOATS = ir.VectorType(_I32, 4), ir.VectorType(_I32, 16), ir.VectorType(_F32, 16)
_ZEROS, _NO_FLOATS = ir.Constant(_WORDS, [0] * 16), ir.Constant(_FLOATS, [0.0] * 16)
_SIGNS = ir.Constant(_WORDS, [0x80808080 - (1 << 32)] * 16)  # flips the highest bit of each byte: adds 128


def _plus(builder: Any, *numbers: Any) -> Any:
    total = numbers[0]
    for number in numbers[1:]:
        total = builder.add(total, number)
    return total


def _load_splat(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    return splat(builder, builder.load(_at(builder, address, offset, kind.element), align=4), kind)


def _shuffled(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _add_quads(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, [total, unsigned, signed])


def _whole(builder: Any, high: Any, low: Any) -> Any:
    return builder.add(builder.shl(high, ir.Constant(_WORDS, [8] * 16)), low)


def _transposed(builder: Any, rows: list[Any], outer: bool) -> list[Any]:
    """Emit the transposition of 4 vectors of 4 blocks of 4 words: of each block's words, or of blocks if `outer`."""

    def mixed(x: Any, y: Any, order: tuple[int, ...]) -> Any:
        if outer:
            return _shuffled(builder, x, y, [4 * (e % 4 + e // 16 * 4) + word for e in order for word in range(4)])
        return _shuffled(builder, x, y, [4 * block + e for block in range(4) for e in order])

    found = []
    for order in ((0, 16, 1, 17), (2, 18, 3, 19)):
        x, y = (mixed(rows[i], rows[i + 1], order) for i in (0, 2))
        found += [mixed(x, y, (0, 1, 16, 17)), mixed(x, y, (2, 3, 18, 19))]
    return found


def _emit_scores(builder: Any, rows: int, args: Any) -> None:
    q, q_row, q_scales, k, k_row, out, out_row, dim, next_at, next_row = args
    cells = [(i, part) for i in range(rows) for part in (0, 1)]
    keys = [builder.mul(k_row, i64(key)) for key in range(16)]

    def turn(step: Any, sums: Any) -> Any:
        here, after, vectors = builder.shl(step, i64(4)), dict(sums), []
        # Four steps are 64 columns, a line of each of 16 rows; a row that is no whole number of lines ends in another.
        row, line = builder.shl(builder.and_(step, i64(3)), i64(2)), builder.and_(here, i64(-64))
        for i in range(4):
            at = _plus(builder, next_at, builder.mul(next_row, builder.add(row, i64(i))), line)
            fetch(builder, at, 2)
        fetch(builder, builder.add(at, i64(64)), 2)
        for i in range(4):
            parts = [
                builder.load(_at(builder, k, builder.add(keys[4 * block + i], here), _BLOCK), align=4)
                for block in range(4)
            ]
            left, right = (_shuffled(builder, parts[e], parts[e + 1], list(range(8))) for e in (0, 2))
            vectors.append(builder.xor(_shuffled(builder, left, right, list(range(16))), _SIGNS))
        for word, left in enumerate(_transposed(builder, vectors, outer=False)):
            for i, part in cells:
                offset = _plus(builder, builder.mul(q_row, i64(i)), here, i64(4 * word), *[dim] * part)
                right = _load_splat(builder, q, offset, _WORDS)
                after[i, part] = _add_quads(builder, after[i, part], left, right)
        return after

    sums = loop(builder, builder.lshr(dim, i64(4)), dict.fromkeys(cells, _ZEROS), turn)
    scales = ir.Constant(_FLOATS, ir.Undefined)
    for key in range(16):
        scale = builder.load(_at(builder, k, builder.add(keys[key], dim), _F32), align=4)
        scales = builder.insert_element(scales, scale, ir.Constant(_I32, key))
    for i in range(rows):
        too_much = _load_splat(builder, q, _plus(builder, builder.mul(q_row, i64(i)), dim, dim), _WORDS)
        dots = builder.sub(_whole(builder, sums[i, 0], sums[i, 1]), too_much)
        factor = builder.fmul(scales, _load_splat(builder, q_scales, i64(4 * i), _FLOATS))
        found = builder.fmul(builder.sitofp(dots, _FLOATS), factor)
        builder.store(found, _at(builder, out, builder.mul(out_row, i64(i)), _FLOATS), align=4)


def _interleaved(builder: Any, values: list[Any], quarter: int) -> Any:
    """Emit a vector of words with the same column of four values: columns `4·quarter .. 4·quarter + 3` of each 16."""

    def mixed(x: Any, y: Any, size: int, half: int) -> Any:  # within 16 bytes, because such shuffles are fast
        lanes, each = 64 // size, 16 // size
        first = [each * block + each // 2 * half + e for block in range(4) for e in range(each // 2)]
        kind = ir.VectorType(ir.IntType(8 * size), lanes)
        x, y = builder.bitcast(x, kind), builder.bitcast(y, kind)
        return _shuffled(builder, x, y, [i for e in first for i in (e, lanes + e)])

    left, right = (mixed(values[i], values[i + 1], 1, quarter // 2) for i in (0, 2))
    return builder.bitcast(mixed(left, right, 2, quarter % 2), _WORDS)


def _first_lanes(builder: Any, n: Any) -> Any:
    """Emit a mask of the first n of 16 lanes: all if n is larger, none if n is negative."""
    lanes = ir.Constant(_WORDS, list(range(16)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(n, _I32), _WORDS))


def _load_masked(builder: Any, place: Any, mask: Any, zeros: Any) -> Any:
    """Emit a load of the lanes in a mask; the others are 0, and their memory is not touched."""
    name = f"llvm.masked.load.v16{'i' if zeros is _ZEROS else 'f'}32.p0"
    return call_llvm(builder, name, zeros.type, [place, ir.Constant(_I32, 4), mask, zeros])


def _emit_sums(builder: Any, rows: int, args: Any) -> None:
    weights, w_row, v, v_row, n, sums, sums_row, factors, dim, next_at, next_row = args
    last, plane = builder.sub(n, i64(1)), builder.and_(builder.add(n, i64(15)), i64(-16))
    at_once = 4 if rows < 4 else 2  # quarters of 64 columns, so that registers suffice

    def add_columns(block: Any, _: Any) -> Any:
        here, found = builder.shl(block, i64(6)), {}
        mask = _first_lanes(builder, builder.lshr(builder.sub(dim, here), i64(2)))
        for first in range(0, 4, at_once):
            cells = [(i, part, e) for i in range(rows) for part in (0, 1) for e in range(first, first + at_once)]

            def turn(step: Any, before: Any, first: int = first) -> Any:
                value, after, values = builder.shl(step, i64(2)), {}, []
                for i in range(4):  # behind the last value, that value with the weight 0
                    index = builder.add(value, i64(i))
                    if first == 0:
                        at = _plus(builder, next_at, builder.mul(next_row, index), here)
                        fetch(builder, at, 2)
                    index = builder.select(builder.icmp_signed("<", index, last), index, last)
                    place = _at(builder, v, builder.add(builder.mul(index, v_row), here), _WORDS)
                    values.append(_load_masked(builder, place, mask, _ZEROS))
                if first == 0:
                    fetch(builder, builder.add(at, i64(64)), 2)
                right = {e: _interleaved(builder, values, e) for e in range(first, first + at_once)}
                for i in range(rows):
                    for part in (0, 1):
                        offset = _plus(builder, builder.mul(w_row, i64(i)), value, *[plane] * part)
                        left = _load_splat(builder, weights, offset, _WORDS)
                        for e, each in right.items():
                            after[i, part, e] = _add_quads(builder, before[i, part, e], left, each)
                return after

            steps = builder.lshr(builder.add(n, i64(3)), i64(2))
            found.update(loop(builder, steps, dict.fromkeys(cells, _ZEROS), turn))
        for i in range(rows):
            factor = _load_splat(builder, factors, i64(4 * i), _FLOATS)
            quarters = [_whole(builder, found[i, 0, e], found[i, 1, e]) for e in range(4)]
            for e, integers in enumerate(_transposed(builder, quarters, outer=True)):
                column = builder.add(here, i64(16 * e))
                inside, offset = _first_lanes(builder, builder.sub(dim, column)), builder.shl(column, i64(2))
                place = _at(builder, sums, builder.add(builder.mul(sums_row, i64(i)), offset), _FLOATS)
                old = _load_masked(builder, place, inside, _NO_FLOATS)
                new = call_llvm(builder, "llvm.fma.v16f32", _FLOATS, [builder.sitofp(integers, _FLOATS), factor, old])
                store = [new, place, ir.Constant(_I32, 4), inside]
                call_llvm(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), store)
        return {}

    loop(builder, builder.lshr(builder.add(dim, i64(63)), i64(6)), {}, add_columns)


def _by_rows(emit: Any, n_args: int) -> Any:
    """Return the intrinsic of `emit`, whose first argument is the number of rows, 1 to 4."""

    def emit_all(builder: Any, n_rows: Any, *args: Any) -> None:
        switch(builder, n_rows, {rows: partial(emit, builder, rows, args) for rows in (4, 3, 2, 1)})

    return intrinsic_of(emit.__name__, types.void(*[types.intp] * n_args), emit_all)


_score_16, _add_columns = _by_rows(_emit_scores, 11), _by_rows(_emit_sums, 12)


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
