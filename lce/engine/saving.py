"""Saves and opens context files."""

import os
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lce.cache import manifest as headers
from lce.cache.context_file import Draft, Snapshot, open_snapshot, restored, restored_states, write_rows
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout, FileLayout, all_devices, device_layout
from lce.cache.manifest import MOST_TOKENS, REMEDY, Manifest, contradiction
from lce.cache.method_state import FileTensor
from lce.cache.row_file import Descriptor
from lce.engine.identity import Identity
from lce.errors import DataError, LceError, UsageError, shown, user_line
from lce.files import check_new, check_target, draft_path, named, open_regular, remove_leftover, sweep
from lce.version import __version__

_MISFITS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)  # raised for tensors of wrong shapes


@dataclass(frozen=True)
class ContextData:
    """The parts of a context, in memory and in a file.

    The cache may lack the last of `token_ids`. `logits [vocab]` follow the last token in the cache. `announced` is the
    length announced for the context; some RoPE scalings depend on it. `source` names the file that was opened. `saves`
    has the identities of the files that the context was opened from or saved to. None of the first `only_read` tokens
    was generated.
    """

    cache: KVCache
    token_ids: Sequence[int] = ()
    logits: Tensor | None = None
    announced: int = 0
    source: str | None = None
    saves: set[str] = field(default_factory=set)
    only_read: int = 0

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
            "read": self.cache.length,
            "only_read": min(self.only_read, self.cache.n_tokens),
            "format": headers.EVICTED if self.cache.fixed else headers.FORMAT,
            **({"evicted": list(self.cache.evicted)} if self.cache.fixed else {}),
        }


def _is_misfit(error: BaseException) -> bool:
    """Return whether `error` is one that tensors of wrong shapes raise, and not for lack of memory."""
    memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
    told = isinstance(error, LceError) or user_line(error)  # says already what failed
    return isinstance(error, _MISFITS) and not (memory or told)


class Target(NamedTuple):
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


@dataclass(frozen=True, eq=False)
class ContextFiles:
    """The context files that an engine of this layout and identity writes and opens."""

    layout: CacheLayout
    identity: Identity

    def save(self, target: Target, data: ContextData) -> None:
        """Write a context file, which appears whole or not at all: see `Context.save`."""
        cache, path = data.cache, target.path
        if not data.token_ids:
            raise UsageError("the context is empty; prefill some text before it is saved")
        target.check()
        sweep(path)
        draft_at = draft_path(path)
        try:
            draft = Draft.create(draft_at, FileLayout(cache.layout, cache.length))
            data.saves.add(draft.file_id)  # now, because Ctrl-C may come when the file has just appeared
            write_rows(cache, draft.rows)
            self.finish(draft, target, data)
        except BaseException:
            draft_at.unlink(missing_ok=True)
            raise

    def open(self, path: Path) -> ContextData:
        """Read a context file: see `Engine.open_context`."""
        sweep(path)
        if not os.path.lexists(part_of(path)):
            remove_leftover(state_of(path))  # left by a process that was killed in `PrefillJob.finish`
        return self.data_of(path, self._snapshot(path, self.layout))

    def check_space(self, path: Path, n_tokens: int) -> None:
        """Raise `CapacityError` unless `path` has space for `n_tokens` tokens, which is reserved for a moment."""
        check_writable(path)
        Draft.create(draft_path(path), FileLayout(self.layout, n_tokens)).discard()

    def finish(self, draft: Draft, target: Target, data: ContextData) -> None:
        """Complete a draft that has all rows, and rename the file to `target`, if the file opens as a reader opens it.

        Raises `UsageError` if another file appeared at `target` in the meantime.
        """

        def check(path: Path) -> None:
            layout = draft.layout.cache
            try:
                snapshot = self._snapshot(path, layout)
                self._ids_of(path, snapshot)
                for index in range(layout.n_layers):
                    restored_states(device_layout(layout, index), index, snapshot.small)
            except (DataError, KeyError, *_MISFITS) as error:
                if not isinstance(error, DataError | KeyError) and not _is_misfit(error):
                    raise
                what = str(error).replace(named(path), "the new file").removesuffix(f"; {REMEDY}")
                raise LceError(
                    f"internal error: {named(target.path)} was not written, because what was to be written does not "
                    f"open ({type(error).__name__}: {shown(what, 200)}); an earlier file there stays; report this error"
                ) from error
            target.check()

        draft.finish(target.path, data.tensors(), data.manifest(self.identity.facts, draft), check)

    def _snapshot(self, path: Path, layout: CacheLayout) -> Snapshot:
        check = partial(self.check_texts, path)
        return open_snapshot(path, layout, lambda manifest: self.identity.check(path, manifest.identity), check)

    def check_texts(self, path: Path, manifest: Manifest, small: dict[str, FileTensor], *, own: bool = False) -> None:
        """Check and remove the token ids and the logits in `small`, a file's tensors besides keys and values.

        Raises `DataError` if they contradict `manifest`. `own`: the file is a prefill job's unfinished file.
        """
        tokens, logits = small.pop("tokens", None), small.pop("logits", None)
        most, vocab = manifest.capacity if own else MOST_TOKENS, (self.identity.vocab_size,)
        if (
            tokens is None
            or tokens.dtype != torch.int32
            or len(tokens.shape) != 1
            or not max(1, manifest.n_tokens) <= tokens.shape[0] <= most
            or manifest.capacity != (tokens.shape[0] if own else manifest.read)
            or (logits is not None and (logits.dtype, logits.shape) != (torch.float32, vocab))
        ):
            raise contradiction(path)

    def data_of(self, path: Path, snapshot: Snapshot, *, own: bool = False) -> ContextData:
        """Return the context of an opened file. The file's rows are read-only, unless it is a prefill job's `own`."""
        manifest, tensors, ids = snapshot.manifest, snapshot.small, self._ids_of(path, snapshot)
        try:
            cache = restored(self.layout, snapshot.rows, manifest.read, tensors, own=own)
            cache.evicted = manifest.evicted
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise contradiction(path) from None
        logits = tensors.get("logits")
        last = None if logits is None else logits.to(all_devices(self.layout)[-1])
        return ContextData(cache, ids, last, manifest.announced, named(path), {manifest.file_id}, manifest.only_read)

    def _ids_of(self, path: Path, snapshot: Snapshot) -> list[int]:
        """Return the token ids of an opened file. Raises `DataError` for ids or logits that cannot be the model's."""
        tokens, logits = snapshot.small["tokens"], snapshot.small.get("logits")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.identity.vocab_size:
            raise DataError(f"{named(path)} has token ids that the model does not have; {REMEDY}")
        if logits is not None and not logits.isfinite().all():
            raise DataError(f"{named(path)} has logits that are no numbers; {REMEDY}")
        ids = tokens.tolist()
        if snapshot.manifest.text != text_hash(ids):
            raise contradiction(path)
        return ids


def part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def state_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.state")


def text_hash(token_ids: Sequence[int]) -> str:
    """Return a SHA-256 of the token ids."""
    return headers.digest({"tokens": torch.tensor(token_ids, dtype=torch.int32)})
