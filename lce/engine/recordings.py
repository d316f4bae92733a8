"""Steps that are recorded as CUDA graphs: what one is, and what is done where a recording fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from weakref import ReferenceType

import torch
from torch import Tensor

from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.engine.tape import CudaTape, Work
from lce.methods.run import Driver
from lce.models.layers import Model
from lce.models.products import thread_scratch
from lce.models.rope import Rope

TRIES = 3  # recordings that may fail before steps run kernel by kernel for good

_capturing = Lock()  # held by the thread that records: one thread may record at a time


@dataclass(eq=False)
class RecordedStep:
    """A decode step: `work` runs it kernel by kernel, `replay` as a CUDA graph. `warm` says that `work` has run.
    `scratch` is memory that the recording writes to.

    A context's own step is for texts up to `bound` tokens. `memory` refers weakly to the step's cache tensors, which a
    growing cache frees.
    """

    work: Work
    bound: int = 0
    memory: Sequence[ReferenceType[Tensor] | None] = ()
    warm: bool = False
    replay: Work | None = None
    scratch: dict[torch.device, Tensor] = field(default_factory=dict)


class Recordings:
    """The recorded steps of a driver on a tape. `refused` says why no step can be recorded, or is empty."""

    def __init__(self, driver: Driver, layout: CacheLayout, tape: CudaTape) -> None:
        self.driver, self.tape = driver, tape
        able = driver.method.promised("recorded") and driver.attention.decodes(layout.dtype, layout.head_dim)
        self.refused = "" if able else f"the step of {driver.method.label} is not made for it on this device"
        self.n_recorded = self.n_replayed = self.n_failed = 0

    def run(self, step: RecordedStep) -> None:
        """Run a step: kernel by kernel for the first time, and then as a recording, unless that fails too often."""
        if step.replay is None and step.warm and not _capturing.locked():  # if locked, a later launch tries again
            try:
                with _capturing:
                    step.replay, step.scratch = self.tape.record(step.work), thread_scratch()
                self.n_recorded += 1
            except Exception as error:
                self.n_failed += 1
                if self.n_failed == TRIES:
                    self.refuse(f"{type(error).__name__}: {error}")
        if step.replay is None:
            self.tape.warm_up(step.work)
            step.warm = True
        else:
            step.replay()
            self.n_replayed += 1

    def refuse(self, why: str) -> None:
        """Record and replay no step from now on."""
        self.refused = why


def work_of(
    model: Model, driver: Driver, rope: Rope, layers: Sequence[LayerCache], bound: int, completes: bool, *memory: Tensor
) -> Work:
    """Return what computes the step of B tokens. `memory` is `token index [B]`, and `logits [B, vocab] numbers [B, 2]`.

    The work must not refer to what holds its recording: no cycle may keep the cache of a closed context.
    """
    token, index, kept, numbers = memory

    def work() -> None:
        attend = driver.recorded(layers, rope, index, bound, completes)
        attend = model.attending(attend, rope.positions(index))
        hidden = model(model.embedded(token), attend, generated=True)
        logits = model.logits(hidden, drawn=True)
        kept.copy_(logits)
        numbers.copy_(torch.stack((logits.argmax(-1), logits.isfinite().all(-1).to(torch.int64)), dim=1))

    return work
