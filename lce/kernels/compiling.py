"""Numba as the kernels use it: compiled once for a processor, cached, and run by PyTorch's threads."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numba
import torch
from numba.core import event

MOST_ROWS = 8  # rows of a product that are a few: decode, and drafts of some tokens

_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "boundscheck": False,
}  # fmt: skip

_lock = threading.RLock()
_threads = threading.local()


class _Announcement(event.Listener):
    """Says once, in one line on stderr, that kernels are being compiled."""

    said = False

    def on_start(self, event: Any) -> None:
        if not _Announcement.said:
            _Announcement.said = True
            print("lce: compiling kernels for this processor; later runs find them in a cache", file=sys.stderr)

    def on_end(self, event: Any) -> None:
        pass


def cache_folder() -> Path:
    """Where compiled kernels are kept: a folder for each state of this room's source, so that none is ever stale."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lce" / f"kernels-{digest.hexdigest()[:12]}"


def kernel(signature: str, *, parallel: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function for one signature, at once: numbers and addresses (`intp`), no arrays.

    Sums may be reassociated, so that they are vectorised; the order does not depend on the number of threads.
    `numba.prange` divides its range among the threads. The GIL is released.
    """

    def compile_it(body: Callable[..., Any]) -> Callable[..., Any]:
        with _lock, event.install_listener("numba:compile", _Announcement()):
            _use_torch_threads()
            before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(cache_folder())
            try:
                compiled: Any = numba.njit(parallel=parallel, cache=True, nogil=True, **_OPTIONS)(body)
            finally:
                numba.config.CACHE_DIR = before
            # Numba's own key has pickles of the closure, which differ between processes. The folder stands for the
            # source, so that names are enough.
            label = parallel, _label(body)
            compiled._cache._index_key = lambda types, codegen: (types, codegen.magic_tuple(), label)
            compiled.compile(signature)
            compiled.disable_compile()
        return cast("Callable[..., Any]", compiled)

    return compile_it


def inner(body: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels call, compiled into each of them."""
    return cast("Callable[..., Any]", numba.njit(**_OPTIONS)(body))


def _label(x: Any) -> Any:
    """What tells a function, its closure included, from others of this room's source."""
    function = getattr(x, "py_func", x)
    name = getattr(function, "__qualname__", None)
    if name is None:
        return repr(x)
    return name, tuple(_label(cell.cell_contents) for cell in getattr(function, "__closure__", None) or ())


def n_threads() -> int:
    """PyTorch's number of threads, which Numba is told to use too. Called before each parallel kernel: 0.2 us."""
    number = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if getattr(_threads, "number", 0) != number:
        before = torch.get_num_threads()
        numba.set_num_threads(number)
        _threads.number = number
        if torch.get_num_threads() != before:  # starting its threads set OpenMP's number, which PyTorch reads
            torch.set_num_threads(before)
    return number


def _use_torch_threads() -> None:
    """Have Numba run on OpenMP, which PyTorch loaded: one pool of threads, and no two that spin for one core."""
    if not os.environ.get("NUMBA_THREADING_LAYER"):
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
