"""Decode steps on a GPU as CUDA graphs: a step of one token of each of some contexts is recorded, and replayed later.

A step has hundreds of kernels, and launching them one by one takes longer than running them; a graph is one launch.
Everything that changes from token to token is on the device: tokens, their indices, what the method computes from these
(`lce.methods.step.DeviceStep`), and where the contexts' rows are (`LaneTable`). So a recording serves any contexts of a
driver: 1, 2, 4, 8, … of them, of which the lacking ones repeat the first and write nothing. There is a recording for
each number of lanes, for each bound of texts' lengths, and for steps that complete a chunk and those that do not.

Where a step asks for more than rows at addresses, a recording is of one context, until its tensors are replaced.

Under greedy sampling the step of the likeliest token is launched before the host knows that token. The step writes
after the committed tokens, so its result can be dropped if the text ends or continues with another token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from lce.cache.kv import KVCache
from lce.cache.lanes import LaneTable, rows_of
from lce.cache.layer import LayerCache
from lce.engine.lanes import MOST_LANES, PAUSES, Lane, Recorder, check_logits
from lce.engine.tape import CudaTape, Work
from lce.methods.decoding import completes
from lce.methods.step import DeviceStep, OnDevice
from lce.models.layers import Model
from lce.models.products import scratch_in
from lce.progress import notice

TRIES = 3  # recordings that may fail before steps run kernel by kernel for good
MOST_DRIVERS = 64  # whose steps are kept
MOST_RECORDINGS = 64  # of a driver

_capturing = Lock()  # held by the thread that records: one thread may record at a time


@dataclass(frozen=True)
class Launched:
    """A decode step that was launched, with each lane's `logits [vocab]`.

    `read` waits, and returns two numbers for each lane: the likeliest next token, and 1 if all logits are finite, else
    0. One launched early is for the token `token_id` at index `start`, and wrote to the layers that begin with `layer`.
    """

    logits: Sequence[Tensor]
    read: Callable[[], list[int]]
    start: int
    layer: ReferenceType[LayerCache]
    token_id: int | None = None


@dataclass(eq=False)
class RecordedStep:
    """A decode step for texts up to `bound` tokens: `work` runs it kernel by kernel, `replay` as a CUDA graph.

    `logits [B, vocab]` and `numbers [B, 2]` are what it leaves. `warm` says that `work` has run. `memory` refers weakly
    to the tensors that a step of one context reads, which a growing cache frees.
    """

    work: Work
    bound: int
    memory: Sequence[ReferenceType[Tensor]]
    logits: Tensor
    warm: bool = False
    replay: Work | None = None


class Graphs(Recorder):
    """The recorded decode steps of a model. `tape_of` makes a tape for a device that reads so many numbers."""

    def __init__(self, tape_of: Callable[[torch.device, int], CudaTape]) -> None:
        self._tape_of, self.recorded = tape_of, list[DriverSteps]()
        self._lock = Lock()  # what changes is in one memory for all contexts of a driver
        self._early: Launched | None = None
        self._last: ReferenceType[KVCache] | None = None  # whose step was the last one, if it was of one lane

    def steps(self, model: Model, lanes: Sequence[Lane]) -> Sequence[Lane]:
        early, self._early = self._early, None  # it can serve only the next pass
        left, groups = list[Lane](), dict[DriverSteps, list[Lane]]()
        if not any(lane.decoding for lane in lanes) or PAUSES:
            return lanes
        with self._lock:
            for lane in lanes:
                taken = lane.decoding and len(lane.token_ids) == 1
                (groups.setdefault(self._steps_of(model, lane), []) if taken else left).append(lane)
            # Else another thread's steps take turns with these, and each thread drops what the other launched early.
            alone = ref(lanes[0].cache) if len(lanes) == 1 else None
            goes_ahead, self._last = alone is not None and alone == self._last, alone
            for found, group in groups.items():
                for first in range(0, len(group), MOST_LANES):
                    left += found.append(group[first : first + MOST_LANES], early, goes_ahead)
                self._early = found.early
        return left

    def _steps_of(self, model: Model, lane: Lane) -> DriverSteps:
        """Return the steps of a lane's driver and RoPE; new ones replace the oldest."""
        for found in self.recorded:
            if found.driver is lane.driver and (found.rope is lane.rope or found.rope.rotates_as(lane.rope)):
                return found
        made = DriverSteps(model, lane, self._tape_of)
        self.recorded = [*self.recorded[1 - MOST_DRIVERS :], made]
        return made


class DriverSteps:
    """The recorded decode steps of one driver and RoPE. `refused` says why no step can be recorded, or is empty.

    All steps have one memory for what changes; a graph's own memory holds a step's temporary tensors.
    """

    def __init__(self, model: Model, like: Lane, tape_of: Callable[[torch.device, int], CudaTape]) -> None:
        layout, method = like.cache.layout, like.driver.method
        self.model, self.driver, self.rope = model, like.driver, like.rope
        self.tape = tape_of(layout.device, 2 * MOST_LANES)
        self.inputs = torch.zeros(2, MOST_LANES, dtype=torch.int64, device=layout.device)  # tokens, and their indices
        self.numbers = torch.zeros(MOST_LANES, 2, dtype=torch.int64, device=layout.device)
        self.refused, self.joins = "", True  # whether recordings serve any contexts
        self.n_recorded = self.n_replayed = self.n_failed = 0
        self.early: Launched | None = None  # the step that was launched early, if any
        self._n_missed = 0  # recordings that failed since the last one that did not
        self._table: LaneTable | None = None
        self._logits: dict[int, Tensor] = {}  # by the number of lanes: one memory for all steps
        self._joint: dict[Any, RecordedStep] = {}
        self._own: WeakKeyDictionary[KVCache, dict[Any, RecordedStep]] = WeakKeyDictionary()
        self._scratch: dict[torch.device, Tensor] = {}  # a recording may run in other threads than it was made in
        if not (method.promised("recorded") and like.driver.attention.decodes(layout.dtype, layout.head_dim)):
            self._refuse(f"the step of {method.label} is not made for it on this device")
        elif model.borders:
            self._refuse("its layers are on several devices")

    def append(self, lanes: Sequence[Lane], early: Launched | None, goes_ahead: bool) -> list[Lane]:
        """Append the lanes' tokens by recorded steps; set their `logits` and `likeliest`. Return the lanes left.

        A lane fails if its logits are not finite. After an error or an interruption caches are as before. If
        `goes_ahead`, the step of the likeliest next token of one lane that is `ahead` is launched, too.
        """
        bounds, left, self.early = dict[Lane, int](), list[Lane](), None
        for lane in lanes:
            try:
                if self.refused or (bound := self._bound(lane)) is None:
                    left.append(lane)
                else:
                    bounds[lane] = bound
            except Exception as error:
                lane.fail(error)
        if bounds and self.joins:
            try:
                self._append(list(bounds), max(bounds.values()), early, goes_ahead)
            except Exception as error:  # the step asks for more than rows at addresses, or memory is lacking
                notice(f"contexts are recorded one by one: {type(error).__name__}: {error}", logging.DEBUG)
                self.joins, self._table, self._joint = False, None, {}
            else:
                return left
        for lane, bound in bounds.items():
            try:
                if not self.refused:
                    self._append([lane], bound, early, goes_ahead)
            except (OnDevice, AttributeError) as error:
                if isinstance(error, AttributeError) and not isinstance(error.obj, DeviceStep):
                    lane.fail(error)
                else:  # a hook of the method needs a number that only the device has
                    self._refuse(f"the method asks for {getattr(error, 'name', error)}, which only the device knows")
            except Exception as error:
                lane.fail(error)
            left += [lane] if self.refused and lane.error is None and lane.logits is None else []
        return left

    def _append(self, lanes: Sequence[Lane], bound: int, early: Launched | None, goes_ahead: bool) -> None:
        first, layer, following = lanes[0], lanes[0].cache.layers[0], None
        try:
            for lane in lanes:
                lane.cache.begin()
            step, now = self._prepared(lanes, bound), early
            if now is None or (now.start, now.token_id, now.layer()) != (first.start, *first.token_ids, layer):
                now = self._launch(step, lanes)
            if first.ahead and goes_ahead and (later := self._bound(first, 1)):
                step = self._prepared(lanes, later, 1)
                following = self._launch(step, lanes, 1) if step.replay else None
            numbers = now.read()
            for lane, logits, likeliest, finite in zip(lanes, now.logits, numbers[::2], numbers[1::2], strict=False):
                try:
                    if not finite:
                        check_logits(logits[None], lane.start)
                    lane.logits, lane.likeliest = logits, likeliest
                    lane.cache.appended(lane.start + 1)
                    lane.cache.commit()
                except Exception as error:
                    lane.fail(error)
        except BaseException:
            for lane in lanes:
                lane.cache.settle()
            raise
        self.early = following and replace(following, token_id=first.likeliest)

    def _bound(self, lane: Lane, later: int = 0) -> int | None:
        """Return the longest text for which a lane's step, `later` tokens from now, is valid; None: record no step."""
        cache, stop = lane.cache, lane.start + 1 + later
        if not later:
            cache.make_space(stop)
        return self.driver.method.bound(stop) if cache.has_space(stop) else None

    def _prepared(self, lanes: Sequence[Lane], bound: int, later: int = 0) -> RecordedStep:
        """Return the lanes' step, `later` tokens from now: a new one, if none fits."""
        n, cache, memory, steps = 1 << (len(lanes) - 1).bit_length(), lanes[0].cache, list[Any](), self._joint
        last = any(completes(lane.cache, lane.start + later) for lane in lanes)
        key, layers = (n, last, bound if self.joins else 0), cache.layers
        if not self.joins:
            memory, steps = [ref(x) for x, *_ in rows_of(cache)], self._own.setdefault(cache, {})
        else:
            self._table = self._table or LaneTable(cache, MOST_LANES)
            if not later:
                self._table.set([lane.cache for lane in lanes], n)
        found = steps.pop(key, None)
        if found is None or found.bound != bound or list(map(id, memory)) != list(map(id, found.memory)):
            del found  # frees the memory of the graph
            found = self._made(self._table.layers(n, bound) if self._table else layers, n, bound, last, memory)
        steps[key] = found  # the newest is last
        if len(steps) > MOST_RECORDINGS:
            del steps[next(iter(steps))]
        return found

    def _made(self, layers: Any, n: int, bound: int, last: bool, memory: Sequence[Any]) -> RecordedStep:
        # `work` must not refer to this object, which refers to `work`: no cycle may keep the cache of a closed context.
        model, driver, rope = self.model, self.driver, self.rope
        (token, index), numbers = self.inputs[:, :n], self.numbers[:n]
        empty = torch.zeros(n, model.config.vocab_size, dtype=torch.float32, device=token.device)
        kept = self._logits.setdefault(n, empty)

        def work() -> None:
            """Compute `kept` and `numbers` from `token` and `index`, all on the device."""
            attend = driver.recorded(layers, rope, index, bound, last)
            attend = model.attending(attend, rope.positions(index))
            hidden = model(model.embedded(token), attend, generated=True)
            logits = model.logits(hidden, drawn=True)
            kept.copy_(logits)
            numbers.copy_(torch.stack((logits.argmax(-1), logits.isfinite().all(-1).to(torch.int64)), dim=1))

        return RecordedStep(work, bound, memory, kept)

    def _launch(self, step: RecordedStep, lanes: Sequence[Lane], later: int = 0) -> Launched:
        """Launch the lanes' step; if that is `later`, of the likeliest token. A step is recorded the second time."""
        first = lanes[0]
        if later:
            self.inputs[0, :1].copy_(self.numbers[:1, 0])
            self.inputs[1, :1].fill_(first.start + later)
        else:
            some = [(lane.token_ids[0], lane.start) for lane in lanes]
            some += some[:1] * (MOST_LANES - len(some))
            self.inputs.copy_(torch.tensor(some).T.contiguous(), non_blocking=True)
        with scratch_in(self._scratch):
            if step.replay is None and step.warm and not _capturing.locked():  # if locked, a later launch tries again
                try:
                    with _capturing:
                        step.replay = self.tape.record(step.work)
                    self.n_recorded, self._n_missed = self.n_recorded + 1, 0
                except Exception as error:
                    self.n_failed, self._n_missed = self.n_failed + 1, self._n_missed + 1
                    if self._n_missed == TRIES:
                        self._refuse(f"{type(error).__name__}: {error}")
            if step.replay is None:
                self.tape.warm_up(step.work)
                step.warm = True
            else:
                step.replay()
                self.n_replayed += 1
        logits = [row.clone() for row in step.logits[: len(lanes)]]  # else a context's row keeps those of all
        return Launched(
            logits, self.tape.reader(self.numbers.view(-1)), first.start + later, ref(first.cache.layers[0])
        )

    def _refuse(self, why: str) -> None:
        notice(f"steps are not recorded: {why}", logging.DEBUG)
        self.refused, self._joint, self._table, self._own = why, {}, None, WeakKeyDictionary()
