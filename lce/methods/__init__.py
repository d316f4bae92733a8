"""The attention methods, one file each, and what is needed to write and run them."""

from lce.attention import rotate
from lce.cache.kv import LayerCache
from lce.methods.base import Method
from lce.methods.dca import DualChunk
from lce.methods.esa import ESA
from lce.methods.full import Full
from lce.methods.infllm import InfLLM
from lce.methods.lm_infinite import LMInfinite
from lce.methods.longheads import LongHeads
from lce.methods.quest import Quest
from lce.methods.registry import available, find, make, register
from lce.methods.rerope import ReRope
from lce.methods.run import Driver, run
from lce.methods.selective import SelectiveMethod
from lce.methods.self_extend import SelfExtend
from lce.methods.step import Step
from lce.methods.streaming import Streaming
from lce.models.config import RopeConfig
from lce.models.rope import Rope

__all__ = [
    "ESA",
    "Driver",
    "DualChunk",
    "Full",
    "InfLLM",
    "LMInfinite",
    "LayerCache",
    "LongHeads",
    "Method",
    "Quest",
    "ReRope",
    "Rope",
    "RopeConfig",
    "SelectiveMethod",
    "SelfExtend",
    "Step",
    "Streaming",
    "available",
    "find",
    "make",
    "register",
    "rotate",
    "run",
]
