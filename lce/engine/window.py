"""The window: how far a method reads, and what is said of a text beyond that."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path

from lce.errors import LceError, WindowWarning
from lce.methods import registry
from lce.methods.base import Method
from lce.models.config import RopeConfig

PACKAGE = str(Path(__file__).parent.parent)
FIRST = ("longheads", "dca", "esa")  # of the methods that are named first


def reach(window: int, rope: RopeConfig) -> int:
    """The positions that a model can be trusted on with its RoPE scaling.

    `window` is what config.json announces, or the user's own number. A scaling stretches the window before scaling by
    its factor: `original_window` where the config names it (YaRN, Llama 3), else `window`, as vLLM reads configs too.
    Llama 3.1 announces 131,072, which is more than its factor 8 times 8,192; then the announced number counts.
    """
    if rope.kind == "none":
        return window
    return max(window, int((rope.original_window or window) * rope.factor))


def beyond(method: Method, window: int, rope: RopeConfig, sliding_window: int | None, n_tokens: int) -> str | None:
    """What to tell the user of a text that is longer than the method can read; None where it is not."""
    trusted = reach(window, rope)
    limit = method.limit(trusted, sliding_window)
    if limit is None or n_tokens <= limit:
        return None
    others = ", ".join(_unlimited(trusted)) or "none that is installed"
    return (
        f"{n_tokens:,} tokens are more than the {limit:,} that the method {method.label} can read of this model "
        f"(window {window:,}), so the answers will be wrong; methods that read on: {others}"
    )


@functools.cache
def _unlimited(window: int) -> tuple[str, ...]:
    """The names of the methods that read texts of any length of a model with this window, by their default knobs."""
    found = []
    for name in registry.available():
        try:
            if registry.make(name).resolve(window).limit(window) is None:
                found.append(name)
        except LceError:  # another package's method that needs knobs, or cannot be imported
            continue
    return tuple(sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)))


def warn(line: str) -> None:
    """A `WindowWarning` at the line that called lce, however deep this is below it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(line, WindowWarning, stacklevel=level)
