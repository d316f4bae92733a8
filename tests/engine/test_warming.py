"""Kernels are compiled while a model loads: what an engine launches afterwards was compiled. The GPU is pretended."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.methods import DualChunk, LongHeads, Method
from tests.checkpoints import save_tiny, tokens
from tests.command import run
from tests.gguf_models import as_saved, save_gguf
from tests.pretended import Gpus

pytest.importorskip("triton")

METHODS = LongHeads(chunk_size=8, chunks=5), DualChunk(chunk_size=48)


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
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_nothing_is_compiled_behind_loading(
    method: Method, triton_gpus: Gpus, tiny_model: Path, kernels: dict[str, set[Any]]
) -> None:
    engine = lce.load(tiny_model, method, device="cuda", dtype="bfloat16")
    assert not kernels["launched"]
    for n in (3, 101):
        kernels["launched"].clear()
        engine.generate(tokens(n), max_tokens=5)
        assert "_dense_rows" in {x[0] for x in kernels["launched"]}
        assert not kernels["launched"] - kernels["compiled"], f"{n} tokens"
    kernels["launched"].clear()
    with engine.batch() as batch:
        for stream in [batch.stream(tokens(n), max_tokens=4) for n in (101, 102, 103)]:
            stream.finish()
    assert engine.setup.recorder.recorded[0].n_recorded, "steps of three lanes"
    assert not kernels["launched"] - kernels["compiled"], "lanes"


def test_what_a_short_prompt_launches_was_compiled(
    triton_gpus: Gpus, tiny_model: Path, kernels: dict[str, set[Any]]
) -> None:
    engine = lce.load(tiny_model, device="cuda", dtype="bfloat16")
    engine.generate(tokens(9), max_tokens=2)
    assert kernels["launched"] <= kernels["compiled"]


@pytest.mark.slow
def test_kernels_of_packed_weights_are_compiled(
    triton_gpus: Gpus, tmp_path: Path, kernels: dict[str, set[Any]]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    folder = save_tiny(tmp_path, **sizes)
    path = save_gguf(tmp_path / "model.gguf", as_saved(folder), {"*attn_v*": "Q6_K", "*": "Q4_K"})
    engine = lce.load(path, device="cuda", dtype="bfloat16")
    engine.generate(tokens(5), max_tokens=2)
    assert {"_product", "_unpack"} <= {x[0] for x in kernels["launched"]}
    assert not kernels["launched"] - kernels["compiled"]


def test_warm_compiles_without_weights(triton_gpus: Gpus, tiny_model: Path, kernels: dict[str, set[Any]]) -> None:
    lce.load(tiny_model, device="cuda", dtype="bfloat16")
    loaded = {*kernels["compiled"]}
    kernels["compiled"].clear()
    result = run("warm", "-m", tiny_model, "--device", "cuda", "--dtype", "bfloat16")
    assert (result.exit_code, kernels["compiled"]) == (0, loaded), result.output
    result = run("warm", "-m", tiny_model, "--device", "cpu")
    assert (result.exit_code, "leave --model out" in result.output) == (2, True), result.output
