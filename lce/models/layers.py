"""The base classes of all model families, and the families by name.

A family is one file of this package. The decorator `family` registers its class under the two names that a config.json
has for it: the `model_type`, and the class in `architectures`.

A family declares its weights in two tables, one for the model and one for each layer. An entry maps lce's name of a
weight to its name in published checkpoints and to its shape, in words to which `Model.weights` gives sizes:

    "q": ("self_attn.q_proj.weight", "query hidden")        the query heads' rows, [H * D, hidden]
"""

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

import lce.models
from lce.files import named
from lce.models.config import Fields, ModelConfig, RopeConfig, check_layer_types, check_supported, read_rope
from lce.models.products import Gate, linear, rms_norm, rows_of
from lce.weights.packed import ROUNDED, Scheme
from lce.weights.source import Source

# The attention hook takes (layer, q [H, T, D], k [G, T, D], v [G, T, D]), all unrotated, and returns [H, T, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
WeightTable = Mapping[str, tuple[str, str]]


class Layer:
    """A decoder layer: its weights `w` by lce's names, and operations from which families build their layers.

    `generated` says whether its tokens were generated, one for each text, or read: see `linear`.
    """

    generated = False

    def __init__(self, index: int, config: ModelConfig, weights: Mapping[str, Any]) -> None:
        self.index = index
        self.config = config
        prefix = f"{index}."
        self.w = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        self.biases = {name: self.w.get(f"{name}_bias") for name in self.w}
        self.eps = config.norm_eps
        self.dtype: torch.dtype = weights["norm"].dtype  # of what attention and products take and return
        self.device = next(w.device for w in self.w.values() if isinstance(w, Tensor))

    def of_generated(self) -> Self:
        """Return this layer for generated tokens. The weights are shared."""
        layer = copy.copy(self)
        layer.generated = True
        return layer

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states after this layer, `[T, hidden]`. May overwrite `x [T, hidden]`."""
        raise NotImplementedError

    def project(
        self, name: str, x: Tensor, *, norm: str | None = None, gate: Gate | None = None, onto: Tensor | None = None
    ) -> Tensor:
        """Multiply `x [T, in]` with the weight `name` and add its bias: see `linear`. `norm` names a norm's weight."""
        weight, bias, scale = self.w[name], self.biases[name], None if norm is None else self.w[norm]
        around: dict[str, Any] = {"eps": self.eps, "gate": gate, "onto": onto, "generated": self.generated}
        return linear(x, weight, bias, norm=scale, **around)

    def normed(self, x: Tensor, norm: str, onto: Tensor | None = None) -> Tensor:
        """Normalise x by a norm's name, to the layer's dtype; or add the result to `onto`: see `rms_norm`."""
        return rms_norm(x, self.w[norm], self.eps, self.dtype, onto)

    def heads(self, x: Tensor, norm: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project `x [T, hidden]`, normalised if `norm` is given, to views `q [H, T, D]` and `k v [G, T, D]`."""
        config, dim = self.config, self.config.head_dim
        joined = self.project("qkv", x, norm=norm)
        rows = joined.view(-1, 1, dim) if len(x) == 1 else joined.view(len(x), -1, dim).transpose(0, 1)
        q, k, v = rows.split_with_sizes((config.n_heads, config.n_kv_heads, config.n_kv_heads))
        return q, k, v


class Model:
    """A model: embedding, layers, norm, head. A family derives from this class and sets its class attributes.

    `defaults` holds transformers' values for the keys that a config.json of this family may leave out. `implements` are
    the keys of config.json that this family reads and most families refuse. Layers may be on several devices. Then
    hidden states are copied before a layer that is on another device than the layer before it.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, object]]
    implements: ClassVar[Collection[str]] = ()
    activation: ClassVar[str] = "silu"  # of the MLP's gate, as config.json calls it
    layer: ClassVar[type[Layer]]
    model_weights: ClassVar[WeightTable]
    layer_weights: ClassVar[WeightTable]
    joins: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # a joined matrix's name -> the names of the stacked matrices
    wide: ClassVar[tuple[str, ...]] = ()  # weights of a layer that are float32 in a model of any dtype
    unused: ClassVar[tuple[str, ...]] = ()  # name patterns of published weights that the family ignores

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any]) -> None:
        self.config = config
        self.embed = weights["embed"]
        self.layers = [self.layer(i, config, weights) for i in range(config.n_layers)]
        self._of_generated = [layer.of_generated() for layer in self.layers]
        self.final_norm = weights["norm"]
        self.head = weights.get("head", self.embed)
        devices = [layer.device for layer in self.layers]
        self.borders = {i: devices[i] for i in range(1, len(devices)) if devices[i] != devices[i - 1]}

    def __call__(self, x: Tensor, attend: Attend, generated: bool = False) -> Tensor:
        """Return the last layer's hidden states `[T, hidden]` for the first ones, `x [T, hidden]`. May overwrite x.

        The tokens were read, all in one text, or `generated`, at most `SHARED_ROWS` of them in several texts. `attend`
        is what `attending` returns.
        """
        for layer in self._of_generated if generated else self.layers:
            if layer.index in self.borders:
                x = x.to(self.borders[layer.index])
            x = layer(x, attend)
        return x

    def attending(self, attend: Attend, indices: Tensor) -> Attend:
        """Return `attend` for tokens at `indices [T]` in their texts, as a family's own form of attention has it.

        No shape and no branch depends on the values of `indices`.
        """
        return attend

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the first hidden states `[T, hidden]`, of token ids `[T]`."""
        return rows_of(self.embed, ids, self.final_norm.dtype)

    def logits(self, x: Tensor, drawn: bool = False) -> Tensor:
        """Return the logits `[T, vocab]` of hidden states `[T, hidden]`: float32, and not rounded to another dtype.

        `drawn` says that a token is drawn from each row, of at most `SHARED_ROWS`: their bits do not depend on T.
        """
        norm, eps = self.final_norm, self.config.norm_eps
        return linear(x, self.head, norm=norm, eps=eps, out_dtype=torch.float32, generated=drawn)

    @classmethod
    def read(cls, fields: Fields, generation: Fields) -> ModelConfig:
        """Read the checked config of a checkpoint of this family. Raises ModelError if lce cannot run it."""
        fields = Fields(fields.where, fields.values, cls.defaults, cls.implements)
        check_supported(fields, cls.activation)
        config = cls.configure(ModelConfig.read(fields, generation, cls.architecture, cls.rope), fields)
        if fields.values.get("layer_types"):
            check_layer_types(fields, config)
        return config

    @classmethod
    def rope(cls, fields: Fields, head_dim: int) -> RopeConfig:
        return read_rope(fields, head_dim)

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return `config` plus the fields that this family reads itself; `config` has those that all families share."""
        return config

    @classmethod
    def weights(cls, config: ModelConfig, stored: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the name in published checkpoints and the shape of every weight, by lce's name.

        A weight in `config.biases` has a bias: `q` has `q_bias`. As in transformers, a head among the `stored` names is
        used even if the config ties the head to the embedding.
        """
        dim, inner = config.head_dim, config.intermediate_size
        query, key = config.n_heads * dim, config.n_kv_heads * dim
        sizes = {"vocab": config.vocab_size, "hidden": config.hidden_size, "head_dim": dim}
        sizes |= {"query": query, "key": key, "qkv": query + 2 * key, "inner": inner, "gate_up": 2 * inner}
        table = cls.table(config, stored)
        return {name: (published, tuple(sizes[word] for word in words)) for name, (published, words) in table.items()}

    @classmethod
    def table(cls, config: ModelConfig, stored: Collection[str] = ()) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return what `weights` returns, but with the words for sizes in place of the sizes."""
        table: dict[str, tuple[str, str]] = {"embed": cls.model_weights["embed"]}
        for i in range(config.n_layers):
            for name, (published, shape) in cls.layer_weights.items():
                table[f"{i}.{name}"] = f"model.layers.{i}.{published}", shape
                if name in config.biases:
                    bias = published.removesuffix("weight") + "bias"
                    table[f"{i}.{name}_bias"] = f"model.layers.{i}.{bias}", shape.split()[0]
        table["norm"], prefix = cls.model_weights["norm"], config.weight_prefix
        if not config.tied or prefix + cls.model_weights["head"][0] in stored:
            table["head"] = cls.model_weights["head"]
        return {name: (prefix + published, tuple(shape.split())) for name, (published, shape) in table.items()}

    @classmethod
    def layer_of(cls, name: str, config: ModelConfig) -> int:
        """Return the layer on whose device a weight is: 0 for the embedding, the last for final norm and head."""
        index, dot, _ = name.partition(".")
        return int(index) if dot else 0 if name == "embed" else config.n_layers - 1

    @classmethod
    def is_wide(cls, name: str) -> bool:
        """Return whether a weight is float32 in a model of any dtype."""
        return name.partition(".")[2] in cls.wide

    @classmethod
    def joined(cls, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Map the name of each joined matrix or bias to the names of the matrices or biases that it is made of."""
        found = {}
        for whole, parts in cls.joins.items():
            assert len({part in config.biases for part in parts}) == 1, f"some of {parts} have a bias"
            for kind in ("", "_bias") if parts[0] in config.biases else ("",):
                for i in range(config.n_layers):
                    found[f"{i}.{whole}{kind}"] = tuple(f"{i}.{part}{kind}" for part in parts)
        return found

    @classmethod
    def schemes(cls, config: ModelConfig, scheme: Scheme, stored: Collection[str] = ()) -> dict[str, Scheme]:
        """Return each matrix' scheme by published name; 8 bits for embedding and head, where fewer cause much error."""
        return {
            published: ROUNDED["int8"] if name in ("embed", "head") else scheme
            for name, (published, shape) in cls.weights(config, stored).items()
            if len(shape) == 2
        }


_FAMILIES: dict[str, type[Model]] = {}
F = TypeVar("F", bound=type[Model])


def family(model_type: str, architecture: str) -> Callable[[F], F]:
    """Return a decorator that registers a class under the `model_type` and architecture of its config.json."""

    def enter(cls: F) -> F:
        assert model_type not in _FAMILIES, f"two families are called {model_type}"
        cls.model_type, cls.architecture = model_type, architecture
        _FAMILIES[model_type] = cls
        return cls

    return enter


@functools.cache
def families() -> Mapping[str, type[Model]]:
    """Return all families by `model_type`, in alphabetical order."""
    for module in pkgutil.iter_modules(lce.models.__path__):
        importlib.import_module(f"{lce.models.__name__}.{module.name}")
    return dict(sorted(_FAMILIES.items()))


def read_config(source: Source) -> ModelConfig:
    """Return the config of a model. Raises `ModelError` if lce cannot run the model or cannot trust its files."""
    fields = Fields(named(source.where("config.json")), source.config)
    generation = Fields(named(source.where("generation_config.json")), source.generation_config)
    return family_of(fields).read(fields, generation)


def model_class(config: ModelConfig) -> type[Model]:
    """Return the class that builds the model of `config`."""
    return next(cls for cls in families().values() if cls.architecture == config.architecture)


def family_of(fields: Fields) -> type[Model]:
    """Return the family that a config names in `architectures` or `model_type`. If both are given they must agree."""
    by_type = families()
    by_architecture = {cls.architecture: cls for cls in by_type.values()}
    remedy = "use a checkpoint of one of these"  # and not a similar name: mixtral is no mistral
    listed, model_type = fields.names("architectures"), fields.text("model_type")
    if model_type is not None and model_type not in by_type:
        raise fields.refusal("model_type", f"a supported one: {', '.join(by_type)}", remedy)
    if listed[0] not in by_architecture if listed else model_type is None:
        raise fields.refusal("architectures", f"a supported one: {', '.join(by_architecture)}", remedy)
    found = by_architecture[listed[0]] if listed else by_type[model_type or ""]
    if model_type not in (None, found.model_type):
        raise fields.refusal("model_type", f"{found.model_type!r}, as architectures says {found.architecture}")
    return found
