"""Measures lce and llama.cpp while other processes keep cores busy, which this program starts and ends.

    python benchmarks/company.py --model SmolLM2-135M-Instruct.Q4_1.gguf

For 0, 1 and 2 busy processes, prints the tokens a second of prefill and of decode behind it: of lce with its default
threads, which are fewer while they come too late, and with fixed numbers of threads; and of llama.cpp, where
llama-cpp-python is installed. All take turns in one run. `default` is divided by the best fixed number of each engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from typing import Any

from models import token_ids
from workers import Remote, serve


class Lce:
    """lce, as a worker."""

    def load(self, path: str) -> None:
        import lce
        import lce_lab.bench

        self.subject = lce_lab.bench.Subject(lce.load(path), token_ids)

    def run(self, threads: str, length: int, new_tokens: int) -> list[float]:
        """Return the tokens a second of prefill and of decode."""
        import torch

        from lce.kernels.runtime.threads import adapt
        from lce.system import usable_cores

        torch.set_num_threads(usable_cores() if threads == "default" else int(threads))
        adapt(threads == "default")
        context, first = self.subject.prefill(length, new_tokens + 8)
        with context:
            return [first.stats.prefill_tokens_per_s, self.subject.decode(context, new_tokens, first)]


class LlamaCpp:
    """llama.cpp, as a worker."""

    def load(self, path: str) -> None:
        import vs_llama_cpp

        self.engine = vs_llama_cpp.LlamaCpp()
        self.engine.load(path, 4096, 1)

    def run(self, threads: str, length: int, new_tokens: int) -> list[float]:
        """Return the tokens a second of prefill and of decode."""
        self.engine.api.llama_set_n_threads(self.engine.context, int(threads), int(threads))
        return [self.engine.prefill(length), self.engine.decode(new_tokens)]


WORKERS = {"lce": Lce, "llama.cpp": LlamaCpp}
SETTINGS = {"lce": ("default", "1", "2"), "llama.cpp": ("1", "2")}
FIGURES = (("prefill", 2048, 1, 0), ("decode", 512, 48, 1))  # a name, a text's length, new tokens, and which result


def measure(engines: dict[str, Remote], busy: int, repeats: int) -> None:
    """Print a line a figure, measured beside `busy` processes."""
    company = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        time.sleep(0.5)
        for figure, length, new_tokens, index in FIGURES:
            found: dict[tuple[str, str], list[float]] = {}
            for _ in range(repeats):
                for name, engine in engines.items():
                    for threads in SETTINGS[name]:
                        run: Any = engine.ask("run", threads=threads, length=length, new_tokens=new_tokens)
                        found.setdefault((name, threads), []).append(run[index])
            medians = {setting: statistics.median(runs) for setting, runs in found.items()}
            own = medians["lce", "default"]
            ratios = []
            for name in engines:
                best = max(medians[name, threads] for threads in ("1", "2"))
                ratios.append(f"{own / best:.2f} of {name}'s best")
            speeds = ", ".join(f"{name} {threads}: {speed:.1f}" for (name, threads), speed in medians.items())
            print(f"{busy} busy, {figure} at {length:,}: {speeds}; default is {', '.join(ratios)}", flush=True)
    finally:
        for process in company:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file; a folder measures lce alone")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(WORKERS[args.serve]())
        return
    if args.model is None:
        parser.error("--model is missing; expected a GGUF file or a folder")
    both = args.model.endswith(".gguf") and importlib.util.find_spec("llama_cpp") is not None
    engines = {name: Remote(__file__, name) for name in (WORKERS if both else ["lce"])}
    for name, engine in engines.items():
        engine.ask("load", path=args.model)
        engine.ask("run", threads=SETTINGS[name][0], length=512, new_tokens=2)  # compiles kernels
    for busy in args.busy.split(","):
        measure(engines, int(busy), args.repeats)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
