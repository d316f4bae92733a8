"""Saves and opens context files. Prefills a document into a context file; an interrupted prefill can be resumed."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.cache import manifest as headers
from lce.cache.context_file import Draft, Snapshot, open_snapshot, restored, restored_states, write_rows
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.cache.manifest import MOST_TOKENS, REMEDY, Manifest, contradiction
from lce.cache.method_state import FileTensor
from lce.cache.row_file import Descriptor, raw_bytes
from lce.engine.identity import Identity
from lce.errors import DataError, LceError, UsageError, shown, user_line
from lce.files import (
    check_new,
    check_target,
    draft_path,
    named,
    open_regular,
    path_of,
    remove_leftover,
    sweep,
    write_whole,
)
from lce.version import __version__

_MISFITS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)  # raised for tensors of wrong shapes


@dataclass(frozen=True)
class ContextData:
    """The parts of a context, in memory and in a file.

    The cache may lack the last of `token_ids`. `logits [vocab]` follow the last token in the cache. `announced` is the
    length announced for the context; some RoPE scalings depend on it. `source` names the file that was opened. `saves`
    has the identities of the files that the context was opened from or saved to.
    """

    cache: KVCache
    token_ids: Sequence[int] = ()
    logits: Tensor | None = None
    announced: int = 0
    source: str | None = None
    saves: set[str] = field(default_factory=set)

    def blame(self, error: BaseException) -> None:
        """Raise `DataError` if the opened file may have caused `error`: opening cannot check every tensor's shape."""
        if self.source is not None and _is_misfit(error):
            what = f"{type(error).__name__}: {shown(str(error), 80)}"
            raise DataError(f"{self.source} holds what does not fit the method ({what}); {REMEDY}") from error

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by name, that a context file has besides keys and values."""
        found = {"tokens": torch.tensor(self.token_ids, dtype=torch.int32), **self.cache.tensors()}
        return found if self.logits is None else {**found, "logits": self.logits}

    def manifest(self, identity: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
        """Return the manifest of the file that `draft` becomes: the facts that an engine must match to use the file."""
        return {
            "lce": __version__,
            "file_id": draft.file_id,
            "identity": identity,
            "text": text_hash(self.token_ids),
            "pages": headers.page_facts(draft.layout.cache),
            "capacity": draft.layout.n_tokens,
            "announced": self.announced,
            **headers.cache_facts(self.cache),
        }


def _is_misfit(error: BaseException) -> bool:
    """Return whether `error` is one that tensors of wrong shapes raise, and not for lack of memory."""
    memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
    told = isinstance(error, LceError) or user_line(error)  # says already what failed
    return isinstance(error, _MISFITS) and not (memory or told)


@dataclass(frozen=True)
class Target:
    """A context file to write. A file at `path` is replaced with `force`, or if its identity is one of `saves`."""

    path: Path
    force: bool = False
    saves: Container[str] = ()

    def check(self) -> None:
        """Raise `UsageError` if the file cannot be written, or exists and may not be replaced."""
        check_writable(self.path)
        check_new(self.path, self.force, lambda path: _file_id(path) in self.saves)


def check_writable(path: Path) -> None:
    check_target(path, UsageError)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{named(path.parent)} is not a folder that can be written; name another file for the context")


def _file_id(path: Path) -> str | None:
    """Return the identity of the context file at `path`; None for another file."""
    with suppress(DataError):
        descriptor = Descriptor(open_regular(path, follow=False))
        return headers.read_header(descriptor, path).manifest.file_id
    return None


def save(target: Target, data: ContextData, identity: Identity) -> None:
    """Write a context file, which appears whole or not at all."""
    cache, path = data.cache, target.path
    if not data.token_ids:
        raise UsageError("the context is empty; prefill some text before it is saved")
    target.check()
    sweep(path)
    draft_at = draft_path(path)
    try:
        draft = Draft.create(draft_at, cache.layout.file(cache.length))
        data.saves.add(draft.file_id)  # now, because Ctrl-C may come when the file has just appeared
        write_rows(cache, draft.rows)
        _finish(draft, target, data, identity)
    except BaseException:
        draft_at.unlink(missing_ok=True)
        raise


class ContextFiles:
    """The context files that an engine of this layout and identity writes and opens."""

    def __init__(self, layout: CacheLayout, identity: Identity) -> None:
        self.layout = layout
        self.identity = identity

    def save(self, target: Target, data: ContextData) -> None:
        """Write a context file: see `Context.save`."""
        save(target, data, self.identity)

    def open(self, path: Path) -> ContextData:
        """Read a context file: see `Engine.open_context`."""
        return open_saved(path, self.layout, self.identity)

    def check_space(self, path: Path, n_tokens: int) -> None:
        """Raise `CapacityError` unless a context of `n_tokens` tokens can be saved at `path`."""
        check_space(path, self.layout, n_tokens)


def check_space(path: Path, layout: CacheLayout, n_tokens: int) -> None:
    """Raise `CapacityError` unless a context of `n_tokens` tokens can be saved. The space is reserved for a moment."""
    check_writable(path)
    Draft.create(draft_path(path), layout.file(n_tokens)).discard()


def _finish(draft: Draft, target: Target, data: ContextData, identity: Identity) -> None:
    """Complete a draft that has all rows, and rename the file to `target`, if the file opens as a reader opens it.

    Raises `UsageError` if another file appeared at `target` in the meantime.
    """

    def check(path: Path) -> None:
        layout = draft.layout.cache
        try:
            snapshot = _snapshot(path, layout, identity)
            _ids_of(path, snapshot, identity.vocab_size)
            for index in range(layout.n_layers):
                restored_states(layout.part_of(index), index, snapshot.small)
        except (DataError, KeyError, *_MISFITS) as error:
            if not isinstance(error, DataError | KeyError) and not _is_misfit(error):
                raise
            what = str(error).replace(named(path), "the new file").removesuffix(f"; {REMEDY}")
            raise LceError(
                f"internal error: {named(target.path)} was not written, because what was to be written does not open "
                f"({type(error).__name__}: {shown(what, 200)}); an earlier file there stays; report this error"
            ) from error
        target.check()

    draft.finish(target.path, data.tensors(), data.manifest(identity.facts, draft), check)


def open_saved(path: Path, layout: CacheLayout, identity: Identity) -> ContextData:
    """Read a context file for the engine of this layout and identity: see `Engine.open_context`."""
    sweep(path)
    if not os.path.lexists(part_of(path)):
        remove_leftover(state_of(path))  # left by a process that was killed in `PrefillJob.finish`
    return data_of(path, layout, _snapshot(path, layout, identity), identity.vocab_size, own=False)


def _snapshot(path: Path, layout: CacheLayout, identity: Identity) -> Snapshot:
    check = partial(check_texts, path, identity.vocab_size, own=False)
    return open_snapshot(path, layout, lambda manifest: identity.check(path, manifest.identity), check)


def part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def state_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.state")


def check_texts(path: Path, vocab_size: int, manifest: Manifest, small: dict[str, FileTensor], own: bool) -> None:
    """Check and remove the token ids and the logits in `small`, a context file's tensors besides keys and values.

    Raises `DataError` for ids or logits that contradict `manifest`. `own`: the file is a prefill job's unfinished file.
    """
    tokens, logits = small.pop("tokens", None), small.pop("logits", None)
    most = manifest.capacity if own else MOST_TOKENS
    if (
        tokens is None
        or tokens.dtype != torch.int32
        or len(tokens.shape) != 1
        or not max(1, manifest.n_tokens) <= tokens.shape[0] <= most
        or manifest.capacity != (tokens.shape[0] if own else manifest.read)
        or (logits is not None and (logits.dtype, logits.shape) != (torch.float32, (vocab_size,)))
    ):
        raise contradiction(path)


def data_of(path: Path, layout: CacheLayout, snapshot: Snapshot, vocab_size: int, *, own: bool) -> ContextData:
    """Return the context of an opened file. The file's rows are read-only, unless the file is a prefill job's `own`."""
    manifest, tensors, ids = snapshot.manifest, snapshot.small, _ids_of(path, snapshot, vocab_size)
    try:
        cache = manifest.described(restored(layout, snapshot.rows, manifest.read, tensors, own=own))
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise contradiction(path) from None
    logits = tensors.get("logits")
    last = None if logits is None else logits.to(layout.devices[-1])
    return ContextData(cache, ids, last, manifest.announced, named(path), {manifest.file_id})


def _ids_of(path: Path, snapshot: Snapshot, vocab_size: int) -> list[int]:
    """Return the token ids of an opened file. Raises `DataError` for ids or logits that cannot be the model's."""
    tokens, logits = snapshot.small["tokens"], snapshot.small.get("logits")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise DataError(f"{named(path)} has token ids that the model does not have; {REMEDY}")
    if logits is not None and not logits.isfinite().all():
        raise DataError(f"{named(path)} has logits that are no numbers; {REMEDY}")
    ids = tokens.tolist()
    if snapshot.manifest.text != text_hash(ids):
        raise contradiction(path)
    return ids


def text_hash(token_ids: Sequence[int]) -> str:
    """Return a SHA-256 of the token ids."""
    return headers.digest({"tokens": torch.tensor(token_ids, dtype=torch.int32)})


class PrefillJob:
    """A prefill into the context file `target`. After an interruption, a new job for the same file resumes the prefill.

    The file `path.part` takes keys and values as they are computed, and `path.part.state` holds the last checkpoint.
    Call `start`, prefill the tokens that the cache lacks, call `checkpoint` from time to time, and `finish` at the end.
    After an error call `abandon`.
    """

    def __init__(
        self, target: Target, layout: CacheLayout, identity: Identity, ids: Sequence[int], announced: int
    ) -> None:
        target.check()
        sweep(target.path)
        self.target = target
        self.identity = identity
        identity.model  # noqa: B018  read now, so that unreadable weights fail before the work
        self.part, self.state = part_of(target.path), path_of(state_of(target.path))  # raises if the name is too long
        for each in (self.part, self.state):
            check_target(each, UsageError)
        self.layout = layout.file(len(ids))
        self.token_ids = ids
        self.announced = announced
        self.n_written = 0
        self._draft: Draft | None = None  # the unfinished file, after `start`

    def start(self, before: ContextData | None = None) -> ContextData:
        """Resume the job at its last checkpoint, or begin the job after a copy of the context `before`."""
        if os.path.lexists(self.state) and os.path.lexists(self.part):
            cache, logits = self._resume()
        else:
            cache, logits = self._begin(before)
        self.n_written = cache.length
        return ContextData(cache, self.token_ids, logits, self.announced)

    def _begin(self, before: ContextData | None) -> tuple[KVCache, Tensor | None]:
        remove_leftover(self.part)
        if os.path.lexists(self.part):
            raise DataError(f"{named(self.part)} is being written by another process; wait, or name another file")
        remove_leftover(self.state)
        self._draft = draft = Draft.create(self.part, self.layout)
        if before is None or not before.cache.length:
            return KVCache.empty(self.layout.cache, self.layout.n_tokens, draft.rows), None
        write_rows(before.cache, draft.rows)
        tensors = {name: x.clone() for name, x in before.cache.tensors().items()}
        return restored(self.layout.cache, draft.rows, before.cache.length, tensors, own=True), before.logits

    def _resume(self) -> tuple[KVCache, Tensor | None]:
        """Return the cache and the logits of the last checkpoint: a context file without keys and values."""
        path, vocab_size = self.state, self.identity.vocab_size
        remedy = f"remove it and {named(self.part.name)}, or name another file"
        descriptor = open_regular(path, follow=False)
        try:
            header = headers.read_header(descriptor, path)
            manifest = header.manifest
            self.identity.check(path, manifest.identity, remedy)
            tensors = headers.read_small(header, self.layout.cache, partial(check_texts, path, vocab_size, own=True))
        except DataError as error:
            text = str(error)
            raise DataError(text if remedy in text else f"{text.removesuffix(REMEDY)}{remedy}") from None
        finally:
            os.close(descriptor)
        if manifest.text != text_hash(self.token_ids):
            raise DataError(f"{named(path)} belongs to another text; {remedy}")
        if manifest.announced != self.announced:  # keys may be rotated for the announced length
            begun = manifest.announced
            raise DataError(f"{named(path)} was begun with a length of {begun}; give --length {begun}, or {remedy}")
        self._draft = draft = Draft(self.part, self.layout, manifest.file_id)
        found = data_of(path, self.layout.cache, Snapshot(manifest, tensors, draft.rows), vocab_size, own=True)
        return found.cache, found.logits

    def checkpoint(self, data: ContextData) -> None:
        """Write a checkpoint, at which an interrupted job resumes. Writes new keys and values, and `data.tensors()`."""
        assert self._draft is not None
        write_rows(data.cache, self._draft.rows, self.n_written)
        self._draft.rows.flush()
        tensors = data.tensors()
        manifest = headers.signed(data.manifest(self.identity.facts, self._draft), tensors)
        raw = (raw_bytes(x) for _, x in sorted(tensors.items()))
        write_whole(self.state, b"".join((headers.header_bytes(headers.tensor_entries(tensors), manifest), *raw)))
        self.n_written = data.cache.length

    def finish(self, data: ContextData) -> None:
        """Write the keys and values that the file lacks, and rename the file to the target's path."""
        assert self._draft is not None
        write_rows(data.cache, self._draft.rows, self.n_written)
        try:
            _finish(self._draft, self.target, data, self.identity)
        except UsageError:  # another file appeared there; a checkpoint keeps the work
            self.checkpoint(data)
            raise
        remove_leftover(self.state)

    def abandon(self, error: BaseException) -> None:
        """End the job after an error. With a checkpoint, the files stay and `error` gets a note; else they are removed.

        A traceback may keep this job alive, so the file is closed: a second try must find the file unlocked.
        """
        if os.path.lexists(self.state):
            if self._draft is not None:
                again = f"remove {named(self.part)} and {named(self.state)} to begin again"  # they are damaged
                goes_on = f"the same command goes on from {self.n_written:,} tokens"
                error.add_note(again if isinstance(error, DataError) else goes_on)
                self._draft.rows.close()
        elif self._draft is not None:
            self._draft.discard()
        else:
            remove_leftover(self.part)  # removes the file unless another process has locked it
