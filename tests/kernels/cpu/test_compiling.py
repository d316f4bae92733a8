"""Kernels are compiled once, found again in a cache, and run by PyTorch's threads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lce.kernels.cpu.compiling import n_threads, usable_cache

PROGRAM = """
import sys
import torch
from lce.kernels.cpu.products import product
from lce.kernels.cpu.compiling import n_threads
torch.set_num_threads(2)
if "threads" in sys.argv:
    import threading
    def work():
        torch.set_num_threads(2)
        x, w = torch.ones(1, 256), torch.ones(512, 256)
        assert all(product(x, w)[0, 0].item() == 256 for _ in range(100))
    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
print(product(torch.ones(1, 64), torch.ones(16, 64))[0, 0].item(), torch.get_num_threads(), n_threads())
"""


def run(home: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), **variables}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *args], env=environment, capture_output=True, text=True, check=True, timeout=120
    )


class Compiled(NamedTuple):
    """A home whose cache has the program's kernels, and what the run that compiled them said. Only to be read."""

    home: Path
    first: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    home = tmp_path_factory.mktemp("compiled")
    return Compiled(home, run(home))


def test_the_first_use_says_so_and_the_second_finds_the_kernels(compiled: Compiled) -> None:
    first, second = compiled.first, run(compiled.home)
    assert first.stdout == second.stdout
    assert first.stdout.split()[:2] == ["64.0", "2"]
    assert first.stderr.count("compiling kernels") == 1
    assert len(first.stderr.splitlines()) == 1
    assert second.stderr == ""
    names = [file.name.partition(".")[0] for file in compiled.home.rglob("*.nbc")]
    assert names
    assert len({*names}) == len(names), "processes that compile at once must not write to one file"


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "lce").write_text("in the way")
    assert run(tmp_path).stdout.split()[0] == "64.0"


@pytest.mark.slow
def test_a_damaged_cache_is_written_again(compiled: Compiled, tmp_path: Path) -> None:
    shutil.copytree(compiled.home, tmp_path, dirs_exist_ok=True)
    for kind, size in (("nbi", 20), ("nbc", 2000)):
        damaged = list(tmp_path.rglob(f"*.{kind}"))
        assert damaged
        for file in damaged:
            file.write_bytes(file.read_bytes()[:size])
        first, second = run(tmp_path), run(tmp_path)
        assert first.stdout.split()[0] == "64.0"
        assert first.stderr.count("compiling kernels") == 1
        assert second.stderr == ""


def test_a_cache_that_others_can_write_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = usable_cache()
    assert folder is not None
    assert folder.parent == tmp_path / "lce"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert usable_cache() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{"NUMBA_DISABLE_JIT": "1"}, {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_THREADING_LAYER": "workqueue"}],
    ids=str,
)
def test_numbas_own_variables_do_no_harm(variables: dict[str, str], tmp_path: Path) -> None:
    """Numba's simplest threads abort the process at a second call at the same time."""
    assert run(tmp_path, "threads", **variables).stdout.split()[0] == "64.0"


@pytest.mark.slow
def test_a_threading_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(tmp_path, NUMBA_THREADING_LAYER="nothing")
    assert "UsageError: Numba has no threading layer 'nothing' here" in caught.value.stderr


def test_threads_are_pytorchs(any_threads: None) -> None:
    for number in (1, 2, 1):
        torch.set_num_threads(number)
        assert n_threads() <= number
        assert torch.get_num_threads() == number
