"""Freed memory stays with the process, within bounds."""

from __future__ import annotations

import ctypes
import sys

KEPT = 512 << 20  # bytes of freed memory that glibc may keep at the end of its heap
LARGE = 32 << 20  # bytes from which an allocation is a mapping of its own, given back when it is freed

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Ask glibc to hand the buffers of one layer to the next, instead of giving them back and fetching new pages.

    Every layer frees activations of some megabytes and asks for as much again. Left alone, glibc returns them to the
    kernel each time, and on a virtual machine the page faults cost a tenth of a prefill. At most `KEPT` bytes are
    kept, for the whole process; what is larger than `LARGE`, such as a long context's keys, is still given back.
    Does nothing where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT)
        mallopt(_M_MMAP_THRESHOLD, LARGE)
