"""What advice starts from: the facts of a model with a user's options, as `lce.load` and `lce.plan` have them."""

from pathlib import Path
from typing import Any

from lce.engine.options import SizeOptions
from lce.engine.sizing import facts_of
from lce.methods.auto import choice_for
from lce.methods.choices import Choice
from lce.methods.step import ModelFacts
from lce.models.layers import read_config
from lce.weights.source import source_of


def asked(model: str | Path, **options: Any) -> ModelFacts:
    """The facts of a model, with options of `lce.load`."""
    source = source_of(model)
    return facts_of(SizeOptions(**options), source, read_config(source))


def advised(length: int | None, model: str | Path, **options: Any) -> Choice:
    """The choice for texts of so many tokens."""
    return choice_for(length, asked(model, **options))
