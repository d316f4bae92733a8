"""Keeps the contexts of ended requests, in memory and as files, so that a text that begins like one is read on.

An entry in memory that the text continues is taken out of the cache, to be appended to. Otherwise a fork is cut back to
the common tokens; `KVCache.nearest` says how far back each method's state can go.
"""

import hashlib
import json
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from lce.engine.context import Context, Unique
from lce.engine.kept_entries import Entries, Entry, Ids, common
from lce.engine.kept_files import KeptFiles
from lce.engine.requests import Request
from lce.engine.setup import Setup
from lce.models.rope import Rope
from lce.progress import notice

# A context of more than `ALWAYS_SAVED` tokens is saved if less than 15/16 of it is in another context's file.
ALWAYS_SAVED, SAVED_SHARE = 4096, 16
LEAST_UNSAVED = 256 << 20  # bytes of contexts that may wait for the saver, however small the budget is
MOST_SPELLED = 8  # kept contexts of which the texts are compared with a chat's
LEAST_SHARED = 16  # tokens: a fork is not made for fewer
FORKED_TOKENS = 128  # copying so many tokens' keys and values for a first fork takes less time than reading one token


class PrefixCache(Unique):
    """The contexts that a batch keeps; any thread may use it. `memory` and `disk` are budgets in bytes.

    Without a `folder` nothing is written. `changed` is notified when something happens for which a request may wait.
    Without `reuse`, every prompt is read whole, and no context is kept. With `repeatable`, of a context only the tokens
    before the first generated one are kept and used.
    """

    _instead = "make another batch"

    def __init__(
        self, folder: Path | None, memory: int, disk: int, reuse: bool = True, repeatable: bool = False
    ) -> None:
        self.memory, self.reuse, self.repeatable, self.changed = memory, reuse, repeatable, threading.Condition()
        self._lock = threading.RLock()
        self._entries = Entries()
        self._files = None if folder is None else KeptFiles(folder, disk, self._entries, self._lock, self._saved)

    def learn(self, setup: Setup) -> None:
        """Learn which contexts of an engine have files, so that no request has to: 7 ms for each 100,000 tokens."""
        if self._files is not None:
            with self._lock:
                self._files.scan(group_of(setup, setup.rope_of(1), self.repeatable))

    def beginning(self, request: Request, running: Sequence[Request]) -> tuple[Context | None, bool]:
        """Return the context with which a request's prompt begins, if any, and whether to wait for a better one.

        The context has no other tokens. It may be a fork of one in `running`. While the best one is being saved, or
        read for another request, ask again later.
        """
        setup, start = request.setup, request.start
        before, n_least = ([], 0) if start is None else (start.token_ids, start.cache.n_tokens)
        request.n_before = len(before)
        is_drawn = self.repeatable and start is not None and start.data.only_read < n_least
        if self.reuse and not is_drawn and (start is None or not start.cache.fixed):
            rope = setup.rope_of(len(request.ids) + request.options.max_tokens) if start is None else start.rope
            group = group_of(setup, rope, self.repeatable)
            with self._lock:
                if self._files is not None:
                    self._files.scan(group)
                if request.chat is not None and not self.repeatable:
                    request.ids = self._spelled(request, group, before)
                    request.result.stats.prompt_tokens = len(request.ids)
                wanted = np.asarray([*before, *request.ids], dtype=np.int32)
                context, is_busy = self._longest(request, group, wanted, running)
            if is_busy or (context is not None and context.cache.n_tokens >= n_least):  # a cut may go far back
                return context, is_busy
        return None if start is None else start.fork(), False

    def _longest(
        self, request: Request, group: str, wanted: Ids, running: Sequence[Request]
    ) -> tuple[Context | None, bool]:
        """Return a context that holds the longest known prefix of `wanted`, and whether it is being saved or read."""
        setup, known, n_used, n_ready, used = request.setup, request.n_before, 0, 0, None
        for each, state in ((each.context, each.state) for each in running if each.setup is setup):
            if each is not None and not each.cache.fixed and group_of(setup, each.rope, self.repeatable) == group:
                n_usable = each.data.only_read if self.repeatable and state == "decode" else None
                n = common(np.asarray(each.token_ids[:n_usable], np.int32), wanted)
                if n > n_used:
                    n_used, n_ready, used = n, n if state == "decode" else min(n, each.cache.n_tokens), each
        while True:  # until no damaged file is found
            entry, n = self._entries.best(group, wanted)
            if used is not None and n_used > max(n, known) and _is_worth(n_used, len(used)):
                if 2 * (n_used - n_ready) > len(wanted) - n_ready:  # another request reads most of the prompt just now
                    return None, True
                if n_ready > max(n, known) and _is_worth(n_ready, len(used)):
                    return self._cut(used.fork(), n_ready), False
            if entry is None or n <= known or not (n == len(entry.ids) or _is_worth(n, len(entry.ids))):
                return None, False
            if entry.busy:
                return None, True
            if (context := self._taken(setup, entry, n)) is not None:
                return self._cut(context, n), False

    def _taken(self, setup: Setup, entry: Entry, n_tokens: int) -> Context | None:
        """Return an entry's context, or a fork if it has more than `n_tokens`; None if its file cannot be used."""
        entry.used = time.time()
        if entry.path is not None:
            with suppress(OSError):
                os.utime(entry.path)
        context = entry.context
        if context is None:
            assert self._files is not None
            return self._files.open(setup, entry)
        if n_tokens < len(entry.ids):
            fork = context.fork()
            entry.weigh()
            return fork
        if entry.forgets:
            shorter = self._entries.prefixes(entry.group, entry.ids, entry)
            if not any(2 * len(each.ids) > n_tokens for each in shorter if each.context):
                entry.unsavable = entry.path is None  # stays in memory, for texts that begin alike and go on otherwise
                return context.fork()
        entry.context, entry.memory_bytes = None, 0  # the request appends to it
        if entry.path is None:
            self._entries.discard(entry)
        return context

    def forget(self, context: Context, error: BaseException) -> bool:
        """Remove the file from which a context was opened, if this cache has the file; return whether it had."""
        with self._lock:
            found = [each for each in self._entries if each.path is not None and str(each.path) == context.source]
            for entry in found:
                notice(f"a kept context cannot be read and is removed: {error}")
                entry.unlink()
                if not entry.busy:
                    self._entries.drop(entry)
        return bool(found)

    def keep(self, request: Request, context: Context) -> None:
        """Keep a request's context, which nobody else uses from now on, for later requests.

        Kept contexts that `context` continues are given up, unless its state may not go back so far. If `context`
        continues a given context, only the given one is saved.
        """
        if not self.reuse or context.cache.fixed:
            return
        if len(self._cut(context, len(context))) <= request.n_before or not context.cache.length:
            return
        ids = np.asarray(context.token_ids, np.int32)
        entry = Entry(ids, group_of(request.setup, context.rope, self.repeatable), context, used=time.time())
        with self._lock:
            for other in self._entries.prefixes(entry.group, ids):
                if other.path is not None and not other.path.exists():  # another process has removed the file
                    other.path = None
                if other.context and entry.forgets and len(other.ids) < len(ids):
                    continue  # `_taken` left it
                if len(other.ids) == len(ids):
                    entry.path, entry.n_bytes, other.path = other.path, other.n_bytes, None
                if other.path is None:  # the others' files are given up when this context has one
                    self._entries.drop(other)
            n_new = len(ids) - self._entries.longest(entry.group, ids, lambda each: each.path is not None)
            # A question about a long document does not make another copy of the document.
            entry.unsavable = request.start is not None or len(ids) > max(ALWAYS_SAVED, n_new * SAVED_SHARE)
            self._entries.add(entry)
            self.shrink()
            if self._files is not None:
                self._files.wake()

    def shrink(self, n_bytes: int = 0) -> bool:
        """Drop contexts from memory, the least recently used first, until the budget is kept and `n_bytes` are freed.

        A context with a file stays in the cache. One that is yet to be saved is saved first, by the saver, unless those
        that wait for it fill the budget and `LEAST_UNSAVED` bytes. Returns whether memory was, or will be, freed.
        """
        with self._lock:
            if (excess := max(n_bytes, self.memory_bytes - self.memory)) <= 0:
                return False
            held = sorted((each for each in self._entries if each.context), key=lambda each: each.used)
            unsaved_bytes, most_unsaved = 0, max(self.memory, LEAST_UNSAVED)
            for entry in held:
                if excess <= 0:
                    break
                excess -= entry.memory_bytes
                if self._files is not None and (entry.busy or (entry.is_unsaved and unsaved_bytes < most_unsaved)):
                    unsaved_bytes += entry.memory_bytes
                    entry.urgent = True
                    self._files.wake()
                    continue
                entry.free()
                if entry.path is None:
                    self._entries.discard(entry)
            return bool(held)

    def close(self, *, save: bool = True) -> None:
        """Free the contexts in memory. With `save`, contexts without a file are saved first."""
        with self._lock:
            for entry in self._entries:
                entry.unsavable |= not save
        if self._files is not None:
            self._files.close()
        with self._lock:
            for entry in self._entries:
                entry.free()

    def _saved(self) -> None:
        self.shrink()
        with self.changed:
            self.changed.notify_all()

    def _spelled(self, request: Request, group: str, before: Sequence[int]) -> list[int]:
        """Return a chat's ids. If a kept context has the beginning of the chat's text, its tokens begin the ids.

        The text continues the tokens `before`. A model may have written an answer in other tokens than its text has:
        then the context's tokens are read on, as in a `Conversation`, all or up to a control token.
        """
        chat, ids, tokenizer, n_before = request.chat, request.ids, request.setup.tokenizer, len(before)
        entries, n_same = self._entries.sharing(group, np.asarray([*before, *ids], dtype=np.int32))
        if chat is None or not n_before < n_same < n_before + len(ids):
            return ids
        n, decode = n_same - n_before, partial(tokenizer.decode, skip_special=False)
        same, best, best_text = decode(ids[:n]), list[int](), ""
        for own in (each.ids[n_before:].tolist() for each in islice(entries, MOST_SPELLED)):
            ends = [i for i in range(n + 1, len(own) + 1) if i == len(own) or tokenizer.bytes_of(own[i - 1]) is None]

            def text(stop: int, own: list[int] = own) -> str:
                return same + decode(own[n:stop])

            at = 0  # the first one alone tells most other texts apart
            if ends and chat.text.startswith(text(ends[0])):
                at = bisect_left(ends, True, key=lambda stop: not chat.text.startswith(text(stop)))
            if at and len(found := text(ends[at - 1])) > len(best_text):
                best, best_text = own[: ends[at - 1]], found
        if not best or any(cut < len(best_text) for cut in chat.cuts):
            return ids
        return [*best, *tokenizer.encode_parts(chat, len(best_text))]

    def _cut(self, context: Context, n_tokens: int) -> Context:
        """Cut a context back to its first tokens; with `repeatable`, to those before the first generated one."""
        n_tokens = min(n_tokens, context.data.only_read) if self.repeatable else n_tokens
        del context.token_ids[n_tokens:]
        if n_tokens < context.cache.n_tokens:
            context.cache.truncate(context.cache.nearest(n_tokens))
        return context

    @property
    def memory_bytes(self) -> int:
        """The bytes of the contexts in memory."""
        with self._lock:
            return sum(each.memory_bytes for each in self._entries)

    @property
    def unsaved(self) -> dict[str, int]:
        """How many contexts are yet to be saved as files, and the bytes of these."""
        with self._lock:
            found = [each.memory_bytes for each in self._entries if each.is_unsaved] if self._files else []
        return {"unsaved": len(found), "unsaved_bytes": sum(found)}

    @property
    def n_contexts(self) -> int:
        """The number of contexts, in memory and as files."""
        return len(self._entries)


def group_of(setup: Setup, rope: Rope, repeatable: bool) -> str:
    """Return the name of the folder for contexts with this RoPE, of engines that can use each other's."""
    digest = hashlib.sha256(json.dumps(setup.identity.facts, sort_keys=True).encode() + b"repeatable" * repeatable)
    for each in (rope, *map(rope.of, dict.fromkeys(setup.model.config.layer_kinds))):
        digest.update(each.inv_freq.numpy().tobytes())  # some scalings depend on the announced length
    return digest.hexdigest()[:16]


def _is_worth(n_tokens: int, length: int) -> bool:
    """Return whether a fork of a context of `length` tokens saves time if the first `n_tokens` are wanted."""
    return n_tokens >= LEAST_SHARED and n_tokens * FORKED_TOKENS >= length
