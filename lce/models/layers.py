"""The base of all families: the model around its layers, and a layer's weights with operations.

A family declares its weights in two tables, one for the model and one for each layer. An entry maps our name to the
published one and to the shape, written in the words of `Model.weights`:

    "q": ("self_attn.q_proj.weight", "query hidden")        the query heads' rows, [H * D, hidden]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lce.models.config import Fields, ModelConfig, check_layer_types
from lce.models.products import linear, rows_of
from lce.weights.packed import Scheme, all_schemes

# The attention hook: (layer, q [H, T, D], k [G, T, D], v [G, T, D]), all unrotated, to [H, T, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
WeightTable = Mapping[str, tuple[str, str]]


class Layer:
    """One decoder layer: its weights by our names, and the operations that a family builds its layer from."""

    def __init__(self, index: int, config: ModelConfig, weights: Mapping[str, Any]) -> None:
        self.index = index
        self.config = config
        prefix = f"{index}."
        self.w = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        self.biases = {name: self.w.get(f"{name}_bias") for name in self.w}
        self.eps = config.norm_eps
        self.device = next(w.device for w in self.w.values() if isinstance(w, Tensor))

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Turn hidden states `[T, hidden]` into those after this layer; may overwrite `x`."""
        raise NotImplementedError

    def project(
        self, name: str, x: Tensor, *, norm: str | None = None, gated: bool = False, onto: Tensor | None = None
    ) -> Tensor:
        """Multiply `x [T, in]` with a matrix, plus its bias if it has one, as `linear` does; `norm` names a weight."""
        w = self.w
        scale = None if norm is None else w[norm]
        return linear(x, w[name], self.biases[name], norm=scale, eps=self.eps, gated=gated, onto=onto)

    def heads(self, x: Tensor, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        """Project `x [T, hidden]`, normalised, to `q [H, T, D]`, `k v [G, T, D]`: views of one product."""
        config = self.config
        joined = self.project("qkv", x, norm=norm)
        if len(x) == 1:
            rows = joined.view(-1, 1, config.head_dim)
        else:
            rows = joined.view(len(x), -1, config.head_dim).transpose(0, 1)
        q, k, v = rows.split_with_sizes((config.n_heads, config.n_kv_heads, config.n_kv_heads))
        return q, k, v


class Model:
    """Embedding, layers, norm, head. A family derives from this class and declares the attributes below.

    `defaults` holds transformers' values for keys that a config.json of this family may leave out. Layers may be on
    several devices: hidden states are copied where the next layer is on another one.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, object]]
    layer: ClassVar[type[Layer]]
    model_weights: ClassVar[WeightTable]
    layer_weights: ClassVar[WeightTable]
    joins: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # matrices stacked in one tensor, by its name
    unused: ClassVar[tuple[str, ...]] = ()  # patterns of published names that no model of the family uses

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any]) -> None:
        self.config = config
        self.embed = weights["embed"]
        self.layers = [self.layer(i, config, weights) for i in range(config.n_layers)]
        self.final_norm = weights["norm"]
        self.head = weights.get("head", self.embed)
        devices = [layer.device for layer in self.layers]
        self.borders = {i: devices[i] for i in range(1, len(devices)) if devices[i] != devices[i - 1]}

    def __call__(self, ids: Tensor, indices: Tensor, attend: Attend) -> Tensor:
        """Turn token ids `[T]` at `indices [T]` of their texts into the last layer's hidden states `[T, hidden]`.

        The tokens may be of several texts. No shape and no branch depends on the values of either tensor.
        """
        x = rows_of(self.embed, ids, self.final_norm.dtype)
        borders = self.borders
        for layer in self.layers:
            if layer.index in borders:
                x = x.to(borders[layer.index])
            x = layer(x, attend)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits `[T, vocab]`, float32, of hidden states `[T, hidden]`."""
        return linear(x, self.head, norm=self.final_norm, eps=self.config.norm_eps).to(torch.float32)

    @classmethod
    def read(cls, fields: Fields, generation: Fields) -> ModelConfig:
        """Read the checked config of a checkpoint of this family. Raises ModelError if lce cannot run it."""
        fields = Fields(fields.where, fields.values, cls.defaults)
        config = cls.configure(ModelConfig.read(fields, generation, cls.architecture), fields)
        check_layer_types(fields, config)
        return config

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Add to `config` what this family reads in its own way; the shared keys are already in it."""
        return config

    @classmethod
    def weights(cls, config: ModelConfig, stored: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the published name and the shape of every weight, by our names.

        A product in `config.biases` has a bias beside its weight: `q_bias`, published as `self_attn.q_proj.bias`.
        `stored` are the names in the checkpoint. A stored head is used even if the config ties the head to the
        embedding, as in transformers.
        """
        sizes = {
            "vocab": config.vocab_size,
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "query": config.n_heads * config.head_dim,
            "key": config.n_kv_heads * config.head_dim,
            "head_dim": config.head_dim,
        }
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

    @classmethod
    def layer_of(cls, name: str, config: ModelConfig) -> int:
        """Return the layer whose device has a weight, by our name: 0 for the embedding, the last for the head."""
        index, dot, _ = name.partition(".")
        if dot:
            return int(index)
        return 0 if name == "embed" else config.n_layers - 1

    @classmethod
    def joined(cls, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Return, for every layer, the names of the joined matrices and biases by the name of the whole."""
        found = {}
        for whole, parts in cls.joins.items():
            kinds = ("", "_bias") if parts[0] in config.biases else ("",)
            assert len({part in config.biases for part in parts}) == 1, f"some of {parts} have a bias"
            for kind in kinds:
                for i in range(config.n_layers):
                    found[f"{i}.{whole}{kind}"] = tuple(f"{i}.{part}{kind}" for part in parts)
        return found

    @classmethod
    def schemes(cls, config: ModelConfig, scheme: Scheme, stored: Collection[str] = ()) -> dict[str, Scheme]:
        """Return the published names of the matrices that are rounded, with their schemes.

        Embeddings and the head have 8 bits: few bytes of a model, and much of the error.
        """
        table = cls.weights(config, stored)
        matrices = {name: published for name, (published, shape) in table.items() if len(shape) == 2}
        for_tokens = all_schemes()["int8"]
        return {published: for_tokens if name in ("embed", "head") else scheme for name, published in matrices.items()}
