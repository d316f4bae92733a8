"""Sources of models. A source reads a model's config, tokenizer and weights on demand."""

from __future__ import annotations

import os
import re
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
# Files that stand for their folder: those that `Checkpoint.open` takes first, and the config.
PART = re.compile(r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # OWNER/NAME


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
            raise ModelError(f"{named(self.path)} {_fault(self.path)}")
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
    """Return the source that a user names: a folder or a file of its checkpoint, or the built-in "demo".

    Raises `UsageError` for other values.
    """
    path = DEMO if isinstance(model, str) and model == "demo" else path_of(model, "model")
    is_part = PART.fullmatch(path.name) and os.path.isfile(path) and os.path.isfile(path.with_name("config.json"))
    return Source(path.parent if is_part else path)


def _fault(path: Path) -> str:
    """Return why a path without a config.json is no model, and what to do."""
    is_folder, exists = os.path.isdir(path), os.path.exists(path)
    if path.suffix == ".gguf" or (is_folder and any(path.glob("*.gguf"))):
        return (
            "is GGUF, which this version does not read; expected a folder of safetensors: download the checkpoint that "
            "it was made of, by `hf download OWNER/NAME --local-dir NAME`"
        )
    if not exists and HUB_ID.fullmatch(str(path)) and not os.path.exists(path.parent):
        return (
            "does not exist, and models are not downloaded; expected a folder: run "
            f"`hf download {path} --local-dir {path.name}`, and name {path.name}"
        )
    fault = "has no config.json" if is_folder else "is not a folder" if exists else "does not exist"
    return f"{fault}; expected a checkpoint's folder with a config.json, or demo; check the path"
