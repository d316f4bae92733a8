"""The model families by name.

A family is one file of this package. The decorator `family` registers its class under the two names that a config.json
has for it: the `model_type`, and the class in `architectures`. Adding a family takes one new file.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import lce.models
from lce.files import named
from lce.models.config import Fields, ModelConfig

if TYPE_CHECKING:
    from lce.models.layers import Model
    from lce.weights.source import Source

_FAMILIES: dict[str, type[Model]] = {}
F = TypeVar("F", bound="type[Model]")


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
    """Return the family that a config names in `architectures` or `model_type`. If both are given they must agree.

    The error for an unknown name lists the supported names and suggests none of them: weights of families with similar
    names (mixtral, mistral) are not interchangeable.
    """
    by_type = families()
    by_architecture = {cls.architecture: cls for cls in by_type.values()}
    remedy = "use a checkpoint of one of these"
    listed, model_type = fields.names("architectures"), fields.text("model_type")
    if model_type is not None and model_type not in by_type:
        raise fields.refusal("model_type", f"a supported one: {', '.join(by_type)}", remedy)
    if listed[0] not in by_architecture if listed else model_type is None:
        raise fields.refusal("architectures", f"a supported one: {', '.join(by_architecture)}", remedy)
    found = by_architecture[listed[0]] if listed else by_type[model_type or ""]
    if model_type not in (None, found.model_type):
        raise fields.refusal("model_type", f"{found.model_type!r}, as architectures says {found.architecture}")
    return found
