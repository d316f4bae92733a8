"""The attention methods, one file each, and what is needed to write and run them."""

from lce.cache.layer import LayerCache
from lce.methods.base import Method, SelectiveMethod
from lce.methods.dca import DualChunk
from lce.methods.esa import ESA
from lce.methods.full import Full
from lce.methods.infllm import InfLLM
from lce.methods.lm_infinite import LMInfinite
from lce.methods.longheads import LongHeads
from lce.methods.registry import available, find, make, register
from lce.methods.rerope import ReRope
from lce.methods.run import Driver, run
from lce.methods.self_extend import SelfExtend
from lce.methods.step import Step
from lce.methods.streaming import Streaming
from lce.models.config import RopeConfig
from lce.models.rope import Rope, rotate

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
