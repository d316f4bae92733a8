"""Runs functions on several ranks: processes that find each other through a file. Nothing waits without a limit."""

import gc
import importlib
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.command import Process, start

WAIT_S = 60.0  # the longest that a rank waits for another
_WORK = "import sys; from tests.ranks import work; work(*sys.argv[1:])"
_numbers = itertools.count()


def begun(count: int, folder: Path, call: Callable[..., Any], *args: Any, limit_s: float = WAIT_S) -> list[Process]:
    """Start a process a rank, each of which runs `call(group, *args)`, a function of a test's module.

    A rank waits for another rank for `limit_s` seconds at most.
    """
    at = folder / f"ranks {next(_numbers)}"
    torch.save((call.__module__, call.__qualname__, args, limit_s), at)
    return [start(_WORK, str(rank), str(count), at) for rank in range(count)]


def on_ranks(count: int, folder: Path, call: Callable[..., Any], *args: Any, limit_s: float = WAIT_S) -> list[Any]:
    """Return what `call(group, *args)` returns on each rank."""
    processes = begun(count, folder, call, *args, limit_s=limit_s)
    with ExitStack() as running:
        for process in processes:
            running.enter_context(process)
        ends = [process.communicate(timeout=limit_s) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, "\n".join(err for _, err in ends)
    lines: list[Any] = [process.args for process in processes]
    return [torch.load(line[-1].with_suffix(f".{rank}"), weights_only=False) for rank, line in enumerate(lines)]


def work(rank: str, count: str, at: str) -> None:
    """Be a rank: run the function that is named in the file `at`, and write what it returns."""
    torch.set_num_threads(1)
    module, name, args, limit_s = torch.load(at, weights_only=False)
    place = f"file://{at}.store"
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", init_method=place, rank=int(rank), world_size=int(count), timeout=limit)
    found = getattr(importlib.import_module(module), name)(dist.group.WORLD, *args)
    torch.save(found, Path(at).with_suffix(f".{rank}"))
    gc.collect()  # a group that something refers to has threads, which must not meet Python's end
    dist.destroy_process_group()
    sys.stdout.flush()
