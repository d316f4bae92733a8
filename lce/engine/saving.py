"""Contexts to files and back, and a long prefill that goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_safetensors
from torch import Tensor

from lce.cache.contents import restored, tensors_of, write_rows
from lce.cache.kv import KVCache
from lce.cache.snapshot import (
    FORMAT,
    REMEDY,
    Draft,
    Layout,
    digest,
    open_snapshot,
    page_facts,
)
from lce.cache.tiering import CacheShape, Tiering
from lce.errors import DataError, UsageError
from lce.files import draft_path, remove_leftover, sweep, write_whole


@dataclass(frozen=True)
class Identity:
    """What must be the same for a context to be used: a field's name is what a message calls it."""

    model: str
    method: str
    window: str
    rope: str
    dtype: str

    def check(self, path: Path, said: object) -> None:
        """Raise `DataError` where a file `said` otherwise."""
        known: Mapping[str, object] = said if isinstance(said, dict) else {}
        for name, ours in dataclasses.asdict(self).items():
            theirs = known.get(name)
            if theirs != ours:
                shown = "" if name == "model" else f" {theirs}; this engine has {ours}"
                raise DataError(f"{path} was made with another {name}{shown}; load that one, or {REMEDY}")


@dataclass(frozen=True)
class Saved:
    """A context out of a file: its cache, what was said, and how long it was announced to become."""

    cache: KVCache
    token_ids: list[int]
    logits: Tensor | None
    announced: int


def save(
    path: Path, cache: KVCache, token_ids: Sequence[int], logits: Tensor | None, identity: Identity, announced: int
) -> None:
    """Write a context: the file appears whole or not at all. Time and bytes: one copy of keys and values."""
    if not cache.length:
        raise UsageError("the context is empty; read some text before it is saved")
    _check_target(path)
    sweep(path)
    layout = Layout(cache.tiering.pages(cache.shape), cache.length)
    draft = Draft.create(draft_path(path), layout)
    try:
        write_rows(cache, draft.rows)
        draft.finish(
            path, _small(cache, token_ids, logits), _manifest(cache, identity, layout, announced, text_hash(token_ids))
        )
    except BaseException:
        draft.discard()
        raise


def open_saved(path: Path, shape: CacheShape, tiering: Tiering, identity: Identity) -> Saved:
    """Open a context file; keys and values are read as they are asked for.

    Raises `DataError` for a file of another model, method, RoPE scaling, dtype or format, or a damaged one.
    """
    sweep(path)
    if not _part(path).exists():
        _state(path).unlink(missing_ok=True)  # left by a process that was killed as it finished
    snapshot = open_snapshot(path)
    identity.check(path, snapshot.manifest.get("identity"))
    return _saved(path, shape, tiering, snapshot.rows, snapshot.manifest, snapshot.small, own=False)


class Sitting:
    """A long prefill into a file, over one or more runs: `path.part` grows, and `path.part.state` says how far it is.

    `cache` is to be filled with `token_ids`, of which it has the first `len(cache)` already. Call `note` now and then,
    and `finish` at the end. Left without a `note`, it leaves nothing.
    """

    def __init__(
        self, path: Path, shape: CacheShape, tiering: Tiering, identity: Identity, token_ids: Sequence[int],
        announced: int,
    ) -> None:  # fmt: skip
        _check_target(path)
        sweep(path)
        self.path = path
        self.identity = identity
        self.part, self.state = _part(path), _state(path)
        self.text = text_hash(token_ids)
        self.layout = Layout(tiering.pages(shape), len(token_ids))
        self.announced = announced
        self.logits: Tensor | None = None
        if self.state.exists() and self.part.exists():
            self._resume(shape, tiering)
        else:
            self._begin(shape, tiering)

    def _begin(self, shape: CacheShape, tiering: Tiering) -> None:
        remove_leftover(self.part)
        if self.part.exists():
            raise DataError(f"{self.part} is being written by another process; wait for it, or name another file")
        self.state.unlink(missing_ok=True)
        self.draft = Draft.create(self.part, self.layout)
        self.n_written = 0
        try:
            self.cache = KVCache(shape, self.layout.n_tokens, tiering, self.draft.rows)
        except BaseException:
            self.draft.discard()
            raise

    def _resume(self, shape: CacheShape, tiering: Tiering) -> None:
        manifest, small = _read_state(self.state)
        self.identity.check(self.state, manifest.get("identity"))
        if manifest.get("text") != self.text:
            raise DataError(
                f"{self.part} belongs to another text; remove it and {self.state.name}, or name another file"
            )
        self.draft = Draft.reopen(self.part, self.layout)
        saved = _saved(self.part, shape, tiering, self.draft.rows, manifest, small, own=True)
        self.cache, self.logits, self.n_written = saved.cache, saved.logits, saved.cache.length

    def note(self, token_ids: Sequence[int], logits: Tensor | None) -> None:
        """Write down all that is read; what comes later goes on from here. Bytes: what is new, and what is small."""
        write_rows(self.cache, self.draft.rows, self.n_written)
        self.draft.rows.flush()
        small = _small(self.cache, token_ids[: self.cache.length], logits)
        manifest = _manifest(self.cache, self.identity, self.layout, self.announced, self.text)
        said = json.dumps({**manifest, "digest": digest(small)})
        write_whole(self.state, as_safetensors({k: x.contiguous() for k, x in small.items()}, {"lce": said}))
        self.n_written = self.cache.length

    def finish(self, token_ids: Sequence[int], logits: Tensor | None) -> None:
        """Be the context file `path`."""
        write_rows(self.cache, self.draft.rows, self.n_written)
        manifest = _manifest(self.cache, self.identity, self.layout, self.announced, self.text)
        self.draft.finish(self.path, _small(self.cache, token_ids, logits), manifest)
        self.state.unlink(missing_ok=True)

    def leave(self, error: BaseException) -> None:
        """End without `finish`: what was noted stays, to be gone on with, and the error says so."""
        if self.state.exists():
            error.add_note(f"the same command goes on from {self.n_written:,} tokens")
        else:
            self.draft.discard()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _state(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.state")


def _saved(
    path: Path, shape: CacheShape, tiering: Tiering, rows: Any, manifest: Mapping[str, Any],
    small: Mapping[str, Tensor], *, own: bool,
) -> Saved:  # fmt: skip
    try:
        n_read, announced = int(manifest["read"]), int(manifest["announced"])
        ids = small["tokens"].tolist()
        if manifest["pages"] != page_facts(tiering.pages(shape)) or not 0 < n_read <= min(
            len(ids), int(manifest["room"])
        ):
            raise ValueError
        if not own and manifest["text"] != text_hash(ids):
            raise ValueError
        cache = restored(shape, tiering, rows, n_read, small, own=own)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} says of itself what is not so; {REMEDY}") from error
    logits = small.get("logits")
    return Saved(cache, ids, None if logits is None else logits.to(shape.device), announced)


def _small(cache: KVCache, token_ids: Sequence[int], logits: Tensor | None) -> dict[str, Tensor]:
    known = {"tokens": torch.tensor(token_ids, dtype=torch.int32), **tensors_of(cache)}
    return known if logits is None else {**known, "logits": logits}


def text_hash(token_ids: Sequence[int]) -> str:
    """What tells one text from another."""
    return digest({"tokens": torch.tensor(token_ids, dtype=torch.int32)})


def _manifest(cache: KVCache, identity: Identity, layout: Layout, announced: int, text: str) -> dict[str, Any]:
    from lce import __version__

    return {
        "format": FORMAT,
        "lce": __version__,
        "identity": dataclasses.asdict(identity),
        "text": text,
        "pages": page_facts(layout.pages),
        "room": layout.n_tokens,
        "read": cache.length,
        "announced": announced,
    }


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            manifest = json.loads((file.metadata() or {})["lce"])
            small = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError, KeyError, ValueError):
        manifest, small = {}, {}
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("digest") != digest(small):
        raise DataError(f"{path} is damaged or of another lce; remove it to begin anew")
    return manifest, small


def _check_target(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a plain file; name another file for the context")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent} is not a folder that can be written; name another file for the context")
