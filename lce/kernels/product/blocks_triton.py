"""Matrices of GGUF blocks on GPUs: weights are unpacked in registers, for products or to be stored."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lce.kernels.product.blocks import BlockMatrix, BlockType
from lce.kernels.runtime.launching import launch

COLUMNS = 1024  # weights of a row that a program unpacks at a time


@dataclass(frozen=True)
class Shape:
    """The constants for which `_unpack` is compiled."""

    kind: BlockType
    size: int  # the number of weights of a row
    columns: int  # weights that a program unpacks


def stored_in(matrix: BlockMatrix) -> tuple[tuple[Tensor, ...], ...]:
    """Return a matrix' parts as kernels take them: a tuple of one tensor each, empty for missing parts."""
    names = ("codes", "d", "high", "scales", "more", "low")
    return tuple((matrix.parts[name],) if name in matrix.parts else () for name in names)


def unpack(matrix: BlockMatrix, ids: Tensor | None, first: int, out: Tensor) -> Tensor:
    """Write rows of the matrix to `out [T, in]`: the rows `ids [T]`, or those from row `first` on; return `out`.

    One launch. Bytes moved: the blocks and the result once.
    """
    (n, size), kind = out.shape, matrix.kind
    fits = size == matrix.shape[1] and out.is_contiguous()
    assert fits, (out.shape, out.stride(), matrix.shape)
    columns = min(COLUMNS, max(kind.group, triton.next_power_of_2(size)))
    shape, rows = Shape(kind, size, columns), () if ids is None else (ids,)
    launch(_unpack, (n, triton.cdiv(size, columns)), out, stored_in(matrix), rows, first, P=shape)
    return out


@triton.jit
def _unpack(out, stored, ids, first, P: tl.constexpr):
    """Write `P.columns` weights of a row."""
    row = tl.program_id(0) + tl.arange(0, 1)
    line = row.to(tl.int64) + first
    if len(ids):
        line = tl.load(ids[0] + row)
    start = tl.program_id(1) * P.columns
    here = start + tl.arange(0, P.columns)
    w = weights(stored, line, row >= 0, start, 1, P)
    to = out + row.to(tl.int64)[:, None] * P.size + here[None, :]
    tl.store(to, w.to(out.dtype.element_ty), mask=(here < P.size)[None, :])


@triton.jit
def weights(stored, lines, there, first, ROWS: tl.constexpr, P: tl.constexpr):
    """Return `P.columns` weights of the rows `lines`, from column `first` on, as float32: `[ROWS, P.columns]`."""
    K: tl.constexpr = P.kind
    N_GROUPS: tl.constexpr = P.columns // K.group
    row, groups = lines.to(tl.int64)[:, None, None], first // K.group + tl.arange(0, N_GROUPS)[None, :, None]
    inside = there[:, None, None] & (groups < P.size // K.group)
    scale, low = _scales(stored, row, groups, inside, P)
    place = groups * K.group + tl.arange(0, K.group)[None, None, :]
    code = _field(stored[0][0], row, place, inside, K.bits, K.run, P)
    if K.high:
        code |= _field(stored[2][0], row, place, inside, K.high, K.high_run, P) << K.up
    if K.bits == 8:
        code = code.to(tl.int8).to(tl.int32)
    if K.looked_up:  # eight bytes of IQ4_NL's values each: -127..-10, 1..113
        values = tl.where(code < 8, -654466911485192063, 8167635493787864321)
        code = (values >> (code & 7).to(tl.int64) * 8).to(tl.int8).to(tl.int32)
    return (scale * (code - K.offset).to(tl.float32) + low).reshape(ROWS, P.columns)


@triton.jit
def _field(at, row, place, inside, BITS: tl.constexpr, RUN: tl.constexpr, P: tl.constexpr):
    """Return the fields of `BITS` bits of the weights `place`, as int32."""
    OF_RUN: tl.constexpr = RUN * 8 // BITS
    byte = place // OF_RUN * RUN + place % RUN
    found = tl.load(at + row * (P.size * BITS // 8) + byte, mask=inside, other=0).to(tl.int32)
    return found >> place % OF_RUN // RUN * BITS & (1 << BITS) - 1


@triton.jit
def _scales(stored, row, groups, inside, P: tl.constexpr):
    """Return the scale of each group, and what is added to its weights, as float32."""
    K: tl.constexpr = P.kind
    PER: tl.constexpr = K.size // K.group
    N: tl.constexpr = P.size // K.size
    block, j = groups // PER, groups % PER
    scale = tl.load(stored[1][0] + row * N + block, mask=inside, other=0.0).to(tl.float32)
    low = tl.zeros_like(scale)
    if len(stored[5]):
        low = tl.load(stored[5][0] + row * N + block, mask=inside, other=0.0).to(tl.float32)
    if K.scales == "pairs":  # two numbers of six bits
        at = stored[3][0] + (row * N + block) * 12 + j % 4
        a = tl.load(at, mask=inside, other=0).to(tl.int32)
        b = tl.load(at + 4, mask=inside, other=0).to(tl.int32)
        mixed = tl.load(at + 8, mask=inside, other=0).to(tl.int32)
        scale *= tl.where(j < 4, a & 63, mixed & 15 | a >> 2 & 48).to(tl.float32)
        low *= -tl.where(j < 4, b & 63, mixed >> 4 | b >> 2 & 48).to(tl.float32)
    elif K.scales == "nibbles":
        both = tl.load(stored[3][0] + row * (N * 16) + groups, mask=inside, other=0).to(tl.int32)
        scale *= (both & 15).to(tl.float32)
        low *= -(both >> 4).to(tl.float32)
    elif K.scales == "int8":
        sub = tl.load(stored[3][0] + row * (N * 16) + groups, mask=inside, other=0)
        scale *= sub.to(tl.int8, bitcast=True).to(tl.float32)
    elif K.scales == "q3_k":
        at = stored[3][0] + (row * N + block) * 12
        below = tl.load(at + j % 8, mask=inside, other=0).to(tl.int32) >> j // 8 * 4 & 15
        above = tl.load(at + 8 + j % 4, mask=inside, other=0).to(tl.int32) >> j // 4 * 2 & 3
        scale *= ((below | above << 4) - 32).to(tl.float32)
    elif K.scales == "iq4_xs":
        below = tl.load(stored[3][0] + row * (N * 4) + groups // 2, mask=inside, other=0).to(tl.int32)
        above = tl.load(stored[4][0] + row * (N * 2) + groups // 4, mask=inside, other=0).to(tl.int32)
        below, above = below >> j % 2 * 4 & 15, above >> j % 4 * 2 & 3
        scale *= ((below | above << 4) - 32).to(tl.float32)
    return scale, low
