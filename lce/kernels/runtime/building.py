"""Compiles all kernels of a level ahead of their first use: when lce is installed, and by `lce warm`.

The files lie where the engine looks for them: beside the package, or in the user's cache if nobody may write there.
Files that are there already are kept. Each core has a process, which compiles its share of the kernels and ends; if
this process is killed, the others end at their next kernel.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lce.errors import CapacityError, LceError, UsageError
from lce.files import named
from lce.kernels.runtime import library
from lce.kernels.runtime.levels import Level
from lce.progress import Progress, notice
from lce.system import usable_cores

KERNEL_S = 0.8  # seconds of a core for a kernel, on an Intel Xeon; Numba's own start included

# What a process runs: it looks for modules where this process does, whatever folder it runs in.
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from lce.kernels.runtime import building; building.compile_share{share!r}"
)


@dataclass(frozen=True)
class Built:
    """What `build` did for a level: how many kernels the level has, how many were compiled, and where these are."""

    level: str
    n_kernels: int
    n_compiled: int
    n_bytes: int  # of the kernels that were compiled
    seconds: float
    folder: Path

    @property
    def line(self) -> str:
        """A line that says it. Example: `v4: 216 kernels compiled, 7,012 KiB, 58 s, in lce/kernels/built/1f.../v4`."""
        if not self.n_compiled:
            return f"{self.level}: all {self.n_kernels} kernels are there already"
        of_all = f" of {self.n_kernels}" if self.n_compiled < self.n_kernels else ""
        size = f"{self.n_bytes >> 10:,} KiB, {self.seconds:.0f} s"
        return f"{self.level}: {self.n_compiled}{of_all} kernels compiled, {size}, in {named(self.folder)}"


def build(level: Level, progress: Progress = lambda done, total: None, *, beside: bool = True) -> Built:
    """Compile the kernels of a level that are missing. `progress` gets the numbers of compiled and of missing kernels.

    Without `beside` they go to the user's cache, also if the folder beside the package can be written. Raises
    `UsageError` if Numba is missing or no folder can be written, and `CapacityError` if the disk is full.
    """
    began = time.monotonic()
    files = [library.file_name(*each) for each in kernels()]
    folder = library.built_folder(level)
    missing = [file for file in files if library.read(folder / file) is None]
    if missing:
        folder = writable_folder(level, beside)
        missing = [file for file in missing if library.read(folder / file) is None]
    if missing:
        n_cores = min(usable_cores(), len(missing))
        about = f"about {math.ceil(KERNEL_S * len(missing) / n_cores)} s on {n_cores} cores"
        notice(f"{level.name}: compiling {len(missing)} kernels into {named(folder)}, {about}")
        _compile(level, folder, missing, progress)
    n_bytes = sum((folder / file).stat().st_size for file in missing)
    return Built(level.name, len(files), len(missing), n_bytes, time.monotonic() - began, folder)


def kernels() -> list[tuple[str, Any]]:
    """Return the names and kinds of all kernels. Raises `UsageError` if Numba, which compiles them, is missing."""
    try:
        from lce.kernels.runtime import bodies
    except ImportError:
        raise UsageError("Numba, which compiles kernels, is missing; install Numba with: pip install numba") from None
    return [*bodies.names()]


def writable_folder(level: Level, beside: bool) -> Path:
    """Create and return the folder for a level's kernels: `beside` the package, else in the user's cache.

    Kernels of other sources that lie beside the package are deleted. Raises `UsageError` if neither can be written.
    """
    own, reason = library.built_folder(level), "a clone's package is left as it is"
    if beside:
        try:
            own.mkdir(parents=True, exist_ok=True)
            reason = "it is not ours to write"
        except OSError as error:
            reason = error.strerror or str(error)
        if os.access(own, os.R_OK | os.W_OK | os.X_OK):
            for other in own.parent.parent.iterdir():
                if other != own.parent:
                    shutil.rmtree(other, ignore_errors=True)
            return own
    folder = library.cache_folder(level)
    if folder is None:
        raise UsageError(
            f"kernels can be kept neither in {named(own)} ({reason}) nor in the user's cache; let this user write "
            "one of them, or set XDG_CACHE_HOME to a folder of this user's"
        )
    return folder


def _compile(level: Level, folder: Path, files: Sequence[str], progress: Progress) -> None:
    """Compile kernels, by the names of their files, on all cores."""
    number = min(usable_cores(), len(files))
    environment = {**os.environ, "LCE_CPU": level.name}
    parts: list[subprocess.Popen[str]] = []
    reader, writer = os.pipe()  # a line for each kernel; it ends with the last process
    with tempfile.TemporaryFile("w+", errors="replace") as said, open(reader) as done:
        try:
            try:
                for i in range(number):
                    program = _PROGRAM.format(path=sys.path, share=(str(folder), [*files[i::number]]))
                    command = [sys.executable, "-P", "-c", program]
                    parts.append(subprocess.Popen(command, env=environment, stdout=writer, stderr=said, text=True))
            finally:
                os.close(writer)
            progress(0, len(files))
            for n_done, _ in enumerate(done, 1):
                progress(n_done, len(files))
            for part in parts:
                if part.wait():
                    raise _failure(part.returncode, said)
        finally:
            for part in parts:
                part.kill()
                part.wait()


def _failure(code: int, said: IO[str]) -> LceError:
    """Return the error of a process that ended with a code, with the last line that it said."""
    if code < 0:
        return CapacityError(f"a process that compiles kernels was killed by signal {-code}; it may need more memory")
    said.seek(0)
    line = ([line for line in said.read().splitlines() if line.strip()] or [f"exit code {code}"])[-1]
    return CapacityError(line) if code == CapacityError.exit_code else LceError(f"kernels cannot be compiled: {line}")


def compile_share(folder: str, files: Sequence[str]) -> None:
    """Compile some kernels of the level that LCE_CPU names into a folder, and print the name of each: a process."""
    from lce.kernels.runtime import bodies, compiling

    named_kernels = {library.file_name(*each): each for each in kernels()}
    try:
        for file in files:
            library.write(Path(folder) / file, compiling.machine_code(file, bodies.body(*named_kernels[file])))
            print(file, flush=True)
    except LceError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
