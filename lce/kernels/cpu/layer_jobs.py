"""Runs the kernels of one layer's attention for other layers, with those layers' memory in place of the first one's.

Where a method attends spans of tokens and keeps nothing of its own, the kernels of a token's attention differ from
layer to layer in the addresses of queries, keys and values alone. So one layer's Python serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lce.kernels.code import words
from lce.kernels.cpu import library
from lce.kernels.cpu.threads import Call, job_of

Range = tuple[int, int]  # an address, and the number of bytes that lie there
_ARGS, _NEXT = words.CALL_ARGS // 8, words.CALL_NEXT // 8


class LayerJobs:
    """The jobs of a layer's attention for n layers: for each call of a kernel, the words of n jobs `[n, words]`.

    Calls between two seams make a chain. Chains, one for each lane, run at the same time, each on one thread, if none
    has so much work that other threads would wait for it. What follows the last seam comes after them.
    """

    def __init__(self) -> None:
        self._jobs: list[NDArray[np.int64]] = []
        self._linked: list[NDArray[np.int64]] = []  # those that `linked` links: not those in chains
        self._held: list[Any] = []

    def set(self, calls: Sequence[Call | None], own: Sequence[Range], others: Sequence[Sequence[Range]]) -> None:
        """Make the jobs: of calls that use the memory `own`, with that of each of n layers instead. Time: O(calls · n).

        `others` has, for each layer, as many ranges as `own` has. Words that are no address of `own` stay.
        """
        starts = np.array([base for base, _ in own], dtype=np.int64)
        moves = np.array([[base for base, _ in ranges] for ranges in others], dtype=np.int64) - starts  # [n, ranges]
        stops = starts + np.array([size for _, size in own], dtype=np.int64)
        order = np.argsort(starts, kind="stable")
        sorted_starts, before = starts[order], self._jobs
        self._held, self._jobs = [], []
        for call in filter(None, calls):
            held, made = job_of(*call)
            words_of = np.frombuffer(made, dtype=np.int64)
            number = len(self._jobs)
            jobs = before[number] if number < len(before) else np.empty((0, 0), dtype=np.int64)
            if jobs.shape != (len(others), len(made)):
                jobs = np.empty((len(others), len(made)), dtype=np.int64)
            jobs[:] = words_of
            args = words_of[_ARGS:]
            found = np.searchsorted(sorted_starts, args, side="right") - 1
            which = order[found]  # the range that begins last before the argument
            inside = (found >= 0) & (args < stops[which])
            jobs[:, _ARGS:][:, inside] += moves[:, which[inside]]
            if call[5]:  # the address of the tail
                place = _ARGS + len(call[2])
                jobs[:, place] = jobs.ctypes.data + jobs.strides[0] * np.arange(len(jobs)) + 8 * (place + 1)
            self._held.append(held)
            self._jobs.append(jobs)
        self._linked = self._chained(calls)

    def _chained(self, calls: Sequence[Call | None]) -> list[NDArray[np.int64]]:
        """Link the calls of each chain; return the jobs that remain to be linked: one that runs all chains, others."""
        ends, work = [0], [0]
        for call in calls:
            if call is None:
                ends.append(ends[-1])
                work.append(0)
            else:
                ends[-1] += 1
                work[-1] += call[1]
        ends, work, n_threads = [0, *ends[:-1]], work[:-1], torch.get_num_threads()
        chains = list(pairwise(ends))
        if n_threads == 1 or len(chains) < 2 * n_threads or max(work) * n_threads > sum(work):
            return self._jobs
        n_layers = len(self._jobs[0])
        table = np.empty((n_layers, len(chains)), dtype=np.int64)
        for number, (first, stop) in enumerate(chains):
            for one, following in pairwise(self._jobs[first:stop]):
                one[:, _NEXT] = _addresses(following)
            self._jobs[stop - 1][:, _NEXT] = 0
            table[:, number] = _addresses(self._jobs[first])
        memory = max(call[4] for call in filter(None, calls))
        held, made = job_of(library.address("threads.run_chains", None), len(chains), (0,), 1, memory, ())
        runs = np.tile(np.frombuffer(made, dtype=np.int64), (n_layers, 1))
        runs[:, _ARGS] = _addresses(table)
        self._held += [held, table]
        return [runs, *self._jobs[ends[-1] :]]

    def linked(self, layer: int, following: int) -> int:
        """Return the address of a layer's first job, after linking its jobs, and the last one to `following`."""
        for jobs in reversed(self._linked):
            jobs[layer, _NEXT] = following
            following = jobs.ctypes.data + layer * jobs.strides[0]
        return following


def _addresses(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the address of each row."""
    return rows.ctypes.data + rows.strides[0] * np.arange(len(rows))
