"""Keeps the contexts of ended requests, in memory and as files, so that a text that begins like one is read on.

A context is found by its first tokens. For each piece of 64 tokens there is a digest of all tokens up to the piece's
end: the text and a context agree up to the last digest that both have, and the tokens behind it are compared. An entry
in memory that the text continues is taken out of the cache, to be appended to. Otherwise a fork is cut back to the
common tokens; `KVCache.nearest` says how far back each method's state can go.

    folder/ENGINE/NAME.lce    a context file, as `Context.save` writes it; ENGINE is a digest of the engine's identity
    folder/ENGINE/NAME.ids    the file's tokens, int32, by which it is found without being opened

The files are saved by a thread of their own. A context is saved once it has been idle for as long as saving takes, so a
conversation is not written down at every turn. If the files exceed their budget, those that were not used for the
longest time are removed. Other processes may use the same folder at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lce.engine.context import Context, Unique
from lce.errors import CapacityError, LceError
from lce.files import open_regular, remove_leftover, write_whole
from lce.models.rope import Rope
from lce.progress import notice
from lce.tokenizer.chat import ChatText

if TYPE_CHECKING:
    from lce.engine.engine import Engine

PIECE = 64  # tokens between two digests
LEAST_SAVED = 16  # tokens: shorter contexts are not saved
# A context of more than `ALWAYS_SAVED` tokens is saved if less than 15/16 of it is in another context's file.
ALWAYS_SAVED, SAVED_SHARE = 4096, 16
LEAST_IDLE_S = 0.5  # before a context is saved
SAVED_BYTES_PER_S = 500 << 20  # an estimate, by which the time that a context must have been idle follows from its size
LEAST_SHARED = 16  # tokens: a fork is not made for fewer
FORKED_TOKENS = 128  # copying so many tokens' keys and values for a first fork takes less time than reading one token
ABANDONED_S = 3600  # a file of tokens without its context is removed after so many seconds
MOST_IDS_BYTES = 1 << 30  # of a file of tokens
SETTLED_NS = 100_000_000  # two changes of a folder within so many nanoseconds may have the same time
GROUP = re.compile("[0-9a-f]{16}")  # the name of a folder of contexts: see `group_of`

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
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if len(differing) else n


class PrefixCache(Unique):
    """The contexts that a batch keeps; any thread may use it. `memory` and `disk` are budgets in bytes.

    Without a `folder` nothing is written. `changed` is called when a context has been saved.
    """

    _instead = "make another batch"

    def __init__(self, folder: Path | None, memory: int, disk: int, changed: Callable[[], None]) -> None:
        self.folder, self.memory, self.disk, self.changed = folder, memory, disk, changed
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._entries: set[Entry] = set()
        self._index: dict[tuple[str, bytes], set[Entry]] = {}
        self._scanned: dict[str, int] = {}  # of each group's folder: its time of change when it was read
        self._writing = ""  # the stem of the names that the saver writes to; no other entry is made of these files
        self._refused: set[str] = set()  # the names of files of tokens that cannot be read
        self._closing = False
        self._saver: threading.Thread | None = None

    def find(
        self, engine: Engine, ids: Sequence[int], length: int = 0, also: Sequence[Context] = ()
    ) -> tuple[Context | None, bool]:
        """Return a context that holds the longest known prefix of `ids` and no other tokens; None if there is none.

        `length` is the final number of tokens: keys must be rotated as in a context of this announced length.
        `also` are contexts in use, from which a fork may be made. The second result is True if the best context is
        being saved just now: ask again when `changed` was called.
        """
        wanted = np.asarray(ids, dtype=np.int32)
        group = group_of(engine, engine.rope_of(max(length, len(ids))))
        also = [each for each in also if group_of(engine, each._rope) == group]
        with self._lock:
            self._scan(group)
            while True:  # until no damaged file is found
                entry, n = self._best(group, wanted)
                in_use = max(also, key=lambda each: common(np.asarray(each.token_ids, np.int32), wanted), default=None)
                if in_use is not None:
                    n_used = common(np.asarray(in_use.token_ids, np.int32), wanted)
                    if n_used > n and _is_worth(n_used, len(in_use)):
                        return _cut(in_use.fork(), n_used), False
                if entry is None or not (n == len(entry.ids) or _is_worth(n, len(entry.ids))):
                    return None, False
                if entry.busy:
                    return None, True
                if (context := self._taken(engine, entry, n)) is not None:
                    return _cut(context, n), False

    def _taken(self, engine: Engine, entry: Entry, n_tokens: int) -> Context | None:
        """Return an entry's context, or a fork if it has more than `n_tokens`; None if its file cannot be used."""
        entry.used = time.time()
        if entry.path is not None:
            with suppress(OSError):
                os.utime(entry.path)
        context = entry.context
        if context is None:
            return self._opened(engine, entry)
        if n_tokens < len(entry.ids):
            return context.fork()
        entry.context = None  # the request appends to it
        if entry.path is None:
            self._remove(entry)
        return context

    def _opened(self, engine: Engine, entry: Entry) -> Context | None:
        """Open an entry's file. An entry whose file is gone, or has other tokens, is removed."""
        assert entry.path is not None
        try:
            context = engine.open_context(entry.path)
            if np.array_equal(np.asarray(context.token_ids, np.int32), entry.ids):
                return context
            notice(f"{entry.path} does not hold the tokens of its .ids file; it is removed")
            context.close()
        except CapacityError as error:
            notice(f"a kept context is not used: {error}")
            entry.unopenable = True
            return None
        except LceError as error:
            if entry.path.exists():
                notice(f"a kept context cannot be opened and is removed: {error}")
        self._remove(entry)
        return None

    def forget(self, context: Context, error: BaseException) -> bool:
        """Remove the file from which a context was opened, if this cache has the file; return whether it had."""
        with self._lock:
            found = [each for each in self._entries if each.path is not None and str(each.path) == context.source]
            for entry in found:
                notice(f"a kept context cannot be read and is removed: {error}")
                self._unlink(entry)
                if not entry.busy:
                    self._remove(entry)
        return bool(found)

    def _best(self, group: str, wanted: Ids) -> tuple[Entry | None, int]:
        """Return the entry with the longest common prefix, one in memory first, and the prefix' length."""
        found: set[Entry] = set()
        for digest in reversed(chain(wanted)):
            found = {each for each in self._index.get((group, digest), ()) if not each.unopenable}
            if found:
                break
        if not found:  # the first piece differs, or a text is shorter
            found = {each for each in self._entries if each.group == group and not each.unopenable}
        best, n_best = None, 0
        for entry in found:
            n = common(entry.ids, wanted)
            if n > n_best or (n == n_best and best is not None and (best.context is None) > (entry.context is None)):
                best, n_best = entry, n
        return best, n_best

    def put(self, engine: Engine, context: Context) -> None:
        """Keep a context, which nobody else uses from now on. Contexts of which it is a continuation are given up."""
        if not context.cache.length:
            return
        entry = Entry(
            np.asarray(context.token_ids, np.int32), group_of(engine, context._rope), context, used=time.time()
        )
        with self._lock:
            for other in self._prefixes(entry):
                if other.path is not None and not other.path.exists():  # another process has removed the file
                    other.path = None
                if len(other.ids) == len(entry.ids):
                    entry.path, entry.n_bytes, other.path = other.path, other.n_bytes, None
                if other.path is None:  # the others' files are given up when this context has one
                    self._remove(other)
            filed = (each for each in self._entries if each.path is not None and each.group == entry.group)
            n_filed = max((common(each.ids, entry.ids) for each in filed), default=0)
            n = len(entry.ids)  # a question about a long document does not make another copy of the document
            entry.unsavable = n > ALWAYS_SAVED and (n - n_filed) * SAVED_SHARE < n
            self._add(entry)
            self.shrink()
            if self.folder is not None:
                self._start_saver()
                self._wake.notify_all()

    def _prefixes(self, entry: Entry) -> list[Entry]:
        """Return the other entries, if idle, whose tokens are the first ones of an entry."""
        others = [each for each in self._entries if each.group == entry.group and each is not entry and not each.busy]
        return [each for each in others if common(each.ids, entry.ids) == len(each.ids)]

    def shrink(self, n_bytes: int = 0) -> bool:
        """Drop contexts from memory, the least recently used first, until the budget is kept and `n_bytes` are freed.

        A context that has a file stays in the cache. One that is yet to be saved is saved first, by the saver. Returns
        whether memory was freed, or will be.
        """
        with self._lock:
            held = sorted((each for each in self._entries if each.context), key=lambda each: each.used)
            excess = max(n_bytes, sum(each.memory_bytes for each in held) - self.memory)
            dropped = False
            for entry in held:
                if excess <= 0:
                    break
                excess -= entry.memory_bytes
                dropped = True
                assert entry.context is not None
                if entry.busy or (self.folder is not None and entry.path is None and entry.is_savable):
                    entry.urgent = True
                    self._wake.notify_all()
                    continue
                entry.context.close()
                entry.context = None
                if entry.path is None:
                    self._remove(entry)
            return dropped

    def _add(self, entry: Entry) -> None:
        self._entries.add(entry)
        for digest in entry.digests:
            self._index.setdefault((entry.group, digest), set()).add(entry)

    def _remove(self, entry: Entry) -> None:
        """Take an entry out of the cache, and remove its files, if any."""
        self._entries.discard(entry)
        for digest in entry.digests:
            key = entry.group, digest
            self._index.get(key, set()).discard(entry)
            if not self._index.get(key, True):
                del self._index[key]
        self._unlink(entry)
        if entry.context is not None:
            entry.context.close()
            entry.context = None

    def _unlink(self, entry: Entry) -> None:
        """Remove an entry's files, if it has any."""
        for path in () if entry.path is None else (entry.path, entry.path.with_suffix(".ids")):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        entry.path = None

    def _scan(self, group: str) -> None:
        """Learn which files of a group there are, if its folder has changed: other processes write there, too."""
        if self.folder is None:
            return
        folder = self.folder / group
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return
        if self._scanned.get(group) == changed:
            return
        self._scanned[group] = changed if time.time_ns() - changed > SETTLED_NS else 0
        known = {each.path.stem for each in self._entries if each.path is not None and each.group == group}
        for path in folder.glob("*.ids"):
            file = path.with_suffix(".lce")
            if path.stem in known or path.stem == self._writing:
                continue
            try:
                if file.exists():
                    ids, stat = _read_ids(path), file.stat()
                    self._add(Entry(ids, group, None, file, stat.st_size + ids.nbytes, stat.st_mtime))
                elif time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink(missing_ok=True)
            except (OSError, ValueError, LceError) as error:
                if path.name not in self._refused:
                    self._refused.add(path.name)
                    notice(f"a kept context is not used: {error}")
        for entry in [each for each in self._entries if each.path is not None and each.group == group]:
            assert entry.path is not None
            if not entry.path.exists() and entry.context is None and not entry.busy:
                self._remove(entry)
        for path in (*folder.glob(".*.lce.*.tmp"), *folder.glob(".*.ids.*.tmp")):
            remove_leftover(path)

    def _start_saver(self) -> None:
        if self._saver is None:
            self._saver = threading.Thread(target=self._save_all, name="lce-saver", daemon=True)
            self._saver.start()

    def _save_all(self) -> None:
        """Save contexts that have been idle, until the cache is closed: the saver's thread."""
        while True:
            with self._lock:
                waits = {each: _idle_s(each) + each.used - time.time() for each in self._unsaved()}
                due = min(waits, key=lambda each: waits[each], default=None)
                if due is None and self._closing:
                    return
                if due is None or (waits[due] > 0 and not self._closing):
                    self._wake.wait(None if due is None else waits[due])
                    continue
                due.busy = True
            self._save(due)
            self.changed()

    def _unsaved(self) -> list[Entry]:
        """Return the entries that are to be saved."""
        held = (each for each in self._entries if each.context is not None and each.path is None)
        return [each for each in held if each.is_savable and not each.busy]

    def _save(self, entry: Entry) -> None:
        """Write a busy entry's files. If they cannot be written, the entry stays in memory alone."""
        assert self.folder is not None
        assert entry.context is not None
        path, n_bytes = self.folder / entry.group / f"{secrets.token_hex(8)}.lce", 0
        self._writing = path.stem
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._make_space(_file_bytes(entry)):
                raise CapacityError("it is larger than the budget for kept contexts")
            write_whole(path.with_suffix(".ids"), entry.ids.tobytes())
            entry.context.save(path)
            n_bytes = path.stat().st_size + entry.ids.nbytes
        except Exception as error:  # any one: the saver must go on, and requests may wait for the entry
            with suppress(OSError):
                path.with_suffix(".ids").unlink(missing_ok=True)
            notice(f"a context of {len(entry.ids):,} tokens is not kept on disk: {error}")
        with self._lock:
            entry.path, entry.n_bytes, entry.unsavable = path if n_bytes else None, n_bytes, not n_bytes
            entry.busy, self._writing = False, ""
            if n_bytes:
                for other in self._prefixes(entry):
                    if other.context is None:
                        self._remove(other)
                self._make_space(0)  # the file may be larger than the estimate
            self.shrink()

    def _make_space(self, n_bytes: int) -> bool:
        """Remove files, the least recently used first, until `n_bytes` more fit the budget; return whether they do."""
        assert self.folder is not None
        with self._lock:
            for group in filter(GROUP.fullmatch, _names(self.folder)):
                self._scan(group)
            files = sorted((each for each in self._entries if each.path is not None), key=lambda each: each.used)
            total = sum(each.n_bytes for each in files)
            for entry in files:
                if total + n_bytes <= self.disk:
                    break
                total -= entry.n_bytes
                self._unlink(entry)
                if entry.context is None:
                    self._remove(entry)
                entry.unsavable = True
        return total + n_bytes <= self.disk

    def close(self, *, save: bool = True) -> None:
        """Free the contexts in memory. With `save`, those that have no file yet are saved first."""
        with self._lock:
            self._closing = True
            for entry in self._entries:
                entry.unsavable |= not save
            self._wake.notify_all()
        if self._saver is not None:
            self._saver.join()
        with self._lock:
            for entry in self._entries:
                if entry.context is not None:
                    entry.context.close()
                    entry.context = None

    def spelled(self, engine: Engine, chat: ChatText, ids: list[int], length: int = 0) -> list[int]:
        """Return a chat's ids, with the tokens of a kept context where it holds the beginning of the chat's text.

        `ids` are those of the whole text. A model may have written an answer in other tokens than its text has: then
        the context's tokens are read on, as in a `Conversation`.
        """
        wanted = np.asarray(ids, dtype=np.int32)
        with self._lock:
            entry, n = self._best(group_of(engine, engine.rope_of(max(length, len(ids)))), wanted)
        if entry is None or n == len(entry.ids) or not n:
            return ids
        tokenizer = engine.tokenizer
        before = tokenizer.decode(ids[:n], skip_special=False)
        text = before + tokenizer.decode(entry.ids[n:].tolist(), skip_special=False)
        n_chars = len(text)
        if len(before) > n_chars or chat.text[:n_chars] != text or any(cut < n_chars for cut in chat.cuts):
            return ids
        return [*entry.ids.tolist(), *tokenizer.encode_parts(chat, n_chars)]

    @property
    def memory_bytes(self) -> int:
        """The bytes of the contexts in memory."""
        with self._lock:
            return sum(each.memory_bytes for each in self._entries)

    @property
    def n_contexts(self) -> int:
        """The number of contexts, in memory and as files."""
        return len(self._entries)


def group_of(engine: Engine, rope: Rope) -> str:
    """Return the name of the folder for contexts with this RoPE, of engines that can use each other's."""
    digest = hashlib.sha256(json.dumps(engine.identity.facts, sort_keys=True).encode())
    for each in (rope, *map(rope.of, dict.fromkeys(engine.model.config.layer_kinds))):
        digest.update(each.inv_freq.numpy().tobytes())  # some scalings depend on the announced length
    return digest.hexdigest()[:16]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none if it cannot be read, for example because it was removed."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _file_bytes(entry: Entry) -> int:
    """Return the bytes of the files that an entry with a context will have."""
    assert entry.context is not None
    data = entry.context._data
    tensors = data.tensors().values()
    layout = data.cache.layout.file(data.cache.length)
    n_bytes: int = layout.small_start + sum(each.nbytes for each in tensors) + entry.ids.nbytes
    return n_bytes


def _read_ids(path: Path) -> Ids:
    """Return the tokens in a file. Raises `OSError`, `DataError` or `ValueError` for what is no such file."""
    with open(open_regular(path), "rb") as file:
        raw = file.read(MOST_IDS_BYTES)
    if not raw or len(raw) % 4:
        raise ValueError(f"{path} has {len(raw)} bytes; expected some tokens of 4 bytes each")
    return np.frombuffer(raw, dtype=np.int32)


def _idle_s(entry: Entry) -> float:
    """Return the seconds for which a context is idle before it is saved."""
    return 0 if entry.urgent else max(LEAST_IDLE_S, entry.memory_bytes / SAVED_BYTES_PER_S)


def _is_worth(n_tokens: int, length: int) -> bool:
    """Return whether a fork of a context of `length` tokens saves time if the first `n_tokens` are wanted."""
    return n_tokens >= LEAST_SHARED and n_tokens * FORKED_TOKENS >= length


def _cut(context: Context, n_tokens: int) -> Context:
    """Cut a context back to its first tokens."""
    if n_tokens < len(context):
        cache = context.cache
        n_kept = n_tokens if n_tokens > cache.n_tokens else cache.nearest(n_tokens - cache.n_evicted) + cache.n_evicted
        del context.token_ids[n_tokens:]
        if n_kept < cache.n_tokens:
            cache.truncate(n_kept - cache.n_evicted)
    return context
