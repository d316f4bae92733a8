"""What the families share: the model around its layers, one layer's weights, and the operations on them.

A family declares its weights in two tables, one for the model and one for each layer. An entry maps our name to the
published one and to the shape, written in the words of `_sizes`:

    "q": ("self_attn.q_proj.weight", "query hidden")        the query heads' rows, [H * D, hidden]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lce.kernels.cpu import elementwise
from lce.kernels.cpu.compiling import MOST_ROWS
from lce.kernels.cpu.elementwise import runs_on
from lce.kernels.cpu.numbers import STORED
from lce.kernels.cpu.products import product
from lce.kernels.cuda import launching
from lce.models.config import ModelConfig, check_layer_types
from lce.models.fields import Fields
from lce.profiling import timed
from lce.weights.quantised import LANES, SCHEMES, SCRATCH, QuantisedMatrix, Scheme, scratch_of

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
        """Hidden states `[T, hidden]` to those after this layer; may write over `x`."""
        raise NotImplementedError

    def project(
        self, name: str, x: Tensor, *, norm: str | None = None, gated: bool = False, onto: Tensor | None = None
    ) -> Tensor:
        """`x [T, in]` through a matrix and its bias, if it has one; `norm` names what normalises x: see `linear`."""
        w = self.w
        scale = None if norm is None else w[norm]
        return linear(x, w[name], self.biases[name], norm=scale, eps=self.eps, gated=gated, onto=onto)

    def heads(self, x: Tensor, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        """`x [T, hidden]`, normalised, to `q [H, T, D]`, `k v [G, T, D]`: views of one product."""
        config = self.config
        joined = self.project("qkv", x, norm=norm)
        if len(x) == 1:
            rows = joined.view(-1, 1, config.head_dim)
        else:
            rows = joined.view(len(x), -1, config.head_dim).transpose(0, 1)
        q, k, v = rows.split_with_sizes((config.n_heads, config.n_kv_heads, config.n_kv_heads))
        return q, k, v


class Model:
    """Embedding, layers, norm, head. A family derives from it and declares the attributes below.

    `defaults` holds transformers' values for keys that a config.json of this family may leave out. Weights are
    never written. Layers may be on several devices: hidden states are copied where the next layer is on another one.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, object]]
    layer: ClassVar[type[Layer]]
    model_weights: ClassVar[WeightTable]
    layer_weights: ClassVar[WeightTable]
    joins: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # matrices that lie one beneath the other, under one name
    unused: ClassVar[tuple[str, ...]] = ()  # patterns of published names that no model of the family uses

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any]) -> None:
        self.config = config
        self.embed = weights["embed"]
        self.layers = [self.layer(i, config, weights) for i in range(config.n_layers)]
        self.final_norm = weights["norm"]
        self.head = weights.get("head", self.embed)
        devices = [layer.device for layer in self.layers]
        self.borders = {i: devices[i] for i in range(1, len(devices)) if devices[i] != devices[i - 1]}

    def __call__(self, ids: Tensor, start: int | Tensor, attend: Attend) -> Tensor:
        """Token ids `[T]` to the last layer's hidden states `[T, hidden]`; the first token has index `start`.

        For one token the index may be a tensor `[1]` on the device: then nothing here depends on its value.
        """
        x = rows_of(self.embed, ids, self.final_norm.dtype)
        borders = self.borders
        for layer in self.layers:
            if layer.index in borders:
                x = x.to(borders[layer.index])
            x = layer(x, attend)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` to logits `[T, vocab]`, float32."""
        return linear(x, self.head, norm=self.final_norm, eps=self.config.norm_eps).to(torch.float32)

    @classmethod
    def read(cls, fields: Fields, generation: Fields) -> ModelConfig:
        """The checked config of a checkpoint of this family. Raises ModelError if lce cannot run it."""
        fields = Fields(fields.where, fields.values, cls.defaults)
        config = cls.configure(ModelConfig.read(fields, generation, cls.architecture), fields)
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

    @classmethod
    def layer_of(cls, name: str, config: ModelConfig) -> int:
        """The layer beside which a weight is, by our name: the first for the embedding, the last for the head."""
        index, dot, _ = name.partition(".")
        if dot:
            return int(index)
        return 0 if name == "embed" else config.n_layers - 1

    @classmethod
    def joined(cls, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """What `joins` says, for every layer and for biases: the name of each whole to the names of its parts."""
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
        """The published names of the matrices that are rounded, with their schemes.

        Embeddings and the head have 8 bits in any case: few bytes of a model, and much of the error.
        """
        finest = SCHEMES["int8"]
        in_one = {part for parts in cls.joins.values() for part in parts}
        found = {}
        for name, (published, shape) in cls.weights(config, stored).items():
            apart = name.rpartition(".")[2] not in in_one
            if len(shape) == 2 and (
                apart or all(size % LANES == 0 for size in (config.head_dim, config.intermediate_size))
            ):
                found[published] = finest if name in ("embed", "head") else scheme
        return found


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


@timed("products")
def linear(
    x: Tensor, weight: Any, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0,
    gated: bool = False, onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`x [T, in]` times `weight [out, in]` transposed, plus `bias [out]`. Time: O(T · in · out).

    With `norm [in]` x is normalised first, as `rms_norm` does. `gated` takes SiLU of the first half of the result times
    the second: `[T, out / 2]`. With `onto` the result is added to that tensor, in place. A few rows take a kernel that
    reads the weights at the speed of memory, and rounds once at the end; on a GPU it is one launch.
    """
    n = len(x)
    if isinstance(weight, QuantisedMatrix) and n <= MOST_ROWS:
        return weight.product(x.contiguous(), bias, norm=norm, eps=eps, gated=gated, onto=onto)
    if x.is_cpu and n <= MOST_ROWS and _plain(x, weight, onto):
        return product(x, weight, bias, norm=norm, eps=eps, gated=gated, onto=onto)
    if n <= launching.MOST_ROWS and launching.runs_on(x) and _plain(x, weight, onto):
        from lce.kernels.cuda import products

        return products.product(x, weight, bias, norm=norm, eps=eps, gated=gated, onto=onto)
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if onto is not None and x.is_cuda and bias is None and not gated and isinstance(weight, Tensor):
        return onto.addmm_(x, weight.T)  # one launch, which adds before it rounds
    out = _product_of_many(x, weight, bias)
    if gated:
        out = silu_mul(out)
    return out if onto is None else onto.add_(out)


def _plain(x: Tensor, weight: Tensor, onto: Tensor | None) -> bool:
    """Whether the kernel takes these tensors as they lie."""
    if x.dtype not in STORED or weight.dtype is not x.dtype or x.requires_grad or weight.requires_grad:
        return False
    return x.is_contiguous() and weight.is_contiguous() and (onto is None or onto.is_contiguous())


def rows_of(weight: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows `ids [T]` of a matrix, `[T, in]`."""
    return weight.rows(ids, dtype) if isinstance(weight, QuantisedMatrix) else F.embedding(ids, weight)


def _product_of_many(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """In float32 on a CPU by oneDNN, which PyTorch uses only for narrower dtypes. Rounded weights are unpacked.

    On AMD processors oneDNN is about twice as fast as the MKL routine behind `torch.nn.functional.linear`, and as
    exact.
    """
    if isinstance(weight, QuantisedMatrix):
        n_rows, size = weight.shape
        block = max(LANES, SCRATCH // (size * x.element_size()) // LANES * LANES)
        scratch = scratch_of(min(block, n_rows), size, x.dtype)
        if block >= n_rows:
            return _product_of_many(x, weight.unpacked(0, scratch), bias)
        whole = x.new_empty(len(x), n_rows)
        for first in range(0, n_rows, block):
            rows = weight.unpacked(first, scratch[: n_rows - first])
            part = None if bias is None else bias[first : first + len(rows)]
            whole[:, first : first + len(rows)] = _product_of_many(x, rows, part)
        return whole
    if _ONEDNN and x.dtype == torch.float32 and not x.is_cuda:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


@timed("norms")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., D]` over its root mean square, times `weight [D]`; computed in float32 for any dtype."""
    if runs_on(x):
        return elementwise.rms_norm(x, weight, eps)
    if launching.runs_on(x):
        from lce.kernels.cuda import elementwise as on_gpu

        return on_gpu.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_heads(q: Tensor, q_weight: Tensor, k: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm` of queries and of keys, `[heads, T, D]` each; on a GPU in one launch."""
    if launching.runs_on(q):
        from lce.kernels.cuda import elementwise as on_gpu

        return on_gpu.rms_norm_two(q, q_weight, k, k_weight, eps)
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)


@timed("activations")
def silu_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of `x [T, 2·D]` times the second half: `[T, D]`."""
    if runs_on(x):
        return elementwise.silu_mul(x)
    if launching.runs_on(x):
        from lce.kernels.cuda import elementwise as on_gpu

        return on_gpu.silu_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def merge_heads(out: Tensor) -> Tensor:
    """The heads' outputs `[H, T, D]` side by side, `[T, H · D]`; a view for one token."""
    n = out.shape[1]
    return out.reshape(1, -1) if n == 1 else out.transpose(0, 1).reshape(n, -1)


def _onednn_works() -> bool:
    """Whether this PyTorch has the operator; it is not part of its public interface."""
    try:
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 8), torch.zeros(8, 8), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


_ONEDNN = _onednn_works()
