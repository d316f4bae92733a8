"""Sources of models. A source reads a model's config, tokenizer and weights on demand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lce.errors import ModelError
from lce.files import named, path_of, read_object
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.checkpoint import Checkpoint

DEMO = Path(__file__).parent.parent / "models" / "demo"


@dataclass(frozen=True)
class Source:
    """A folder with config.json, safetensors files and the files of a tokenizer. Other sources derive from this class.

    Reading a part that is missing or damaged raises `ModelError`. `path` is the path that a user gives.
    """

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The fields of config.json."""
        if not os.path.lexists(self.file("config.json")):
            is_folder, exists = os.path.isdir(self.path), os.path.exists(self.path)
            fault = "has no config.json" if is_folder else "is not a folder" if exists else "does not exist"
            expected = "expected a checkpoint's folder with a config.json; check the path"
            raise ModelError(f"{named(self.path)} {fault}; {expected}")
        return read_object(self.file("config.json"))

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The fields of generation_config.json, empty if there is no such file."""
        return read_object(self.file("generation_config.json"))

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights, with checked headers."""
        return Checkpoint.open(self.path)

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """Read the tokenizer of a model whose embedding has `vocab_size` rows."""
        return Tokenizer.from_folder(self.path, vocab_size)

    def file(self, name: str) -> Path:
        """Return the path of the model's file with this name. The file need not exist."""
        return self.path / name


def source_of(model: object) -> Source:
    """Return the source that a user names: a folder, or the built-in "demo". Raises `UsageError` for other values."""
    return Source(DEMO if isinstance(model, str) and model == "demo" else path_of(model, "model"))
