"""Kernels are compiled once, found again in a cache, and run by PyTorch's threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lce.kernels.compiling import cache_folder, n_threads

PROGRAM = """
import torch
from lce.kernels.products import product
from lce.kernels.compiling import n_threads
torch.set_num_threads(2)
print(product(torch.ones(1, 64), torch.ones(16, 64))[0, 0].item(), torch.get_num_threads(), n_threads())
"""


def run(home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    )


def test_the_first_use_says_so_and_the_second_finds_the_kernels(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert first.stdout == second.stdout
    assert first.stdout.split()[:2] == ["64.0", "2"]
    assert first.stderr.count("compiling kernels") == 1
    assert len(first.stderr.splitlines()) == 1
    assert second.stderr == ""


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "lce").write_text("in the way")
    assert run(tmp_path).stdout.split()[0] == "64.0"


def test_threads_are_pytorchs() -> None:
    before = torch.get_num_threads()
    try:
        for number in (1, 2, 1):
            torch.set_num_threads(number)
            assert n_threads() <= number
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().parent == tmp_path / "lce"
