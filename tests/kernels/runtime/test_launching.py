"""The door that every launch goes through."""

from typing import Any

import pytest
import torch

from lce.kernels.runtime import launching
from tests.pretended import pretended_gpus


def test_a_launch_runs_the_kernel_on_its_grid() -> None:
    """An empty grid starts nothing; one that CUDA would refuse is refused here."""
    calls, x = list[Any](), torch.zeros(2)

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: calls.append((grid, args, options))

    launching.launch(Kernel(), (3, 2), x, 7, BLOCK=16)
    launching.launch(Kernel(), (0, 2), x)
    with pytest.raises(AssertionError, match="65536"):
        launching.launch(Kernel(), (1, 65_536), x)
    assert calls == [((3, 2), (x, 7), {"BLOCK": 16})]


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
