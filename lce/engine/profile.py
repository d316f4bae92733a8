"""Profiles an engine: the time of each kind of work, and what attention reads and computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lce.engine.engine import Engine
from lce.engine.graph import one_by_one
from lce.errors import UsageError, shown
from lce.profiling import Profile, profiling


@contextmanager
def profiled(engine: Engine) -> Iterator[Profile]:
    """Profile the calls of `engine` by this thread inside `with`; read the profile afterwards.

        with lce.profiled(engine) as profile:
            engine.generate("...")

    On a GPU every timed call waits for the device, so that its time includes its own kernels. Decode steps run without
    CUDA graphs inside `with`, so they are slower. The profile adds about a microsecond to each timed call.
    """
    if not isinstance(engine, Engine):
        raise UsageError(f"engine is {shown(engine)}; expected what lce.load returns")

    def wait() -> None:
        for device in engine.layout.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    with one_by_one(), profiling(engine.model.config.n_kv_heads, engine.method.access.chunk_size, wait) as profile:
        yield profile
