"""Sources of models. A source reads a model's config, tokenizer and weights on demand.

`Source` is a folder; the other kinds derive from it. Nobody outside asks what kind a source is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from lce.errors import ModelError
from lce.files import MAX_FILE_BYTES, named, object_of, read_file
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.checkpoint import Checkpoint

DEMO = Path(__file__).parent.parent / "models" / "demo"
CONFIG, GENERATION = "config.json", "generation_config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model")
_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# The small files beside config.json and the weights, which `Source.read` gives.
BESIDE = (GENERATION, *VOCABULARIES, *_TOKENIZER, "chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Source:
    """A folder with config.json, safetensors files and the files of a tokenizer. Other sources derive from this class.

    Reading a part that is missing or damaged raises `ModelError`. `path` has the weights.
    """

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The fields of config.json."""
        if (raw := self.read(CONFIG)) is not None:
            return object_of(raw, self.where(CONFIG))
        is_folder, exists = os.path.isdir(self.path), os.path.exists(self.path)
        fault = "has no config.json" if is_folder else "is not a folder" if exists else "does not exist"
        close = [] if exists else get_close_matches(self.path.name.lower(), ("smollm2", "demo"), n=1)
        hint = f"did you mean {close[0]!r}? or " if close else ""
        expected = "a checkpoint's folder with a config.json, a .gguf file, a hub id OWNER/NAME, smollm2 or demo"
        raise ModelError(f"{named(self.path)} {fault}; expected {expected}; {hint}check the path")

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The fields of generation_config.json, empty if there is no such file."""
        return object_of(self.read(GENERATION), self.where(GENERATION))

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights, with checked headers."""
        return Checkpoint.open(self.path)

    @property
    def headers(self) -> Checkpoint | None:
        """The checkpoint, if only its headers say in which types matrices are stored; None where config.json does."""
        return None

    @property
    def is_model(self) -> bool:
        """Whether a model can be here. A context file, for example, is none."""
        return self.path.is_dir()

    @property
    def has_weights(self) -> bool:
        """Whether weights are on this machine, damaged or not."""
        return any(self.path.glob("*.safetensors"))

    @property
    def maps_file(self) -> Path:
        """The place of the maps that `lce calibrate` learned for this model, if no other file is named."""
        return self.path / "esa_maps.safetensors"

    @property
    def vocabulary(self) -> str | None:
        """The name of the file that has the tokenizer's vocabulary; None for a model without a tokenizer."""
        return next((name for name in VOCABULARIES if self.where(name).is_file()), None)

    def tokenizer(self, vocab_size: int | None = None) -> Tokenizer:
        """Read the tokenizer of a model whose embedding has `vocab_size` rows."""
        return Tokenizer.from_files(self.read, self.path, vocab_size)

    def read(self, name: str, most: int = MAX_FILE_BYTES) -> bytes | None:
        """Return the bytes of the model's small file `name`, of at most `most` bytes; None if there is no such file."""
        return read_file(self.path / name, most)

    def where(self, name: str) -> Path:
        """Return the path that names the small file `name` in messages."""
        return self.path / name
