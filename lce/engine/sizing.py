"""`plan` computes the memory that a context needs: an engine's sizes, from a model's config and a user's options.

Of several GPUs each has consecutive layers, so that hidden states move once from one GPU to the next. The embedding is
on the first layer's GPU, the head on the last layer's. Several GPUs have more memory, but compute one after the other.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from lce import system
from lce.cache.layout import Budgets, CacheLayout, device_layout, devices_text, kv_dtype_of
from lce.engine import blocks
from lce.engine.options import SizeOptions, takes
from lce.engine.planning import ALLOWANCE, Plan, Planner
from lce.engine.setup import Planned
from lce.errors import UsageError, nearest, shown
from lce.methods.auto import automatic
from lce.methods.base import Method
from lce.methods.registry import AUTO, as_method, with_knobs
from lce.methods.run import access_of
from lce.methods.step import ModelFacts
from lce.methods.wrapped import Handover
from lce.models.config import Factor, LongRope, ModelConfig, RopeConfig
from lce.models.layers import model_class, read_config
from lce.models.ranks import ALONE, Ranks
from lce.progress import notice
from lce.sizes import count
from lce.weights.checkpoint import Checkpoint
from lce.weights.packed import Scheme, scheme_of
from lce.weights.source import Source, source_of

EXPECTED_DEVICES = "expected auto, cpu, cuda or cuda:N, or several GPUs: cuda:0,cuda:1 or cuda:all"
_say_once = functools.lru_cache(64)(notice)
Borders = tuple[tuple[int, torch.device], ...]  # (first layer, device) of each device except the first
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Planning(SizeOptions):
    """The arguments of `plan`, and of `operations`."""

    model: str | Path = field(kw_only=False)
    method: str | Method = field(default="full", kw_only=False)
    tokens: int | str


@takes(Planning)
def plan(given: Planning) -> Plan:
    """Plan a context of `tokens` tokens: the bytes that each tier must hold, and the longest context that fits.

    Reads config.json alone, or a GGUF file's header. The `dtype` "auto" is the one in config.json, else float32. A
    method that needs a file of learned maps is planned without one. The options are those of `load` on which sizes
    in memory depend:
    """
    n_tokens, made = count(given.tokens, "tokens"), planned(given)
    layout, planner, dtype = made.layout, planner_of(made), str(made.layout.dtype).removeprefix("torch.")
    return Plan(
        n_tokens,
        made.method.label,
        dtype,
        dtype if layout.kv_dtype == "auto" else layout.kv_dtype,
        devices_text(layout),
        planner.needs(n_tokens),
        planner.longest(),
        planner.refusal(n_tokens),
        {part.device_tier: (part.layers[0], part.layers[-1]) for part in layout.by_device if layout.borders},
        made.readable,
        made.beyond(n_tokens),
        made.choice(n_tokens),
        made.rope,
    )


def planner_of(made: Planned) -> Planner:
    """Return a planner of contexts of an engine that is not loaded: weights and a block's activations count, too."""
    config, sizes, tier_bytes = made.config, made.weight_bytes, Counter[str]()
    if made.layout.borders:
        sizes = {"head": sizes["embed"], **sizes}  # a tied head has its own copy on the last device
    for name, n_bytes in sizes.items():
        tier_bytes[device_layout(made.layout, model_class(config).layer_of(name, config)).device_tier] += n_bytes
    token_bytes = blocks.activation_bytes(config, made.layout.dtype.itemsize)
    return replace(ALLOWANCE.planner(made.layout, tier_bytes), token_bytes=token_bytes)


def planned(given: Planning) -> Planned:
    """Compute an engine's sizes from config.json alone, or from a GGUF file's header; see `plan`."""
    source = source_of(given.model, metadata_only=True)
    asked = facts_of(given, source, read_config(source), plan_only=True)
    method = with_knobs(given.method, given.method_options)
    chosen, facts = fitted(method, asked, count(given.tokens, "tokens"), given.prefill_method)
    own = facts.config.published.get("quantization_config") or {}  # only quantised checkpoints have this section
    scheme = scheme_of(given.weights) or scheme_of(own.get("weights"))
    checkpoint = source.checkpoint if source.types_in_headers else None
    return sizes_of(given, asked, facts, chosen, devices_of(given.device), scheme, checkpoint)


def sizes_of(
    options: SizeOptions,
    asked: ModelFacts,
    facts: ModelFacts,
    chosen: Method,
    devices: Sequence[torch.device],
    scheme: Scheme | None,
    checkpoint: Checkpoint | None,
    ranks: Ranks = ALONE,
    borders: Borders | None = None,
) -> Planned:
    """Return the sizes of one rank of an engine with a fitted method. Matrices that are stored quantised stay so."""
    spill_dir = None if options.spill_dir is None else Path(options.spill_dir)
    device, host, block = cast("list[int | None]", [options.kv_device_budget, options.kv_host_budget, options.block])
    config, division, stored = facts.config, None, checkpoint.shapes if checkpoint else {}
    dtype = dtype_of(options.dtype, checkpoint.dtype if checkpoint else lambda: DTYPES[config.dtype or "float32"])
    family = model_class(config)
    schemes = family.schemes(config, scheme, stored) if scheme else {}
    weights = family.weights(config, stored)
    if checkpoint and ranks.count > 1:
        from lce.engine import dividing

        division = dividing.division_of(config, ranks, chosen, checkpoint, schemes)
        weights, config = dividing.weights_of(division, stored), division.own
    if checkpoint:
        schemes = {**schemes, **checkpoint.schemes_on(devices[0])}
    sizes = {}
    for name, (published, shape) in weights.items():
        unrounded = (torch.float32 if family.is_wide(name) else dtype).itemsize * math.prod(shape)
        sizes[name] = schemes[published].n_bytes(shape) if published in schemes else unrounded
    if borders is None:
        borders = borders_of(devices, config.n_layers, sizes) if len(devices) > 1 else ()
    layout = CacheLayout(
        config.n_layers,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        dtype,
        devices[0],
        access_of(chosen, config.kinds),
        Budgets(device, host, spill_dir),
        block or chosen.block,
        chosen.state,
        chosen.could_keep,
        kv_dtype=kv_dtype_of(options.kv_dtype),
        borders=borders,
        sliding_layers=config.sliding_layers,
    )
    if devices[0].type == "cuda" and block is None and ranks.count == 1:
        layout = blocks.on_gpus(layout, chosen, blocks.activation_bytes(config, dtype.itemsize), sum(sizes.values()))
    own = scheme.name if scheme else None
    return Planned(config, facts.window, facts.rope, chosen, layout, own, sizes, division, asked)


def fitted(
    method: str | Method, model: ModelFacts, length: int | None = None, prefill_method: str | Method | None = None
) -> tuple[Method, ModelFacts]:
    """Return a method with every knob filled in for a model, and the model with the window and RoPE scaling to use.

    "auto" chooses for texts of at most `length` tokens; None: any number. `prefill_method` is that of `load`.
    """
    method, model = automatic(model, length) if isinstance(method, str) and method == AUTO else (method, model)
    model = _stretched(model, length) if model.rope.factor == "auto" else model
    made = as_method(method)
    made = made if prefill_method is None else Handover(made, as_method(prefill_method))
    return made.for_model(model).resolve(model.window), model


def _stretched(model: ModelFacts, length: int | None) -> ModelFacts:
    """Return a model of which the factor "auto" of RoPE scaling is a number, if a length is known, and say so."""
    rope, window = model.rope, f"a window of {model.rope.original_window or model.window:,}"
    if length is None:
        line = f"rope {rope.kind}: each context has the factor that its announced length needs, for {window}"
    else:
        rope = rope.fitted(model.window, length)
        scaled = f"factor {rope.factor:.4g}" if rope.factor != 1 else "not scaled"
        line = f"rope {model.rope.kind}: {scaled}, for up to {length:,} tokens and {window}"
    if not model.plan_only:
        _say_once(line)
    return replace(model, rope=rope)


def resolved(model: str | Path, method: str | Method, **options: Any) -> Method:
    """Return the method, with all knobs, of the engine that `load` makes. Raises `load`'s errors; loads no weights."""
    source = source_of(model)
    return fitted(method, facts_of(SizeOptions(**options), source, read_config(source)))[0]


def facts_of(options: SizeOptions, source: Source, config: ModelConfig, *, plan_only: bool = False) -> ModelFacts:
    """Return what a method may know of a model: the window and the RoPE scaling are the user's, if given."""
    window, factor = cast("int | None", options.window), cast("Factor | None", options.rope_factor)
    named = frozenset({"window"} if window else ()) | ({"rope"} if options.rope or factor else set())
    rope = scaled(config.rope, options.rope, factor) if "rope" in named else config.rope
    return ModelFacts(source, config, window or config.window, rope, plan_only, named)


def dtype_of(name: object, own: Callable[[], torch.dtype]) -> torch.dtype:
    """Return the dtype that a user names. For "auto" or None, return `own()`, the checkpoint's dtype."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return own()
    if isinstance(name, torch.dtype) and name in DTYPES.values():
        return name
    if not isinstance(name, str) or name not in DTYPES:
        raise UsageError(f"unknown dtype {shown(name)}; {nearest(str(name), ['auto', *DTYPES])}")
    return DTYPES[name]


def scaled(rope: RopeConfig, kind: str | None, factor: Factor | None) -> RopeConfig:
    """Return the checkpoint's RoPE config with a user's `kind` and `factor`; of another kind, by default "auto"."""
    if factor is not None and (kind or rope.kind) == "none":
        text = factor if isinstance(factor, str) else f"{factor:g}"
        raise UsageError(f"rope_factor={text} has no scaling to belong to; add rope=, for example rope='linear'")
    if isinstance(rope, LongRope):
        raise UsageError("the model's RoPE has divisors of its own, LongRoPE; leave rope and rope_factor out")
    usual = rope.factor if kind in (None, "none", rope.kind) else "auto"
    return replace(rope, kind=kind or rope.kind, factor=usual if factor is None else factor)


def devices_of(name: object) -> tuple[torch.device, ...]:
    """Return the devices that a user names: one, or several GPUs in a comma-separated text or a list.

    Raises `UsageError` for devices that this machine lacks, or that cannot share one model.
    """
    if isinstance(name, str):
        several = "," in name or name == "cuda:all"
        return _several(name, name.split(",")) if several else (device_of(name.strip()),)
    return _several(name, name) if isinstance(name, list | tuple) else (device_of(name),)


def _several(name: object, names: Sequence[object]) -> tuple[torch.device, ...]:
    if isinstance(name, str) and name == "cuda:all":
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cuda"]
    if not names:
        raise UsageError(f"device is {shown(name)}; {EXPECTED_DEVICES}")
    devices = [device_of(each.strip() if isinstance(each, str) else each) for each in names]
    if len(devices) == 1:
        return tuple(devices)
    if any(each in (None, "auto") for each in names) or any(device.type != "cuda" for device in devices):
        raise UsageError(f"device is {shown(name)}; a model's layers can be on several GPUs, such as cuda:0,cuda:1")
    devices = [torch.device("cuda", torch.cuda.current_device() if x.index is None else x.index) for x in devices]
    if len({*devices}) < len(devices):
        raise UsageError(f"device is {shown(name)}; expected each device once")
    return tuple(devices)


def device_of(name: object) -> torch.device:
    """Return the device that a user names. Raises `UsageError` for a device that this machine lacks."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _named(name)


def _named(name: object) -> torch.device:
    if not isinstance(name, str | torch.device):
        raise UsageError(f"device is {shown(name)}; {EXPECTED_DEVICES}")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {shown(name)}; {EXPECTED_DEVICES}") from None
    n_devices = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if not n_devices or (device.index or 0) >= n_devices:
        cuda = " or cuda" if torch.cuda.is_available() else ""
        raise UsageError(f"device {shown(str(name))} is not available here; expected auto, cpu{cuda}")
    return device


def borders_of(devices: Sequence[torch.device], n_layers: int, sizes: Mapping[str, int]) -> Borders:
    """Divide `n_layers` layers among devices by free memory (see `counts_of`); return each later device's first layer.

    `sizes` has each weight's bytes, by lce's name. A tied head is copied to the last device.
    """
    if len(devices) > n_layers:
        raise UsageError(f"{len(devices)} devices for {n_layers} layers; expected one layer or more on each device")
    free = [system.free_memory(device) or 0 for device in devices]
    free[0] -= sizes["embed"]
    free[-1] -= sizes.get("head", sizes["embed"]) + sizes["norm"]
    counts = counts_of(free, n_layers)
    return tuple((sum(counts[:i]), device) for i, device in enumerate(devices) if i)


def counts_of(free: Sequence[int], n_layers: int) -> list[int]:
    """Return how many layers each device gets, one or more, given the `free` bytes of each device.

    The least memory per layer on any device bounds the length of contexts, so it is maximised: each next layer goes to
    the device that would then have the most memory per layer. Example: 40, 40 and 20 GiB get 3, 3 and 1 of 7 layers.
    """
    counts = [1] * len(free)
    for _ in range(n_layers - len(free)):
        counts[max(range(len(free)), key=lambda i: free[i] / (counts[i] + 1))] += 1
    return counts
