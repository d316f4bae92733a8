"""LLVM code for the blocks of quantised matrices: how codes become numbers, and products of codes with integers.

`quantised.py` says how a matrix is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lce.kernels.runtime.compiling import features, intrinsic_of
from lce.kernels.runtime.shared import LANES, MIXED, SUPER, Layout
from lce.kernels.runtime.vectors import call_llvm, fetch, i64, loop, multiply_add, splat, transposed

_WIDE = "avx512bw" in features()  # whether a register has 32 halfwords
_STEP = 4 if _WIDE else 1  # the most vectors of codes in one step of the innermost loop, so that registers suffice
_CHAINS = 4 if _WIDE else 2  # partial sums of a dot product, kept apart so that no addition waits for the one before it
_AHEAD = 32  # vectors of codes, 2 KiB: how far ahead they are asked for, since a processor guesses to a page's end
_VECTOR = 4 * LANES  # bytes of a vector
_F16, _F32, _I8, _I16, _I32 = ir.HalfType(), ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32))
_HALF_FLOATS, _FLOATS, _BYTES, _HALVES, _WORDS = (ir.VectorType(kind, LANES) for kind in (_F16, _F32, _I8, _I16, _I32))
_PAIRED = ir.VectorType(_I16, 2 * LANES)


def _const(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _load(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """Emit a load of vector number `index` from an array of vectors of type `kind` at an address."""
    return builder.load(builder.gep(builder.inttoptr(address, ir.PointerType(kind)), [index]), align=1)


def _loaded(builder: Any, bits: int, codes: Any, first: Any, n: int) -> Iterator[tuple[Any, Any]]:
    """Emit loads of n vectors of codes from number `first` on: all codes, or four bits of each and the bits above them.

    The bits above stand in halfwords where `_pairs` takes them, or are None.
    """
    more = bits - 4 if bits in MIXED else 0
    n_alike = 4 // more if more else n  # vectors that share one of bits above, which follows them
    n_loaded = n_alike + bool(more)
    for start in range(0, n, n_loaded):
        vectors = [_load(builder, codes, builder.add(first, i64(start + j)), _WORDS) for j in range(n_loaded)]
        for j in range(n_alike):
            last = builder.bitcast(vectors[-1], _PAIRED)
            yield vectors[j], builder.lshr(last, _const(_PAIRED, more * j)) if more else None


def _codes(builder: Any, layout: Layout, words: Any, above: Any) -> Iterator[tuple[Any, int]]:
    """Emit the extraction of the codes from a vector of 16 words, one word for each row of a block.

    Yields, for each input of a word in order, the 16 rows' codes minus the layout's offset, times `2^exponent`, as
    float32, and the exponent. An 8-bit code is moved to the highest byte of its word, for its sign.
    """
    if layout.bits == 8:
        for place in (0, 16, 8, 24):
            left = builder.shl(words, _const(_WORDS, 24 - place)) if place < 24 else words
            yield builder.sitofp(builder.and_(left, _const(_WORDS, 0xFF << 24)) if place else left, _FLOATS), 24
        return
    for n, pair in enumerate(_pairs(builder, layout.bits, True, words, above)):
        for place in (0, 16):
            code = builder.and_(builder.bitcast(pair, _WORDS), _const(_WORDS, 0xFFFF << place))
            exponent = place + 4 * n % 12
            if layout.offset:
                code = builder.sub(code, _const(_WORDS, layout.offset << exponent))
            yield builder.sitofp(code, _FLOATS), exponent


def _pairs(builder: Any, bits: int, in_place: bool, words: Any, above: Any) -> Iterator[Any]:
    """Emit the extraction of codes from 16 words, one per row: vectors of halfwords, two inputs' codes per row.

    With `in_place`, codes of up to 6 bits are not shifted where a mask suffices: vectors 1 and 2 have `2^4` and `2^8`
    times the codes. `above` has the bits above the lowest four of vectors 0 to 2 there, those of vector 3 in bit 0 on.
    """
    halves = builder.bitcast(words, _PAIRED)
    if bits == 8:
        eight = _const(_PAIRED, 8)
        yield builder.ashr(builder.shl(halves, eight), eight)
        yield builder.ashr(halves, eight)
        return
    for n in range(4):
        place = 4 * n % 12
        code = (
            builder.and_(halves, _const(_PAIRED, 15 << place)) if n < 3 else builder.lshr(halves, _const(_PAIRED, 12))
        )
        if above is not None:
            there = above if n < 3 else builder.shl(above, _const(_PAIRED, 4))
            code = builder.or_(code, builder.and_(there, _const(_PAIRED, ((1 << bits) - 16) << place)))
        yield code if in_place or not place else builder.lshr(code, _const(_PAIRED, place))


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


def _supers(builder: Any, layout: Layout, supers: Any, index: Any) -> list[Any]:
    """Emit loads of what the scales, and the mins if there are any, of 256 inputs are multiplied with, as float32."""
    n = 2 if layout.low else 1
    places = [builder.add(builder.mul(index, i64(n)), i64(number)) for number in range(n if layout.nested else 0)]
    return [builder.fpext(_load(builder, supers, place, _HALF_FLOATS), _FLOATS) for place in places]


def _group_numbers(
    builder: Any, layout: Layout, scales: Any, lows: Any, supers: list[Any], group: Any
) -> tuple[Any, Any]:
    """Emit loads of a group's scales and of its zeros or mins, one for each of 16 rows, as float32; None for no low.

    `scales` and `lows` are a block's addresses, `supers` what `_supers` loads. A min has the sign with which it is
    added. No product is rounded.
    """

    def whole(address: Any, signed: bool) -> Any:
        extend = builder.sext if signed else builder.zext
        return builder.sitofp(extend(_load(builder, address, group, _BYTES), _WORDS), _FLOATS)

    def half(address: Any) -> Any:
        return builder.fpext(_load(builder, address, group, _HALF_FLOATS), _FLOATS)

    if layout.nested:
        scale = builder.fmul(whole(scales, layout.scale == "int8"), supers[0])
    elif layout.scale == "float16":
        scale = half(scales)
    else:
        words = builder.zext(_load(builder, scales, group, _HALVES), _WORDS)
        scale = builder.bitcast(builder.shl(words, _const(_WORDS, 16)), _FLOATS)
    if layout.low == "zeros":
        return scale, whole(lows, False)
    if layout.low and layout.nested:
        return scale, builder.fneg(builder.fmul(whole(lows, False), supers[1]))
    return scale, half(lows) if layout.low else None


def _load_splat(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """Emit a load of number `offset` from an array at the address `base` into all lanes of a vector of type `kind`."""
    return splat(
        builder, builder.load(builder.gep(builder.inttoptr(base, ir.PointerType(kind.element)), [offset])), kind
    )


def dot(layout: Layout, rows: int, planes: int) -> Callable[..., Any]:
    """Return the intrinsic `(x, factors, codes, scales, lows, supers, n_groups, out)`: some rows of x times one block.

    All arguments but `n_groups` are addresses: of x as integers `[planes, rows, inputs]` (int16, a plane for each
    halfword of a number), of `factors [2, rows, n_groups]`, of the block's codes, scales, zeros or mins, and supers,
    and of the result `out [rows, 16]`; numbers other than x and the block are float32. For each row and group of x,
    `factors[0]` is the number that the integer 1 stands for, and `factors[1]` is the sum of the integers times
    `_of_sum(layout)`, which is multiplied with the zeros or mins. Instructions per 64 bytes of codes: 3 to extract the
    codes with 8 bits or 6 with 4 bits (4 for a single row with AVX-512; with 5 or 6 bits twice as many), and for each
    row and plane of x, 2 with 8 bits or 4 with 4 bits.
    """
    size, bits = layout.group, layout.bits
    n_vectors = size * bits // 32
    n_unrolled = n_vectors if bits in MIXED else min(_STEP, n_vectors)
    n_steps = n_vectors // n_unrolled
    # With a sum for each place: 2^15 · 2^8 times a code, for a quarter of a group's inputs, does not overflow.
    in_place = _WIDE and bits < 8 and rows == 1
    n_chains = 4 if in_place else max(1, _CHAINS // rows)
    cells = [(plane, t) for plane in range(planes) for t in range(rows)]
    no_sums = {(*cell, chain): _const(_WORDS, 0) for cell in cells for chain in range(n_chains)}

    def emit(builder: Any, x: Any, factors: Any, codes: Any, *others: Any) -> None:
        scales, lows, supers, n_groups, out = others
        row_pairs = builder.mul(n_groups, i64(size // 2))

        def add_group(super_numbers: list[Any], group: Any, totals: Any) -> Any:
            first, pair = builder.mul(group, i64(n_vectors)), builder.mul(group, i64(size // 2))
            starts = {cell: builder.add(builder.mul(row_pairs, i64(cell[0] * rows + cell[1])), pair) for cell in cells}

            def add_vectors(step: Any, before: Any) -> Any:
                sums, vector = dict(before), builder.add(first, builder.mul(step, i64(n_unrolled)))
                for j in range(n_unrolled):
                    fetch(builder, builder.add(codes, builder.mul(builder.add(vector, i64(_AHEAD + j)), i64(_VECTOR))))
                pairs = (_pairs(builder, bits, in_place, *v) for v in _loaded(builder, bits, codes, vector, n_unrolled))
                for n, weights in enumerate(itertools.chain.from_iterable(pairs)):
                    number = builder.add(builder.mul(step, i64(size // 2 // n_steps)), i64(n))
                    for cell in cells:
                        numbers = _load_splat(builder, x, builder.add(starts[cell], number), _WORDS)
                        chain = (*cell, n % n_chains)
                        sums[chain] = _add_products(builder, sums[chain], weights, builder.bitcast(numbers, _PAIRED))
                return sums

            sums = loop(builder, i64(n_steps), no_sums, add_vectors)
            scale, low = _group_numbers(builder, layout, scales, lows, super_numbers, group)
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

        def add_super(index: Any, totals: Any) -> Any:
            add = partial(add_group, _supers(builder, layout, supers, index))
            first = builder.mul(index, i64(n_within))
            return loop(builder, i64(n_within), totals, lambda group, sums: add(builder.add(first, group), sums))

        totals, n_within = dict.fromkeys(range(rows), _const(_FLOATS, 0.0)), SUPER // size
        if layout.nested:
            totals = loop(builder, builder.udiv(n_groups, i64(n_within)), totals, add_super)
        else:
            totals = loop(builder, n_groups, totals, partial(add_group, []))
        place = builder.inttoptr(out, ir.PointerType(_FLOATS))
        for t in range(rows):
            builder.store(totals[t], builder.gep(place, [i64(t)]), align=4)

    return intrinsic_of(f"dot {layout} {rows} {planes}", types.void(*[types.intp] * 8), emit)


def sum_factor(layout: Layout) -> np.float32:
    """Return the number with which `_as_integers` multiplies the sums of a group's integers."""
    return np.float32(-1 / 16 if layout.low == "zeros" else 1 if layout.low else -layout.offset)


def _weights(builder: Any, layout: Layout, codes: Any, beside: list[Any], n: Any) -> Iterator[Any]:
    """Emit the unpacking of inputs `32·n .. 32·n + 31` of a block: for each input, its 16 rows' weights, in float32.

    `codes` and `beside` are addresses of the block's codes, scales, zeros or mins, and supers. Nothing but the sum of a
    product and a min is rounded.
    """
    bits, n_groups, (scales, lows, supers) = layout.bits, max(1, 32 // layout.group), beside
    for part in range(n_groups):
        group = builder.add(builder.mul(n, i64(n_groups)), i64(part))
        if layout.group > 32:
            group = builder.udiv(n, i64(layout.group // 32))
        of_group = _supers(builder, layout, supers, builder.udiv(group, i64(SUPER // layout.group)))
        scale, low = _group_numbers(builder, layout, scales, lows, of_group, group)
        first = builder.add(builder.mul(n, i64(bits)), i64(part * bits // n_groups))
        exponents = {24} if bits == 8 else {0, 4, 8, 16, 20, 24}
        factors = {e: builder.fmul(scale, _const(_FLOATS, 2.0**-e)) for e in exponents}
        if layout.low == "zeros":  # none of these products and sums is rounded
            low = builder.fmul(builder.fmul(low, _const(_FLOATS, -1 / 16)), scale)
        for words, above in _loaded(builder, bits, codes, first, bits // n_groups):
            for code, e in _codes(builder, layout, words, above):
                if layout.low:
                    yield multiply_add(builder, False, code, factors[e], low)
                else:
                    yield builder.fmul(code, factors[e])


def row_times_blocks(layout: Layout) -> Callable[..., Any]:
    """Return the intrinsic `(x, codes, scales, lows, supers, …, n, out)`: one row of x times two blocks' rows.

    All arguments but n are addresses: of `x [32 · n]`, of what `_weights` takes of one block and then of another, and
    of the result `out [32]`; x and the result are float32. Each number of the result is one sum over the inputs in
    order, from 0 on, of what `rows_of_block` unpacks, which stays in registers. Instructions: about 0.6 per weight.
    """

    def emit(builder: Any, x: Any, *others: Any) -> None:
        *blocks, n_steps, out = others

        def add_step(step: Any, sums: Any) -> Any:
            inputs = builder.mul(step, i64(32))
            pairs = zip(
                *(_weights(builder, layout, at[0], list(at[1:]), step) for at in (blocks[:4], blocks[4:])), strict=True
            )
            for i, weights in enumerate(pairs):
                number = _load_splat(builder, x, builder.add(inputs, i64(i)), _FLOATS)
                sums = {j: multiply_add(builder, False, number, weights[j], sums[j]) for j in sums}
            return sums

        sums = loop(builder, n_steps, dict.fromkeys(range(2), _const(_FLOATS, 0.0)), add_step)
        place = builder.inttoptr(out, ir.PointerType(_FLOATS))
        for j in sums:
            builder.store(sums[j], builder.gep(place, [i64(j)]), align=4)

    return intrinsic_of(f"row {layout}", types.void(*[types.intp] * 11), emit)


def rows_of_block(layout: Layout, dtype: str) -> Callable[..., Any]:
    """Return the intrinsic `(codes, scales, lows, supers, n, out, stride)`: unpacks 32 inputs of a block's 16 rows.

    It writes what `_weights` unpacks to `out [16, 32]` as `dtype`. `stride` is the number of bytes between rows of
    `out`. Two-byte numbers are joined in pairs to words; 16 words of each of 16 rows are transposed in registers.
    Instructions: about 0.4 per weight.
    """

    def emit(builder: Any, codes: Any, *others: Any) -> None:
        *beside, n, out, stride = others
        words = [*_words(builder, layout, dtype, codes, beside, n)]
        for start in range(0, len(words), LANES):
            for i, row in enumerate(transposed(builder, words[start : start + LANES])):
                at = builder.add(builder.add(out, builder.mul(stride, i64(i))), i64(4 * start))
                builder.store(row, builder.inttoptr(at, ir.PointerType(_WORDS)), align=1)

    return intrinsic_of(f"rows {layout} {dtype}", types.void(*[types.intp] * 7), emit)


def words_of_block(layout: Layout, dtype: str) -> Callable[..., Any]:
    """Return the intrinsic `(codes, scales, lows, supers, n, out, stride)`: `rows_of_block`, not transposed.

    It writes one word of all 16 rows after the other: `stride` is the number of bytes from one word to the next.
    """

    def emit(builder: Any, codes: Any, *others: Any) -> None:
        *beside, n, out, stride = others
        for i, word in enumerate(_words(builder, layout, dtype, codes, beside, n)):
            at = builder.add(out, builder.mul(stride, i64(i)))
            builder.store(word, builder.inttoptr(at, ir.PointerType(_WORDS)), align=4)

    return intrinsic_of(f"words {layout} {dtype}", types.void(*[types.intp] * 7), emit)


def _words(builder: Any, layout: Layout, dtype: str, codes: Any, beside: list[Any], n: Any) -> Iterator[Any]:
    """Emit what `_weights` emits, rounded to a dtype; numbers of two bytes are joined in pairs of inputs to words."""
    weights = _weights(builder, layout, codes, beside, n)
    for weight in weights:
        if dtype == "float32":
            yield builder.bitcast(weight, _WORDS)
        else:
            yield _rounded(builder, weight, next(weights), dtype)


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
