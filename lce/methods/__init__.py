"""The attention methods, one file each, and the names needed to write and run them.

Every file of this folder is imported, so a new method is one new file, and its class is `lce.methods.ITS_NAME` at once.
A line below is for type checkers.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from lce.attention import rotate
from lce.cache.layer import LayerCache
from lce.methods import registry
from lce.methods.base import Example, Method
from lce.methods.costs import Cost, PaperFigure, QueryBlock
from lce.methods.dca import DualChunk
from lce.methods.esa import ESA
from lce.methods.full import Full
from lce.methods.infllm import InfLLM
from lce.methods.lm_infinite import LMInfinite
from lce.methods.longheads import LongHeads
from lce.methods.observed import Observation, Observed
from lce.methods.oracle import Oracle, cheating, selects
from lce.methods.parts import CHOSEN, LayerFacts, Part
from lce.methods.quest import Quest
from lce.methods.random import RandomChunks
from lce.methods.registry import available, find, make, register
from lce.methods.rerope import ReRope
from lce.methods.run import Driver, run
from lce.methods.selective import SelectiveMethod
from lce.methods.self_extend import SelfExtend
from lce.methods.step import Step
from lce.methods.streaming import Streaming
from lce.methods.wrapped import Wrapped
from lce.models.config import RopeConfig
from lce.models.rope import Rope

__all__ = [
    "CHOSEN",
    "ESA",
    "Cost",
    "Driver",
    "DualChunk",
    "Example",
    "Full",
    "InfLLM",
    "LMInfinite",
    "LayerCache",
    "LayerFacts",
    "LongHeads",
    "Method",
    "Observation",
    "Observed",
    "Oracle",
    "PaperFigure",
    "Part",
    "QueryBlock",
    "Quest",
    "RandomChunks",
    "ReRope",
    "Rope",
    "RopeConfig",
    "SelectiveMethod",
    "SelfExtend",
    "Step",
    "Streaming",
    "Wrapped",
    "available",
    "cheating",
    "find",
    "make",
    "register",
    "rotate",
    "run",
    "selects",
]  # fmt: skip

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for method in registry._REGISTRY.values():
            if method.__name__ == name:
                return method
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
