"""Prefills a document into a context, or straight into a context file."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lce.engine.arguments import Prompt
from lce.engine.context import Context, appended, context_of
from lce.engine.options import Counted, Record, option
from lce.engine.planning import ALLOWANCE
from lce.engine.prefill_job import PrefillJob
from lce.engine.running import append, blocks, prompt_ids, read
from lce.engine.saving import Target
from lce.engine.setup import Setup
from lce.engine.stream import Stats
from lce.errors import UsageError
from lce.files import path_of
from lce.progress import Progress, check_progress, reported
from lce.sizes import count


def prefill(
    setup: Setup,
    document: Prompt,
    context: Context | None = None,
    length: int | str | None = None,
    progress: Progress | bool | None = None,
) -> Context:
    """Append a document to `context`, or to a new context: see `Engine.prefill`."""
    announced = 0 if length is None else count(length, "length", least=0)
    ids = prompt_ids(setup, document, context)

    def work(held: Context) -> Context:
        held.token_ids.extend(ids)
        with reported(progress, "prefill") as tell:
            read(setup, held, tell)
        return held

    return appended(setup, context, len(ids), announced, work)


@dataclass(frozen=True)
class FilePrefill(Record):
    """The arguments of `Engine.prefill_file`."""

    document: Prompt
    path: Any = option(parse=path_of)
    context: Context | None = None
    length: Any = option(None, parse=Counted(0))
    checkpoint_every: Any = option(None, parse=Counted())
    force: bool = False
    progress: Progress | bool | None = None


def prefill_file(
    setup: Setup, asked: FilePrefill, shrink: Callable[[Context, Progress], Context] | None = None
) -> Stats:
    """Prefill a document into a context file: see `Engine.prefill_file`.

    With `shrink`, the text is prefilled in memory, and what `shrink` returns for its context is written.
    """
    context, ids = asked.context, prompt_ids(setup, asked.document, asked.context)
    check_progress(asked.progress)
    target = Target(asked.path, asked.force, () if context is None else context.data.saves)
    if shrink is not None or setup.ranks.count > 1 or (context is not None and context.cache.fixed):
        if asked.checkpoint_every is not None:
            raise UsageError("checkpoint_every is for a prefill on one rank that keeps all keys; leave it out")
        return _file_from_memory(setup, ids, target, asked, shrink)
    with nullcontext() if context is None else context.hold():
        before = None if context is None else context.data
        ids = ids if before is None else [*before.token_ids, *ids]
        announced = max(len(ids), asked.length or 0) if before is None else before.announced
        ALLOWANCE.planner(setup.layout, into_file=True).check(len(ids))
        setup.warn(len(ids))
        job = PrefillJob(target, setup.files, ids, announced)
        try:
            held = context_of(setup, job.start(before))
            ALLOWANCE.promise(held.cache, len(ids))
            stats = Stats(prompt_tokens=len(held.uncached), read_before=held.cache.length)
            started = time.perf_counter()
            with torch.inference_mode(), reported(asked.progress, "prefill") as tell:
                for part in blocks(held.uncached, setup.block, tell, done=held.cache.length):
                    if held.cache.length - job.n_written >= (asked.checkpoint_every or len(ids)):
                        job.checkpoint(held.data)
                    append(setup, held, part)
            stats.prefill_s = time.perf_counter() - started
            job.finish(held.data)
        except BaseException as error:
            job.abandon(error)
            raise
    stats.memory, stats.traffic = held.cache.bytes_by_tier, held.cache.traffic
    return stats


def _file_from_memory(
    setup: Setup,
    ids: list[int],
    target: Target,
    asked: FilePrefill,
    shrink: Callable[[Context, Progress], Context] | None,
) -> Stats:
    """Prefill a document in memory, shrink its context, if asked to, and write the file."""
    target.check()
    n, context = len(ids), asked.context
    stats, whole = Stats(prompt_tokens=n, read_before=len(context or ())), n if shrink is None else 2 * n
    with reported(asked.progress, "prefill") as tell:
        started, held = time.perf_counter(), None if context is None else context.fork()
        held = prefill(setup, ids, held, asked.length, lambda done, _: tell(done, whole))
        stats.prefill_s = time.perf_counter() - started
        with held, shrink(held, lambda done, total: tell(n + done * n // total, whole)) if shrink else held as written:
            setup.files.save(target, written.data)
            stats.memory, stats.traffic = written.cache.bytes_by_tier, written.cache.traffic
    return stats
