"""Scalar functions for kernels: pointers from addresses, conversions of half-precision numbers, and exponentials."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from lce.kernels.runtime.compiling import ByDtype, by_dtype, inner, intrinsic_of
from lce.kernels.runtime.shared import ITEMSIZE

# Numba's type for stored numbers of each dtype: integers for bfloat16 and, on CPUs, float16, which Numba lacks.
STORED = {"float32": types.float32, "bfloat16": types.uint16, "float16": types.uint16}


@intrinsic
def pointer(typing: Any, address: Any, kind: Any) -> Any:
    """In a kernel, convert an address to a pointer to numbers of type `kind`, which `carray` turns into an array."""
    result = types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.intp, kind), generate


@inner
def following(at, kind, shape):
    """Return an array of numbers of type `kind` at an address, and the address behind the array."""
    array = carray(pointer(at, kind), shape)
    return array, at + array.nbytes


_F16, _F32, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
# The first two reinterpret bits as float32 and back. The last two convert float16, stored as bits, to float32 and back.
float_of_bits = intrinsic_of("float_of_bits", types.float32(types.uint32), lambda b, x: b.bitcast(x, _F32))
bits_of_float = intrinsic_of("bits_of_float", types.uint32(types.float32), lambda b, x: b.bitcast(x, _I32))
_float_of_half = intrinsic_of("float16", types.float32(types.uint16), lambda b, x: b.fpext(b.bitcast(x, _F16), _F32))
_half_of_float = intrinsic_of("half", types.uint16(types.float32), lambda b, x: b.bitcast(b.fptrunc(x, _F16), _I16))


@inner
def _read_bfloat16(bits):
    return float_of_bits(np.uint32(bits) << np.uint32(16))


@inner
def _write_bfloat16(number):
    bits = bits_of_float(np.float32(number))
    lowest = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))  # a sum of uint32 is uint64, unless it is cast
    rounded = np.uint32(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + lowest) >> np.uint32(16))
    is_nan = np.uint32(bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@inner
def _same(number):
    return np.float32(number)


# For each dtype: the type of a stored number, its size in bytes, and the conversions `read` from a stored number to
# float32 and `write` from float32 to a stored number, rounded to nearest even.
stored = ByDtype(STORED.__getitem__)
itemsize = ByDtype(ITEMSIZE.__getitem__)
read = ByDtype({"float32": _same, "bfloat16": _read_bfloat16, "float16": _float_of_half}.__getitem__)
write = ByDtype({"float32": _same, "bfloat16": _write_bfloat16, "float16": _half_of_float}.__getitem__)


@by_dtype(inner)
def read_row(at, first, n, wide, into):
    """Copy the n numbers after `first` of the array at an address to `into`, as float32.

    The array is float32 if `wide`, else of the dtype.
    """
    if wide:
        numbers = carray(pointer(at + 4 * first, types.float32), (n,))
        for i in range(n):
            into[i] = numbers[i]
    else:
        halves = carray(pointer(at + itemsize * first, stored), (n,))
        for i in range(n):
            into[i] = read(halves[i])


@by_dtype(inner)
def write_row(at, first, n, wide, row):
    """Copy the first n numbers of `row` to the places after `first` of an array as `read_row` reads it, rounded."""
    if wide:
        numbers = carray(pointer(at + 4 * first, types.float32), (n,))
        for i in range(n):
            numbers[i] = row[i]
    else:
        halves = carray(pointer(at + itemsize * first, stored), (n,))
        for i in range(n):
            halves[i] = write(row[i])


@inner
def sum_of_squares(x):
    """Add up the squares of float32 numbers."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


@inner
def exp(x):
    """Compute `e**x` in float32 for x ≤ 88, to within 2 units in the last place; NaN for NaN.

    For x below -87.33, the result is `e**-87.33`, about 1e-38. Unlike the C library's function, this one vectorises.
    """
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
def gate_power(x, gate):
    """Return the number p for which the activation `gate`, a value of `shared.GATES`, of x is `x / (1 + exp(p))`.

    GELU in its form with tanh is `x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3))`.
    """
    power = -x
    if gate == 2:
        power *= np.float32(1.5957691216) + np.float32(0.0713548163) * x * x
    return min(power, np.float32(88))


@inner
def exp2(x):
    """Compute `2**x` in float32 for x ≤ 126, to within 2 units in the last place; 0 below -126, NaN for NaN."""
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


@inner
def log2(x):
    """Compute the base-2 logarithm in float32 of a normal x > 0, to within 2 units in the last place; NaN for NaN."""
    x = np.float32(x)
    bits = bits_of_float(x)
    exponent = np.int32(bits - np.uint32(0x3F3504F3)) >> np.int32(23)  # x = m * 2**exponent, 0.7071 <= m < 1.4143
    m = np.float64(float_of_bits(bits - (np.uint32(exponent) << np.uint32(23))))
    s = (m - 1) / (m + 1)  # log(m) = 2 * (s + s**3/3 + s**5/5 + ...), |s| < 0.1716
    t = s * s
    series = 1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t / 11))))
    found = np.float32(exponent + 2.8853900817779268 * s * series)
    return found if x == x else x
