"""Scalars in kernels: addresses as arrays, half-precision numbers as bits, and the exponential function."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lce.kernels.cpu.compiling import ByDtype, inner

# How the numbers of a dtype lie in memory, for Numba, which has no bfloat16 and no float16 on CPUs.
STORED = {torch.float32: types.float32, torch.bfloat16: types.uint16, torch.float16: types.uint16}


@intrinsic
def pointer(typing: Any, address: Any, kind: Any) -> Any:
    """Return `pointer(address, float32)`: where numbers of a type lie; `carray` makes an array of the pointer."""
    result = types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.intp, kind), generate


@intrinsic(prefer_literal=True)
def arguments(typing: Any, address: Any, n: Any) -> Any:
    """Return n arguments that lie at an address, of a kernel that takes more than fit a call, as a tuple."""
    number, result = n.literal_value, types.UniTuple(types.intp, n.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.PointerType(ir.IntType(64)))
        places = [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(number)]
        return context.make_tuple(builder, result, [builder.load(place) for place in places])

    return result(types.intp, n), generate


@cache
def argument_of(number: float) -> int:
    """Return the argument that stands for a number that is not whole: its bits."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


@intrinsic
def number_of(typing: Any, argument: Any) -> Any:
    """Return the number, as float32, that `argument_of` made an argument of."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptrunc(builder.bitcast(args[0], ir.DoubleType()), ir.FloatType())

    return types.float32(types.intp), generate


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """Return the float32 that these 32 bits are."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@intrinsic
def bits_of_float(typing: Any, number: Any) -> Any:
    """Return the 32 bits of a float32."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@intrinsic
def _float_of_half(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _half_of_float(typing: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@inner
def _read_bfloat16(bits):
    return float_of_bits(np.uint32(bits) << np.uint32(16))


@inner
def _write_bfloat16(number):
    bits = bits_of_float(np.float32(number))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.uint16(rounded | np.uint32(is_nan) * np.uint32(0x7FC0))


@inner
def _same(number):
    return np.float32(number)


# Of a dtype: how numbers lie, their bytes; from a stored number to float32, and back, rounded to nearest even.
stored = ByDtype(STORED.__getitem__)
itemsize = ByDtype(lambda dtype: dtype.itemsize)
read = ByDtype({torch.float32: _same, torch.bfloat16: _read_bfloat16, torch.float16: _float_of_half}.__getitem__)
write = ByDtype({torch.float32: _same, torch.bfloat16: _write_bfloat16, torch.float16: _half_of_float}.__getitem__)


@inner
def exp(x):
    """`e**x` in float32 for x ≤ 88, to 2 units in the last place; 0 below -87; NaN for NaN. Vectorised, unlike the C
    library's."""
    x = np.float32(-87.33) if x < np.float32(-87.33) else np.float32(x)
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1)
    return y * float_of_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@inner
def exp2(x):
    """`2**x` in float32 for x ≤ 0, to 2 units in the last place; 0 below -126; NaN for NaN."""
    y = np.float32(-126) if x < np.float32(-126) else np.float32(x)
    n = np.floor(y + np.float32(0.5))
    r = y - n
    p = np.float32(1.53375769e-4)
    p = p * r + np.float32(1.33998604e-3)
    p = p * r + np.float32(9.61851953e-3)
    p = p * r + np.float32(5.55032900e-2)
    p = p * r + np.float32(2.40226466e-1)
    p = p * r + np.float32(6.93147206e-1)
    p = p * r + np.float32(1)
    power = float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return np.float32(0) if x < np.float32(-126) else p * power
