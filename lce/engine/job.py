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

    `path.part` takes keys and values as they come; `path.part.state` is the last checkpoint. `start` says where a run
    starts: run the tokens behind `data.cache.length` into that cache, call `checkpoint` from time to time, then
    `finish`; from `start` on, `abandon` after an error.
    """

    def __init__(
        self, path: Path, layout: CacheLayout, identity: Identity, token_ids: Sequence[int], announced: int
    ) -> None:
        check_writable(path)
        sweep(path)
        self.path = path
        self.identity = identity
        self.facts = identity.facts  # here, because it reads the checkpoint: an error in that comes before the work
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
        """Return the file under work."""
        assert self._draft is not None, "started before use"
        return self._draft

    def start(self, before: ContextData | None = None) -> ContextData:
        """Resume the job where its last run stopped; or begin, with a copy of `before` if the text begins so.

        `before` may be of a file that has the name `path` until `finish`.
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
        if manifest.announced != announced:  # its keys may be rotated for that length
            begun = manifest.announced
            raise DataError(
                f"{named(self.state)} was begun with a length of {begun}; give --length {begun}, or {remedy}"
            )
        self._draft = Draft.reopen(self.part, self.layout)
        snapshot = Snapshot(manifest, tensors, self.draft.rows)
        found = data_of(self.state, self.layout.cache, snapshot, self.identity.vocab_size, own=True)
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
        """End without `finish`. Files of a job with a checkpoint stay, and `error` gets a note; else no file stays.

        A traceback may keep this job, and the same call must find the file unlocked: it is closed.
        """
        if os.path.lexists(self.state):
            if self._draft is not None:
                error.add_note(f"the same command goes on from {self.n_written:,} tokens")
                self._draft.rows.close()
        elif self._draft is not None:
            self._draft.discard()
        else:
            remove_leftover(self.part)  # made right before the error, unless another process has locked it


def _state_bytes(tensors: Mapping[str, Tensor], manifest: str) -> bytes:
    """Return a checkpoint of a job: an ordinary safetensors file."""
    header = json.dumps({"__metadata__": {"lce": manifest}, **tensor_entries(tensors)}).encode()
    header += b" " * (-len(header) % 8)
    parts = (
        x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, x in sorted(tensors.items())
    )
    return b"".join((len(header).to_bytes(8, "little"), header, *parts))


def _read_state(path: Path, layout: FileLayout, identity: Identity, remedy: str) -> tuple[Manifest, dict[str, Tensor]]:
    """Return the last checkpoint of a job: as in a context file, but without rows."""
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
