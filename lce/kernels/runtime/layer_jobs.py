"""Runs the kernels of one layer's attention for other layers, with those layers' memory in place of the first one's.

Where a method attends spans of tokens and keeps nothing of its own, the kernels of a token's attention differ from
layer to layer in the addresses of queries, keys and values alone. So one layer's Python serves all.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lce.kernels.runtime import library, words
from lce.kernels.runtime.threads import Call, Scratch, job_of

Range = tuple[int, int]  # an address, and the number of bytes that lie there
_ARGS, _NEXT = words.CALL_ARGS // 8, words.CALL_NEXT // 8


class LayerJobs:
    """The jobs of a layer's attention for n layers: a row of words for each layer, `[n, words of all calls]`.

    Calls between two seams make a chain. Chains, one for each lane, run at the same time, each on one thread, if none
    has so much work that other threads would wait for it. What follows the last seam comes after them.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._words: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)
        self._base = 0  # the address of `_words`
        self._held: list[Any] = []
        self._firsts: list[int] = []  # for each layer: the address of its first job
        self._runs: NDArray[np.int64] = self._words  # for each layer: the words of a job that runs all chains
        self._last: NDArray[np.int64] = self._words  # for each layer: the word with the address of what comes after it

    def set(self, calls: Sequence[Call | None], own: NDArray[np.int64], others: NDArray[np.int64]) -> None:
        """Make the jobs: of calls that use the ranges `own [r, 2]`, with those of n layers, `others [n, r, 2]`.

        Words that are no address of `own` stay. Time: O(calls · n).
        """
        made, offsets, columns = array("q"), list[int](), list[int]()
        self._held = []
        for call in filter(None, calls):
            held, job = job_of(self._scratch, *call)
            self._held.append(held)
            at = len(made)
            offsets.append(at)
            made.extend(job)
            columns.extend(range(at + _ARGS, len(made)))
        if self._words.shape != (len(others), len(made)):
            self._words = np.empty((len(others), len(made)), dtype=np.int64)
            self._base = self._words.ctypes.data
        self._words[:] = np.frombuffer(made, dtype=np.int64)
        self._move(np.array(columns), own, others)
        self._link(calls, offsets)

    def _move(self, columns: NDArray[np.int64], own: NDArray[np.int64], others: NDArray[np.int64]) -> None:
        """Change the addresses in `columns` that are in the ranges `own [r, 2]` to those in `others [n, r, 2]`."""
        starts = own[:, 0]
        stops, moves = starts + own[:, 1], others[:, :, 0] - starts
        order = np.argsort(starts, kind="stable")
        args = self._words[0, columns]
        found = np.searchsorted(starts[order], args, side="right") - 1
        which = order[found]  # the range that begins last before the argument
        inside = (found >= 0) & (args < stops[which])
        self._words[:, columns[inside]] += moves[:, which[inside]]

    def _addresses(self, place: int) -> NDArray[np.int64]:
        """Return the address of each layer's word at a place in its row."""
        n_layers, n_words = self._words.shape
        return self._base + 8 * (n_words * np.arange(n_layers) + place)

    def _link(self, calls: Sequence[Call | None], offsets: Sequence[int]) -> None:
        """Link each layer's jobs: one after the other, or those of each chain, behind a job that runs all chains."""
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
        for one, following in pairwise(offsets):
            self._words[:, one + _NEXT] = self._addresses(following)
        self._last, firsts = self._words[:, offsets[-1] + _NEXT], self._addresses(offsets[0])
        if n_threads > 1 and len(chains) >= 2 * n_threads and max(work) * n_threads <= sum(work):
            for _, stop in chains:
                self._words[:, offsets[stop - 1] + _NEXT] = 0
            table = np.stack([self._addresses(offsets[first]) for first, _ in chains], axis=1)
            memory = max(call[4] for call in filter(None, calls))
            chain = library.address("threads.run_chains", None)
            held, made = job_of(self._scratch, chain, len(chains), (0,), 1, memory)
            runs = np.tile(np.frombuffer(made, dtype=np.int64), (len(table), 1))
            runs[:, _ARGS] = _rows(table)
            self._held += [held, table]
            self._runs, firsts = runs, _rows(runs)
            after = offsets[ends[-1] :]
            runs[:, _NEXT] = self._addresses(after[0]) if after else 0
            self._last = self._last if after else runs[:, _NEXT]
        self._firsts = firsts.tolist()

    def linked(self, layer: int, following: int) -> int:
        """Return the address of a layer's first job, after linking its last one to `following`."""
        self._last[layer] = following
        return self._firsts[layer]


def _rows(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the address of each row."""
    return table.ctypes.data + table.strides[0] * np.arange(len(table))
