"""A stage's setup, and its record: a JSON file that is rewritten after every figure."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lce
from lce.engine.graph import Graphs

ERROR_LINES = 12  # of a traceback


class Record(dict[str, Any]):
    """A stage's figures by name. Each assignment writes the file, so a killed stage keeps its figures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.write()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.write()

    def write(self) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self, default=str))
        os.replace(draft, self.path)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a new figure, a dictionary to fill. An error is recorded in the figure, and the stage goes on."""
        cell: dict[str, Any] = {}
        self[name] = cell  # a killed stage keeps the figures of the last write
        started = time.perf_counter()
        try:
            yield cell
        except Exception as error:
            cell["error"] = last_lines(error)
        cell["seconds"] = round(time.perf_counter() - started, 2)
        self.write()


@dataclass
class Setup:
    """The setup of a stage. `tiny` shrinks every size, so that a CPU runs all stages in seconds."""

    device: torch.device
    tiny: bool
    out: Path  # for files that are kept, such as traces
    record: Record
    deadline: float  # of `time.monotonic`
    model: Path | None = None  # a checkpoint; None: drawn weights
    before: Mapping[str, Any] = field(default_factory=dict)  # the figures of an earlier run of the stage

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        """Return the seconds left; a day without a limit."""
        return min(86400.0, self.deadline - time.monotonic())

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def workers(self, n: int) -> Executor:
        """Return spawned processes, for work with kernels to compile; one thread at toy sizes."""
        if self.tiny:
            return ThreadPoolExecutor(1)
        return ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn"))


def graph_figures(engine: lce.Engine) -> dict[str, Any]:
    """Return whether an engine's decode steps were recorded, or why not."""
    if not isinstance(recorder := engine.setup.recorder, Graphs):
        return {"graph": "none"}
    graph = next(each for each in recorder.recorded if each.driver is engine.setup.driver)
    return {"graph": graph.refused or "recorded", "recorded": graph.n_recorded, "replayed": graph.n_replayed}


def seconds_of(setup: Setup, work: Callable[[], object], times: int = 5) -> float:
    """Return the median seconds of several runs after two untimed ones; on a GPU by events."""
    found = []
    for _ in range(times + 2):
        if setup.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


class Skip(Exception):
    """Raised by a stage that cannot run here; the message says why."""


def last_lines(error: BaseException) -> str:
    """Return the last frames, then the error in one line; PyTorch's messages may have a hundred."""
    frames = "".join(traceback.format_tb(error.__traceback__)).strip().splitlines()
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return "\n".join([*frames[-ERROR_LINES:], said[0]])
