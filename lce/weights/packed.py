"""Packed matrices: weights that stay in their quantised blocks and are multiplied as they lie.

A quantised type is one file of this package: a `Scheme`, entered by `register`, and the matrix that the scheme makes.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

import lce.weights
from lce.errors import UsageError, nearest, shown
from lce.kernels.cpu import elementwise
from lce.kernels.cpu.products import product

ROW_BLOCK = 16  # `PackedMatrix.unpacked` begins at a multiple of this many rows
SCRATCH = 64 << 20  # bytes of unpacked rows that a product of many rows takes at a time, kept by each thread
_thread = threading.local()
_SCHEMES: dict[str, Scheme] = {}


class PackedMatrix(Protocol):
    """A matrix `shape`, `[out, in]`, of packed weights on the CPU. Never written after it was loaded."""

    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0,
        gated: bool = False, onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Multiply `x [T, in]`, contiguous, with the matrix transposed, for a few rows: see
        `lce.kernels.cpu.products.product`.

        The bits of a result row do not depend on the other rows.
        """

    def unpacked(self, first: int, out: Tensor) -> Tensor:
        """Fill `out [rows, in]`, of any dtype, with the rows from `first` on, a multiple of `ROW_BLOCK`; return it."""

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack the rows `ids [T]`: `[T, in]`."""


Matrix = Tensor | PackedMatrix


class Scheme(ABC):
    """A format of packed weights.

    `row_block` rows lie together: the first dimension of each stored tensor counts such blocks. `for_tokens` names the
    scheme of a model's embedding and head.
    """

    name: str
    row_block: ClassVar[int] = ROW_BLOCK
    for_tokens: ClassVar[str] = "int8"

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the name, shape and dtype of each stored tensor of a matrix `shape`."""

    @abstractmethod
    def matrix(self, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> PackedMatrix:
        """Return the matrix that these tensors hold."""

    @abstractmethod
    def pack(self, weight: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Round `weight [out, in]`, contiguous, into these tensors."""

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        """Return bytes of a matrix in memory and on disk."""
        return sum(math.prod(part) * dtype.itemsize for part, dtype in self.parts(shape).values())


def register(scheme: Scheme) -> None:
    """Make a scheme known by its name."""
    assert scheme.name not in _SCHEMES, f"two schemes are called {scheme.name}"
    _SCHEMES[scheme.name] = scheme


@functools.cache
def all_schemes() -> Mapping[str, Scheme]:
    """Return all schemes by name."""
    for module in pkgutil.iter_modules(lce.weights.__path__):
        importlib.import_module(f"{lce.weights.__name__}.{module.name}")
    return _SCHEMES


def scheme_of(name: object) -> Scheme | None:
    """Return the scheme that a user names; None for "auto", the weights as they are stored. Raises `UsageError`."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return None
    if not isinstance(name, str) or name not in all_schemes():
        raise UsageError(f"unknown weights {shown(name)}; {nearest(str(name), ['auto', *all_schemes()])}")
    return all_schemes()[name]


class Stacked:
    """Matrices of one width, one beneath the other, whose types may differ: itself a packed matrix."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self.parts = tuple(parts)
        self.shape = sum(part.shape[0] for part in parts), parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def with_biases(self, bias: Tensor | None) -> Iterator[tuple[Matrix, Tensor | None]]:
        """Yield each part with its rows of `bias [out]`."""
        start = 0
        for part in self.parts:
            stop = start + part.shape[0]
            yield part, None if bias is None else bias[start:stop]
            start = stop

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0,
        gated: bool = False, onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        found = [
            product(x, part, own, norm=norm, eps=eps) if isinstance(part, Tensor)
            else part.product(x, own, norm=norm, eps=eps)
            for part, own in self.with_biases(bias)
        ]  # fmt: skip
        out = torch.cat(found, dim=1)
        if gated:
            out = elementwise.silu_mul(out)
        return out if onto is None else onto.add_(out)

    def unpacked(self, first: int, out: Tensor) -> Tensor:
        """Unpack all parts. Products of many rows take `with_biases` instead."""
        whole = [
            part if isinstance(part, Tensor) else part.unpacked(0, out.new_empty(part.shape)) for part in self.parts
        ]
        return out.copy_(torch.cat([part.to(out.dtype) for part in whole])[first : first + len(out)])

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.unpacked(0, torch.empty(self.shape, dtype=dtype))[ids]


def scratch_of(n_rows: int, n_in: int, dtype: torch.dtype) -> Tensor:
    """Return memory of this thread for unpacked rows `[n_rows, n_in]`; it grows and stays, so that its pages are
    mapped.
    """
    needed = n_rows * n_in * dtype.itemsize
    memory: Tensor | None = getattr(_thread, "memory", None)
    if memory is None or len(memory) < needed:
        memory = _thread.memory = torch.empty(needed, dtype=torch.uint8)
    return memory[:needed].view(dtype).view(n_rows, n_in)
