"""Profiles an engine: the time of each kind of work, and what attention reads and computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lce.cache.layout import all_devices
from lce.engine.context import Context, given_context
from lce.engine.engine import Engine
from lce.engine.lanes import one_by_one
from lce.engine.running import append, prompt_ids
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
        for device in all_devices(engine.setup.layout):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    with one_by_one(), profiling(engine.setup.config.n_kv_heads, engine.method.access.chunk_size, wait) as profile:
        yield profile


def profiled_step(engine: Engine, context: Context) -> Profile:
    """Run one decode step of `context`; return the step's profile. Afterwards the context ends with the step's token.

    The step is that of the tokens that are not cached yet, as after an answer; if there are none, the last token is
    appended once more. Example: `profiled_step(engine, context).read_bytes`, of the keys, values and summaries read.
    """
    with profiled(engine) as step:
        held = given_context(engine.setup, context)
        prompt_ids(engine.setup, [], held)  # raises if the context is empty
        if not held.uncached:
            held.token_ids.append(held.token_ids[-1])
        append(engine.setup, held, [held.uncached], decoding=True)
    return step
