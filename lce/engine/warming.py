"""Compiles, while weights load, the Triton kernels that an engine will launch on a GPU: no token waits for a compiler.

A few layers run on `meta` tensors, which have a shape and no memory: PyTorch's operators compute nothing, and
`launching.launch` only compiles. Triton keeps kernels on disk. One that is not foreseen is compiled at its first use.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lce import gpu
from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.lanes import LaneTable
from lce.cache.layout import Budgets
from lce.engine.lanes import MOST_LANES
from lce.engine.setup import Planned
from lce.methods.decoding import completes
from lce.methods.run import Driver
from lce.models.layers import Attend, Model, model_class
from lce.models.rope import Rope
from lce.progress import notice
from lce.system import usable_cores
from lce.weights.checkpoint import Checkpoint
from lce.weights.packed import ROW_BLOCK, Scheme, Stacked

FEW = 20, 4, 3, 2  # tokens: blocks of few tokens take kernels of their own
SHORTEST, FARTHEST, WINDOWS = 128, 1 << 17, 16  # tokens, and windows: steps behind longer texts take few other kernels
LANES = 1, 2, 4, 8  # that share a step: more take the kernels of 8
META = torch.device("meta")


@contextmanager
def warmed(made: Planned, attention: Attention, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Compile an engine's kernels while the body of `with` runs: see `compile_kernels`."""
    wanted = made.layout.device.type == "cuda" and made.division is None and gpu.launching.installed()
    with ThreadPoolExecutor(1, "lce-compile") as thread:
        if wanted:
            thread.submit(compile_kernels, made, attention, checkpoint)
        yield


def compile_kernels(made: Planned, attention: Attention, checkpoint: Checkpoint | None) -> None:
    """Compile the kernels of blocks, of decode steps and of recorded steps, on all cores. Memory on the GPU: none."""
    try:
        with torch.inference_mode(), torch.cuda.device(made.layout.device), ExitStack() as stack:
            with suppress(ImportError):  # an older Triton compiles one kernel after the other
                from triton.runtime._async_compile import AsyncCompileMode

                threads = stack.enter_context(ThreadPoolExecutor(usable_cores()))
                stack.enter_context(AsyncCompileMode(threads, ignore_errors=True))
            own = made.config
            sizes = made.window, own.n_kv_heads, own.sliding_window, own.kinds
            schemes = {} if checkpoint is None else checkpoint.schemes_on(made.layout.device)
            _read_texts(made, Driver(made.method, attention, *sizes), schemes)
    except Exception as error:  # the kernels that are left are compiled when they are launched
        notice(f"not all kernels are compiled ahead: {type(error).__name__}: {error}", logging.DEBUG)


def _read_texts(made: Planned, driver: Driver, schemes: Mapping[str, Scheme]) -> None:
    """Read a text in blocks of several sizes; and another, with steps before each power of two of tokens."""
    names = model_class(made.config).weights(made.config)
    kinds = [
        (driver.numbers[i : i + 1], driver.method.layer_kind(i), _stored(names, schemes, f"{i}."))
        for i in range(made.config.n_layers)
    ]
    n_layers, block = 1 + max(map(kinds.index, kinds)), made.layout.block
    model, rope = _model(made, n_layers, schemes), made.rope.fitted(made.window, made.window)
    layout = replace(made.layout, n_layers=n_layers, device=META, budgets=Budgets(), borders=())
    turned, at = Rope(rope, layout.head_dim, made.window, made.window), torch.empty(8, dtype=torch.int64, device=META)

    def read(cache: KVCache, n: int, decoding: bool = False) -> None:
        driver.forward(cache, turned, n, partial(_pass, model, n, decoding), decoding=decoding)

    cache = KVCache.empty(layout)
    for n in (*FEW, block, -(-block // 2) + 1, *FEW):
        read(cache, n)
    cache, length = KVCache.empty(layout), SHORTEST
    while length <= min(FARTHEST, WINDOWS * made.window):
        read(cache, length - 3 - cache.length)
        for stop in range(length - 2, length + 1):  # the last one completes a chunk, the one before can be recorded
            cache.make_space(stop)
            bound = driver.method.bound(stop) if driver.method.promised("recorded") and cache.has_space(stop) else None
            if bound is not None:
                last = completes(cache, stop - 1)
                try:
                    table: Any = LaneTable(cache, MOST_LANES)
                    for n in LANES:
                        _pass(model, n, True, driver.recorded(table.layers(n, bound), turned, at[:n], bound, last))
                except Exception:  # steps of such methods are recorded for each context
                    _pass(model, 1, True, driver.recorded(cache.layers, turned, at[:1], bound, last))
            read(cache, 1, decoding=True)
        length *= 2


def _pass(model: Model, n: int, generated: bool, attend: Attend) -> None:
    ids = torch.empty(n, dtype=torch.int64, device=META)
    hidden = model(model.embedded(ids), model.attending(attend, ids), generated)
    model.logits(hidden if generated else hidden[-1:], drawn=True)


def _stored(names: Mapping[str, tuple[str, Any]], schemes: Mapping[str, Scheme], layer: str) -> list[Scheme | None]:
    """Return the schemes of a layer's weights, by which its kernels differ from those of other layers."""
    return [schemes.get(published) for name, (published, _) in names.items() if name.startswith(layer)]


def _model(made: Planned, n_layers: int, schemes: Mapping[str, Scheme]) -> Model:
    """Return the first layers of the model on `meta`."""
    config, weights = replace(made.config, n_layers=n_layers), dict[str, Any]()
    family, dtype = model_class(config), made.layout.dtype
    kept = {name: schemes.get(published) for name, (published, _) in family.weights(config).items()}

    def empty(shape: tuple[int, ...], dtype: torch.dtype, scheme: Scheme | None) -> Any:
        if scheme is None:
            return torch.empty(shape, dtype=dtype, device=META)
        parts = scheme.parts(shape).items()
        return scheme.matrix(shape, {part: torch.empty(some, dtype=kind, device=META) for part, (some, kind) in parts})

    for name, (_, shape) in family.weights(config).items():
        weights[name] = empty(shape, torch.float32 if family.is_wide(name) else dtype, kept[name])
    for whole, parts in family.joined(config).items():
        some = [weights.pop(part) for part in parts]
        whole_blocks = kept[parts[0]] is None or all(each.shape[0] % ROW_BLOCK == 0 for each in some)
        alike = whole_blocks and len({kept[part] for part in parts}) == 1
        shape = sum(each.shape[0] for each in some), *some[0].shape[1:]
        weights[whole] = empty(shape, dtype, kept[parts[0]]) if alike else Stacked(some)
    return family(config, weights)
