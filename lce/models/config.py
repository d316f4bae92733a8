"""The fields of config.json that all model families share, checked in full; registry.py finds the family.

Both published layouts are read: `rope_theta` beside `rope_scaling` with `torch_dtype` (transformers 4), and
`rope_parameters` with `dtype` (transformers 5). An optional key that is missing takes transformers' default for that
family; the family declares those defaults. A missing size is refused, and so is every value that lce cannot run. The
error is a ModelError of one line: the file, the key, its value, what was expected, what to do. No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lce.errors import shown
from lce.models.fields import Fields

ROPE_KINDS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys of other families' configs that change what a model computes, and the values at which they change nothing. A
# model that has one is not the architecture that its name says.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), (0,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "clip_qkv"), ()),
    **dict.fromkeys(
        ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "scale_emb"), (1,)
    ),
    **dict.fromkeys(("attention_multiplier", "scale_depth", "attention_chunk_size", "sliding_window_pattern"), ()),
    **dict.fromkeys(("no_rope_layers", "cross_attention_layers"), ([],)),
    **dict.fromkeys(("no_rope_layer_interval", "attn_temperature_tuning", "use_qk_norm", "qk_norm"), (0,)),
    **dict.fromkeys(("alibi", "parallel_attn", "use_parallel_residual", "attn_output_gate", "use_mrope"), (0,)),
}


@dataclass(frozen=True)
class RopeConfig:
    """The base `theta` of the rotation, and the scaling that stretches it.

    `original_window` is the window before scaling; None means the model's window. The next six fields belong to
    YaRN and the last two to Llama 3.1; other kinds ignore them.
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
    """The model's sizes, window and RoPE, and what its family adds to them. Only `read` checks the values.

    `biases` names the matrix products that have a bias, by our names of their weights ("q", "down"). `sliding_window`
    is None where every query attends every earlier key. `extra` holds numbers that only the model's own family reads.
    `dtype` is the one that the file announces, if it does; `Checkpoint.dtype` reads the stored one. `eos_ids` are all
    the tokens that end a text, those of generation_config.json first.

    Weights are published under `weight_prefix`; `unused` are patterns of published names that the model does not use.
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
    biases: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    extra: Mapping[str, float] = field(default_factory=dict, hash=False)
    dtype: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    weight_prefix: str = ""
    unused: tuple[str, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # config.json as it stands

    @classmethod
    def read(cls, fields: Fields, generation: Fields, architecture: str) -> ModelConfig:
        """Read what all families share; `fields` has the family's defaults, `generation` is generation_config.json."""
        _refuse_unsupported(fields)
        n_heads, n_kv_heads, head_dim = _heads(fields)
        vocab_size = fields.integer("vocab_size")
        announced = fields.integer("max_position_embeddings")
        dual_chunk = fields.section("dual_chunk_attention_config")  # Qwen's: announces more than was trained
        bos_id, eos_ids = _special_tokens(fields, generation, vocab_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            n_layers=fields.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            window=dual_chunk.optional_integer("original_max_position_embeddings") or announced,
            norm_eps=fields.number("rms_norm_eps", default=1e-6),
            tied=fields.flag("tie_word_embeddings"),
            rope=_rope(fields, announced, head_dim),
            dtype=_dtype(fields),
            bos_id=bos_id,
            eos_ids=eos_ids,
            published=fields.values,
        )

    def identity(self, fingerprint: str) -> str:
        """Return a SHA-256 of the weights' fingerprint and of every number here that changes what the model computes.

        It ties contexts to the model. The same weights under another `norm_eps` or RoPE base give other keys.
        """
        same = replace(self, dtype=None, bos_id=None, eos_ids=(), weight_prefix="", unused=(), published={})
        return hashlib.sha256(f"{fingerprint} {same!r}".encode()).hexdigest()


def rope_section(fields: Fields) -> Fields:
    """Return the RoPE scaling, in either layout: `rope_scaling` or `rope_parameters`. If a file has both, they must
    agree.
    """
    older, newer = fields.section("rope_scaling"), fields.section("rope_parameters")
    if not older.values or not fields.values.get("rope_parameters"):
        return older if older.values else newer
    kinds = [{_kind(section.values)} - {None} for section in (older, newer)]
    differing = ["rope_type"] if kinds[0] and kinds[1] and kinds[0] != kinds[1] else []
    shared = (older.values.keys() & newer.values.keys()) - {"rope_type", "type"}
    differing += sorted(key for key in shared if older.values[key] != newer.values[key])
    if differing:
        raise fields.refusal("rope_parameters", f"the same {differing[0]} as in rope_scaling, {shown(older.values)}")
    return Fields(older.where, {**newer.values, **older.values})


def _kind(values: Mapping[str, object]) -> str | None:
    kind = values.get("rope_type") or values.get("type")
    return None if kind is None else shown(kind)


def check_layer_types(fields: Fields, config: ModelConfig) -> None:
    """Raise ModelError for `layer_types` that contradict the config."""
    kinds = fields.names("layer_types")
    if not kinds:
        return
    if len(kinds) != config.n_layers:
        raise fields.refusal("layer_types", f"one for each of the {config.n_layers} layers")
    if len(set(kinds)) > 1 or kinds[0] not in LAYER_TYPES:
        expected = f"one kind of attention in all layers, {' or '.join(LAYER_TYPES)}"
        raise fields.refusal("layer_types", expected, "use another checkpoint")
    own = LAYER_TYPES[config.sliding_window is not None]
    if kinds[0] != own:
        raise fields.refusal("layer_types", f"{own} in all layers, as the sliding window says")


def _refuse_unsupported(fields: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        value = fields.values.get(key)
        if value is not None and not (isinstance(value, Mapping) and value.get("quant_method") == "lce"):
            expected = f"plain weights in {', '.join(DTYPES)}"
            raise fields.refusal(key, expected, "use the checkpoint before its quantization")
    if fields.text("hidden_act") not in (None, "silu", "swish"):
        raise fields.refusal("hidden_act", "'silu', the only activation of these families", "use another checkpoint")
    for key, neutral in _UNSUPPORTED.items():
        if fields.values.get(key) is not None and fields.values[key] not in neutral:
            expected = " or ".join(["null", *map(str, neutral)])
            raise fields.refusal(key, f"{expected}: lce does not implement it", "use another checkpoint")


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Read the number of query heads, of key/value heads, and the head dimension."""
    n_heads = fields.integer("num_attention_heads")
    n_kv_heads = fields.optional_integer("num_key_value_heads") or n_heads
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
        raise fields.refusal("head_dim", f"an even number, because RoPE rotates pairs (it would be {head_dim})")
    return n_heads, n_kv_heads, head_dim


def _dtype(fields: Fields) -> str | None:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    name = fields.text(key)
    if name is None:
        return None
    if name.removeprefix("torch.") not in DTYPES:
        raise fields.refusal(key, f"one of {', '.join(DTYPES)}", "use a checkpoint in one of these")
    return name.removeprefix("torch.")


def _special_tokens(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the token that begins a text, and all that end one: those of generation_config.json, then those of the
    config.
    """
    bos = fields.token_ids("bos_token_id", vocab_size) + generation.token_ids("bos_token_id", vocab_size)
    eos = generation.token_ids("eos_token_id", vocab_size) + fields.token_ids("eos_token_id", vocab_size)
    bos = bos or _default_token(fields, "bos_token_id", vocab_size)
    eos = eos or _default_token(fields, "eos_token_id", vocab_size)
    return bos[0] if bos else None, tuple(dict.fromkeys(eos))


def _default_token(fields: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    """Return the family's own token where the config leaves `key` out, unless the vocabulary is too small."""
    token = fields.defaults.get(key)
    if isinstance(token, int) and token < vocab_size and key not in fields.values:
        return (token,)
    return ()


def _rope(fields: Fields, window: int, head_dim: int) -> RopeConfig:
    scaling = rope_section(fields)
    kind = _rope_kind(scaling)
    for section in (fields, scaling):
        if section.number("partial_rotary_factor", default=1.0) != 1.0:
            raise section.refusal("partial_rotary_factor", "1.0: lce rotates whole heads")
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind in ("ntk", "dynamic") and head_dim < 4:
        raise fields.refusal("head_dim", f"4 or more for rope scaling {kind!r} (it would be {head_dim})")
    original = fields.optional_integer("original_max_position_embeddings")
    original = original or scaling.optional_integer("original_max_position_embeddings")
    if kind == "yarn" and original and scaling.values.get("factor") is None:
        factor = max(1.0, window / original)
    else:
        factor = scaling.number("factor")
    if kind in ("linear", "dynamic"):  # transformers gives `dynamic` no other window than max_position_embeddings
        original = None
    own = _yarn(scaling) if kind == "yarn" else _llama3(scaling) if kind == "llama3" else {}
    return RopeConfig(kind, theta, factor, original, **own)


def _rope_kind(scaling: Fields) -> str:
    kind, older = scaling.text("rope_type"), scaling.text("type")
    if kind is not None and older is not None and kind != older:
        raise scaling.refusal("rope_type", f"the same as type, which is {shown(older)}")
    kind = kind or older
    if kind is None and scaling.values.get("factor") is not None:
        raise scaling.refusal("rope_type", f"the kind of scaling that factor belongs to: {', '.join(ROPE_KINDS)}")
    kind = "none" if kind in (None, "default") else kind
    if kind not in ROPE_KINDS:
        key = "rope_type" if "rope_type" in scaling.values else "type"
        expected = f"a supported scaling: {', '.join(ROPE_KINDS)}"
        raise scaling.refusal(key, expected, "use a checkpoint with one of these")
    return kind


def _yarn(scaling: Fields) -> dict[str, Any]:
    fast, slow = scaling.number("beta_fast", default=32.0), scaling.number("beta_slow", default=1.0)
    if fast < slow:
        raise scaling.refusal("beta_fast", f"at least beta_slow, which is {slow:g}")
    factors = {key: scaling.optional_number(key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    return {**factors, "beta_fast": fast, "beta_slow": slow, "truncate": scaling.flag("truncate", default=True)}


def _llama3(scaling: Fields) -> dict[str, Any]:
    low, high = scaling.number("low_freq_factor", default=1.0), scaling.number("high_freq_factor", default=4.0)
    if high <= low:
        raise scaling.refusal("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
    return {"low_freq_factor": low, "high_freq_factor": high}
