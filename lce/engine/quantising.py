"""`quantize` writes a checkpoint with matrices in 8 or 4 bits, so that loading need not quantise them."""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from lce.errors import UsageError, shown
from lce.files import named, path_of, sweep, write_whole, written_whole
from lce.models.layers import model_class, read_config
from lce.progress import Progress, check_progress, reported
from lce.weights.folder import BESIDE, CONFIG, WEIGHTS
from lce.weights.packed import LARGEST, scheme_of
from lce.weights.saving import save_quantised
from lce.weights.source import source_of


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
    beside = {name: data for name in BESIDE if (data := source.read(name, LARGEST)) is not None}
    beside[CONFIG] = json.dumps(published, indent=2).encode()
    with reported(progress, "quantize") as report:
        write = partial(save_quantised, checkpoint, target / WEIGHTS, wanted, schemes, scheme.name, beside, report)
        _write(target, beside, write)
    return target


def _taken(target: Path) -> UsageError:
    found = f" (it has {shown(min(os.listdir(target)))})" if target.is_dir() else ""
    return UsageError(f"{named(target)} exists and is no empty folder{found}; name another one")


def _write(target: Path, beside: Mapping[str, bytes], write_weights: Callable[[], None]) -> None:
    """Write a folder's files. config.json is begun first and complete last. An error leaves nothing that was made."""
    made, written = [folder for folder in (target, *target.parents) if not folder.exists()], list[str]()
    try:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the folder {named(target)}: {error.strerror}; name another one") from None
        with written_whole(target / CONFIG) as config:
            if len([*target.iterdir()]) > 1:  # another call has begun since
                raise _taken(target)
            written += [WEIGHTS, *beside]
            config.write(beside[CONFIG])
            write_weights()
            for name in beside.keys() - {CONFIG}:
                write_whole(target / name, beside[name])
    except BaseException:
        for undo in (*((target / name).unlink for name in written), *(folder.rmdir for folder in made)):
            with suppress(OSError):
                undo()
        raise


def _remove_unfinished(target: Path) -> None:
    """Remove what a killed `quantize` left in a folder, if the folder has nothing else.

    Such a folder has a draft of config.json that no process has locked, and no config.json.
    """
    found = [*target.iterdir()] if target.is_dir() else []
    names = {re.sub(r"^\.(.+)\.\d+-[0-9a-f]+\.tmp$", r"\1", path.name) for path in found}
    drafts = [path for path in found if path.name.startswith(f".{CONFIG}.")]
    if drafts and names <= {CONFIG, WEIGHTS, *BESIDE} and target / CONFIG not in found:
        sweep(target / CONFIG)
        if any(path.exists() for path in drafts):
            raise UsageError(f"{named(target)} is being written by another process; wait, or name another one")
        for path in found:
            path.unlink(missing_ok=True)
