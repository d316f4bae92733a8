"""Register tiles: products of two small matrices whose sums stay in vector registers, for all kernels and kinds.

A tile has a sum for each pair of a row of the left operand and a column, a vector, of the right one. `tile` emits the
loop over what is summed; the other functions say what is loaded, and where the sums begin and end:

    multiply    C += A · B      the left operand is a word in all lanes, the right one 16 neighbouring words of a row
    add_pairs   C += A · B      the same, with two rows of B put side by side in registers
    dots        Q · Kᵀ          both operands are neighbouring words of a row, so sums are added over lanes at the end

`vectors.WORD_BYTES` has the kinds of words. A sum is in order over the loop, whatever the number of rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import product
from typing import Any

from llvmlite import ir

from lce.kernels.runtime import vectors as emit
from lce.kernels.runtime.shared import LANES
from lce.kernels.runtime.vectors import F32, FLOATS, I32, PAIRS, WORD_BYTES, WORDS


def cells(value: Any, chains: int, rows: int, columns: int) -> dict[Any, Any]:
    """Return the sums of a tile, by chain, row and column, with the same value in all."""
    return dict.fromkeys(product(range(chains), range(rows), range(columns)), value)


def tile(builder: Any, n: Any, starts: dict[Any, Any], operands: Callable[..., Any], add: Any) -> dict[Any, Any]:
    """Emit a loop of n ≥ 1 steps of `sums[chain, i, j] += left[i] · right[j]`; return the sums after the last one.

    `operands(step)` emits a step's loads and yields `(chain, left, right)`, the vectors of all rows and of all columns,
    once or more. Chains are sums of their own, so that no addition waits for the one before it. `add(x, y, total)`
    emits a multiplication and addition. Instructions of a step: one for each sum, and one for each operand.
    """

    def turn(step: Any, sums: dict[Any, Any]) -> dict[Any, Any]:
        after = dict(sums)
        for chain, left, right in operands(step):
            for i, x in enumerate(left):
                for j, y in enumerate(right):
                    after[chain, i, j] = add(x, y, after[chain, i, j])
        return after

    return emit.loop(builder, n, starts, turn)


def by_shape(name: str, shapes: Sequence[tuple[int, ...]], n_args: int, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the intrinsic of `body(builder, *shape, *args)`: its first arguments choose one of the shapes.

    A shape is one to three numbers, the last ones below 8: of rows, say, or of rows and columns.
    """
    size = len(shapes[0])

    def emit_all(builder: Any, *args: Any) -> None:
        chosen = reduce(lambda number, x: builder.add(builder.mul(number, emit.i64(8)), x), args[:size])
        blocks = [builder.append_basic_block("shape") for _ in shapes]
        end, choice = builder.append_basic_block("end"), builder.switch(chosen, blocks[-1])
        for shape, block in zip(shapes, blocks, strict=True):
            choice.add_case(emit.i64(reduce(lambda number, x: 8 * number + x, shape)), block)
            builder.position_at_end(block)
            body(builder, *shape, *args[size:])
            builder.branch(end)
        builder.position_at_end(end)

    return emit.procedure(f"{name} {shapes}", size + n_args, emit_all)


def splats(builder: Any, kind: Any, rows: int, a: Any, a_stride: Any, step: Any) -> Iterator[Any]:
    """Emit loads of a word of each row of a matrix, number `step` of the row, into all lanes of a vector."""
    return (emit.load_splat(builder, kind, a, (a_stride, i), (step, 4)) for i in range(rows))


def multiply(kind: str, shapes: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    """Return an intrinsic that computes `C [rows, 16·columns] += A [rows, n] · B [n, 16·columns]` in a kernel.

    The intrinsic takes `(rows, columns, a, a_stride, b, b_stride, c, c_stride, n)`: rows and columns of 16 words, a
    pair of `shapes`; the address of each matrix, followed by the bytes between its rows; and n ≥ 1. A and C are
    float32, and B is of `kind`: with "pairs", A and B consist of pairs of bfloat16 numbers.
    """
    width = LANES * WORD_BYTES[kind]

    def body(builder: Any, rows: int, columns: int, *args: Any) -> None:
        a, a_stride, b, b_stride, c, c_stride, n = args

        def right(step: Any) -> list[Any]:
            return [emit.load_words(builder, kind, LANES, b, (step, b_stride), width * j) for j in range(columns)]

        _add_product(builder, kind == "pairs", rows, columns, n, right, a, a_stride, c, c_stride)

    return by_shape(f"multiply {kind}", shapes, 7, body)


def add_pairs(counts: tuple[int, ...]) -> Callable[..., Any]:
    """Return an intrinsic that computes `C [rows, 32·columns] += A [rows, 2n] · B [2n, 32·columns]`, bfloat16, as lies.

    The intrinsic takes `(n, rows, columns, a, a_stride, b, b_stride, c, c_stride)`: n is one of `counts`, and there are
    1 to 4 rows and 1 or 2 columns. C is float32. A row of A has n words: of numbers i and i + n. The same rows of B are
    put side by side in registers, so B is not packed. Only for `PAIRS`.
    """
    numbers = ir.VectorType(ir.IntType(16), 2 * LANES)
    # Sums have the columns 0..3 of each 8, or 4..7: an instruction does not mix quarters of registers.
    order = [8 * quarter + 4 * part + e for part in (0, 1) for quarter in range(4) for e in range(4)]
    mixed = [[number for e in some for number in (e, 2 * LANES + e)] for some in (order[:LANES], order[LANES:])]

    def body(builder: Any, n: int, rows: int, columns: int, *args: Any) -> None:
        a, a_stride, b, b_stride, c, c_stride = args

        def right(step: Any) -> list[Any]:
            here, found = builder.mul(step, b_stride), []
            there = emit.at(builder, here, (b_stride, n))
            for j in range(columns):
                first, second = (emit.load(builder, numbers, b, offset, 64 * j) for offset in (here, there))
                found += [builder.bitcast(emit.shuffle(builder, first, second, lanes), WORDS) for lanes in mixed]
            return found

        _add_product(builder, True, rows, 2 * columns, emit.i64(n), right, a, a_stride, c, c_stride, order)

    shapes = tuple(product(counts, (4, 3, 2, 1), (2, 1)))
    return by_shape("add pairs", shapes, 6, body if PAIRS else lambda *_: None)


def _add_product(
    builder: Any, pairs: bool, rows: int, columns: int, n: Any, right: Callable[..., Any], *args: Any
) -> None:
    """Emit what `multiply` does: `right(step)` emits a row of B. `args` are A and C, and perhaps an order of columns.

    The order is that in which two neighbouring sums have the columns of two vectors of C.
    """
    a, a_stride, c, c_stride, *orders = args
    places = {cell: emit.at(builder, c, (c_stride, cell[1]), 64 * cell[2]) for cell in cells(0, 1, rows, columns)}

    def operands(step: Any) -> Iterator[Any]:
        found = right(step)
        yield 0, splats(builder, WORDS if pairs else FLOATS, rows, a, a_stride, step), found

    def ordered(sums: dict[Any, Any], order: list[int]) -> dict[Any, Any]:
        return {
            (0, i, j): emit.shuffle(builder, sums[0, i, j & ~1], sums[0, i, j | 1], order[LANES * (j % 2) :][:LANES])
            for _, i, j in sums
        }

    sums = {cell: emit.load(builder, FLOATS, place) for cell, place in places.items()}
    for order in orders:
        sums = ordered(sums, order)
    sums = tile(builder, n, sums, operands, partial(emit.multiply_add, builder, pairs))
    for order in orders:
        sums = ordered(sums, sorted(range(len(order)), key=order.__getitem__))
    for cell, place in places.items():
        emit.store(builder, sums[cell], place)


def dots(
    kind: str, columns: dict[int, int], chains: int = 1, lanes: int = LANES, begins: bool = True, ends: bool = True
) -> Callable[..., Any]:
    """Return an intrinsic that computes the product `Q · Kᵀ` of a few rows of Q with a few rows of K in a kernel.

    The intrinsic takes `(rows, q, q_stride, k, k_stride, out, out_stride, n)`: the number of rows of Q; the address of
    each matrix, followed by the bytes between its rows; and the number of steps, n ≥ 1. `columns` maps each number of
    rows of Q to the number of rows of K. Both matrices are read in place. One step takes `chains` vectors of words of
    each row. K is of `kind`, and the result is float32. Q is float32 too, but bfloat16 with "pairs", and of 16-bit
    integers with "int8", whose sums do not round. A vector has at least `rows · columns` lanes.

    Steps can be done in pieces for which a cache has space: an intrinsic that does not begin or does not end them takes
    one more address, of vectors `[chains · rows · columns, lanes]`, which have the sums meanwhile.
    """
    vector = ir.VectorType(I32 if kind == "int8" else F32, lanes)
    width = WORD_BYTES[kind] * lanes

    def body(builder: Any, rows: int, q: Any, q_stride: Any, k: Any, k_stride: Any, *args: Any) -> None:
        out, out_stride, n, *held = args

        def operands(step: Any) -> Iterator[Any]:
            for chain in range(chains):
                of_q, of_k = (
                    emit.at(builder, emit.i64(size * chain), (step, size * chains)) for size in (4 * lanes, width)
                )
                right = [emit.load_words(builder, "float32", lanes, q, (q_stride, i), of_q) for i in range(rows)]
                left = (emit.load_words(builder, kind, lanes, k, (k_stride, j), of_k) for j in range(columns[rows]))
                yield chain, left, right

        sums = cells(emit.const(vector, 0), chains, columns[rows], rows)
        if not begins:
            sums = {cell: emit.load(builder, vector, *held, 4 * lanes * i) for i, cell in enumerate(sums)}
        sums = tile(builder, n, sums, operands, partial(emit.multiply_add, builder, kind == "pairs"))
        if ends:
            _put(builder, sums, out, out_stride)
        for i, cell in enumerate({} if ends else sums):
            emit.store(builder, sums[cell], *held, 4 * lanes * i)

    name = f"dots {kind} {columns} {chains} {lanes} {begins} {ends}"
    return by_shape(name, [(rows,) for rows in columns], 7 if begins and ends else 8, body)


def _put(builder: Any, sums: dict[Any, Any], out: Any, out_stride: Any) -> None:
    """Emit the addition of a tile's sums over chains and lanes, and store the results, `[rows, n_keys]`."""
    chains, n_keys, rows = (1 + last for last in max(sums))
    of_cells = ([sums[chain, j, i] for chain in range(chains)] for i, j in product(range(rows), range(n_keys)))
    found = _folded(builder, [reduce(partial(emit.plus, builder), of_cell) for of_cell in of_cells])
    if found.type.element == I32:
        found = builder.sitofp(found, ir.VectorType(F32, found.type.count))
    for i in range(rows):
        some = emit.shuffle(builder, found, found, range(i * n_keys, (i + 1) * n_keys))
        emit.store(builder, some, out, (out_stride, i))


def _folded(builder: Any, sums: list[Any]) -> Any:
    """Emit the additions of the lanes of each of n vectors: a vector whose lane i is the sum of the vector i."""
    lanes = sums[0].type.count
    sums = sums + [emit.const(sums[0].type, 0)] * ((1 << (len(sums) - 1).bit_length()) - len(sums))
    for distance in emit.halves(lanes):
        if distance < len(sums):  # two vectors become one vector with the partial sums of both
            pairs = [emit.exchanged(builder, sums[i], sums[i + distance], distance) for i in range(distance)]
        else:
            order = [lane ^ distance for lane in range(lanes)]
            pairs = [(each, emit.shuffle(builder, each, each, order)) for each in sums]
        sums = [emit.plus(builder, *pair) for pair in pairs]
    return sums[0]
