"""Models on the Hugging Face hub, as sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lce.errors import ModelError
from lce.files import MAX_FILE_BYTES, named
from lce.progress import notice
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.checkpoint import Checkpoint
from lce.weights.hub_files import Absent, HubId, NoRevision, Remote, Snapshot, Unreachable, cache_folder, hint
from lce.weights.source import CONFIG, Source


@dataclass(frozen=True)
class HubSource(Source):
    """A model on the hub. `path` is its id, as text. With `metadata_only`, no weights are downloaded."""

    id: HubId
    metadata_only: bool

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights, with checked headers."""
        return self._find(self._described[0], weights=True, ask=not self.metadata_only)[1].checkpoint

    @cached_property
    def _described(self) -> tuple[str, Source]:
        return self._find(self.id.revision, weights=False)

    @property
    def headers(self) -> Checkpoint | None:
        return self._described[1].headers

    @property
    def is_model(self) -> bool:
        return True

    @property
    def has_weights(self) -> bool:
        try:
            return self._find(self._described[0], weights=True, ask=False)[1].has_weights
        except ModelError:
            return False

    @property
    def place(self) -> Path:
        return self._described[1].place

    @property
    def maps_file(self) -> Path:
        return self._described[1].maps_file

    @property
    def vocabulary(self) -> str | None:
        return self._described[1].vocabulary

    def tokenizer(self, vocab_size: int | None = None) -> Tokenizer:
        return self._described[1].tokenizer(vocab_size)

    def read(self, name: str, most: int = MAX_FILE_BYTES) -> bytes | None:
        return self._described[1].read(name, most)

    def where(self, name: str) -> Path:
        return self._described[1].where(name)

    def _find(self, revision: str, *, weights: bool, ask: bool = True) -> tuple[str, Source]:
        """Return a revision's commit and model: from the cache if it has all that is needed, else from the hub.

        If the hub cannot be asked, a model in the cache is taken although files of its tokenizer may be missing.
        """
        found, cache = None, f"the hub's cache, {cache_folder()}"
        absent = f"{named(self.path)} is no file or folder{hint(self.id.repo)}, and is not in {cache}"
        if (cached := Snapshot.cached(self.id, revision)) is not None:
            try:
                found = cached.model(weights=weights)
            except ModelError as error:
                if not (weights or isinstance(error, Absent)):
                    raise
                absent = f"{self.id} is in {cache}, without its weights" if weights else str(error)
        is_whole = weights or (found and found.vocabulary and found.read("tokenizer_config.json") is not None)
        if cached and found and (is_whole or not ask):
            return cached.commit, found
        if not ask:
            raise Absent(f"{absent}; download it by `{self.id.command}`")
        try:
            try:
                asked = cached.commit if cached and CONFIG in cached.names else revision
                remote = Remote.listed(self.id, asked, self.metadata_only)
            except NoRevision:  # the commit that the cache has is no longer on the hub
                remote = Remote.listed(self.id, revision, self.metadata_only)
            made = remote.model(weights=weights)
        except Unreachable as error:
            if not (cached and found):
                raise Unreachable(f"{absent}, and {error}") from error
            notice(f"files of the tokenizer of {self.id} may be missing, and {error}")
            return cached.commit, found
        remote.remember(revision)
        return remote.commit, made
