"""A context file's safetensors header and, in the header's metadata, the manifest: both JSON.

Nothing in a file is trusted. A header is read whole only if its length and number of parts can be a context's, so that
a hostile header costs little memory. The digest covers the manifest and the small tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.cache.layout import CacheLayout
from lce.errors import DataError, shown
from lce.files import JsonError, named, parse_json

FORMAT = "lce context 4"
REMEDY = "prefill the text again"
KINDS = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64,
    "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8,
}  # fmt: skip
NAMES = {kind: name for name, kind in KINDS.items()}
MOST_TOKENS = 1 << 40  # in a text
_LARGEST_HEADER = 16 << 20  # bytes: enough for 500 layers
_MOST_PARTS = 200_000  # values and names in a header


@dataclass(frozen=True)
class Manifest:
    """The manifest of a context file; `raw` is all of it. `capacity` rows a head group, `read` tokens in the cache."""

    raw: Mapping[str, Any]
    identity: Mapping[str, Any]
    pages: Mapping[str, Any]
    text: str
    version: str  # of the lce that wrote the file
    capacity: int
    read: int
    announced: int

    @classmethod
    def of(cls, raw: Mapping[str, Any], path: Path) -> Manifest:
        """Return the manifest in `raw`. Raises `DataError` for entries of wrong types and impossible numbers."""
        identity, pages, text, version = (raw.get(name) for name in ("identity", "pages", "text", "lce"))
        numbers = (raw.get(name) for name in ("capacity", "read", "announced"))
        capacity, read, announced = (x if type(x) is int else -1 for x in numbers)
        possible = 0 < read <= capacity <= MOST_TOKENS and 0 <= announced <= MOST_TOKENS
        if isinstance(identity, dict) and isinstance(pages, dict) and isinstance(text, str) and possible:
            return cls(
                raw, identity, pages, text, version if isinstance(version, str) else "", capacity, read, announced
            )
        raise contradiction(path)


@dataclass(frozen=True)
class Header:
    """A file's header: unchecked `entries` of tensors by name; the data begin at byte `start` of `file_bytes`."""

    entries: Mapping[str, Any]
    manifest: Mapping[str, Any]
    start: int
    file_bytes: int


def contradiction(path: Path) -> DataError:
    """Return the error for a file whose header contradicts its contents."""
    return DataError(f"{named(path)}: its header contradicts its contents; {REMEDY}")


def read_header(descriptor: int, path: Path) -> Header:
    """Read the header of an open file. Raises `DataError` if no context of this format has such a header."""
    strange = DataError(f"{named(path)} is not a context; expected a file that `lce prefill` or Context.save wrote")
    file_bytes = os.fstat(descriptor).st_size
    length = int.from_bytes(pread(descriptor, 8, 0, path), "little") if file_bytes > 8 else 0
    if file_bytes <= 8 or length > file_bytes - 8:
        raise DataError(
            f"{named(path)} has no header of a context; if it was one, it is damaged or incomplete: {REMEDY}"
        )
    if length > _LARGEST_HEADER:
        raise strange
    raw = pread(descriptor, length, 8, path)
    try:
        entries = strict_object(bytes(raw))
    except JsonError:
        raise DataError(f"{named(path)}: the header is not JSON; it is damaged or incomplete: {REMEDY}") from None
    metadata = entries.pop("__metadata__", None)
    try:
        manifest = strict_object(metadata["lce"].encode()) if isinstance(metadata, dict) else {}
    except (KeyError, AttributeError, UnicodeError, JsonError):
        raise strange from None
    if "format" not in manifest:
        raise strange
    if manifest["format"] != FORMAT:
        found = shown(manifest["format"], 40)
        raise DataError(f"{named(path)} has the format {found}; this lce reads {FORMAT!r}; {REMEDY}")
    return Header(entries, manifest, 8 + length, file_bytes)


def strict_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `JsonError`, also for names that appear twice."""
    value = parse_json(raw, _MOST_PARTS, unique=True)
    if not isinstance(value, dict):
        raise JsonError("no object")
    return value


def pread(descriptor: int, n_bytes: int, offset: int, path: Path) -> bytearray:
    """Read `n_bytes` bytes from an offset on.

    Raises `DataError` if the file is too short, or cannot be read.
    """
    data = bytearray(n_bytes)
    left = memoryview(data)
    while left:  # one call reads 2 GiB at most
        try:
            n = os.preadv(descriptor, [left], offset)
        except OSError as error:
            raise DataError(f"cannot read {named(path)}: {error.strerror}; {REMEDY}") from error
        if n == 0:
            raise DataError(f"{named(path)} was cut short while it was read; {REMEDY}")
        left, offset = left[n:], offset + n
    return data


def page_facts(layout: CacheLayout) -> dict[str, Any]:
    """Return a page's shape and format as a manifest holds them."""
    return {
        "n_layers": layout.n_layers, "n_groups": layout.n_groups, "heads": layout.page_heads,
        "chunk_size": layout.chunk_size, "head_dim": layout.head_dim, "dtype": NAMES[layout.dtype],
        "kv_dtype": layout.kv_dtype,
    }  # fmt: skip


def signed(manifest: Mapping[str, Any], small: Mapping[str, Tensor]) -> str:
    """Return a manifest as JSON text, with a digest of the manifest and the small tensors."""
    return json.dumps({**manifest, "digest": digest(small, manifest)})


def is_signed(manifest: Mapping[str, Any], small: Mapping[str, Tensor]) -> bool:
    """Return whether the manifest's digest is right: manifest and small tensors are as they were written."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return bool(manifest.get("digest") == digest(small, rest))


def digest(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any] | None = None) -> str:
    """Return a SHA-256 of named tensors, and of a manifest."""
    found = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, NAMES[tensor.dtype], list(tensor.shape)]).encode())
        found.update(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return found.hexdigest()
