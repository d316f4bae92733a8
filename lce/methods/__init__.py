"""The attention methods, one file each, and the names that are needed to write and run a method.

The last lines import every file of this folder, so a class `X` in a new file is `lce.methods.X` without an import line.
The import lines for lce's own classes are there for type checkers.
"""

import importlib
import pkgutil

from lce.attention import rotate as rotate
from lce.cache.layer import LayerCache as LayerCache
from lce.methods import hooks, registry
from lce.methods.base import Example as Example
from lce.methods.base import Method as Method
from lce.methods.base import knob as knob
from lce.methods.base import promises_of as promises_of
from lce.methods.budget import Budget as Budget
from lce.methods.costs import Cost as Cost
from lce.methods.costs import PaperFigure as PaperFigure
from lce.methods.costs import QueryBlock as QueryBlock
from lce.methods.dca import DualChunk as DualChunk
from lce.methods.esa import ESA as ESA
from lce.methods.full import Full as Full
from lce.methods.infllm import InfLLM as InfLLM
from lce.methods.knobs import knob_values as knob_values
from lce.methods.knobs import knobs_of as knobs_of
from lce.methods.knobs import settings as settings
from lce.methods.lm_infinite import LMInfinite as LMInfinite
from lce.methods.longheads import LongHeads as LongHeads
from lce.methods.pages import Pages as Pages
from lce.methods.parts import CHOSEN as CHOSEN
from lce.methods.parts import LayerFacts as LayerFacts
from lce.methods.parts import Part as Part
from lce.methods.quest import Quest as Quest
from lce.methods.reattention import ReAttention as ReAttention
from lce.methods.registry import available as available
from lce.methods.registry import find as find
from lce.methods.registry import from_file as from_file
from lce.methods.registry import make as make
from lce.methods.registry import register as register
from lce.methods.registry import renewed as renewed
from lce.methods.rerope import ReRope as ReRope
from lce.methods.run import Driver as Driver
from lce.methods.run import run as run
from lce.methods.selection import Placement as Placement
from lce.methods.selection import Selection as Selection
from lce.methods.selection import Selector as Selector
from lce.methods.selective import ChunkMethod as ChunkMethod
from lce.methods.selective import SelectiveMethod as SelectiveMethod
from lce.methods.self_extend import SelfExtend as SelfExtend
from lce.methods.step import Step as Step
from lce.methods.streaming import Streaming as Streaming
from lce.methods.wrapped import Handover as Handover
from lce.methods.wrapped import Observation as Observation
from lce.methods.wrapped import Observed as Observed
from lce.methods.wrapped import Wrapped as Wrapped
from lce.models.config import RopeConfig as RopeConfig
from lce.models.rope import Rope as Rope

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
hooks.begun = True
globals().update({method.__name__: method for method in registry._REGISTRY.values()})
