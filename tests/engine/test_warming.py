"""Kernels are compiled while a model loads: what an engine launches afterwards was compiled. The GPU is pretended."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.engine import warming
from lce.methods import ESA, DualChunk, Full, LongHeads, Method, Quest, SelfExtend, Streaming
from tests.checkpoints import tokens
from tests.command import run
from tests.pretended import Gpus

pytest.importorskip("triton")

METHODS: dict[str, Method] = {
    "full": Full(),
    "longheads": LongHeads(chunk_size=8, chunks=5),
    "dca": DualChunk(chunk_size=48),
    "quest": Quest(page=8, budget=32),
    "streaming": Streaming(),
    "self_extend": SelfExtend(group=4),
    "esa": ESA(compress="none", sinks=4, local=16, top_k=16),
}


def specialised(x: Any, plain: bool) -> Any:
    """What Triton compiles for in an argument: dtypes, alignment, 1, multiples of 16 and 64-bit integers."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.storage_offset() * x.itemsize % 16 == 0
    if isinstance(x, tuple):
        return tuple(specialised(y, plain) for y in x)
    if isinstance(x, int) and not isinstance(x, bool):
        wide = abs(x) >= 1 << 31
        return wide if plain else (wide, x == 1, x % 16 == 0)
    return float if isinstance(x, float) else x


def key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The name of a compiled kernel."""
    parameters, plain = inspect.signature(kernel.fn).parameters, kernel.kwargs.get("do_not_specialize") or ()
    given = dict(zip(parameters, args, strict=False)) | options
    constant = [name for name in given if name not in parameters or "constexpr" in str(parameters[name].annotation)]
    others = {name: repr(given[name]) for name in constant}
    others |= {name: repr(specialised(x, name in plain)) for name, x in given.items() if name not in constant}
    return (kernel.fn.__name__, *sorted(others.items()))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Any]]:
    """The kernels that were compiled ahead, and those that were launched."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import KernelInterface

    found: dict[str, set[Any]] = {"compiled": set(), "launched": set()}

    def warmup(self: Any, *args: Any, grid: Any, **options: Any) -> None:
        assert not any(x.is_cuda for x in args if isinstance(x, torch.Tensor))
        found["compiled"].add(key(self, args, options))

    def launched(self: Any, grid: Any) -> Any:
        start = KernelInterface.__getitem__(self, grid)

        def noted(*args: Any, **options: Any) -> None:
            found["launched"].add(key(self, args, options))
            start(*args, **options)

        return noted

    monkeypatch.setattr(InterpretedFunction, "warmup", warmup)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", launched, raising=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_compiled_behind_loading(
    name: str, triton_gpus: Gpus, tiny_model: Path, kernels: dict[str, set[Any]]
) -> None:
    with triton_gpus.counting() as counts:
        engine = lce.load(tiny_model, METHODS[name], device="cuda", dtype="bfloat16")
    assert not any(name.startswith("launches: _") for name in counts.at), "no kernel was launched"
    assert kernels["compiled"]
    for n in (3, 64, 101):
        kernels["launched"].clear()
        engine.generate(tokens(n), max_tokens=11 if n > 64 else 2)
        assert {x[0] for x in kernels["launched"]} >= {"_product", "_append", "_dense_rows"}
        late = kernels["launched"] - kernels["compiled"]
        assert not late, f"{n} tokens: {late}"


def test_what_a_short_prompt_launches_was_compiled(
    triton_gpus: Gpus, tiny_model: Path, kernels: dict[str, set[Any]]
) -> None:
    engine = lce.load(tiny_model, device="cuda", dtype="bfloat16")
    engine.generate(tokens(9), max_tokens=2)
    assert kernels["launched"] <= kernels["compiled"]


def test_a_fault_costs_time_alone(
    triton_gpus: Gpus, tiny_model: Path, kernels: dict[str, set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_model", lambda made, n_layers: 1 / 0)
    assert lce.load(tiny_model, device="cuda", dtype="bfloat16").setup.model.layers
    assert not kernels["compiled"]


def test_warm_compiles_without_weights(triton_gpus: Gpus, tiny_model: Path, kernels: dict[str, set[Any]]) -> None:
    lce.load(tiny_model, device="cuda", dtype="bfloat16")
    loaded, kernels["compiled"] = kernels["compiled"].copy(), kernels["compiled"]
    kernels["compiled"].clear()
    result = run("warm", "-m", tiny_model, "--device", "cuda", "--dtype", "bfloat16")
    assert (result.exit_code, kernels["compiled"]) == (0, loaded), result.output
    result = run("warm", "-m", tiny_model, "--device", "cpu")
    assert (result.exit_code, "leave --model out" in result.output) == (2, True), result.output
