"""Instructions that compilers do not choose well by themselves, written in LLVM IR on vectors of mostly 16 words.

A function with a `builder` emits LLVM instructions and returns LLVM values. LLVM translates a vector operation for any
processor: to one instruction with AVX-512, to several without. A word has 32 bits: a float32 number, or two narrow
numbers that are multiplied together. `PAIRS` says whether this processor multiplies pairs of bfloat16 numbers
(AVX512_BF16), at twice the speed of float32.

A place in memory is written as `at` takes it: `load(builder, kind, c, (c_stride, i), 64 * j)` loads what lies at the
address `c + c_stride * i + 64 * j`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from lce.kernels.runtime.compiling import features, intrinsic_of
from lce.kernels.runtime.shared import ITEMSIZE, LANES

PAIRS = "avx512bf16" in features()
WIDE = "avx512f" in features()  # whether a register holds 16 numbers, and there are 32 of them
# Bytes of what becomes a word, by kind: a number that is widened to float32, a pair of bfloat16 numbers as it lies, or
# a pair of 8-bit integers that are widened to 16 bits.
WORD_BYTES = {**ITEMSIZE, "pairs": 4, "int8": 2}

_I64, I32, F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
WORDS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


class _BFloat(ir.HalfType):
    """LLVM's bfloat type, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


def i64(value: int) -> Any:
    return ir.Constant(_I64, value)


def const(kind: Any, value: Any) -> Any:
    """Return a constant vector of type `kind` with a number in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def at(builder: Any, base: Any, *terms: Any) -> Any:
    """Emit the sum of an address and of terms. A term is an integer, of Python or of LLVM, or a product of two."""
    offset = None
    for term in terms:
        factors = [i64(x) if isinstance(x, int) else x for x in (term if isinstance(term, tuple) else (term,))]
        number = builder.mul(*factors) if len(factors) == 2 else factors[0]
        offset = number if offset is None else builder.add(offset, number)
    return base if offset is None else builder.add(base, offset)


def pointer_at(builder: Any, kind: Any, *place: Any) -> Any:
    return builder.inttoptr(at(builder, *place), ir.PointerType(kind))


def load(builder: Any, kind: Any, *place: Any) -> Any:
    return builder.load(pointer_at(builder, kind, *place), align=1)


def store(builder: Any, value: Any, *place: Any) -> None:
    builder.store(value, pointer_at(builder, value.type, *place), align=1)


def splat(builder: Any, number: Any, kind: Any) -> Any:
    """Emit a vector of type `kind` with a number in all lanes."""
    none = ir.Constant(kind, ir.Undefined)
    return shuffle(builder, builder.insert_element(none, number, I32(0)), none, [0] * kind.count)


def load_splat(builder: Any, kind: Any, *place: Any) -> Any:
    """Emit a load of a number into all lanes of a vector of type `kind`."""
    return splat(builder, load(builder, kind.element, *place), kind)


def load_words(builder: Any, kind: str, lanes: int, *place: Any) -> Any:
    """Emit a load of `lanes` words of a kind in `WORD_BYTES`; a word of a dtype has the bits of the float32 number."""
    words = ir.VectorType(I32, lanes)
    if kind == "int8":
        integers = load(builder, ir.VectorType(ir.IntType(8), 2 * lanes), *place)
        return builder.bitcast(builder.sext(integers, ir.VectorType(ir.IntType(16), 2 * lanes)), words)
    if kind == "float16":
        halves = load(builder, ir.VectorType(ir.HalfType(), lanes), *place)
        return builder.bitcast(builder.fpext(halves, ir.VectorType(F32, lanes)), words)
    if kind == "bfloat16":
        bits = load(builder, ir.VectorType(ir.IntType(16), lanes), *place)
        return builder.shl(builder.zext(bits, words), const(words, 16))
    return load(builder, words, *place)


def shuffle(builder: Any, x: Any, y: Any, lanes: Iterable[int]) -> Any:
    """Emit a vector of lanes of two vectors: those of y have the numbers that follow those of x."""
    numbers = [*lanes]
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(numbers)), numbers))


def plus(builder: Any, x: Any, y: Any) -> Any:
    """Emit the sum of two vectors of float32 numbers or of integers."""
    return builder.fadd(x, y) if x.type.element == F32 else builder.add(x, y)


def multiply_add(builder: Any, pairs: bool, x: Any, y: Any, total: Any) -> Any:
    """Emit `x * y + total` on vectors of words; both products of words of two numbers are added.

    Words have two 16-bit integers if the total has integers, else two bfloat16 numbers with `pairs`, else a float32.
    """
    lanes, integers = total.type.count, total.type.element == I32
    half: Any = ir.IntType(16) if integers else _BFloat()
    kind = ir.VectorType(half, 2 * lanes) if pairs or integers else total.type
    x, y = builder.bitcast(x, kind), builder.bitcast(y, kind)
    if not integers:
        name = "llvm.x86.avx512bf16.dpbf16ps.512" if pairs else f"llvm.fma.v{lanes}f32"
        return call_llvm(builder, name, total.type, [total, x, y] if pairs else [x, y, total])
    if "avx2" in features():
        name = "llvm.x86.avx512.pmaddw.d.512" if lanes == LANES else "llvm.x86.avx2.pmadd.wd"
        return builder.add(total, call_llvm(builder, name, total.type, [x, y]))
    wide = ir.VectorType(I32, 2 * lanes)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    even, odd = (shuffle(builder, products, products, range(first, 2 * lanes, 2)) for first in (0, 1))
    return builder.add(total, builder.add(even, odd))


def call_llvm(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Emit a call of LLVM's own function `name`, whose result has the type `result`."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), args)


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


def exchanged(builder: Any, first: Any, second: Any, distance: int) -> tuple[Any, Any]:
    """Emit one step of a transposition of two vectors, on blocks of `2 · distance` lanes; return both new vectors.

    The upper half of each block of `first` changes places with the lower half of the same block of `second`.
    """
    lanes = first.type.count
    low = [e if not e & distance else lanes + e - distance for e in range(lanes)]
    high = [e + distance if not e & distance else lanes + e for e in range(lanes)]
    return shuffle(builder, first, second, low), shuffle(builder, first, second, high)


def halves(lanes: int) -> list[int]:
    """Return `[lanes/2, lanes/4, ..., 1]`: the distances in a sum over lanes or a transposition."""
    return [lanes >> i for i in range(1, lanes.bit_length())]


def transposed(builder: Any, rows: list[Any], size: int = 1) -> list[Any]:
    """Emit the transposition of n vectors of n blocks of `size` words."""
    rows = list(rows)
    for distance in halves(len(rows)):
        for i in range(len(rows)):
            if not i & distance:
                rows[i], rows[i + distance] = exchanged(builder, rows[i], rows[i + distance], size * distance)
    return rows


def procedure(name: str, n_args: int, emit: Callable[..., Any]) -> Callable[..., Any]:
    """Return the intrinsic of `emit(builder, *args)`, with integers as arguments and without a result."""
    return intrinsic_of(name, types.void(*[types.intp] * n_args), emit)


def transpose(kind: str) -> Callable[..., Any]:
    """Return the intrinsic `(source, source_stride, target, target_stride)`, which transposes 16 rows of 16 words.

    `source` and `target` are addresses, each followed by the bytes between rows. `WORD_BYTES` explains `kind`.
    """
    lanes = LANES if WIDE else LANES // 2  # all vectors of a block of lanes * lanes words fit in registers

    def emit(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
        for first in range(0, LANES, lanes):
            for word in range(0, LANES, lanes):
                places = [(source, (source_stride, first + i), WORD_BYTES[kind] * word) for i in range(lanes)]
                rows = [load_words(builder, kind, lanes, *place) for place in places]
                for i, row in enumerate(transposed(builder, rows)):
                    store(builder, row, target, (target_stride, word + i), 4 * first)

    return procedure(f"transpose {kind}", 4, emit)


def fetch(builder: Any, address: Any, nearness: int = 3) -> None:
    """Emit a request for the cache line of any address: with 3, to the nearest cache; with 2, to the one behind it."""
    line = builder.inttoptr(address, ir.PointerType(ir.IntType(8)))
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [line, I32(0), I32(nearness), I32(1)])


def _largest(builder: Any, address: Any, n: Any) -> Any:
    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    def turn(step: Any, best: Any) -> Any:
        return {0: larger(load(builder, FLOATS, address, (step, 4 * LANES)), best[0])}

    best = loop(builder, builder.lshr(n, i64(4)), {0: load(builder, FLOATS, address)}, turn)[0]
    for distance in halves(LANES):
        best = larger(shuffle(builder, best, best, [(e + distance) % LANES for e in range(LANES)]), best)
    return builder.extract_element(best, I32(0))


# `largest(address, n)` returns the largest of the n float32 numbers at an address; n is a multiple of 16.
largest = intrinsic_of("largest", types.float32(types.intp, types.intp), _largest)
# `prefetch(address)` asks the processor to bring the cache line of any address near. `prefetch_far` brings a line to
# L2, where more requests may be open at once.
prefetch, prefetch_far = procedure("prefetch", 1, fetch), procedure("prefetch far", 1, partial(fetch, nearness=2))
