"""The longest text that a method can read with a model, and the warning for longer texts."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path

import torch

from lce.errors import LceError, WindowWarning
from lce.methods import registry
from lce.methods.base import Method
from lce.methods.promises import promises_of
from lce.methods.step import ModelFacts
from lce.models.config import ModelConfig, RopeConfig
from lce.weights.source import Source

INSIDE = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))  # the folders of lce and torch
FIRST = ("longheads", "dca", "esa")  # the methods that the warning names first, in this order


def readable(method: Method, config: ModelConfig, window: int, rope: RopeConfig) -> int | None:
    """Return the most tokens that the method can read of a model; None: any number."""
    return method.limit(rope.reach(window), config.sliding_window)


def beyond(method: Method, config: ModelConfig, window: int, rope: RopeConfig, n_tokens: int) -> str | None:
    """Return the warning for a text of `n_tokens` if the method cannot read that many, else None."""
    limit = readable(method, config, window, rope)
    if limit is None or n_tokens <= limit:
        return None
    others = ", ".join(_unlimited(config, rope.reach(window), rope)) or "none that is installed"
    return (
        f"{n_tokens:,} tokens are more than the {limit:,} that the method {method.label} can read of this model "
        f"(window {window:,}), so answers are probably wrong; methods that read on: {others}"
    )


@functools.cache
def _unlimited(config: ModelConfig, window: int, rope: RopeConfig) -> tuple[str, ...]:
    """Return the names of the methods that, with default knobs, read texts of any length with a model."""
    found, facts = [], ModelFacts(Source(Path()), config, window, rope, plan_only=True)
    for name in registry.available():
        try:
            method = registry.make(name)
            if (
                "analysis" not in promises_of(type(method))
                and method.for_model(facts).resolve(window).limit(window) is None
            ):
                found.append(name)
        except LceError:  # a plug-in whose method needs knobs or cannot be imported
            continue
    return tuple(sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)))


def warn(line: str | None) -> str | None:
    """Issue the text `line`, if any, as a `WindowWarning` at the user's code that called lce; return `line`."""
    if line is None:
        return None
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(line, WindowWarning, stacklevel=level)
    return line
