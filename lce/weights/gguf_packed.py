"""Quantised GGUF tensors in memory: each type's layout, and how blocks are read and repacked without loss.

On GPUs blocks stay as they are, each field apart (`BlockMatrix`). On CPUs they are repacked:

Every weight keeps its value. Codes of 2 to 4 bits take 4 bits in memory, those of Q5_K and Q6_K 5 and 6, others 8.
MXFP4 has no layout: its scales are powers of two that float16 cannot hold.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.kernels.product.blocks import BLOCK_TYPES
from lce.kernels.product.quantised import arrange, put
from lce.kernels.runtime.shared import GGUF_LAYOUTS, Layout
from lce.progress import notice
from lce.sizes import size_text
from lce.system import give_back_freed_memory
from lce.weights.gguf_types import BY_NAME, Exploded
from lce.weights.packed import ROW_BLOCK, Scheme
from lce.weights.safetensors_file import Copies, Files, TensorInfo, read_ahead, read_into, too_large, unfit

_READ = 1 << 20  # the bytes that are read at once, at least `ROW_BLOCK` rows
_REPACKED = 1 << 17  # the weights that are repacked at once: what is made of them fits a core's cache

SCHEMES: Mapping[str, Scheme] = {name: Scheme("gguf", layout) for name, layout in GGUF_LAYOUTS.items()}
GPU_SCHEMES: Mapping[str, Scheme] = {name: Scheme("gguf", kind) for name, kind in BLOCK_TYPES.items()}


def put_blocks(layout: Layout, exploded: Exploded, n_rows: int, parts: Mapping[str, Tensor]) -> None:
    """Write the blocks of `n_rows` rows of a matrix to `parts`, which hold these rows alone."""
    arrange(layout, exploded.codes.reshape(n_rows, -1), parts["codes"])
    numbers: dict[str, NDArray[Any] | None] = {"scales": exploded.d, "mins": exploded.dmin}
    if layout.nested:
        numbers = {"scales": exploded.sub, "mins": exploded.submin}
        for n, of_super in enumerate([exploded.d] if exploded.dmin is None else [exploded.d, exploded.dmin]):
            put(of_super.reshape(n_rows, -1), parts["supers"][:, :, n])
    for part, each in numbers.items():
        if each is not None:
            put(each.reshape(n_rows, -1), parts[part])


@dataclass(frozen=True)
class Blocks:
    """A tensor that is converted when it is read: quantised, with another order of rows, or some columns alone.

    Row i of the tensor is row `order[i]` in the file. `parts` are the parts of a packed matrix, or under "" a plain
    tensor; without any, the tensor is only checked. `dtype` is the dtype of products with a packed matrix. The parts
    have the columns from `columns[0]` to before `columns[1]`, whole blocks; None: all columns.
    """

    name: str
    info: TensorInfo
    order: NDArray[np.int64] | None
    parts: Mapping[str, Tensor]
    dtype: torch.dtype
    columns: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and the width; a vector is one row."""
        return math.prod(self.info.shape[:-1]), self.info.shape[-1]

    @property
    def row_bytes(self) -> int:
        kind = BY_NAME[self.info.dtype]
        return self.shape[1] // kind.size * kind.n_bytes

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Return the first row, and the row after the last, of each piece to read."""
        step = max(ROW_BLOCK, _READ // max(1, self.row_bytes) // ROW_BLOCK * ROW_BLOCK)
        return ((first, min(first + step, self.shape[0])) for first in range(0, self.shape[0], step))

    def read(self, descriptor: int, first: int, stop: int) -> Copies:
        """Read rows `first..stop-1` into a packed matrix, or return copies to a plain tensor. Checks all weights."""
        order = self.order if len(self.info.shape) > 1 else None
        rows = np.arange(first, stop) if order is None else order[first:stop]
        lowest = int(rows.min())
        raw = np.empty((int(rows.max()) + 1 - lowest, self.row_bytes), np.uint8)
        read_into(memoryview(raw.reshape(-1)), descriptor, self.info.start + lowest * self.row_bytes, self.info.file)  # type: ignore[arg-type]
        if self.columns:
            first_byte, stop_byte = (column * self.row_bytes // self.shape[1] for column in self.columns)
            raw = raw[:, first_byte:stop_byte]
        if "d" in self.parts:
            return self._fields(raw if order is None else raw[rows - lowest], first, stop)
        step, found = max(ROW_BLOCK, _REPACKED // self.shape[1] // ROW_BLOCK * ROW_BLOCK), []
        for start in range(first, stop, step):
            chosen = rows[start - first : start - first + step] - lowest
            piece = raw[start - first : start - first + step] if order is None else raw[chosen]
            found += self._deliver(piece, start, start + len(chosen))
        return found

    def _fields(self, raw: NDArray[np.uint8], first: int, stop: int) -> Copies:
        """Return copies of the blocks' fields to a `BlockMatrix`. Only scales are looked at, except for float16."""
        fields = BY_NAME[self.info.dtype].fields(raw.reshape(-1, BY_NAME[self.info.dtype].n_bytes))
        scales = [fields[field] for part, field, _ in BLOCK_TYPES[self.info.dtype].fields if part in ("d", "low")]
        if self.dtype is torch.float16 or not all(np.isfinite(each).all() for each in scales):
            replace(self, parts={})._deliver(raw, first, stop)
        found = []
        for part, field, _ in BLOCK_TYPES[self.info.dtype].fields:
            own = np.ascontiguousarray(fields[field]).reshape(stop - first, -1)
            own = own if part in ("d", "low") else own.view(np.uint8)
            found.append((self.parts[part][first:stop], torch.from_numpy(own)))
        return found

    def _deliver(self, raw: NDArray[np.uint8], first: int, stop: int) -> Copies:
        kind, scheme = BY_NAME[self.info.dtype], SCHEMES.get(self.info.dtype)
        blocks, limit = raw.reshape(-1, kind.n_bytes), too_large(self.dtype)
        exploded = kind.explode(blocks) if "" not in self.parts and scheme else None
        if exploded is None or not kind.largest(exploded).max() < limit:  # the bound is quick, and may be too large
            weights = kind.dequantise(blocks)
            if not (largest := np.abs(weights).max()) < limit:
                raise unfit(self.info, self.name, self.dtype, bool(np.isfinite(largest)))
        if not self.parts:
            return []
        if exploded and scheme:
            place = slice(first // ROW_BLOCK, -(-stop // ROW_BLOCK))
            assert isinstance(scheme.layout, Layout)
            put_blocks(scheme.layout, exploded, stop - first, {name: x[place] for name, x in self.parts.items()})
            return []
        if len(self.info.shape) == 1:
            flat = weights.reshape(-1)
            return [(self.parts[""], torch.from_numpy(flat if self.order is None else flat[self.order]))]
        return [(self.parts[""][first:stop], torch.from_numpy(weights.reshape(self.parts[""][first:stop].shape)))]


def fill_blocks(blocks: Iterable[Blocks], files: Files) -> None:
    """Read tensors in the order of the files. Peak memory beside them: 30 MiB, four times as much if converted."""
    in_order = sorted(blocks, key=lambda each: (each.info.file, each.info.start))
    try:
        read_ahead(partial(each.read, files[each.info.file], *piece) for each in in_order for piece in each.pieces())
    finally:
        give_back_freed_memory()


def say_unpacked(matrices: Iterable[tuple[TensorInfo, int]], dtype: torch.dtype, devices: Iterable[object]) -> None:
    """Tell the user which matrices, given with their numbers of weights, are unpacked, and what memory that takes."""
    counts, more = Counter[str](), 0
    for info, n_weights in matrices:
        counts[info.dtype] += 1
        more += n_weights * dtype.itemsize - (info.stop - info.start)
    types, kind = ", ".join(f"{kind} ({n})" for kind, n in counts.items()), str(dtype).removeprefix("torch.")
    why = f"lce has no product for these types on {', '.join(sorted({*map(str, devices)}))}"
    notice(f"matrices of {types} are unpacked to {kind}, which takes {size_text(more)} more memory: {why}")
