"""The machine code of CPU kernels: found beside the package or in the user's cache, else compiled here and kept there.

A kernel is a file of flat code in a folder of its level, and a digest of the source is in the folder's path, so no
file is ever stale. Neither Numba nor LLVM is imported unless a kernel has to be compiled.
"""

import ctypes
import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import astuple, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lce.errors import UsageError
from lce.files import cache_home, read_file, write_whole
from lce.kernels.runtime import levels
from lce.progress import StepNotices, notice

_HERE = Path(__file__).parent.parent
_COMPILING = "compiling linking numbers shared tiles vectors words"  # what bodies use, in `runtime`
_DIGEST_BYTES = 32  # the bytes of a SHA-256
_READ_EXECUTE = 5  # PROT_READ | PROT_EXEC

_lock = threading.RLock()
_steps = StepNotices("compiling kernels")
_announced: list[str] = []  # what was said, once for all kernels
_loaded: list[mmap.mmap] = []  # memory with machine code, which stays until the process ends


def sources() -> list[Path]:
    """Return the source files that compiled code depends on: those with bodies of kernels come first."""
    return [*sorted(_HERE.glob("*/*_body.py")), *(_HERE / "runtime" / f"{name}.py" for name in _COMPILING.split())]


@cache
def source_digest() -> str:
    """Return a digest of `sources`."""
    digest = hashlib.sha256()
    for file in sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def built_folder(level: levels.Level) -> Path:
    """Return the folder of a level's kernels beside the package, which an installation makes."""
    return _HERE / "built" / source_digest() / level.folder


def cache_folder(level: levels.Level) -> Path | None:
    """Create and return the user's folder of a level's kernels; None if the folder cannot be used.

    Files in this folder are executed, so it is used only if this user owns it and nobody else can write to it.
    """
    if (home := cache_home()) is None:
        return None
    folder = home / f"kernels-{source_digest()}-{level.folder}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if private and os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


def file_name(name: str, kind: Any) -> str:
    """Return the name of a kernel's file. Example: `quantised.pack-4-32-bfloat16-zeros-0-float32`."""
    parts = kind if isinstance(kind, tuple) else () if kind is None else (kind,)
    fields = [field for part in parts for field in (astuple(part) if is_dataclass(part) else (part,))]  # type: ignore[arg-type]
    return "-".join([name, *(str(field) for field in fields if field != "")])


def address(name: str | Callable[..., Any], kind: Any = None) -> int:
    """Return the address of a kernel's machine code. `name` may be a body itself, which is then compiled, not kept."""
    with _lock:
        if not isinstance(name, str):
            return load(compiled(name.__name__, lambda: name, None))
        file = file_name(name, kind)
        level = levels.current()
        code = read(built_folder(level) / file)
        if code is None:
            folder = cache_folder(level)
            code = read(folder / file) if folder else None
            code = code or compiled(file, lambda: import_module("lce.kernels.runtime.bodies").body(name, kind), folder)
        return load(code)


def read(path: Path) -> bytes | None:
    """Return the code in a kernel's file; None if the file is missing, damaged, cut short or another kernel's."""
    try:
        raw = read_file(path)
    except Exception:  # without the file, the kernel is compiled
        return None
    return raw[_DIGEST_BYTES:] if raw and raw[:_DIGEST_BYTES] == _digest(path, raw[_DIGEST_BYTES:]) else None


def write(path: Path, code: bytes) -> None:
    """Write a kernel's file: a SHA-256 of its name and its code, and then the code."""
    write_whole(path, _digest(path, code) + code)


def load(code: bytes) -> int:
    """Copy flat code to memory of its own, make the memory executable, and return its address."""
    memory = mmap.mmap(-1, len(code))
    memory.write(code)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(len(code)), _READ_EXECUTE):
        raise UsageError("this system lets no program make memory executable; kernels need it, so allow it for Python")
    _loaded.append(memory)
    return at


def _digest(path: Path, code: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + code).digest()


def compiled(file: str, body: Callable[[], Any], folder: Path | None) -> bytes:
    """Compile a kernel, and write its file if there is a folder. If that fails, say so once: the kernel works."""
    kept = "; later runs find them in a cache" if folder else ", which every run does: no cache"
    _steps.begin(f"compiling kernels for this processor{kept}")
    try:
        try:
            from lce.kernels.runtime import compiling
        except ImportError:
            raise UsageError(
                f"no kernel {file} for this processor is installed, and Numba, which compiles it, is missing; install "
                "Numba with: pip install numba"
            ) from None
        code = compiling.machine_code(file, body())
    finally:
        _steps.end()
    if folder:
        try:
            write(folder / file, code)
        except Exception as error:
            if not _announced:
                _announced.append(f"compiled kernels are not kept, so that every run compiles them: {error}")
                notice(_announced[0])
    return code
