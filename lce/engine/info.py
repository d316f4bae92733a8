"""Describes a model folder or a context file without loading weights or reading keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lce.engine.identity import model_identity
from lce.engine.loading import fitted
from lce.engine.saving import ContextInfo, describe
from lce.errors import LceError
from lce.files import path_of
from lce.methods import registry
from lce.methods.base import Method
from lce.methods.step import ModelFacts
from lce.models.config import RopeConfig
from lce.models.registry import families, model_class, read_config
from lce.weights.source import source_of

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
OF_CONFIG = (
    "architecture", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_size", "vocab_size", "window",
    "sliding_window", "rope",
)  # fmt: skip


@dataclass(frozen=True)
class ModelInfo:
    """The description of a checkpoint folder, from its config, its tokenizer and the headers of its weights.

    `methods` are the registered methods with their knobs derived for this model's window; `refused` says why others
    cannot be used. `fingerprint` is the weights'. `identity` covers the config too and names the model in context
    files. A field is None if the folder lacks the file.
    """

    folder: Path
    family: str
    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    window: int
    sliding_window: int | None
    rope: RopeConfig
    parameters: int
    dtype: str | None  # of most stored weights
    weight_bytes: int | None
    weights: str | None  # the scheme of rounded weights
    fingerprint: str | None
    identity: str | None
    tokenizer: str | None  # its file
    chat_template: bool
    methods: Mapping[str, Method] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def info(path: str | Path) -> ModelInfo | ContextInfo:
    """Describe the folder of a model, the embedded "demo", or a context file. Reads headers and small files only.

    Example: `lce.info("document.lce").tokens`. Raises `ModelError` for a folder without a valid model, `DataError` for
    a file that is no context.
    """
    path = path_of(path, "path")
    if str(path) != "demo" and not path.is_dir():
        return describe(path)
    source = source_of(str(path))
    config = read_config(source)
    shapes = dict(model_class(config).weights(config).values())  # tied weights have one name
    checkpoint = source.checkpoint if any(source.path.glob("*.safetensors")) else None
    manifest = checkpoint.manifest if checkpoint else None
    file = next((name for name in TOKENIZERS if source.file(name).is_file()), None)
    facts = ModelFacts(source, config, config.window, config.rope)
    methods: dict[str, Method] = {}
    refused: dict[str, str] = {}
    for name in registry.available():
        try:
            methods[name] = fitted(name, facts)
        except LceError as error:
            refused[name] = str(error)
    weights = manifest.weights if manifest else None
    fingerprint = checkpoint.fingerprint() if checkpoint else None
    return ModelInfo(
        folder=source.path,
        family=next(name for name, cls in families().items() if cls.architecture == config.architecture),
        **{name: getattr(config, name) for name in OF_CONFIG},
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        dtype=None if checkpoint is None else str(checkpoint.dtype()).removeprefix("torch."),
        weight_bytes=None if checkpoint is None else sum(x.stop - x.start for x in checkpoint.tensors.values()),
        weights=weights,
        fingerprint=fingerprint,
        identity=None if fingerprint is None else model_identity(config.identity(fingerprint), weights),
        tokenizer=file,
        chat_template=file is not None and source.tokenizer(config.vocab_size).chat_template is not None,
        methods=methods,
        refused=refused,
    )
