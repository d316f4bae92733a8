"""The window: how far a method reads, and what is said of a text beyond that."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path

import torch

from lce.errors import LceError, WindowWarning
from lce.methods import registry
from lce.methods.base import Method
from lce.methods.step import ModelFacts
from lce.models.config import ModelConfig, RopeConfig
from lce.weights.source import Folder

INSIDE = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))  # lce, and torch's decorators around it
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


def beyond(method: Method, config: ModelConfig, window: int, rope: RopeConfig, n_tokens: int) -> str | None:
    """What to tell the user of a text that is longer than the method can read; None where it is not."""
    trusted = reach(window, rope)
    limit = method.limit(trusted, config.sliding_window)
    if limit is None or n_tokens <= limit:
        return None
    others = ", ".join(_unlimited(config, trusted, rope)) or "none that is installed"
    return (
        f"{n_tokens:,} tokens are more than the {limit:,} that the method {method.label} can read of this model "
        f"(window {window:,}), so answers are probably wrong; methods that read on: {others}"
    )


@functools.cache
def _unlimited(config: ModelConfig, window: int, rope: RopeConfig) -> tuple[str, ...]:
    """The names of the methods that read texts of any length of a model, by their default knobs."""
    found, facts = [], ModelFacts(Folder(Path()), config, window, rope, plan_only=True)
    for name in registry.available():
        try:
            method = registry.make(name)
            if not method.analysis and method.for_model(facts).resolve(window).limit(window) is None:
                found.append(name)
        except LceError:  # another package's method that needs knobs, or cannot be imported
            continue
    return tuple(sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)))


def warn(line: str) -> None:
    """A `WindowWarning` at the line that called lce, however deep this is below it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(line, WindowWarning, stacklevel=level)
