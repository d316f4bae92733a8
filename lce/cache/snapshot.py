"""A context as a file: one safetensors file, with what must match to use it as JSON in its header.

    layers.I.kv       [groups, N, 2, P, D]  keys and values, a row for each token and head group; read by memory map
    layers.I.checks   [groups, N]           a number for each row, by which damage is found when the row is read
    others            what is small: token ids, logits, chunk tables, summaries, state and stores, checked on opening

The first two have their place from the start, so that a long prefill writes them as it goes, and the rest, with the
header, when it is done. A file under work has another name and is locked; it takes its own name whole, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.cache.pool import PageShape
from lce.cache.rows import Numbers, RowFile, write_at
from lce.errors import DataError
from lce.files import lock, map_copy, sync_folder, unwritable
from lce.weights.header import Damaged, TensorInfo, read_all

FORMAT = "lce context 1"
REMEDY = "prefill the text again"
KINDS = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64,
    "I32": torch.int32, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Layout:
    """Where the rows of `n_tokens` tokens lie in a file."""

    pages: PageShape
    n_tokens: int

    @property
    def data_start(self) -> int:
        """The first byte behind the header, which has ample room."""
        return (16 + 8 * self.pages.n_layers) * 4096

    @property
    def n_rows(self) -> int:
        return self.pages.n_layers * self.pages.n_groups * self.n_tokens

    @property
    def checks_start(self) -> int:
        return self.data_start + self.n_rows * self.row_bytes

    @property
    def small_start(self) -> int:
        return self.checks_start + self.n_rows * 4

    @property
    def row_bytes(self) -> int:
        return self.pages.n_bytes // self.pages.chunk_size

    def entries(self) -> dict[str, dict[str, Any]]:
        """The rows' part of a safetensors header."""
        pages, offset, found = self.pages, 0, {}
        shape = [pages.n_groups, self.n_tokens]
        for what, kind, row in (("kv", _NAMES[pages.dtype], list(pages.row_shape)), ("checks", "I32", [])):
            size = pages.n_groups * self.n_tokens * (self.row_bytes if what == "kv" else 4)
            for layer in range(pages.n_layers):
                span = [offset, offset := offset + size]
                found[f"layers.{layer}.{what}"] = {"dtype": kind, "shape": [*shape, *row], "data_offsets": span}
        return found


class ContextRows(RowFile):
    """The rows of a context file: token t of a lane is row `lane · N + t`."""

    def __init__(self, descriptor: int, name: str, layout: Layout, *, writable: bool) -> None:
        mapping = mmap.mmap(descriptor, layout.small_start) if writable else map_copy(descriptor, layout.small_start)
        checks = torch.frombuffer(mapping, dtype=torch.int32, offset=layout.checks_start, count=layout.n_rows)
        super().__init__(
            descriptor, name, layout.pages.row_shape, layout.pages.dtype, start=layout.data_start,
            n_rows=layout.n_rows, checks=checks, writable=writable,
        )  # fmt: skip
        self.layout = layout
        self._checks_map = mapping

    def _mappings(self) -> list[mmap.mmap]:
        return [*super()._mappings(), self._checks_map]

    def place(self, lanes: Numbers, chunks: Numbers, size: int) -> Numbers:
        return self.first_rows(lanes, chunks * size) if self._writable else super().place(lanes, chunks, size)

    def first_rows(self, lanes: Numbers, tokens: Numbers | int) -> Numbers:
        """The row of a token of each lane."""
        rows: Numbers = lanes * self.layout.n_tokens + tokens
        return rows


class Draft:
    """A context file under work. `path` is where it is, `rows` take keys and values; `finish` gives it its name."""

    def __init__(self, path: Path, descriptor: int, layout: Layout) -> None:
        self.path = path
        self.layout = layout
        self.rows = ContextRows(descriptor, str(path), layout, writable=True)
        self._descriptor = descriptor  # the rows close it

    @classmethod
    def create(cls, path: Path, layout: Layout) -> Draft:
        """A new file, with the place of its rows reserved. Raises `CapacityError` where the disk has not so much."""
        try:
            return cls._locked(path, layout, os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:  # another process took it for a leftover before it was locked
            return cls._locked(path, layout, os.O_CREAT | os.O_EXCL)

    @classmethod
    def reopen(cls, path: Path, layout: Layout) -> Draft:
        """A file that was under work when its process ended."""
        return cls._locked(path, layout, 0)

    @classmethod
    def _locked(cls, path: Path, layout: Layout, how: int) -> Draft:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o644)
        except OSError as error:
            raise unwritable(str(path), error) from error
        try:
            lock(descriptor, path)
            if os.fstat(descriptor).st_nlink == 0:
                raise FileNotFoundError
            os.posix_fallocate(descriptor, 0, layout.small_start)
            return cls(path, descriptor, layout)
        except FileNotFoundError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            if how:
                path.unlink(missing_ok=True)
            raise unwritable(str(path), error) from error
        except BaseException:
            os.close(descriptor)
            raise

    def finish(self, target: Path, small: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Write the rest and be `target` from now on."""
        header = self.layout.entries()
        offset, data_start = self.layout.small_start, self.layout.data_start
        for name, tensor in sorted(small.items()):
            data = tensor.detach().cpu().contiguous()
            write_at(self._descriptor, data, offset, str(target))
            span = [offset - data_start, (offset := offset + data.nbytes) - data_start]
            header[name] = {"dtype": _NAMES[data.dtype], "shape": list(data.shape), "data_offsets": span}
        said = json.dumps({**manifest, "digest": digest(small)})
        raw = json.dumps({"__metadata__": {"lce": said}, **header}).encode()
        assert len(raw) <= data_start - 8, "the header has outgrown its room"
        head = (data_start - 8).to_bytes(8, "little") + raw.ljust(data_start - 8)
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


@dataclass(frozen=True)
class Snapshot:
    """A context file that was opened: what it says, what is small, and its rows."""

    manifest: dict[str, Any]
    small: dict[str, Tensor]
    rows: ContextRows


def open_snapshot(path: Path) -> Snapshot:
    """Read a context file but for its keys and values, which are mapped.

    Raises `DataError` for a file that is no context, or is not what was written.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        what = (
            "is a symbolic link; expected the file itself" if path.is_symlink() else f"cannot be read: {error.strerror}"
        )
        raise DataError(f"{path} {what}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{path} is not a file; expected a context that `lce prefill` or Context.save wrote")
        tensors, manifest = _contents(path)
        layout = _layout(path, tensors, manifest)
        small = {
            name: _tensor(descriptor, path, info) for name, info in tensors.items() if info.start >= layout.small_start
        }
        if digest(small) != manifest.get("digest"):
            raise DataError(f"{path} was altered since it was written; {REMEDY}")
        rows = ContextRows(descriptor, str(path), layout, writable=False)
    except BaseException:
        os.close(descriptor)
        raise
    return Snapshot(manifest, small, rows)


def _contents(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
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
        raise DataError(f"{path} is of format {manifest['format']!r}; this lce reads {FORMAT!r}; {REMEDY}")
    return tensors, manifest


def _layout(path: Path, tensors: Mapping[str, TensorInfo], manifest: Mapping[str, Any]) -> Layout:
    """Where the rows are, if the header puts them where they belong."""
    try:
        said = manifest["pages"]
        n_layers, n_groups, heads, size, dim = (
            int(said[name]) for name in ("n_layers", "n_groups", "heads", "chunk_size", "head_dim")
        )
        pages = PageShape(n_layers, n_groups, heads, size, dim, KINDS[said["dtype"]])
        layout = Layout(pages, int(manifest["capacity"]))
        fits = min(n_layers, n_groups, heads, size, dim, layout.n_tokens) > 0 and all(
            name in tensors
            and tensors[name].dtype == entry["dtype"]
            and tensors[name].shape == tuple(entry["shape"])
            and tensors[name].start == layout.data_start + entry["data_offsets"][0]
            for name, entry in layout.entries().items()
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        fits = False
    if not fits:
        raise DataError(f"{path}: its header contradicts its contents; {REMEDY}")
    return layout


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


def page_facts(pages: PageShape) -> dict[str, Any]:
    """A page's shape as a manifest holds it."""
    sizes = {name: getattr(pages, name) for name in ("n_layers", "n_groups", "heads", "chunk_size", "head_dim")}
    return {**sizes, "dtype": _NAMES[pages.dtype]}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A SHA-256 of named tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, _NAMES[tensor.dtype], list(tensor.shape)]).encode())
        found.update(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return found.hexdigest()
