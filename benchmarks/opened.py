"""Measures decode of a context opened from a file beside decode of the same context in memory.

    python benchmarks/opened.py -m smollm2
    python benchmarks/opened.py -m smollm2 --methods full,longheads --busy 0,1 --length 2048

Both contexts decode in turns in one process, beside 0 and 1 busy processes: each writes a piece of its answer, which
is mostly a token, and the same for both. Prints the median milliseconds of a piece from the eighth on, and the ratio of
memory to file.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from models import token_ids

import lce

FIRST = 7  # pieces that do not count: with the first ones the file is read


def ratio(engine: lce.Engine, length: int, new_tokens: int) -> tuple[float, float]:
    """Return the median milliseconds of a piece of a context in memory, and of one opened from a file."""
    ids = token_ids(length)
    with tempfile.TemporaryDirectory() as folder, engine.prefill(ids, length=length + new_tokens + 8) as held:
        file = Path(folder) / "a.lce"
        held.save(file)
        with engine.open_context(file) as opened:
            streams = [engine.stream([5], context=each, max_tokens=new_tokens) for each in (held, opened)]
            found: list[list[float]] = [[], []]
            for _ in range(new_tokens - 1):
                for stream, times in zip(streams, found, strict=True):
                    began = time.perf_counter()
                    next(stream)
                    times.append(1e3 * (time.perf_counter() - began))
            for stream in streams:
                stream.close()
    one, other = (statistics.median(times[FIRST:]) for times in found)
    return one, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--methods", default="full,self_extend,longheads,pages")
    parser.add_argument("--busy", default="0,1", help="numbers of busy processes")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    first = None
    for method in args.methods.split(","):
        engine = lce.load(args.model, method, sharing=first)
        first = first or engine
        ratio(engine, 256, 12)  # compiles kernels
        for busy in map(int, args.busy.split(",")):
            company = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
            try:
                time.sleep(0.5)
                one, other = ratio(engine, args.length, args.new_tokens)
            finally:
                for process in company:
                    process.kill()
                    process.wait()
            print(f"{method}, {busy} busy: memory {one:.1f} ms, file {other:.1f} ms, {one / other:.2f}", flush=True)


if __name__ == "__main__":
    main()
