"""`quantize` writes a checkpoint with matrices in 8 or 4 bits, so that loading need not quantise them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lce.errors import UsageError
from lce.files import named, path_of, read_file, write_whole
from lce.models.registry import model_class, read_config
from lce.progress import Progress, check_progress, reported
from lce.weights.packed import scheme_of
from lce.weights.saving import save_quantised
from lce.weights.source import source_of

LARGEST = 256 << 20  # the largest size, in bytes, of a tokenizer or config file to copy
BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def quantize(
    model: str | Path, out: str | Path, weights: str = "int4", *, progress: bool | Progress | None = None
) -> Path:
    """Write a quantised checkpoint to the folder `out`: config, tokenizer, and the weights in "int8" or "int4".

    `lce.load(out)` computes the same as `lce.load(model, weights=…)`, and opens the same context files. `out` must be a
    new or an empty folder. Holds two copies of one matrix at a time. `progress` counts bytes. Raises `ModelError`
    for a `model` that is invalid or quantised already, and `UsageError` for `weights` or an `out` that cannot be used.
    """
    source, target, scheme = source_of(model), path_of(out, "out"), scheme_of(weights)
    check_progress(progress)
    if scheme is None:
        raise UsageError("weights is 'auto'; expected int8 or int4")
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{named(target)} exists and is no empty folder; name another one")
    config, checkpoint = read_config(source), source.checkpoint
    family = model_class(config)
    wanted = dict(family.weights(config, checkpoint.shapes).values())
    checkpoint.check(wanted, (*family.unused, *config.unused))
    published = {**source.config, "quantization_config": {"quant_method": "lce", "weights": scheme.name}}
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {named(target)}: {error.strerror}; name another one") from None
    schemes = family.schemes(config, scheme, checkpoint.shapes)
    with reported(progress, "quantize") as report:
        path = target / "model.safetensors"
        save_quantised(checkpoint, path, wanted, schemes, scheme.name, report)
    for name in BESIDE:
        data = read_file(source.file(name), LARGEST)
        if data is not None:
            write_whole(target / name, data)
    write_whole(target / "config.json", json.dumps(published, indent=2).encode())
    return target
