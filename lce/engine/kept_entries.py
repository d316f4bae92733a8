"""The entries of a cache of contexts: each is kept in memory, as a file, or both, and is found by its tokens."""

import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lce.engine.context import Context

LEAST_SAVED = 16  # tokens: shorter contexts are not saved
MOST_ASKED = 32  # entries with the same prefix that are asked how far back they can go

Ids = NDArray[np.int32]
PLACE = operator.attrgetter("place")


@dataclass(eq=False)
class Entry:
    """A kept context: `context` in memory, its file at `path`, or both.

    `busy` while it is being saved, `urgent` if memory is short, `unsavable` if it is to stay in memory alone. If memory
    or a budget is too small to open the file, the file is `unopenable` here, and stays for others.
    """

    ids: Ids
    group: str
    context: Context | None = None
    path: Path | None = None
    n_bytes: int = 0  # of its files
    used: float = 0.0
    memory_bytes: int = field(init=False)  # that the context takes in memory, shared ones included
    busy: bool = False
    urgent: bool = False
    unsavable: bool = False
    unopenable: bool = False
    place: tuple[str, bytes] = field(init=False)  # by which entries are sorted

    def __post_init__(self) -> None:
        self.place = self.group, self.ids.tobytes()
        self.weigh()

    def weigh(self) -> None:
        """Set `memory_bytes`. A fork of the context may change them."""
        self.memory_bytes = 0 if self.context is None else sum(self.context.cache.bytes_by_tier.values())

    @property
    def is_unsaved(self) -> bool:
        """Whether the context is to be saved."""
        alone = self.context is not None and self.path is None
        return alone and not self.unsavable and len(self.ids) >= LEAST_SAVED

    @property
    def forgets(self) -> bool:
        """Whether what the method keeps may not go back to here once the text is longer."""
        layers = () if self.context is None else self.context.cache.layers
        return any(state.forgets for layer in layers for state in layer.state.values())

    def reach(self, n_tokens: int) -> int:
        """Return to how many of the first `n_tokens` the context can be cut. Of a file this is not known: to all."""
        cache = None if self.context is None else self.context.cache
        return n_tokens if cache is None or n_tokens > cache.n_tokens else cache.nearest(n_tokens)

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
        self.context, self.memory_bytes = None, 0


def common(one: Ids, other: Ids) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(one), len(other))
    for stop in (min(n, 64), n):  # most texts differ at once
        differing = np.flatnonzero(one[:stop] != other[:stop])
        if len(differing):
            return int(differing[0])
    return n


class Entries(list[Entry]):
    """The entries of a cache, sorted by their places, so that entries with a common prefix are neighbours.

    The caller guards them by a lock. Time of a call: O(log n) comparisons, and a look at entries that are passed over.
    """

    def of(self, group: str) -> list[Entry]:
        """Return the entries of a group."""
        return [each for each in self if each.group == group]

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        insort(self, entry, key=PLACE)

    def discard(self, entry: Entry) -> None:
        """Take an entry out, if it is here."""
        first, last = (find(self, entry.place, key=PLACE) for find in (bisect_left, bisect_right))
        if entry in self[first:last]:
            del self[self.index(entry, first)]

    def drop(self, entry: Entry) -> None:
        """Take an entry out, and remove its files and its context in memory, if any."""
        self.discard(entry)
        entry.unlink()
        entry.free()

    def longest(self, group: str, wanted: Ids, fits: Callable[[Entry], bool]) -> int:
        """Return the length of the longest prefix that `wanted` shares with an entry that `fits`."""
        middle = bisect_left(self, (group, wanted.tobytes()), key=PLACE)
        sides = range(middle - 1, -1, -1), range(middle, len(self))
        near = [next((self[i] for i in side if fits(self[i])), None) for side in sides]
        return max((common(each.ids, wanted) for each in near if each and each.group == group), default=0)

    def sharing(self, group: str, wanted: Ids) -> tuple[Iterator[Entry], int]:
        """Return the entries that share the longest prefix with `wanted`, the shortest one first, and its length."""
        n = self.longest(group, wanted, lambda each: not each.unopenable)
        prefix = wanted[:n].tobytes()
        after = islice(self, bisect_left(self, (group, prefix), key=PLACE), None)
        equal = takewhile(lambda each: each.group == group and each.place[1].startswith(prefix), after)
        return (each for each in equal if n and not each.unopenable), n

    def best(self, group: str, wanted: Ids) -> tuple[Entry | None, int]:
        """Return the entry with the longest common prefix, one in memory first, and the prefix' length.

        Of several, the entry that has no other tokens is returned, if there is one. If its state cannot go back so far,
        an entry with a shorter prefix whose state can is returned.
        """
        usable, n = self.sharing(group, wanted)
        first = next(usable, None)
        in_memory = (each for each in usable if each.context is not None)
        found = first if first is None or first.context is not None else next(in_memory, first)
        if found is None or (reach := found.reach(n)) == n:
            return found, n
        others = [*islice(in_memory, MOST_ASKED), *(each for each in self.prefixes(group, wanted) if each.context)]
        best = max(others, key=lambda each: each.reach(min(n, len(each.ids))), default=found)
        return (best, min(n, len(best.ids))) if best.reach(min(n, len(best.ids))) > reach else (found, n)

    def prefixes(self, group: str, ids: Ids, but: Entry | None = None) -> list[Entry]:
        """Return the entries, if idle, whose tokens are the first ones of `ids`, without the entry `but`."""
        found, n, stop = list[Entry](), len(ids), len(self)
        while n and (stop := bisect_right(self, (group, ids[:n].tobytes()), hi=stop, key=PLACE)):
            stop -= 1  # the last entry that may be a prefix of the first `n` tokens
            each = self[stop]
            n = common(each.ids, ids) if each.group == group else 0
            if each is not but and not each.busy and n == len(each.ids):
                found.append(each)
        return found
