"""A prefill into a context file that can be interrupted and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lce.cache.context_file import Draft, Snapshot, restored, write_rows
from lce.cache.file_tensors import check_numbers, check_state, check_unrounded, read_tensors, tensor_entries, tensors_of
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout, FileLayout
from lce.cache.manifest import REMEDY, Manifest, contradiction, page_facts, read_header, signed
from lce.engine.identity import Identity
from lce.engine.saving import ContextData, check_texts, check_writable, data_of, part_of, state_of, text_hash
from lce.errors import DataError, UsageError
from lce.files import check_target, named, open_regular, remove_leftover, sweep, write_whole


class PrefillJob:
    """A prefill into the context file `path`, over one or more runs.

    `path.part` takes keys and values as they come; `path.part.state` is the last checkpoint. Call `start`, prefill the
    tokens from `data.cache.length` on, call `checkpoint` from time to time, then `finish`; after an error, `abandon`.
    """

    def __init__(
        self, path: Path, layout: CacheLayout, identity: Identity, token_ids: Sequence[int], announced: int
    ) -> None:
        check_writable(path)
        sweep(path)
        self.path = path
        self.identity = identity
        self.facts = identity.facts  # reads the checkpoint: fails before the work starts
        self.part, self.state = part_of(path), state_of(path)
        for each in (self.part, self.state):
            check_target(each, UsageError)
        self.layout = layout.file(len(token_ids))
        self.token_ids = token_ids
        self.announced = announced
        self.n_written = 0
        self._draft: Draft | None = None

    @property
    def draft(self) -> Draft:
        """The unfinished file."""
        assert self._draft is not None, "started before use"
        return self._draft

    def start(self, before: ContextData | None = None) -> ContextData:
        """Resume the job at its last checkpoint; or begin, with a copy of `before` if the text continues that context.

        `before` may come from a file named `path`, which `finish` replaces.
        """
        if os.path.lexists(self.state) and os.path.lexists(self.part):
            cache, logits = self._resume(text_hash(self.token_ids), self.announced)
        else:
            cache, logits = self._begin(before)
        self.n_written = cache.length
        return ContextData(cache, self.token_ids, logits, self.announced)

    def _begin(self, before: ContextData | None) -> tuple[KVCache, Tensor | None]:
        remove_leftover(self.part)
        if os.path.lexists(self.part):
            raise DataError(
                f"{named(self.part)} is being written by another process; wait for it, or name another file"
            )
        remove_leftover(self.state)
        self._draft = draft = Draft.create(self.part, self.layout)
        if before is None or not before.cache.length:
            return KVCache.empty(self.layout.cache, self.layout.n_tokens, draft.rows), None
        write_rows(before.cache, draft.rows)
        tensors = {name: x.clone() for name, x in before.cache.tensors().items()}
        return restored(self.layout.cache, draft.rows, before.cache.length, tensors, own=True), before.logits

    def _resume(self, text: str, announced: int) -> tuple[KVCache, Tensor | None]:
        remedy = f"remove it and {named(self.part.name)}, or name another file"
        manifest, tensors = _read_state(self.state, self.layout, self.identity, remedy)
        if manifest.text != text:
            raise DataError(f"{named(self.state)} belongs to another text; {remedy}")
        if manifest.announced != announced:  # keys may be rotated for the announced length
            begun = manifest.announced
            raise DataError(
                f"{named(self.state)} was begun with a length of {begun}; give --length {begun}, or {remedy}"
            )
        self._draft = Draft.reopen(self.part, self.layout)
        snapshot = Snapshot(manifest, tensors, self.draft.rows)
        found = data_of(self.state, self.layout.cache, snapshot, self.identity.vocab_size, own=True)
        return found.cache, found.logits

    def checkpoint(self, data: ContextData) -> None:
        """Write a checkpoint; an interrupted job resumes here. Bytes: new keys and values, and `data.tensors()`."""
        write_rows(data.cache, self.draft.rows, self.n_written)
        self.draft.rows.flush()
        tensors = data.tensors()
        manifest = signed(data.manifest(self.facts, self.layout), tensors)
        write_whole(self.state, _state_bytes(tensors, manifest))
        self.n_written = data.cache.length

    def finish(self, data: ContextData) -> None:
        """Write the rest and rename the file to `path`."""
        write_rows(data.cache, self.draft.rows, self.n_written)
        self.draft.finish(self.path, data.tensors(), data.manifest(self.facts, self.layout))
        remove_leftover(self.state)

    def abandon(self, error: BaseException) -> None:
        """End without `finish`. Without a checkpoint the files are removed; else they stay, and `error` gets a note.

        Closes the file, because a traceback may keep this job and a second try must find the file unlocked.
        """
        if os.path.lexists(self.state):
            if self._draft is not None:
                error.add_note(f"the same command goes on from {self.n_written:,} tokens")
                self._draft.rows.close()
        elif self._draft is not None:
            self._draft.discard()
        else:
            remove_leftover(self.part)  # new and empty, unless another process has locked it


def _state_bytes(tensors: Mapping[str, Tensor], manifest: str) -> bytes:
    """Return a job's checkpoint as the bytes of a safetensors file."""
    header = json.dumps({"__metadata__": {"lce": manifest}, **tensor_entries(tensors)}).encode()
    header += b" " * (-len(header) % 8)
    parts = (
        x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, x in sorted(tensors.items())
    )
    return b"".join((len(header).to_bytes(8, "little"), header, *parts))


def _read_state(path: Path, layout: FileLayout, identity: Identity, remedy: str) -> tuple[Manifest, dict[str, Tensor]]:
    """Read the last checkpoint of a job: the contents of a context file without rows."""
    descriptor = open_regular(path, follow=False)
    try:
        header = read_header(descriptor, path)
        manifest = Manifest.of(header.manifest, path)
        identity.check(path, manifest.identity, remedy)
        small = tensors_of(header, header.start, {}, path)
        state = dict(small)
        check_texts(path, identity.vocab_size, manifest, state, own=True)
        if manifest.pages != page_facts(layout.cache):
            raise contradiction(path)
        check_unrounded(layout.cache, manifest.read, state, path)
        check_state(layout.cache, manifest.read, state, path)
        tensors = read_tensors(descriptor, path, small, manifest.raw)
        check_numbers(layout.cache, manifest.read, tensors, path)
        return manifest, tensors
    except DataError as error:
        text = str(error)
        raise DataError(text if remedy in text else f"{text.removesuffix(REMEDY)}{remedy}") from None
    finally:
        os.close(descriptor)
