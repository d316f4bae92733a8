"""Triton kernels are compiled for GPUs without one."""

import os
import sys
from pathlib import Path

import pytest

from tests.command import Process
from tools.compile_cuda import Binary, fault
from tools.cuda_launches import CALLS, Call

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent


def compile_kernels(*options: str, cache: Path) -> list[str]:
    """What the tool prints, in a process without Triton's interpreter; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.compile_cuda", *options]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    process = Process(command, cwd=ROOT, env=environment)
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, out + err
    return out.splitlines()


@pytest.mark.slow
def test_decode_kernels_compile_and_do_not_spill(tmp_path: Path) -> None:
    lines = compile_kernels("--only", "decode one row bf16 128", "--arch", "90", cache=tmp_path)
    assert [line.split()[6] for line in lines[:-1]] == ["_one_row", "_merge_row"]
    assert all(" 0 B stack" in line for line in lines[:-1])
    assert lines[-1] == "2 kernels compiled, 0 faults"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "only"),
    [("80", "bf16 128"), ("90", "fp16 80"), ("80", "product 4 x 896"), ("90", "product logits 2"), ("80", "choices")],
)
def test_kernels_compile(arch: str, only: str, tmp_path: Path) -> None:
    """Some of 432 calls. Without `--only` the tool compiles all, which takes many minutes."""
    assert compile_kernels("--arch", arch, "--only", only, cache=tmp_path)[-1].endswith(" 0 faults")


def test_what_is_a_fault() -> None:
    prefill, decode = Call("prefill", print), Call("decode", print, spills=False)
    spilled, wide = Binary(255, 8, 1000), Binary(100, 0, 200 << 10)
    assert fault(prefill, spilled, 80) is None
    assert "8 bytes of spilled registers" in (fault(decode, spilled, 80) or "")
    assert "expected at most 166912" in (fault(prefill, wide, 80) or "")
    assert fault(prefill, wide, 90) is None


def test_names_are_unique() -> None:
    assert len({call.name for call in CALLS}) == len(CALLS)
