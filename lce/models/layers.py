"""What the families share: the model around its layers, one layer's weights, and the operations on them.

A family declares its weights in two tables, one for the model and one for each layer. An entry maps our name to the
published one and to the shape, written in the words of `_sizes`:

    "q": ("self_attn.q_proj.weight", "query hidden")        the query heads' rows, [H * D, hidden]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lce.models.config import ModelConfig, check_layer_types
from lce.models.fields import Fields

# The attention hook: (layer, q [H, T, D], k [G, T, D], v [G, T, D]), all unrotated, to [H, T, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
WeightTable = Mapping[str, tuple[str, str]]


class Layer:
    """One decoder layer: its weights by our names, and the operations that a family builds its layer from."""

    def __init__(self, index: int, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.index = index
        self.config = config
        prefix = f"{index}."
        self.w = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Hidden states `[T, hidden]` to those after this layer; may write over `x`."""
        raise NotImplementedError

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.w[name], self.config.norm_eps)

    def project(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.w[name], self.w.get(f"{name}_bias"))

    def heads(self, name: str, x: Tensor) -> Tensor:
        """`x [T, hidden]` projected and split into heads: `[H, T, D]`, or `[G, T, D]`."""
        return self.project(name, x).view(len(x), -1, self.config.head_dim).transpose(0, 1)

    def merged(self, name: str, out: Tensor) -> Tensor:
        """The heads' outputs `[H, T, D]` side by side, projected to `[T, hidden]`."""
        return self.project(name, out.transpose(0, 1).flatten(1))

    def gated_mlp(self, x: Tensor) -> Tensor:
        """`down(silu(gate(x)) * up(x))`."""
        return self.project("down", F.silu(self.project("gate", x), inplace=True).mul_(self.project("up", x)))


class Model:
    """Embedding, layers, norm, head. A family derives from it and declares the attributes below.

    `defaults` holds transformers' values for keys that a config.json of this family may leave out. Weights are
    never written.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, object]]
    layer: ClassVar[type[Layer]]
    model_weights: ClassVar[WeightTable]
    layer_weights: ClassVar[WeightTable]
    unused: ClassVar[tuple[str, ...]] = ()  # patterns of published names that no model of the family uses

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.embed = weights["embed"]
        self.layers = [self.layer(i, config, weights) for i in range(config.n_layers)]
        self.final_norm = weights["norm"]
        self.head = weights.get("head", self.embed)

    def __call__(self, ids: Tensor, start: int, attend: Attend) -> Tensor:
        """Token ids `[T]` to the last layer's hidden states `[T, hidden]`; the first token has index `start`."""
        x = F.embedding(ids, self.embed)
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` to logits `[T, vocab]`, float32."""
        return linear(rms_norm(x, self.final_norm, self.config.norm_eps), self.head).to(torch.float32)

    @classmethod
    def read(cls, fields: Fields, folder: Path) -> ModelConfig:
        """The checked config of a checkpoint of this family. Raises ModelError if lce cannot run it."""
        fields = Fields(fields.where, fields.values, cls.defaults)
        config = cls.configure(ModelConfig.read(fields, folder, cls.architecture), fields)
        check_layer_types(fields, config)
        return config

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Adds to `config` what this family reads in its own way; the shared keys are already in it."""
        return config

    @classmethod
    def weights(cls, config: ModelConfig, stored: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Every weight of the model: our name to the published name and the shape.

        A product in `config.biases` has a bias beside its weight: `q_bias`, published as `self_attn.q_proj.bias`.
        `stored` are the names in the checkpoint. If the config ties the head to the embedding, but the checkpoint
        stores a head all the same, the stored one is used, as in transformers.
        """
        sizes = _sizes(config)
        table: dict[str, tuple[str, str]] = {"embed": cls.model_weights["embed"]}
        for i in range(config.n_layers):
            for name, (published, shape) in cls.layer_weights.items():
                table[f"{i}.{name}"] = f"model.layers.{i}.{published}", shape
                if name in config.biases:
                    bias = published.removesuffix("weight") + "bias"
                    table[f"{i}.{name}_bias"] = f"model.layers.{i}.{bias}", shape.split()[0]
        table["norm"] = cls.model_weights["norm"]
        if not config.tied or config.weight_prefix + cls.model_weights["head"][0] in stored:
            table["head"] = cls.model_weights["head"]
        return {
            name: (config.weight_prefix + published, tuple(sizes[word] for word in shape.split()))
            for name, (published, shape) in table.items()
        }


def _sizes(config: ModelConfig) -> dict[str, int]:
    """The words in which a weight table writes shapes."""
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "query": config.n_heads * config.head_dim,
        "key": config.n_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [T, in]` times `weight [out, in]` transposed, plus `bias [out]`. Time: O(T · in · out).

    In float32 on a CPU it calls oneDNN, which PyTorch uses only for narrower dtypes. On AMD processors oneDNN is about
    twice as fast as the MKL routine behind `torch.nn.functional.linear`, and as exact.
    """
    if _ONEDNN and x.dtype == torch.float32 and not x.is_cuda:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., D]` over its root mean square, times `weight [D]`; computed in float32 for any dtype.

    On a CPU it is written out, in place after one copy: PyTorch's own is several times slower there in bfloat16.
    """
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    out = x * scale if x.dtype == torch.float32 else x.float().mul_(scale)
    return out.mul_(weight).to(x.dtype)


def _onednn_works() -> bool:
    """Whether this PyTorch has the operator; it is not part of its public interface."""
    try:
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 8), torch.zeros(8, 8), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


_ONEDNN = _onednn_works()
