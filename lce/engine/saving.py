"""Contexts as files, and a prefill into a file that can be interrupted and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_safetensors
from torch import Tensor

from lce.cache.context_file import (
    FORMAT,
    REMEDY,
    Draft,
    Snapshot,
    digest,
    is_signed,
    open_snapshot,
    page_facts,
    restored,
    signed,
    write_rows,
)
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout, FileLayout
from lce.errors import DataError, UsageError
from lce.files import draft_path, remove_leftover, sweep, write_whole
from lce.version import __version__


@dataclass(frozen=True, eq=False)
class Identity:
    """What an engine must have in common with the engine that wrote a context file, to go on with it.

    An engine has one `Identity` and gives it to its contexts: a context in memory is used by the engine that has the
    same object. `fingerprint` gives that of the weights; it reads the checkpoint, so it is called on first use.
    """

    fingerprint: Callable[[], str]
    method: str
    window: str
    rope: str
    dtype: str

    @cached_property
    def model(self) -> str:
        """What ties a file to the model: its weights and the numbers of its config."""
        return self.fingerprint()

    @property
    def facts(self) -> dict[str, str]:
        """The identity as a manifest holds it; error messages use its keys."""
        return {name: getattr(self, name) for name in ("model", "method", "window", "rope", "dtype")}

    def check(self, path: Path, found: object, remedy: str = REMEDY) -> None:
        """Raise `DataError` where `found`, the identity in the file `path`, is another one."""
        theirs = found if isinstance(found, dict) else {}
        for name, ours in self.facts.items():
            if theirs.get(name) != ours:
                shown = "" if name == "model" else f" {theirs.get(name)}; this engine has {ours}"
                raise DataError(f"{path} was made with another {name}{shown}; load that one, or {remedy}")


@dataclass(frozen=True)
class ContextData:
    """What a context is made of, in memory and in a file.

    `logits` `[vocab]` are those after the last token in the cache, which may lag behind `token_ids`. `announced` is the
    length that the context was started for; some RoPE scalings depend on it.
    """

    cache: KVCache
    token_ids: Sequence[int] = ()
    logits: Tensor | None = None
    announced: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """All but keys and values, as a file holds it."""
        found = {"tokens": torch.tensor(self.token_ids, dtype=torch.int32), **self.cache.tensors()}
        return found if self.logits is None else {**found, "logits": self.logits}

    def manifest(self, identity: Mapping[str, str], layout: FileLayout) -> dict[str, Any]:
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
    draft_at = draft_path(path)
    try:
        draft = Draft.create(draft_at, layout)
        write_rows(cache, draft.rows)
        draft.finish(path, data.tensors(), data.manifest(identity.facts, layout))
    except BaseException:
        draft_at.unlink(missing_ok=True)
        raise


def open_saved(path: Path, layout: CacheLayout, identity: Identity) -> ContextData:
    """Open a context file; its keys and values are read when they are needed.

    Raises `DataError` for a file of another model, method, RoPE scaling, dtype or format, and for a damaged one.
    """
    sweep(path)
    if not _part(path).exists():
        _state(path).unlink(missing_ok=True)  # left by a process that was killed while it finished
    snapshot = open_snapshot(path, layout, lambda manifest: identity.check(path, manifest.get("identity")))
    return _restored(path, layout, snapshot, own=False)


class PrefillJob:
    """A prefill into the context file `path`, over one or more runs.

    `path.part` takes keys and values as they come; `path.part.state` is the last checkpoint. `data` is where a run
    starts: run the tokens behind `data.cache.length` into that cache, call `checkpoint` from time to time, then
    `finish`, or `abandon` after an error.
    """

    def __init__(
        self, path: Path, layout: CacheLayout, identity: Identity, token_ids: Sequence[int], announced: int
    ) -> None:
        _check_target(path)
        sweep(path)
        self.path = path
        self.identity = identity
        self.facts = identity.facts  # here, because it reads the checkpoint: an error in that comes before the work
        self.part, self.state = _part(path), _state(path)
        self.layout = layout.file(len(token_ids))
        if self.state.exists() and self.part.exists():
            cache, logits = self._resume(text_hash(token_ids))
        else:
            cache, logits = self._begin(), None
        self.n_written = cache.length
        self.data = ContextData(cache, token_ids, logits, announced)

    def _begin(self) -> KVCache:
        remove_leftover(self.part)
        if self.part.exists():
            raise DataError(f"{self.part} is being written by another process; wait for it, or name another file")
        self.state.unlink(missing_ok=True)
        self.draft = Draft.create(self.part, self.layout)
        try:
            return KVCache.empty(self.layout.cache, self.layout.n_tokens, self.draft.rows)
        except BaseException:
            self.draft.discard()
            raise

    def _resume(self, text: str) -> tuple[KVCache, Tensor | None]:
        manifest, tensors = _read_state(self.state)
        remedy = f"remove it and {self.part.name}, or name another file"
        self.identity.check(self.state, manifest.get("identity"), remedy)
        if manifest.get("text") != text:
            raise DataError(f"{self.state} belongs to another text; {remedy}")
        self.draft = Draft.reopen(self.part, self.layout)
        found = _restored(self.part, self.layout.cache, Snapshot(manifest, tensors, self.draft.rows), own=True)
        return found.cache, found.logits

    def checkpoint(self, data: ContextData) -> None:
        """Write what is new; an interrupted job resumes here. Bytes: the new keys and values, and `data.tensors()`."""
        write_rows(data.cache, self.draft.rows, self.n_written)
        self.draft.rows.flush()
        tensors = data.tensors()
        manifest = signed(data.manifest(self.facts, self.layout), tensors)
        write_whole(self.state, as_safetensors({k: x.contiguous() for k, x in tensors.items()}, {"lce": manifest}))
        self.n_written = data.cache.length

    def finish(self, data: ContextData) -> None:
        """Write the rest and give the file its name `path`."""
        write_rows(data.cache, self.draft.rows, self.n_written)
        self.draft.finish(self.path, data.tensors(), data.manifest(self.facts, self.layout))
        self.state.unlink(missing_ok=True)

    def abandon(self, error: BaseException) -> None:
        """End without `finish`. A job with a checkpoint stays and a note on `error` says so; others leave no file."""
        if self.state.exists():
            error.add_note(f"the same command goes on from {self.n_written:,} tokens")
            self.draft.rows.close()  # a traceback may keep this job, and the same call must find the file unlocked
        else:
            self.draft.discard()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _state(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.state")


def _restored(path: Path, layout: CacheLayout, snapshot: Snapshot, *, own: bool) -> ContextData:
    """The context of a file, whose rows are the job's `own` or are only read."""
    manifest, tensors, cache = snapshot.manifest, snapshot.small, None
    try:
        n_cached, announced = int(manifest["read"]), int(manifest["announced"])
        ids = tensors["tokens"].tolist()
        same_pages = manifest["pages"] == page_facts(layout)
        same_text = own or manifest["text"] == text_hash(ids)
        if same_pages and same_text and 0 < n_cached <= min(len(ids), int(manifest["capacity"])):
            cache = restored(layout, snapshot.rows, n_cached, tensors, own=own)
    except (KeyError, TypeError, ValueError, RuntimeError):
        cache = None
    if cache is None:
        raise DataError(f"{path}: its header contradicts its contents; {REMEDY}")
    logits = tensors.get("logits")
    return ContextData(cache, ids, None if logits is None else logits.to(layout.device), announced)


def text_hash(token_ids: Sequence[int]) -> str:
    """A SHA-256 of the tokens."""
    return digest({"tokens": torch.tensor(token_ids, dtype=torch.int32)})


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            manifest = json.loads((file.metadata() or {})["lce"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError, KeyError, ValueError):
        manifest, tensors = {}, {}
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not is_signed(manifest, tensors):
        raise DataError(f"{path} is damaged or of another version of lce; remove it to start again")
    return manifest, tensors


def _check_target(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a plain file; name another file for the context")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent} is not a folder that can be written; name another file for the context")
