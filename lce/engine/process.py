"""Processes that were forked: OpenMP's threads do not survive a fork, and a child that needs them hangs.

The threads start with the first operation that several threads share. A child of a process that has them would wait
for them for ever. With one thread nothing is started, and nothing is missed.
"""

from __future__ import annotations

import os

import torch

from lce.errors import UsageError

_threaded: set[int] = set()  # the processes, this one or its ancestors, that computed with several threads


def uses_threads() -> None:
    """Note that several threads may share the work that follows; call it before such work.

    Raises `UsageError` in a process that was forked from one that had called this, unless it computes with one thread.
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
