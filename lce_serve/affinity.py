"""Which replica answers a request: the one that most likely holds the request's context.

A request with a session key goes to the replica that the key's hash names (rendezvous hashing: if a replica comes or
goes, only that replica's sessions move). Without a key, it goes to the replica that was sent the longest known
beginning of its text. If that replica has over `slack` requests more than another one, or if no beginning is known, the
replica with the fewest requests is the first. Contexts are files that all replicas may open, so any choice is right.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lce_serve.history import CHANGING

BLOCK = 256  # characters of a text between two digests
MOST_BLOCKS = 1 << 14  # of one text: 4 Mi characters
LEAST_SHARE = 0.1  # a known beginning counts if it is at least this share of the text
MOST_KNOWN = 1 << 18  # digests
SESSION_HEADER = "x-session-id"
# The fields of all endpoints on which a prompt depends; those that grow in a conversation are the last.
_BEFORE = ("model", "method", "method_options", "context", "tools", "system", "instructions")
_TEXTS = ("messages", "input", "prompt")
_DROPPED = re.compile(rf'({"|".join(map(re.escape, CHANGING))})[^"\\]*')  # within JSON


@dataclass(frozen=True)
class Affinity:
    """The facts by which a request's replica is chosen: its session key, and a digest of each beginning of its text."""

    session: str | None = None
    digests: tuple[bytes, ...] = ()


def affinity_of(header: str | None, body: object) -> Affinity:
    """Return the affinity of a request, by its header `x-session-id` or `prompt_cache_key`, and by its text."""
    fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
    session = header or fields.get("prompt_cache_key")
    return Affinity(session if isinstance(session, str) and session else None, tuple(_digests(fields)))


def _digests(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a digest of the first block of a request's text, of the first two, and so on."""
    texts = [fields[name] for name in _TEXTS if fields.get(name)]
    if not texts:
        return
    # The next turn of a conversation begins as this one, but for the brackets at the end.
    text = json.dumps([*(fields.get(name) for name in _BEFORE), *texts], sort_keys=True)
    text = _DROPPED.sub("", text)
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, min(len(text), BLOCK * MOST_BLOCKS), BLOCK):
        digest.update(text[start : start + BLOCK].encode())
        yield digest.copy().digest()


def weight(replica: str, key: bytes) -> bytes:
    """Return the weight of a replica for a key. The replica with the greatest weight has the key."""
    return hashlib.blake2b(replica.encode(), key=hashlib.blake2b(key, digest_size=32).digest(), digest_size=8).digest()


class Known:
    """The beginnings of texts, each with the replica that got it last. The least recently used are forgotten."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def note(self, affinity: Affinity, replica: str) -> None:
        """Note that a replica was sent a request."""
        for digest in affinity.digests:
            self._replicas[digest] = replica
            self._replicas.move_to_end(digest)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def longest(self, affinity: Affinity, replicas: Iterable[str]) -> str | None:
        """Return which of the replicas was sent the longest beginning of a text; None if no beginning is known."""
        alive = set(replicas)
        for number in range(len(affinity.digests), 0, -1):
            if number < LEAST_SHARE * len(affinity.digests):
                return None
            found = self._replicas.get(affinity.digests[number - 1])
            if found in alive:
                return found
        return None


def ranked(affinity: Affinity, n_requests: Mapping[str, int], known: Known, slack: int) -> list[str]:
    """Return the replicas, the best one for a request first. `n_requests` has the number that each is answering."""
    key = (affinity.session or "").encode() or next(iter(affinity.digests), b"")
    by_weight = sorted(n_requests, key=lambda replica: weight(replica, key), reverse=True)
    by_requests = sorted(by_weight, key=lambda replica: n_requests[replica])
    best = by_weight[0] if affinity.session and by_weight else known.longest(affinity, n_requests)
    if best is None or n_requests[best] > n_requests[by_requests[0]] + slack:
        return by_requests
    return [best, *(each for each in by_requests if each != best)]
