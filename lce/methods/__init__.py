"""The attention methods: one file each, behind one hook."""

from lce.methods.base import Method, SelectiveMethod
from lce.methods.dca import DualChunk
from lce.methods.esa import ESA
from lce.methods.full import Full
from lce.methods.infllm import InfLLM
from lce.methods.lm_infinite import LMInfinite
from lce.methods.longheads import LongHeads
from lce.methods.registry import available, find, make, register
from lce.methods.rerope import ReRope
from lce.methods.self_extend import SelfExtend
from lce.methods.step import Step
from lce.methods.streaming import Streaming

__all__ = [
    "ESA",
    "DualChunk",
    "Full",
    "InfLLM",
    "LMInfinite",
    "LongHeads",
    "Method",
    "ReRope",
    "SelectiveMethod",
    "SelfExtend",
    "Step",
    "Streaming",
    "available",
    "find",
    "make",
    "register",
]
