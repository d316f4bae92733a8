"""Finds the source that a user's value names."""

from __future__ import annotations

import os
import re

from lce.files import path_of
from lce.weights.source import CONFIG, DEMO, Source

# Files that stand for their folder: those that `Checkpoint.open` takes first, and the config.
_PART = re.compile(r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def source_of(model: object, *, metadata_only: bool = False) -> Source:
    """Return the source that a user names: a folder or a file of its checkpoint, or the built-in "demo".

    Raises `UsageError` for other values. With `metadata_only`, no large file is downloaded.
    """
    path = DEMO if isinstance(model, str) and model == "demo" else path_of(model, "model")
    is_part = _PART.fullmatch(path.name) and os.path.isfile(path) and os.path.isfile(path.with_name(CONFIG))
    return Source(path.parent if is_part else path)
