"""Stage 1: the tests that need a GPU."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu_stages.setup import ERROR_LINES, Setup, Skip

ROOT = Path(__file__).parent.parent.parent
MOST_FAILURES = 40  # that are told in full


def run(setup: Setup) -> None:
    if not setup.cuda:
        raise Skip("no CUDA")
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text())
    report = setup.record.path.with_suffix(".xml")
    command = [
        sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--tb=short", "-W", "default", "-p", "no:cacheprovider",
        "-rfE", f"--junitxml={report}", *plugins(), *files,
    ]  # fmt: skip
    output = setup.record.path.with_suffix(".txt")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    started = time.perf_counter()
    with output.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            setup.record["exit status"] = process.wait(max(1.0, setup.left() - 12))
        except subprocess.TimeoutExpired:
            setup.record["exit status"] = "stopped at its limit"
            process.send_signal(signal.SIGINT)  # pytest then writes its report of the tests that it ran
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    setup.record["seconds"] = round(time.perf_counter() - started, 1)
    setup.record["files"] = [Path(file).relative_to(ROOT).as_posix() for file in files]
    setup.record["output"] = "\n".join(output.read_text(errors="replace").splitlines()[-60:])
    if report.exists():
        read_report(setup, report)


def plugins() -> list[str]:
    """Options of plugins that may be installed: several processes, as most of the time is compilation, and limits."""
    found = []
    if importlib.util.find_spec("xdist"):
        found += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2)))]
    if importlib.util.find_spec("pytest_timeout"):
        found += ["--timeout=60"]
    return found


def read_report(setup: Setup, report: Path) -> None:
    """Counts, failures with their last lines, the reasons of skips, and the slowest tests."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
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
    setup.record["skipped"] = skips
    setup.record["failures"] = dict(list(failures.items())[:MOST_FAILURES])
    setup.record["names of failures"] = list(failures)
    setup.record["slowest"] = {str(case.get("name")): float(case.get("time", 0)) for case in slowest}
