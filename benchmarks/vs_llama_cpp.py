"""Measures lce's speed relative to llama.cpp: the same random weights, on the same machine, in one run.

    python benchmarks/vs_llama_cpp.py --models models                  # both shapes, bfloat16, 8 and 4 bits
    python benchmarks/vs_llama_cpp.py --models models --shape small --dtypes bf16 --methods full,longheads

Needs the packages llama-cpp-python and gguf; without them, prints one line and exits with 0. Build llama.cpp for this
machine, or it is slower than it can be:

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python gguf

Each engine runs in its own process. They are measured in turns, so that a drift of the machine's speed affects both.
Both have as many threads as there are cores. llama.cpp runs full attention with its flash attention, batches of 2048
and 512, keys and values in float16. Its time is that of `llama_decode`, with the logits of the last token and the
likeliest token of a decode step; lce's is that of `generate`. The first decode step is not timed. Speeds are medians;
above 1, a ratio favours lce. The 8-bit weights are llama.cpp's Q8_0 and the 4-bit ones Q4_K_M, made by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import inspect
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models import SHAPES, checkpoint, token_ids, write_gguf
from workers import Remote, serve

KINDS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_K_M"}  # kinds of weights, and llama.cpp's names
NEEDS = {"esa": {"compress": "pca"}}  # random weights have no learned maps
CHECKED = 32  # tokens whose last logits are compared


class Lce:
    """lce, as a worker."""

    def load(self, folder: str, kind: str, methods: list[str], window: int | None, threads: int) -> str | None:
        """Load one engine a method over the same weights; return a line with the reason on failure."""
        import lce
        import lce.lab.bench

        options: dict[str, Any] = {"window": window, "threads": threads}
        if kind != "bf16":
            if "weights" not in inspect.signature(lce.load).parameters:
                return f"lce.load of lce {lce.__version__} has no option weights={kind!r}"
            options["weights"] = kind
        self.subjects: dict[str, Any] = {}
        first = None
        for name in methods:
            engine = lce.load(folder, lce.methods.make(name, NEEDS.get(name)), sharing=first, **options)
            first = first or engine
            self.subjects[name] = lce.lab.bench.Subject(engine, token_ids)
        return None

    def run(self, method: str, length: int, new_tokens: int) -> list[float]:
        """Return the tokens a second of prefill and of decode."""
        subject = self.subjects[method]
        context, first = subject.prefill(length, new_tokens + 8)
        with context:
            return [first.stats.prefill_tokens_per_s, subject.decode(context, new_tokens, first)]

    def logits(self, method: str) -> list[float]:
        found: list[float] = self.subjects[method].engine.logits(token_ids(CHECKED))[-1].tolist()
        return found


class LlamaCpp:
    """llama.cpp, as a worker."""

    def load(self, path: str, n_ctx: int, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.llm = llama_cpp.Llama(
            path, n_ctx=n_ctx, n_batch=2048, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            flash_attn=True, verbose=False,
        )  # fmt: skip
        self.context = self.llm._ctx.ctx

    def run(self, length: int, new_tokens: int) -> list[float]:
        """Return the tokens a second of prefill and of decode."""
        self.clear()
        ids = token_ids(length)
        started = time.perf_counter()
        last = self.read(ids)
        prefill = length / (time.perf_counter() - started)
        last = self.read([int(last.argmax())])
        started = time.perf_counter()
        for _ in range(new_tokens):
            last = self.read([int(last.argmax())])
        return [prefill, new_tokens / (time.perf_counter() - started)]

    def logits(self) -> list[float]:
        self.clear()
        found: list[float] = self.read(token_ids(CHECKED)).tolist()
        return found

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

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


def gguf_of(folder: Path, name: str) -> Path:
    """Return a checkpoint's GGUF file with weights of a kind, by llama.cpp's name, beside the folder, made once."""
    plain = folder.with_suffix(".bf16.gguf")
    if not plain.exists():
        write_gguf(folder, plain)
    if name == "BF16":
        return plain
    path = folder.with_suffix(f".{name}.gguf")
    if not path.exists():
        import llama_cpp

        silence()
        draft = path.with_suffix(".making")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        code = llama_cpp.llama_model_quantize(str(plain).encode(), str(draft).encode(), ctypes.byref(params))
        if code:
            raise SystemExit(f"llama_model_quantize returned {code} for {name}")
        draft.replace(path)
    return path


def measure(args: argparse.Namespace, folder: Path, kind: str, threads: int) -> list[dict[str, Any]]:
    """Return a row for each method, figure and length: medians, and their ratio if both were measured."""
    lengths, methods = [int(n) for n in args.lengths.split(",")], args.methods.split(",")
    ours, theirs = Remote(__file__, "lce"), Remote(__file__, "llama.cpp")
    n_ctx = -(-(max(lengths) + args.new_tokens + 8) // 256) * 256
    theirs.ask("load", path=str(gguf_of(folder, KINDS[kind])), n_ctx=n_ctx, threads=threads)
    refusal = ours.ask("load", folder=str(folder), kind=kind, methods=methods, window=args.window, threads=threads)
    if refusal:
        print(f"{kind}: {refusal}: llama.cpp alone is measured", file=sys.stderr)
    elif "full" in methods:
        a, b = ours.ask("logits", method="full"), theirs.ask("logits")
        apart, largest = max(abs(x - y) for x, y in zip(a, b, strict=True)), max(map(abs, a))
        print(f"\n{kind}: logits after {CHECKED} tokens differ by {apart:.3g} at most; the largest is {largest:.3g}")
    rows = []
    for length in lengths:
        found: dict[str, list[list[float]]] = {"llama.cpp": [], **({} if refusal else {name: [] for name in methods})}
        for repeat in range(-1, args.repeats):  # the first does not count
            for name, runs in found.items():
                request = {"length": length, "new_tokens": args.new_tokens if repeat >= 0 else 2}
                run = theirs.ask("run", **request) if name == "llama.cpp" else ours.ask("run", method=name, **request)
                if repeat >= 0:
                    runs.append(run)
        for index, figure in enumerate(("prefill", "decode")):
            medians = {name: statistics.median(run[index] for run in runs) for name, runs in found.items()}
            other = medians.pop("llama.cpp")
            spreads = {name: [min(r[index] for r in runs), max(r[index] for r in runs)] for name, runs in found.items()}
            for name in methods:
                own = medians.get(name)
                rows.append(
                    {
                        "weights": kind, "method": name, "figure": figure, "length": length,
                        "lce": own, "llama_cpp": other, "ratio": own and own / other,
                        "lce_spread": spreads.get(name), "llama_cpp_spread": spreads["llama.cpp"],
                    }
                )  # fmt: skip
    ours.close()
    theirs.close()
    return rows


def table(shape: str, rows: list[dict[str, Any]]) -> str:
    """Return one table as Markdown."""
    lines = [
        f"\n### {shape}\n",
        "| weights | tok/s | length | lce's method | lce | llama.cpp, full | lce / llama.cpp |",
    ]
    lines.append("|---|---|---:|---|---:|---:|---:|")
    for row in rows:
        own, ratio = (
            "–" if row[key] is None else f"{row[key]:{form}}" for key, form in (("lce", ".4g"), ("ratio", ".2f"))
        )
        lines.append(
            f"| {row['weights']} | {row['figure']} | {row['length']:,} | `{row['method']}` | {own} "
            f"| {row['llama_cpp']:.4g} | {ratio} |"
        )
    return "\n".join(lines)


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
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--dtypes", default="bf16,int8,int4", help=f"kinds of weights: {', '.join(KINDS)}")
    parser.add_argument("--methods", default="full", help="lce's methods; llama.cpp has full attention")
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--window", type=int, help="positions that lce's methods trust the model on")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, help="of both engines; default: the physical cores")
    parser.add_argument("--models", type=Path, help="a folder that keeps the weights for the next run")
    parser.add_argument("--json", type=Path, help="a file for all rows")
    parser.add_argument("--serve", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(WORKERS[args.serve]())
        return
    missing = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        print('nothing to compare with: CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python gguf')
        return
    if strange := set(args.dtypes.split(",")) - set(KINDS):
        parser.error(f"unknown dtypes {', '.join(sorted(strange))}; expected some of {', '.join(KINDS)}")
    compare(args)


def compare(args: argparse.Namespace) -> None:
    import llama_cpp

    from lce.lab.bench import machine

    threads = args.threads or physical_cores()
    build = llama_cpp.llama_print_system_info().decode().strip(" |")
    print(f"{machine()}; llama-cpp-python {llama_cpp.__version__} ({build}); {threads} threads each, medians of "
          f"{args.repeats}, {args.new_tokens} tokens decoded", flush=True)  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for shape in args.shape or SHAPES:
            folder = checkpoint(args.models or Path(temporary), shape, "bfloat16", 16384)
            found[shape] = []
            for kind in args.dtypes.split(","):
                found[shape] += measure(args, folder, kind, threads)
            print(table(shape, found[shape]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "threads": threads, "shapes": found}, indent=1))


if __name__ == "__main__":
    main()
