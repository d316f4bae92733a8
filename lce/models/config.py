"""A checkpoint's config.json, read once and checked in full, without torch.

Both published layouts are read: `rope_theta` beside `rope_scaling` with `torch_dtype` (transformers 4), and
`rope_parameters` with `dtype` (transformers 5). A key that may be left out takes transformers' own default for its
architecture; sizes that no default can stand in for are required. Everything else is refused with a ModelError of
one line: the file, the key, what it holds, what was expected, what to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lce.errors import ModelError, nearest
from lce.models.fields import Fields, read_object

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}  # and the model_type of each
ROPE_KINDS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotations: the base `theta`, and the scaling that stretches it.

    `original_window` is the window before scaling; None stands for the model's window. The next five fields are
    YaRN's and the last two Llama 3.1's; other kinds do not look at them.
    """

    kind: str = "none"
    theta: float = 10000.0
    factor: float = 1.0
    original_window: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class ModelConfig:
    """What the model is: its sizes, its window, its rotation. Only `from_folder` checks the values.

    `sliding_window` is None where every query sees every earlier key. `dtype` is what the file announces, if it
    does; the weights themselves have the last word. `eos_ids` are all the tokens that end a text, the ones of
    generation_config.json first.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int
    norm_eps: float = 1e-6
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    dtype: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # config.json as it stands

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """The config of the checkpoint in `folder`; ModelError where lce cannot run it or cannot trust it."""
        fields = _config_file(Path(folder))
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        llama = architecture == "LlamaForCausalLM"
        n_heads, n_kv_heads, head_dim = _heads(fields, llama)
        vocab_size = fields.integer("vocab_size")
        announced = fields.integer("max_position_embeddings", default=2048 if llama else 131072)
        dual_chunk = fields.section("dual_chunk_attention_config")  # Qwen's: announces more than was trained
        window = dual_chunk.optional_integer("original_max_position_embeddings") or announced
        sliding_window = None if llama else fields.optional_integer("sliding_window")
        if not llama and "sliding_window" not in fields.values:
            sliding_window = 4096
        bos_id, eos_ids = _special_tokens(fields, Path(folder), vocab_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            n_layers=fields.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            window=window,
            norm_eps=fields.number("rms_norm_eps", default=1e-6),
            tied=fields.flag("tie_word_embeddings"),
            attention_bias=llama and fields.flag("attention_bias"),
            mlp_bias=llama and fields.flag("mlp_bias"),
            sliding_window=sliding_window,
            rope=_rope(fields, announced, head_dim),
            dtype=_dtype(fields),
            bos_id=bos_id,
            eos_ids=eos_ids,
            published=fields.values,
        )


def _config_file(folder: Path) -> Fields:
    path = folder / "config.json"
    if not os.path.isdir(folder):
        kind = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise ModelError(f"{folder} {kind}; expected a checkpoint's folder with a config.json; check the path")
    if not os.path.isfile(path):
        raise ModelError(f"{folder} has no config.json; expected a checkpoint's folder; check the path")
    return read_object(path)


def _architecture(fields: Fields) -> str:
    """The class that runs the checkpoint: named in `architectures`, or told by `model_type`, or both, agreeing."""
    by_type = {kind: name for name, kind in ARCHITECTURES.items()}
    remedy = "use a Llama- or Mistral-family checkpoint"
    listed = fields.values.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise fields.refusal("architectures", "a list of names")
    model_type = fields.text("model_type")
    name = listed[0] if listed else by_type.get(model_type or "", model_type)
    if name is None:
        raise fields.refusal("architectures", f"one of {', '.join(ARCHITECTURES)}", remedy)
    if model_type is not None and model_type not in by_type:
        raise fields.refusal("model_type", f"a supported one ({nearest(model_type[:80], by_type)})", remedy)
    if name not in ARCHITECTURES:
        raise fields.refusal("architectures", f"a supported one ({nearest(name[:80], ARCHITECTURES)})", remedy)
    if model_type not in (None, ARCHITECTURES[name]):
        raise fields.refusal("model_type", f"{ARCHITECTURES[name]!r}, as architectures says {name}")
    return name


def _refuse_unsupported(fields: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        if fields.values.get(key) is not None:
            remedy = "use the checkpoint before its quantization"
            raise fields.refusal(key, f"plain weights in {', '.join(DTYPES)}", remedy)
    if fields.text("hidden_act") not in (None, "silu", "swish"):
        raise fields.refusal("hidden_act", "'silu', the only activation of these families", "use another checkpoint")
    layer_types = fields.values.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or any(t != layer_types[0] for t in layer_types)):
        raise fields.refusal("layer_types", "one kind of attention in all layers", "use another checkpoint")


def _heads(fields: Fields, llama: bool) -> tuple[int, int, int]:
    """Query heads, key/value heads, head dimension."""
    n_heads = fields.integer("num_attention_heads")
    left_out = n_heads if llama or "num_key_value_heads" in fields.values else 8
    n_kv_heads = fields.integer("num_key_value_heads", default=left_out)
    if n_heads % n_kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads, which is {n_heads}")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % n_heads:
            raise fields.refusal(
                "hidden_size", f"a multiple of num_attention_heads, {n_heads}, or an explicit head_dim"
            )
        head_dim = hidden_size // n_heads
    if head_dim % 2:
        raise fields.refusal("head_dim", f"an even number, for rotation turns pairs (it would be {head_dim})")
    return n_heads, n_kv_heads, head_dim


def _dtype(fields: Fields) -> str | None:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    name = fields.text(key)
    if name is None:
        return None
    if name.removeprefix("torch.") not in DTYPES:
        raise fields.refusal(key, f"one of {', '.join(DTYPES)}", "use a checkpoint in one of these")
    return name.removeprefix("torch.")


def _special_tokens(fields: Fields, folder: Path, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The token that begins a text, and all that end one: those of generation_config.json, then the config's."""
    path = folder / "generation_config.json"
    generation = read_object(path) if os.path.isfile(path) else Fields(str(path), {})
    bos = fields.token_ids("bos_token_id", vocab_size) + generation.token_ids("bos_token_id", vocab_size)
    eos = generation.token_ids("eos_token_id", vocab_size) + fields.token_ids("eos_token_id", vocab_size)
    if not bos and "bos_token_id" not in fields.values and vocab_size > 1:
        bos = (1,)
    if not eos and "eos_token_id" not in fields.values and vocab_size > 2:
        eos = (2,)
    return bos[0] if bos else None, tuple(dict.fromkeys(eos))


def _rope(fields: Fields, window: int, head_dim: int) -> RopeConfig:
    scaling = fields.section("rope_scaling")
    if not scaling.values:
        scaling = fields.section("rope_parameters")
    kind = _rope_kind(scaling)
    for section in (fields, scaling):
        if section.number("partial_rotary_factor", default=1.0) != 1.0:
            raise section.refusal("partial_rotary_factor", "1.0: these families rotate whole heads")
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    rope = RopeConfig(kind=kind, theta=theta)
    if kind == "none":
        return rope
    if kind in ("ntk", "dynamic") and head_dim < 4:
        raise fields.refusal("head_dim", f"4 or more for rope scaling {kind!r} (it would be {head_dim})")
    original = fields.optional_integer("original_max_position_embeddings")
    original = original or scaling.optional_integer("original_max_position_embeddings")
    if kind == "yarn" and original and scaling.values.get("factor") is None:
        rope = replace(rope, factor=max(1.0, window / original))
    else:
        rope = replace(rope, factor=scaling.number("factor"))
    if kind in ("linear", "dynamic"):  # transformers measures `dynamic` by max_position_embeddings alone
        return rope
    rope = replace(rope, original_window=original)
    if kind == "yarn":
        return _yarn(rope, scaling)
    return _llama3(rope, scaling) if kind == "llama3" else rope


def _rope_kind(scaling: Fields) -> str:
    kind, older = scaling.text("rope_type"), scaling.text("type")
    if kind is not None and older is not None and kind != older:
        raise scaling.refusal("rope_type", f"the same as type, which is {older[:80]!r}")
    kind = kind or older
    if kind is None and scaling.values.get("factor") is not None:
        raise scaling.refusal("rope_type", f"the kind of scaling that factor belongs to: {', '.join(ROPE_KINDS)}")
    kind = "none" if kind in (None, "default") else kind
    if kind not in ROPE_KINDS:
        remedy = "use a checkpoint with a supported one"
        key = "rope_type" if "rope_type" in scaling.values else "type"
        raise scaling.refusal(key, f"a supported scaling ({nearest(kind[:80], ROPE_KINDS)})", remedy)
    return kind


def _yarn(rope: RopeConfig, scaling: Fields) -> RopeConfig:
    rope = replace(
        rope,
        attention_factor=scaling.optional_number("attention_factor"),
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.flag("truncate", default=True),
    )
    if rope.beta_fast < rope.beta_slow:
        raise scaling.refusal("beta_fast", f"at least beta_slow, which is {rope.beta_slow:g}")
    return rope


def _llama3(rope: RopeConfig, scaling: Fields) -> RopeConfig:
    low = scaling.number("low_freq_factor", default=1.0)
    high = scaling.number("high_freq_factor", default=4.0)
    if high <= low:
        raise scaling.refusal("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)
