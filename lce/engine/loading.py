"""`load` and `plan`: from a model folder and a user's options to an engine, or to the memory a context needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from lce.cache.formats import kv_dtype_of
from lce.cache.layout import Budgets, CacheLayout
from lce.engine.allowance import ALLOWANCE
from lce.engine.arguments import DTYPES, backend_of, budgets_of, dtype_of, scaled, sized, threads_of
from lce.engine.devices import Borders, borders_of, devices_of
from lce.engine.engine import Engine, EngineOptions
from lce.engine.planning import Plan
from lce.engine.process import uses_threads
from lce.errors import UsageError, shown
from lce.files import named
from lce.methods.base import Method
from lce.methods.registry import as_method
from lce.methods.step import ModelFacts
from lce.models.config import ModelConfig
from lce.models.registry import model_class, read_config
from lce.sizes import count
from lce.system import keep_freed_memory
from lce.weights.checkpoint import Checkpoint
from lce.weights.packed import Scheme, all_schemes, scheme_of
from lce.weights.reading import allocate
from lce.weights.source import source_of

Devices = str | torch.device | Sequence[str | torch.device] | None


def load(
    model: str | Path, method: str | Method = "full", *,
    device: Devices = "auto", dtype: str | torch.dtype | None = "auto",
    block: int | str | None = None, window: int | str | None = None, attention: str | None = "auto",
    rope: str | None = None, rope_factor: float | None = None,
    kv_device_budget: int | str | None = None, kv_host_budget: int | str | None = None,
    spill_dir: str | Path | None = None, kv_dtype: str | torch.dtype | None = "auto", threads: int | None = None,
    weights: str | None = "auto", sharing: Engine | None = None,
) -> Engine:  # fmt: skip
    """Return an engine over the model folder `model`, or over the embedded "demo".

    - `method`: a name or an instance.
    - `device`, `dtype`: names, or PyTorch's own objects; the `dtype` "auto" is the checkpoint's. Several GPUs share the
      layers: "cuda:0,cuda:1", a list, or "cuda:all".
    - `block`: tokens prefilled in one step; by default the method's own block.
    - `window`: overrides the number of positions that the model is trusted on.
    - `attention`: the backend's name; "auto" takes the fastest on this machine.
    - `rope`, `rope_factor`: override the checkpoint's RoPE scaling.
    - `kv_device_budget`, `kv_host_budget`: bound the keys and values of a context in each kind of memory, in bytes or
      as "8GiB". On the CPU both are the same memory, and the smaller one counts.
    - `spill_dir`: keys and values beyond the budgets go to a file in this folder, which is removed with the context.
    - `kv_dtype`: "int8" rounds old keys and values to 8 bits in host memory beside a GPU, in the spill file and in
      context files: half the bytes of 16 bits.
    - `weights`: "int8" and "int4" (CPUs only) round the matrices of a checkpoint on loading, to a half and 0.3 of
      bfloat16's bytes; "auto" takes matrices as stored.
    - `threads`: how many threads the whole process computes with from now on; None changes nothing.
    - `sharing`: an engine of the same model, device, dtype and weights, whose weights the new engine uses.

    Raises `ModelError` for a folder that is no valid model, and `UsageError` for options that cannot be used.
    """
    source, block, window = source_of(model), sized(block, "block", 1), sized(window, "window", 2)
    if threads is not None:
        torch.set_num_threads(threads_of(threads))
    config = read_config(source)
    tokenizer = source.tokenizer(config.vocab_size)
    window = window or config.window
    devices = devices_of(device)
    if devices[0].type == "cpu":
        keep_freed_memory()
    checkpoint = source.checkpoint
    scheme = _rounded(weights, checkpoint, devices[0])
    scaling = scaled(config.rope, rope, rope_factor)
    chosen = fitted(method, ModelFacts(source, config, window, scaling))
    budgets = budgets_of(kv_device_budget, kv_host_budget, spill_dir)
    kind = dtype_of(dtype, checkpoint.dtype)
    if isinstance(sharing, Engine) and sharing.layout.devices == devices:
        borders = sharing.layout.borders
    else:
        borders = borders_of(devices, config.n_layers, _weight_bytes(config, kind, scheme, checkpoint.names))
    layout = layout_of(config, chosen, kind, devices[0], block, budgets, kv_dtype_of(kv_dtype), borders)
    options = EngineOptions(chosen, backend_of(attention), window, scaling, scheme.name if scheme else None, layout)
    if sharing is not None:
        _check_same(sharing, config, checkpoint, options)
        return Engine(sharing.model, tokenizer, checkpoint, options)
    if layout.dtype != checkpoint.dtype():
        uses_threads()  # converting weights may start threads
    family = model_class(config)
    wanted = family.weights(config, checkpoint.names)
    loaded = checkpoint.load(
        wanted, dtype=layout.dtype, device=lambda name: layout.device_of(family.layer_of(name, config)),
        ignore=(*family.unused, *config.unused),
        joined=family.joined(config), schemes=family.schemes(config, scheme, checkpoint.names) if scheme else None,
    )  # fmt: skip
    if layout.borders and "head" not in loaded:  # tied to the embedding, which is on another device
        (loaded["head"],) = allocate([(loaded["embed"].shape, layout.dtype)], layout.devices[-1])
        loaded["head"].copy_(loaded["embed"])
    return Engine(family(config, loaded), tokenizer, checkpoint, options)


def fitted(method: str | Method, model: ModelFacts) -> Method:
    """Return a method with every knob filled in, some from files beside the model."""
    return as_method(method).for_model(model).resolve(model.window)


def resolved(
    model: str | Path, method: str | Method, *, window: int | str | None = None, rope: str | None = None,
    rope_factor: float | None = None,
) -> Method:  # fmt: skip
    """Return the method as `load` with these options would resolve it. Loads no weights; raises as `load` does."""
    source = source_of(model)
    config = read_config(source)
    window = sized(window, "window", 2) or config.window
    return fitted(method, ModelFacts(source, config, window, scaled(config.rope, rope, rope_factor)))


def _check_same(sharing: object, config: ModelConfig, checkpoint: Checkpoint, options: EngineOptions) -> None:
    """Raise `UsageError` unless an engine's weights are those of this model, dtype and device."""
    layout = options.layout
    if not isinstance(sharing, Engine):
        raise UsageError(f"sharing is {shown(sharing)}; expected an engine of the same model")
    if sharing.model.config != config or sharing.fingerprint != checkpoint.fingerprint():
        raise UsageError(f"sharing is an engine of another model than {checkpoint.folder}; leave it out")
    if (sharing.dtype, sharing.layout.devices) != (layout.dtype, layout.devices):
        raise UsageError(
            f"sharing is an engine in {sharing.dtype} on {sharing.layout.devices_text}; expected {layout.dtype} on "
            f"{layout.devices_text}, as asked"
        )
    if sharing.weights != options.weights:
        raise UsageError(
            f"sharing is an engine with weights {sharing.weights or 'as stored'}; give it the same weights"
        )


def plan(
    model: str | Path, method: str | Method = "full", *, tokens: int | str,
    device: Devices = "auto", dtype: str | torch.dtype | None = "auto",
    block: int | str | None = None, window: int | str | None = None,
    kv_device_budget: int | str | None = None, kv_host_budget: int | str | None = None,
    spill_dir: str | Path | None = None, kv_dtype: str | torch.dtype | None = "auto", weights: str | None = "auto",
) -> Plan:  # fmt: skip
    """Plan a context of `tokens` tokens: what each tier must hold, and the longest that fits. Options as for `load`.

    Reads config.json alone; weights count by their shapes. `dtype` "auto" is the one in config.json, else float32. A
    method that needs a file of learned maps is planned without the file.
    """
    made = planned(
        model, method, device=device, dtype=dtype, block=block, window=window, kv_device_budget=kv_device_budget,
        kv_host_budget=kv_host_budget, spill_dir=spill_dir, kv_dtype=kv_dtype, weights=weights,
    )  # fmt: skip
    tier_bytes = _by_tier(made.config, made.layout, made.weight_bytes)
    return ALLOWANCE.planner(made.layout, made.method.name, tier_bytes).plan(count(tokens, "tokens"))


@dataclasses.dataclass(frozen=True)
class Planned:
    """The sizes of an engine that is not loaded, for `plan` and `operations`."""

    config: ModelConfig
    method: Method  # resolved
    layout: CacheLayout
    weight_bytes: Mapping[str, int]  # by our names


def planned(
    model: str | Path, method: str | Method, *, device: Devices = "auto", dtype: str | torch.dtype | None = "auto",
    block: int | str | None = None, window: int | str | None = None,
    kv_device_budget: int | str | None = None, kv_host_budget: int | str | None = None,
    spill_dir: str | Path | None = None, kv_dtype: str | torch.dtype | None = "auto", weights: str | None = "auto",
) -> Planned:  # fmt: skip
    """Compute an engine's sizes from config.json alone; see `plan`."""
    source, block, window = source_of(model), sized(block, "block", 1), sized(window, "window", 2)
    config = read_config(source)
    chosen = fitted(method, ModelFacts(source, config, window or config.window, config.rope, plan_only=True))
    kind = dtype_of(dtype, partial(DTYPES.__getitem__, config.dtype or "float32"))
    budgets, devices = budgets_of(kv_device_budget, kv_host_budget, spill_dir), devices_of(device)
    own = config.published.get("quantization_config") or {}  # of a quantised checkpoint
    sizes = _weight_bytes(config, kind, scheme_of(weights) or scheme_of(own.get("weights")))
    borders = borders_of(devices, config.n_layers, sizes)
    layout = layout_of(config, chosen, kind, devices[0], block, budgets, kv_dtype_of(kv_dtype), borders)
    return Planned(config, chosen, layout, sizes)


def _weight_bytes(
    config: ModelConfig, dtype: torch.dtype, scheme: Scheme | None, stored: Collection[str] = ()
) -> dict[str, int]:
    """Return the bytes of a model's weights, by our names, in a dtype or rounded."""
    family = model_class(config)
    wanted = family.weights(config, stored)
    schemes = family.schemes(config, scheme, stored) if scheme else {}
    return {
        name: schemes[published].n_bytes(shape) if published in schemes else dtype.itemsize * math.prod(shape)
        for name, (published, shape) in wanted.items()
    }


def _by_tier(config: ModelConfig, layout: CacheLayout, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of the weights on each device. A tied head counts on the last device too."""
    if layout.borders:
        sizes = {"head": sizes["embed"], **sizes}
    found = dict.fromkeys((part.device_tier for part in layout.by_device), 0)
    for name, n_bytes in sizes.items():
        found[layout.part_of(model_class(config).layer_of(name, config)).device_tier] += n_bytes
    return found


def _rounded(weights: object, checkpoint: Checkpoint, device: torch.device) -> Scheme | None:
    """Return the scheme of the weights, a user's or the checkpoint's own. Raises `UsageError` for another one."""
    scheme, manifest = scheme_of(weights), checkpoint.manifest
    own = all_schemes()[manifest.weights] if manifest else None
    if own and scheme and scheme != own:
        raise UsageError(
            f"the weights of {named(checkpoint.folder)} are stored as {own.name}; leave weights={scheme.name!r} out, "
            "or load the checkpoint that they were made of"
        )
    found = own or scheme
    if found and device.type != "cpu":
        raise UsageError(
            f"weights in {found.name} are computed with on the CPU alone, and the device is {device}; "
            "give --device cpu, or use the weights in bfloat16"
        )
    return found


def layout_of(
    config: ModelConfig, method: Method, dtype: torch.dtype, device: torch.device, block: int | None, budgets: Budgets,
    kv_dtype: str = "auto", borders: Borders = (),
) -> CacheLayout:  # fmt: skip
    """Return the cache layout of a model's contexts under a resolved method."""
    return CacheLayout(
        config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim, dtype, device, method.access, budgets,
        block or method.block, method.state, method.could_keep, kv_dtype=kv_dtype, borders=borders,
    )  # fmt: skip
