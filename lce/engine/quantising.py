"""`quantize` writes a checkpoint with matrices in 8 or 4 bits, so that loading need not quantise them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from lce.errors import UsageError
from lce.files import lock, named, open_regular, path_of, read_file, write_whole, written_whole
from lce.models.registry import model_class, read_config
from lce.progress import Progress, check_progress, reported
from lce.weights.packed import LARGEST, scheme_of
from lce.weights.saving import save_quantised
from lce.weights.source import source_of

CONFIG, WEIGHTS = "config.json", "model.safetensors"
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
    if os.path.lexists(target):
        _remove_unfinished(target)
        if not target.is_dir() or any(target.iterdir()):
            raise _taken(target)
    config, checkpoint = read_config(source), source.checkpoint
    family = model_class(config)
    wanted = dict(family.weights(config, checkpoint.shapes).values())
    checkpoint.check(wanted, (*family.unused, *config.unused))
    published = {**source.config, "quantization_config": {"quant_method": "lce", "weights": scheme.name}}
    schemes = family.schemes(config, scheme, checkpoint.shapes)
    copied = {name: read_file(source.file(name), LARGEST) for name in BESIDE}
    beside = {name: data for name, data in copied.items() if data is not None}
    beside[CONFIG] = json.dumps(published, indent=2).encode()
    with reported(progress, "quantize") as report:
        write = partial(save_quantised, checkpoint, target / WEIGHTS, wanted, schemes, scheme.name, beside, report)
        _write(target, beside, write)
    return target


def _taken(target: Path) -> UsageError:
    return UsageError(f"{named(target)} exists and is no empty folder; name another one")


def _write(target: Path, beside: Mapping[str, bytes], write_weights: Callable[[], None]) -> None:
    """Write a folder's files. config.json is begun first and complete last. An error leaves nothing that was made."""
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {named(target)}: {error.strerror}; name another one") from None
    written: list[str] = []
    try:
        with written_whole(target / CONFIG) as config:
            if len([*target.iterdir()]) > 1:  # another call has begun since
                raise _taken(target)
            written += [WEIGHTS, *beside]
            config.write(beside[CONFIG])
            write_weights()
            for name in beside.keys() - {CONFIG}:
                write_whole(target / name, beside[name])
    except BaseException:
        for name in written:
            (target / name).unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _remove_unfinished(target: Path) -> None:
    """Remove what a killed `quantize` left in a folder, if the folder has nothing else.

    Such a folder has a draft of config.json that no process has locked, and no config.json.
    """
    names = "|".join(map(re.escape, (WEIGHTS, *BESIDE)))
    ours = re.compile(rf"{names}|\.({names}|{re.escape(CONFIG)})\.\d+-[0-9a-f]+\.tmp")
    found = sorted(target.iterdir(), key=lambda path: path.name.startswith(f".{CONFIG}")) if target.is_dir() else []
    drafts = [path for path in found if path.name.startswith(f".{CONFIG}.")]
    if not drafts or not all(ours.fullmatch(path.name) for path in found):
        return
    with ExitStack() as at_end:
        for draft in drafts:
            descriptor = open_regular(draft, follow=False)
            at_end.callback(os.close, descriptor)
            lock(descriptor, target)
        for path in found:  # the drafts of config.json last
            path.unlink()
