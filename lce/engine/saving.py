"""Contexts as files, and a prefill into a file that can be interrupted and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.cache.context_file import Draft, Snapshot, open_snapshot, restored, write_rows
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout, FileLayout
from lce.cache.manifest import FORMAT, REMEDY, Manifest, contradiction, digest, page_facts, read_header, signed
from lce.cache.small import Small, check_numbers, check_state, read_small, small_entries, small_tensors
from lce.engine.identity import Identity, knobs_of
from lce.errors import DataError, UsageError, shown
from lce.files import check_target, draft_path, named, open_regular, remove_leftover, sweep, write_whole
from lce.version import __version__

MOST_UNREAD = 1 << 16  # tokens of a context that are not in its cache
_MISFITS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)  # what tensors of wrong shapes lead to


@dataclass(frozen=True)
class ContextData:
    """What a context is made of, in memory and in a file.

    `logits` `[vocab]` are those after the last token in the cache, which may lag behind `token_ids`. `announced` is the
    length that the context was started for; some RoPE scalings depend on it. `source` names the file that it is of.
    """

    cache: KVCache
    token_ids: Sequence[int] = ()
    logits: Tensor | None = None
    announced: int = 0
    source: str | None = None

    def unfit(self, error: BaseException) -> BaseException:
        """The error to raise for one that was met while these data were used.

        Not every shape of what a method keeps can be checked when a file is opened: what does not fit fails here.
        """
        memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
        if self.source is None or memory or not isinstance(error, _MISFITS):
            return error
        what = f"{type(error).__name__}: {shown(str(error), 80)}"
        return DataError(f"{self.source} holds what does not fit the method ({what}); {REMEDY}")

    def tensors(self) -> dict[str, Tensor]:
        """All but keys and values, as a file holds it."""
        found = {"tokens": torch.tensor(self.token_ids, dtype=torch.int32), **self.cache.tensors()}
        return found if self.logits is None else {**found, "logits": self.logits}

    def manifest(self, identity: Mapping[str, Any], layout: FileLayout) -> dict[str, Any]:
        """What must match for the file to be used."""
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
    _check_target(path)
    sweep(path)
    layout = cache.layout.file(cache.length)
    draft = Draft.create(draft_path(path), layout)
    try:
        write_rows(cache, draft.rows)
        draft.finish(path, data.tensors(), data.manifest(identity.facts, layout))
    except BaseException:
        draft.discard()
        raise


def open_saved(path: Path, layout: CacheLayout, identity: Identity) -> ContextData:
    """Open a context file; its keys and values are read when they are needed.

    Raises `DataError` for a file of another model, method, RoPE scaling, dtype or format, and for a damaged one.
    """
    sweep(path)
    if not os.path.lexists(_part(path)):
        remove_leftover(_state(path))  # left by a process that was killed while it finished
    snapshot = open_snapshot(
        path,
        layout,
        lambda manifest: identity.check(path, manifest.identity),
        partial(_check_small, path, identity.vocab_size),
    )
    return _restored(path, layout, snapshot, identity.vocab_size, own=False)


@dataclass(frozen=True)
class ContextInfo:
    """What a context file says of itself. The numbers inside are checked when the context is opened.

    `lce.methods.make(method, knobs)` makes the method again. A file that is not `complete` is a prefill under work, of
    which `cached` tokens are in the file. `model` is the fingerprint of the weights.
    """

    path: Path
    complete: bool
    format: str
    lce: str  # the version that wrote it
    model: str
    method: str
    knobs: Mapping[str, Any]
    window: int
    rope: str
    rope_factor: float
    dtype: str
    tokens: int
    cached: int
    announced: int
    file_bytes: int


def describe(path: str | Path) -> ContextInfo:
    """What a context file, or a prefill under work for this path, holds. Only its header is read.

    Raises `DataError` for any other file.
    """
    path = Path(path)
    complete = os.path.lexists(path) or not os.path.lexists(_state(path))
    file = path if complete else _state(path)
    descriptor = open_regular(file, follow=False)
    try:
        header = read_header(descriptor, file)
    finally:
        os.close(descriptor)
    manifest = Manifest.of(header.manifest, file)
    facts, rope, tokens = manifest.identity, manifest.identity.get("rope"), header.entries.get("tokens")
    shape = tokens.get("shape") if isinstance(tokens, dict) else None
    texts: list[Any] = [facts.get(name) for name in ("model", "method", "dtype")]
    texts.append(rope.get("kind") if isinstance(rope, dict) else None)
    numbers = [facts.get("window"), *(shape if isinstance(shape, list) and len(shape) == 1 else [None])]
    factor = rope.get("factor") if isinstance(rope, dict) else None
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(type(number) is int for number in numbers)
        or not isinstance(factor, int | float)
    ):
        raise contradiction(file)
    (model, method, dtype, kind), (window, n_tokens) = texts, numbers
    file_bytes = header.file_bytes if complete else _part_bytes(path)
    return ContextInfo(
        path, complete, FORMAT, manifest.version, model, method, knobs_of(facts), window, kind, float(factor), dtype,
        n_tokens, manifest.read, manifest.announced, file_bytes,
    )  # fmt: skip


def _part_bytes(path: Path) -> int:
    """Bytes of the file of a prefill under work."""
    try:
        return _part(path).stat().st_size
    except OSError:
        return 0


class PrefillJob:
    """A prefill into the context file `path`, over one or more runs.

    `path.part` takes keys and values as they come; `path.part.state` is the last checkpoint. `data` is where a run
    starts: run the tokens behind `data.cache.length` into that cache, call `checkpoint` from time to time, then
    `finish`, or `abandon` after an error. With `before`, a context that the text begins with, a run that does not
    resume another starts from a copy of it. `before` may be of a file that has the name `path` until `finish`.
    """

    def __init__(
        self, path: Path, layout: CacheLayout, identity: Identity, token_ids: Sequence[int], announced: int,
        before: ContextData | None = None,
    ) -> None:  # fmt: skip
        _check_target(path)
        sweep(path)
        self.path = path
        self.identity = identity
        self.facts = identity.facts  # here, because it reads the checkpoint: an error in that comes before the work
        self.part, self.state = _part(path), _state(path)
        for each in (self.part, self.state):
            check_target(each, UsageError)
        self.layout = layout.file(len(token_ids))
        if os.path.lexists(self.state) and os.path.lexists(self.part):
            cache, logits = self._resume(text_hash(token_ids), announced)
        else:
            cache, logits = self._begin(before)
        self.n_written = cache.length
        self.data = ContextData(cache, token_ids, logits, announced)

    def _begin(self, before: ContextData | None) -> tuple[KVCache, Tensor | None]:
        remove_leftover(self.part)
        if os.path.lexists(self.part):
            raise DataError(
                f"{named(self.part)} is being written by another process; wait for it, or name another file"
            )
        remove_leftover(self.state)
        self.draft = Draft.create(self.part, self.layout)
        try:
            if before is None or not before.cache.length:
                return KVCache.empty(self.layout.cache, self.layout.n_tokens, self.draft.rows), None
            write_rows(before.cache, self.draft.rows)
            tensors = {name: x.clone() for name, x in before.cache.tensors().items()}
            return restored(self.layout.cache, self.draft.rows, before.cache.length, tensors, own=True), before.logits
        except BaseException:
            self.draft.discard()
            raise

    def _resume(self, text: str, announced: int) -> tuple[KVCache, Tensor | None]:
        remedy = f"remove it and {named(self.part.name)}, or name another file"
        manifest, tensors = _read_state(self.state, self.layout, self.identity, remedy)
        if manifest.text != text:
            raise DataError(f"{named(self.state)} belongs to another text; {remedy}")
        if manifest.announced != announced:  # its keys may be rotated for that length
            begun = manifest.announced
            raise DataError(
                f"{named(self.state)} was begun with a length of {begun}; give --length {begun}, or {remedy}"
            )
        self.draft = Draft.reopen(self.part, self.layout)
        snapshot = Snapshot(manifest, tensors, self.draft.rows)
        found = _restored(self.state, self.layout.cache, snapshot, self.identity.vocab_size, own=True)
        return found.cache, found.logits

    def checkpoint(self, data: ContextData) -> None:
        """Write what is new; an interrupted job resumes here. Bytes: the new keys and values, and `data.tensors()`."""
        write_rows(data.cache, self.draft.rows, self.n_written)
        self.draft.rows.flush()
        tensors = data.tensors()
        manifest = signed(data.manifest(self.facts, self.layout), tensors)
        write_whole(self.state, _state_bytes(tensors, manifest))
        self.n_written = data.cache.length

    def finish(self, data: ContextData) -> None:
        """Write the rest and give the file its name `path`."""
        write_rows(data.cache, self.draft.rows, self.n_written)
        self.draft.finish(self.path, data.tensors(), data.manifest(self.facts, self.layout))
        remove_leftover(self.state)

    def abandon(self, error: BaseException) -> None:
        """End without `finish`. A job with a checkpoint stays and a note on `error` says so; others leave no file."""
        if os.path.lexists(self.state):
            error.add_note(f"the same command goes on from {self.n_written:,} tokens")
        else:
            self.draft.discard()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _state(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.state")


def _check_small(path: Path, vocab_size: int, manifest: Manifest, small: dict[str, Small], own: bool = False) -> None:
    """Take token ids and logits out of `small`. Raises `DataError` where they cannot be those of such a context."""
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


def _restored(path: Path, layout: CacheLayout, snapshot: Snapshot, vocab_size: int, *, own: bool) -> ContextData:
    """The context of a file, whose rows are the job's `own` or are only read."""
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
    return ContextData(cache, ids, logits.to(layout.device), manifest.announced, named(path))


def text_hash(token_ids: Sequence[int]) -> str:
    """A SHA-256 of the tokens."""
    return digest({"tokens": torch.tensor(token_ids, dtype=torch.int32)})


def _state_bytes(tensors: Mapping[str, Tensor], manifest: str) -> bytes:
    """A checkpoint of a job: an ordinary safetensors file."""
    header = json.dumps({"__metadata__": {"lce": manifest}, **small_entries(tensors)}).encode()
    header += b" " * (-len(header) % 8)
    parts = (
        x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, x in sorted(tensors.items())
    )
    return b"".join((len(header).to_bytes(8, "little"), header, *parts))


def _read_state(path: Path, layout: FileLayout, identity: Identity, remedy: str) -> tuple[Manifest, dict[str, Tensor]]:
    """The last checkpoint of a job: as in a context file, but without rows."""
    descriptor = open_regular(path, follow=False)
    try:
        header = read_header(descriptor, path)
        manifest = Manifest.of(header.manifest, path)
        identity.check(path, manifest.identity, remedy)
        small = small_tensors(header, header.start, {}, path)
        state = dict(small)
        _check_small(path, identity.vocab_size, manifest, state, own=True)
        if manifest.pages != page_facts(layout.cache):
            raise contradiction(path)
        check_state(layout.cache, manifest.read, state, path)
        tensors = read_small(descriptor, path, small, manifest.raw)
        check_numbers(layout.cache, manifest.read, tensors, path)
        return manifest, tensors
    except DataError as error:
        text = str(error)
        raise DataError(text if remedy in text else f"{text.removesuffix(REMEDY)}{remedy}") from None
    finally:
        os.close(descriptor)


def _check_target(path: Path) -> None:
    check_target(path, UsageError)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{named(path.parent)} is not a folder that can be written; name another file for the context")
