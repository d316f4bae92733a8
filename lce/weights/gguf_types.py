"""The types in which GGUF files store tensors: their numbers in files, their blocks, and what the blocks mean.

A row of a tensor is a whole number of blocks. A block of a quantised type holds the codes of neighbouring weights of a
row, with their scales. `TYPES` has the types that lce reads, `UNREAD` the names of the others.

With the largest |sub| and |code| of a type, `(2^11 - 1)·|sub|·|code|` is below 2^24, and float16 numbers have 11
significant bits. So `d·sub`, `(d·sub)·code` and `dmin·submin` are exact in float32; only the products' sum is rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # the values of four-bit floats, doubled


@dataclass(frozen=True)
class Exploded:
    """The codes and scales of n blocks. The groups of a block are of equal size; a group shares `sub` and `submin`.

    A weight is `(d·sub)·code`, `(d·sub)·code + dmin` if there is a `dmin` alone, and `(d·sub)·code - dmin·submin` if
    there are both. Without `sub`, a block is one group, and `sub` is 1. The scales may be views of the blocks.
    """

    codes: NDArray[np.int8]  # [n, size]
    d: NDArray[Any]  # [n], float16; float32 for MXFP4, whose powers of two float16 cannot hold
    sub: NDArray[Any] | None = None  # [n, groups], int8 or uint8
    dmin: NDArray[np.float16] | None = None  # [n]
    submin: NDArray[np.uint8] | None = None  # [n, groups]

    def weights(self) -> NDArray[np.float32]:
        """Return the weights `[n, size]`."""
        scales, low = self._products(self.d, self.sub), self._products(self.dmin, self.submin)
        found = self.codes.reshape(*scales.shape, self.codes.shape[1] // scales.shape[1]).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            found *= scales[..., None]
            if self.dmin is not None and self.submin is None:
                found += low[..., None]
            elif self.dmin is not None:
                found -= low[..., None]
        return found.reshape(self.codes.shape)

    @staticmethod
    def _products(d: NDArray[Any] | None, sub: NDArray[Any] | None) -> NDArray[np.float32]:  # [n, groups]
        whole = np.zeros((1, 1), np.float32) if d is None else d.astype(np.float32)[:, None]
        with np.errstate(invalid="ignore"):
            return whole if sub is None else whole * sub


@dataclass(frozen=True)
class GgufType:
    """A type: `size` weights take `n_bytes`. `codes` are the least and the largest code; None for plain floats."""

    name: str
    number: int
    size: int
    n_bytes: int
    codes: tuple[int, int] | None = None
    _explode: Callable[[Any], Exploded] | None = field(default=None, repr=False)
    _layout: np.dtype[Any] | None = field(default=None, repr=False)

    def explode(self, raw: NDArray[np.uint8]) -> Exploded:
        """Return the codes and scales of blocks `raw [n, n_bytes]`: 1.5 GB a second, without Python's lock."""
        assert self._explode is not None, f"{self.name} has no blocks"
        return self._explode(self.fields(raw))

    def fields(self, raw: NDArray[np.uint8]) -> NDArray[Any]:
        """Return blocks `raw [n, n_bytes]` as records `[n]` of the type's fields."""
        assert self._layout is not None, f"{self.name} has no blocks"
        return np.ascontiguousarray(raw).view(self._layout)[:, 0]

    def dequantise(self, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the weights `[n, size]` of the blocks `raw [n, n_bytes]`."""
        if self.codes:
            return self.explode(raw).weights()
        found = np.ascontiguousarray(raw).view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.name])
        return (found.astype(np.uint32) << 16).view(np.float32) if self.name == "BF16" else found.astype(np.float32)

    def largest(self, exploded: Exploded) -> NDArray[np.float32]:
        """Return a bound of each block's absolute weights, from its scales; NaN or infinite only if a weight can be."""
        assert self.codes is not None
        scales, low = exploded._products(exploded.d, exploded.sub), exploded._products(exploded.dmin, exploded.submin)
        with np.errstate(invalid="ignore", over="ignore"):
            most = np.abs(scales).max(1) * np.float32(max(map(abs, self.codes)))
            return most + np.abs(low).max(1)  # type: ignore[no-any-return]


def _fields(packed: NDArray[np.uint8], bits: int, up: int = 0) -> NDArray[np.uint8]:
    """Return the fields of `bits` bits in bytes `[n, runs, run]`, moved up by `up` bits: `[n, runs·(8 / bits)·run]`.

    A run gives the lowest fields of all its bytes, then the next ones. NumPy shifts 64-bit words at several times the
    speed of bytes. The mask clears the bits that come from a neighbouring byte.
    """
    n, runs, run = packed.shape
    words = np.ascontiguousarray(packed).reshape(-1).view(np.uint64)
    mask = np.uint64(0x0101010101010101 * ((1 << bits) - 1 << up))
    found = np.empty((n * runs, 8 // bits), f"V{run}")
    for index in range(8 // bits):
        shift = bits * index - up
        moved = words >> shift if shift > 0 else words << -shift
        moved &= mask
        found[:, index] = moved.view(f"V{run}")
    return found.view(np.uint8).reshape(n, runs * run * 8 // bits)


def _looked_up(packed: NDArray[np.uint8], table: tuple[int, ...]) -> NDArray[np.int8]:
    """Return the values of a table at the nibbles of bytes, in the order of `_fields`."""
    nibbles, values = _fields(packed, 4), np.array(table, np.int8).tobytes().ljust(256)
    return np.frombuffer(nibbles.tobytes().translate(values), np.int8).reshape(nibbles.shape)


def _with_k_scales(x: Any, codes: NDArray[np.uint8]) -> Exploded:
    """Add the six-bit `sub` and `submin [n, 8]` of Q4_K and Q5_K. The last four of each have bits in all words."""
    *lower, mixed = x["scales"].T
    pairs = [(word & 0x3F3F3F3F, mixed >> 4 * i & 0x0F0F0F0F | word >> 2 & 0x30303030) for i, word in enumerate(lower)]
    sub, submin = (np.stack(pair, axis=1).view(np.uint8) for pair in pairs)
    return Exploded(codes.view(np.int8), x["d"], sub, x["dmin"], submin)


def _five_bits(x: Any) -> NDArray[np.int8]:
    high = np.unpackbits(x["qh"], axis=1, bitorder="little").view(np.uint64) << 4
    return (_fields(x["qs"], 4) | high.view(np.uint8)).view(np.int8)


def _q2_k(x: Any) -> Exploded:
    return Exploded(_fields(x["qs"], 2).view(np.int8), x["d"], x["scales"] & 15, x["dmin"], x["scales"] >> 4)


def _q3_k(x: Any) -> Exploded:
    codes = _fields(x["qs"], 2) | _fields(x["hmask"], 1, up=2)
    a, b, high = x["scales"].T
    low = [a & 0x0F0F0F0F, b & 0x0F0F0F0F, a >> 4 & 0x0F0F0F0F, b >> 4 & 0x0F0F0F0F]
    sub = np.stack([word | (high >> 2 * i & 0x03030303) << 4 for i, word in enumerate(low)], axis=1)
    return Exploded(codes.view(np.int8) - np.int8(4), x["d"], sub.view(np.int8) - np.int8(32))


def _q5_k(x: Any) -> Exploded:
    return _with_k_scales(x, _fields(x["qs"], 4) | _fields(x["qh"], 1, up=4))


def _q6_k(x: Any) -> Exploded:
    codes = _fields(x["ql"], 4) | _fields(x["qh"], 2, up=4)
    return Exploded(codes.view(np.int8) - np.int8(32), x["d"], x["scales"])


def _iq4_xs(x: Any) -> Exploded:
    group = np.arange(8, dtype=np.uint32)
    sub = x["scales_l"][:, None] >> 4 * group & 15 | (x["scales_h"][:, None] >> 2 * group & 3) << 4
    return Exploded(_looked_up(x["qs"], _IQ4), x["d"], sub.astype(np.int8) - np.int8(32))


def _mxfp4(x: Any) -> Exploded:
    """Explode MXFP4, whose scale is 2^(e - 128), the half of what its four-bit floats are multiplied with."""
    e = x["e"].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(1 << 21) << e, np.maximum(e, 1) - 1 << 23)
    return Exploded(_looked_up(x["qs"], _E2M1), bits.astype(np.uint32).view(np.float32))


_D, _DMIN, _M, _FIFTH = ("d", "<f2"), ("dmin", "<f2"), ("m", "<f2"), ("qh", "u1", 4)
_QS, _LONG, _SCALES = ("qs", "u1", (1, 16)), ("qs", "u1", (4, 32)), ("scales", "<u4", 3)
_QUANTISED: tuple[tuple[str, int, int, tuple[int, int], Callable[[Any], Exploded], list[Any]], ...] = (
    ("Q4_0", 2, 32, (-8, 7), lambda x: Exploded(_fields(x["qs"], 4).view(np.int8) - np.int8(8), x["d"]), [_D, _QS]),
    ("Q4_1", 3, 32, (0, 15), lambda x: Exploded(_fields(x["qs"], 4).view("i1"), x["d"], dmin=x["m"]), [_D, _M, _QS]),
    ("Q5_0", 6, 32, (-16, 15), lambda x: Exploded(_five_bits(x) - np.int8(16), x["d"]), [_D, _FIFTH, _QS]),
    ("Q5_1", 7, 32, (0, 31), lambda x: Exploded(_five_bits(x), x["d"], dmin=x["m"]), [_D, _M, _FIFTH, _QS]),
    ("Q8_0", 8, 32, (-128, 127), lambda x: Exploded(np.ascontiguousarray(x["qs"]), x["d"]), [_D, ("qs", "i1", 32)]),
    ("Q2_K", 10, 256, (0, 3), _q2_k, [("scales", "u1", 16), ("qs", "u1", (2, 32)), _D, _DMIN]),
    ("Q3_K", 11, 256, (-4, 3), _q3_k, [("hmask", "u1", (1, 32)), ("qs", "u1", (2, 32)), _SCALES, _D]),
    ("Q4_K", 12, 256, (0, 15), lambda x: _with_k_scales(x, _fields(x["qs"], 4)), [_D, _DMIN, _SCALES, _LONG]),
    ("Q5_K", 13, 256, (0, 31), _q5_k, [_D, _DMIN, _SCALES, ("qh", "u1", (1, 32)), _LONG]),
    ("Q6_K", 14, 256, (-32, 31), _q6_k, [("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), _D]),
    ("IQ4_NL", 20, 32, (-127, 113), lambda x: Exploded(_looked_up(x["qs"], _IQ4), x["d"]), [_D, _QS]),
    ("IQ4_XS", 23, 256, (-127, 113), _iq4_xs, [_D, ("scales_h", "<u2"), ("scales_l", "<u4"), ("qs", "u1", (8, 16))]),
    ("MXFP4", 39, 32, (-12, 12), _mxfp4, [("e", "u1"), _QS]),
)
_PLAIN = GgufType("F32", 0, 1, 4), GgufType("F16", 1, 1, 2), GgufType("BF16", 30, 1, 2)
TYPES = {kind.number: kind for kind in _PLAIN} | {
    number: GgufType(name, number, size, np.dtype(layout).itemsize, codes, explode, np.dtype(layout))
    for name, number, size, codes, explode, layout in _QUANTISED
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
IN_BLOCKS = frozenset(name for name, *_ in _QUANTISED)  # the names of the quantised types
UNREAD = dict(enumerate(("Q4_2", "Q4_3"), 4)) | {9: "Q8_1", 15: "Q8_K", 21: "IQ3_S", 22: "IQ2_S"}
UNREAD |= dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), 16))
UNREAD |= dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M"), 24))
UNREAD |= dict(enumerate(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0"), 31))
UNREAD |= dict(enumerate(("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"), 36)) | {40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
