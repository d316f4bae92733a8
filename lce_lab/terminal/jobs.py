"""What `lce eval run --ray` does: workers of a Ray Data job ask a run's samples, shard by shard, into its record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lce.errors import LceError, UsageError
from lce.terminal.output import Output
from lce_lab.eval.record import Record, line_of, parse_line
from lce_lab.eval.running import Shard
from lce_lab.eval.suite import MadeSuite
from lce_lab.terminal.suites import SuiteRun

SHARDS = 4  # for each worker and task: workers end at nearly the same time, and few samples are lost if a job ends

Lines = list[tuple[dict[str, Any], Any]]


def filling(ray: str | None, workers: int | None) -> Callable[[SuiteRun], None] | None:
    """Return a function that fills a run's record by a Ray job at the address `ray`; `local` is this machine alone."""
    if ray is None and workers is not None:
        raise UsageError("--workers is for --ray; give --ray, too")
    return None if ray is None else partial(fill, address=ray, workers=workers)


def fill(run: SuiteRun, address: str, workers: int | None = None) -> None:
    """Ask what a run's record lacks, on a Ray cluster. By default, there is a worker for each `threads` cores."""
    try:
        from lce_serve.ray import ship_code  # isort: skip  # before Ray, whose statistics it switches off
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(f"--ray needs {error.name}; install it by pip install 'lce[ray]'") from None

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"--ray {address}: {why}; start a cluster, or leave it out") from None
    try:
        ship_code(run.methods)
        _job(run, ray, workers)
    except ray.exceptions.RayError as error:
        raise _failure(error) from None
    finally:
        ray.shutdown()


def _job(run: SuiteRun, ray: Any, workers: int | None) -> None:
    cores, gpus = (int(ray.cluster_resources().get(name, 0)) for name in ("CPU", "GPU"))
    threads = min(run.loading.get("threads") or cores, max(1, cores // (workers or 1)))
    workers = workers or max(1, cores // threads)
    own, shards = run.suite.asking.shard, SHARDS * workers
    if isinstance(run.suite, MadeSuite):  # no shard may be empty
        shards = min(shards, len(range(own.index, run.suite.samples, own.count)))
    known = [(sample, measured) for _, sample, measured in run.answers.items()]
    quiet = replace(run, loading={**run.loading, "threads": threads}, output=Output(json=True, quiet=True))
    ray.data.DataContext.get_current().enable_progress_bars = False
    parts = [{"task": task, "shard": shard} for task in range(len(run.tasks)) for shard in range(shards)]
    done = ray.data.from_items(parts, override_num_blocks=len(parts)).map_batches(
        Worker,
        batch_size=1,
        concurrency=workers,
        num_cpus=threads,
        num_gpus=1 if gpus and run.loading.get("device") != "cpu" else 0,
        fn_constructor_args=(replace(quiet, answers=Record()), known, shards),
    )
    with run.output.bar("shards", "") as advance:
        for number, row in enumerate(done.iter_rows(), 1):
            run.answers.add_all([parse_line(line) for line in row["lines"].splitlines()])
            advance(number, len(parts))


class Worker:
    """A process of a job: the run's engines, which ask one shard of one task after the other."""

    def __init__(self, run: SuiteRun, known: Lines, shards: int) -> None:
        self._run, self._known, self._shards = run, known, shards
        self._engines = run.load()

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[bytes]]:
        """Return the lines of a shard for the record."""
        asked = map(self._asked, batch["task"], batch["shard"])
        return {"lines": [b"".join(line_of(*line) for line in lines) for lines in asked]}

    def _asked(self, task: int, number: int) -> Lines:
        suite, answers = self._run.suite, Record()
        answers.add_all(self._known)
        before = {key for key, _, _ in answers.items()}
        own = suite.asking.shard
        shard = Shard(own.index + own.count * int(number), own.count * self._shards)
        asked: Any = {
            "suite": replace(suite, asking=replace(suite.asking, shard=shard)),
            "tasks": [self._run.tasks[task]],
        }
        replace(self._run, **asked, answers=answers, objects=[], scores={}).ask(self._engines)
        return [(sample, measured) for key, sample, measured in answers.items() if key not in before]


def _failure(error: BaseException) -> LceError:
    """Return what stopped a job: the worker's error if it is one of lce, else a line of Ray's."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, LceError):
        cause = getattr(cause, "cause", None) or cause.__cause__
    return cause or LceError(f"the job failed: {str(error).strip().splitlines()[-1]}")
