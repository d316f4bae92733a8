"""Prefills a document into a context, or straight into a context file."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lce.cache.kv import off_grid
from lce.engine.arguments import Prompt
from lce.engine.context import Context, appended, context_of
from lce.engine.options import Counted, Record, option
from lce.engine.planning import ALLOWANCE
from lce.engine.prefill_job import PrefillJob
from lce.engine.running import agreed_ids, append, blocks, unread
from lce.engine.saving import Target
from lce.engine.setup import Setup
from lce.engine.stream import Stats
from lce.errors import UsageError
from lce.files import path_of
from lce.progress import Progress, check_progress, reported
from lce.sizes import count


def prefill(
    setup: Setup, document: Prompt, context: Context | None, length: int | str | None, progress: Progress | bool | None
) -> Context:
    """Append a document to `context`, or to a new context: see `Engine.prefill`."""
    ids = agreed_ids(setup, document, context, progress, length=length)
    announced = 0 if length is None else count(length, "length", least=0)

    def work(held: Context) -> Context:
        held.token_ids.extend(ids)
        with reported(progress, "prefill") as tell:
            append(setup, held, unread(setup, held, tell))
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
    keep: float | None = None  # checked by `lce.engine.eviction`


def prefill_file(setup: Setup, asked: FilePrefill) -> Stats:
    """Prefill a document into a context file: see `Engine.prefill_file`."""
    context, how = asked.context, {"keep": asked.keep, "checkpoint_every": asked.checkpoint_every}
    ids = agreed_ids(setup, asked.document, context, asked.progress, path=str(asked.path), length=asked.length, **how)
    check_progress(asked.progress)
    target = Target(asked.path, asked.force, () if context is None else context.data.saves)
    if asked.keep is not None or setup.ranks.count > 1 or (context is not None and context.cache.fixed):
        if asked.checkpoint_every is not None:
            raise UsageError("checkpoint_every is for a prefill on one rank that keeps all keys; leave it out")
        return _file_from_memory(setup, ids, target, asked)
    with nullcontext() if context is None else context.hold():
        before = None if context is None else context.data
        ids = ids if before is None else [*before.token_ids, *ids]
        announced = max(len(ids), asked.length or 0) if before is None else before.announced
        ALLOWANCE.planner(setup.layout, into_file=True).check(len(ids))
        setup.warn(len(ids), None if context is None else context.rope)
        job = PrefillJob(target, setup.files, ids, announced)
        try:
            held = context_of(setup, job.start(before))
            ALLOWANCE.promise(held.cache, len(ids))
            stats = Stats(prompt_tokens=len(held.uncached), read_before=held.cache.length)
            started = time.perf_counter()
            with torch.inference_mode(), reported(asked.progress, "prefill") as tell:
                n, offset = held.cache.length, off_grid(held.cache)
                for part in blocks(held.uncached, setup.block, tell, n, offset):
                    if held.cache.length - job.n_written >= (asked.checkpoint_every or len(ids)):
                        job.checkpoint(held.data)
                    append(setup, held, [part])
            stats.prefill_s = time.perf_counter() - started
            job.finish(held.data)
        except BaseException as error:
            job.abandon(error)
            raise
    stats.memory, stats.traffic = held.cache.bytes_by_tier, held.cache.traffic
    return stats


def _file_from_memory(setup: Setup, ids: list[int], target: Target, asked: FilePrefill) -> Stats:
    """Prefill a document in memory, evict keys if asked to, and write the file."""
    n, context, keep = len(ids), asked.context, asked.keep
    if keep is not None:
        from lce.engine import eviction

        eviction.check(setup, keep, context)
    setup.together(target.check)
    stats, whole = Stats(prompt_tokens=n, read_before=len(context or ())), n if keep is None else 2 * n
    with reported(asked.progress, "prefill") as tell:
        started, held = time.perf_counter(), None if context is None else context.fork()
        written = held = prefill(setup, ids, held, asked.length, lambda done, _: tell(done, whole))
        stats.prefill_s = time.perf_counter() - started
        with held:
            if keep is not None:
                written = eviction.evict(setup, held, keep, lambda done, total: tell(n + done * n // total, whole))
                stats.more_s["evict"] = time.perf_counter() - started - stats.prefill_s
            with written:
                setup.files.save(target, written.data)
                stats.memory, stats.traffic = written.cache.bytes_by_tier, written.cache.traffic
    return stats
