"""A saved context, which is the KV cache of a prefilled text, as one safetensors file.

A manifest in the JSON header names the model and the method that an engine must have to open the file. The tensors:

    layers.I.kv       [groups, N, 2, P, D]  the keys and values of layer I: a row for each token and head group
    layers.I.checks   [groups, N]           a checksum of each row, compared when the row is read
    layers/I/NAME/n   any shape             the method's state NAME of layer I; n is the state's number (`MethodState`)
    tokens, logits    [n] and [vocab]       the token ids, and the logits after the last token, if known

A head group is the P KV heads of a layer that share a page. Rows and checksums are read when they are needed. The other
tensors, called small, are read and checked on opening.

The format `int8` (`lce.cache.formats`) packs the complete chunks that local attention no longer sees. Only their
tokens have rows. Later tokens are stored in small tensors, in the model's dtype:

    layers.I.kv       [groups, R, bytes]    R = chunks · (L + 2)
    unrounded/I       [2, G, n, D]          the keys and values of the n later tokens

Rows and checksums have fixed offsets, so a long prefill writes each row when it is ready. The rest is written at the
end. Until then the file is locked and has a temporary name.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lce.cache import manifest as headers
from lce.cache.disk import Disk
from lce.cache.kv import UNROUNDED, KVCache
from lce.cache.layer import KVBuffer, LayerCache
from lce.cache.layout import CacheLayout, FileLayout, file_rows, state_of
from lce.cache.limits import Limits
from lce.cache.manifest import REMEDY, Check, Manifest, contradiction
from lce.cache.method_state import MethodState
from lce.cache.movers import Numbers
from lce.cache.row_file import Checks, Descriptor, RowFile, raw_bytes, write_all
from lce.cache.tier import Nowhere, Pages, Tier
from lce.cache.tiers import TierStack
from lce.errors import DataError
from lce.files import lock, named, open_regular, sync_folder, unwritable


class ContextRows(RowFile):
    """The rows of a context file. Of N tokens, without extra rows, token t of head group g has row `g · N + t`."""

    def __init__(self, descriptor: int, name: str, layout: FileLayout, file_id: str, *, writable: bool) -> None:
        seed = int(file_id, 16) - (1 << 63)  # from the file's identity to a signed number of 64 bits
        checks = Checks(descriptor, name, layout.checks_start, layout.n_rows, seed)
        super().__init__(descriptor, name, layout.cache.format, checks, layout.rows_start, layout.n_rows)
        self.writable = writable
        self.layout = layout
        self.file_id = file_id

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        if not self.writable:
            return super().allocate_pages(groups, chunks, size)
        return self.first_rows(groups, chunks * self.layout.cache.chunk_size)

    def for_fork(self) -> RowFile:
        """Return rows for a forked context: read-only, because only one context may write a token's row."""
        if not self.writable:
            return self
        return ContextRows(os.dup(self._descriptor), self.name, self.layout, self.file_id, writable=False)

    def first_rows(self, groups: Numbers, tokens: int | Numbers) -> Numbers:
        """Return the row number of each token in each head group. Groups are numbered over all layers."""
        rows: Numbers = groups * self.layout.group_rows + file_rows(self.layout.cache, tokens)
        return rows


class Draft:
    """An unfinished context file at `path`. Keys and values go to `rows`; `finish` completes and renames the file."""

    def __init__(self, path: Path, layout: FileLayout, file_id: str, *, new: bool = False) -> None:
        """Open the unfinished file that an ended process left at `path`, or, if `new`, create one as `create` does."""
        self.path = path
        self.layout = layout
        self.file_id = file_id
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
        try:
            self._descriptor = Descriptor(os.open(path, flags, 0o644))  # closed by `self.rows.close()`
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            lock(self._descriptor, path)
            if os.fstat(self._descriptor).st_nlink == 0:  # another process removed the file before it was locked
                raise FileNotFoundError
            os.posix_fallocate(self._descriptor, 0, layout.small_start)
            self.rows = ContextRows(self._descriptor, named(path), layout, file_id, writable=True)
        except BaseException as error:
            self._descriptor.close()
            if new and not isinstance(error, FileNotFoundError):
                path.unlink(missing_ok=True)
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise unwritable(path, error) from error
            raise

    @classmethod
    def create(cls, path: Path, layout: FileLayout) -> "Draft":
        """Create an unfinished file and reserve disk space for its rows. Raises `CapacityError` if the disk is full."""
        file_id = secrets.token_hex(8)
        try:
            return cls(path, layout, file_id, new=True)
        except FileNotFoundError:
            return cls(path, layout, file_id, new=True)

    def finish(
        self, target: Path, small: Mapping[str, Tensor], manifest: Mapping[str, Any], check: Callable[[Path], object]
    ) -> None:
        """Write the header and `small`; `check` the file, which may raise an error; then rename it to `target`."""
        start, offset, name = self.layout.rows_start, self.layout.small_start, named(target)
        entries = row_entries(self.layout) | headers.tensor_entries(small, offset - start)
        for _, tensor in sorted(small.items()):
            write_all(self._descriptor, raw_bytes(tensor), offset, name)
            offset += tensor.nbytes
        header = headers.header_bytes(entries, headers.signed(manifest, small), start)
        write_all(self._descriptor, memoryview(header), 0, name)
        try:
            os.ftruncate(self._descriptor, offset)
            check(self.path)
            os.fsync(self._descriptor)
            os.replace(self.path, target)
            sync_folder(target.parent)
        except OSError as error:
            raise unwritable(target, error) from error

    def discard(self) -> None:
        """Delete the unfinished file, and close it."""
        self.path.unlink(missing_ok=True)
        self.rows.close()


def row_entries(layout: FileLayout) -> dict[str, dict[str, Any]]:
    """Return the safetensors header's entries of the tensors `layers.I.kv` (rows) and `layers.I.checks` (checksums)."""
    format, n_layers, entries, offset = layout.cache.format, layout.cache.n_layers, {}, 0
    shape, n_rows = [layout.cache.n_groups, layout.group_rows], layout.n_rows // n_layers
    for what, kind, row, row_bytes in (
        ("kv", format.row_dtype, format.row_shape, format.row_bytes),
        ("checks", torch.int32, (), 4),
    ):
        for layer in range(n_layers):
            span = [offset, offset := offset + n_rows * row_bytes]
            entry = {"dtype": headers.NAMES[kind], "shape": [*shape, *row], "data_offsets": span}
            entries[f"layers.{layer}.{what}"] = entry
    return entries


@dataclass(frozen=True)
class Snapshot:
    """An opened context file: its manifest, its rows of keys and values, and all its other tensors in `small`."""

    manifest: Manifest
    small: dict[str, Tensor]
    rows: ContextRows


def open_snapshot(path: Path, layout: CacheLayout, identify: Callable[[Manifest], None], check: Check) -> Snapshot:
    """Open a context file and read everything except keys and values, after the whole header is checked.

    `identify` may refuse the manifest; `check` is passed to `read_small`. Raises `DataError` for a file that is no
    context, is damaged, or has rows that do not fit `layout`.
    """
    descriptor = Descriptor(open_regular(path, follow=False))
    try:
        header = headers.read_header(descriptor, path)
        identify(header.manifest)
        found = FileLayout(layout, header.manifest.capacity)
        expected = row_entries(found)
        if header.start != found.rows_start or any(header.entries.get(name) != x for name, x in expected.items()):
            raise contradiction(path)
        if found.small_start > header.file_bytes:
            raise DataError(f"{named(path)}: the file is cut short; it is damaged or incomplete: {REMEDY}")
        small = headers.read_small(header, layout, check, expected, found.small_start)
        rows = ContextRows(descriptor, named(path), found, header.manifest.file_id, writable=False)
        return Snapshot(header.manifest, small, rows)
    except BaseException:
        descriptor.close()
        raise


@torch.inference_mode()  # a read may write to memory of the tiers that was allocated in inference mode
def write_rows(cache: KVCache, rows: ContextRows, since: int = 0) -> None:
    """Write to a context file the keys and values of committed tokens from `since` on that are not in it yet."""
    layout = cache.layout
    own = [stack for stack in cache.stacks if isinstance(stack.bottom, Disk) and stack.bottom.file is rows]
    for stack in own:
        stack.write_down()
    for layer in cache.layers:
        first = layer.buffer.first if own else 0  # `buffer.first` may differ between layers after an interrupted pass
        groups = np.arange(layer.index * layout.n_groups, (layer.index + 1) * layout.n_groups)
        begin = max(layout.old(since) if layout.format.rounds else since, first)
        for start, stop in layer.segments(begin, FileLayout(layout, layer.length).row_tokens):
            k, v = (x.unflatten(0, (layout.n_groups, -1)) for x in layer.stored(start, stop))  # [groups, P, n, D]
            rows.write_pages(rows.first_rows(groups, start), layout.format.pack(k, v))


def restored(
    layout: CacheLayout, rows: ContextRows, n_tokens: int, tensors: Mapping[str, Tensor], *, own: bool
) -> KVCache:
    """Return the cache of `n_tokens` tokens that was saved in a context file as `rows` and small `tensors`.

    Keys and values of old chunks stay in the file. New tokens are kept in memory. Tokens beyond the memory budget
    go to `rows` if the cache may write to the file (`own`), else to a spill file if the layout has a folder for one.
    """
    stacks, layers = list[TierStack](), list[LayerCache]()
    for part in layout.by_device:
        bottom: Tier = Disk(part, Nowhere(), rows)
        groups, chunks = np.arange(part.n_layers * part.n_groups), np.arange(part.old(n_tokens) // part.chunk_size)
        old = Pages.grid(groups, chunks)
        bottom.index[old] = rows.first_rows(old.group + part.first_layer * part.n_groups, old.chunk * part.chunk_size)
        if not own and Disk.limit(part):
            bottom = Disk.build(part, bottom)
        stack = TierStack(part, bottom, growing=(own or Limits(part).overflows) and Limits(part).budget is not None)
        stacks.append(stack)
        layers += (_restored_layer(part, index, stack, rows, n_tokens, tensors) for index in part.layers)
    return KVCache(layout, layers, stacks)


def _restored_layer(
    layout: CacheLayout, index: int, stack: TierStack, rows: ContextRows, n: int, tensors: Mapping[str, Tensor]
) -> LayerCache:
    border, stop = layout.old(n), FileLayout(layout, n).row_tokens
    buffer = KVBuffer(layout, max(Limits(layout).recent_tokens, n - border), border)
    if stop > border:
        groups = np.arange(index * layout.n_groups, (index + 1) * layout.n_groups)
        found = rows.read_pages(rows.first_rows(groups, border), stop - border)
        recent = found.permute(2, 0, 3, 1, 4).flatten(1, 2)  # [groups, n, 2, P, D] -> [2, G, n, D]
    else:
        recent = tensors.get(f"{UNROUNDED}/{index}", buffer.k.new_empty(2, *buffer.k[:, :0].shape))
    buffer.fill(border, *recent)
    return LayerCache(index, layout, buffer, stack, restored_states(layout, index, tensors), n)


def restored_states(layout: CacheLayout, index: int, tensors: Mapping[str, Tensor]) -> Mapping[str, MethodState]:
    """Return the method's states of layer `index`, restored from the small `tensors` of a context file."""
    states = state_of(layout, index)
    for name, state in states.items():
        at = f"layers/{index}/{name}/"
        for number in sorted(int(key[len(at) :]) for key in tensors if key.startswith(at)):
            state.restore((tensors[f"{at}{number}"].to(layout.device), number))
    return states
