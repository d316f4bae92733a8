"""`load` makes an engine from a model and a user's options."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch

from lce.attention import Attention
from lce.cache.layout import all_devices, device_layout, devices_text
from lce.engine.engine import Engine
from lce.engine.identity import Identity
from lce.engine.options import LoadOptions, option, takes
from lce.engine.recorder import KernelLists
from lce.engine.saving import ContextFiles
from lce.engine.setup import Planned, Setup
from lce.engine.sizing import devices_of, facts_of, fitted, sizes_of
from lce.errors import UsageError, shown
from lce.files import named
from lce.kernels.product.blocks import BlockMatrix
from lce.methods.base import Method
from lce.methods.registry import with_knobs
from lce.methods.run import Driver
from lce.models.layers import Model, model_class, read_config
from lce.models.ranks import ALONE, Ranks
from lce.progress import notice
from lce.system import keep_freed_memory, usable_cores, uses_threads
from lce.weights.checkpoint import Checkpoint
from lce.weights.packed import ROUNDED, Scheme, scheme_of
from lce.weights.safetensors_file import allocate
from lce.weights.source import source_of


@dataclass(frozen=True, kw_only=True)
class Loading(LoadOptions):
    """The arguments of `load`."""

    model: str | Path = field(kw_only=False)
    method: str | Method = field(default="full", kw_only=False)
    sharing: Engine | None = option(
        None, more="An engine of the same model, device, dtype and weights; the new engine uses that engine's weights."
    )


@takes(Loading)
def load(given: Loading) -> Engine:
    """Load `model` (a folder, a GGUF file, a hub id, "smollm2", or the embedded model "demo"), and return an engine.

    `method` is a method's name, or an instance with its knobs. "auto" is what was measured best for texts of `length`
    tokens: a method, maybe with a RoPE scaling or a smaller window; it is printed on stderr. Raises `ModelError` for
    what is no valid model or cannot be had, and `UsageError` for options that cannot be used. The options:
    """
    if (threads := given.threads) is not None:
        torch.set_num_threads(_within_cores(threads, usable_cores()))
    if given.ranks is None:
        return Engine(_loaded(given, ALONE))
    from lce.engine import dividing  # who has no ranks never loads it

    ranks = dividing.ranks_of(given.ranks)
    return Engine(ranks.together(partial(_loaded, given, ranks), dividing.facts_of))


def _again(given: Loading, method: str | Method, sharing: Setup, length: int | None = None) -> Setup:
    """Return a setup with another method, and another setup's weights and options, for texts of another `length`."""
    other: dict[str, Any] = dict.fromkeys(("method_options", "prefill_method", "threads"))
    other["length"] = given.length if length is None else length
    return load(**vars(given) | {"method": method, "sharing": Engine(sharing)} | other).setup


def _loaded(given: Loading, ranks: Ranks) -> Setup:
    """Do what `load` does for one of several ranks."""
    source, sharing = source_of(given.model), given.sharing
    config = read_config(source)
    tokenizer = source.tokenizer(config.vocab_size)
    devices = devices_of(given.device) if ranks.count == 1 else _device_of_rank(ranks, given.device)
    if devices[0].type == "cpu":
        keep_freed_memory()
    checkpoint = source.checkpoint
    is_plain = isinstance(given.weights, str) and given.weights == "auto" and not checkpoint.quantised
    scheme = None if is_plain else _rounded(given.weights, checkpoint, devices[0])
    asked = facts_of(given, source, config)
    like = sharing.setup.layout if isinstance(sharing, Engine) else None
    borders = like.borders if like is not None and all_devices(like) == devices else None
    method_given = with_knobs(given.method, given.method_options)
    chosen, facts = fitted(method_given, asked, cast("int | None", given.length), given.prefill_method)
    made = sizes_of(given, asked, facts, chosen, devices, scheme, checkpoint, ranks, borders)
    own, layout, attention = made.config, made.layout, Attention.choose(given.attention)
    if sharing is not None:
        _check_same(sharing, made, checkpoint)
    kinds = layout.dtype, config.vocab_size, layout.kv_dtype, made.weights
    identity = Identity(lambda: config.identity(checkpoint.fingerprint()), chosen, made.window, made.rope, *kinds)
    files, recorder = ContextFiles(layout, identity), None if sharing is None else sharing.setup.recorder
    if made.division is not None:
        from lce.engine.divided_files import DividedFiles

        files = DividedFiles.of(layout, identity, made.division)
    if recorder is None and layout.on_cpu:
        recorder = KernelLists()
    elif recorder is None and layout.device.type == "cuda" and made.division is None:
        from lce.engine.graph import Graphs
        from lce.engine.tape import CudaTape

        recorder = Graphs(CudaTape)
    with _compiling(made, attention, checkpoint):
        model = _model(made, checkpoint, scheme) if sharing is None else sharing.setup.model
    return Setup(
        **vars(made),
        model=model,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        identity=identity,
        files=files,
        driver=Driver(chosen, attention, made.window, own.n_kv_heads, own.sliding_window, own.kinds),
        eos_ids=frozenset((*config.eos_ids, *tokenizer.eos_ids)),
        recorder=recorder,
        again=partial(_again, replace(given, sharing=None)),
    )


def _compiling(made: Planned, attention: Attention, checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Return a context beside which a GPU's kernels are compiled."""
    if made.layout.on_cpu:
        return nullcontext()
    from lce.engine.warming import warmed

    return warmed(made, attention, checkpoint)


def _device_of_rank(ranks: Ranks, device: Any) -> tuple[torch.device, ...]:
    """Return the device that a user named, of one of several ranks; "auto" and "cuda" are this rank's GPU, if any.

    Ranks exchange objects by that GPU. Raises `UsageError` for several devices.
    """
    if torch.cuda.is_available() and str(device) in ("None", "auto", "cuda"):
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', ranks.rank)) % torch.cuda.device_count()}"
    devices = devices_of(device)
    if len(devices) > 1:
        names = ",".join(map(str, devices))
        raise UsageError(f"device is {names} with {ranks.count} ranks; expected one device for each rank: leave it out")
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    return devices


def _model(made: Planned, checkpoint: Checkpoint, scheme: Scheme | None) -> Model:
    """Load the weights of one of several ranks, and return the model."""
    config, layout, part, stored = made.config, made.layout, checkpoint, checkpoint.shapes
    family = model_class(config)
    if layout.dtype != checkpoint.dtype() or (checkpoint.quantised and not checkpoint.manifest):
        uses_threads()  # converting weights may start threads
    wanted, ignore = family.weights(config, stored), (*family.unused, *config.unused)
    if made.division:
        from lce.engine import dividing

        wanted = dividing.weights_of(made.division, stored)
        part = dividing.part_of(made.division, checkpoint, ignore)
    loaded = part.load(
        wanted,
        dtype=layout.dtype,
        device=lambda name: device_layout(layout, family.layer_of(name, config)).device,
        ignore=ignore,
        joined=family.joined(config),
        schemes=family.schemes(config, scheme, stored) if scheme else None,
        wide=[name for name in wanted if family.is_wide(name)],
    )
    if layout.borders and "head" not in loaded:  # the head is tied to the embedding, which is on another device
        embed, last = loaded["embed"], all_devices(layout)[-1]
        if isinstance(embed, BlockMatrix):
            loaded["head"] = embed.on(last)
        else:
            (loaded["head"],) = allocate([(embed.shape, layout.dtype)], last)
            loaded["head"].copy_(embed)
    if made.division:
        loaded = dividing.joined(made.division, loaded, stored)
    return family(config, loaded)


@cache
def _within_cores(threads: int, cores: int) -> int:
    """Return the number of threads, at most one for each core. If that is fewer than asked for, say so once."""
    if threads > cores:
        notice(f"{threads} threads were asked for, and this process may use {cores} of the cores: {cores} compute")
    return min(threads, cores)


def _check_same(sharing: object, made: Planned, checkpoint: Checkpoint) -> None:
    """Raise `UsageError` unless `sharing` is an engine of this model, dtype, devices, ranks and quantisation scheme."""
    if not isinstance(sharing, Engine):
        raise UsageError(f"sharing is {shown(sharing)}; expected an engine of the same model")
    theirs = sharing.setup
    if theirs.ranks != made.ranks:
        raise UsageError("sharing is an engine of other ranks; give the same ranks")
    if theirs.config != made.config or theirs.fingerprint != checkpoint.fingerprint():
        raise UsageError(f"sharing is an engine of another model than {checkpoint.folder}; leave it out")
    own, asked = (f"{each.dtype} on {devices_text(each)}" for each in (theirs.layout, made.layout))
    if own != asked:
        raise UsageError(f"sharing is an engine in {own}; expected {asked}, as asked")
    if theirs.weights != made.weights:
        raise UsageError(f"sharing is an engine with weights {theirs.weights or 'as stored'}; give the same weights")


def _rounded(weights: object, checkpoint: Checkpoint, device: torch.device) -> Scheme | None:
    """Return the weights' quantisation scheme: the user's or the checkpoint's. Raises `UsageError` if they differ."""
    scheme, own = scheme_of(weights), checkpoint.quantised
    if scheme and own not in (None, scheme.name):
        raise UsageError(
            f"the weights of {named(checkpoint.folder)} are stored as {own}; leave weights={scheme.name!r} out, "
            "or load the checkpoint that they were made of"
        )
    found = ROUNDED[checkpoint.manifest.weights] if checkpoint.manifest else scheme
    if found and device.type != "cpu":
        raise UsageError(
            f"weights in {found.name} are computed with on the CPU alone, and the device is {device}; "
            "give --device cpu, or use the weights in bfloat16"
        )
    return found
