"""Kernels are compiled once and found again in a cache."""

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lce.kernels.runtime import levels, library
from lce.kernels.runtime.kernel import Kernel
from lce.progress import StepNotices
from tests.command import together

PROGRAM = """
import sys
import torch
from lce.kernels.elementwise.elementwise import rotate
torch.set_num_threads(2)
print(rotate(torch.ones(1, 1, 64), torch.ones(1, 32), torch.zeros(1, 32)).sum().item(), torch.get_num_threads())
"""


def run(home: Path) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "XDG_CACHE_HOME": str(home), "LCE_CPU": "native"}  # nothing is installed
    line = [sys.executable, "-c", PROGRAM]
    return subprocess.run(line, env=own, capture_output=True, text=True, check=True, timeout=120)


def works() -> bool:
    """Compile a kernel, or load it from the cache, and run it: it takes the second row of two tensors."""
    one, two, taken = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.zeros(2)
    Kernel("elementwise.take_rows")(2, one, two, torch.tensor([1]), taken, 1, 1, 1, 8)
    return taken.tolist() == [2, 4]


def say_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_announced", [])
    monkeypatch.setattr(library, "_steps", StepNotices("compiling kernels"))


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr but for those that come now and then, where compiling takes long."""
    return [line for line in capsys.readouterr().err.splitlines() if "compiling kernels: " not in line]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home of an empty cache, in a process that has said nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "built_folder", lambda _: tmp_path / "nothing is installed")
    say_again(monkeypatch)
    return tmp_path


def test_the_first_use_says_so_and_the_second_finds_the_kernel(cache: Path, monkeypatch: Any, capsys: Any) -> None:
    assert works()
    assert said(capsys) == ["lce: compiling kernels for this processor; later runs find them in a cache"]
    assert [*cache.rglob("*take_rows")]
    say_again(monkeypatch)
    monkeypatch.setattr(library, "compiled", lambda *_: pytest.fail("it is compiled again"))
    assert works()
    assert said(capsys) == []


@pytest.mark.slow
def test_a_damaged_kernel_is_compiled_again_and_replaced(cache: Path) -> None:
    assert works()
    (file,) = cache.rglob("*take_rows")
    raw = file.read_bytes()
    flipped = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in (20, 40, len(raw) - 300)]
    for damaged in (b"", raw[:-1], *flipped, None):
        file.write_bytes(damaged) if damaged is not None else shutil.rmtree(cache / "lce")
        assert works()
        replaced = file.stat().st_mtime_ns
        assert file.stat().st_size >= len(raw) - 300
        assert works()
        assert file.stat().st_mtime_ns == replaced, "what is whole is loaded"


def test_a_cache_that_cannot_be_used_is_said_once(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    compiling_it = "lce: compiling kernels for this processor"

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        assert works()
        assert works()
    first, second = said(capsys)
    assert first == f"{compiling_it}; later runs find them in a cache"
    assert second.startswith("lce: compiled kernels are not kept, so that every run compiles them: cannot write ")
    assert second.endswith("No space left on device; free some space or name another place")
    assert not [*cache.rglob("*take_rows"), *cache.rglob("*.tmp")]
    say_again(monkeypatch)
    shutil.rmtree(cache / "lce")
    (cache / "lce").write_text("in the way")
    assert works()
    (cache / "lce").unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)  # a home that cannot be written
    assert works()
    assert said(capsys) == [f"{compiling_it}, which every run does: no cache"]


def test_no_damaged_file_is_read(tmp_path: Path) -> None:
    """So no process runs damaged code, which might do anything: bits, pages, ends and whole files are replaced."""
    path, number = tmp_path / "choices.best", random.Random(0)
    library.write(path, code := number.randbytes(20_000))
    library.write(tmp_path / "choices.other", code)
    assert library.read(path) == code
    raw, damaged = path.read_bytes(), [(tmp_path / "choices.other").read_bytes(), b""]
    for at in [0, 31, 32, len(raw) - 1, *(number.randrange(len(raw)) for _ in range(60))]:
        page = at // 4096 * 4096
        damaged += [raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :], raw[:at]]
        damaged.append(raw[:page] + bytes(len(raw[page : page + 4096])) + raw[page + 4096 :])
    for each in damaged:
        path.write_bytes(each)
        assert library.read(path) is None


@pytest.mark.slow
def test_two_processes_compile_at_once_into_one_cache(tmp_path: Path) -> None:
    for each in together([lambda: run(tmp_path)] * 2):
        assert each.stdout.split() == ["64.0", "2"]
    third = run(tmp_path)
    assert (third.stdout.split(), third.stderr) == (["64.0", "2"], "")


def test_a_cache_that_others_can_write_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = library.cache_folder(levels.current())
    assert folder is not None
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path / "lce", 0o700)
    folder.chmod(0o777)
    assert library.cache_folder(levels.current()) is None


@pytest.mark.skipif(os.environ.get("LCE_CPU") != "v3", reason="LCE_CPU is not v3: make test-v3")
def test_x86_64_v3_has_no_avx512() -> None:
    """Otherwise the tests of this level would test another."""
    from lce.kernels.runtime.compiling import features

    assert levels.current().name == "v3"
    assert {"avx2", "fma", "f16c"} <= features()
    assert not [name for name in features() if name.startswith("avx512")]
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
