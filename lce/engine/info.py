"""Describes a model or a context file without loading weights or reading keys and values."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lce.cache.manifest import FORMAT, contradiction, read_header
from lce.cache.row_file import Descriptor
from lce.engine.identity import file_of, knobs_of, model_identity
from lce.engine.saving import part_of, state_of
from lce.engine.sizing import fitted
from lce.errors import LceError, UsageError, shown
from lce.files import open_regular, path_of
from lce.methods import registry
from lce.methods.base import Method
from lce.methods.step import ModelFacts
from lce.models.config import Factor, ModelConfig
from lce.models.layers import model_class, read_config
from lce.models.products import products_in
from lce.progress import Progress, check_progress, reported
from lce.weights.inspection import TensorGroup, tensor_groups, verify
from lce.weights.source import source_of


@dataclass(frozen=True)
class ModelInfo:
    """The description of a model, from its config, its tokenizer and the headers of its weights.

    `dtype` is the dtype of most stored weights. `weights` is what they are quantised to, if they are: lce's scheme, or
    the GGUF type of most bytes. `fingerprint` identifies the weights. `identity` identifies the weights and the config;
    a context file stores it to name its model. `tokenizer` names the tokenizer's file. `methods` are the registered
    methods with their knobs derived for this model's window; `refused` says why other methods cannot be used. A field
    whose file is missing is None. `checked` says whether `info` found checksums to compare the weights with; it is None
    if `info` was not asked to check. `tensors` are the stored tensors by kind and type.
    """

    folder: Path
    family: str
    config: ModelConfig
    parameters: int
    dtype: str | None
    weight_bytes: int | None
    weights: str | None
    fingerprint: str | None
    identity: str | None
    tokenizer: str | None
    chat_template: bool
    checked: bool | None = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[TensorGroup, ...] = ()

    @property
    def prefilled_in(self) -> str | None:
        """The dtype of prefill's products on this CPU: float32 if its instructions have nothing faster for `dtype`."""
        return None if self.dtype is None else products_in(self.dtype)


@dataclass(frozen=True)
class ContextInfo:
    """The facts in a context file's header.

    `lce` is the version of lce that wrote the file. `model` is the model's `ModelInfo.identity`. The call
    `lce.methods.make(method, knobs)` gives the method. If another method reads prompts, `method` names both, and the
    knobs of the other begin with "prefill_method.". `kv_dtype` is the format of keys and values in the file: "int8",
    "int8-device", or "auto" for `dtype`. `weights` is the quantisation scheme of the model, if any. A file that is not
    `complete` is an unfinished prefill with `cached` tokens so far. `method_file` names the user's file of code that
    registered the method, if any; lce runs it only if a user names it. Each KV head has `rows` of the `cached` tokens.
    """

    path: Path
    complete: bool
    lce: str
    model: str
    method: str
    knobs: Mapping[str, Any]
    window: int
    rope: str
    rope_factor: Factor
    dtype: str
    kv_dtype: str
    weights: str | None
    tokens: int
    cached: int
    announced: int
    file_bytes: int
    format: str = FORMAT
    method_file: str | None = None
    rows: int = 0


def info(path: str | Path, check: bool = False, *, progress: bool | Progress | None = None) -> ModelInfo | ContextInfo:
    """Describe a model, or a context file. Reads only headers and small files; downloads no weights.

    With `check`, all of a model's weights are read too: numbers must be finite, and all that `lce.quantize` wrote must
    agree with its checksums. `progress` counts bytes. Example: `lce.info("document.lce").tokens`. Raises `ModelError`
    for other folders and damaged weights, and `DataError` for other files.
    """
    path, named_as = path_of(path, "path"), path
    check_progress(progress)
    if not isinstance(check, bool):
        raise UsageError(f"check is {shown(check)}; expected True or False")
    is_unfinished = not os.path.lexists(path) and os.path.lexists(state_of(path))
    source = None if is_unfinished else source_of(named_as, metadata_only=not check)
    if source is None or not source.is_model:
        if check:
            raise UsageError("check is for a model's folder; the rows of a context file are checked as they are read")
        if source is None or os.path.lexists(path) or str(path).endswith(".lce"):
            return describe(path)
    config = read_config(source)  # says what a model may be, if there is nothing
    family = model_class(config)
    shapes = dict(family.weights(config).values())  # by stored name, so that tied weights count once
    checkpoint = source.checkpoint if check or source.has_weights else None
    weights = checkpoint.manifest.weights if checkpoint and checkpoint.manifest else None
    file, facts = source.vocabulary, ModelFacts(source, config, config.window, config.rope)
    methods, refused = dict[str, Method](), dict[str, str]()
    for name in registry.available():
        try:
            methods[name] = fitted(name, facts)[0]
        except LceError as error:
            refused[name] = str(error)
    fingerprint, checked = checkpoint.fingerprint() if checkpoint else None, None
    if check and checkpoint:
        checkpoint.check(dict(family.weights(config, checkpoint.shapes).values()), (*family.unused, *config.unused))
        with reported(progress, "check", "B") as report:
            checked = verify(checkpoint, report)
    return ModelInfo(
        folder=source.path,
        family=family.model_type,
        config=config,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        dtype=None if checkpoint is None else str(checkpoint.dtype()).removeprefix("torch."),
        weight_bytes=None if checkpoint is None else sum(x.stop - x.start for x in checkpoint.tensors.values()),
        weights=checkpoint.quantised if checkpoint else None,
        fingerprint=fingerprint,
        identity=None if fingerprint is None else model_identity(config.identity(fingerprint), weights),
        tokenizer=file,
        chat_template=file is not None and source.tokenizer(config.vocab_size).chat_template is not None,
        checked=checked,
        methods=methods,
        refused=refused,
        tensors=tensor_groups(checkpoint) if checkpoint else (),
    )


def describe(path: str | Path) -> ContextInfo:
    """Describe the context file `path`, or the unfinished prefill into `path`. Raises `DataError` for other files."""
    path = path_of(path)
    complete = os.path.lexists(path) or not os.path.lexists(state_of(path))
    file, part = path if complete else state_of(path), part_of(path)
    header = read_header(Descriptor(open_regular(file, follow=False)), file)
    facts: dict[str, Any] = {"kv_dtype": "auto", "weights": None, **header.manifest.identity}
    try:
        (n_tokens,), rope = header.entries["tokens"]["shape"], facts["rope"]
        texts = [facts[name] for name in ("model", "method", "dtype", "kv_dtype")]
        plain = all(isinstance(x, str) for x in (*texts, rope["kind"], facts["weights"] or ""))
        known = rope["factor"] == "auto" or rope["factor"] >= 1
        if not plain or not known or not all(type(x) is int for x in (facts["window"], n_tokens)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise contradiction(file) from None
    return ContextInfo(
        path=path,
        complete=complete,
        lce=header.manifest.version,
        **{name: facts[name] for name in ("model", "method", "window", "dtype", "kv_dtype", "weights")},
        knobs=knobs_of(facts),
        rope=rope["kind"],
        rope_factor=rope["factor"],
        tokens=n_tokens,
        cached=header.manifest.n_tokens,
        announced=header.manifest.announced,
        rows=header.manifest.read,
        format=header.manifest.raw["format"],
        file_bytes=header.file_bytes if complete else part.stat().st_size if part.exists() else 0,
        method_file=file_of(facts),
    )
