"""The fields of config.json that all model families share, checked in full; `layers.family_of` finds the family.

Two published layouts are read. Configs of transformers 4 have `rope_theta`, `rope_scaling` and `torch_dtype`; configs
of transformers 5 have `rope_parameters` and `dtype`. An optional key that is missing takes transformers' default for
the family. A missing size is a ModelError, and so is every value that lce cannot run. Nothing here imports torch.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lce.errors import ModelError, shown
from lce.sizes import MOST

ROPE_KINDS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
Factor = float | Literal["auto"]  # "auto" follows the length that is announced for a context
LAYER_TYPES = ("full_attention", "sliding_attention")
SLIDING_KEYS = ("layer_types", "rope_parameters")  # what a family implements whose layers have `sliding_kinds`
_SCALING_NUMBERS = {  # keys of the numbers that only one kind of RoPE scaling has
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}

# Keys of some families' configs that change what a model computes, each with the values that change nothing. A model
# with any other value is refused, unless its family implements the key.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys("num_local_experts num_experts n_routed_experts moe_num_experts use_qk_norm qk_norm".split(), (0,)),
    **dict.fromkeys("no_rope_layer_interval attn_temperature_tuning attn_output_gate norms_plus_one".split(), (0,)),
    **dict.fromkeys("alibi parallel_attn use_parallel_residual use_mrope use_bidirectional_attention".split(), (0,)),
    **dict.fromkeys("final_logit_softcapping attn_logit_softcapping query_pre_attn_scalar clip_qkv".split(), ()),
    **dict.fromkeys("rope_local_base_freq attention_multiplier scale_depth attention_chunk_size".split(), ()),
    "sliding_window_pattern": (),
    **dict.fromkeys("logit_scale logits_scaling embedding_multiplier residual_multiplier scale_emb".split(), (1,)),
    **dict.fromkeys(("no_rope_layers", "cross_attention_layers"), ([],)),
}
# The least and the largest value of each number in config.json. No published model comes near these limits: a value
# beyond them means that the file is damaged or hostile.
_RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 1024),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), (1, 4096)),
    "head_dim": (1, 2**14),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), (1, 2**30)),
    "rms_norm_eps": (1e-20, 1),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), (2, 10**15)),
    "factor": (1, 10**6),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), (1e-6, 10**6)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), (1e-6, 10**6)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0, 10**6)),
    "partial_rotary_factor": (0, 1),
}
_REMEDY = "correct the file or download the checkpoint again"


@dataclass(frozen=True)
class Fields:
    """A JSON object in a file, read by key. A wrong value raises ModelError.

    A key that is missing or null takes its value from `defaults`; only `optional_integer` returns None for a null.
    `within` gives the limits of a key that only one family reads. `where` names the file in messages. The family reads
    the keys in `implements`, which others refuse; with "rope_parameters", that section has an object for each of
    `LAYER_TYPES`.
    """

    where: str
    values: Mapping[str, object]
    defaults: Mapping[str, object] = field(default_factory=dict)
    implements: Collection[str] = ()

    def refusal(self, key: str, expected: str, remedy: str = _REMEDY) -> ModelError:
        """Return the error that says that the value under `key` is wrong, what was `expected`, and a `remedy`."""
        default = f", which means {shown(self.defaults[key])}" if key in self.defaults else ""
        got = f"is {shown(self.values[key])}" if key in self.values else f"is missing{default}"
        return ModelError(f"{self.where}: {key} {got}; expected {expected}; {remedy}")

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key, self.defaults.get(key)) is None else self.integer(key)

    def integer(self, key: str, within: tuple[int, int] | None = None) -> int:
        return int(self.number(key, within=within, kind=int))

    def number(
        self, key: str, default: float | None = None, within: tuple[float, float] | None = None, kind: type = float
    ) -> float:
        value: Any = self._filled(key, default)
        low, high = within or _RANGES[key]
        if type(value) not in (int, kind) or not low <= value <= high:  # `type`, because a bool is an instance of int
            raise self.refusal(key, f"a {'whole ' if kind is int else ''}number from {low} to {high}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._filled(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def _filled(self, key: str, default: object = None) -> object:
        """Return the value under `key`, or the default of a key that is missing or null."""
        value = self.values.get(key)
        return self.defaults.get(key, default) if value is None else value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, "a string")
        return value

    def names(self, key: str) -> list[str]:
        """Return the list of strings under `key`; an empty list for a missing key."""
        listed = [] if self.values.get(key) is None else self.values[key]
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise self.refusal(key, "a list of names")
        return listed

    def numbers(self, key: str, n: int, within: tuple[float, float]) -> tuple[float, ...]:
        """Return the list of n numbers under `key`."""
        listed, (low, high) = self.values.get(key), within
        found = listed if isinstance(listed, list) else []
        if len(found) != n or not all(type(number) in (int, float) and low <= number <= high for number in found):
            raise self.refusal(key, f"{n} numbers from {low:g} to {high:g}")
        return tuple(map(float, found))

    def section(self, key: str, part: str | None = None) -> "Fields":
        """Return the JSON object under `key`, which must contain no other object; an empty one for a missing key.

        With `part`, the value under `key` has objects by layer type, and the object of that type is returned.
        """
        value = self._filled(key, {})
        if part is not None:
            if not isinstance(value, dict) or not value.keys() <= {*LAYER_TYPES}:
                raise self.refusal(key, f"null or an object for each of {', '.join(LAYER_TYPES)}")
            return Fields(f"{self.where}: {key}", value).section(part)
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            raise self.refusal(key, "null or one flat object for all layers")
        return Fields(f"{self.where}: {key}", value)


@dataclass(frozen=True)
class RopeConfig:
    """The base `theta` of the rotary position embedding, and the scaling that stretches the model's window.

    A `factor` of "auto" is the smallest that the length announced for a context needs: see `fitted`. `original_window`
    is the window before scaling; None means the model's window. The fields from `attention_factor` to `truncate` belong
    to YaRN, the last two to Llama 3.1.
    """

    kind: str = "none"
    theta: float = 10000.0
    factor: Factor = 1.0
    original_window: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length that is announced for a context."""
        return self.kind in ("dynamic", "longrope") or self.factor == "auto"

    def fitted(self, window: int, length: int) -> "RopeConfig":
        """Return this scaling for texts of `length` tokens, where "auto" is `length` over `window`, and at least 1.

        With that factor the base of `ntk` is the base of `dynamic` with a factor of 1, so `dynamic` becomes `ntk`.
        Example: for a window of 8,192 and 20,480 tokens the factor is 2.5.
        """
        if self.factor != "auto":
            return self
        kind, needed = "ntk" if self.kind == "dynamic" else self.kind, length / (self.original_window or window)
        return replace(self, kind=kind, factor=max(1.0, needed))

    def reach(self, window: int) -> int:
        """Return how many positions a model with this scaling can be trusted on.

        As in vLLM, this is the factor times the window before scaling, but at least `window`; with "auto" any number. A
        config's llama3 scaling promises nothing beyond: Llama 3.2, trained on 131,072, has a factor of 32 over 8,192.
        """
        if self.kind == "none" or (self.kind == "llama3" and self.original_window):
            return window
        scaled = MOST if self.factor == "auto" else int((self.original_window or window) * self.factor + 1e-6)
        return max(window, scaled)


@dataclass(frozen=True)
class LongRope(RopeConfig):
    """LongRoPE (Ding et al., 2024): a divisor for each frequency.

    `long_factor` has the divisors for texts longer than `original_window`, `short_factor` those for other texts. The
    first `rotary_dim` channels of a head are rotated.
    """

    rotary_dim: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerKind:
    """A layer's kind of attention: its window and its RoPE, where these differ from the model's.

    A layer with a `sliding_window` attends that many tokens, the query included, whatever the method; methods act on
    the other layers. `rope` is the layer's own RoPE; None means the model's. A layer not `rotated` uses no RoPE.
    """

    sliding_window: int | None = None
    rope: RopeConfig | None = None
    rotated: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes, window and RoPE, and the values that its family adds. Only `read` checks the values.

    `biases` lists the weights that have a bias, by lce's names ("q", "down"). `sliding_window` is None if every query
    attends every earlier key. `layer_kinds` has the kind of each layer; it is empty if all layers are alike. `extra`
    holds numbers that only the model's own family reads. `dtype` is the dtype in config.json, if any. `eos_ids` are the
    tokens that end a text. `weight_prefix` begins the name of every weight of the model in its checkpoint; `unused` are
    patterns of the names of other weights. `published` is config.json, `generation` generation_config.json.
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
    layer_kinds: tuple[LayerKind, ...] = field(default=(), repr=False)
    extra: Mapping[str, float] = field(default_factory=dict, hash=False)
    dtype: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    weight_prefix: str = ""
    unused: tuple[str, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    generation: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(
        cls, fields: Fields, generation: Fields, architecture: str, rope: Callable[[Fields, int], RopeConfig]
    ) -> "ModelConfig":
        """Read what all families share, with the family's defaults; `rope` reads RoPE, for a head dimension."""
        n_heads, n_kv_heads, head_dim = _heads(fields)
        vocab_size = fields.integer("vocab_size")
        announced = fields.integer("max_position_embeddings")
        dual_chunk = fields.section("dual_chunk_attention_config")  # has the trained window; `announced` is larger
        bos_ids = _special_tokens("bos_token_id", (fields, generation), vocab_size)
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
            rope=rope(fields, head_dim),
            dtype=_dtype(fields),
            bos_id=bos_ids[0] if bos_ids else None,
            eos_ids=_special_tokens("eos_token_id", (generation, fields), vocab_size),
            published=fields.values,
            generation=generation.values,
        )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer. A kind with a sliding window has the checkpoint's RoPE, which no option scales."""
        found = self.layer_kinds or (LayerKind(),) * self.n_layers
        return tuple(replace(x, rope=x.rope or self.rope) if x.sliding_window is not None else x for x in found)

    @property
    def sliding_layers(self) -> frozenset[int]:
        """The layers with a sliding window of their own, in which no method acts."""
        return frozenset(layer for layer, kind in enumerate(self.layer_kinds) if kind.sliding_window is not None)

    @property
    def acting_layers(self) -> tuple[int, ...]:
        """The layers in which methods act: all but the sliding ones."""
        return tuple(layer for layer in range(self.n_layers) if layer not in self.sliding_layers)

    def dual_chunk(self, path: object) -> tuple[int, int] | None:
        """Return the chunk size of Dual Chunk Attention, and the position of a query for keys of older chunks.

        They are the values with which Qwen serves its models: a chunk has `chunk_size - local_size` tokens, and the
        position is `chunk_size`, or the last one of two successive chunks if that is less. None for a config without
        `dual_chunk_attention_config`. `path` is named in the error.
        """
        if (found := self.published.get("dual_chunk_attention_config")) is None:
            return None
        size, kept = found.get("chunk_size"), found.get("local_size")
        if not isinstance(size, int) or not isinstance(kept, int) or not 0 <= kept < size:
            expected = "a chunk_size and a smaller local_size; give -o chunk_size=N"
            raise ModelError(f"{path}: dual_chunk_attention_config is {shown(found)}; expected {expected}")
        return size - kept, min(size, 2 * (size - kept) - 1)

    def identity(self, fingerprint: str) -> str:
        """Return a SHA-256 of the weights' fingerprint and of all that changes results. Saved contexts have it."""
        same = replace(self, dtype=None, bos_id=None, eos_ids=(), weight_prefix="", unused=(), published={})
        kinds = f" {self.layer_kinds!r}" if self.layer_kinds else ""
        return hashlib.sha256(f"{fingerprint} {same!r}{kinds}".encode()).hexdigest()


def rope_section(fields: Fields) -> Fields:
    """Return the config's RoPE scaling, of layers with full attention. Raises ModelError if its two sections differ."""
    part = LAYER_TYPES[0] if "rope_parameters" in fields.implements else None
    older, newer = fields.section("rope_scaling"), fields.section("rope_parameters", part)
    if not older.values or not fields.values.get("rope_parameters"):
        return older if older.values else newer
    kinds = {kind_of(older), kind_of(newer)} - {None, ""}
    shared = (older.values.keys() & newer.values.keys()) - {"rope_type", "type"}
    differing = ["rope_type"] if len(kinds) > 1 else []
    differing += sorted(key for key in shared if older.values[key] != newer.values[key])
    if differing:
        raise fields.refusal("rope_parameters", f"the same {differing[0]} as in rope_scaling, {shown(older.values)}")
    return Fields(older.where, {**newer.values, **older.values})


def check_layer_types(fields: Fields, config: ModelConfig) -> None:
    """Raise ModelError if `layer_types` contradicts the rest of the config, or if the family knows no such layers."""
    windows = [kind.sliding_window for kind in config.layer_kinds] or [config.sliding_window] * config.n_layers
    own = [LAYER_TYPES[window is not None] for window in windows]
    kinds = layer_types(fields, own)
    if len(set(kinds)) > len(set(own)):
        expected = f"one kind of attention in all layers, {' or '.join(LAYER_TYPES)}"
        raise fields.refusal("layer_types", expected, "use another checkpoint")
    if kinds != own:
        raise fields.refusal("layer_types", f"{own[0]} in all layers, as the sliding window says")


def layer_types(fields: Fields, default: list[str]) -> list[str]:
    """Return the type of each layer, one of `LAYER_TYPES`: as the config lists them, else as in `default`."""
    kinds = fields.names("layer_types") or default
    if len(kinds) != len(default):
        raise fields.refusal("layer_types", f"one for each of the {len(default)} layers")
    if not {*kinds} <= {*LAYER_TYPES}:
        alike = "" if "layer_types" in fields.implements else "one kind of attention in all layers, "
        raise fields.refusal("layer_types", alike + " or ".join(LAYER_TYPES), "use another checkpoint")
    return kinds


def check_supported(fields: Fields, activation: str) -> None:
    """Raise ModelError if a config has a value that lce does not implement, or not in the family of `fields`."""
    for key in ("quantization_config", "compression_config"):
        value = fields.values.get(key)
        if value is not None and not (isinstance(value, Mapping) and value.get("quant_method") == "lce"):
            remedy = "use the checkpoint before its quantization"
            raise fields.refusal(key, f"plain weights in {', '.join(DTYPES)}", remedy)
    same = ("silu", "swish") if activation == "silu" else (activation,)
    for key in ("hidden_act", "hidden_activation"):
        if fields.text(key) not in (None, *same):
            raise fields.refusal(key, f"{activation!r}, the only activation of this family", "use another checkpoint")
    for key, neutral in _UNSUPPORTED.items():
        value = fields.values.get(key)
        if value is not None and value not in neutral and key not in fields.implements:
            expected = " or ".join(["null", *map(str, neutral)])
            raise fields.refusal(key, f"{expected}: lce does not implement it", "use another checkpoint")


def _heads(fields: Fields) -> tuple[int, int, int]:
    n_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    n_kv_heads = fields.optional_integer("num_key_value_heads") or n_heads
    if n_heads % n_kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads, which is {n_heads}")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None and hidden_size % n_heads:
        raise fields.refusal("hidden_size", f"a multiple of num_attention_heads, {n_heads}, or an explicit head_dim")
    head_dim = head_dim or hidden_size // n_heads
    if head_dim % 2:
        raise fields.refusal("head_dim", f"an even number, because RoPE rotates pairs (it would be {head_dim})")
    return n_heads, n_kv_heads, head_dim


def _dtype(fields: Fields) -> str | None:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    name = (fields.text(key) or "").removeprefix("torch.")
    if name not in ("", *DTYPES):
        raise fields.refusal(key, f"one of {', '.join(DTYPES)}", "use a checkpoint in one of these")
    return name or None


def _special_tokens(key: str, files: Sequence[Fields], vocab_size: int) -> tuple[int, ...]:
    """Return the token ids under `key` in all `files`; if there are none, the defaults of files that lack the key."""
    found: dict[int, None] = {}
    for fields in files:
        value: Any = fields.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise fields.refusal(key, f"token ids below the vocab_size of {vocab_size}")
        found |= dict.fromkeys(ids)
    defaults = [fields.defaults[key] for fields in files if key in fields.defaults and key not in fields.values]
    return tuple(found) or tuple(token for token in defaults if isinstance(token, int) and token < vocab_size)


def read_rope(fields: Fields, head_dim: int, scaling: Fields | None = None, theta: float | None = None) -> RopeConfig:
    """Read a RoPE from a section of the config: `scaling`, by default the model's. Its base is `theta` if not there."""
    scaling = scaling or rope_section(fields)
    kind = kind_of(scaling)
    if kind is None and scaling.values.get("factor") is not None:
        raise scaling.refusal("rope_type", f"the kind of scaling that factor belongs to: {', '.join(ROPE_KINDS)}")
    kind = "none" if kind in (None, "default") else kind
    if kind not in ROPE_KINDS:
        key, expected = "rope_type" if "rope_type" in scaling.values else "type", ", ".join(ROPE_KINDS)
        raise scaling.refusal(key, f"a supported scaling: {expected}", "use a checkpoint with one of these")
    for section in (fields, scaling):
        if section.number("partial_rotary_factor", default=1.0) != 1.0:
            raise section.refusal("partial_rotary_factor", "1.0: lce rotates whole heads")
    theta = scaling.number("rope_theta", default=theta or fields.number("rope_theta", default=10000.0))
    return RopeConfig(theta=theta) if kind == "none" else _scaled(kind, fields, scaling, head_dim, theta)


def _scaled(kind: str, fields: Fields, scaling: Fields, head_dim: int, theta: float) -> RopeConfig:
    if kind in ("ntk", "dynamic") and head_dim < 4:
        raise fields.refusal("head_dim", f"4 or more for rope scaling {kind!r} (it would be {head_dim})")
    original = fields.optional_integer("original_max_position_embeddings")
    original = original or scaling.optional_integer("original_max_position_embeddings")
    window = fields.integer("max_position_embeddings")
    implied = max(1.0, window / original) if kind == "yarn" and original else None
    factor = scaling.number("factor", default=implied)
    if kind in ("linear", "dynamic"):  # as in transformers, which reads only max_position_embeddings here
        original = None
    given = [key for key in _SCALING_NUMBERS.get(kind, ()) if scaling.values.get(key) is not None]
    own: dict[str, Any] = {key: scaling.number(key) for key in given}
    if kind == "yarn":
        own["truncate"] = scaling.flag("truncate", default=True)
    rope = RopeConfig(kind, theta, factor, original, **own)
    if rope.beta_fast < rope.beta_slow:
        raise scaling.refusal("beta_fast", f"at least beta_slow, which is {rope.beta_slow:g}")
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise scaling.refusal("high_freq_factor", f"more than low_freq_factor, which is {rope.low_freq_factor:g}")
    return rope


def kind_of(scaling: Fields) -> str | None:
    """Return the kind of RoPE scaling: the value of `rope_type`, or of `type` in older files."""
    kind, older = scaling.text("rope_type"), scaling.text("type")
    if kind is not None and older is not None and kind != older:
        raise scaling.refusal("rope_type", f"the same as type, which is {shown(older)}")
    return kind or older


def sliding_kinds(fields: Fields, config: ModelConfig, interval: int, theta: float) -> tuple[LayerKind, ...]:
    """Return the kind of each layer: a sliding window with its own RoPE, or full attention with the model's RoPE.

    `layer_types` says which layers are which; without it, one of `interval` layers has full attention, the last one.
    `theta` is the base of the RoPE of sliding windows, unless `rope_parameters` has one. `rope_scaling` does not apply.
    """
    full, sliding = LAYER_TYPES
    types = layer_types(fields, [full if (i + 1) % interval == 0 else sliding for i in range(config.n_layers)])
    window = fields.optional_integer("sliding_window")
    if window is None and sliding in types:
        raise fields.refusal("sliding_window", f"a number of tokens, as some layers have {sliding}")
    rope = read_rope(fields, config.head_dim, fields.section("rope_parameters", sliding), theta)
    return tuple(LayerKind(window, rope) if kind == sliding else LayerKind() for kind in types)
