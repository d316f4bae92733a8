"""Prefills a document into a context file. An interrupted prefill can be resumed."""

import os
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from lce.cache import manifest as headers
from lce.cache.context_file import Draft, Snapshot, restored, write_rows
from lce.cache.kv import KVCache
from lce.cache.layout import FileLayout
from lce.cache.manifest import REMEDY
from lce.cache.row_file import Descriptor, raw_bytes
from lce.engine.saving import ContextData, ContextFiles, Target, part_of, state_of, text_hash
from lce.errors import DataError, UsageError
from lce.files import check_target, named, open_regular, path_of, remove_leftover, sweep, write_whole


class PrefillJob:
    """A prefill into the context file `target`. After an interruption, a new job for the same file resumes the prefill.

    The file `path.part` takes keys and values as they are computed, and `path.part.state` holds the last checkpoint.
    Call `start`, prefill what the cache lacks, `checkpoint` from time to time, `finish`, and after an error `abandon`.
    """

    def __init__(self, target: Target, files: ContextFiles, ids: Sequence[int], announced: int) -> None:
        target.check()
        sweep(target.path)
        self.target, self.files, self.token_ids, self.announced = target, files, ids, announced
        files.identity.model  # noqa: B018  read now, so that unreadable weights fail before the work
        self.part, self.state = part_of(target.path), path_of(state_of(target.path))  # raises if the name is too long
        for each in (self.part, self.state):
            check_target(each, UsageError)
        self.layout = FileLayout(files.layout, len(ids))
        self.n_written = 0
        self._draft: Draft | None = None  # the unfinished file, after `start`

    def start(self, before: ContextData | None = None) -> ContextData:
        """Resume the job at its last checkpoint, or begin the job after a copy of the context `before`."""
        resumed = os.path.lexists(self.state) and os.path.lexists(self.part)
        cache, logits, only_read = self._resume() if resumed else self._begin(before)
        self.n_written = cache.length
        return ContextData(cache, self.token_ids, logits, self.announced, only_read=only_read)

    def _begin(self, before: ContextData | None) -> tuple[KVCache, Tensor | None, int]:
        remove_leftover(self.part)
        if os.path.lexists(self.part):
            raise DataError(f"{named(self.part)} is being written by another process; wait, or name another file")
        remove_leftover(self.state)
        self._draft = draft = Draft.create(self.part, self.layout)
        if before is None or not before.cache.length:
            return KVCache.empty(self.layout.cache, self.layout.n_tokens, draft.rows), None, 0
        write_rows(before.cache, draft.rows)
        tensors = {name: x.clone() for name, x in before.cache.tensors().items()}
        return (
            restored(self.layout.cache, draft.rows, before.cache.length, tensors, own=True),
            before.logits,
            before.only_read,
        )

    def _resume(self) -> tuple[KVCache, Tensor | None, int]:
        """Return what the last checkpoint, a context file without keys and values, has of the context."""
        path, files = self.state, self.files
        remedy = f"remove it and {named(self.part.name)}, or name another file"
        try:
            header = headers.read_header(Descriptor(open_regular(path, follow=False)), path)
            files.identity.check(path, header.manifest.identity, remedy)
            tensors = headers.read_small(header, files.layout, partial(files.check_texts, path, own=True))
        except DataError as error:
            text = str(error)
            raise DataError(text if remedy in text else f"{text.removesuffix(REMEDY)}{remedy}") from None
        manifest, begun = header.manifest, header.manifest.announced
        if manifest.text != text_hash(self.token_ids):
            raise DataError(f"{named(path)} belongs to another text; {remedy}")
        if begun != self.announced:  # keys may be rotated for the announced length
            raise DataError(f"{named(path)} was begun with a length of {begun}; give --length {begun}, or {remedy}")
        self._draft = draft = Draft(self.part, self.layout, manifest.file_id)
        found = files.data_of(path, Snapshot(manifest, tensors, draft.rows), own=True)
        return found.cache, found.logits, found.only_read

    def checkpoint(self, data: ContextData) -> None:
        """Write a checkpoint, at which an interrupted job resumes. Writes new keys and values, and `data.tensors()`."""
        assert self._draft is not None
        write_rows(data.cache, self._draft.rows, self.n_written)
        self._draft.rows.flush()
        tensors = data.tensors()
        manifest = headers.signed(data.manifest(self.files.identity.facts, self._draft), tensors)
        raw = (raw_bytes(x) for _, x in sorted(tensors.items()))
        write_whole(self.state, b"".join((headers.header_bytes(headers.tensor_entries(tensors), manifest), *raw)))
        self.n_written = data.cache.length

    def finish(self, data: ContextData) -> None:
        """Write the keys and values that the file lacks, and rename the file to the target's path."""
        assert self._draft is not None
        write_rows(data.cache, self._draft.rows, self.n_written)
        try:
            self.files.finish(self._draft, self.target, data)
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
