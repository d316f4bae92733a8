"""LLVM code for the blocks of quantised matrices: how codes become numbers, and products of codes with integers.

`quantised.py` says how a matrix is stored.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from lce.kernels.runtime import vectors
from lce.kernels.runtime.compiling import features
from lce.kernels.runtime.shared import LANES, MIXED, SUPER, Layout
from lce.kernels.runtime.tiles import by_shape, cells, tile
from lce.kernels.runtime.vectors import FLOATS, WORDS, const, i64, loop, multiply_add, procedure, store, transposed

_WIDE = "avx512bw" in features()  # whether a register has 32 halfwords
_STEP = 4 if _WIDE else 1  # the most vectors of codes in one step of the innermost loop, so that registers suffice
_CHAINS = 4 if _WIDE else 2  # partial sums of a dot product, kept apart so that no addition waits for the one before it
_AHEAD = 64  # vectors of codes, 4 KiB: how far ahead they are asked for, since a processor guesses to a page's end
BLOCKS = 4  # blocks with which a row of x is multiplied at a time
_VECTOR = 4 * LANES  # bytes of a vector
_HALF_FLOATS, _BYTES, _HALVES = (ir.VectorType(each, LANES) for each in (ir.HalfType(), ir.IntType(8), ir.IntType(16)))
_PAIRED = ir.VectorType(ir.IntType(16), 2 * LANES)


def _load(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """Emit a load of number `index` from an array of vectors or numbers of type `kind` at an address."""
    return builder.load(builder.gep(builder.inttoptr(address, ir.PointerType(kind)), [index]), align=1)


def _load_splat(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """Emit a load of number `index` from an array into all lanes of a vector of type `kind`."""
    return vectors.splat(builder, _load(builder, kind.element, address, index), kind)


def _loaded(builder: Any, bits: int, codes: Any, first: Any, n: int) -> Iterator[tuple[Any, Any]]:
    """Emit loads of n vectors of codes from number `first` on: all codes, or four bits of each and the bits above them.

    The bits above stand in halfwords where `_pairs` takes them, or are None.
    """
    more = bits - 4 if bits in MIXED else 0
    n_alike = 4 // more if more else n  # vectors that share one of bits above, which follows them
    n_loaded = n_alike + bool(more)
    for start in range(0, n, n_loaded):
        words = [_load(builder, WORDS, codes, builder.add(first, i64(start + j))) for j in range(n_loaded)]
        for j in range(n_alike):
            last = builder.bitcast(words[-1], _PAIRED)
            yield words[j], builder.lshr(last, const(_PAIRED, more * j)) if more else None


def _codes(builder: Any, layout: Layout, words: Any, above: Any) -> Iterator[tuple[Any, int]]:
    """Emit the extraction of the codes from a vector of 16 words, one word for each row of a block.

    Yields, for each input of a word in order, the 16 rows' codes minus the layout's offset, times `2^exponent`, as
    float32, and the exponent. An 8-bit code is moved to the highest byte of its word, for its sign.
    """
    if layout.bits == 8:
        for place in (0, 16, 8, 24):
            left = builder.shl(words, const(WORDS, 24 - place)) if place < 24 else words
            yield builder.sitofp(builder.and_(left, const(WORDS, 0xFF << 24)) if place else left, FLOATS), 24
        return
    for n, pair in enumerate(_pairs(builder, layout.bits, True, words, above)):
        for place in (0, 16):
            code = builder.and_(builder.bitcast(pair, WORDS), const(WORDS, 0xFFFF << place))
            exponent = place + 4 * n % 12
            if layout.offset:
                code = builder.sub(code, const(WORDS, layout.offset << exponent))
            yield builder.sitofp(code, FLOATS), exponent


def _pairs(builder: Any, bits: int, in_place: bool, words: Any, above: Any) -> Iterator[Any]:
    """Emit the extraction of codes from 16 words, one per row: vectors of halfwords, two inputs' codes per row.

    With `in_place`, codes of up to 6 bits are not shifted where a mask suffices: vectors 1 and 2 have `2^4` and `2^8`
    times the codes. `above` has the bits above the lowest four of vectors 0 to 2 there, those of vector 3 in bit 0 on.
    """
    halves = builder.bitcast(words, _PAIRED)
    if bits == 8:
        eight = const(_PAIRED, 8)
        yield builder.ashr(builder.shl(halves, eight), eight)
        yield builder.ashr(halves, eight)
        return
    for n in range(4):
        place = 4 * n % 12
        code = builder.and_(halves, const(_PAIRED, 15 << place)) if n < 3 else builder.lshr(halves, const(_PAIRED, 12))
        if above is not None:
            there = above if n < 3 else builder.shl(above, const(_PAIRED, 4))
            code = builder.or_(code, builder.and_(there, const(_PAIRED, ((1 << bits) - 16) << place)))
        yield code if in_place or not place else builder.lshr(code, const(_PAIRED, place))


def _supers(builder: Any, layout: Layout, supers: Any, index: Any) -> list[Any]:
    """Emit loads of what the scales, and the mins if there are any, of 256 inputs are multiplied with, as float32."""
    n = 2 if layout.low else 1
    places = [builder.add(builder.mul(index, i64(n)), i64(number)) for number in range(n if layout.nested else 0)]
    return [builder.fpext(_load(builder, _HALF_FLOATS, supers, place), FLOATS) for place in places]


def _group_numbers(
    builder: Any, layout: Layout, scales: Any, lows: Any, supers: list[Any], group: Any
) -> tuple[Any, Any]:
    """Emit loads of a group's scales and of its zeros or mins, one for each of 16 rows, as float32; None for no low.

    `scales` and `lows` are a block's addresses, `supers` what `_supers` loads. A min has the sign with which it is
    added. No product is rounded.
    """

    def whole(address: Any, signed: bool) -> Any:
        extend = builder.sext if signed else builder.zext
        return builder.sitofp(extend(_load(builder, _BYTES, address, group), WORDS), FLOATS)

    def half(address: Any) -> Any:
        return builder.fpext(_load(builder, _HALF_FLOATS, address, group), FLOATS)

    if layout.nested:
        scale = builder.fmul(whole(scales, layout.scale == "int8"), supers[0])
    elif layout.scale == "float16":
        scale = half(scales)
    else:
        words = builder.zext(_load(builder, _HALVES, scales, group), WORDS)
        scale = builder.bitcast(builder.shl(words, const(WORDS, 16)), FLOATS)
    if layout.low == "zeros":
        return scale, whole(lows, False)
    if layout.low and layout.nested:
        return scale, builder.fneg(builder.fmul(whole(lows, False), supers[1]))
    return scale, half(lows) if layout.low else None


def dot(layout: Layout, counts: tuple[int, ...], planes: int) -> Callable[..., Any]:
    """Return the intrinsic `(rows, x, factors, codes, scales, lows, supers, n_groups, out)`: x times one block.

    `rows`, the number of rows of x, is one of `counts`. All other arguments but `n_groups` are addresses: of x as
    integers `[planes, rows, inputs]` (int16, a plane for each halfword of a number), of `factors [2, rows, n_groups]`,
    of the block's codes, scales, zeros or mins, and supers, and of the result `out [rows, 16]`; numbers other than x
    and the block are float32. For each row and group of x, `factors[0]` is the number that the integer 1 stands for,
    and `factors[1]` is the sum of the integers times `sum_factor(layout)`, which is multiplied with the zeros or mins.
    Instructions per 64 bytes of codes: 3 to extract the codes with 8 bits or 6 with 4 bits (4 for a single row with
    AVX-512; with 5 or 6 bits twice as many), and for each row and plane of x, 2 with 8 bits or 4 with 4 bits.
    """
    size, bits = layout.group, layout.bits
    n_vectors = size * bits // 32
    n_unrolled = n_vectors if bits in MIXED else min(_STEP, n_vectors)
    n_steps = n_vectors // n_unrolled

    def emit(builder: Any, rows: int, x: Any, factors: Any, codes: Any, *others: Any) -> None:
        scales, lows, supers, n_groups, out = others
        # With a sum for each place: 2^15 · 2^8 times a code, for a quarter of a group's inputs, does not overflow.
        in_place = _WIDE and bits < 8 and rows == 1
        n_chains = 4 if in_place else max(1, _CHAINS // rows)
        row_pairs = builder.mul(n_groups, i64(size // 2))

        def add_group(super_numbers: list[Any], group: Any, totals: Any) -> Any:
            first, pair = builder.mul(group, i64(n_vectors)), builder.mul(group, i64(size // 2))
            starts = [builder.add(builder.mul(row_pairs, i64(row)), pair) for row in range(planes * rows)]

            def operands(step: Any) -> Iterator[Any]:
                vector = builder.add(first, builder.mul(step, i64(n_unrolled)))
                for j in range(n_unrolled):
                    ahead = builder.mul(builder.add(vector, i64(_AHEAD + j)), i64(_VECTOR))
                    vectors.fetch(builder, builder.add(codes, ahead), 2)
                pairs = (_pairs(builder, bits, in_place, *v) for v in _loaded(builder, bits, codes, vector, n_unrolled))
                for n, weights in enumerate(itertools.chain.from_iterable(pairs)):
                    number = builder.add(builder.mul(step, i64(size // 2 // n_steps)), i64(n))
                    numbers = (_load_splat(builder, WORDS, x, builder.add(start, number)) for start in starts)
                    yield n % n_chains, numbers, [weights]

            add = partial(multiply_add, builder, False)
            sums = tile(builder, i64(n_steps), cells(const(WORDS, 0), n_chains, planes * rows, 1), operands, add)
            scale, low = _group_numbers(builder, layout, scales, lows, super_numbers, group)
            after = {}
            for t in range(rows):
                dots = []
                for plane in range(planes):
                    dot = sums[0, plane * rows + t, 0]
                    for chain in range(1, n_chains):
                        part = sums[chain, plane * rows + t, 0]
                        if in_place and chain < 3:
                            part = builder.ashr(part, const(WORDS, 4 * chain))  # exact
                        dot = builder.add(dot, part)
                    dots.append(builder.sitofp(dot, FLOATS))
                dot = dots[0]
                if planes == 2:
                    dot = multiply_add(builder, False, dots[1], const(FLOATS, 2.0**-15), dot)
                at = builder.add(builder.mul(n_groups, i64(t)), group)
                factor = _load_splat(builder, FLOATS, factors, at)
                if layout.low or layout.offset:
                    sum_at = builder.add(at, builder.mul(n_groups, i64(rows)))
                    of_sum = _load_splat(builder, FLOATS, factors, sum_at)
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

        totals, n_within = dict.fromkeys(range(rows), const(FLOATS, 0.0)), SUPER // size
        if layout.nested:
            totals = loop(builder, builder.udiv(n_groups, i64(n_within)), totals, add_super)
        else:
            totals = loop(builder, n_groups, totals, partial(add_group, []))
        for t in range(rows):
            store(builder, totals[t], out, _VECTOR * t)

    return by_shape(f"dot {layout} {planes}", [(rows,) for rows in counts], 8, emit)


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
        factors = {e: builder.fmul(scale, const(FLOATS, 2.0**-e)) for e in exponents}
        if layout.low == "zeros":  # none of these products and sums is rounded
            low = builder.fmul(builder.fmul(low, const(FLOATS, -1 / 16)), scale)
        for words, above in _loaded(builder, bits, codes, first, bits // n_groups):
            for code, e in _codes(builder, layout, words, above):
                if layout.low:
                    yield multiply_add(builder, False, code, factors[e], low)
                else:
                    yield builder.fmul(code, factors[e])


def row_times_blocks(layout: Layout) -> Callable[..., Any]:
    """Return the intrinsic `(x, n, codes, scales, lows, supers, out, …)`: one row of x times the rows of some blocks.

    All arguments but n are addresses: of `x [32 · n]`, and for each of `BLOCKS` blocks of what `_weights` takes and of
    the result `out [16]`; x and the result are float32. Each number of the result is one sum over the inputs in order,
    from 0 on, of what `rows_of_block` unpacks, which stays in registers: several blocks, since an addition waits for
    the one before it. Instructions: about 0.6 per weight.
    """

    def emit(builder: Any, x: Any, n_steps: Any, *others: Any) -> None:
        blocks = [others[5 * i : 5 * i + 5] for i in range(BLOCKS)]

        def add_step(step: Any, sums: Any) -> Any:
            inputs = builder.mul(step, i64(32))
            of_blocks = (_weights(builder, layout, at[0], list(at[1:4]), step) for at in blocks)
            for i, weights in enumerate(zip(*of_blocks, strict=True)):
                number = _load_splat(builder, FLOATS, x, builder.add(inputs, i64(i)))
                sums = {j: multiply_add(builder, False, number, weights[j], sums[j]) for j in sums}
            return sums

        sums = loop(builder, n_steps, dict.fromkeys(range(BLOCKS), const(FLOATS, 0.0)), add_step)
        for j, block in enumerate(blocks):
            store(builder, sums[j], block[4])

    return procedure(f"row {layout}", 2 + 5 * BLOCKS, emit)


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
                store(builder, row, out, (stride, i), 4 * start)

    return procedure(f"rows {layout} {dtype}", 7, emit)


def words_of_block(layout: Layout, dtype: str) -> Callable[..., Any]:
    """Return the intrinsic `(codes, scales, lows, supers, n, out, stride)`: `rows_of_block`, not transposed.

    It writes one word of all 16 rows after the other: `stride` is the number of bytes from one word to the next.
    """

    def emit(builder: Any, codes: Any, *others: Any) -> None:
        *beside, n, out, stride = others
        for i, word in enumerate(_words(builder, layout, dtype, codes, beside, n)):
            store(builder, word, out, (stride, i))

    return procedure(f"words {layout} {dtype}", 7, emit)


def _words(builder: Any, layout: Layout, dtype: str, codes: Any, beside: list[Any], n: Any) -> Iterator[Any]:
    """Emit what `_weights` emits, rounded to a dtype; numbers of two bytes are joined in pairs of inputs to words."""
    weights = _weights(builder, layout, codes, beside, n)
    for weight in weights:
        if dtype == "float32":
            yield builder.bitcast(weight, WORDS)
        else:
            yield _rounded(builder, weight, next(weights), dtype)


def _rounded(builder: Any, low: Any, high: Any, dtype: str) -> Any:
    """Emit the rounding of two vectors of 16 finite float32 numbers to a two-byte dtype, joined as 16 words."""
    if dtype == "float16":
        halves = (builder.fptrunc(each, ir.VectorType(ir.HalfType(), LANES)) for each in (low, high))
        low, high = (builder.zext(builder.bitcast(each, _HALVES), WORDS) for each in halves)
        return builder.or_(low, builder.shl(high, const(WORDS, 16)))
    words = []
    for each in (builder.bitcast(low, WORDS), builder.bitcast(high, WORDS)):
        odd = builder.and_(builder.lshr(each, const(WORDS, 16)), const(WORDS, 1))
        words.append(builder.add(each, builder.add(odd, const(WORDS, 0x7FFF))))
    return builder.or_(builder.lshr(words[0], const(WORDS, 16)), builder.and_(words[1], const(WORDS, 0xFFFF0000)))
