"""Models in a GGUF file: the small files that a folder would have are made of the file's metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lce.errors import ModelError
from lce.files import MAX_FILE_BYTES, named, open_regular
from lce.tokenizer.gguf import end_ids, tokenizer_files
from lce.weights.checkpoint import Checkpoint
from lce.weights.gguf_file import GgufFile, read_gguf
from lce.weights.gguf_model import model_in
from lce.weights.source import CONFIG, GENERATION, VOCABULARIES, Source

SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")


@dataclass(frozen=True)
class GgufSource(Source):
    """A model in a GGUF file. If the file is split, `path` may be any of its shards."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return model_in(self._file).config()

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        ids = end_ids(self._file.metadata)
        return {"eos_token_id": ids} if ids else {}

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights, with checked headers."""
        tensors, orders = model_in(self._file).tensors()
        return Checkpoint(self._file.path, tensors, self._file.stamps, orders=orders)

    @cached_property
    def _file(self) -> GgufFile:
        return read_gguf(self.path)

    @cached_property
    def _tokenizer_files(self) -> Mapping[str, bytes]:
        return tokenizer_files(self._file.metadata, self._file.path)

    @property
    def headers(self) -> Checkpoint:
        return self.checkpoint

    @property
    def is_model(self) -> bool:
        return True

    @property
    def has_weights(self) -> bool:
        return True

    @property
    def maps_file(self) -> Path:
        return self.path.with_name(f"{SHARD.sub('', self.path.name).removesuffix('.gguf')}.esa_maps.safetensors")

    @property
    def vocabulary(self) -> str | None:
        return next((name for name in VOCABULARIES if name in self._tokenizer_files), None)

    def read(self, name: str, most: int = MAX_FILE_BYTES) -> bytes | None:
        made = {CONFIG: self.config, GENERATION: self.generation_config}
        raw = json.dumps(made[name]).encode() if name in made else self._tokenizer_files.get(name)
        if raw is not None and len(raw) > most:
            raise ModelError(f"{named(self.path)} makes a {name} of more than {most} bytes; download the file again")
        return raw

    def where(self, name: str) -> Path:
        return self.path


def is_gguf(path: Path) -> bool:
    """Return whether a path is to be read as GGUF: by its name, or, as in Ollama's folders, by how it begins."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return True
    if not path.is_file():
        return False
    with open(open_regular(path), "rb") as file:
        return file.read(4) == b"GGUF"
