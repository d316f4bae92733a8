"""A context as a file: one safetensors file, with what must match to use it as JSON in its header.

    layers.I.kv       [groups, N, 2, P, D]  keys and values, a row for each token and head group; read as needed
    layers.I.checks   [groups, N]           a number for each row, by which damage is found when the row is read
    others            what is small: token ids, logits, what the method keeps; read and checked on opening

The first two have their offsets from the start, so that a long prefill writes them as it goes, and the rest, with the
header, at its end. A file under work has another name and is locked. It takes its own name whole, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lce.cache.kv import KVBuffer, KVCache, LayerCache, Opened, Tiered, Whole
from lce.cache.layout import CacheLayout, FileLayout
from lce.cache.row_file import Descriptor, Numbers, RowFile, SpillFile, write_at
from lce.cache.tiers import Disk, Nowhere, Pages, TierStack
from lce.errors import DataError
from lce.files import lock, map_copy, sync_folder, unwritable
from lce.weights.header import Damaged, TensorInfo, read_all

FORMAT = "lce context 2"
REMEDY = "prefill the text again"
KINDS = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64,
    "I32": torch.int32, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}


class ContextRows(RowFile):
    """The rows of a context file: token t of head group g is row `g · N + t`."""

    def __init__(self, descriptor: int, name: str, layout: FileLayout, *, writable: bool) -> None:
        mapping = mmap.mmap(descriptor, layout.small_start) if writable else map_copy(descriptor, layout.small_start)
        checks = torch.frombuffer(mapping, dtype=torch.int32, offset=layout.checks_start, count=layout.n_rows)
        super().__init__(
            descriptor, name, layout.cache.row_shape, layout.cache.dtype, start=layout.rows_start,
            n_rows=layout.n_rows, checks=checks, writable=writable,
        )  # fmt: skip
        self.layout = layout
        self._checks_map = mapping

    def _mappings(self) -> list[mmap.mmap]:
        return [*super()._mappings(), self._checks_map]

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        if not self._writable:
            return super().allocate_pages(groups, chunks, size)
        return self.first_rows(groups, chunks * size)

    def first_rows(self, groups: Numbers, tokens: Numbers | int) -> Numbers:
        """The row of a token of each head group, counted over all layers."""
        rows: Numbers = groups * self.layout.n_tokens + tokens
        return rows


class Draft:
    """A context file under work. `path` is where it is, `rows` take keys and values; `finish` gives it its name."""

    def __init__(self, path: Path, descriptor: int, layout: FileLayout) -> None:
        self.path = path
        self.layout = layout
        self.rows = ContextRows(descriptor, str(path), layout, writable=True)
        self._descriptor = descriptor  # the rows close it

    @classmethod
    def create(cls, path: Path, layout: FileLayout) -> Draft:
        """A new file, with disk space for its rows reserved. Raises `CapacityError` where the disk has too little."""
        try:
            return cls._locked(path, layout, os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:  # another process removed it as a leftover before it was locked
            return cls._locked(path, layout, os.O_CREAT | os.O_EXCL)

    @classmethod
    def reopen(cls, path: Path, layout: FileLayout) -> Draft:
        """A file that was under work when its process ended."""
        return cls._locked(path, layout, 0)

    @classmethod
    def _locked(cls, path: Path, layout: FileLayout, how: int) -> Draft:
        try:
            descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o644))
        except OSError as error:
            raise unwritable(str(path), error) from error
        try:
            lock(descriptor, path)
            if os.fstat(descriptor).st_nlink == 0:
                raise FileNotFoundError
            os.posix_fallocate(descriptor, 0, layout.small_start)
            return cls(path, descriptor, layout)
        except FileNotFoundError:
            descriptor.close()
            raise
        except BaseException as error:
            descriptor.close()
            if how:
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise unwritable(str(path), error) from error
            raise

    def finish(self, target: Path, small: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Write the rest and rename the file to `target`."""
        header = row_entries(self.layout)
        offset, rows_start = self.layout.small_start, self.layout.rows_start
        for name, tensor in sorted(small.items()):
            data = tensor.detach().cpu().contiguous()
            write_at(self._descriptor, data, offset, str(target))
            span = [offset - rows_start, (offset := offset + data.nbytes) - rows_start]
            header[name] = {"dtype": _NAMES[data.dtype], "shape": list(data.shape), "data_offsets": span}
        raw = json.dumps({"__metadata__": {"lce": signed(manifest, small)}, **header}).encode()
        assert len(raw) <= rows_start - 8, "the header is larger than its space"
        head = (rows_start - 8).to_bytes(8, "little") + raw.ljust(rows_start - 8)
        write_at(self._descriptor, torch.frombuffer(bytearray(head), dtype=torch.uint8), 0, str(target))
        try:
            os.ftruncate(self._descriptor, offset)
            os.fsync(self._descriptor)
            os.replace(self.path, target)
            sync_folder(target.parent)
        except OSError as error:
            raise unwritable(str(target), error) from error

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.rows.close()


def row_entries(layout: FileLayout) -> dict[str, dict[str, Any]]:
    """The rows' part of a safetensors header."""
    cache, offset, entries = layout.cache, 0, {}
    shape = [cache.n_groups, layout.n_tokens]
    for what, kind, row, row_bytes in (
        ("kv", _NAMES[cache.dtype], list(cache.row_shape), cache.row_bytes),
        ("checks", "I32", [], 4),
    ):
        for layer in range(cache.n_layers):
            span = [offset, offset := offset + cache.n_groups * layout.n_tokens * row_bytes]
            entries[f"layers.{layer}.{what}"] = {"dtype": kind, "shape": [*shape, *row], "data_offsets": span}
    return entries


def page_facts(layout: CacheLayout) -> dict[str, Any]:
    """A page's shape as a manifest holds it."""
    return {
        "n_layers": layout.n_layers, "n_groups": layout.n_groups, "heads": layout.page_heads,
        "chunk_size": layout.chunk_size, "head_dim": layout.head_dim, "dtype": _NAMES[layout.dtype],
    }  # fmt: skip


def signed(manifest: Mapping[str, Any], small: Mapping[str, Tensor]) -> str:
    """A manifest as JSON text, with the digest of itself and of what is small."""
    return json.dumps({**manifest, "digest": digest(small, manifest)})


def is_signed(manifest: Mapping[str, Any], small: Mapping[str, Tensor]) -> bool:
    """Whether a manifest has the digest of itself and of what is small: neither changed since it was written."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return bool(manifest.get("digest") == digest(small, rest))


def digest(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any] | None = None) -> str:
    """A SHA-256 of named tensors, and of a manifest."""
    found = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, _NAMES[tensor.dtype], list(tensor.shape)]).encode())
        found.update(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return found.hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """A context file that was opened: its manifest, what is small, and its rows."""

    manifest: dict[str, Any]
    small: dict[str, Tensor]
    rows: ContextRows


def open_snapshot(path: Path, layout: CacheLayout, check: Callable[[Mapping[str, Any]], None]) -> Snapshot:
    """Read a context file but for its keys and values. `check` may refuse its manifest by raising `DataError`.

    Raises `DataError` for a file that is no context, that is damaged, or whose rows are not those of `layout`.
    """
    try:
        descriptor = Descriptor(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as error:
        what = (
            "is a symbolic link; expected the file itself" if path.is_symlink() else f"cannot be read: {error.strerror}"
        )
        raise DataError(f"{path} {what}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{path} is not a file; expected a context that `lce prefill` or Context.save wrote")
        tensors, manifest = _header(path)
        check(manifest)
        rows_layout = _rows_layout(path, layout, tensors, manifest)
        small = {
            name: _tensor(descriptor, path, info)
            for name, info in tensors.items()
            if info.start >= rows_layout.small_start
        }
        if not is_signed(manifest, small):
            raise DataError(f"{path} was altered since it was written; {REMEDY}")
        rows = ContextRows(descriptor, str(path), rows_layout, writable=False)
    except BaseException:
        descriptor.close()
        raise
    return Snapshot(manifest, small, rows)


def _header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    try:
        tensors, metadata = read_all(path)
    except Damaged as error:
        raise DataError(f"{path}: {error.what}; the file is damaged or incomplete: {REMEDY}") from None
    try:
        manifest = json.loads(metadata.get("lce", "null"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise DataError(f"{path} is not a context; expected a file that `lce prefill` or Context.save wrote")
    if manifest["format"] != FORMAT:
        raise DataError(f"{path} has the format {manifest['format']!r}; this lce reads {FORMAT!r}; {REMEDY}")
    return tensors, manifest


def _rows_layout(
    path: Path, layout: CacheLayout, tensors: Mapping[str, TensorInfo], manifest: Mapping[str, Any]
) -> FileLayout:
    """Where the rows are, if the header has them where `layout` puts them."""
    n_tokens = manifest.get("capacity")
    if manifest.get("pages") == page_facts(layout) and type(n_tokens) is int and n_tokens > 0:
        rows_layout = layout.file(n_tokens)
        if all(
            name in tensors
            and tensors[name].dtype == entry["dtype"]
            and tensors[name].shape == tuple(entry["shape"])
            and tensors[name].start == rows_layout.rows_start + entry["data_offsets"][0]
            for name, entry in row_entries(rows_layout).items()
        ):
            return rows_layout
    raise DataError(f"{path}: its header contradicts its contents; {REMEDY}")


def _tensor(descriptor: int, path: Path, info: TensorInfo) -> Tensor:
    if info.dtype not in KINDS:
        raise DataError(f"{path} has numbers of the unknown kind {info.dtype}; {REMEDY}")
    data = bytearray(os.pread(descriptor, info.stop - info.start, info.start))
    while len(data) < info.stop - info.start:  # one call reads 2 GiB at most
        more = os.pread(descriptor, info.stop - info.start - len(data), info.start + len(data))
        if not more:
            raise DataError(f"{path} was cut short while it was read; {REMEDY}")
        data += more
    if not data:
        return torch.empty(info.shape, dtype=KINDS[info.dtype])
    return torch.frombuffer(data, dtype=KINDS[info.dtype]).view(info.shape)


def write_rows(cache: KVCache, rows: ContextRows, since: int = 0) -> None:
    """Write the keys and values of committed tokens, from `since` on, to a context file.

    Where the file is the bottom of the cache's own tiers, old chunks are there already, or are written down once.
    """
    layout, residency, own = cache.layout, cache.residency, False
    if not isinstance(residency, Whole) and isinstance(bottom := residency.tiers.bottom, Disk) and bottom.file is rows:
        residency.tiers.write_down()
        own = True
    for layer in cache.layers:
        first = layer.buffer.first if own else 0  # after an interrupted pass layers differ
        groups = np.arange(layer.index * layout.n_groups, (layer.index + 1) * layout.n_groups)
        for start, stop in layer.segments(max(since, first), layer.length):
            k, v = (x.unflatten(0, (layout.n_groups, -1)) for x in layer.span(start, stop))
            found = torch.stack((k, v), dim=1).permute(0, 3, 1, 2, 4)  # [groups, 2, P, n, D] -> [groups, n, 2, P, D]
            for row, part in zip(rows.first_rows(groups, start).tolist(), found, strict=True):
                rows.write(row, part)


def restored(
    layout: CacheLayout, rows: ContextRows, n_tokens: int, tensors: Mapping[str, Tensor], *, own: bool
) -> KVCache:
    """The cache that `rows` and `tensors` were taken of, at `n_tokens`. Old keys and values stay in the file.

    What comes later goes to memory, and beyond the budget to `rows` where they are the cache's `own`, else to a spill
    file; where there is none it stays in the buffers.
    """
    border = max(n_tokens - layout.reach.local, 0) // layout.chunk_size * layout.chunk_size
    bottom = Disk(layout, rows, Nowhere())
    old = Pages.grid(np.arange(layout.n_layers * layout.n_groups), np.arange(border // layout.chunk_size))
    bottom.row[old] = rows.first_rows(old.group, old.chunk * layout.chunk_size)
    if not own and layout.budgets.spill_dir is not None:
        bottom = Disk(layout, SpillFile(layout.budgets.spill_dir, layout.row_shape, layout.dtype), bottom)
    tiers = TierStack(layout, bottom)
    overflows = (own or layout.overflows) and layout.budget is not None
    residency = Tiered(tiers) if overflows else Opened(tiers)
    layers = []
    for index in range(layout.n_layers):
        buffer = KVBuffer(layout, max(layout.recent_tokens, n_tokens - border), border)
        found = rows.read_pages(rows.first_rows(tiers.groups(index), border), n_tokens - border)  # [groups, n, 2, P, D]
        for kind, x in enumerate(buffer.span(border, n_tokens)):
            x.copy_(found[:, :, kind].transpose(1, 2).flatten(0, 1))
        state = layout.make_state(layout)
        for name, kept in state.items():
            at = f"layers/{index}/{name}/"
            kept.restore({key[len(at) :]: x.to(layout.device) for key, x in tensors.items() if key.startswith(at)})
        layers.append(LayerCache(index, layout, buffer, residency, state, n_tokens))
    return KVCache(layout, layers, residency)
