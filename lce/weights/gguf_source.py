"""Models in a GGUF file: the small files that a folder would have are made of the file's metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.errors import ModelError
from lce.files import MAX_FILE_BYTES, named, open_regular
from lce.tokenizer.gguf import end_ids, tokenizer_files
from lce.weights.checkpoint import Checkpoint
from lce.weights.gguf_file import GgufFile, read_gguf
from lce.weights.gguf_model import config_of, tensors_of
from lce.weights.gguf_types import TYPES
from lce.weights.packed import Scheme
from lce.weights.safetensors_file import DTYPES, pread
from lce.weights.source import CONFIG, GENERATION, VOCABULARIES, Source

SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")


@dataclass(frozen=True)
class GgufSource(Source):
    """A GGUF file. Any shard stands for a split file."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return config_of(self._file)

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        ids = end_ids(self._file.metadata)
        return {"eos_token_id": ids} if ids else {}

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights, with checked headers."""
        tensors, orders = tensors_of(self._file)
        return _Unpacked(self._file.path, tensors, self._file.stamps, orders=orders)

    @cached_property
    def _file(self) -> GgufFile:
        return read_gguf(self.path)

    @cached_property
    def _tokenizer_files(self) -> Mapping[str, bytes]:
        return tokenizer_files(self._file.metadata, self._file.path)

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


@dataclass(frozen=True)
class _Unpacked(Checkpoint):
    """A checkpoint whose tensors are loaded as plain numbers: provisional, until packed blocks are multiplied."""

    orders: Mapping[str, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def load(
        self, wanted: Mapping[str, tuple[str, tuple[int, ...]]], *, dtype: torch.dtype | None,
        device: torch.device | Callable[[str], torch.device],
        ignore: Sequence[str] = (), joined: Mapping[str, Sequence[str]] | None = None,
        schemes: Mapping[str, Scheme] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        self.check(dict(wanted.values()), ignore)
        found: dict[str, Tensor] = {}
        with self._opened() as files:
            for key, (name, _) in wanted.items():
                info, place = self.tensors[name], device if isinstance(device, torch.device) else device(key)
                kind = next(kind for kind in TYPES.values() if kind.name == info.dtype)
                raw = np.frombuffer(pread(files[info.file], info.stop - info.start, info.start, info.file), np.uint8)
                if kind.codes is None:
                    made = torch.from_numpy(raw.copy()).view(DTYPES[info.dtype]).reshape(info.shape)
                else:
                    made = torch.from_numpy(kind.dequantise(raw.reshape(-1, kind.n_bytes))).reshape(info.shape)
                made = made[torch.from_numpy(self.orders[name])] if name in self.orders else made
                found[key] = made.to(place, dtype)
        return found | {key: torch.cat([found.pop(part) for part in parts]) for key, parts in (joined or {}).items()}

    def check(self, wanted: Mapping[str, tuple[int, ...]], ignore: Sequence[str]) -> None:
        plain = {name: replace(info, dtype="F32") for name, info in self.tensors.items()}
        Checkpoint(self.folder, plain).check(wanted, ignore)
