"""Decode steps on a CPU as lists of kernels: a model's Python runs for the first token, and only kernels afterwards.

Python between kernels takes a quarter of the time of a step of a small model. A step calls the same kernels with the
same weights and shapes again and again, except in attention, which is not recorded. Where attention is alike in all
layers, the kernels of one layer's serve the later ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lce.engine.lanes import LanesAttend, Recorder
from lce.kernels.runtime.kernel import recording
from lce.kernels.runtime.layer_jobs import LayerJobs, Range
from lce.kernels.runtime.threads import Call, Jobs, Scratch, run_jobs
from lce.models.layers import Attend, Model
from lce.progress import notice

# The operators that may be called between kernels, by their names without overload: they compute nothing.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in "view _unsafe_view reshape _reshape_alias split_with_sizes split chunk slice select transpose t "
    "permute unsqueeze squeeze expand alias detach as_strided narrow unflatten".split()
)
_IDLE = _VIEWS | {"aten.empty", "aten.empty_like", "aten.new_empty"}
_TEMPLATES = 2  # of the first calls of attention, one has kernels that serve all later layers, unless both compute


class _Watch(TorchDispatchMode):
    """Keeps the memory that operators allocate, so that no address is used twice, and notes the first that computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[Any] = []
        self.computed = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from importing its compiler for this class, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_view, is_idle = _kind_of(func)
        if func is torch.ops.aten.reshape.default:  # a view, or else a copy
            is_view = is_idle = found.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        self.computed = self.computed or ("" if is_idle else str(func))
        if not is_view:
            self.held.append(found)
        return found


@cache
def _kind_of(operator: Any) -> tuple[bool, bool]:
    """Return whether an operator makes a view, and whether it computes nothing."""
    name = str(operator).rpartition(".")[0]
    return name in _VIEWS, name in _IDLE


class _Recording:
    """The kernels of a pass of one token of each of n lanes, in parts that end with a call of attention.

    `x` is the memory of the hidden states before the pass, `result` that of the hidden states after it. For each call
    of attention there is what it is asked, `(layer, q, k, v)`, and the memory where the next part reads its answer.
    """

    def __init__(self, model: Model, x: Tensor, attend: Attend) -> None:
        """Run a model's layers on `x [n, hidden]`, and record their kernels."""
        self.x, self.watch = x, _Watch()
        self.asked: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.answers: list[Tensor] = []
        ends = [0]

        def noted(*asked: Any) -> Tensor:
            ends.append(len(calls))
            with _disable_current_modes(), recording(None):
                self.asked.append(asked)
                self.answers.append(attend(*asked).clone())
            return self.answers[-1]

        with self.watch, recording([]) as calls:
            self.result = model(x, noted, generated=True)
        ends.append(len(calls))
        scratch = Scratch()  # of its own, since another thread may replay
        self.parts = [Jobs(calls[first:last], scratch) for first, last in pairwise(ends)]
        self.alike, self.jobs = len(self.asked) > _TEMPLATES, LayerJobs(scratch)
        fixed = [[*map(_range, (*asked[1:], kept))] for asked, kept in zip(self.asked, self.answers, strict=True)]
        self._ranges = np.array(fixed, dtype=np.int64)  # [layers, 4, 2]
        self._held: list[Any] = []  # the memory of the kernels that are to run

    def replay(self, model: Model, x: Tensor, attend: Attend) -> Tensor:
        """Do what the model does; if attention answers in another form, the model itself does the rest."""
        self.x.copy_(x)
        lanes = attend if self.alike and isinstance(attend, LanesAttend) else None
        memory = None if lanes is None else lanes.memory()
        if lanes is not None and memory and lanes.blind:
            answer, calls, serves = self._template(0, attend, runs=False)
            if serves and lanes.blind:
                self._run_alike(0, 0, calls, answer, memory)
                return self.result.clone()
        for number, part in enumerate(self.parts):
            part.run()
            if number < len(self.asked):
                template = number < _TEMPLATES and memory
                if template:
                    answer, calls, serves = self._template(number, attend)
                else:
                    answer = attend(*self.asked[number])
                kept = self.answers[number]
                if (answer.shape, answer.dtype) != (kept.shape, kept.dtype):
                    return model(x, _resumed([*self.answers[:number], answer], attend), generated=True)
                kept.copy_(answer)
                if template and serves:
                    self._run_alike(number + 1, number, calls, answer, template)
                    break
                self.alike = self.alike and not (template and number == _TEMPLATES - 1)
        return self.result.clone()

    def _template(self, number: int, attend: Attend, runs: bool = True) -> tuple[Tensor, list[Call | None], bool]:
        """Attend in a layer; return the answer, the kernels, which may run, and whether they serve other layers."""
        watch, calls, kept = _Watch(), list[Call | None](), self.answers[number]
        with watch, recording(calls, runs):
            answer = attend(*self.asked[number])
        self._held = watch.held
        alike = (answer.shape, answer.dtype, answer.stride()) == (kept.shape, kept.dtype, kept.stride())
        return answer, calls, alike and not watch.computed

    def _run_alike(
        self, first: int, template: int, calls: Sequence[Call | None], answer: Tensor, memory: Sequence[Sequence[Range]]
    ) -> None:
        """Run all from part `first` on, with the template's `calls` as attention, on each layer's own memory."""
        ranges = np.concatenate((self._ranges, np.array(memory, dtype=np.int64)), axis=1)
        own = ranges[template].copy()
        own[self._ranges.shape[1] - 1] = _range(answer)
        self.jobs.set(calls, own, ranges[first:])
        job = self.parts[-1].linked(0)
        for number in range(len(ranges) - 1, first - 1, -1):
            job = self.parts[number].linked(self.jobs.linked(number - first, job))
        run_jobs(job)
        self._held = []


def _range(x: Tensor) -> Range:
    """Return the memory from a tensor's first number to its last one."""
    return x.data_ptr(), (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.itemsize


def _resumed(answers: Sequence[Tensor], attend: Attend) -> Attend:
    """Return a function that returns the answers, one at each call, and then does what `attend` does."""
    known = iter(answers)

    def resumed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        answer = next(known, None)
        return attend(layer, q, k, v) if answer is None else answer

    return resumed


class KernelLists(Recorder):
    """A model's recorded passes through its layers, for each number of rows one, or as many as there are threads.

    The rows of several lanes and of several tokens of a lane have the same kernels, because only attention differs.
    """

    def __init__(self) -> None:
        self._why_not = ""
        self._free: dict[int, list[_Recording]] = {}  # by the number of rows: those that no thread is using

    def layers(self, model: Model, x: Tensor, attend: Attend) -> Tensor:
        """Do what `Recorder.layers` says, with the same bits; replay a recording of as many rows, if one is free.

        Nothing is recorded once an operator of PyTorch has computed anything between two kernels. The next pass
        overwrites what attention is asked with. Bytes kept: T activations in each layer.
        """
        if self._why_not:
            return model(x, attend, generated=True)
        free = self._free.setdefault(len(x), [])
        try:
            found = free.pop()  # if attention raises an error, the step is recorded anew
        except IndexError:
            found = _Recording(model, x, attend)
            result = found.result.clone()
        else:
            result = found.replay(model, x, attend)
        if not found.watch.computed:
            free.append(found)
        elif not self._why_not:
            self._why_not = f"{found.watch.computed} computes between kernels"
            notice(f"steps are not recorded: {self._why_not}", logging.DEBUG)
        return result
