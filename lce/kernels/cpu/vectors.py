"""The inner loops that compilers do not find on their own, as vectors of 16 numbers.

LLVM translates such vectors for any processor: one instruction each where it has AVX-512, several where it has not.
`PAIRS` says whether this one multiplies pairs of bfloat16 numbers (AVX512_BF16): twice the speed of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llvmlite import ir
from numba import types

from lce.kernels.cpu.compiling import features, intrinsic_of

LANES = 16
PAIRS = "avx512bf16" in features()

_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


class _BFloat(ir.HalfType):
    """LLVM's bfloat type, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_PAIRED = ir.VectorType(_BFloat(), 2 * LANES)


def _const(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """Return a pointer to `kind`, `offset` bytes after an address."""
    return builder.inttoptr(builder.add(address, offset), ir.PointerType(kind))


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def multiply(pairs: bool, dtype: torch.dtype) -> Callable[..., Any]:
    """Make the product that everything rests on: `C [rows, 16·columns] += A [rows, n] · B [n, 16·columns]`.

    The intrinsic takes `(rows, columns, a, a_stride, b, b_stride, c, c_stride, n)`: 6, 4, 2 or 1 rows, 4, 2 or 1
    columns, addresses, strides in bytes, and n, 1 or more. A and C are float32, and B is of `dtype`. With `pairs`, A
    and B are words of two bfloat16 numbers, whose products are added to C both. C stays in registers: `rows · columns`
    of them, and `columns` for B. Each number of C is one sum over n in order, so that it does not depend on `rows` and
    `columns`.
    """
    width = 64 if pairs else 16 * dtype.itemsize  # bytes of a vector of B

    def emit(builder: Any, rows: int, columns: int, args: Any) -> None:
        a, a_stride, b, b_stride, c, c_stride, n = args
        multiply_add = multiply_add_of(builder.module, pairs)
        places = {
            (i, j): _at(builder, c, builder.add(builder.mul(c_stride, _const(i)), _const(64 * j)), _FLOATS)
            for i in range(rows)
            for j in range(columns)
        }

        def turn(step: Any, sums: Any) -> Any:
            here, after = builder.mul(step, b_stride), {}
            right = [_load_words(builder, b, builder.add(here, _const(width * j)), kind) for j in range(columns)]
            for i in range(rows):
                offset = builder.add(builder.mul(a_stride, _const(i)), builder.mul(step, _const(4)))
                word = builder.load(_at(builder, a, offset, _I32 if pairs else _F32), align=4)
                left = _splat(builder, word, _WORDS if pairs else _FLOATS)
                for j in range(columns):
                    factors = [builder.bitcast(x, _PAIRED if pairs else _FLOATS) for x in (left, right[j])]
                    after[i, j] = builder.call(
                        multiply_add, [sums[i, j], *factors] if pairs else [*factors, sums[i, j]]
                    )
            return after

        kind = torch.float32 if pairs else dtype
        sums = _loop(builder, n, {cell: builder.load(place, align=4) for cell, place in places.items()}, turn)
        for cell, place in places.items():
            builder.store(sums[cell], place, align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shapes = [(rows, columns) for rows in (6, 4, 2, 1) for columns in (4, 2, 1)]
        number = builder.add(builder.mul(args[0], _const(8)), args[1])
        cases = {8 * rows + columns: partial(emit, builder, rows, columns, args[2:]) for rows, columns in shapes}
        _switch(builder, number, cases)
        return context.get_dummy_value()

    return intrinsic_of(f"multiply {pairs} {dtype}", types.void(*[types.intp] * 9), generate)


def dots(pairs: bool, dtype: torch.dtype, columns: dict[int, int], chains: int = 1) -> Callable[..., Any]:
    """Make dot products of some vectors with others, all read in place: `Q · Kᵀ` of few queries.

    The intrinsic takes `(rows, q, q_stride, k, k_stride, out, out_stride, n)`: the number of vectors of Q, which
    `columns` maps to the number of vectors of K, addresses, strides in bytes, and how many steps a vector has, 1 or
    more. A step is `chains` vectors of 16 numbers, each of which has a sum of its own. Q and the result are float32, K
    is of `dtype`; with `pairs`, both are bfloat16, and a vector has 32 numbers. `rows · columns` is a power of two.
    Each result is added up in the same order, whatever `rows` and `columns` are.
    """
    width, kind = 64 if pairs else 16 * dtype.itemsize, torch.float32 if pairs else dtype

    def emit(builder: Any, rows: int, n_keys: int, args: Any) -> None:
        q, q_stride, k, k_stride, out, out_stride, n = args
        multiply_add = multiply_add_of(builder.module, pairs)
        cells = [(chain, i, j) for chain in range(chains) for j in range(n_keys) for i in range(rows)]

        def turn(step: Any, sums: Any) -> Any:
            left, right, after = {}, {}, {}
            for chain, i, j in cells:
                if j == 0:
                    here = builder.add(builder.mul(step, _const(64 * chains)), _const(64 * chain))
                    at = builder.add(builder.mul(q_stride, _const(i)), here)
                    left[i] = _load_words(builder, q, at, torch.float32)
                if i == 0:
                    there = builder.add(builder.mul(step, _const(width * chains)), _const(width * chain))
                    right[j] = _load_words(builder, k, builder.add(builder.mul(k_stride, _const(j)), there), kind)
                factors = [builder.bitcast(x, _PAIRED if pairs else _FLOATS) for x in (left[i], right[j])]
                own = sums[chain, i, j]
                after[chain, i, j] = builder.call(multiply_add, [own, *factors] if pairs else [*factors, own])
            return after

        after = _loop(builder, n, dict.fromkeys(cells, ir.Constant(_FLOATS, [0.0] * LANES)), turn)
        sums = [after[0, i, j] for i in range(rows) for j in range(n_keys)]
        for chain in range(1, chains):
            sums = [builder.fadd(sums[i * n_keys + j], after[chain, i, j]) for i in range(rows) for j in range(n_keys)]
        for distance in (8, 4, 2, 1):
            if distance < len(sums):  # half as many vectors, each with the sums of twice as many
                halves = [exchanged(builder, sums[i], sums[i + distance], distance) for i in range(distance)]
                sums = [builder.fadd(*pair) for pair in halves]
            else:
                order = ir.Constant(_WORDS, [lane ^ distance for lane in range(LANES)])
                sums = [builder.fadd(each, builder.shuffle_vector(each, each, order)) for each in sums]
        for i in range(rows):
            lanes = ir.Constant(ir.VectorType(_I32, n_keys), list(range(i * n_keys, (i + 1) * n_keys)))
            part = builder.shuffle_vector(sums[0], sums[0], lanes)
            place = _at(builder, out, builder.mul(out_stride, _const(i)), ir.VectorType(_F32, n_keys))
            builder.store(part, place, align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cases = {rows: partial(emit, builder, rows, n_keys, args[1:]) for rows, n_keys in columns.items()}
        _switch(builder, args[0], cases)
        return context.get_dummy_value()

    return intrinsic_of(f"dots {pairs} {dtype} {columns} {chains}", types.void(*[types.intp] * 8), generate)


def _loop(builder: Any, n: Any, starts: dict[Any, Any], turn: Callable[..., dict[Any, Any]]) -> dict[Any, Any]:
    """Emit a loop of n turns, 1 or more, over values in registers: `turn(step, values)` returns them after a step."""
    before, loop = builder.block, builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(_I64)
    values = {cell: builder.phi(start.type) for cell, start in starts.items()}
    after = turn(step, values)
    following = builder.add(step, _const(1))
    for phi, first, last in [(step, _const(0), following), *((values[x], starts[x], after[x]) for x in starts)]:
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, n), loop, end)
    builder.position_at_end(end)
    return after


def _switch(builder: Any, number: Any, cases: dict[int, Any]) -> None:
    """Emit all cases, of which the number says which one runs."""
    blocks = {value: builder.append_basic_block("case") for value in cases}
    end = builder.append_basic_block("chosen")
    chosen = builder.switch(number, list(blocks.values())[-1])
    for value, emit in cases.items():
        chosen.add_case(_const(value), blocks[value])
        builder.position_at_end(blocks[value])
        emit()
        builder.branch(end)
    builder.position_at_end(end)


def transpose(dtype: torch.dtype, pairs: bool) -> Callable[..., Any]:
    """Make the intrinsic `(source, source_stride, target, target_stride)`: 16 rows of 16 words, transposed; strides in
    bytes.

    With `pairs` a word is two bfloat16 numbers that stay together. Else it is a float32, widened from `dtype`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, target_stride = args
        rows = []
        for i in range(LANES):
            offset = builder.mul(source_stride, _const(i))
            rows.append(_load_words(builder, source, offset, torch.float32 if pairs else dtype))
        rows = transposed(builder, rows)
        for i, row in enumerate(rows):
            builder.store(row, _at(builder, target, builder.mul(target_stride, _const(i)), _WORDS), align=4)
        return context.get_dummy_value()

    return intrinsic_of(f"transpose {dtype} {pairs}", types.void(*[types.intp] * 4), generate)


def multiply_add_of(module: Any, pairs: bool) -> Any:
    """Declare LLVM's own function: `(sum, x, y)` of pairs of bfloat16 numbers, or `(x, y, sum)` of float32."""
    if pairs:
        kind, name = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRED, _PAIRED]), "llvm.x86.avx512bf16.dpbf16ps.512"
    else:
        kind, name = ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
    found = module.globals.get(name)
    return found if found is not None else ir.Function(module, kind, name)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 words."""
    rows = list(rows)
    for distance in (8, 4, 2, 1):
        for i in range(LANES):
            if not i & distance:
                rows[i], rows[i + distance] = exchanged(builder, rows[i], rows[i + distance], distance)
    return rows


def exchanged(builder: Any, first: Any, second: Any, distance: int) -> tuple[Any, Any]:
    """Exchange lanes with and without the bit `distance`, of two vectors side by side: a step of a transposition."""
    low = [e if not e & distance else LANES + e - distance for e in range(LANES)]
    high = [e + distance if not e & distance else LANES + e for e in range(LANES)]
    result = (builder.shuffle_vector(first, second, ir.Constant(_WORDS, lanes)) for lanes in (low, high))
    return next(result), next(result)


def _load_words(builder: Any, address: Any, offset: Any, dtype: torch.dtype) -> Any:
    """Load 16 numbers of a dtype as the bits of 16 float32 numbers."""
    if dtype == torch.float32:
        return builder.load(_at(builder, address, offset, _WORDS), align=4)
    if dtype == torch.float16:
        half = builder.load(_at(builder, address, offset, ir.VectorType(ir.HalfType(), LANES)), align=2)
        return builder.bitcast(builder.fpext(half, _FLOATS), _WORDS)
    bits = builder.load(_at(builder, address, offset, ir.VectorType(ir.IntType(16), LANES)), align=2)
    return builder.shl(builder.zext(bits, _WORDS), ir.Constant(_WORDS, [16] * LANES))


def _largest(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    address, n = args

    def turn(step: Any, best: Any) -> Any:
        row = builder.load(_at(builder, address, builder.mul(step, _const(4 * LANES)), _FLOATS), align=4)
        return {0: builder.select(builder.fcmp_ordered(">", row, best[0]), row, best[0])}

    start = builder.load(_at(builder, address, _const(0), _FLOATS), align=4)
    larger = _loop(builder, builder.lshr(n, _const(4)), {0: start}, turn)[0]
    for distance in (8, 4, 2, 1):
        order = ir.Constant(_WORDS, [(e + distance) % LANES for e in range(LANES)])
        other = builder.shuffle_vector(larger, larger, order)
        larger = builder.select(builder.fcmp_ordered(">", other, larger), other, larger)
    return builder.extract_element(larger, ir.Constant(_I32, 0))


def _take(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.atomic_rmw("add", _at(builder, args[0], _const(0), _I64), _const(1), "acq_rel")


# The largest of n floats at an address, n a multiple of 16.
largest = intrinsic_of("largest", types.float32(types.intp, types.intp), _largest)
# The number at an address, which is counted up: a queue of tasks. Later threads see what a thread wrote before it.
take = intrinsic_of("take", types.intp(types.intp), _take)
