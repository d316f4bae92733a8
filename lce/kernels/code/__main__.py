"""`python -m lce.kernels.code [LEVEL ...]` compiles all kernels of some levels, by default of this processor's.

Each core has a process. The files lie beside the package, where the engine finds them; files of other sources are
deleted, and files that are there already are kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lce.kernels import levels
from lce.kernels.cpu import library

_PART = "--part"  # before the number of a process and the number of processes


def build(names: list[str]) -> None:
    """Compile all kernels of some levels. Raises CalledProcessError if a process fails."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in names:
        begun, level = time.monotonic(), levels.LEVELS.get(name) or levels.asked()
        folder = library.built_folder(level)
        for other in folder.parent.parent.glob("*"):
            if other != folder.parent:
                shutil.rmtree(other)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "lce.kernels.code", _PART]
        environment = {**os.environ, "LCE_CPU": name}
        parts = [subprocess.Popen([*command, str(i), str(number)], env=environment) for i in range(number)]
        for part in parts:
            if part.wait():
                raise subprocess.CalledProcessError(part.returncode, command)
        files = [*folder.iterdir()]
        n_bytes = sum(file.stat().st_size for file in files)
        print(f"{name}: {len(files)} kernels, {n_bytes >> 10} KiB, {time.monotonic() - begun:.0f} s", file=sys.stderr)


def compile_part(index: int, number: int) -> None:
    """Compile every `number`-th kernel of the level that LCE_CPU names, from the kernel with this index on."""
    from lce.kernels.code import bodies, compiling

    folder: Path = library.built_folder(levels.asked())
    for name, kind in [*bodies.names()][index::number]:
        path = folder / library.file_name(name, kind)
        if library.read(path) is None:
            library.write(path, compiling.machine_code(path.name, bodies.body(name, kind)))


if __name__ == "__main__":
    if sys.argv[1:2] == [_PART]:
        compile_part(int(sys.argv[2]), int(sys.argv[3]))
    else:
        build(sys.argv[1:] or [levels.asked().name])
