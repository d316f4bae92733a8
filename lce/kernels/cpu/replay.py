"""Replays the kernels of a decode step: a model's Python runs for the first token, and only its kernels afterwards.

Python between kernels takes a quarter of the time of a step of a small model. A step of one token calls the same
kernels with the same weights and shapes again and again, except in attention, which is not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lce.kernels.cpu.kernel import recording
from lce.profiling import is_profiling

# The operators that may be called between kernels, by their names without overload: they compute nothing.
_IDLE = frozenset(
    f"aten.{name}"
    for name in "empty empty_like new_empty view _unsafe_view reshape _reshape_alias split_with_sizes split chunk "
    "slice select transpose t permute unsqueeze squeeze expand alias detach as_strided".split()
)


class _Watch(TorchDispatchMode):
    """Keeps the results of operators, so that no address is used twice, and notes whether any operator computes."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []
        self.computes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.computes |= str(func).rpartition(".")[0] not in _IDLE
        self.held.append(found)
        return found


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class _Recording:
    """The kernels of a pass of one token through a model, in parts that end with a call of attention.

    `x` is the memory of the hidden states before the pass, `result` that of the hidden states after it. For each call
    of attention there is what it was asked, what it answered, and the places of the answer's address in the arguments
    of the next part's kernels.
    """

    def __init__(self, x: Tensor, layers: Callable[[Tensor, Attend], Tensor], attend: Attend) -> None:
        """Run `layers` on `x [1, hidden]`, and record its kernels."""
        self.x, self.watch = x, _Watch()
        self.asked: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.answers: list[Tensor] = []
        ends = [0]

        def noted(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ends.append(len(calls))
            with _disable_current_modes(), recording(None):
                answer = attend(layer, q, k, v)
            self.asked.append((layer, q, k, v))
            self.answers.append(answer)
            return answer

        with self.watch, recording([]) as calls:
            self.result = layers(x, noted)
        ends.append(len(calls))
        self.parts = [calls[first:last] for first, last in pairwise(ends)]
        self.places = [
            [(call, i) for call in part for i, value in enumerate(call.args) if value == answer.data_ptr()]
            for answer, part in zip(self.answers, self.parts[1:], strict=True)
        ]

    def replay(self, x: Tensor, attend: Attend) -> Tensor:
        """Do what `layers` did, with other hidden states."""
        self.x.copy_(x)
        for number, part in enumerate(self.parts):
            for call in part:
                call()
            if number < len(self.asked):
                answer, before = attend(*self.asked[number]), self.answers[number]
                if answer.stride() != before.stride() or answer.shape != before.shape or answer.dtype != before.dtype:
                    raise RuntimeError(f"attention answered {answer.shape}, after {before.shape}")
                at = answer.data_ptr()
                for call, i in self.places[number]:
                    call.args[i] = at
                self.answers[number] = answer  # keeps the memory until the kernels have run
        return self.result.clone()


class Replays:
    """A model's recorded pass of one token, one for each thread that runs the model."""

    def __init__(self) -> None:
        self._local = threading.local()

    def run(self, x: Tensor, layers: Callable[[Tensor, Attend], Tensor], attend: Attend) -> Tensor:
        """Return `layers(x, attend)` for `x [T, hidden]`; the second pass of one token on a CPU replays the first.

        Nothing is replayed if an operator of PyTorch computes anything between two kernels, or while a profile is
        taken. Replayed results have the same bits. Bytes kept: the activations of one token in each layer.
        """
        if len(x) != 1 or not x.is_cpu or not torch.is_inference_mode_enabled() or is_profiling():
            return layers(x, attend)
        found = getattr(self._local, "recording", None)
        if found is None:
            found = _Recording(x, layers, attend)
            self._local.recording = found if not found.watch.computes else False
            return found.result.clone()
        return found.replay(x, attend) if found else layers(x, attend)
