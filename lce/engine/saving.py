"""Saves, opens and describes context files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.cache.context_file import Draft, Snapshot, open_snapshot, restored, write_rows
from lce.cache.file_tensors import FileTensor
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout, FileLayout
from lce.cache.manifest import FORMAT, REMEDY, Manifest, contradiction, digest, page_facts, read_header
from lce.engine.identity import Identity, knobs_of
from lce.errors import DataError, UsageError, shown
from lce.files import check_target, draft_path, named, open_regular, path_of, remove_leftover, sweep
from lce.version import __version__

MOST_UNREAD = 1 << 16  # tokens of a context that are not in the cache
_MISFITS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)  # what tensors of wrong shapes lead to


@dataclass(frozen=True)
class ContextData:
    """The parts of a context, in memory and in a file.

    `logits [vocab]` are those after the last token in the cache, which may lag behind `token_ids`. `announced` is the
    length announced for the context; some RoPE scalings depend on it. `source` names the file that was opened.
    """

    cache: KVCache
    token_ids: Sequence[int] = ()
    logits: Tensor | None = None
    announced: int = 0
    source: str | None = None

    def blame(self, error: BaseException) -> None:
        """Raise `DataError` if `error` comes from using the file's tensors of wrong shapes.

        Not every shape of a method's state can be checked when a file is opened.
        """
        memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
        if self.source is not None and not memory and isinstance(error, _MISFITS):
            what = f"{type(error).__name__}: {shown(str(error), 80)}"
            raise DataError(f"{self.source} holds what does not fit the method ({what}); {REMEDY}") from error

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a file except keys and values."""
        found = {"tokens": torch.tensor(self.token_ids, dtype=torch.int32), **self.cache.tensors()}
        return found if self.logits is None else {**found, "logits": self.logits}

    def manifest(self, identity: Mapping[str, Any], layout: FileLayout) -> dict[str, Any]:
        """Return the manifest of a file, which an engine must match to use the file."""
        return {
            "format": FORMAT,
            "lce": __version__,
            "identity": identity,
            "text": text_hash(self.token_ids),
            "pages": page_facts(layout.cache),
            "capacity": layout.n_tokens,
            "read": self.cache.length,
            "announced": self.announced,
        }


def save(path: Path, data: ContextData, identity: Identity) -> None:
    """Write a context: the file appears whole or not at all. Time and bytes: one copy of keys and values."""
    cache = data.cache
    if not cache.length:
        raise UsageError("the context is empty; prefill some text before it is saved")
    check_writable(path)
    sweep(path)
    layout = cache.layout.file(cache.length)
    draft_at = draft_path(path)
    try:
        draft = Draft.create(draft_at, layout)
        write_rows(cache, draft.rows)
        draft.finish(path, data.tensors(), data.manifest(identity.facts, layout))
    except BaseException:
        draft_at.unlink(missing_ok=True)
        raise


def open_saved(path: Path, layout: CacheLayout, identity: Identity) -> ContextData:
    """Open a context file; keys and values are read when needed.

    Raises `DataError` for a file of another model, method, RoPE scaling, dtype or format, and for a damaged one.
    """
    sweep(path)
    if not os.path.lexists(part_of(path)):
        remove_leftover(state_of(path))  # left by a process killed in `finish`
    snapshot = open_snapshot(
        path,
        layout,
        lambda manifest: identity.check(path, manifest.identity),
        partial(check_texts, path, identity.vocab_size),
    )
    return data_of(path, layout, snapshot, identity.vocab_size, own=False)


@dataclass(frozen=True)
class ContextInfo:
    """The facts in a context file's header. The tensors are checked when the context is opened.

    `lce.methods.make(method, knobs)` makes the method again. A file that is not `complete` is an unfinished prefill
    with `cached` tokens so far. `model` is the model's `ModelInfo.identity`.
    """

    path: Path
    complete: bool
    format: str
    lce: str  # the version that wrote the file
    model: str
    method: str
    knobs: Mapping[str, Any]
    window: int
    rope: str
    rope_factor: float
    dtype: str
    kv_dtype: str  # of keys and values in the file: "int8", or "auto" for `dtype`
    tokens: int
    cached: int
    announced: int
    file_bytes: int
    weights: str | None = None  # the scheme of rounded weights


def describe(path: str | Path) -> ContextInfo:
    """Describe a context file, or an unfinished prefill for this path. Only the header is read.

    Raises `DataError` for any other file.
    """
    path = path_of(path)
    complete = os.path.lexists(path) or not os.path.lexists(state_of(path))
    file = path if complete else state_of(path)
    descriptor = open_regular(file, follow=False)
    try:
        header = read_header(descriptor, file)
    finally:
        os.close(descriptor)
    manifest = Manifest.of(header.manifest, file)
    facts, rope, tokens = manifest.identity, manifest.identity.get("rope"), header.entries.get("tokens")
    shape = tokens.get("shape") if isinstance(tokens, dict) else None
    texts: list[Any] = [facts.get(name) for name in ("model", "method", "dtype")]
    texts.append(facts.get("kv_dtype", "auto"))
    texts.append(rope.get("kind") if isinstance(rope, dict) else None)
    numbers = [facts.get("window"), *(shape if isinstance(shape, list) and len(shape) == 1 else [None])]
    factor, weights = rope.get("factor") if isinstance(rope, dict) else None, facts.get("weights")
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(type(number) is int for number in numbers)
        or not isinstance(factor, int | float)
    ):
        raise contradiction(file)
    (model, method, dtype, kv_dtype, kind), (window, n_tokens) = texts, numbers
    file_bytes = header.file_bytes if complete else _part_bytes(path)
    return ContextInfo(
        path, complete, FORMAT, manifest.version, model, method, knobs_of(facts), window, kind, float(factor), dtype,
        kv_dtype, n_tokens, manifest.read, manifest.announced, file_bytes,
        weights if isinstance(weights, str) else None,
    )  # fmt: skip


def _part_bytes(path: Path) -> int:
    """Return the bytes of the file of an unfinished prefill."""
    try:
        return part_of(path).stat().st_size
    except OSError:
        return 0


def part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def state_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.state")


def check_texts(
    path: Path, vocab_size: int, manifest: Manifest, small: dict[str, FileTensor], own: bool = False
) -> None:
    """Check and remove token ids and logits from `small`. Raises `DataError` if impossible for the manifest."""
    tokens, logits = small.pop("tokens", None), small.pop("logits", None)
    most = manifest.capacity if own else manifest.capacity + MOST_UNREAD
    if (
        tokens is None
        or logits is None
        or tokens.dtype != torch.int32
        or len(tokens.shape) != 1
        or not manifest.read <= tokens.shape[0] <= most
        or manifest.capacity != (tokens.shape[0] if own else manifest.read)
        or (logits.dtype, logits.shape) != (torch.float32, (vocab_size,))
    ):
        raise contradiction(path)


def data_of(path: Path, layout: CacheLayout, snapshot: Snapshot, vocab_size: int, *, own: bool) -> ContextData:
    """Return the context of a file; rows that are not the job's `own` are read-only."""
    manifest, tensors = snapshot.manifest, snapshot.small
    tokens, logits = tensors["tokens"], tensors["logits"]
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise DataError(f"{named(path)} has token ids that the model does not have; {REMEDY}")
    if not logits.isfinite().all():
        raise DataError(f"{named(path)} has logits that are no numbers; {REMEDY}")
    ids = tokens.tolist()
    if manifest.text != text_hash(ids):
        raise contradiction(path)
    try:
        cache = restored(layout, snapshot.rows, manifest.read, tensors, own=own)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise contradiction(path) from None
    return ContextData(cache, ids, logits.to(layout.devices[-1]), manifest.announced, named(path))


def text_hash(token_ids: Sequence[int]) -> str:
    """Return a SHA-256 of the tokens."""
    return digest({"tokens": torch.tensor(token_ids, dtype=torch.int32)})


def check_writable(path: Path) -> None:
    check_target(path, UsageError)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{named(path.parent)} is not a folder that can be written; name another file for the context")
