"""Runs the kernels of one layer's attention for other layers, with those layers' memory in place of the first one's.

Where a method attends spans of tokens and keeps nothing of its own, the kernels of a token's attention differ from
layer to layer in the addresses of queries, keys and values alone. So one layer's Python serves all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lce.kernels.code import words
from lce.kernels.cpu.threads import Call, job_of

Range = tuple[int, int]  # an address, and the number of bytes that lie there
_ARGS, _NEXT = words.CALL_ARGS // 8, words.CALL_NEXT // 8


class LayerJobs:
    """The jobs of a layer's attention for n layers: for each call of a kernel, the words of n jobs `[n, words]`."""

    def __init__(self) -> None:
        self._jobs: list[NDArray[np.int64]] = []
        self._held: list[Tensor | None] = []

    def set(self, calls: Sequence[Call], own: Sequence[Range], others: Sequence[Sequence[Range]]) -> None:
        """Make the jobs: of calls that use the memory `own`, with that of each of n layers instead. Time: 1 us a layer.

        `others` has, for each layer, as many ranges as `own` has. Words that are no address of `own` stay.
        """
        bases = np.array([[base for base, _ in ranges] for ranges in others], dtype=np.int64)  # [n, ranges]
        moves = bases - np.array([base for base, _ in own], dtype=np.int64)
        self._held, before, self._jobs = [], self._jobs, []
        for number, call in enumerate(calls):
            held, made = job_of(*call)
            words_of = np.frombuffer(made, dtype=np.int64)
            jobs = before[number] if number < len(before) else np.empty((0, 0), dtype=np.int64)
            if jobs.shape != (len(others), len(made)):
                jobs = np.empty((len(others), len(made)), dtype=np.int64)
            jobs[:] = words_of
            for place in range(_ARGS, len(made)):
                for i, (base, size) in enumerate(own):
                    if base <= made[place] < base + size:
                        jobs[:, place] += moves[:, i]
                        break
            if call[5]:  # the address of the tail
                place = _ARGS + len(call[2])
                jobs[:, place] = jobs.ctypes.data + jobs.strides[0] * np.arange(len(jobs)) + 8 * (place + 1)
            self._held.append(held)
            self._jobs.append(jobs)

    def linked(self, layer: int, following: int) -> int:
        """Return the address of a layer's first job, after linking its jobs, and the last one to `following`."""
        for jobs in reversed(self._jobs):
            jobs[layer, _NEXT] = following
            following = jobs.ctypes.data + layer * jobs.strides[0]
        return following
