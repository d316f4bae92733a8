"""Stage 1: the tests that need a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from gpu_stages.setup import ERROR_LINES, Setup, Skip

ROOT = Path(__file__).parent.parent.parent
OUTPUT_LINES = 12  # of each process
MOST_FAILURES = 40  # reported in full
LAST = 12.0  # pytest is interrupted this many seconds before the stage's end, to write its report


def run(setup: Setup) -> None:
    """Run the tests in several processes, since most of the time is compilation."""
    if not setup.cuda:
        raise Skip("no CUDA")
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text())
    n_shards = max(1, min(8, (os.cpu_count() or 1) // 2))  # stages 2 and 3 run beside this one
    started, stem = time.perf_counter(), setup.record.path.with_suffix("")
    shards = [Shard(number, n_shards, files, Path(f"{stem}-{number}")) for number in range(n_shards)]
    late = [shard for shard in shards if shard.wait(setup.left() - LAST) is None]
    for shard in late:
        shard.process.send_signal(signal.SIGINT)
    for shard in late:
        if shard.wait(setup.left() - LAST / 3) is None:
            shard.process.kill()
            shard.process.wait()
    setup.record["exit status"] = [shard.process.returncode for shard in shards]
    setup.record["stopped at the limit"] = [shard.number for shard in late]
    setup.record["seconds"] = round(time.perf_counter() - started, 1)
    setup.record["files"] = [Path(file).relative_to(ROOT).as_posix() for file in files]
    setup.record["output"] = {
        shard.number: "\n".join(shard.output.read_text(errors="replace").splitlines()[-OUTPUT_LINES:])
        for shard in shards
    }
    read_reports(setup, [shard.report for shard in shards if shard.report.exists()])


class Shard:
    """A process of pytest with its share of the tests."""

    def __init__(self, number: int, n_shards: int, files: list[str], stem: Path) -> None:
        self.number = number
        self.report, self.output = stem.with_suffix(".xml"), stem.with_suffix(".txt")
        command = [
            sys.executable, "-m", "pytest", "-p", "gpu_stages.shard", "-m", "cuda", "-q", "--tb=short",
            "-W", "default", "-p", "no:cacheprovider", "-rfE", f"--junitxml={self.report}", *files,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "benchmarks"), environment.get("PYTHONPATH"))))
        environment |= {"SHARD": f"{number}/{n_shards}", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with self.output.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait(self, seconds: float) -> int | None:
        """Return the process's exit status, or None if it still runs after `seconds`."""
        try:
            return self.process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            return None


def read_reports(setup: Setup, reports: list[Path]) -> None:
    """Record counts, failures with their last lines, reasons of skips, and the slowest tests."""
    cases = [case for report in reports for case in ElementTree.parse(report).getroot().iter("testcase")]
    failures, skips = {}, {}
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name')}"
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                failures[name] = "\n".join((found.text or found.get("message") or "").splitlines()[-ERROR_LINES:])
        if (found := case.find("skipped")) is not None:
            skips[name] = found.get("message", "")
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:10]
    setup.record["tests"] = len(cases)
    setup.record["passed"] = len(cases) - len(failures) - len(skips)
    setup.record["failed"] = len(failures)
    setup.record["skipped"] = len(skips)
    setup.record["reasons of skips"] = dict(Counter(skips.values()))
    setup.record["failures"] = dict(list(failures.items())[:MOST_FAILURES])
    setup.record["names of failures"] = list(failures)
    setup.record["slowest"] = {str(case.get("name")): float(case.get("time", 0)) for case in slowest}
