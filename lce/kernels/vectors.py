"""The inner loops that compilers do not find on their own, as vectors of 16 numbers.

LLVM translates such vectors for any processor: one instruction each where it has AVX-512, several where it has not.
`PAIRS` says whether this one multiplies pairs of bfloat16 numbers (AVX512_BF16): twice the speed of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
PAIRS = bool(llvm.get_host_cpu_features().get("avx512bf16", False))

_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


class _BFloat(ir.HalfType):
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


def _const(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to `kind`, `offset` bytes behind an address."""
    return builder.inttoptr(builder.add(address, offset), ir.PointerType(kind))


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def multiply(rows: int, columns: int, pairs: bool) -> Callable[..., Any]:
    """The product that everything rests on: `C [rows, 16·columns] += A [rows, n] · B [n, 16·columns]`.

    The intrinsic takes `(a, a_stride, b, b_stride, c, c_stride, n)`: addresses, strides in words of four bytes, and n,
    1 or more. C is float32. A and B are float32, or with `pairs` words of two bfloat16 numbers, whose products are
    added to C both. C stays in registers: `rows · columns` of them, and `columns` for B. Each number of C is one sum
    over n in order, so that it does not depend on `rows` and `columns`.
    """
    paired = ir.VectorType(_BFloat(), 2 * LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_stride, b, b_stride, c, c_stride, n = args
        module = builder.module
        if pairs:
            kind = ir.FunctionType(_FLOATS, [_FLOATS, paired, paired])
            multiply_add = _declared(module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        else:
            multiply_add = _declared(module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32")
        a_row, b_row, c_row = (builder.mul(x, _const(4)) for x in (a_stride, b_stride, c_stride))
        cells = [(i, j) for i in range(rows) for j in range(columns)]
        places = {
            (i, j): _at(builder, c, builder.add(builder.mul(c_row, _const(i)), _const(64 * j)), _FLOATS)
            for i, j in cells
        }
        sums = {cell: builder.load(places[cell], align=4) for cell in cells}
        before, loop = builder.block, builder.append_basic_block("multiply")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(_I64)
        step.add_incoming(_const(0), before)
        phis = {cell: builder.phi(_FLOATS) for cell in cells}
        here = builder.mul(step, b_row)
        right = [
            builder.load(_at(builder, b, builder.add(here, _const(64 * j)), _WORDS if pairs else _FLOATS), align=4)
            for j in range(columns)
        ]
        after = {}
        for i in range(rows):
            offset = builder.add(builder.mul(a_row, _const(i)), builder.mul(step, _const(4)))
            word = builder.load(_at(builder, a, offset, _I32 if pairs else _F32), align=4)
            left = _splat(builder, word, _WORDS if pairs else _FLOATS)
            for j in range(columns):
                if pairs:
                    factors = builder.bitcast(left, paired), builder.bitcast(right[j], paired)
                    after[i, j] = builder.call(multiply_add, [phis[i, j], *factors])
                else:
                    after[i, j] = builder.call(multiply_add, [left, right[j], phis[i, j]])
        following = builder.add(step, _const(1))
        step.add_incoming(following, builder.block)
        for cell in cells:
            phis[cell].add_incoming(sums[cell], before)
            phis[cell].add_incoming(after[cell], builder.block)
        end = builder.append_basic_block("multiplied")
        builder.cbranch(builder.icmp_signed("<", following, n), loop, end)
        builder.position_at_end(end)
        for cell in cells:
            builder.store(after[cell], places[cell], align=4)
        return context.get_dummy_value()

    return _intrinsic(f"multiply {rows} {columns} {pairs}", types.void(*[types.intp] * 7), generate)


def transpose(dtype: torch.dtype, pairs: bool) -> Callable[..., Any]:
    """The intrinsic `(source, source_stride, target, target_stride)` transposes 16 rows of 16 words; strides in bytes.

    With `pairs` a word is two bfloat16 numbers that stay together. Else it is a float32, widened from `dtype`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, target_stride = args
        rows = []
        for i in range(LANES):
            offset = builder.mul(source_stride, _const(i))
            rows.append(_load_words(builder, source, offset, torch.float32 if pairs else dtype))
        for distance in (8, 4, 2, 1):
            for i in range(LANES):
                if i & distance:
                    continue
                first, second = rows[i], rows[i + distance]
                low = [e if not e & distance else LANES + e - distance for e in range(LANES)]
                high = [e + distance if not e & distance else LANES + e for e in range(LANES)]
                rows[i] = builder.shuffle_vector(first, second, ir.Constant(_WORDS, low))
                rows[i + distance] = builder.shuffle_vector(first, second, ir.Constant(_WORDS, high))
        for i, row in enumerate(rows):
            builder.store(row, _at(builder, target, builder.mul(target_stride, _const(i)), _WORDS), align=4)
        return context.get_dummy_value()

    return _intrinsic(f"transpose {dtype} {pairs}", types.void(*[types.intp] * 4), generate)


def _load_words(builder: Any, address: Any, offset: Any, dtype: torch.dtype) -> Any:
    """16 numbers of a dtype as the bits of 16 float32 numbers."""
    if dtype == torch.float32:
        return builder.load(_at(builder, address, offset, _WORDS), align=4)
    if dtype == torch.float16:
        half = builder.load(_at(builder, address, offset, ir.VectorType(ir.HalfType(), LANES)), align=2)
        return builder.bitcast(builder.fpext(half, _FLOATS), _WORDS)
    bits = builder.load(_at(builder, address, offset, ir.VectorType(ir.IntType(16), LANES)), align=2)
    return builder.shl(builder.zext(bits, _WORDS), ir.Constant(_WORDS, [16] * LANES))


def _largest(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    address, n = args
    start = builder.load(_at(builder, address, _const(0), _FLOATS), align=4)
    before, loop = builder.block, builder.append_basic_block("largest")
    builder.branch(loop)
    builder.position_at_end(loop)
    step, best = builder.phi(_I64), builder.phi(_FLOATS)
    row = builder.load(_at(builder, address, builder.mul(step, _const(4)), _FLOATS), align=4)
    larger = builder.select(builder.fcmp_ordered(">", row, best), row, best)
    following = builder.add(step, _const(LANES))
    step.add_incoming(_const(0), before)
    step.add_incoming(following, builder.block)
    best.add_incoming(start, before)
    best.add_incoming(larger, builder.block)
    end = builder.append_basic_block("found")
    builder.cbranch(builder.icmp_signed("<", following, n), loop, end)
    builder.position_at_end(end)
    for distance in (8, 4, 2, 1):
        order = ir.Constant(_WORDS, [(e + distance) % LANES for e in range(LANES)])
        other = builder.shuffle_vector(larger, larger, order)
        larger = builder.select(builder.fcmp_ordered(">", other, larger), other, larger)
    return builder.extract_element(larger, ir.Constant(_I32, 0))


def _take(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.atomic_rmw("add", _at(builder, args[0], _const(0), _I64), _const(1), "monotonic")


def _declared(module: Any, kind: Any, name: str) -> Any:
    found = module.globals.get(name)
    return found if found is not None else ir.Function(module, kind, name)


def _intrinsic(name: str, signature: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """An intrinsic of one signature. Its name tells it from others in the cache's keys."""
    n_args = len(signature.args)
    made: dict[int, Callable[..., Any]] = {
        1: lambda typing, a: (signature, generate),
        2: lambda typing, a, b: (signature, generate),
        4: lambda typing, a, b, c, d: (signature, generate),
        7: lambda typing, a, b, c, d, e, f, g: (signature, generate),
    }
    made[n_args].__name__ = made[n_args].__qualname__ = name
    result: Callable[..., Any] = intrinsic(made[n_args])
    return result


largest = _intrinsic(
    "largest", types.float32(types.intp, types.intp), _largest
)  # of n floats at an address, n a multiple of 16
take = _intrinsic(
    "take", types.intp(types.intp), _take
)  # the number at an address, which is counted up: a queue of tasks
