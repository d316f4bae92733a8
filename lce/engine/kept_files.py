"""Keeps contexts as files in a folder, within a budget of bytes. Several processes may use one folder.

    folder/ENGINE/NAME.lce    a context file, as `Context.save` writes it; ENGINE is a digest of the engine's identity
    folder/ENGINE/NAME.ids    the file's tokens, int32, by which it is found without being opened

A thread saves the contexts. A context is saved once it has been idle for as long as saving takes, so a conversation is
not written down at every turn. If the files exceed their budget, the least recently used ones are removed.
"""

import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from lce.cache.layout import FileLayout
from lce.engine.context import Context, open_context
from lce.engine.kept_entries import Entries, Entry, Ids
from lce.engine.setup import Setup
from lce.errors import CapacityError, LceError
from lce.files import open_regular, remove_leftover, write_whole
from lce.progress import notice

LEAST_IDLE_S = 0.5  # before a context is saved
SAVED_BYTES_PER_S = 500 << 20  # an estimate, by which the time that a context must have been idle follows from its size
ABANDONED_S = 2.0  # a file of tokens without a context or a draft of it is removed after so many seconds
MOST_IDS_BYTES = 1 << 30  # of a file of tokens
SETTLED_NS = 100_000_000  # two changes of a folder within so many nanoseconds may have the same time
LEFTOVER = re.compile(r"\..*\.(lce|ids)\..*\.tmp")  # the name of an unfinished file
GROUP = re.compile("[0-9a-f]{16}")  # the name of a group's folder


class KeptFiles:
    """The files of kept contexts. `lock` guards the entries. `saved` is called after each saved file."""

    def __init__(
        self, folder: Path, budget: int, entries: Entries, lock: threading.RLock, saved: Callable[[], None]
    ) -> None:
        self.folder, self.budget, self.saved = folder, budget, saved
        self._entries, self._lock = entries, lock
        self._wake = threading.Condition(lock)
        self._scanned: dict[str, int] = {}  # of each group's folder: its time of change when it was read
        self._writing = ""  # the stem of the names that the saver writes to; no other entry is made of these files
        self._refused: set[str] = set()  # the names of files of tokens that cannot be read
        self._closing = False
        self._saver: threading.Thread | None = None

    def wake(self) -> None:
        """Let the saver look for contexts that are to be saved."""
        with self._lock:
            if self._saver is None:
                self._saver = threading.Thread(target=self._save_all, name="lce-saver", daemon=True)
                self._saver.start()
            self._wake.notify_all()

    def close(self) -> None:
        """Save what is to be saved, at once, and end the saver."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        if self._saver is not None:
            self._saver.join()

    def open(self, setup: Setup, entry: Entry) -> Context | None:
        """Open an entry's file. An entry whose file is gone, or has other tokens, is removed."""
        assert entry.path is not None
        try:
            context = open_context(setup, entry.path)
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
        self._entries.drop(entry)
        return None

    def scan(self, group: str) -> None:
        """Learn which files of a group there are, if its folder has changed: other processes write there, too."""
        folder = self.folder / group
        try:
            changed = folder.stat().st_mtime_ns
            if self._scanned.get(group) == changed:
                return
            names = set(os.listdir(folder))
        except OSError:
            return
        self._scanned[group] = changed if time.time_ns() - changed > SETTLED_NS else 0
        known = {each.path.stem for each in self._entries.of(group) if each.path is not None} | {self._writing}
        for name in filter(LEFTOVER.fullmatch, names):
            remove_leftover(folder / name)
        for path in (folder / name for name in names if name.endswith(".ids") and name[:-4] not in known):
            file = path.with_suffix(".lce")
            try:
                if file.exists():
                    ids, stat = _read_ids(path), file.stat()
                    self._entries.add(Entry(ids, group, None, file, stat.st_size + ids.nbytes, stat.st_mtime))
                elif time.time() - path.stat().st_mtime > ABANDONED_S and not [*folder.glob(f".{file.name}.*")]:
                    path.unlink(missing_ok=True)
            except (OSError, ValueError, LceError) as error:
                if path.name not in self._refused:
                    self._refused.add(path.name)
                    notice(f"a kept context is not used: {error}")
        for entry in self._entries.of(group):
            gone = entry.path is not None and entry.path.name not in names and not entry.path.exists()
            if gone and entry.context is None and not entry.busy:
                self._entries.drop(entry)

    def _save_all(self) -> None:
        """Save contexts that have been idle, until the cache is closed: the saver's thread."""
        while True:
            with self._lock:
                unsaved = (each for each in self._entries if each.is_unsaved and not each.busy)
                idle = {each: max(LEAST_IDLE_S, each.memory_bytes / SAVED_BYTES_PER_S) for each in unsaved}
                waits = {each: each.used - time.time() + (0 if each.urgent else idle[each]) for each in idle}
                due = min(waits, key=lambda each: waits[each], default=None)
                if due is None and self._closing:
                    return
                if due is None or (waits[due] > 0 and not self._closing):
                    self._wake.wait(None if due is None else waits[due])
                    continue
                due.busy = True
            self._save(due)
            self.saved()

    def _save(self, entry: Entry) -> None:
        """Write a busy entry's files. If they cannot be written, the entry stays in memory alone."""
        assert entry.context is not None
        path, n_bytes = self.folder / entry.group / f"{secrets.token_hex(8)}.lce", 0
        self._writing = path.stem
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            cache, small = entry.context.cache, sum(x.nbytes for x in entry.context.data.tensors().values())
            n_needed = FileLayout(cache.layout, cache.length).small_start + small + entry.ids.nbytes
            if not self._make_space(n_needed, self.budget):
                raise CapacityError("it is larger than the budget for kept contexts")
            try:
                self._write(entry.context, entry.ids, path)
            except CapacityError:  # the disk is full: files of the same size are given up
                if not self._make_space(n_needed, sum(each.n_bytes for each in self._entries if each.path)):
                    raise
                self._write(entry.context, entry.ids, path)
            n_bytes = path.stat().st_size + entry.ids.nbytes
        except Exception as error:  # any one: the saver must go on, and requests may wait for the entry
            with suppress(OSError):
                path.with_suffix(".ids").unlink(missing_ok=True)
            notice(f"a context of {len(entry.ids):,} tokens is not kept on disk: {error}")
        with self._lock:
            entry.path, entry.n_bytes, entry.unsavable = path if n_bytes else None, n_bytes, not n_bytes
            entry.busy, self._writing = False, ""
            if n_bytes:
                for other in self._entries.prefixes(entry.group, entry.ids, entry):
                    if other.context is None:
                        self._entries.drop(other)
                self._make_space(0, self.budget)  # the file may be larger than the estimate

    def _write(self, context: Context, ids: Ids, path: Path) -> None:
        write_whole(path.with_suffix(".ids"), ids.tobytes())
        context.save(path)

    def _make_space(self, n_bytes: int, budget: int) -> bool:
        """Remove files, the least recently used first, until `n_bytes` more fit the budget; return whether they do."""
        with self._lock:
            for group in filter(GROUP.fullmatch, next(os.walk(self.folder), ("", [], []))[1]):
                self.scan(group)
            files = sorted((each for each in self._entries if each.path is not None), key=lambda each: each.used)
            total = sum(each.n_bytes for each in files)
            for entry in files:
                if total + n_bytes <= budget:
                    break
                total -= entry.n_bytes
                entry.unlink()
                if entry.context is None:
                    self._entries.drop(entry)
                entry.unsavable = True
        return total + n_bytes <= budget


def _read_ids(path: Path) -> Ids:
    """Return the tokens in a file. Raises `OSError`, `DataError` or `ValueError` for what is no such file."""
    with open(open_regular(path), "rb") as file:
        raw = file.read(MOST_IDS_BYTES)
    if not raw or len(raw) % 4:
        raise ValueError(f"{path} has {len(raw)} bytes; expected some tokens of 4 bytes each")
    return np.frombuffer(raw, dtype=np.int32)
