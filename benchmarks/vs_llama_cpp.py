"""Measures lce's speed relative to llama.cpp: the same GGUF files, on the same machine, in one run.

    python benchmarks/vs_llama_cpp.py                                  # smollm2, eight types of weights, three lengths
    python benchmarks/vs_llama_cpp.py --quick                          # shorter texts, one run each
    python benchmarks/vs_llama_cpp.py -m model.gguf --types Q4_K_M,Q6_K --lengths 512,8192 --models folder
    python benchmarks/vs_llama_cpp.py --shape 7b --types Q4_K_M        # random weights, four layers of a 7B model
    python benchmarks/vs_llama_cpp.py --native .venv/bin/python --v3 llama-avx2/bin/python   # both levels of processor

Needs llama-cpp-python in the Python given by `--native`, by default this one; without it, prints one line and exits
with 0. Build llama.cpp for this machine, or it is slower than it can be. For `--v3`, which measures both as on a
processor of x86-64-v3 (AVX2 without AVX-512), build a second one, in a virtual environment of its own:

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python
    CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python

Built by GCC 12 for a processor with AMX, llama.cpp crashes at its first product: GCC's `_tile_loadconfig` says that it
reads 8 of its 64 bytes. `asm volatile("" :: "r"(&tc) : "memory");` before its call in ggml-cpu/amx/mmq.cpp helps.

The files are made of the model's own by llama.cpp: F32 unpacks it, and the others quantise it again. A model whose name
ends with the type is taken as it is. Each engine runs in its own process. They are measured in turns, so that a drift
of the machine's speed affects all. All have as many threads as there are cores. llama.cpp runs full attention with and
without its flash attention, and the higher median counts. It has batches of 2048 and 512, keys and values in float16,
and its time is that of `llama_decode`, with the logits of the last token and the likeliest token of a decode step;
lce's is that of `generate`. The first decode step is not timed. Speeds are medians. Decode continues the text by some
tokens in each turn. A text that takes long is read once.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models import SHAPES, make_checkpoint, token_ids, write_gguf
from workers import Remote, serve

TYPES = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K")  # llama.cpp's names of types of weights
CHECKED = 32  # tokens whose last logits are compared
LEVELS: dict[str, dict[str, str]] = {
    "native": {},
    "v3": {"LCE_CPU": "v3", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
LONG = 2048  # tokens; a longer text is read once
FLASH = ("on", "off")  # llama.cpp's flash attention


class Lce:
    """lce, as a worker."""

    def load(self, path: str, n_ctx: int, threads: int) -> str:
        """Load a file; return what lce computes in."""
        import lce

        self.path, self.n_ctx, self.context = path, n_ctx, None
        self.engine = lce.load(path, threads=threads)
        return str(self.engine.setup.dtype).removeprefix("torch.")

    def prefill(self, length: int) -> float:
        """Return the tokens a second."""
        if self.context:
            self.context.close()
        self.context: Any = self.engine.new_context(self.n_ctx)
        first = self.engine.generate(token_ids(length), context=self.context, max_tokens=1)
        speed: float = first.stats.prefill_tokens_per_s
        return speed

    def decode(self, n_tokens: int) -> float:
        """Return the tokens a second."""
        steps = 0
        for id_ in token_ids(100):
            last = self.engine.generate([id_], context=self.context, max_tokens=n_tokens + 1)
            # One step per generated token except the first, and one for an end token.
            steps = last.stats.generated_tokens - (last.finish_reason != "stop")
            if steps:
                break
        return steps / last.stats.decode_s

    def reading(self) -> list[float]:
        """Return the bytes that a decode step reads now, and the bytes a second at which memory is read."""
        import lce
        from lce_lab.bench.ceilings import reading_speed

        work = lce.operations(self.path, self.engine.method, tokens=len(self.context)).decode
        with lce.profiled(self.engine) as step:
            self.engine.prefill([1], context=self.context)
        return [work.weight_bytes // work.tokens + step.read_bytes, reading_speed(self.engine.setup.device)]

    def file_bytes(self) -> int:
        """Return the bytes of the file's weights that a decode step needs: all but an embedding that is not tied."""
        from lce.weights.gguf_file import read_gguf

        tensors = read_gguf(Path(self.path)).tensors
        apart = "token_embd.weight" if "output.weight" in tensors else None
        return sum(x.stop - x.start for name, x in tensors.items() if name != apart)

    def logits(self) -> list[float]:
        found: list[float] = self.engine.logits(token_ids(CHECKED))[-1].tolist()
        return found


class LlamaCpp:
    """llama.cpp, as a worker."""

    def __init__(self) -> None:
        import llama_cpp

        self.api = llama_cpp
        silence()

    def build(self) -> str:
        """Return the version, and what the build uses."""
        features = self.api.llama_print_system_info().decode().removeprefix("CPU : ")
        names = [part.removesuffix(" = 1") for part in features.strip(" |").split(" | ")]
        return f"{self.api.__version__} ({', '.join(names)})"

    def make(self, model: str, kind: str, out: str) -> None:
        """Write a GGUF file with another type of weights."""
        quantise(model, kind, out)

    def load(self, path: str, n_ctx: int, threads: int, flash: bool = True) -> None:
        self.llm = self.api.Llama(
            path, n_ctx=n_ctx, n_batch=2048, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            flash_attn=flash, verbose=False,
        )  # fmt: skip
        self.context = self.llm._ctx.ctx

    def prefill(self, length: int) -> float:
        """Return the tokens a second."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        ids = token_ids(length)
        started = time.perf_counter()
        self.last = self.read(ids)
        return length / (time.perf_counter() - started)

    def decode(self, n_tokens: int) -> float:
        """Return the tokens a second."""
        self.last = self.read([int(self.last.argmax())])
        started = time.perf_counter()
        for _ in range(n_tokens):
            self.last = self.read([int(self.last.argmax())])
        return n_tokens / (time.perf_counter() - started)

    def logits(self) -> list[float]:
        self.prefill(CHECKED)
        found: list[float] = self.last.tolist()
        return found

    def read(self, ids: list[int]) -> Any:
        """Read tokens; return the logits after the last one, a view."""
        import numpy as np

        for start in range(0, len(ids), 2048):
            part = ids[start : start + 2048]
            tokens = (self.api.llama_token * len(part))(*part)
            code = self.api.llama_decode(self.context, self.api.llama_batch_get_one(tokens, len(part)))
            assert code == 0, f"llama_decode returned {code}"
        logits = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.llm.n_vocab(),))


WORKERS = {"lce": Lce, "llama.cpp": LlamaCpp}


@functools.cache  # llama.cpp calls the function as long as it runs
def silence() -> object:
    """Keep llama.cpp from logging every tensor."""
    import llama_cpp

    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(callback, None)
    return callback


def quantise(model: str | Path, kind: str, out: str | Path) -> None:
    """Write a GGUF file with another type of weights, by llama.cpp's name, even if the model is quantised already."""
    import llama_cpp

    silence()
    draft = f"{out}.making"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}")
    params.allow_requantize = True
    code = llama_cpp.llama_model_quantize(str(model).encode(), draft.encode(), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama_model_quantize returned {code} for {kind}")
    os.replace(draft, out)


def measure(args: argparse.Namespace, ours: Remote, theirs: list[Remote], path: Path, threads: int) -> dict[str, Any]:
    """Return the figures of one file, for each length too.

    `prefill`, `decode` and `file_times` have three values: lce's, and llama.cpp's with and without flash attention.
    The first two are medians in tokens a second. `file_times` compares a decode step with reading the weights once.
    """
    n_ctx = -(-(max(args.lengths) + (args.repeats + 1) * (args.new_tokens + 2) + 8) // 256) * 256
    for engine, flash in zip(theirs, FLASH, strict=True):
        engine.ask("load", path=str(path), n_ctx=n_ctx, threads=threads, flash=flash == "on")
    dtype = ours.ask("load", path=str(path), n_ctx=n_ctx, threads=threads)
    a, b = ours.ask("logits"), theirs[0].ask("logits")
    error = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(map(abs, a))
    file_bytes, engines = ours.ask("file_bytes"), (ours, *theirs)
    found: dict[str, Any] = {"dtype": dtype, "logits_differ": error, "file_bytes": file_bytes, "lengths": {}}
    for engine in engines:  # compiles kernels, and does not count
        engine.ask("prefill", length=min(args.lengths))
        engine.ask("decode", n_tokens=2)
    for length in args.lengths:
        speeds: dict[str, list[list[float]]] = {"prefill": [], "decode": []}
        for _ in range(args.repeats if length <= LONG else 1):
            speeds["prefill"].append([engine.ask("prefill", length=length) for engine in engines])
        read_bytes, reading = ours.ask("reading")
        for _ in range(args.repeats):
            speeds["decode"].append([engine.ask("decode", n_tokens=args.new_tokens) for engine in engines])
        medians = {what: [statistics.median(x) for x in zip(*runs, strict=True)] for what, runs in speeds.items()}
        reading = max(reading, ours.ask("reading")[1])
        share = read_bytes * medians["decode"][0] / reading
        times = [reading / speed / file_bytes for speed in medians["decode"]]
        measured = {"reading": reading, "read_bytes": read_bytes, "share": share, "file_times": times}
        found["lengths"][length] = {**medians, **measured}
        print(f"{path.stem} {length}: {found['lengths'][length]}", file=sys.stderr, flush=True)
    return found


def table(lengths: list[int], rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows of one level, by type of weights, as Markdown."""
    heads = [f"{what} {length:,}" for what in ("prefill", "decode") for length in lengths]
    lines = [f"| weights | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for kind, row in rows.items():
        cells = []
        for what in ("prefill", "decode"):
            for length in lengths:
                at = row["lengths"][length]
                own, *others = at[what]
                other, flash = max(zip(others, FLASH, strict=True))
                share = f", {at['share']:.2f}" if what == "decode" else ""
                cells.append(f"**{own / other:.2f}** {own:,.{int(own < 100)}f}{share}, {flash}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def remark(kind: str, row: dict[str, Any]) -> str:
    """Return a line about one type of weights."""
    times = [
        f"{own:.2f} and {min(others):.2f} after {length:,}"
        for length, at in row["lengths"].items()
        for own, *others in [at["file_times"]]
    ]
    return (
        f"{kind}: lce uses {row['dtype']}; logits differ by {row['logits_differ']:.3f} of the largest. "
        f"A decode step of lce and of llama.cpp takes this many times as long as reading the file's "
        f"{row['file_bytes'] / 1e6:,.0f} MB once: {', '.join(times)}."
    )


def physical_cores() -> int:
    """Return the number of cores that this process may use, each once whatever its threads."""
    from lce.system import usable_cores

    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    fields = [
        line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(("physical id", "core id"))
    ]
    distinct = len(set(zip(fields[::2], fields[1::2], strict=False)))
    return min(distinct or usable_cores(), usable_cores())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", "-m", default="smollm2", help="a GGUF file, or a name of one that lce knows")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead; needs the gguf package")
    parser.add_argument(
        "--native", metavar="PYTHON", help="has llama.cpp built for this processor; default: this Python"
    )
    parser.add_argument("--v3", metavar="PYTHON", help="has llama.cpp built for AVX2: measure both without AVX-512")
    parser.add_argument("--types", default=",".join(TYPES), help="types of weights, by llama.cpp's names")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], help="default: 512,2048,8192")
    parser.add_argument("--repeats", type=int, help="default: 3")
    parser.add_argument("--new-tokens", type=int, default=24, help="decoded in each turn")
    parser.add_argument("--quick", action="store_true", help="lengths 512 and 2,048, once, unless given")
    parser.add_argument("--threads", type=int, help="of both engines; default: the physical cores")
    parser.add_argument("--models", type=Path, help="a folder that keeps the files for the next run")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--serve", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(WORKERS[args.serve]())
        return
    args.lengths = args.lengths or ([512, 2048] if args.quick else [512, 2048, 8192])
    args.repeats = args.repeats or (1 if args.quick else 3)
    if strange := set(args.types.split(",")) - set(TYPES):
        parser.error(f"unknown types {', '.join(sorted(strange))}; expected some of {', '.join(TYPES)}")
    pythons = {level: python for level in LEVELS if (python := getattr(args, level))} or {"native": sys.executable}
    for python in pythons.values():
        if subprocess.run([python, "-c", "import llama_cpp"], stderr=subprocess.DEVNULL, check=False).returncode:
            print(f'no llama.cpp in {python}: CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python')
            return
    compare(args, pythons)


def source(args: argparse.Namespace, folder: Path) -> Path:
    """Return the GGUF file of the model, or one of random weights made once in `folder`."""
    import lce

    if args.shape:
        path = folder / f"{args.shape}.BF16.gguf"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                make_checkpoint(Path(draft), SHAPES[args.shape], "bfloat16")
                write_gguf(Path(draft), path)
        return path
    named = Path(args.model)
    return named if named.is_file() else Path(lce.info(args.model).folder)


def compare(args: argparse.Namespace, pythons: dict[str, str]) -> None:
    """Measure each level of processor, and print its table."""
    from lce_lab.bench import machine

    threads, found = args.threads or physical_cores(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.models or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = source(args, folder)
        for level, python in pythons.items():
            ours = Remote(__file__, "lce", env=LEVELS[level])
            theirs = [Remote(__file__, "llama.cpp", python) for _ in FLASH]
            build, rows = theirs[0].ask("build"), dict[str, Any]()
            if level == "v3" and "AVX512" in build:
                raise SystemExit(f"llama.cpp of {python} uses {build}; expected one built with -DGGML_NATIVE=OFF")
            for kind in args.types.split(","):
                path = model if model.stem.endswith(kind) else folder / f"{model.stem}.{kind}.gguf"
                if not path.exists():
                    theirs[0].ask("make", model=str(model), kind=kind, out=str(path))
                rows[kind] = measure(args, ours, theirs, path, threads)
            speeds = [at["reading"] / 1e9 for row in rows.values() for at in row["lengths"].values()]
            print(
                f"\n{machine()}, {level}; {threads} threads; llama.cpp {build}. {model.stem}: lce / llama.cpp, lce's "
                f"tokens a second, decode's share of the reading speed, {min(speeds):.0f} to {max(speeds):.0f} GB/s, "
                f"and whether llama.cpp was faster with flash attention on or off.\n\n{table(args.lengths, rows)}\n",
                flush=True,
            )
            for kind, row in rows.items():
                print(remark(kind, row))
            found[level] = {"llama_cpp": build, "rows": rows}
            for engine in (ours, *theirs):
                engine.close()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "threads": threads, "levels": found}, indent=1))


if __name__ == "__main__":
    main()
