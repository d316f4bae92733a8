"""Inner loops that compilers do not vectorise well, written in LLVM IR on vectors of 16 numbers.

A function with a `builder` emits LLVM instructions and returns LLVM values. LLVM translates a vector operation for any
processor: to one instruction with AVX-512, to several without. `PAIRS` says whether this processor multiplies pairs of
bfloat16 numbers (AVX512_BF16), at twice the speed of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from lce.kernels.code.compiling import features, intrinsic_of
from lce.kernels.code.shared import ITEMSIZE, LANES

PAIRS = "avx512bf16" in features()
WIDE = "avx512f" in features()  # whether a register holds 16 numbers, and there are 32 of them

_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


class _BFloat(ir.HalfType):
    """LLVM's bfloat type, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_PAIRED = ir.VectorType(_BFloat(), 2 * LANES)


def i64(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """Emit a pointer to type `kind`, `offset` bytes after an address."""
    return builder.inttoptr(builder.add(address, offset), ir.PointerType(kind))


def splat(builder: Any, number: Any, kind: Any) -> Any:
    """Emit a vector of type `kind` with a number in all lanes."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def multiply_add(builder: Any, pairs: bool, x: Any, y: Any, total: Any) -> Any:
    """Emit `x * y + total` on float32 numbers; with `pairs`, x and y are 16 words of two bfloat16 numbers each."""
    kind = _PAIRED if pairs else total.type
    x, y, lanes = builder.bitcast(x, kind), builder.bitcast(y, kind), total.type.count
    if pairs:
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [total, x, y])
    return call_llvm(builder, f"llvm.fma.v{lanes}f32", kind, [x, y, total])


def call_llvm(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Emit a call of LLVM's own function `name`, whose result has the type `result`."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), args)


def multiply(pairs: bool, dtype: str, shapes: tuple[tuple[int, int], ...]) -> Callable[..., Any]:
    """Return an intrinsic that computes `C [rows, 16·columns] += A [rows, n] · B [n, 16·columns]` in a kernel.

    The intrinsic takes `(rows, columns, a, a_stride, b, b_stride, c, c_stride, n)`: rows and columns of 16 numbers, a
    pair of `shapes`; the address of each matrix, followed by the bytes between its rows; and n ≥ 1. A and C are
    float32, and B is of `dtype`. With `pairs`, A and B consist of words of two bfloat16 numbers, and both products of
    two words are added to C. All of C stays in `rows · columns` vector registers. Each number of C is one sum over n in
    order, so its bits do not depend on `rows` and `columns`.
    """
    width = 64 if pairs else 16 * ITEMSIZE[dtype]  # bytes of a vector of B

    def emit(builder: Any, rows: int, columns: int, args: Any) -> None:
        a, a_stride, b, b_stride, c, c_stride, n = args
        places = {
            (i, j): _at(builder, c, builder.add(builder.mul(c_stride, i64(i)), i64(64 * j)), _FLOATS)
            for i in range(rows)
            for j in range(columns)
        }

        def turn(step: Any, sums: Any) -> Any:
            here, after = builder.mul(step, b_stride), {}
            right = [_load_words(builder, b, builder.add(here, i64(width * j)), kind) for j in range(columns)]
            for i in range(rows):
                offset = builder.add(builder.mul(a_stride, i64(i)), builder.mul(step, i64(4)))
                word = builder.load(_at(builder, a, offset, _I32 if pairs else _F32), align=4)
                left = splat(builder, word, _WORDS if pairs else _FLOATS)
                for j in range(columns):
                    after[i, j] = multiply_add(builder, pairs, left, right[j], sums[i, j])
            return after

        kind = "float32" if pairs else dtype
        sums = loop(builder, n, {cell: builder.load(place, align=4) for cell, place in places.items()}, turn)
        for cell, place in places.items():
            builder.store(sums[cell], place, align=4)

    def emit_all(builder: Any, n_rows: Any, n_columns: Any, *args: Any) -> None:
        cases = {8 * rows + columns: partial(emit, builder, rows, columns, args) for rows, columns in shapes}
        switch(builder, builder.add(builder.mul(n_rows, i64(8)), n_columns), cases)

    return intrinsic_of(f"multiply {pairs} {dtype} {shapes}", types.void(*[types.intp] * 9), emit_all)


def add_pairs(n: int) -> Callable[..., Any]:
    """Return an intrinsic that computes `C [rows, 32·columns] += A [rows, 2n] · B [2n, 32·columns]`, bfloat16, as lies.

    The intrinsic takes `(rows, columns, a, a_stride, b, b_stride, c, c_stride)`: 1 to 4 rows and 1 or 2 columns; the
    address of each matrix, followed by the bytes between its rows. C is float32. A row of A has n words: of numbers i
    and i + n. The same rows of B are put side by side in registers, so B is not packed. Only for `PAIRS`.
    """
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)
    lanes = [(8 * lane + e, 2 * LANES + 8 * lane + e) for lane in range(4) for e in range(8)]
    # Registers have the columns 0..3 and 4..7 of each 8: an instruction does not mix quarters of registers.
    mixed = [[i for pair in lanes if (pair[0] % 8 < 4) is (part == 0) for i in pair] for part in (0, 1)]
    order = [[part * LANES + 4 * quarter + e for part in (0, 1) for e in range(4)] for quarter in range(4)]

    def turned(builder: Any, first: Any, second: Any, orders: list[list[int]]) -> tuple[Any, Any]:
        kind = ir.VectorType(_I32, LANES)
        found = [builder.shuffle_vector(first, second, ir.Constant(kind, chosen)) for chosen in orders]
        return found[0], found[1]

    in_order = [order[0] + order[1], order[2] + order[3]]
    apart = [[8 * quarter + 4 * part + e for quarter in range(4) for e in range(4)] for part in (0, 1)]

    def emit(builder: Any, rows: int, columns: int, args: Any) -> None:
        a, a_stride, b, b_stride, c, c_stride = args

        def place(i: int, j: int, part: int) -> Any:
            return _at(builder, c, builder.add(builder.mul(c_stride, i64(i)), i64(128 * j + 64 * part)), _FLOATS)

        starts = {}
        for i in range(rows):
            for j in range(columns):
                first, second = (builder.load(place(i, j, part), align=4) for part in (0, 1))
                starts[i, j, 0], starts[i, j, 1] = turned(builder, first, second, apart)

        def turn(step: Any, sums: Any) -> Any:
            here, right, after = builder.mul(step, b_stride), {}, {}
            there = builder.add(here, builder.mul(b_stride, i64(n)))
            for j in range(columns):
                pair = [
                    builder.load(_at(builder, b, builder.add(at, i64(64 * j)), halves), align=2) for at in (here, there)
                ]
                for part in (0, 1):
                    chosen = ir.Constant(ir.VectorType(_I32, 2 * LANES), mixed[part])
                    right[j, part] = builder.bitcast(builder.shuffle_vector(*pair, chosen), _WORDS)
            for i in range(rows):
                offset = builder.add(builder.mul(a_stride, i64(i)), builder.mul(step, i64(4)))
                left = splat(builder, builder.load(_at(builder, a, offset, _I32), align=4), _WORDS)
                for (j, part), words in right.items():
                    after[i, j, part] = multiply_add(builder, True, left, words, sums[i, j, part])
            return after

        sums = loop(builder, i64(n), starts, turn)
        for i in range(rows):
            for j in range(columns):
                for part, found in enumerate(turned(builder, sums[i, j, 0], sums[i, j, 1], in_order)):
                    builder.store(found, place(i, j, part), align=4)

    def emit_all(builder: Any, n_rows: Any, n_columns: Any, *args: Any) -> None:
        if PAIRS:
            shapes = [(rows, columns) for rows in (4, 3, 2, 1) for columns in (2, 1)]
            cases = {8 * rows + columns: partial(emit, builder, rows, columns, args) for rows, columns in shapes}
            switch(builder, builder.add(builder.mul(n_rows, i64(8)), n_columns), cases)

    return intrinsic_of(f"add pairs {n}", types.void(*[types.intp] * 8), emit_all)


def dots(pairs: bool, dtype: str, columns: dict[int, int], chains: int = 1, lanes: int = LANES) -> Callable[..., Any]:
    """Return an intrinsic that computes the product `Q · Kᵀ` of a few rows of Q with a few rows of K in a kernel.

    The intrinsic takes `(rows, q, q_stride, k, k_stride, out, out_stride, n)`: the number of rows of Q; the address of
    each matrix, followed by the bytes between its rows; and the number of steps, n ≥ 1. `columns` maps each number of
    rows of Q to the number of rows of K. Both matrices are read in place. One step takes `chains` vectors of 16 numbers
    of each row, and adds the products of each vector to a sum of its own. Q and the result are float32, and K is of
    `dtype`. With `pairs`, Q and K are bfloat16, and a vector has 32 numbers. A vector has at least `rows · columns`
    lanes. The order of a sum does not depend on `rows` and `columns`.
    """
    kind = "float32" if pairs else dtype

    def emit(builder: Any, rows: int, n_keys: int, args: Any) -> None:
        q, q_stride, k, k_stride, out, out_stride, n = args
        zero = ir.Constant(ir.VectorType(_F32, lanes), [0.0] * lanes)
        starts = dict.fromkeys(_cells(rows, n_keys, chains), zero)
        after = _added(builder, pairs, kind, starts, (q, q_stride, k, k_stride, n), lanes)
        _put_dots(builder, rows, n_keys, after, out, out_stride, lanes)

    def emit_all(builder: Any, n_rows: Any, *args: Any) -> None:
        switch(builder, n_rows, {rows: partial(emit, builder, rows, n, args) for rows, n in columns.items()})

    return intrinsic_of(f"dots {pairs} {dtype} {columns} {chains} {lanes}", types.void(*[types.intp] * 8), emit_all)


def add_dots(dtype: str, rows: int, n_keys: int, chains: int) -> Callable[..., Any]:
    """Return the intrinsic `(q, q_stride, k, k_stride, sums, n)`, which does some steps of `dots`.

    It adds to vectors `sums [chains · rows · n_keys, 16]` in memory. They have the results of `dots` once all steps are
    done, and `put_dots` has added up each of them. So steps can be done in pieces for which a cache has space.
    """
    floats, cells = ir.VectorType(_F32, LANES), _cells(rows, n_keys, chains)

    def emit(builder: Any, *args: Any) -> None:
        *matrices, sums, n = args
        places = {cell: _at(builder, sums, i64(4 * LANES * i), floats) for i, cell in enumerate(cells)}
        starts = {cell: builder.load(places[cell], align=4) for cell in cells}
        after = _added(builder, False, dtype, starts, (*matrices, n), LANES)
        for cell in cells:
            builder.store(after[cell], places[cell], align=4)

    return intrinsic_of(f"add dots {dtype} {rows} {n_keys} {chains}", types.void(*[types.intp] * 6), emit)


def put_dots(rows: int, n_keys: int, chains: int) -> Callable[..., Any]:
    """Return the intrinsic `(sums, out, out_stride)`, which writes what `add_dots` has added up, `[rows, n_keys]`."""
    floats, cells = ir.VectorType(_F32, LANES), _cells(rows, n_keys, chains)

    def emit(builder: Any, sums: Any, out: Any, out_stride: Any) -> None:
        places = (_at(builder, sums, i64(4 * LANES * i), floats) for i in range(len(cells)))
        after = {cell: builder.load(place, align=4) for cell, place in zip(cells, places, strict=True)}
        _put_dots(builder, rows, n_keys, after, out, out_stride, LANES)

    return intrinsic_of(f"put dots {rows} {n_keys} {chains}", types.void(*[types.intp] * 3), emit)


def _cells(rows: int, n_keys: int, chains: int) -> list[tuple[int, int, int]]:
    """Return the keys of the partial sums of `dots`: a chain, a row of Q, a row of K."""
    return [(chain, i, j) for chain in range(chains) for j in range(n_keys) for i in range(rows)]


def _added(
    builder: Any, pairs: bool, kind: str, starts: dict[tuple[int, int, int], Any], args: Any, lanes: int
) -> dict[tuple[int, int, int], Any]:
    """Emit steps of `dots`, from the partial sums `starts` on; return those after the last step."""
    q, q_stride, k, k_stride, n = args
    chains, n_bytes = 1 + max(chain for chain, _, _ in starts), 4 * lanes
    width = n_bytes if pairs else lanes * ITEMSIZE[kind]

    def turn(step: Any, sums: Any) -> Any:
        left, right, after = {}, {}, {}
        for chain, i, j in starts:
            if j == 0:
                here = builder.add(builder.mul(step, i64(n_bytes * chains)), i64(n_bytes * chain))
                at = builder.add(builder.mul(q_stride, i64(i)), here)
                left[i] = _load_words(builder, q, at, "float32", lanes)
            if i == 0:
                there = builder.add(builder.mul(step, i64(width * chains)), i64(width * chain))
                right[j] = _load_words(builder, k, builder.add(builder.mul(k_stride, i64(j)), there), kind, lanes)
            after[chain, i, j] = multiply_add(builder, pairs, left[i], right[j], sums[chain, i, j])
        return after

    return loop(builder, n, starts, turn)


def _put_dots(builder: Any, rows: int, n_keys: int, after: Any, out: Any, out_stride: Any, lanes: int) -> None:
    """Emit the addition of each cell's partial sums, and store the results, `[rows, n_keys]`."""
    chains = 1 + max(chain for chain, _, _ in after)
    sums = [after[0, i, j] for i in range(rows) for j in range(n_keys)]
    for chain in range(1, chains):
        sums = [builder.fadd(sums[i * n_keys + j], after[chain, i, j]) for i in range(rows) for j in range(n_keys)]
    zero = ir.Constant(ir.VectorType(_F32, lanes), [0.0] * lanes)
    sums += [zero] * ((1 << (len(sums) - 1).bit_length()) - len(sums))
    for distance in _halves(lanes):
        if distance < len(sums):  # two vectors become one vector with the partial sums of both
            halves = [exchanged(builder, sums[i], sums[i + distance], distance) for i in range(distance)]
            sums = [builder.fadd(*pair) for pair in halves]
        else:
            order = ir.Constant(ir.VectorType(_I32, lanes), [lane ^ distance for lane in range(lanes)])
            sums = [builder.fadd(each, builder.shuffle_vector(each, each, order)) for each in sums]
    for i in range(rows):
        chosen = ir.Constant(ir.VectorType(_I32, n_keys), list(range(i * n_keys, (i + 1) * n_keys)))
        part = builder.shuffle_vector(sums[0], sums[0], chosen)
        place = _at(builder, out, builder.mul(out_stride, i64(i)), ir.VectorType(_F32, n_keys))
        builder.store(part, place, align=4)


def _halves(lanes: int) -> list[int]:
    """Return `[lanes/2, lanes/4, ..., 1]`: the distances in a sum over lanes or a transposition."""
    return [lanes >> i for i in range(1, lanes.bit_length())]


def loop(builder: Any, n: Any, starts: dict[Any, Any], turn: Callable[..., dict[Any, Any]]) -> dict[Any, Any]:
    """Emit a loop of n ≥ 1 steps that updates a dict of values in registers; return the values after the last step.

    `starts` has the values before the first step. `turn(step, values)` emits one step and returns the values after it.
    """
    before, body = builder.block, builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(body)
    builder.position_at_end(body)
    step = builder.phi(_I64)
    values = {cell: builder.phi(start.type) for cell, start in starts.items()}
    after = turn(step, values)
    following = builder.add(step, i64(1))
    for phi, first, last in [(step, i64(0), following), *((values[x], starts[x], after[x]) for x in starts)]:
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, n), body, end)
    builder.position_at_end(end)
    return after


def switch(builder: Any, number: Any, cases: dict[int, Any]) -> None:
    """Emit a switch on the integer `number`; `cases` maps each possible number to a function that emits its code."""
    blocks = {value: builder.append_basic_block("case") for value in cases}
    end = builder.append_basic_block("chosen")
    chosen = builder.switch(number, list(blocks.values())[-1])
    for value, emit in cases.items():
        chosen.add_case(i64(value), blocks[value])
        builder.position_at_end(blocks[value])
        emit()
        builder.branch(end)
    builder.position_at_end(end)


def transpose(dtype: str, pairs: bool) -> Callable[..., Any]:
    """Return the intrinsic `(source, source_stride, target, target_stride)`, which transposes 16 rows of 16 words.

    `source` and `target` are addresses, each followed by the bytes between rows. A word is a float32 number, widened
    from `dtype`, or with `pairs` two bfloat16 numbers, which stay together.
    """

    lanes = LANES if WIDE else LANES // 2  # all vectors of a block of lanes * lanes words fit in registers

    def emit(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
        kind = "float32" if pairs else dtype
        for first in range(0, LANES, lanes):
            for word in range(0, LANES, lanes):
                places = [
                    builder.add(builder.mul(source_stride, i64(first + i)), i64(ITEMSIZE[kind] * word))
                    for i in range(lanes)
                ]
                rows = [_load_words(builder, source, place, kind, lanes) for place in places]
                for i, row in enumerate(transposed(builder, rows)):
                    place = builder.add(builder.mul(target_stride, i64(word + i)), i64(4 * first))
                    builder.store(row, _at(builder, target, place, row.type), align=4)

    return intrinsic_of(f"transpose {dtype} {pairs}", types.void(*[types.intp] * 4), emit)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Emit the transposition of n vectors of n words."""
    rows = list(rows)
    for distance in _halves(len(rows)):
        for i in range(len(rows)):
            if not i & distance:
                rows[i], rows[i + distance] = exchanged(builder, rows[i], rows[i + distance], distance)
    return rows


def exchanged(builder: Any, first: Any, second: Any, distance: int) -> tuple[Any, Any]:
    """Emit one step of a transposition of two vectors, on blocks of `2 · distance` lanes; return both new vectors.

    The upper half of each block of `first` changes places with the lower half of the same block of `second`.
    """
    lanes = first.type.count
    low = [e if not e & distance else lanes + e - distance for e in range(lanes)]
    high = [e + distance if not e & distance else lanes + e for e in range(lanes)]
    kind = ir.VectorType(_I32, lanes)
    result = (builder.shuffle_vector(first, second, ir.Constant(kind, chosen)) for chosen in (low, high))
    return next(result), next(result)


def _load_words(builder: Any, address: Any, offset: Any, dtype: str, lanes: int = LANES) -> Any:
    """Emit a load of `lanes` numbers of a dtype, widened to float32, as words with the bits of the float32 numbers."""
    words = ir.VectorType(_I32, lanes)
    if dtype == "float32":
        return builder.load(_at(builder, address, offset, words), align=4)
    if dtype == "float16":
        half = builder.load(_at(builder, address, offset, ir.VectorType(ir.HalfType(), lanes)), align=2)
        return builder.bitcast(builder.fpext(half, ir.VectorType(_F32, lanes)), words)
    bits = builder.load(_at(builder, address, offset, ir.VectorType(ir.IntType(16), lanes)), align=2)
    return builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * lanes))


def widen(dtype: str) -> Callable[..., Any]:
    """Return the intrinsic `(source, target)`: it copies 16 numbers of a dtype at an address to another, as float32."""

    def emit(builder: Any, source: Any, target: Any) -> None:
        builder.store(_load_words(builder, source, i64(0), dtype), _at(builder, target, i64(0), _WORDS), align=4)

    return intrinsic_of(f"widen {dtype}", types.void(types.intp, types.intp), emit)


def fetch(builder: Any, address: Any, nearness: int = 3) -> None:
    """Emit a request for the cache line of any address: with 3, to the nearest cache; with 2, to the one behind it."""
    line = builder.inttoptr(address, ir.PointerType(ir.IntType(8)))
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [line, _I32(0), _I32(nearness), _I32(1)])


def _largest(builder: Any, address: Any, n: Any) -> Any:
    def turn(step: Any, best: Any) -> Any:
        row = builder.load(_at(builder, address, builder.mul(step, i64(4 * LANES)), _FLOATS), align=4)
        return {0: builder.select(builder.fcmp_ordered(">", row, best[0]), row, best[0])}

    start = builder.load(_at(builder, address, i64(0), _FLOATS), align=4)
    larger = loop(builder, builder.lshr(n, i64(4)), {0: start}, turn)[0]
    for distance in (8, 4, 2, 1):
        order = ir.Constant(_WORDS, [(e + distance) % LANES for e in range(LANES)])
        other = builder.shuffle_vector(larger, larger, order)
        larger = builder.select(builder.fcmp_ordered(">", other, larger), other, larger)
    return builder.extract_element(larger, ir.Constant(_I32, 0))


def _take(builder: Any, address: Any) -> Any:
    return builder.atomic_rmw("add", _at(builder, address, i64(0), _I64), i64(1), "acq_rel")


# `largest(address, n)` returns the largest of the n float32 numbers at an address; n is a multiple of 16.
largest = intrinsic_of("largest", types.float32(types.intp, types.intp), _largest)
# `take(address)` atomically adds 1 to the integer at an address and returns its old value, so that threads can take
# numbered tasks from a queue. After a call, a thread sees what other threads wrote before their earlier calls.
take = intrinsic_of("take", types.intp(types.intp), _take)
# `prefetch(address)` asks the processor to bring the cache line of any address near. `prefetch_far` brings a line to
# L2, where more requests may be open at once.
prefetch = intrinsic_of("prefetch", types.void(types.intp), fetch)
prefetch_far = intrinsic_of("prefetch far", types.void(types.intp), partial(fetch, nearness=2))
