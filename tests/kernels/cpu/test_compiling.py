"""Kernels are compiled once and found again in a cache."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lce.kernels import levels
from lce.kernels.cpu import library
from lce.kernels.cpu.kernel import Kernel
from lce.progress import StepNotices

PROGRAM = """
import sys
import torch
from lce.kernels.cpu.products import product
torch.set_num_threads(2)
print(product(torch.ones(1, 64), torch.ones(16, 64))[0, 0].item(), torch.get_num_threads())
"""


def run(home: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "LCE_CPU": "native", **variables}  # nothing is installed
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
    said, *now_and_then = first.stderr.splitlines()
    assert said == "lce: compiling kernels for this processor; later runs find them in a cache"
    assert all(line.startswith("lce: compiling kernels: ") for line in now_and_then)
    assert second.stderr == ""
    names = [file.name for file in compiled.home.rglob("*-float32")]
    assert names


def works() -> bool:
    """Compile a kernel, or load it from the cache, and run it: a positive score's sort key is its bits."""
    scores, keys = torch.tensor([1.5]), torch.zeros(2, dtype=torch.int32)
    Kernel("choices.spread_keys")(1, scores.data_ptr(), keys.data_ptr(), 1, 0)
    return int(keys[0]) == int(scores.view(torch.int32))


def say_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_announced", set())
    monkeypatch.setattr(library, "_steps", StepNotices("compiling kernels"))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home of an empty cache, in a process that has said nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "built_folder", lambda _: tmp_path / "nothing is installed")
    say_again(monkeypatch)
    return tmp_path


@pytest.mark.slow
def test_a_damaged_kernel_is_compiled_again_and_replaced(cache: Path) -> None:
    assert works()
    (file,) = cache.rglob("*spread_keys")
    raw = file.read_bytes()
    flipped = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in (20, 40, len(raw) - 300)]
    for damaged in (b"", raw[:-1], *flipped, None):
        file.write_bytes(damaged) if damaged is not None else shutil.rmtree(cache / "lce")
        assert works()
        replaced = file.stat().st_mtime_ns
        assert file.stat().st_size >= len(raw) - 300
        assert works()
        assert file.stat().st_mtime_ns == replaced, "what is whole is loaded"


def test_a_cache_that_cannot_be_used_is_said_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiling_it = "lce: compiling kernels for this processor"

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        assert works()
        assert works()
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"{compiling_it}; later runs find them in a cache"
    assert second.startswith("lce: compiled kernels are not kept, so that every run compiles them: cannot write ")
    assert second.endswith("No space left on device; free some space or name another place")
    assert not [*cache.rglob("*spread_keys"), *cache.rglob("*.tmp")]
    say_again(monkeypatch)
    shutil.rmtree(cache / "lce")
    (cache / "lce").write_text("in the way")
    assert works()
    (cache / "lce").unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)  # a home that cannot be written
    assert works()
    assert capsys.readouterr().err == f"{compiling_it}, which every run does: no cache\n"


CHILDREN = """
import collections, itertools, json, os, random, resource, shutil, sys
from pathlib import Path
import lce, lce.kernels.code.bodies, torch
torch.set_num_threads(1)
[*lce.kernels.code.bodies.names()]  # what compiling needs is ready in all children
engine = lce.load(sys.argv[1], method="full", attention="torch")
scratch, number = Path(sys.argv[2]), random.Random(0)

def start(home):
    child = os.fork()
    if child == 0:
        os.environ["XDG_CACHE_HOME"] = str(home)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with (home / "said").open("w") as sys.stderr:
            (home / "logits").write_text(str(engine.logits(range(9)).tolist()))
        os._exit(0)
    return child

def damage(home, kind):
    files = sorted((path for path in home.glob("lce/**/*") if path.is_file()), key=lambda path: path.stat().st_size)
    path = number.choice(files[:-1])  # the largest kernel takes seconds to compile
    raw = bytearray(path.read_bytes())
    at = number.randrange(len(raw))
    if kind == "bit":
        raw[at] ^= 1 << number.randrange(8)
    elif kind == "page":
        raw[at // 4096 * 4096 : at // 4096 * 4096 + 4096] = bytes(4096)
    elif kind == "cut":
        del raw[at:]
    else:
        raw = bytearray(number.choice([other for other in files if other != path]).read_bytes())
    path.write_bytes(raw)

def outcome(home, status):
    if status:
        return f"status {status}"
    right = (home / "logits").read_bytes() == (whole / "logits").read_bytes()
    said = (home / "said").read_text().partition(" kernels")[0]
    return ("right, " if right else "other logits, ") + (said or "quiet")

whole, twin, found = scratch / "whole", scratch / "twin", collections.Counter()
(whole / "lce").mkdir(parents=True)
twin.mkdir()
(twin / "lce").symlink_to(whole / "lce")
both = [(home, start(home)) for home in (whole, twin)]  # compile at once into one cache
found.update([outcome(home, os.waitpid(child, 0)[1]) for home, child in both])
kinds = itertools.cycle(["bit", "bit", "page", "cut", "swap"])
for first in range(0, int(sys.argv[3]), 2):
    homes = [scratch / str(first + i) for i in range(2)]
    for home in homes:
        shutil.copytree(whole, home)
        damage(home, next(kinds))
    for _ in "damaged", "mended":
        children = [(home, start(home)) for home in homes]
        found.update(outcome(home, os.waitpid(child, 0)[1]) for home, child in children)
    for home in homes:
        shutil.rmtree(home)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_damaged_kernels_are_compiled_again_and_replaced(tiny_model: Path, tmp_path: Path) -> None:
    """60 damaged files, each read by a process of its own, which a signal might end; and then by another one.

    Two processes that start at once with an empty cache make the first, undamaged one.
    """
    arguments = [sys.executable, "-c", CHILDREN, str(tiny_model), str(tmp_path), "60"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "parent"), "LCE_CPU": "native"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=800)
    assert json.loads(done.stdout) == {"right, lce: compiling": 62, "right, quiet": 60}


def test_a_cache_that_others_can_write_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = library.cache_folder(levels.current())
    assert folder is not None
    assert folder.parent == tmp_path / "lce"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert library.cache_folder(levels.current()) is None


@pytest.mark.skipif(os.environ.get("LCE_CPU") != "v3", reason="LCE_CPU is not v3: make test-v3")
def test_x86_64_v3_has_no_avx512() -> None:
    """Otherwise the tests of this level would test another."""
    from lce.kernels.code.compiling import features

    assert levels.current().name == "v3"
    assert {"avx2", "fma", "f16c"} <= features()
    assert not [name for name in features() if name.startswith("avx512")]
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
