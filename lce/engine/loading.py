"""`load` makes an engine from a model and a user's options; `plan` computes the memory that a context needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from lce.attention import Attention
from lce.cache.formats import kv_dtype_of
from lce.cache.layout import Budgets, CacheLayout
from lce.engine import dividing
from lce.engine.arguments import DTYPES, budgets_of, check_names, dtype_of, scaled, sized
from lce.engine.devices import Borders, borders_of, devices_of
from lce.engine.engine import Engine
from lce.engine.planning import ALLOWANCE, Plan, Planner
from lce.engine.window import beyond, readable
from lce.errors import UsageError, shown
from lce.files import named
from lce.methods.auto import automatic
from lce.methods.base import Method
from lce.methods.handover import Handover
from lce.methods.own_window import access_of
from lce.methods.registry import AUTO, as_method
from lce.methods.step import ModelFacts
from lce.models.config import ModelConfig, RopeConfig
from lce.models.ranks import Division, Ranks
from lce.models.registry import model_class, read_config
from lce.progress import notice
from lce.sizes import count
from lce.system import keep_freed_memory, usable_cores, uses_threads
from lce.weights.checkpoint import Checkpoint
from lce.weights.finding import source_of
from lce.weights.packed import Scheme, all_schemes, scheme_of
from lce.weights.safetensors_file import allocate

MOST_THREADS = 1024  # the largest value of the option `threads`
Devices = str | torch.device | Sequence[str | torch.device] | None


def load(
    model: str | Path,
    method: str | Method = "full",
    *,
    device: Devices = "auto",
    dtype: str | torch.dtype | None = "auto",
    block: int | str | None = None,
    window: int | str | None = None,
    attention: str | None = "auto",
    rope: str | None = None,
    rope_factor: float | None = None,
    kv_device_budget: int | str | None = None,
    kv_host_budget: int | str | None = None,
    spill_dir: str | Path | None = None,
    kv_dtype: str | torch.dtype | None = "auto",
    threads: int | None = None,
    weights: str | None = "auto",
    sharing: Engine | None = None,
    length: int | str | None = None,
    prefill_method: str | Method | None = None,
    ranks: object = None,
) -> Engine:
    """Load `model` (a folder, a GGUF file, a hub id, "smollm2", or the embedded model "demo"), and return an engine.

    - `method`: a method's name, or an instance with its knobs. "auto" is the method that was measured best for texts of
      `length` tokens, answers included; without `length`, for texts of any length. Its name is printed on stderr.
    - `prefill_method`: a method of spans, such as "full", by which prompts are read; `method` then attends generated
      tokens alone. See `lce.methods.Handover`.
    - `device`, `dtype`: names, or PyTorch's own objects. The `dtype` "auto" is the checkpoint's. "cuda:0,cuda:1", a
      list, or "cuda:all" divides the layers among several GPUs.
    - `block`: the number of tokens prefilled in one step; by default the method's own.
    - `window`: the number of positions that the model can be trusted on; by default the config's.
    - `attention`: the attention backend's name; "auto" takes the fastest on this machine.
    - `rope`, `rope_factor`: override the checkpoint's RoPE scaling.
    - `kv_device_budget`, `kv_host_budget`: the most bytes that a context's keys and values may take in device memory
      and in host memory, such as "8GiB". On the CPU both are the same memory, and the smaller budget counts.
    - `spill_dir`: a folder for files with the keys and values beyond the budgets. A file is removed with its context.
    - `kv_dtype`: "int8" quantises old keys and values to 8 bits in the spill file, in context files and, with a GPU, in
      host memory. They take half the bytes of 16 bits. "int8-device" quantises all keys and values when they are
      computed, wherever they are, so that decoding reads half the bytes, too.
    - `weights`: "int8" and "int4" (CPUs only) quantise the weight matrices on loading, to 0.5 and 0.3 of their bytes in
      bfloat16; "auto" takes the matrices as they are stored.
    - `threads`: the number of threads that the whole process computes with from now on, at most the cores that it may
      use; None keeps the present number.
    - `sharing`: an engine of the same model, device, dtype and weights; the new engine uses that engine's weights.
    - `ranks`: the processes that share the model's heads and matrices, each of which makes the same calls: "all" that
      torchrun started, or a group of torch.distributed; None is this process alone. See docs/parallel.md.

    Raises `ModelError` for what is no valid model or cannot be had, and `UsageError` for options that cannot be used.
    """
    loading: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "block": block,
        "window": window,
        "attention": attention,
        "rope": rope,
        "rope_factor": rope_factor,
        "kv_device_budget": kv_device_budget,
        "kv_host_budget": kv_host_budget,
        "spill_dir": spill_dir,
        "kv_dtype": kv_dtype,
        "weights": weights,
        "length": length,
    }
    if threads is not None:
        torch.set_num_threads(_within_cores(count(threads, "threads", most=MOST_THREADS), usable_cores()))
    own, again = dividing.ranks_of(ranks), partial(load, model, **loading, ranks=ranks)
    engine = own.together(partial(_loaded, model, method, own, sharing, prefill_method, again, **loading))
    dividing.check_same(
        own, engine.division.config, engine.method, engine.block, engine.dtype, engine.rope, engine.weights
    )
    return engine


def _loaded(
    model: str | Path,
    method: str | Method,
    ranks: Ranks,
    sharing: Engine | None,
    prefill_method: str | Method | None,
    again: Callable[..., Engine],
    *,
    device: Devices,
    dtype: str | torch.dtype | None,
    block: int | str | None,
    window: int | str | None,
    attention: str | None,
    rope: str | None,
    rope_factor: float | None,
    kv_device_budget: int | str | None,
    kv_host_budget: int | str | None,
    spill_dir: str | Path | None,
    kv_dtype: str | torch.dtype | None,
    weights: str | None,
    length: int | str | None,
) -> Engine:
    """Do what `load` does for one of several ranks; `again` is `load` with these options."""
    source, block, window = source_of(model), sized(block, "block", 1), sized(window, "window", 2)
    config = read_config(source)
    tokenizer = source.tokenizer(config.vocab_size)
    devices = devices_of(dividing.device_for(ranks, device))
    dividing.check_devices(ranks, devices)
    if devices[0].type == "cpu":
        keep_freed_memory()
    checkpoint = source.checkpoint
    scheme = _rounded(weights, checkpoint, devices[0])
    facts = ModelFacts(source, config, window or config.window, scaled(config.rope, rope, rope_factor))
    budgets = budgets_of(kv_device_budget, kv_host_budget, spill_dir)
    kind = dtype_of(dtype, checkpoint.dtype)
    borders = sharing.layout.borders if isinstance(sharing, Engine) and sharing.layout.devices == devices else None
    n_tokens = None if length is None else count(length, "length")
    chosen, family = fitted(method, facts, n_tokens, prefill_method), model_class(config)
    dividing.check_method(ranks, chosen)
    schemes = family.schemes(config, scheme, checkpoint.shapes) if scheme else {}
    division = dividing.division_of(config, ranks, family, checkpoint, schemes)
    made = _sizes(facts, division, chosen, kind, devices, scheme, checkpoint, block, budgets, kv_dtype, borders)
    layout, backend = made.layout, Attention.choose(attention)
    options = layout, made.method, backend, facts.window, facts.rope, scheme.name if scheme else None
    if sharing is not None:
        _check_same(sharing, division, checkpoint, layout, scheme)
        return Engine(sharing.model, tokenizer, checkpoint, *options, again=sharing._again, division=division)
    if layout.dtype != checkpoint.dtype() or (checkpoint.quantised and not checkpoint.manifest):
        uses_threads()  # converting weights may start threads
    wanted, ignore = dividing.weights_of(division, family, checkpoint.shapes), (*family.unused, *config.unused)
    loaded = dividing.part_of(division, family, checkpoint, ignore).load(
        wanted,
        dtype=layout.dtype,
        device=lambda name: layout.part_of(family.layer_of(name, config)).device,
        ignore=ignore,
        joined=family.joined(config),
        schemes=schemes or None,
        wide=[name for name in wanted if family.is_wide(name)],
    )
    if layout.borders and "head" not in loaded:  # the head is tied to the embedding, which is on another device
        (loaded["head"],) = allocate([(loaded["embed"].shape, layout.dtype)], layout.devices[-1])
        loaded["head"].copy_(loaded["embed"])
    built = family(division.own, dividing.joined(division, family, loaded, [*checkpoint.shapes]))
    return Engine(built, tokenizer, checkpoint, *options, again=again, division=division)


@cache
def _within_cores(threads: int, cores: int) -> int:
    """Return the number of threads, at most one for each core. If that is fewer than asked for, say so once."""
    if threads > cores:
        notice(f"{threads} threads were asked for, and this process may use {cores} of the cores: {cores} compute")
    return min(threads, cores)


def fitted(
    method: str | Method, model: ModelFacts, length: int | None = None, prefill_method: str | Method | None = None
) -> Method:
    """Return a method with every knob filled in for a model. Some knobs come from files in the model's folder.

    `length` is what "auto" chooses by: the most tokens of a text; None: any number. `prefill_method` is that of `load`.
    """
    made = automatic(model, length) if isinstance(method, str) and method == AUTO else as_method(method)
    made = made if prefill_method is None else Handover(made, as_method(prefill_method))
    return made.for_model(model).resolve(model.window)


def resolved(
    model: str | Path,
    method: str | Method,
    *,
    window: int | str | None = None,
    rope: str | None = None,
    rope_factor: float | None = None,
) -> Method:
    """Return the method of the engine that `load` makes, with all knobs. Raises `load`'s errors; loads no weights."""
    config = read_config(source := source_of(model))
    window = sized(window, "window", 2) or config.window
    return fitted(method, ModelFacts(source, config, window, scaled(config.rope, rope, rope_factor)))


def _check_same(
    sharing: object, division: Division, checkpoint: Checkpoint, layout: CacheLayout, scheme: Scheme | None
) -> None:
    """Raise `UsageError` unless `sharing` is an engine of this model, dtype, devices, ranks and quantisation scheme."""
    if not isinstance(sharing, Engine):
        raise UsageError(f"sharing is {shown(sharing)}; expected an engine of the same model")
    if sharing.division.config != division.config or sharing.fingerprint != checkpoint.fingerprint():
        raise UsageError(f"sharing is an engine of another model than {checkpoint.folder}; leave it out")
    if sharing.ranks != division.ranks:
        raise UsageError("sharing is an engine of other ranks; give the same ranks")
    theirs, ours = (f"{each.dtype} on {each.devices_text}" for each in (sharing.layout, layout))
    if theirs != ours:
        raise UsageError(f"sharing is an engine in {theirs}; expected {ours}, as asked")
    if sharing.weights != (scheme.name if scheme else None):
        raise UsageError(f"sharing is an engine with weights {sharing.weights or 'as stored'}; give the same weights")


class SizeOptions(TypedDict, total=False):
    """The options of `plan` and `operations`: the options of `load` on which sizes in memory depend."""

    device: Devices
    dtype: str | torch.dtype | None
    block: int | str | None
    window: int | str | None
    rope: str | None
    rope_factor: float | None
    kv_device_budget: int | str | None
    kv_host_budget: int | str | None
    spill_dir: str | Path | None
    kv_dtype: str | torch.dtype | None
    weights: str | None
    prefill_method: str | Method | None


def plan(
    model: str | Path, method: str | Method = "full", *, tokens: int | str, **options: Unpack[SizeOptions]
) -> Plan:
    """Plan a context of `tokens` tokens: the bytes that each tier must hold, and the longest context that fits.

    Takes these options of `load`: `device`, `dtype`, `block`, `window`, `rope`, `rope_factor`, `kv_device_budget`,
    `kv_host_budget`, `spill_dir`, `kv_dtype`, `weights` and `prefill_method`. Reads config.json alone, or a GGUF file's
    header.
    The `dtype` "auto" is the one in config.json, else float32. A method that needs a file of learned maps is planned
    without one.
    """
    n_tokens = count(tokens, "tokens")
    made = planned(model, method, options, n_tokens)
    facts = made.method, made.config, made.window, made.rope
    found = made.planner.plan(n_tokens, made.method.label)
    return replace(found, readable=readable(*facts), warning=beyond(*facts, n_tokens))


@dataclass(frozen=True)
class Planned:
    """The method, cache layout and weight sizes of an engine that is not loaded, for `plan` and `operations`."""

    config: ModelConfig
    window: int
    rope: RopeConfig
    method: Method  # with every knob filled in
    layout: CacheLayout
    weight_bytes: Mapping[str, int]  # the bytes of each weight, by lce's names

    @property
    def planner(self) -> Planner:
        """A planner of contexts of this engine, which counts weights and a block's activations too."""
        config, sizes, tier_bytes = self.config, self.weight_bytes, Counter[str]()
        if self.layout.borders:
            sizes = {"head": sizes["embed"], **sizes}  # a tied head has its own copy on the last device
        for name, n_bytes in sizes.items():
            layer = model_class(config).layer_of(name, config)
            tier_bytes[self.layout.part_of(layer).device_tier] += n_bytes
        # What is in memory at once: hidden states, their sum and norm, in float32; q, k, v, the output; the MLP's gate.
        heads = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        token_bytes = 12 * config.hidden_size + (heads + 2 * config.intermediate_size) * self.layout.dtype.itemsize
        return replace(ALLOWANCE.planner(self.layout, tier_bytes), token_bytes=token_bytes)


def planned(model: str | Path, method: str | Method, options: SizeOptions, length: int | None = None) -> Planned:
    """Compute an engine's sizes from config.json alone, or from a GGUF file's header; see `plan`, and `fitted`."""
    check_names(options, SizeOptions.__annotations__, "option")
    source = source_of(model, metadata_only=True)
    block, window = sized(options.get("block"), "block", 1), sized(options.get("window"), "window", 2)
    config = read_config(source)
    rope = scaled(config.rope, options.get("rope"), options.get("rope_factor"))
    facts = ModelFacts(source, config, window or config.window, rope, plan_only=True)
    named_dtype, headers = partial(DTYPES.__getitem__, config.dtype or "float32"), source.headers
    kind = dtype_of(options.get("dtype"), headers.dtype if headers else named_dtype)
    own = config.published.get("quantization_config") or {}  # only quantised checkpoints have this section
    scheme = scheme_of(options.get("weights")) or scheme_of(own.get("weights"))
    budgets = budgets_of(options.get("kv_device_budget"), options.get("kv_host_budget"), options.get("spill_dir"))
    devices = devices_of(options.get("device"))
    chosen = fitted(method, facts, length, options.get("prefill_method"))
    division = Division(config)
    return _sizes(facts, division, chosen, kind, devices, scheme, headers, block, budgets, options.get("kv_dtype"))


def _sizes(
    facts: ModelFacts,
    division: Division,
    chosen: Method,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    scheme: Scheme | None,
    checkpoint: Checkpoint | None,
    block: int | None,
    budgets: Budgets,
    kv_dtype: object,
    borders: Borders | None = None,
) -> Planned:
    """Return an engine's sizes with a fitted method, of what one rank has; matrices stored quantised stay as stored.

    If `borders` is None, see `borders_of`.
    """
    config, family = division.own, model_class(facts.config)
    stored = checkpoint.shapes if checkpoint else {}
    schemes = family.schemes(facts.config, scheme, stored) if scheme else {}
    if checkpoint and devices[0].type == "cpu":
        schemes = {**schemes, **checkpoint.schemes}
    sizes = {}
    for name, (published, shape) in dividing.weights_of(division, family, stored).items():
        plain = (torch.float32 if family.is_wide(name) else dtype).itemsize * math.prod(shape)
        sizes[name] = schemes[published].n_bytes(shape) if published in schemes else plain
    layout = CacheLayout(
        config.n_layers,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        dtype,
        devices[0],
        access_of(chosen, config.kinds),
        budgets,
        block or chosen.block,
        chosen.state,
        chosen.could_keep,
        kv_dtype=kv_dtype_of(kv_dtype),
        borders=borders_of(devices, config.n_layers, sizes) if borders is None else borders,
        sliding_layers=config.sliding_layers,
    )
    return Planned(config, facts.window, facts.rope, chosen, layout, sizes)


def _rounded(weights: object, checkpoint: Checkpoint, device: torch.device) -> Scheme | None:
    """Return the weights' quantisation scheme: the user's or the checkpoint's. Raises `UsageError` if they differ."""
    scheme, own = scheme_of(weights), checkpoint.quantised
    if scheme and own not in (None, scheme.name):
        raise UsageError(
            f"the weights of {named(checkpoint.folder)} are stored as {own}; leave weights={scheme.name!r} out, "
            "or load the checkpoint that they were made of"
        )
    found = all_schemes()[checkpoint.manifest.weights] if checkpoint.manifest else scheme
    if found and device.type != "cpu":
        raise UsageError(
            f"weights in {found.name} are computed with on the CPU alone, and the device is {device}; "
            "give --device cpu, or use the weights in bfloat16"
        )
    return found
