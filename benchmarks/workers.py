"""Engines in their own processes, asked in turns over pipes: a JSON line a request and an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def serve(worker: Any) -> None:
    """Answer the parent's requests: each names a method of `worker` and its arguments."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output goes to stderr
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("what")
        result: Any = peak_memory() if what == "memory" else getattr(worker, what)(**request)
        answers.write(json.dumps(result) + "\n")
        answers.flush()


class Remote:
    """One engine in its own process: `script --serve name`, by a Python and with variables of its own."""

    def __init__(self, script: str, name: str, python: str = sys.executable, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [python, script, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def ask(self, what: str, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def peak_memory() -> int:
    """Return the bytes of this process's peak resident set."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
