"""Decode steps on a GPU as CUDA graphs: the step of one token of a context is recorded once, and replayed later.

A step has hundreds of kernels, and launching them one by one takes longer than running them; a graph is one launch.
Everything that changes from token to token is on the device: the token, its index, and what the method computes from
the index (`lce.methods.step.DeviceStep`). A step that completes a chunk is another recording. A step is recorded again
when the tensors of the cache are replaced by larger ones, and when the text exceeds the length (`bound`) for which the
step was recorded.

Under greedy sampling the step of the likeliest token is launched before the host knows that token. The step writes
after the committed tokens, so its result can be dropped if the text ends or continues with another token.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.engine.lanes import PAUSES, Lane, Recorder, check_logits
from lce.engine.tape import CudaTape, Work
from lce.methods.decoding import completes
from lce.methods.run import Driver
from lce.methods.step import DeviceStep, OnDevice
from lce.models.layers import Model
from lce.models.rope import Rope

TRIES = 3  # recordings of a context's steps that may fail before its steps run kernel by kernel for good

_capturing = Lock()  # held by the thread that records: one thread may record at a time


@dataclass(frozen=True)
class Launched:
    """A decode step that was launched, for the token at index `start`.

    The step writes the cache's `layers`, and gives `logits [vocab]` float32. `read` waits for the step, and returns two
    numbers: the likeliest next token, and 1 if all logits are finite, else 0.
    """

    start: int
    layers: Sequence[LayerCache]
    logits: Tensor
    read: Callable[[], list[int]]


@dataclass(eq=False)
class RecordedStep:
    """A decode step for texts up to `bound` tokens: `work` runs it kernel by kernel, `replay` as a CUDA graph.

    `memory` refers weakly to the step's cache tensors, which a growing cache frees. `warm` says that `work` has run.
    """

    bound: int
    memory: Sequence[ReferenceType[Tensor] | None]
    work: Work
    warm: bool = False
    replay: Work | None = None


class Graphs(Recorder):
    """The recorded decode steps of contexts, while their caches live. `tape_of` makes a tape for a device."""

    def __init__(self, tape_of: Callable[[torch.device], CudaTape]) -> None:
        self._tape_of, self._said = tape_of, {""}
        self._held: WeakKeyDictionary[KVCache, DecodeGraph] = WeakKeyDictionary()

    def steps(self, model: Model, lanes: Sequence[Lane]) -> Sequence[Lane]:
        left = []
        for lane in lanes:
            graph = self._held.get(lane.cache)
            early = None if graph is None else graph.early()
            if not lane.decoding or PAUSES:
                left.append(lane)
                continue
            if graph is None or graph.driver is not lane.driver:
                graph = DecodeGraph(model, lane.driver, lane.cache, self._tape_of(lane.cache.layout.device))
                self._held[lane.cache], early = graph, None
            try:
                if not graph.append(lane, early):
                    left.append(lane)
            except Exception as error:
                lane.fail(error)
            if graph.refused not in self._said:
                self._said.add(self.refused(graph.refused))
        return left

    def why_not(self, cache: KVCache) -> str:
        return self.of(cache).refused

    def of(self, cache: KVCache) -> DecodeGraph:
        """Return the recorded steps of a context that has decoded."""
        return self._held[cache]


class DecodeGraph:
    """The recorded decode steps of one context.

    The graph's own memory holds one step's temporary tensors. `refused` says why no step can be recorded, or is empty.
    """

    def __init__(self, model: Model, driver: Driver, cache: KVCache, tape: CudaTape) -> None:
        self.model, self.driver, self.tape, layout = model, driver, tape, cache.layout
        self.token, self.index = (torch.zeros(1, dtype=torch.int64, device=layout.device) for _ in range(2))
        self.logits = torch.zeros(model.config.vocab_size, dtype=torch.float32, device=layout.device)
        self.numbers = torch.zeros(2, dtype=torch.int64, device=layout.device)
        able = driver.method.promised("recorded") and driver.attention.decodes(layout.dtype, layout.head_dim)
        self.refused = "" if able else f"the step of {driver.method.label} is not made for it on this device"
        self.n_recorded = self.n_replayed = self.n_failed = 0
        self._steps: dict[bool, RecordedStep] = {}  # by whether they complete a chunk
        self._early: tuple[Launched, int] | None = None  # the step launched early, if any, and its token

    def early(self) -> tuple[Launched, int] | None:
        """Return the step that was launched early, if any, and its token. The step can serve only the next pass."""
        early, self._early = self._early, None
        return early

    def append(self, lane: Lane, early: tuple[Launched, int] | None) -> bool:
        """Append the token of `lane`, a context's part in a pass, by a recorded step; set its `logits` and `likeliest`.

        Returns False, and appends nothing, if this step must run kernel by kernel. If `lane.ahead`, the step of the
        likeliest next token is launched too. After an error or an interruption the cache is as before.
        """
        if self.refused or len(lane.token_ids) > 1:
            return False
        start, cache, token_id = lane.start, lane.cache, lane.token_ids[0]
        cache.make_space(start + 1)
        if (bound := self._bound_of(cache, start)) is None:
            return False
        if not self._steps and any(x is not None and x.device != self.index.device for x in cache.memory):
            self._refuse("its layers are on several devices")
            return False
        try:
            cache.begin()
            if early is not None and (early[0].start, early[0].layers, early[1]) == (start, cache.layers, token_id):
                now = early[0]
            else:
                now = self._launch(self._prepared(cache, lane.rope, bound, start), cache, start, token_id)
            step, following = self._steps.get(completes(cache, start + 1)), None
            if lane.ahead and step and step.replay and self._bound_of(cache, start + 1) == step.bound:
                following = self._launch(step, cache, start + 1, None)
            likeliest, finite = now.read()
            if not finite:
                check_logits(now.logits[None], start)
            lane.logits, lane.likeliest = now.logits, likeliest
            cache.appended(start + 1)
            cache.commit()
        except (OnDevice, AttributeError) as error:
            cache.settle()
            if isinstance(error, AttributeError) and not isinstance(error.obj, DeviceStep):
                raise
            # A hook of the method needs a number that only the device has.
            self._refuse(f"the method asks for {getattr(error, 'name', error)}, which only the device knows")
            return False
        except BaseException:
            cache.settle()
            raise
        if following is not None:
            self._early = following, likeliest
        return True

    def _bound_of(self, cache: KVCache, start: int) -> int | None:
        """Return the longest text for which a step recorded at `start` is valid; None: do not record that step."""
        return self.driver.method.bound(start + 1) if cache.has_space(start + 1) else None

    def _prepared(self, cache: KVCache, rope: Rope, bound: int, start: int) -> RecordedStep:
        """Return the step for the token at `start`; a new one if `bound` or the tensors of the cache have changed."""
        memory = [None if x is None else ref(x) for x in cache.memory]  # a tensor's `ref` is always the same object
        is_last, layers = completes(cache, start), cache.layers
        found = self._steps.pop(is_last, None)
        if found is not None and found.bound == bound and all(map(operator.is_, memory, found.memory)):
            self._steps[is_last] = found
            return found
        del found  # frees the memory of the graph
        # `work` must not refer to this object, which refers to `work`: no cycle may keep the cache of a closed context.
        model, driver = self.model, self.driver
        token, index, kept, numbers = self.token, self.index, self.logits, self.numbers

        def work() -> None:
            """Run the step: compute `logits` and `numbers` from `token` and `index`, all on the device."""
            attend = driver.recorded(layers, rope, index, bound, is_last)
            attend = model.attending(attend, rope.positions(index))
            hidden = model(model.embedded(token), attend, generated=True)
            logits = model.logits(hidden, drawn=True)[0]
            kept.copy_(logits)
            numbers.copy_(torch.stack((logits.argmax(), logits.isfinite().all().to(torch.int64))))

        self._steps[is_last] = step = RecordedStep(bound, memory, work)
        return step

    def _launch(self, step: RecordedStep, cache: KVCache, start: int, token_id: int | None) -> Launched:
        """Launch the step of the token at `start`. If `token_id` is None, the token is the previous step's likeliest.

        The first launch of a step runs kernel by kernel. The second one records the step and replays it.
        """
        if token_id is None:
            self.token.copy_(self.numbers[:1])
        else:
            self.token.fill_(token_id)
        self.index.fill_(start)
        if step.replay is None and step.warm and not _capturing.locked():  # if locked, a later launch tries again
            try:
                with _capturing:
                    step.replay = self.tape.record(step.work)
                self.n_recorded += 1
            except Exception as error:
                self.n_failed += 1
                if self.n_failed == TRIES:
                    self._refuse(f"{type(error).__name__}: {error}")
        if step.replay is None:
            self.tape.warm_up(step.work)
            step.warm = True
        else:
            step.replay()
            self.n_replayed += 1
        return Launched(start, cache.layers, self.logits.clone(), self.tape.reader(self.numbers))

    def _refuse(self, why: str) -> None:
        self.refused, self._steps = why, {}
