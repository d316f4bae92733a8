"""The small tensors of a context file: token ids, logits, the method's state. Checked, then read, on opening.

Tensors follow one another in the order of their names. Each header entry is compared with the tensors that a context of
this layout can have before any data is read, so that a hostile file costs no more memory than an honest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.cache.kv import UNROUNDED
from lce.cache.layout import CacheLayout
from lce.cache.manifest import KINDS, NAMES, REMEDY, Header, contradiction, is_signed, pread
from lce.cache.method_state import GrowingRows, MethodState, OpenChunk, RecentRows, Staged
from lce.errors import CapacityError, DataError
from lce.files import named
from lce.sizes import size_text
from lce.system import free_memory

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class FileTensor:
    """A small tensor in a file: its kind, its shape, and its bytes `start` to `stop`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start


def tensor_entries(tensors: Mapping[str, Tensor], start: int = 0) -> dict[str, dict[str, Any]]:
    """Return the header's entries for small tensors, which follow one another from `start` on, ordered by name."""
    entries: dict[str, dict[str, Any]] = {}
    for name, x in sorted(tensors.items()):
        span = [start, start := start + x.nbytes]
        entries[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": span}
    return entries


def tensors_of(header: Header, start: int, rows: Mapping[str, Any], path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a header except `rows`; these must fill the file from byte `start` to its end.

    Raises `DataError` where they do not.
    """
    found, at = {}, start
    for name, entry in sorted(header.entries.items()):
        if name in rows:
            continue
        small = _small(entry, header.start)
        if small is None or small.start != at:
            raise contradiction(path)
        found[name], at = small, small.stop
    if at != header.file_bytes:
        fault = "is cut short" if at > header.file_bytes else "has bytes that belong to nothing"
        raise DataError(f"{named(path)}: the file {fault}; it is damaged or incomplete: {REMEDY}")
    return found


def _small(entry: object, data_start: int) -> FileTensor | None:
    """Return the tensor that a header's entry describes, or None if the entry is invalid."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    kind, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    sizes = [*shape, *span] if isinstance(shape, list) and isinstance(span, list) else [-1]
    if not isinstance(kind, str) or kind not in KINDS or not all(type(x) is int and x >= 0 for x in sizes):
        return None
    if len(span) != 2 or len(shape) > _MOST_DIMENSIONS:
        return None
    if span[1] - span[0] != math.prod(shape) * KINDS[kind].itemsize:
        return None
    return FileTensor(KINDS[kind], tuple(shape), data_start + span[0], data_start + span[1])


def read_tensors(
    descriptor: int, path: Path, tensors: Mapping[str, FileTensor], manifest: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Read the small tensors, and check the manifest's digest.

    Raises `DataError` if the digest differs, and `CapacityError`, before reading, if memory cannot hold the tensors.
    """
    needed, free = sum(x.n_bytes for x in tensors.values()), free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise CapacityError(
            f"{named(path)} needs {size_text(needed)} of memory to be opened, and {size_text(free)} is available; "
            "free some memory"
        )
    found = {}
    for name, x in tensors.items():
        data = pread(descriptor, x.n_bytes, x.start, path)
        empty = torch.empty(x.shape, dtype=x.dtype)
        found[name] = torch.frombuffer(data, dtype=x.dtype).view(x.shape) if data else empty
    if not is_signed(manifest, found):
        raise DataError(f"{named(path)} was altered since it was written; {REMEDY}")
    return found


def check_unrounded(layout: CacheLayout, n_tokens: int, tensors: dict[str, FileTensor], path: Path) -> None:
    """Remove the tokens that have no row from `tensors`. Raise `DataError` if the tensors cannot be such tokens."""
    n_unrounded = n_tokens - layout.file(n_tokens).row_tokens
    if n_unrounded:
        shape = (2, layout.n_kv_heads, n_unrounded, layout.head_dim)
        for layer in range(layout.n_layers):
            found = tensors.pop(f"{UNROUNDED}/{layer}", None)
            if found is None or (found.dtype, found.shape) != (layout.dtype, shape):
                raise contradiction(path)


def check_state(layout: CacheLayout, n_tokens: int, tensors: Mapping[str, FileTensor], path: Path) -> None:
    """Raise `DataError` for tensors that cannot be the method's state after `n_tokens` tokens."""
    states = dict(layout.make_state(layout))
    for prefix, names in groupby(sorted(tensors), key=lambda name: name.rpartition("/")[0]):
        parts = {name[len(prefix) + 1 :]: tensors[name] for name in names}
        layer, _, name = prefix.removeprefix("layers/").partition("/")
        state = states.get(name)
        known = state is not None and layer.isascii() and layer.isdigit() and str(int(layer[:9])) == layer
        if state is None or not known or int(layer) >= layout.n_layers or not _possible(state, parts, n_tokens):
            raise contradiction(path)


def check_numbers(layout: CacheLayout, n_tokens: int, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise `DataError` if the values cannot be the method's state after `n_tokens` tokens.

    Refused are tensors that are not finite (unrounded keys and values too), numbers that do not fit their tensor, and
    tensors that the method itself refuses.
    """
    states = layout.make_state(layout)
    for layer in range(layout.n_layers):
        unrounded = tensors.get(f"{UNROUNDED}/{layer}")
        if unrounded is not None and not _is_finite(unrounded):
            raise contradiction(path)
        kept = {}
        for name, state in states.items():
            at = f"layers/{layer}/{name}/"
            number, tensor = tensors.get(f"{at}number"), tensors.get(f"{at}tensor")
            if number is None or tensor is None:
                continue
            if not _is_finite(tensor) or not _agrees(state, tensor, int(number), n_tokens):
                raise contradiction(path)
            kept[name] = tensor
        if not layout.could_keep(layer, kept, layout, n_tokens):
            raise contradiction(path)


def _is_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite; checks their sum first."""
    return not x.is_floating_point() or bool(x.sum().isfinite()) or bool(x.isfinite().all())


def _possible(state: MethodState, parts: Mapping[str, FileTensor], n_tokens: int) -> bool:
    """Return whether a state after `n_tokens`, in blocks of any size, can be saved as these tensors."""
    if parts.keys() != {"tensor", "number"} or (parts["number"].dtype, parts["number"].shape) != (torch.int64, ()):
        return False
    tensor = parts["tensor"]
    possible = tensor.dtype in _FLOATS or isinstance(state, Staged)
    return possible and tensor.n_bytes <= state.most_bytes(n_tokens, n_tokens)


def _agrees(state: MethodState, tensor: Tensor, number: int, n_tokens: int) -> bool:
    """Return whether a state's number fits its tensor: see the kinds of `MethodState`."""
    shape, row_bytes = tensor.shape, tensor.element_size() * tensor.shape[0] * tensor.shape[-1] if tensor.ndim else 0
    if isinstance(state, GrowingRows):
        return tensor.ndim > state.axis and shape[state.axis] == number <= n_tokens // state.tokens_per_row
    if isinstance(state, RecentRows):
        first = max(0, n_tokens - state.n_kept)
        return tensor.ndim == 3 and row_bytes == state.row_bytes and (number, shape[1]) == (first, n_tokens - first)
    if isinstance(state, OpenChunk):
        current, rest = divmod(n_tokens, state.size)
        in_order = number == current if rest else 0 <= number <= current
        return tensor.ndim == 3 and row_bytes == state.row_bytes and shape[1] == state.size and in_order
    return 0 <= number <= n_tokens
