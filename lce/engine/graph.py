"""Decode steps on a GPU as CUDA graphs: the step of one token of a context is recorded once, and replayed later.

A step has hundreds of kernels, and launching them one by one takes longer than running them; a graph is one launch.
The step of several contexts is one graph, too (`lce.engine.joint`). Everything that changes from token to token is on
the device: the token, its index, and what the method computes from the index (`lce.methods.step.DeviceStep`). A step
that completes a chunk is another recording. A step is recorded again when the tensors of the cache are replaced by
larger ones, and when the text exceeds the length (`bound`) for which the step was recorded.

Under greedy sampling the step of the likeliest token is launched before the host knows that token. The step writes
after the committed tokens, so its result can be dropped if the text ends or continues with another token.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.engine.joint import JointSteps
from lce.engine.lanes import MOST_LANES, PAUSES, Lane, Recorder, check_logits
from lce.engine.recordings import RecordedStep, Recordings, work_of
from lce.engine.tape import CudaTape
from lce.methods.decoding import completes
from lce.methods.run import Driver
from lce.methods.step import DeviceStep, OnDevice
from lce.models.layers import Model
from lce.models.rope import Rope

MOST_JOINT = 4  # methods of which steps of several lanes are recorded


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


class Graphs(Recorder):
    """The recorded decode steps of contexts, while their caches live. `tape_of` makes a tape for a device."""

    def __init__(self, tape_of: Callable[..., CudaTape]) -> None:
        self._tape_of, self._said = tape_of, {""}
        self._held: WeakKeyDictionary[KVCache, DecodeGraph] = WeakKeyDictionary()
        self.joint: dict[int, JointSteps] = {}  # by the `id` of their driver

    def steps(self, model: Model, lanes: Sequence[Lane]) -> Sequence[Lane]:
        graphs = {lane: self._held.get(lane.cache) for lane in lanes}
        early = {lane: None if graph is None else graph.early() for lane, graph in graphs.items()}
        alone = [lane for lane in lanes if lane.decoding and not PAUSES]
        done = self._joined(model, [lane for lane in alone if len(lane.token_ids) == 1])
        for lane in alone:
            if lane in done:
                continue
            graph = graphs[lane]
            if graph is None or graph.driver is not lane.driver:
                graph = DecodeGraph(model, lane.driver, lane.cache, self._tape_of(lane.cache.layout.device))
                self._held[lane.cache], early[lane] = graph, None
            try:
                if graph.append(lane, early[lane]):
                    done.add(lane)
            except Exception as error:
                lane.fail(error)
                done.add(lane)
            self._say(graph)
        return [lane for lane in lanes if lane not in done]

    def _joined(self, model: Model, lanes: Sequence[Lane]) -> set[Lane]:
        """Append the tokens of lanes that share their driver with others, by steps of several; return these lanes."""
        done, by_driver = set[Lane](), dict[int, list[Lane]]()
        for lane in lanes:
            by_driver.setdefault(id(lane.driver), []).append(lane)
        for key, group in by_driver.items():
            joint = self.joint.pop(key, None)
            if len(group) > 1 and joint is None:
                joint = JointSteps(model, group[0], self._tape_of(group[0].cache.layout.device, 2 * MOST_LANES))
            if joint is None:
                continue
            self.joint[key] = joint  # the newest is last
            if len(self.joint) > MOST_JOINT:
                del self.joint[next(iter(self.joint))]
            for first in range(0, len(group), MOST_LANES):
                done |= joint.append(group[first : first + MOST_LANES])
            self._say(joint)
        return done

    def _say(self, recordings: Recordings) -> None:
        if recordings.refused not in self._said:
            self._said.add(self.refused(recordings.refused))

    def why_not(self, cache: KVCache) -> str:
        return self.of(cache).refused

    def of(self, cache: KVCache) -> DecodeGraph:
        """Return the recorded steps of a context that has decoded alone."""
        return self._held[cache]


class DecodeGraph(Recordings):
    """The recorded decode steps of one context. The graph's own memory holds one step's temporary tensors."""

    def __init__(self, model: Model, driver: Driver, cache: KVCache, tape: CudaTape) -> None:
        super().__init__(driver, cache.layout, tape)
        self.model, device = model, cache.layout.device
        self.token, self.index = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.logits = torch.zeros(1, model.config.vocab_size, dtype=torch.float32, device=device)
        self.numbers = torch.zeros(1, 2, dtype=torch.int64, device=device)
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
            self.refuse("its layers are on several devices")
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
            self.refuse(f"the method asks for {getattr(error, 'name', error)}, which only the device knows")
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
        memory_of_step = self.token, self.index, self.logits, self.numbers
        work = work_of(self.model, self.driver, rope, layers, bound, is_last, *memory_of_step)
        self._steps[is_last] = step = RecordedStep(work, bound, memory)
        return step

    def _launch(self, step: RecordedStep, cache: KVCache, start: int, token_id: int | None) -> Launched:
        """Launch the step of the token at `start`; if `token_id` is None, of the previous step's likeliest token."""
        if token_id is None:
            self.token.copy_(self.numbers[0, :1])
        else:
            self.token.fill_(token_id)
        self.index.fill_(start)
        self.run(step)
        return Launched(start, cache.layers, self.logits[0].clone(), self.tape.reader(self.numbers.view(-1)))

    def refuse(self, why: str) -> None:
        super().refuse(why)
        self._steps = {}
