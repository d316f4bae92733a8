"""lce, the long-context engine: language models read texts far longer than they were trained for.

    import lce
    engine = lce.load("path/to/model", method="longheads")
    print(engine.generate("long prompt ...", max_tokens=64).text)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lce import methods
    from lce.engine.context import Context
    from lce.engine.decode import Generation, Piece, Stats, Stream
    from lce.engine.engine import Engine
    from lce.engine.loading import load, plan
    from lce.engine.planning import Plan
    from lce.engine.sampling import Sampling
    from lce.engine.trace import Trace
    from lce.errors import CapacityError, DataError, LceError, ModelError, UsageError
    from lce.methods.base import Method, SelectiveMethod

_HOMES = {
    "CapacityError": "lce.errors",
    "Context": "lce.engine.context",
    "DataError": "lce.errors",
    "Engine": "lce.engine.engine",
    "Generation": "lce.engine.decode",
    "LceError": "lce.errors",
    "Method": "lce.methods.base",
    "ModelError": "lce.errors",
    "Piece": "lce.engine.decode",
    "Plan": "lce.engine.planning",
    "Sampling": "lce.engine.sampling",
    "SelectiveMethod": "lce.methods.base",
    "Stats": "lce.engine.decode",
    "Stream": "lce.engine.decode",
    "Trace": "lce.engine.trace",
    "UsageError": "lce.errors",
    "load": "lce.engine.loading",
    "plan": "lce.engine.loading",
}

__all__ = [
    "CapacityError",
    "Context",
    "DataError",
    "Engine",
    "Generation",
    "LceError",
    "Method",
    "ModelError",
    "Piece",
    "Plan",
    "Sampling",
    "SelectiveMethod",
    "Stats",
    "Stream",
    "Trace",
    "UsageError",
    "__version__",
    "load",
    "methods",
    "plan",
]


if not TYPE_CHECKING:  # a type checker reports a name that the package does not have

    def __getattr__(name: str) -> Any:
        if name == "methods":
            return importlib.import_module("lce.methods")
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'lce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
