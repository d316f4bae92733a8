"""Phi 3, Phi 3.5, Phi 4 and Phi 4-mini (Abdin et al., 2024): Llama's architecture with joined matrices and LongRoPE."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lce.models.config import Fields, LongRope, ModelConfig, RopeConfig, kind_of, read_rope, rope_section
from lce.models.layers import Attend, family
from lce.models.llama import Llama

NAMES = ("longrope", "su", "yarn")  # LongRoPE in config.json; the last two in older ones, as in transformers


@family("phi3", "Phi3ForCausalLM")
class Phi3(Llama):
    """Llama whose matrices for q, k and v are stored as one, as are gate and up; some models have a sliding window.

    LongRoPE divides frequencies by `long_factor` if the length announced for a context is more than
    `original_max_position_embeddings`, else by `short_factor`. The divisors never change under cached keys.

    Heads may rotate their first `rotary_dim` channels alone. RoPE turns channel i with channel i + D/2, and multiplies
    all channels by LongRoPE's factor. So channels are put in an order in which those that rotate together are D/2
    apart, and the others are divided by the factor before.
    """

    defaults = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    }
    layer_weights = {
        "attention_norm": Llama.layer_weights["attention_norm"],
        "qkv": ("self_attn.qkv_proj.weight", "qkv hidden"),
        "o": Llama.layer_weights["o"],
        "mlp_norm": Llama.layer_weights["mlp_norm"],
        "gate_up": ("mlp.gate_up_proj.weight", "gate_up hidden"),
        "down": Llama.layer_weights["down"],
    }
    joins: ClassVar[dict[str, tuple[str, ...]]] = {}  # they are stored joined

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any]) -> None:
        super().__init__(config, weights)
        rope, dim = config.rope, config.head_dim
        rotary = rope.rotary_dim if isinstance(rope, LongRope) else dim
        self.is_partial = rotary < dim
        half, middle, channels = rotary // 2, (rotary + dim) // 2, torch.arange(dim)
        order = torch.cat((channels[:half], channels[rotary:middle], channels[half:rotary], channels[middle:]))
        factors = torch.where(order < rotary, 1.0, 1 / (rope.attention_factor or 1.0)).to(self.final_norm.dtype)
        self.ordering = [(order.to(layer.device), factors.to(layer.device)) for layer in self.layers]

    def attending(self, attend: Attend, indices: Tensor) -> Attend:
        def attend_ordered(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            order, factors = self.ordering[layer]
            q, k = (heads.index_select(-1, order).mul_(factors) for heads in (q, k))
            return attend(layer, q, k, v)

        return attend_ordered if self.is_partial else attend

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        return replace(config, sliding_window=fields.optional_integer("sliding_window"))

    @classmethod
    def rope(cls, fields: Fields, head_dim: int) -> RopeConfig:
        scaling = rope_section(fields)
        share = scaling.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
        scaled = kind_of(scaling) in NAMES
        if not scaled and share == 1:
            return read_rope(fields, head_dim)
        rotary, window = int(head_dim * share), fields.integer("max_position_embeddings")
        if not scaled and kind_of(scaling) not in (None, "default"):
            key = "rope_type" if "rope_type" in scaling.values else "type"
            raise scaling.refusal(key, "longrope, as heads are rotated in part")
        if rotary < 2 or rotary % 2:
            raise fields.refusal("partial_rotary_factor", f"an even number of the {head_dim} channels of a head")
        original = fields.integer("original_max_position_embeddings")
        factor = scaling.number("factor", default=max(1.0, window / original)) if scaled else 1.0
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = (
            scaling.numbers(key, rotary // 2, (1e-3, 1e6)) if scaled else (1.0,) * (rotary // 2)
            for key in ("short_factor", "long_factor")
        )
        theta = scaling.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
        factors = theta, factor, original, scaling.number("attention_factor", default=scale)
        return LongRope("longrope", *factors, rotary_dim=rotary, short_factor=short, long_factor=long)
