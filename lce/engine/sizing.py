"""`plan` computes the memory that a context needs: an engine's sizes, from a model's config and a user's options."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lce.cache.layout import Budgets, CacheLayout, device_layout, devices_text, kv_dtype_of
from lce.engine.devices import Borders, borders_of, devices_of
from lce.engine.options import SizeOptions, plain, takes
from lce.engine.planning import ALLOWANCE, Plan, Planner
from lce.engine.window import beyond, readable
from lce.errors import UsageError, nearest, shown
from lce.methods.auto import automatic
from lce.methods.base import Method
from lce.methods.handover import Handover
from lce.methods.registry import AUTO, as_method
from lce.methods.run import access_of
from lce.methods.step import ModelFacts
from lce.models.config import LongRope, ModelConfig, RopeConfig
from lce.models.layers import Model, model_class, read_config
from lce.models.ranks import Division
from lce.sizes import count
from lce.weights.checkpoint import Checkpoint
from lce.weights.finding import source_of
from lce.weights.packed import Scheme, scheme_of
from lce.weights.source import Source

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
    layout, planner, facts = made.layout, made.planner, (made.method, made.config, made.window, made.rope)
    dtype, parts = str(layout.dtype).removeprefix("torch."), layout.by_device if layout.borders else ()
    return Plan(
        n_tokens,
        made.method.label,
        dtype,
        dtype if layout.kv_dtype == "auto" else layout.kv_dtype,
        devices_text(layout),
        planner.needs(n_tokens),
        planner.longest(),
        planner.refusal(n_tokens),
        {part.device_tier: (part.first_layer, part.first_layer + part.n_layers - 1) for part in parts},
        readable(*facts),
        beyond(*facts, n_tokens),
    )


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
            tier_bytes[device_layout(self.layout, layer).device_tier] += n_bytes
        # What is in memory at once: hidden states, their sum and norm, in float32; q, k, v, the output; the MLP's gate.
        heads = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        token_bytes = 12 * config.hidden_size + (heads + 2 * config.intermediate_size) * self.layout.dtype.itemsize
        return replace(ALLOWANCE.planner(self.layout, tier_bytes), token_bytes=token_bytes)


def planned(given: Planning) -> Planned:
    """Compute an engine's sizes from config.json alone, or from a GGUF file's header; see `plan`."""
    source = source_of(given.model, metadata_only=True)
    config = read_config(source)
    facts = facts_of(given, source, config, plan_only=True)
    named_dtype, headers = partial(DTYPES.__getitem__, config.dtype or "float32"), source.headers
    dtype = dtype_of(given.dtype, headers.dtype if headers else named_dtype)
    own = config.published.get("quantization_config") or {}  # only quantised checkpoints have this section
    scheme, devices = scheme_of(given.weights) or scheme_of(own.get("weights")), devices_of(given.device)
    chosen = fitted(given.method, facts, count(given.tokens, "tokens"), given.prefill_method)
    return sizes_of(given, facts, Division(config), chosen, dtype, devices, scheme, headers)


def sizes_of(
    options: SizeOptions,
    facts: ModelFacts,
    division: Division,
    chosen: Method,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    scheme: Scheme | None,
    checkpoint: Checkpoint | None,
    borders: Borders | None = None,
) -> Planned:
    """Return the sizes of one rank of an engine with a fitted method. Matrices that are stored quantised stay so.

    If `borders` is None, see `borders_of`.
    """
    spill_dir = None if options.spill_dir is None else Path(options.spill_dir)
    budgets = Budgets(plain(options.kv_device_budget), plain(options.kv_host_budget), spill_dir)
    config, family = division.own, model_class(facts.config)
    stored = checkpoint.shapes if checkpoint else {}
    schemes = family.schemes(facts.config, scheme, stored) if scheme else {}
    if checkpoint and devices[0].type == "cpu":
        schemes = {**schemes, **checkpoint.schemes}
    sizes = {}
    for name, (published, shape) in weights_of(division, family, stored).items():
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
        budgets,
        plain(options.block) or chosen.block,
        chosen.state,
        chosen.could_keep,
        kv_dtype=kv_dtype_of(options.kv_dtype),
        borders=borders,
        sliding_layers=config.sliding_layers,
    )
    return Planned(config, facts.window, facts.rope, chosen, layout, sizes)


def weights_of(
    division: Division, family: type[Model], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what `Model.weights` returns, with the shapes that this rank has."""
    if division.ranks.count > 1:
        from lce.engine import dividing

        return dividing.weights_of(division, family, stored)
    return family.weights(division.config, stored)


def fitted(
    method: str | Method, model: ModelFacts, length: int | None = None, prefill_method: str | Method | None = None
) -> Method:
    """Return a method with every knob filled in for a model. Some knobs come from files in the model's folder.

    "auto" chooses for texts of at most `length` tokens; None: any number. `prefill_method` is that of `load`.
    """
    made = automatic(model, length) if isinstance(method, str) and method == AUTO else as_method(method)
    made = made if prefill_method is None else Handover(made, as_method(prefill_method))
    return made.for_model(model).resolve(model.window)


def resolved(model: str | Path, method: str | Method, **options: Any) -> Method:
    """Return the method of the engine that `load` makes, with all knobs. Raises `load`'s errors; loads no weights.

    `options` are fields of `SizeOptions`.
    """
    source = source_of(model)
    return fitted(method, facts_of(SizeOptions(**options), source, read_config(source)))


def facts_of(options: SizeOptions, source: Source, config: ModelConfig, *, plan_only: bool = False) -> ModelFacts:
    """Return what a method may know of a model: the window and the RoPE scaling are the user's, if given."""
    window, rope = plain(options.window) or config.window, scaled(config.rope, options.rope, options.rope_factor)
    return ModelFacts(source, config, window, rope, plan_only=plan_only)


def dtype_of(name: object, own: Callable[[], torch.dtype]) -> torch.dtype:
    """Return the dtype that a user names. For "auto" or None, return `own()`, the checkpoint's dtype."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return own()
    if isinstance(name, torch.dtype) and name in DTYPES.values():
        return name
    if not isinstance(name, str) or name not in DTYPES:
        raise UsageError(f"unknown dtype {shown(name)}; {nearest(str(name), ['auto', *DTYPES])}")
    return DTYPES[name]


def scaled(rope: RopeConfig, kind: str | None, factor: float | None) -> RopeConfig:
    """Return the checkpoint's RoPE config, with the scaling changed by the user's `kind` and `factor`."""
    if factor is not None and (kind or rope.kind) == "none":
        raise UsageError(f"rope_factor={factor:g} has no scaling to belong to; add rope=, for example rope='linear'")
    if isinstance(rope, LongRope) and (kind, factor) != (None, None):
        raise UsageError("the model's RoPE has divisors of its own, LongRoPE; leave rope and rope_factor out")
    if kind not in (None, "none", rope.kind) and factor is None:
        raise UsageError(f"rope={kind!r} needs a rope_factor, for example 4")
    return replace(rope, kind=kind or rope.kind, factor=factor if factor is not None else rope.factor)
