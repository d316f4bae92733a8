"""Times first uses: each command runs in a fresh process with an empty cache of kernels, and then once more.

    python benchmarks/first_use.py [--without-built]

`--without-built` also hides the kernels that the installation compiled, so that every kernel is compiled.
`LCE_CPU=v3` measures another level of processor.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lce.kernels.runtime import library

HAYSTACK = Path(__file__).parent.parent / "examples" / "haystack.txt"
COMMANDS = (
    ("-m", "demo", "--method", "esa", "-f", str(HAYSTACK)),
    ("-m", "smollm2", "-p", "The capital of France is", "-n", "8"),
    *(("-m", "demo", "--method", name, "-f", str(HAYSTACK), "-n", "8") for name in ("full", "longheads", "infllm")),
    *(("-m", "smollm2", "--dtype", name, "-p", "The capital", "-n", "8") for name in ("float32", "float16")),
)


def timed(arguments: tuple[str, ...], home: str) -> tuple[float, float]:
    """Run `lce generate`; return the seconds to the first text on stdout and to the end."""
    begun = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": home, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lce", "generate", "--quiet", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return first, time.perf_counter() - begun


def main() -> None:
    built = library.built_folder(library.levels.current()).parent.parent
    hidden = built.with_name("built.hidden")
    if hide := "--without-built" in sys.argv and built.exists():
        built.rename(hidden)
    try:
        print("first token, end: with an empty cache, and again, in seconds")
        for arguments in COMMANDS:
            with tempfile.TemporaryDirectory() as home:
                cold, warm = timed(arguments, home), timed(arguments, home)
            print(f"{cold[0]:6.1f} {cold[1]:6.1f} {warm[0]:6.1f} {warm[1]:6.1f}  {' '.join(arguments)}", flush=True)
    finally:
        if hide:
            hidden.rename(built)


if __name__ == "__main__":
    main()
