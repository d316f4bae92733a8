"""The attention methods: one file each, behind one hook."""

from lce.methods.base import Method, SelectiveMethod, Step
from lce.methods.full import Full
from lce.methods.longheads import LongHeads
from lce.methods.registry import available, find, make, register

__all__ = [
    "Full",
    "LongHeads",
    "Method",
    "SelectiveMethod",
    "Step",
    "available",
    "find",
    "make",
    "register",
]
