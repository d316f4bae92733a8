"""The types in which GGUF files store tensors: each type's number in a file, and the size of its blocks.

A row of a tensor is a whole number of blocks. A block of a quantised type holds the codes of neighbouring weights of a
row, with their scales.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """A type: its `name` and its `number` in files. `size` weights take `n_bytes`."""

    name: str
    number: int
    size: int
    n_bytes: int


_ROWS = (
    ("F32", 0, 1, 4), ("F16", 1, 1, 2), ("BF16", 30, 1, 2),
    ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34),
    ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210), ("IQ4_NL", 20, 32, 18), ("IQ4_XS", 23, 256, 136), ("MXFP4", 39, 32, 17),
)  # fmt: skip
TYPES = {number: GgufType(name, number, size, n_bytes) for name, number, size, n_bytes in _ROWS}
