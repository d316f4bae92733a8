"""A context as one safetensors file; the facts that an engine must match are JSON in the header.

    layers.I.kv       [groups, N, 2, P, D]  keys and values, a row for each token and head group; read as needed
    layers.I.checks   [groups, N]           a number for each row that reveals damage when the row is read
    others            small tensors: token ids, logits, the method's state; read and checked on opening

If the format rounds, the rows are those of stored pages (`lce.cache.formats`): all complete chunks that local attention
does not see. Later tokens are small tensors, as the model computed them.

    layers.I.kv       [groups, R, bytes]    R = chunks · (L + 2)
    unrounded/I       [2, G, n, D]

Rows and checks have fixed offsets, so that a long prefill writes them as it goes, and the rest, with the header, at the
end. An unfinished file has another name and is locked; it is renamed once complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lce.cache.checks import FiledChecks, Numbers, write_all
from lce.cache.file_tensors import (
    FileTensor,
    check_numbers,
    check_state,
    check_unrounded,
    read_tensors,
    tensor_entries,
    tensors_of,
)
from lce.cache.kv import UNROUNDED, KVCache
from lce.cache.layer import KVBuffer, LayerCache, Opened, Residency, Tiered
from lce.cache.layout import CacheLayout, FileLayout
from lce.cache.manifest import NAMES, REMEDY, Header, Manifest, contradiction, page_facts, read_header, signed
from lce.cache.row_file import Descriptor, RowFile, SpillFile
from lce.cache.tiers import Disk, Nowhere, Pages, TierStack
from lce.errors import DataError
from lce.files import lock, named, open_regular, sync_folder, unwritable


class ContextRows(RowFile):
    """The rows of a context file: token t of head group g is row `g · N + t`, or later if pages have extra rows."""

    def __init__(self, descriptor: int, name: str, layout: FileLayout, *, writable: bool) -> None:
        checks = FiledChecks(descriptor, name, layout.checks_start, layout.n_rows)
        super().__init__(
            descriptor,
            name,
            layout.cache.format,
            checks,
            start=layout.rows_start,
            n_rows=layout.n_rows,
            writable=writable,
        )
        self.layout = layout

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        if not self.writable:
            return super().allocate_pages(groups, chunks, size)
        return self.first_rows(groups, chunks * self.layout.cache.chunk_size)

    def for_fork(self) -> RowFile:
        """Return the file for a fork: read-only if this context writes it, as a token has one row for one context."""
        if not self.writable:
            return self
        return ContextRows(os.dup(self._descriptor), self.name, self.layout, writable=False)

    def first_rows(self, groups: Numbers, tokens: int | Numbers) -> Numbers:
        """Return the first row of a token for head groups counted over all layers."""
        rows: Numbers = groups * self.layout.group_rows + self.layout.cache.file_rows(tokens)
        return rows


class Draft:
    """An unfinished context file at `path`. `rows` take keys and values; `finish` renames the file."""

    def __init__(self, path: Path, descriptor: int, layout: FileLayout) -> None:
        self.path = path
        self.layout = layout
        self.rows = ContextRows(descriptor, named(path), layout, writable=True)
        self._descriptor = descriptor  # closed by `rows`

    @classmethod
    def create(cls, path: Path, layout: FileLayout) -> Draft:
        """Create a file, with disk space for its rows reserved.

        Raises `CapacityError` if the disk has too little.
        """
        try:
            return cls._locked(path, layout, os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:  # another process removed the file before it was locked
            return cls._locked(path, layout, os.O_CREAT | os.O_EXCL)

    @classmethod
    def reopen(cls, path: Path, layout: FileLayout) -> Draft:
        """Open an unfinished file whose process has ended."""
        return cls._locked(path, layout, 0)

    @classmethod
    def _locked(cls, path: Path, layout: FileLayout, how: int) -> Draft:
        try:
            descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o644))
        except OSError as error:
            raise unwritable(path, error) from error
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
                raise unwritable(path, error) from error
            raise

    def finish(self, target: Path, small: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Write the rest and rename the file to `target`."""
        rows_start, offset = self.layout.rows_start, self.layout.small_start
        entries = row_entries(self.layout) | tensor_entries(small, offset - rows_start)
        for _, tensor in sorted(small.items()):
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            write_all(self._descriptor, memoryview(data), offset, named(target))  # type: ignore[arg-type]
            offset += tensor.nbytes
        raw = json.dumps({"__metadata__": {"lce": signed(manifest, small)}, **entries}).encode()
        assert len(raw) <= rows_start - 8, "the header is larger than its space"
        head = (rows_start - 8).to_bytes(8, "little") + raw.ljust(rows_start - 8)
        write_all(self._descriptor, memoryview(head), 0, named(target))
        try:
            os.ftruncate(self._descriptor, offset)
            os.fsync(self._descriptor)
            os.replace(self.path, target)
            sync_folder(target.parent)
        except OSError as error:
            raise unwritable(target, error) from error

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.rows.close()


def row_entries(layout: FileLayout) -> dict[str, dict[str, Any]]:
    """Return the rows' part of a safetensors header."""
    cache, offset, entries = layout.cache, 0, {}
    shape = [cache.n_groups, layout.group_rows]
    for what, kind, row, row_bytes in (
        ("kv", NAMES[cache.format.row_dtype], list(cache.format.row_shape), cache.format.row_bytes),
        ("checks", "I32", [], 4),
    ):
        for layer in range(cache.n_layers):
            span = [offset, offset := offset + cache.n_groups * layout.group_rows * row_bytes]
            entries[f"layers.{layer}.{what}"] = {"dtype": kind, "shape": [*shape, *row], "data_offsets": span}
    return entries


@dataclass(frozen=True)
class Snapshot:
    """An opened context file: its manifest, its small tensors, and its rows."""

    manifest: Manifest
    small: dict[str, Tensor]
    rows: ContextRows


def open_snapshot(
    path: Path,
    layout: CacheLayout,
    identify: Callable[[Manifest], None] = lambda manifest: None,
    check: Callable[[Manifest, dict[str, FileTensor]], None] = lambda manifest, small: None,
) -> Snapshot:
    """Open a context file; reads all but keys and values.

    `identify` may refuse the manifest, and `check` the small tensors besides the method's state, by raising
    `DataError`; `check` removes the tensors that it knows from the mapping. Raises `DataError` for a file that is no
    context, that is damaged, or whose rows do not fit `layout`. Nothing large is read or allocated before the whole
    header is checked.
    """
    descriptor = Descriptor(open_regular(path, follow=False))
    try:
        header = read_header(descriptor, path)
        manifest = Manifest.of(header.manifest, path)
        identify(manifest)
        rows_layout = _rows_layout(path, layout, header, manifest)
        tensors = tensors_of(header, rows_layout.small_start, row_entries(rows_layout), path)
        state = dict(tensors)
        check(manifest, state)
        check_unrounded(layout, manifest.read, state, path)
        check_state(layout, manifest.read, state, path)
        small = read_tensors(descriptor, path, tensors, manifest.raw)
        check_numbers(layout, manifest.read, small, path)
        rows = ContextRows(descriptor, named(path), rows_layout, writable=False)
    except BaseException:
        descriptor.close()
        raise
    return Snapshot(manifest, small, rows)


def _rows_layout(path: Path, layout: CacheLayout, header: Header, manifest: Manifest) -> FileLayout:
    """Return the rows' offsets. Raises `DataError` unless header and file size agree with `layout`."""
    found = layout.file(manifest.capacity)
    if (
        manifest.pages != page_facts(layout)
        or header.start != found.rows_start
        or any(header.entries.get(name) != entry for name, entry in row_entries(found).items())
    ):
        raise contradiction(path)
    if found.small_start > header.file_bytes:
        raise DataError(f"{named(path)}: the file is cut short; it is damaged or incomplete: {REMEDY}")
    return found


@torch.inference_mode()  # reading may fill pools made in inference mode
def write_rows(cache: KVCache, rows: ContextRows, since: int = 0) -> None:
    """Write the keys and values of committed tokens, from `since` on, to a context file.

    If the file is the bottom of the cache's own tiers, old chunks are there already, or are written once.
    """
    layout, own = cache.layout, False
    for tiers in cache.stacks:
        if isinstance(tiers.bottom, Disk) and tiers.bottom.file is rows:
            tiers.write_down()
            own = True
    for layer in cache.layers:
        first = layer.buffer.first if own else 0  # layers differ after an interrupted pass
        groups = np.arange(layer.index * layout.n_groups, (layer.index + 1) * layout.n_groups)
        begin = max(layout.old(since) if layout.format.rounds else since, first)
        for start, stop in layer.segments(begin, layout.file(layer.length).row_tokens):
            found = layout.format.span_to_rows(*layer.span(start, stop))
            for row, part in zip(rows.first_rows(groups, start).tolist(), found, strict=True):
                rows.write(row, part)


def restored(
    layout: CacheLayout, rows: ContextRows, n_tokens: int, tensors: Mapping[str, Tensor], *, own: bool
) -> KVCache:
    """Return the cache saved as `rows` and `tensors` at `n_tokens` tokens. Old keys and values stay in the file.

    New tokens go to memory. Beyond the budget they go to `rows` if these are the cache's `own`, else to a spill file,
    if any.
    """
    residencies: list[Residency] = []
    layers: list[LayerCache] = []
    for part in layout.by_device:
        tiers = _tiers_over(part, rows, n_tokens, own=own)
        overflows = (own or part.overflows) and part.budget is not None
        residency = Tiered(tiers) if overflows else Opened(tiers)
        residencies.append(residency)
        for number in range(part.n_layers):
            layers.append(_restored_layer(part, part.first_layer + number, residency, rows, n_tokens, tensors))
    return KVCache(layout, layers, residencies)


def _tiers_over(layout: CacheLayout, rows: ContextRows, n_tokens: int, *, own: bool) -> TierStack:
    """Return the tiers of one device's layers, with old chunks in `rows`."""
    bottom = Disk(layout, rows, Nowhere())
    old = Pages.grid(np.arange(layout.n_layers * layout.n_groups), np.arange(layout.old(n_tokens) // layout.chunk_size))
    bottom.row[old] = rows.first_rows(old.group + layout.first_group, old.chunk * layout.chunk_size)
    if not own and layout.budgets.spill_dir is not None:
        bottom = Disk(layout, SpillFile(layout.budgets.spill_dir, layout.format), bottom)
    return TierStack(layout, bottom)


def _restored_layer(
    layout: CacheLayout, index: int, residency: Residency, rows: ContextRows, n_tokens: int,
    tensors: Mapping[str, Tensor],
) -> LayerCache:  # fmt: skip
    """Return a layer with its recent tokens in the buffer, and the method's state."""
    border = layout.old(n_tokens)
    buffer = KVBuffer(layout, max(layout.recent_tokens, n_tokens - border), border)
    stop = layout.file(n_tokens).row_tokens
    if stop > border:
        groups = np.arange(index * layout.n_groups, (index + 1) * layout.n_groups)
        found = rows.read_pages(rows.first_rows(groups, border), stop - border)
        recent = found.permute(2, 0, 3, 1, 4).flatten(1, 2)  # [groups, n, 2, P, D] -> [2, G, n, D]
    else:
        recent = tensors.get(f"{UNROUNDED}/{index}", buffer.k.new_empty(2, *buffer.k[:, :0].shape))
    for x, kept in zip(buffer.span(border, n_tokens), recent, strict=True):
        x.copy_(kept)
    state = layout.make_state(layout)
    for name, own_state in state.items():
        at = f"layers/{index}/{name}/"
        own_state.restore({key[len(at) :]: x.to(layout.device) for key, x in tensors.items() if key.startswith(at)})
    return LayerCache(index, layout, buffer, residency, state, n_tokens)
