"""The door that every launch goes through."""

from typing import Any

import pytest
import torch

from lce.kernels.cuda import launching
from tests.pretended import pretended_gpus


class Kernel:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.calls.append((grid, args, options))


def test_a_launch_runs_the_kernel_on_its_grid() -> None:
    kernel, x = Kernel(), torch.zeros(2)
    launching.launch(kernel, (3, 2), x, 7, BLOCK=16)
    assert kernel.calls == [((3, 2), (x, 7), {"BLOCK": 16})]


def test_an_empty_grid_starts_nothing() -> None:
    kernel = Kernel()
    launching.launch(kernel, (0, 2), torch.zeros(2))
    assert not kernel.calls


def test_a_grid_that_cuda_would_refuse() -> None:
    with pytest.raises(AssertionError, match="65536"):
        launching.launch(Kernel(), (1, 65_536), torch.zeros(2))


def test_kernels_take_cpu_tensors_only_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert launching.usable(x) == launching.installed()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not launching.usable(x)


def test_a_gpu_on_which_triton_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No C compiler, say: the first launch fails, a notice says so once, and other operators serve."""
    pytest.importorskip("triton")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    missing = launching.missing.__wrapped__  # without what it found before
    with pretended_gpus(triton=True):
        monkeypatch.setattr(launching, "launch", fail)
        why = missing()
    assert why == "a Triton that can compile here (RuntimeError: Failed to find C compiler.)"
    said = "Triton's kernels do not run here (RuntimeError: Failed to find C compiler.); PyTorch's operators are used"
    assert said in capsys.readouterr().err
