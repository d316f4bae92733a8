"""The kernels for arm64 pass the tests of kernels in an emulator: `emulator` says how."""

import os
import platform
import re
import sys
from pathlib import Path

import pytest

from lce.kernels.runtime import bodies, library
from tests.command import Process
from tests.kernels.arm64.emulator import RAN, qemu

ROOT = Path(__file__).parents[3]
NAMES = """dense/test_attention choose/test_choices choose/test_scores elementwise/test_elementwise product/test_panels
product/test_products rows/test_int8_rows runtime/test_numbers runtime/test_threads"""
TESTS = [
    *(f"tests/kernels/{name}.py" for name in NAMES.split()),
    "tests/weights/test_gguf_packed.py::test_weights_are_the_files_and_products_use_them",
]
# Kernels for GPUs; what is about this machine's processes and signals; and some of what takes longest.
NOT = "not (cuda or forked or beside or without_threads or interruptions or has_alone and float16 or 260-300)"


def without_dtype(file: str) -> str:
    return re.sub("-(float32|bfloat16|float16)$", "", file)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor runs the kernels for arm64 in all tests")
def test_kernels_for_arm64_pass_their_tests_in_an_emulator() -> None:
    """Every kernel runs, of `quantised` in every layout. It takes two minutes on a core, half of them to compile."""
    if qemu() is None:
        pytest.skip("no qemu-aarch64 of version 7.1 or later is installed; Debian's package is qemu-user")
    options = ["-p", "tests.kernels.arm64.emulator", "-p", "no:cacheprovider", "-q", "-m", "not cuda", "-k", NOT]
    line = [sys.executable, "-m", "pytest", *options, *TESTS]
    with Process(line, cwd=ROOT, env={**os.environ, "LCE_CPU": "arm64"}) as process:
        out, err = process.communicate(timeout=800)
    assert process.returncode == 0, out[-20_000:] + err[-5_000:]
    (said,) = (line for line in out.splitlines() if line.startswith(RAN))
    ran = {without_dtype(file) for file in said.removeprefix(RAN).split()}
    assert ran == {without_dtype(library.file_name(*each)) for each in bodies.names()}
