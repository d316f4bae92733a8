"""Named contexts: texts that were read once, and that requests continue by a name."""

from __future__ import annotations

import threading
from typing import Any

import lce
from lce.errors import UsageError, shown
from lce_serve.refusals import Refusal


class NamedContexts:
    """Contexts by name, each with the setup of its engine. Any thread may use this object."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: dict[str, tuple[lce.Setup, lce.Context]] = {}

    def check(self, name: str) -> None:
        """Raise `UsageError` for a name that no context may have, or that a context has already."""
        if not name or len(name) > 200 or not name.isprintable() or "@" in name:
            raise UsageError(f"a context's name is {shown(name)}; expected some printable characters without @")
        if name in self._found:
            raise UsageError(f"there is a context {name} already; name another, or drop it first")

    def add(self, name: str, setup: lce.Setup, context: lce.Context) -> None:
        """Keep a context under a name. Raises the errors of `check`."""
        with self._lock:
            self.check(name)
            self._found[name] = setup, context

    def get(self, name: str) -> tuple[lce.Setup, lce.Context]:
        """Return a context and its setup. Refuses an unknown name with 404."""
        with self._lock:
            if name in self._found:
                return self._found[name]
        raise Refusal(404, f"there is no context {name[:80]!r}", "context", "context_not_found")

    def drop(self, name: str) -> None:
        """Give up a context; requests that began with it go on. Refuses an unknown name with 404."""
        with self._lock:
            self.get(name)
            del self._found[name]

    def described(self) -> list[dict[str, Any]]:
        """Return each context as a JSON object of the API."""
        with self._lock:
            return [as_object(name, context) for name, (_, context) in self._found.items()]


def as_object(name: str, context: lce.Context) -> dict[str, Any]:
    """Return a named context as a JSON object of the API."""
    return {"name": name, "object": "context", "n_tokens": len(context)}
