"""Measures time and memory of prefilling a document into a context file, and of asking the file.

    python benchmarks/contexts.py --out demo.lce                             # the demo model, 100,000 tokens
    python benchmarks/contexts.py --out long.lce --model long --make small --dtype bfloat16 --tokens 1000000 \\
        --window 2048 -o chunk_size=256 --block 8192 --kv-host-budget 2GiB --checkpoint-every 65536 --lines 100

With `--make`, a random checkpoint of that shape is written to the folder `--model` if there is none. An interrupted
command resumes from its last checkpoint when it is run again. Peak memory includes mapped pages of files, which the
system can drop at any time; "anonymous" is the memory at the end without them. A separate process asks the file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from models import SHAPES, make_checkpoint
from workers import peak_memory

import lce
from lce.cache.disk import Disk
from lce.sizes import size_text
from lce.terminal.output import memory_text
from lce_lab.bench import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the context file")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--make", choices=SHAPES)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--method", default="longheads")
    parser.add_argument("-o", dest="knobs", action="append", default=[])
    parser.add_argument("--window", type=int)
    parser.add_argument("--block", type=int)
    parser.add_argument("--kv-host-budget")
    parser.add_argument("--spill-dir")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--lines", type=int, default=20, help="of progress")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make and not Path(args.model).exists():
        Path(args.model).mkdir(parents=True)
        make_checkpoint(Path(args.model), SHAPES[args.make], "bfloat16" if args.dtype == "auto" else args.dtype)
    method = lce.methods.make(args.method, dict(knob.split("=", 1) for knob in args.knobs))
    engine = lce.load(
        args.model, method, dtype=args.dtype, window=args.window, block=args.block,
        kv_host_budget=args.kv_host_budget, spill_dir=args.spill_dir, kv_dtype=args.kv_dtype,
    )  # fmt: skip
    if args.ask:
        ask(engine, args.out)
        return
    print(f"{machine()}; {engine!r}, {args.tokens:,} tokens, budget {args.kv_host_budget}, "
          f"kv_dtype {args.kv_dtype}", flush=True)  # fmt: skip
    if not Path(args.out).exists():
        read(engine, args)
    subprocess.run([sys.executable, *sys.argv, "--ask"], check=True)


def read(engine: lce.Engine, args: argparse.Namespace) -> None:
    """Prefill into the file; print speed and memory while the file grows."""
    ids = [(i * 7919 + i // 4096) % (engine.setup.model.config.vocab_size - 2) + 2 for i in range(args.tokens)]
    last = [0, time.perf_counter()]

    def progress(done: int, total: int) -> None:
        if last[0] == 0 or done - last[0] >= total / args.lines or done == total:
            now = time.perf_counter()
            speed = (done - last[0]) / (now - last[1]) if last[0] else 0
            print(f"{done:>10,} tokens  {speed:>8.1f} tok/s  peak memory {size_text(peak_memory())}", flush=True)
            last[:] = [done, now]

    stats = engine.prefill_file(ids, args.out, checkpoint_every=args.checkpoint_every, progress=progress)
    print(f"prefill: {stats.prompt_tokens:,} tokens in {stats.prefill_s:.1f} s, "
          f"{stats.prefill_tokens_per_s:.1f} tok/s; peak memory of the process {size_text(peak_memory())}; "
          f"anonymous {size_text(anonymous())}; {memory_text(stats)}", flush=True)  # fmt: skip


def ask(engine: lce.Engine, path: str) -> None:
    """Open the file in a process that has not prefilled the document, and generate some tokens."""
    before = peak_memory()
    started = time.perf_counter()
    context = engine.open_context(path)
    opened = time.perf_counter() - started
    stats = engine.generate([17, 42], context=context, max_tokens=17).stats
    read = sum(tier.file.bytes_read for tier in context.cache.tiers if isinstance(tier, Disk))
    print(f"open: {opened:.3f} s; first token: {opened + stats.first_token_s:.3f} s after that of the start; decode: "
          f"{1000 * stats.decode_s / 16:.1f} ms a token; file {size_text(Path(path).stat().st_size)}, of which read "
          f"{size_text(read)}; memory {size_text(before)} with the model alone, {size_text(peak_memory())} at its "
          f"peak, anonymous {size_text(anonymous())}; {memory_text(stats)}")  # fmt: skip


def anonymous() -> int:
    """Return the current bytes of this process's resident memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


if __name__ == "__main__":
    main()
