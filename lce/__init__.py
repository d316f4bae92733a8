"""lce, the long-context engine: language models read texts far longer than they were trained for.

    import lce
    engine = lce.load("path/to/model", method="longheads")
    print(engine.generate("long prompt ...", max_tokens=64).text)

`import lce` does not import torch: each public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lce.system import check_environment, wait_passively
from lce.version import __version__

if TYPE_CHECKING:
    from lce import methods
    from lce.engine.answer import Generation, Piece, Stats, TokenLogprobs
    from lce.engine.arguments import GenerationOptions
    from lce.engine.batch import Batch
    from lce.engine.chat import Conversation
    from lce.engine.context import Context
    from lce.engine.engine import Engine
    from lce.engine.info import ContextInfo, ModelInfo, info
    from lce.engine.loading import load
    from lce.engine.operations import Operations, operations
    from lce.engine.planning import Plan
    from lce.engine.profile import profiled, profiled_step
    from lce.engine.quantising import quantize
    from lce.engine.requests import BatchStream
    from lce.engine.sampling import Constraint
    from lce.engine.sampling_options import Sampling
    from lce.engine.scoring import TokenScores
    from lce.engine.setup import Setup
    from lce.engine.sizing import plan
    from lce.engine.stream import AsyncStream, Stream
    from lce.engine.trace import Trace
    from lce.errors import (
        BusyError,
        CapacityError,
        DataError,
        LceError,
        ModelError,
        RankError,
        UsageError,
        WindowWarning,
    )
    from lce.methods.base import Method
    from lce.methods.selective import SelectiveMethod
    from lce.profiling import Profile
    from lce.progress import Progress

_HOMES = {
    "lce.engine.arguments": ("GenerationOptions",),
    "lce.engine.batch": ("Batch",),
    "lce.engine.chat": ("Conversation",),
    "lce.engine.context": ("Context",),
    "lce.engine.answer": ("Generation", "Piece", "Stats", "TokenLogprobs"),
    "lce.engine.engine": ("Engine",),
    "lce.engine.info": ("ContextInfo", "ModelInfo", "info"),
    "lce.engine.loading": ("load",),
    "lce.engine.operations": ("Operations", "operations"),
    "lce.engine.planning": ("Plan",),
    "lce.engine.profile": ("profiled", "profiled_step"),
    "lce.engine.quantising": ("quantize",),
    "lce.engine.requests": ("BatchStream",),
    "lce.engine.sampling": ("Constraint",),
    "lce.engine.sampling_options": ("Sampling",),
    "lce.engine.scoring": ("TokenScores",),
    "lce.engine.setup": ("Setup",),
    "lce.engine.sizing": ("plan",),
    "lce.engine.stream": ("AsyncStream", "Stream"),
    "lce.engine.trace": ("Trace",),
    "lce.errors": (
        "BusyError",
        "CapacityError",
        "DataError",
        "LceError",
        "ModelError",
        "RankError",
        "UsageError",
        "WindowWarning",
    ),
    "lce.methods.base": ("Method",),
    "lce.methods.selective": ("SelectiveMethod",),
    "lce.profiling": ("Profile",),
    "lce.progress": ("Progress",),
}

__all__ = [
    "AsyncStream",
    "Batch",
    "BatchStream",
    "BusyError",
    "CapacityError",
    "Constraint",
    "Context",
    "ContextInfo",
    "Conversation",
    "DataError",
    "Engine",
    "Generation",
    "GenerationOptions",
    "LceError",
    "Method",
    "ModelError",
    "ModelInfo",
    "Operations",
    "Piece",
    "Plan",
    "Profile",
    "Progress",
    "RankError",
    "Sampling",
    "SelectiveMethod",
    "Setup",
    "Stats",
    "Stream",
    "TokenLogprobs",
    "TokenScores",
    "Trace",
    "UsageError",
    "WindowWarning",
    "__version__",
    "info",
    "load",
    "methods",
    "operations",
    "plan",
    "profiled",
    "profiled_step",
    "quantize",
]


wait_passively()  # torch may be imported next, by lce or by whoever imports lce

if not TYPE_CHECKING:  # a type checker that saw this function would accept any name

    def __getattr__(name: str) -> Any:
        home = next((home for home, names in _HOMES.items() if name in names), "")
        if name == "methods" or home not in ("", "lce.errors"):
            check_environment()
        if name == "methods":
            return importlib.import_module("lce.methods")
        if home:
            return getattr(importlib.import_module(home), name)
        raise AttributeError(f"module 'lce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
