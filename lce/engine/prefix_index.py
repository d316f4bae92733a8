"""Finds contexts by their first tokens.

For each piece of 64 tokens there is a digest of all tokens up to the piece's end: a text and a context agree up to the
last digest that both have, and the tokens behind it are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lce.engine.context import Context

PIECE = 64  # tokens between two digests
LEAST_SAVED = 16  # tokens: shorter contexts are not saved

Ids = NDArray[np.int32]


@dataclass(eq=False)
class Entry:
    """A context of the cache: `context` in memory, its file at `path`, or both.

    `busy` while it is being saved, `urgent` if memory is short, `unsavable` if it is to stay in memory alone. If memory
    or a budget is too small to open the file, the file is `unopenable` here, and stays for others.
    """

    ids: Ids
    group: str
    context: Context | None = None
    path: Path | None = None
    n_bytes: int = 0  # of its files
    used: float = 0.0
    busy: bool = False
    urgent: bool = False
    unsavable: bool = False
    unopenable: bool = False
    digests: Sequence[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.digests = chain(self.ids)

    @property
    def is_savable(self) -> bool:
        """Whether the context may be saved."""
        return not self.unsavable and len(self.ids) >= LEAST_SAVED

    def unlink(self) -> None:
        """Remove the files, if there are any."""
        for path in () if self.path is None else (self.path, self.path.with_suffix(".ids")):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self.path = None

    def free(self) -> None:
        """Free the context in memory, if there is one."""
        if self.context is not None:
            self.context.close()
            self.context = None

    @property
    def memory_bytes(self) -> int:
        """The bytes that the context takes in memory, shared ones included."""
        return 0 if self.context is None else sum(self.context.cache.bytes_by_tier.values())


def chain(ids: Ids) -> list[bytes]:
    """Return a digest of all tokens up to the end of each complete piece."""
    found, digest = [], hashlib.blake2b(digest_size=16)
    for end in range(PIECE, len(ids) + 1, PIECE):
        digest.update(ids[end - PIECE : end].tobytes())
        found.append(digest.copy().digest())
    return found


def common(one: Ids, other: Ids) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(one), len(other))
    for stop in (min(n, PIECE), n):  # most texts differ at once
        differing = np.flatnonzero(one[:stop] != other[:stop])
        if len(differing):
            return int(differing[0])
    return n


class PrefixIndex:
    """The entries of a cache, found by their tokens. The caller guards the index by a lock."""

    def __init__(self) -> None:
        self._entries: set[Entry] = set()
        self._by_digest: dict[tuple[str, bytes], set[Entry]] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter([*self._entries])

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, group: str) -> list[Entry]:
        """Return the entries of a group."""
        return [each for each in self._entries if each.group == group]

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        self._entries.add(entry)
        for digest in entry.digests:
            self._by_digest.setdefault((entry.group, digest), set()).add(entry)

    def remove(self, entry: Entry) -> None:
        """Take an entry out of the index, and remove its files and its context in memory, if any."""
        self._entries.discard(entry)
        for digest in entry.digests:
            key = entry.group, digest
            self._by_digest.get(key, set()).discard(entry)
            if not self._by_digest.get(key, True):
                del self._by_digest[key]
        entry.unlink()
        entry.free()

    def best(self, group: str, wanted: Ids) -> tuple[Entry | None, int]:
        """Return the entry with the longest common prefix, one in memory first, and the prefix' length."""
        found: set[Entry] = set()
        for digest in reversed(chain(wanted)):
            found = {each for each in self._by_digest.get((group, digest), ()) if not each.unopenable}
            if found:
                break
        if not found:  # the first piece differs, or a text is shorter
            found = {each for each in self.of(group) if not each.unopenable}
        best, n_best = None, 0
        for entry in found:
            n = common(entry.ids, wanted)
            if n > n_best or (n == n_best and best is not None and (best.context is None) > (entry.context is None)):
                best, n_best = entry, n
        return best, n_best

    def prefixes(self, entry: Entry) -> list[Entry]:
        """Return the other entries, if idle, whose tokens are the first ones of an entry."""
        others = [each for each in self.of(entry.group) if each is not entry and not each.busy]
        return [each for each in others if common(each.ids, entry.ids) == len(each.ids)]
