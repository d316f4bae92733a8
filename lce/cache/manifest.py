"""The header of a context file: a manifest, and an entry for each tensor.

The header is that of a safetensors file: JSON, with the manifest in its metadata. Nothing in a file is trusted. A
header is parsed only if its length and its number of JSON values are possible for a context. Before any data is read,
each entry is compared with the tensors that a context of this layout may have. So a hostile file takes no more memory
than an honest one. All tensors except keys, values and their checksums are called small. Small tensors are stored in
the order of their names. One SHA-256 digest covers the small tensors and the manifest.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.cache.kv import UNROUNDED, Eviction
from lce.cache.layout import CacheLayout, FileLayout, state_of
from lce.cache.method_state import FileTensor
from lce.cache.row_file import raw_bytes, read_all
from lce.errors import CapacityError, DataError, shown
from lce.files import JsonError, named, parse_json
from lce.sizes import size_text
from lce.system import free_memory

FORMAT = "lce context 6"
EVICTED = "lce context 7"  # the format of a context with evicted tokens; a reader of `FORMAT` would misplace its rows
REMEDY = "prefill the text again"
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
KINDS = FLOATS | {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8}
NAMES = {kind: name for name, kind in KINDS.items()}
MOST_TOKENS = 1 << 40  # the largest number of tokens of a text
_LARGEST_HEADER = 16 << 20  # in bytes: enough for 500 layers
_MOST_PARTS = 200_000  # the largest number of JSON values and names in a header
_MOST_DIMENSIONS = 8
_FIELDS = {"file_id": str, "identity": dict, "pages": dict, "text": str, "capacity": int, "read": int, "announced": int}
_FILE_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
# The name of a tensor of a method's state: its layer, the state's name, and the state's number.
_STATE = re.compile(r"layers/(0|[1-9]\d{0,8})/(.+)/(0|[1-9]\d{0,12})", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """The manifest of a context file: the JSON object `raw`, and its fields.

    `file_id` is random, and the checksums of the file's rows depend on it. `identity` names the model and the method,
    `pages` the shape and format of a page, `text` is a hash of the tokens. `read` rows are in the cache, and the file
    has space for `capacity` rows. `announced` is the length to which the user said that the context would grow. A row
    is a token, unless tokens were `evicted`. None of the first `only_read` tokens was generated.
    """

    raw: Mapping[str, Any]
    file_id: str
    identity: Mapping[str, Any]
    pages: Mapping[str, Any]
    text: str
    version: str  # the version of lce that wrote the file
    capacity: int
    read: int
    announced: int
    evicted: Eviction
    only_read: int

    @classmethod
    def of(cls, raw: Mapping[str, Any], path: Path) -> "Manifest":
        """Return the manifest in the JSON object `raw`. Raises `DataError` for wrong types and impossible numbers."""
        fields: dict[str, Any] = {name: raw.get(name) for name in _FIELDS}
        evicted, version, only_read = _eviction_of(raw), raw.get("lce"), raw.get("only_read", 0)  # older files lack it
        if (
            evicted is None
            or type(only_read) is not int
            or any(type(fields[name]) is not kind for name, kind in _FIELDS.items())
        ):
            raise contradiction(path)
        fields |= {"evicted": evicted, "only_read": only_read}
        manifest = cls(raw, version=version if isinstance(version, str) else "", **fields)
        possible = evicted.n_rows <= manifest.read <= manifest.capacity <= MOST_TOKENS
        possible = possible and 0 <= only_read <= manifest.n_tokens
        if not (possible and 0 <= manifest.announced <= MOST_TOKENS and _FILE_ID.fullmatch(manifest.file_id)):
            raise contradiction(path)
        return manifest

    @property
    def n_tokens(self) -> int:
        """The number of the text's tokens that are cached."""
        return self.read + self.evicted.n_lost


def _eviction_of(raw: Mapping[str, Any]) -> Eviction | None:
    """Return the eviction that a manifest states, which only its own format may; None if it cannot be."""
    found = raw.get("evicted")
    if raw["format"] == FORMAT:
        return Eviction() if found is None else None
    if isinstance(found, list) and len(found) == 2 and all(type(x) is int for x in found):
        return Eviction(*found) if 0 < found[1] < found[0] <= MOST_TOKENS else None
    return None


@dataclass(frozen=True)
class Header:
    """The header of an open context file, with unchecked `entries`. Tensors are in bytes `start` to `file_bytes`."""

    descriptor: int
    path: Path
    entries: Mapping[str, Any]
    manifest: Manifest
    start: int
    file_bytes: int


Check = Callable[[Manifest, dict[str, FileTensor]], None]


def contradiction(path: Path) -> DataError:
    """Return the error for a file whose header contradicts its contents."""
    return DataError(f"{named(path)}: its header contradicts its contents; {REMEDY}")


def read_header(descriptor: int, path: Path) -> Header:
    """Read the header of an open file. Raises `DataError` if this is not the header of a context in this format."""
    strange = DataError(f"{named(path)} is not a context; expected a file that `lce prefill` or Context.save wrote")
    file_bytes = os.fstat(descriptor).st_size
    length = int.from_bytes(_read(descriptor, 8, 0, path), "little") if file_bytes > 8 else 0
    if file_bytes <= 8 or length > file_bytes - 8:
        damaged = f"if it was one, it is damaged or incomplete: {REMEDY}; `lce info FILE -m MODEL` describes a text"
        raise DataError(f"{named(path)} has no header of a context; {damaged}")
    if length > _LARGEST_HEADER:
        raise strange
    try:
        entries = parse_json(bytes(_read(descriptor, length, 8, path)), _MOST_PARTS, unique=True)
    except JsonError:
        raise DataError(f"{named(path)}: the header is not JSON; it is damaged or incomplete: {REMEDY}") from None
    try:
        manifest = parse_json(entries.pop("__metadata__")["lce"].encode(), _MOST_PARTS, unique=True)
        form = manifest["format"]
    except (KeyError, TypeError, AttributeError, UnicodeError, JsonError):
        raise strange from None
    if form not in (FORMAT, EVICTED):
        raise DataError(f"{named(path)} has the format {shown(form, 40)}; this lce reads {FORMAT!r}; {REMEDY}")
    return Header(descriptor, path, entries, Manifest.of(manifest, path), 8 + length, file_bytes)


def _read(descriptor: int, n_bytes: int, offset: int, path: Path) -> bytearray:
    data = bytearray(n_bytes)
    read_all(descriptor, memoryview(data), offset, named(path))
    return data


def header_bytes(entries: Mapping[str, Any], manifest: str, size: int = 0) -> bytes:
    """Return a file's first bytes: the header's length and the header, padded to `size` bytes (0: a multiple of 8)."""
    raw = json.dumps({"__metadata__": {"lce": manifest}, **entries}).encode()
    size = size or 8 + -(-len(raw) // 8) * 8
    assert 8 + len(raw) <= size, "the header is larger than its space"
    return (size - 8).to_bytes(8, "little") + raw.ljust(size - 8)


def page_facts(layout: CacheLayout) -> dict[str, Any]:
    """Return the manifest's entry `pages`: the shape and the format of a page."""
    facts = {name: getattr(layout, name) for name in ("n_layers", "n_groups", "chunk_size", "head_dim", "kv_dtype")}
    keys = {"keys": "unrotated"} if layout.access.turned else {}  # else at the method's positions
    return facts | {"heads": layout.page_heads, "dtype": NAMES[layout.dtype]} | keys


def signed(manifest: Mapping[str, Any], small: Mapping[str, Tensor]) -> str:
    """Return the JSON text of a manifest, with an added digest of the manifest and of the tensors `small`."""
    return json.dumps({**manifest, "digest": digest(small, manifest)})


def digest(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any] | None = None) -> str:
    """Return a SHA-256 of tensors, their names and a manifest."""
    found = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, NAMES[tensor.dtype], list(tensor.shape)]).encode())
        found.update(raw_bytes(tensor))
    return found.hexdigest()


def tensor_entries(tensors: Mapping[str, Tensor], start: int = 0) -> dict[str, dict[str, Any]]:
    """Return header entries of tensors, which are stored in the order of their names from byte `start` on."""
    entries: dict[str, dict[str, Any]] = {}
    for name, x in sorted(tensors.items()):
        span = [start, start := start + x.nbytes]
        entries[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": span}
    return entries


def read_small(
    header: Header, layout: CacheLayout, check: Check, rows: Mapping[str, Any] = {}, start: int | None = None
) -> dict[str, Tensor]:
    """Check, then read, all tensors of a context file except `rows`, from byte `start` on (None: after the header).

    `check` gets the entries of all these tensors, removes entries that are not the cache's, and raises `DataError` if
    such an entry is wrong. Raises `DataError` if the file is no context of this layout, or was altered.
    """
    pages, facts = header.manifest.pages, page_facts(layout)
    if pages.get("keys") != facts.get("keys"):
        raise DataError(f"{named(header.path)} has keys at other positions than this lce caches them; {REMEDY}")
    if pages != facts:
        raise contradiction(header.path)
    tensors = tensors_of(header, header.start if start is None else start, rows)
    state = dict(tensors)
    check(header.manifest, state)
    kept = [*state]
    check_state(layout, header.manifest.read, state, header.path)
    found = read_tensors(header, tensors)
    numbers = (found[name] for name in kept if found[name].is_floating_point())
    if not all(x.sum().isfinite() or x.isfinite().all() for x in numbers):  # all are finite if their sum is
        raise contradiction(header.path)
    return found


def read_tensors(header: Header, tensors: Mapping[str, FileTensor]) -> dict[str, Tensor]:
    """Read `tensors` and check their digest. Raises `CapacityError`, before reading, if there is too little memory."""
    needed, free = sum(x.n_bytes for x in tensors.values()), free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        sizes = f"{size_text(needed)} of memory to be opened, and {size_text(free)} is available"
        raise CapacityError(f"{named(header.path)} needs {sizes}; free some memory")
    found = {}
    for name, x in tensors.items():
        data = _read(header.descriptor, x.n_bytes, x.start, header.path)
        found[name] = (torch.frombuffer(data, dtype=x.dtype) if data else torch.empty(0, dtype=x.dtype)).view(x.shape)
    signed = dict(header.manifest.raw)
    if signed.pop("digest", None) != digest(found, signed):
        raise DataError(f"{named(header.path)} was altered since it was written; {REMEDY}")
    return found


def tensors_of(header: Header, start: int, rows: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Return a header's tensors except `rows`. Raises `DataError` unless they fill the file from byte `start` on."""
    found, at = {}, start
    for name, entry in sorted(header.entries.items()):
        if name in rows:
            continue
        facts = entry if isinstance(entry, dict) else {}
        dtype, shape = KINDS.get(str(facts.get("dtype"))), facts.get("shape")
        sizes = shape if isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS else [-1]
        if dtype is None or not all(type(x) is int and x >= 0 for x in sizes):
            raise contradiction(header.path)
        tensor, first = FileTensor(dtype, tuple(sizes), at, math.prod(sizes) * dtype.itemsize), at - header.start
        if entry != {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [first, first + tensor.n_bytes]}:
            raise contradiction(header.path)
        found[name], at = tensor, at + tensor.n_bytes
    if at != header.file_bytes:
        fault = "is cut short" if at > header.file_bytes else "has bytes that belong to nothing"
        raise DataError(f"{named(header.path)}: the file {fault}; it is damaged or incomplete: {REMEDY}")
    return found


def check_state(layout: CacheLayout, n_tokens: int, tensors: dict[str, FileTensor], path: Path) -> None:
    """Raise `DataError` unless `tensors` are the states, and the unrounded tokens, of a cache of `n_tokens`."""
    n_unrounded = n_tokens - FileLayout(layout, n_tokens).row_tokens
    for layer in range(layout.n_layers if n_unrounded else 0):
        found = tensors.pop(f"{UNROUNDED}/{layer}", None)
        shape = (2, layout.n_kv_heads, n_unrounded, layout.head_dim)
        if found is None or (found.dtype, found.shape) != (layout.dtype, shape):
            raise contradiction(path)
    states = [state_of(layout, layer) for layer in layout.layers]
    kept = [dict[str, dict[int, FileTensor]]() for _ in states]
    for file_name, tensor in tensors.items():
        place = _STATE.fullmatch(file_name)
        layer, name, number = (int(place[1]), place[2], int(place[3])) if place else (layout.n_layers, "", 0)
        state = states[layer].get(name) if layer < layout.n_layers else None
        possible = state is not None and (tensor.dtype.is_floating_point or not state.floats)
        others = {} if state is None else kept[layer].setdefault(name, {})
        if state is None or not possible or not state.agrees(tensor, number, n_tokens):
            raise contradiction(path)
        alike = all((x.dtype, x.shape[:-1]) == (tensor.dtype, tensor.shape[:-1]) for x in others.values())
        if len(others) > state.most_points or not alike:
            raise contradiction(path)
        others[number] = tensor
    for layer in layout.acting_layers if n_tokens else ():
        last = {name: numbered[max(numbered)] for name, numbered in kept[layer].items()}
        if not layout.could_keep(layer, last, layout, n_tokens):
            raise contradiction(path)
