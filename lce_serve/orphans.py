"""Ends agents of Ray that outlive a killed `lce serve --replicas`: they wait a minute for Ray's other processes.

`python -m lce_serve.orphans PID ...` waits for the end of stdin, which is a pipe from the main process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

GRACE_S = 1.0  # seconds in which the processes may end by themselves


def watch(pids: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one, and then ends those processes of `pids` that are Ray's."""
    command = [sys.executable, "-m", "lce_serve.orphans", *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def end(pids: Iterable[int]) -> None:
    """End the processes that are Ray's."""
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    time.sleep(GRACE_S)
    end(map(int, sys.argv[1:]))
