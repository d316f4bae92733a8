"""Kernels are compiled ahead of their first use, to where the engine finds them."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import lce.kernels
from lce import cli
from lce.errors import CapacityError, LceError, UsageError
from lce.kernels.runtime import building, levels, library
from lce.kernels.runtime.building import Built, build
from lce.kernels.runtime.levels import Level
from tests.command import assert_error, run

KERNELS = [("elementwise.rotate", "float32"), ("elementwise.take_rows", None)]  # the quickest to compile
FILES = ["elementwise.rotate-float32", "elementwise.take_rows"]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder beside a package that has two kernels, none of them compiled; the user's cache is empty."""

    def built_folder(level: Level) -> Path:
        return tmp_path / "built" / "digest" / level.folder

    monkeypatch.setattr(building, "kernels", lambda: KERNELS)
    monkeypatch.setattr(library, "built_folder", built_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "TREE", tmp_path)  # no clone
    return tmp_path / "built"


def counts(built: Built) -> tuple[int, int]:
    return built.n_compiled, built.n_kernels


def no_compiling(*_: object) -> NoReturn:
    raise AssertionError("the engine compiles a kernel that should be there")


@pytest.mark.slow
def test_what_is_missing_is_compiled_beside_the_package(place: Path, monkeypatch: Any, tmp_path: Path) -> None:
    (place / "older").mkdir(parents=True)
    (tmp_path / "lce.py").write_text("raise AssertionError('the processes import what lies in this folder')")
    monkeypatch.chdir(tmp_path)
    level, seen = levels.current(), []
    folder = library.built_folder(level)
    first = build(level, lambda *done: seen.append(done))
    assert (counts(first), seen) == ((2, 2), [(0, 2), (1, 2), (2, 2)])
    assert sorted(file.name for file in folder.iterdir()) == FILES
    assert first.n_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert first.line.startswith(f"{level.name}: 2 kernels compiled, ")
    assert first.line.endswith(f" s, in {folder}")
    assert [*place.iterdir()] == [folder.parent], "kernels of other sources are deleted"
    again = build(level)
    assert (counts(again), again.line) == ((0, 2), f"{level.name}: all 2 kernels are there already")
    (folder / FILES[0]).write_bytes(b"damaged")
    assert build(level).line.startswith(f"{level.name}: 1 of 2 kernels compiled, ")
    monkeypatch.setattr(building, "writable_folder", no_compiling)
    assert counts(build(level)) == (0, 2), "a folder that is complete need not be writable"
    monkeypatch.setattr(library, "compiled", no_compiling)
    assert all(library.address(*each) for each in KERNELS)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_the_users_cache_has_what_cannot_lie_beside_the_package(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write_text("in the way")
    level = levels.current()
    built = build(level)
    assert (counts(built), built.folder, counts(build(level))) == ((2, 2), library.cache_folder(level), (0, 2))
    monkeypatch.setattr(library, "compiled", no_compiling)
    assert all(library.address(*each) for each in KERNELS)


def test_the_command_says_that_nothing_can_be_written(place: Path) -> None:
    place.write_text("in the way")
    place.with_name("cache").write_text("in the way")
    assert_error(run("warm"), 2, f"neither in {place}", "Not a directory", "set XDG_CACHE_HOME")


@pytest.mark.slow
def test_the_command_compiles_several_levels(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "kernels", lambda: KERNELS[:1])
    result = run("warm", "--level", "v3", "--level", "arm64", "--level", "v3", "--json")
    assert result.exit_code == 0, result.stderr
    got = json.loads(result.stdout)
    assert [(each["level"], each["n_compiled"]) for each in got] == [("v3", 1), ("arm64", 1)]
    codes = [(Path(each["folder"]) / FILES[0]).read_bytes() for each in got]
    assert [each["n_bytes"] for each in got] == [*map(len, codes)]
    assert codes[0] != codes[1]
    said = [line.partition(",")[0] for line in result.stderr.splitlines()]
    begun = [f"lce: {name}: compiling 1 kernels into {place / 'digest' / name}" for name in ("v3", "arm64")]
    assert said == [begun[0], "lce: v3: 1 kernels compiled", begun[1], "lce: arm64: 1 kernels compiled"]
    assert run("warm", "--level", "v3").stderr == "lce: v3: all 1 kernels are there already\n"
    assert_error(run("warm", "--level", "v5"), 2, "'v4-bf16', 'v4', 'v3', 'arm64', 'native', 'all'")


def test_a_clone_is_left_as_it_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_none(level: Level, folder: Path, files: list[str], progress: object) -> None:
        for file in files:
            library.write(folder / file, b"code")

    monkeypatch.setattr(building, "_compile", compile_none)
    (place.parent / "setup.cfg").touch()
    result = run("warm", "--level", "v3")
    assert result.exit_code == 0, result.stderr
    folder = library.cache_folder(levels.find("v3"))
    assert f"lce: v3: compiling 2 kernels into {folder}, about " in result.stderr
    assert not place.exists()
    assert run("warm", "--level", "v3").stderr == "lce: v3: all 2 kernels are there already\n"


def test_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lce.kernels.runtime.bodies", None)
    monkeypatch.delattr(lce.kernels.runtime, "bodies", raising=False)
    with pytest.raises(UsageError, match="pip install numba"):
        build(levels.current())


@pytest.mark.slow
def test_a_process_that_fails_says_why(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = library.built_folder(levels.current())
    (folder / FILES[0]).mkdir(parents=True)
    with pytest.raises(LceError, match=f"kernels cannot be compiled: {folder / FILES[0]} is a folder"):
        build(levels.current())
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(CapacityError, match="killed by signal 9"):
        build(levels.current())
