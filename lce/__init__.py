"""lce, the long-context engine: language models read texts far longer than they were trained for.

    import lce
    engine = lce.load("path/to/model", method="longheads")
    print(engine.generate("long prompt ...", max_tokens=64).text)

`import lce` does not import torch: each public name is imported on first use.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lce.errors import BusyError as BusyError
from lce.errors import CapacityError as CapacityError
from lce.errors import DataError as DataError
from lce.errors import LceError as LceError
from lce.errors import ModelError as ModelError
from lce.errors import RankError as RankError
from lce.errors import UsageError as UsageError
from lce.errors import WindowWarning as WindowWarning
from lce.system import check_environment, wait_passively
from lce.version import __version__ as __version__

if TYPE_CHECKING:
    from lce import methods as methods
    from lce.engine.answer import Constraint as Constraint
    from lce.engine.answer import GenerationOptions as GenerationOptions
    from lce.engine.arguments import Sampling as Sampling
    from lce.engine.batch import Batch as Batch
    from lce.engine.chat import Conversation as Conversation
    from lce.engine.context import Context as Context
    from lce.engine.engine import Engine as Engine
    from lce.engine.info import ContextInfo as ContextInfo
    from lce.engine.info import ModelInfo as ModelInfo
    from lce.engine.info import info as info
    from lce.engine.loading import load as load
    from lce.engine.operations import Operations as Operations
    from lce.engine.operations import operations as operations
    from lce.engine.planning import Plan as Plan
    from lce.engine.profile import profiled as profiled
    from lce.engine.profile import profiled_step as profiled_step
    from lce.engine.quantising import quantize as quantize
    from lce.engine.requests import BatchStream as BatchStream
    from lce.engine.scoring import TokenScores as TokenScores
    from lce.engine.setup import Setup as Setup
    from lce.engine.sizing import plan as plan
    from lce.engine.stream import AsyncStream as AsyncStream
    from lce.engine.stream import Generation as Generation
    from lce.engine.stream import Piece as Piece
    from lce.engine.stream import Stats as Stats
    from lce.engine.stream import Stream as Stream
    from lce.engine.stream import TokenLogprobs as TokenLogprobs
    from lce.engine.trace import Trace as Trace
    from lce.methods.base import Method as Method
    from lce.methods.selective import SelectiveMethod as SelectiveMethod
    from lce.profiling import Profile as Profile
    from lce.progress import Progress as Progress

# The module of each public name: this file's imports of names as themselves are the only list of them.
_NAMED = re.findall(r"from (\S+) import (\w+) as \2\n", Path(__file__).read_text("utf-8"))
_HOMES = {name: home for home, name in _NAMED}

wait_passively()  # torch may be imported next, by lce or by whoever imports lce

if not TYPE_CHECKING:  # a type checker that saw this function would accept any name
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'lce' has no attribute {name!r}")
        check_environment()
        if name == "methods":
            return importlib.import_module("lce.methods")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return __all__
