"""Flat code of kernels: what it may not need, and where it runs without Numba."""

import ctypes

import llvmlite.binding as llvm
import pytest

from lce.kernels.runtime import library
from lce.kernels.runtime.linking import LinkError, link
from tests.command import output

CODE = """
@table = internal constant [4 x i64] [i64 3, i64 5, i64 7, i64 11]
@count = internal global i64 0
declare void @outside()
define internal i64 @prime(i64 %n) noinline {
  %at = getelementptr [4 x i64], ptr @table, i64 0, i64 %n
  %found = load i64, ptr %at
  ret i64 %found
}
define void @unused() section ".text.unused" {
  call void @outside()
  ret void
}
"""
ENTRY = """
define i64 @entry(i64 %n) section ".text.entry" {{
  {body}
  %found = call i64 @prime(i64 %n)
  ret i64 %found
}}
"""


def code_of(body: str, triple: str) -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(reloc="pic", codemodel="small")
    return link("primes", machine.emit_object(llvm.parse_assembly(CODE + ENTRY.format(body=body))))


def test_code_runs_where_it_was_copied_to() -> None:
    """It has a constant and another function, and leaves out what it does not reach."""
    entry = library.load(code_of("", llvm.get_process_triple()))
    prime = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(entry)
    assert [prime(n) for n in range(4)] == [3, 5, 7, 11]


@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"])
def test_what_lies_outside_a_kernel_is_named(triple: str) -> None:
    assert code_of("", triple)
    with pytest.raises(LinkError, match="kernel primes: calls outside, outside it"):
        code_of("call void @outside()", triple)
    with pytest.raises(LinkError, match="kernel primes: writes to a global variable"):
        code_of("store i64 %n, ptr @count", triple)


@pytest.mark.slow
def test_the_package_runs_without_numba() -> None:
    program = "import sys, lce, lce.cli, lce.kernels.product.products, lce.kernels.dense.attention; print(*sys.modules)"
    assert not {"numba", "llvmlite"} & {*output(program).split()}
