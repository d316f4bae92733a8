"""Decode steps of several contexts at once as CUDA graphs: rows share products, and attention is one launch a layer.

A recording serves 2, 4, 8, … lanes of one method. Before each replay the host writes the tokens, their indices and, in
a `LaneTable`, where the contexts' rows are. The lanes that are lacking repeat the first one, and write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lce.cache.lanes import LaneTable
from lce.engine.lanes import MOST_LANES, Lane, check_logits
from lce.engine.recordings import RecordedStep, Recordings, work_of
from lce.engine.tape import CudaTape
from lce.methods.decoding import completes
from lce.models.layers import Model
from lce.models.products import scratch_in

MOST_RECORDINGS = 48  # by numbers of lanes and bounds of texts' lengths, and by whether a chunk is completed


class JointSteps(Recordings):
    """The recorded decode steps of up to `MOST_LANES` contexts of one driver. All have one memory for what changes."""

    def __init__(self, model: Model, like: Lane, tape: CudaTape) -> None:
        """Prepare for lanes that are like one of them."""
        layout = like.cache.layout
        super().__init__(like.driver, layout, tape)
        self.model, self.rope, device = model, like.rope, layout.device
        self.inputs = torch.zeros(2, MOST_LANES, dtype=torch.int64, device=device)  # tokens, and their indices
        self.logits = torch.zeros(MOST_LANES, model.config.vocab_size, dtype=torch.float32, device=device)
        self.numbers = torch.zeros(MOST_LANES, 2, dtype=torch.int64, device=device)
        self._steps: dict[tuple[int, int, bool], RecordedStep] = {}
        self._table: LaneTable | None = None
        self._scratch: dict[torch.device, Tensor] = {}  # a recording may run in other threads than it was made in
        self._lock = Lock()
        if model.borders:
            self.refuse("the model is on several devices")

    def append(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Append the tokens of those lanes whose steps can be one; set their `logits` and `likeliest`; return them.

        A lane whose logits are not finite fails. After an error or an interruption caches are as before.
        """
        bounds = {lane: self._bound(lane) for lane in lanes} if not self.refused else {}
        able = [lane for lane in lanes if bounds.get(lane)]
        if len(able) < 2:
            return set()
        n, bound = 1 << (len(able) - 1).bit_length(), max(bounds[lane] or 0 for lane in able)
        try:
            with self._lock:
                for lane in able:
                    lane.cache.begin()
                try:
                    self._launch(n, bound, able)
                except Exception as error:  # a method asks for what lanes do not have, or memory is lacking
                    self.refuse(f"lanes decode one by one: {type(error).__name__}: {error}")
                    self._settle(able)
                    return set()
                self._finish(able)
        except BaseException:
            self._settle(able)
            raise
        return set(able)

    def _launch(self, n: int, bound: int, lanes: Sequence[Lane]) -> None:
        self._table = self._table or LaneTable(lanes[0].cache, MOST_LANES)
        self._table.set([lane.cache for lane in lanes], n)
        with scratch_in(self._scratch):
            self.run(self._prepared(self._table, n, bound, lanes))

    def _bound(self, lane: Lane) -> int | None:
        """Return the longest text for which a step recorded for a lane is valid; None: the lane decodes alone."""
        cache, stop = lane.cache, lane.start + 1
        if lane.rope is not self.rope and not lane.rope.rotates_as(self.rope):
            return None
        cache.make_space(stop)
        return self.driver.method.bound(stop) if cache.has_space(stop) else None

    def _prepared(self, table: LaneTable, n: int, bound: int, lanes: Sequence[Lane]) -> RecordedStep:
        """Return the step for `n` lanes, of which there are some; and write the tokens and their indices."""
        last = any(completes(lane.cache, lane.start) for lane in lanes)
        some = [(lane.token_ids[0], lane.start) for lane in lanes]
        inputs = torch.tensor([*some, *some[:1] * (n - len(some))]).T.contiguous()
        self.inputs[:, :n].copy_(inputs, non_blocking=True)
        found = self._steps.pop((n, bound, last), None)
        if found is None:
            layers: Any = table.layers(n, bound)
            memory = *self.inputs[:, :n], self.logits[:n], self.numbers[:n]
            found = RecordedStep(work_of(self.model, self.driver, self.rope, layers, bound, last, *memory))
        self._steps[n, bound, last] = found  # the newest is last
        if len(self._steps) > MOST_RECORDINGS:
            del self._steps[next(iter(self._steps))]
        return found

    def _finish(self, lanes: Sequence[Lane]) -> None:
        """Wait for the step, and commit each lane's token."""
        logits = self.logits[: len(lanes)].clone()
        numbers = self.tape.reader(self.numbers.view(-1))()
        for lane, own, likeliest, finite in zip(lanes, logits, numbers[::2], numbers[1::2], strict=False):
            try:
                if not finite:
                    check_logits(own[None], lane.start)
                lane.logits, lane.likeliest = own, likeliest
                lane.cache.appended(lane.start + 1)
                lane.cache.commit()
            except Exception as error:
                lane.fail(error)

    def _settle(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.cache.settle()

    def refuse(self, why: str) -> None:
        super().refuse(why)
        self._steps, self._table = {}, None
