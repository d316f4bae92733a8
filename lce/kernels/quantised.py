"""Weights of 8 and 4 bits: rounding them, products of a few rows with them, and unpacking them.

A matrix `[out, in]` lies in blocks of 16 rows, so that a vector holds one input's weights of 16 rows:

    codes   [blocks, in, 16]       int8, or for 4 bits [blocks, in / 2, 16] uint8: of a group of 32 inputs, byte j has
                                   input j in its low half and input j + 16 in its high half
    scales  [blocks, groups, 16]   bfloat16, one for a group of inputs of a row
    zeros   [blocks, groups, 16]   uint8, sixteenths of a code; 4 bits only

A weight is `scale * code`, or `scale * (code - zero / 16)`. Rows and inputs are padded with zeros to whole blocks and
groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, float32, int8, types, uint8, uint16
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from lce.kernels.compiling import MOST_ROWS, inner, kernel
from lce.kernels.numbers import READ, STORED, WRITE, exp, pointer
from lce.kernels.vectors import LANES

GROUPS = {8: 128, 4: 32}  # bits: inputs that share a scale

_TASK = 4  # blocks that a thread takes at a time
_CHAINS = 4  # sums of a vector that do not wait for each other
_SHRINKS = 4  # ranges of a group that rounding to 4 bits tries, each _SHRINK narrower
_SHRINK = np.float32(0.06)
_FITS = 2  # corrections of scale and zero by least squares, for each of them

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32, 64))
_FLOATS, _BYTES, _HALVES, _WORDS = (ir.VectorType(kind, LANES) for kind in (_F32, _I8, _I16, _I32))
_FUSED = ("contract", "nsz")
_scratch = threading.local()


def parts(bits: int, n_out: int, n_in: int) -> dict[str, tuple[tuple[int, int, int], torch.dtype]]:
    """The shape and dtype of each tensor of a packed matrix `[n_out, n_in]`."""
    blocks, groups = -(-n_out // LANES), -(-n_in // GROUPS[bits])
    codes = (blocks, groups * GROUPS[bits] * bits // 8, LANES), torch.int8 if bits == 8 else torch.uint8
    scales = (blocks, groups, LANES), torch.bfloat16
    return {"codes": codes, "scales": scales} | ({"zeros": (scales[0], torch.uint8)} if bits == 4 else {})


def pack(weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
    """Round `weight [out, in]` to the packed matrix that the others are. Time: some 0.3 ns a weight and thread for
    8 bits, 4 ns for 4 bits, where scale and zero of each group are fitted to it by least squares."""
    bits = _check(weight.shape, codes, scales, zeros)
    assert weight.is_contiguous()
    _pack(bits, weight.dtype)(
        weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), *weight.shape
    )


def product(
    x: Tensor, n_rows: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None = None, *,
    norm: Tensor | None = None, eps: float = 0.0, gated: bool = False, onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`x [T, in]` times a packed matrix `[n_rows, in]` transposed, plus `bias`: as `lce.kernels.products.product`.

    T is up to `MOST_ROWS`. With `gated` the two halves of the rows are whole blocks. Sums are float32. Bytes: the
    packed weights, once. Each number of the result is one sum in one order, whatever T and the number of threads.
    """
    n, n_in = x.shape
    bits = _check((n_rows, n_in), codes, scales, zeros)
    dtype, n_out = x.dtype, n_rows // 2 if gated else n_rows
    out = torch.empty(n, n_out, dtype=dtype) if onto is None else onto
    assert n <= MOST_ROWS
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert not gated or n_out % LANES == 0
    assert out.shape == (n, n_out), out.shape
    assert out.dtype is dtype, out.dtype
    assert norm is None or (norm.dtype is dtype and norm.shape == (n_in,)), norm
    assert bias is None or (bias.dtype is dtype and bias.shape == (n_rows,)), bias
    rows = 1 if n == 1 else 2 if n == 2 else 4 if n <= 4 else MOST_ROWS
    _product(bits, dtype, rows)(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(),
        0 if bias is None else bias.data_ptr(), 0 if norm is None else norm.data_ptr(), eps, out.data_ptr(),
        _working(rows, codes.shape[0] * LANES, scales.shape[1] * (GROUPS[bits] + 1)), n, n_out, n_in,
        gated, onto is not None,
    )  # fmt: skip
    return out


def unpack(first: int, out: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
    """The rows from `first` on, a multiple of 16, of a packed matrix as numbers: into `out [rows, in]`, any dtype."""
    bits = 8 if zeros is None else 4
    assert first % LANES == 0
    assert first + len(out) <= codes.shape[0] * LANES
    assert out.is_contiguous()
    _check((codes.shape[0] * LANES, out.shape[1]), codes, scales, zeros)
    _unpack(bits, out.dtype)(
        codes.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), out.data_ptr(), first, *out.shape
    )


def rows_of(ids: Tensor, out: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
    """The rows `ids [T]` (int64) of a packed matrix as numbers: into `out [T, in]`, any dtype."""
    bits = 8 if zeros is None else 4
    _check((codes.shape[0] * LANES, out.shape[1]), codes, scales, zeros)
    assert len(ids) == len(out)
    assert ids.dtype == torch.int64
    assert ids.is_contiguous()
    assert out.is_contiguous()
    assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < codes.shape[0] * LANES)
    _rows_of(bits, out.dtype)(
        ids.data_ptr(), codes.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), out.data_ptr(),
        *out.shape,
    )  # fmt: skip


def _check(shape: Any, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> int:
    """The bits of a packed matrix of this shape."""
    bits = 8 if zeros is None else 4
    blocks, groups = -(-shape[0] // LANES), -(-shape[1] // GROUPS[bits])
    assert codes.shape == (blocks, groups * GROUPS[bits] * bits // 8, LANES)
    assert scales.shape == (blocks, groups, LANES)
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    assert scales.dtype == torch.bfloat16
    assert zeros is None or (zeros.shape == scales.shape and zeros.is_contiguous())
    return bits


def _working(rows: int, n_out: int, n_in: int) -> int:
    """The address of this thread's working memory, for `rows · (n_out + n_in)` floats; it grows and stays."""
    needed = rows * (n_out + n_in)
    memory = getattr(_scratch, "memory", None)
    if memory is None or len(memory) < needed:
        memory = _scratch.memory = torch.empty(needed)
        _scratch.address = memory.data_ptr()
    return int(_scratch.address)


def _const(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _load(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """The vector number `index` from an address on."""
    return builder.load(builder.gep(builder.inttoptr(address, ir.PointerType(kind)), [index]), align=1)


def _codes(builder: Any, bits: int, codes: Any, index: Any) -> list[Any]:
    """16 rows' codes of one input, float32; for 4 bits those of two inputs, 16 apart."""
    raw = _load(builder, codes, index, _BYTES)
    if bits == 8:
        return [builder.sitofp(builder.sext(raw, _WORDS), _FLOATS)]
    words = builder.zext(raw, _WORDS)
    halves = builder.and_(words, _const(_WORDS, 15)), builder.lshr(words, _const(_WORDS, 4))
    return [builder.sitofp(half, _FLOATS) for half in halves]


def _scale(builder: Any, scales: Any, group: Any) -> Any:
    words = builder.zext(_load(builder, scales, group, _HALVES), _WORDS)
    return builder.bitcast(builder.shl(words, _const(_WORDS, 16)), _FLOATS)


def _zero(builder: Any, zeros: Any, group: Any) -> Any:
    """Zeros in sixteenths."""
    return builder.sitofp(builder.zext(_load(builder, zeros, group, _BYTES), _WORDS), _FLOATS)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _dot(bits: int, rows: int) -> Callable[..., Any]:
    """The intrinsic that multiplies `rows` rows of x with one block: `(x, sums, codes, scales, zeros, n_groups, out)`.

    All are addresses but `n_groups`. x is `[rows, n_groups * group]` float32; `sums [rows, n_groups]` the sums of each
    group of x, times -1/16; out `[rows, 16]`. Per 16 bytes of codes: one instruction to widen them, then for 8 bits one
    to convert and one to multiply and add, for 4 bits two each and two to take them apart.
    """
    size = GROUPS[bits]
    signature = types.void(*[types.intp] * 7)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_at, sums_at, codes, scales, zeros, n_groups, out = args
        number = ir.PointerType(_F32)
        x, sums = builder.inttoptr(x_at, number), builder.inttoptr(sums_at, number)
        totals = [cgutils.alloca_once_value(builder, _const(_FLOATS, 0.0)) for _ in range(rows)]
        i64 = lambda value: ir.Constant(_I64, value)  # noqa: E731
        n_in = builder.mul(n_groups, i64(size))

        def splat(base: Any, offset: Any) -> Any:
            nothing = ir.Constant(_FLOATS, ir.Undefined)
            one = builder.insert_element(nothing, builder.load(builder.gep(base, [offset])), ir.Constant(_I32, 0))
            return builder.shuffle_vector(one, nothing, _const(_WORDS, 0))

        with cgutils.for_range(builder, n_groups) as loop:
            start = [builder.add(builder.mul(n_in, i64(t)), builder.mul(loop.index, i64(size))) for t in range(rows)]
            chains = [[_const(_FLOATS, 0.0)] * _CHAINS for _ in range(rows)]
            if bits == 4:
                zero = _zero(builder, zeros, loop.index)
                for t in range(rows):
                    at = builder.add(builder.mul(n_groups, i64(t)), loop.index)
                    chains[t][0] = builder.fmul(zero, splat(sums, at))
            n_vectors = size * bits // 8
            first = builder.mul(loop.index, i64(n_vectors))
            for j in range(n_vectors):
                for half, weights in enumerate(_codes(builder, bits, codes, builder.add(first, i64(j)))):
                    c = (j + half) % _CHAINS if bits == 8 else (2 * j + half) % _CHAINS
                    for t in range(rows):
                        number_of_x = splat(x, builder.add(start[t], i64(j + LANES * half)))
                        chains[t][c] = _multiply_add(builder, number_of_x, weights, chains[t][c])
            scale = _scale(builder, scales, loop.index)
            for t in range(rows):
                a, b, c, d = chains[t]
                dot = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
                builder.store(_multiply_add(builder, scale, dot, builder.load(totals[t])), totals[t])
        place = builder.inttoptr(out, ir.PointerType(_FLOATS))
        for t in range(rows):
            builder.store(builder.load(totals[t]), builder.gep(place, [i64(t)]), align=4)
        return context.get_dummy_value()

    def typed(typing, a, b, c, d, e, f, g):
        return signature, generate

    typed.__name__ = typed.__qualname__ = f"dot {bits} {rows}"
    result: Callable[..., Any] = intrinsic(typed)
    return result


def _rows(bits: int, dtype: torch.dtype) -> Callable[..., Any]:
    """The intrinsic `(codes, scales, zeros, n, out, stride)`: a block's 16 rows and 32 inputs as numbers.

    The inputs are `32·n` to `32·n + 31`. Row i goes to `out + i · stride`, in bytes. Two numbers of two bytes make a
    word, and 16 words of 16 rows are transposed in registers: about 0.4 instructions a weight.
    """
    signature = types.void(*[types.intp] * 6)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, scales, zeros, n, out, stride = args
        i64 = lambda value: ir.Constant(_I64, value)  # noqa: E731
        group = builder.lshr(n, i64({128: 2, 32: 0}[GROUPS[bits]]))
        scale = _scale(builder, scales, group)
        first = builder.mul(n, i64(32 * bits // 8))
        found = [_codes(builder, bits, codes, builder.add(first, i64(j))) for j in range(32 * bits // 8)]
        in_order = [each[half] for half in range(len(found[0])) for each in found]
        if bits == 4:
            zero = builder.fmul(_zero(builder, zeros, group), _const(_FLOATS, 1 / 16))
            in_order = [builder.fsub(code, zero) for code in in_order]
        weights = [builder.fmul(scale, code) for code in in_order]
        words = [_bits_of(builder, each, dtype) for each in weights]
        if dtype != torch.float32:
            pairs = zip(words[::2], words[1::2], strict=True)
            words = [builder.or_(low, builder.shl(high, _const(_WORDS, 16))) for low, high in pairs]
        for start in range(0, len(words), LANES):
            for i, row in enumerate(_turned(builder, words[start : start + LANES])):
                at = builder.add(builder.add(out, builder.mul(stride, i64(i))), i64(4 * start))
                builder.store(row, builder.inttoptr(at, ir.PointerType(_WORDS)), align=1)
        return context.get_dummy_value()

    def typed(typing, a, b, c, d, e, f):
        return signature, generate

    typed.__name__ = typed.__qualname__ = f"rows {bits} {dtype}"
    result: Callable[..., Any] = intrinsic(typed)
    return result


def _bits_of(builder: Any, numbers: Any, dtype: torch.dtype) -> Any:
    """16 finite numbers, rounded to a dtype, as words."""
    words = builder.bitcast(numbers, _WORDS)
    if dtype == torch.float32:
        return words
    if dtype == torch.float16:
        halves = builder.fptrunc(numbers, ir.VectorType(ir.HalfType(), LANES))
        return builder.zext(builder.bitcast(halves, _HALVES), _WORDS)
    odd = builder.and_(builder.lshr(words, _const(_WORDS, 16)), _const(_WORDS, 1))
    rounded = builder.add(words, builder.add(odd, _const(_WORDS, 0x7FFF)))
    return builder.lshr(rounded, _const(_WORDS, 16))


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 words, transposed."""
    rows = list(rows)
    for distance in (8, 4, 2, 1):
        low = [e if not e & distance else LANES + e - distance for e in range(LANES)]
        high = [e + distance if not e & distance else LANES + e for e in range(LANES)]
        for i in range(LANES):
            if not i & distance:
                pair = rows[i], rows[i + distance]
                rows[i] = builder.shuffle_vector(*pair, ir.Constant(_WORDS, low))
                rows[i + distance] = builder.shuffle_vector(*pair, ir.Constant(_WORDS, high))
    return rows


@cache
def _product(bits: int, dtype: torch.dtype, rows: int) -> Callable[..., Any]:
    stored, read, write, dot, size = STORED[dtype], READ[dtype], WRITE[dtype], _dot(bits, rows), GROUPS[bits]
    widen = _widen(bits, dtype)

    @kernel("void(intp, intp, intp, intp, intp, intp, float32, intp, intp, intp, intp, intp, boolean, boolean)")
    def quantised_product(
        x_at, codes, scales, zeros, bias_at, norm_at, eps, out_at, working, n, n_out, n_in, gated, adds
    ):
        n_parts = 2 if gated else 1
        n_groups, n_blocks = (n_in + size - 1) // size, (n_out + LANES - 1) // LANES
        bias = carray(pointer(bias_at, stored), (n_parts * n_out,))
        out = carray(pointer(out_at, stored), (n, n_out))
        sums_at = working + 4 * rows * n_groups * size
        dots_at = sums_at + 4 * rows * n_groups
        dots = carray(pointer(dots_at, float32), (n_parts * n_blocks, rows, LANES))
        widen(x_at, norm_at, eps, working, sums_at, rows, n, n_in)
        for task in numba.prange((n_blocks + _TASK - 1) // _TASK):
            for first in range(task * _TASK, min(n_blocks, task * _TASK + _TASK)):
                for block in range(first, n_parts * n_blocks, n_blocks):
                    group = block * n_groups * LANES
                    dot(
                        working, sums_at, codes + group * size * bits // 8, scales + 2 * group, zeros + group,
                        n_groups, dots_at + 4 * block * rows * LANES,
                    )  # fmt: skip
                for i in range(n):
                    for lane in range(min(LANES, n_out - first * LANES)):
                        row = first * LANES + lane
                        total = dots[first, i, lane]
                        if bias_at:
                            total += read(bias[row])
                        if gated:
                            other = dots[first + n_blocks, i, lane]
                            if bias_at:
                                other += read(bias[row + n_out])
                            total = total / (np.float32(1) + exp(min(-total, np.float32(88)))) * other
                        if adds:
                            total += read(out[i, row])
                        out[i, row] = write(total)

    return quantised_product


@cache
def _widen(bits: int, dtype: torch.dtype) -> Callable[..., Any]:
    """x as float32 `[rows, groups * size]`, normalised and padded, and the sums of its groups, times -1/16."""
    stored, read, size = STORED[dtype], READ[dtype], GROUPS[bits]

    @inner
    def widen(x_at, norm_at, eps, wide_at, sums_at, rows, n, n_in):
        n_groups = (n_in + size - 1) // size
        x, norm = carray(pointer(x_at, stored), (n, n_in)), carray(pointer(norm_at, stored), (n_in,))
        wide = carray(pointer(wide_at, float32), (rows, n_groups * size))
        sums = carray(pointer(sums_at, float32), (rows, n_groups))
        for i in range(rows):
            used = n_in if i < n else 0
            for j in range(used):
                wide[i, j] = read(x[i, j])
            for j in range(used, n_groups * size):
                wide[i, j] = np.float32(0)
            if norm_at and i < n:
                total = np.float32(0)
                for j in range(n_in):
                    total += wide[i, j] * wide[i, j]
                scale = np.float32(1) / np.sqrt(total / np.float32(n_in) + eps)
                for j in range(n_in):
                    wide[i, j] *= scale * read(norm[j])
            if bits == 4:
                for g in range(n_groups):
                    total = np.float32(0)
                    for j in range(g * size, g * size + size):
                        total += wide[i, j]
                    sums[i, g] = total * np.float32(-0.0625)

    return widen


@cache
def _unpack(bits: int, dtype: torch.dtype) -> Callable[..., Any]:
    stored, rows, size = STORED[dtype], _rows(bits, dtype), GROUPS[bits]
    stored_as = np.float32 if dtype == torch.float32 else np.uint16
    width, item = 32, dtype.itemsize

    @kernel("void(intp, intp, intp, intp, intp, intp, intp)")
    def quantised_unpack(codes, scales, zeros, out_at, first, n_rows, n_in):
        n_groups = (n_in + size - 1) // size
        out = carray(pointer(out_at, stored), (n_rows, n_in))
        for task in numba.prange((n_rows + LANES - 1) // LANES):
            group = (first // LANES + task) * n_groups * LANES
            codes_at, scales_at, zeros_at = codes + group * size * bits // 8, scales + 2 * group, zeros + group
            height = min(LANES, n_rows - task * LANES)
            n_whole = n_in // width if height == LANES else 0
            for n in range(n_whole):
                at = out_at + (task * LANES * n_in + n * width) * item
                rows(codes_at, scales_at, zeros_at, n, at, n_in * item)
            edge = np.empty((LANES, width), stored_as)
            for n in range(n_whole, (n_in + width - 1) // width):
                rows(codes_at, scales_at, zeros_at, n, edge.ctypes.data, width * item)
                for i in range(height):
                    for j in range(min(width, n_in - n * width)):
                        out[task * LANES + i, n * width + j] = edge[i, j]

    return quantised_unpack


@cache
def _rows_of(bits: int, dtype: torch.dtype) -> Callable[..., Any]:
    stored, read, write, size = STORED[dtype], READ[torch.bfloat16], WRITE[dtype], GROUPS[bits]
    code_type = int8 if bits == 8 else uint8

    @kernel("void(intp, intp, intp, intp, intp, intp, intp)", parallel=False)
    def quantised_rows(ids_at, codes_at, scales_at, zeros_at, out_at, n, n_in):
        n_groups = (n_in + size - 1) // size
        ids = carray(pointer(ids_at, types.int64), (n,))
        out = carray(pointer(out_at, stored), (n, n_in))
        for i in range(n):
            block, lane = ids[i] // LANES, ids[i] % LANES
            group = block * n_groups * LANES
            codes = carray(
                pointer(codes_at + group * size * bits // 8, code_type), (n_groups * size * bits // 8, LANES)
            )
            scales = carray(pointer(scales_at + 2 * group, uint16), (n_groups, LANES))
            zeros = carray(pointer(zeros_at + group, uint8), (n_groups, LANES))
            for j in range(n_in):
                g, k = j // size, j % size
                if bits == 8:
                    code = np.float32(codes[j, lane])
                else:
                    byte = codes[g * LANES + k % LANES, lane]
                    half = (byte >> 4) if k >= LANES else (byte & 15)
                    code = np.float32(half) - np.float32(zeros[g, lane]) * np.float32(0.0625)
                out[i, j] = write(read(scales[g, lane]) * code)

    return quantised_rows


@cache
def _pack(bits: int, dtype: torch.dtype) -> Callable[..., Any]:
    stored, read, size = STORED[dtype], READ[dtype], GROUPS[bits]
    read_scale, write_scale = READ[torch.bfloat16], WRITE[torch.bfloat16]

    @kernel("void(intp, intp, intp, intp, intp, intp)")
    def quantised_pack(weight_at, codes_at, scales_at, zeros_at, n_out, n_in):
        n_groups, n_blocks = (n_in + size - 1) // size, (n_out + LANES - 1) // LANES
        weight = carray(pointer(weight_at, stored), (n_out, n_in))
        codes = carray(pointer(codes_at, uint8), (n_blocks, n_groups * size * bits // 8, LANES))
        scales = carray(pointer(scales_at, uint16), (n_blocks, n_groups, LANES))
        zeros = carray(pointer(zeros_at, uint8), (n_blocks, n_groups, LANES))
        for block in numba.prange(n_blocks):
            w, code = np.empty(size, np.float32), np.empty(size, np.float32)
            for lane in range(LANES):
                row = block * LANES + lane
                for g in range(n_groups):
                    n_used = min(size, n_in - g * size) if row < n_out else 0
                    low = high = np.float32(0)
                    for j in range(n_used):
                        w[j] = read(weight[row, g * size + j])
                    for j in range(n_used, size):
                        w[j] = np.float32(0)
                    for j in range(size):
                        low, high = min(low, w[j]), max(high, w[j])
                    if bits == 8:
                        bits_of_scale = write_scale(max(high, -low) / np.float32(127))
                        scale = read_scale(bits_of_scale)
                        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
                        scales[block, g, lane] = bits_of_scale
                        for j in range(size):
                            rounded = np.floor(w[j] * inverse + np.float32(0.5))
                            rounded = min(max(rounded, np.float32(-127)), np.float32(127))
                            codes[block, g * size + j, lane] = uint8(int8(rounded))
                        continue
                    best, best_scale, best_zero = np.float32(np.inf), uint16(0), np.float32(0)
                    for attempt in range(_SHRINKS):
                        factor = np.float32(1) - _SHRINK * np.float32(attempt)
                        step, least = (high / 15 - low / 15) * factor, low * factor
                        for _fit in range(_FITS + 1):
                            bits_of_scale = write_scale(step)
                            scale = read_scale(bits_of_scale)
                            if not scale > np.float32(1e-30):
                                break
                            inverse = np.float32(1) / scale
                            zero = np.floor(np.float32(-16) * least * inverse + np.float32(0.5))
                            zero = min(max(zero, np.float32(0)), np.float32(255)) * np.float32(0.0625)
                            error = sum_w = sum_c = sum_wc = sum_cc = np.float32(0)
                            for j in range(size):
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
                            spread = sum_cc * np.float32(size) - sum_c * sum_c
                            if not spread > 0:
                                break
                            step = (sum_wc * np.float32(size) - sum_c * sum_w) / spread
                            least = (sum_w - step * sum_c) / np.float32(size)
                    scales[block, g, lane] = best_scale
                    zeros[block, g, lane] = uint8(best_zero * np.float32(16))
                    scale = read_scale(best_scale)
                    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
                    for j in range(size):
                        c = np.floor(w[j] * inverse + best_zero + np.float32(0.5))
                        code[j] = min(max(c, np.float32(0)), np.float32(15))
                    for j in range(LANES):
                        codes[block, g * LANES + j, lane] = uint8(code[j]) | (uint8(code[j + LANES]) << 4)

    return quantised_pack
