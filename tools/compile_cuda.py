"""Compile the Triton kernels for GPUs, without a GPU: `python -m tools.compile_cuda [--only WORD] [--arch 80 90]`.

Every call of `tools.cuda_launches` runs on CPU tensors. Its launches are recorded with the types, constants and
divisibilities that the just-in-time compiler would see, and compiled for each architecture. Prints registers, bytes of
the stack (spilled registers) and shared memory. Fails if a kernel needs more shared memory than a block may have, or if
a kernel of a decode step in half precision spills.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cuda_launches import CALLS, Call

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes that a block may have on an A100, on an H100 or H200


@dataclass(frozen=True)
class Launch:
    """The compiler's inputs for one launch."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    def source(self, arch: int) -> tuple[Any, Any, str]:
        """Return the source as the just-in-time compiler specialises it, the options, and a key of both."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", arch, 32))
        options = {**self.options, "debug": False, "instrumentation_mode": ""}
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, rest = bind(*self.args, **options)
        parsed, signature, constants, attributes = self.kernel._pack_args(backend, options, bound, specialization, rest)
        key = f"{self.kernel.module}.{self.kernel.__name__} {specialization} {parsed}"
        return ASTSource(self.kernel, signature, constants, attributes), parsed, key


@dataclass(frozen=True)
class Binary:
    """One compiled kernel; `stack` are the bytes of a thread's spilled registers."""

    registers: int
    stack: int
    shared: int


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Append launches to the yielded list instead of running them."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(self, args, options))

    run: Callable[..., Any] = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def compiled(source: Any, options: Any, arch: int) -> Binary:
    """Compile for an architecture; return the binary's resources."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options.__dict__)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Binary(found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared)


def fault(call: Call, binary: Binary, arch: int) -> str | None:
    """Return a message about a fault of the binary; None without one."""
    if binary.shared > SHARED[arch]:
        return f"{binary.shared} bytes of shared memory; expected at most {SHARED[arch]}"
    if binary.stack and not call.spills:
        return f"{binary.stack} bytes of spilled registers; expected none"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="calls whose name has this word")
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED, default=list(SHARED))
    arguments = parser.parse_args()
    n_faults, seen = 0, set()
    for call in CALLS:
        if arguments.only not in call.name:
            continue
        with recorded() as launches:
            call.run()
        assert launches, f"{call.name} launches nothing"
        for launch in launches:
            for arch in arguments.arch:
                source, options, key = launch.source(arch)
                if (arch, key) in seen:
                    continue
                seen.add((arch, key))
                began = time.perf_counter()
                binary = compiled(source, options, arch)
                wrong = fault(call, binary, arch)
                n_faults += wrong is not None
                print(
                    f"sm_{arch} {call.name:44} {launch.kernel.__name__:16} {binary.registers:3} registers "
                    f"{binary.stack:4} B stack {binary.shared:6} B shared {time.perf_counter() - began:5.1f} s"
                    + (f"  FAULT: {wrong}" if wrong else ""),
                    flush=True,
                )
    print(f"{len(seen)} kernels compiled, {n_faults} faults")
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
