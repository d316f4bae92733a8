"""Guards against forks: OpenMP's threads do not survive a fork, and a child that needs them hangs.

The threads start with the first operation that uses several. A child forked after that would wait for the threads for
ever. A process that computes with one thread is safe.
"""

from __future__ import annotations

import os

import torch

from lce.errors import UsageError

_threaded: set[int] = set()  # ids of this process or its ancestors that used several threads


def uses_threads() -> None:
    """Record that this process uses several threads; call this before such work.

    Raises `UsageError` in a process forked after its parent called this, unless it computes with one thread.
    """
    if torch.get_num_threads() == 1:
        return
    here = os.getpid()
    if here not in _threaded:
        if _threaded:
            raise UsageError(
                "this process was forked from one that had computed with several threads, which would hang here; call "
                "torch.set_num_threads(1) in it, or start processes by multiprocessing's 'spawn' and load there"
            )
        _threaded.add(here)
