"""Measures lce's speed relative to transformers: the same random weights, on the same machine, in one run.

    python benchmarks/vs_transformers.py                       # both shapes, float32 and bfloat16
    python benchmarks/vs_transformers.py --shape small --dtype float32 --lengths 512,2048

Each engine runs in its own process. Engines are measured in turn, so that a drift of the machine's speed affects both.
transformers runs its model's forward, with its own cache and SDPA attention and only the last token's logits, without
`generate`'s overhead. Load time excludes imports; peak memory is the process's, mapped pages included. Speeds are
medians. lce is better if a ratio of speeds is above 1, or a ratio of load times or memory below 1.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from models import SHAPES, make_checkpoint, token_ids
from workers import Remote, serve

from lce_lab.bench import machine


class Lce:
    """lce, as a worker."""

    def load(self, folder: str, dtype: str) -> float:
        import lce
        import lce.engine.loading

        started = time.perf_counter()
        self.engine = lce.load(folder, method="full", dtype=dtype)
        return time.perf_counter() - started

    def run(self, length: int, new_tokens: int) -> tuple[float, float]:
        stats = self.engine.generate(token_ids(length), max_tokens=new_tokens).stats
        return stats.prefill_tokens_per_s, stats.decode_tokens_per_s


class Transformers:
    """transformers, as a worker."""

    def load(self, folder: str, dtype: str) -> float:
        import torch
        from transformers import AutoModelForCausalLM

        started = time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        return time.perf_counter() - started

    def run(self, length: int, new_tokens: int) -> tuple[float, float]:
        import torch

        ids = torch.tensor([token_ids(length)])
        with torch.inference_mode():
            started = time.perf_counter()
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            prefill = length / (time.perf_counter() - started)
            token = out.logits[:, -1:].argmax(-1)
            started = time.perf_counter()
            for _ in range(new_tokens - 1):
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return prefill, (new_tokens - 1) / (time.perf_counter() - started)


ENGINES = {"lce": Lce, "transformers": Transformers}


def measure(folder: Path, dtype: str, lengths: list[int], repeats: int, new_tokens: int) -> dict[str, dict[str, float]]:
    """Return figures by name, each `{engine: median}`."""
    loads: dict[str, list[float]] = {name: [] for name in ENGINES}
    for _ in range(repeats):
        for name in ENGINES:
            remote = Remote(__file__, name)
            loads[name].append(remote.ask("load", folder=str(folder), dtype=dtype))
            remote.close()
    figures = {"load s": {name: statistics.median(times) for name, times in loads.items()}}
    remotes = {name: Remote(__file__, name) for name in ENGINES}
    for remote in remotes.values():
        remote.ask("load", folder=str(folder), dtype=dtype)
        remote.ask("run", length=64, new_tokens=4)
    for length in lengths:
        speeds: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
        for _ in range(repeats):
            for name, remote in remotes.items():
                speeds[name].append(remote.ask("run", length=length, new_tokens=new_tokens))
        for index, what in enumerate(("prefill tok/s", "decode tok/s")):
            figures[f"{what} at {length}"] = {
                name: statistics.median(run[index] for run in runs) for name, runs in speeds.items()
            }
    figures["peak memory MiB"] = {name: remote.ask("memory") / 2**20 for name, remote in remotes.items()}
    for remote in remotes.values():
        remote.close()
    return figures


def report(title: str, figures: dict[str, dict[str, float]]) -> None:
    """Print one table as Markdown."""
    print(f"\n### {title}\n\n| figure | lce | transformers | lce / transformers |\n|---|---:|---:|---:|")
    for what, values in figures.items():
        ratio = values["lce"] / values["transformers"]
        print(f"| {what} | {values['lce']:.4g} | {values['transformers']:.4g} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=17)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(ENGINES[args.serve]())
        return
    import transformers

    print(f"{machine()}, transformers {transformers.__version__}; medians of {args.repeats}", flush=True)
    for shape in args.shape or ["tinyllama", "small"]:
        for dtype in args.dtype or ["float32", "bfloat16"]:
            with tempfile.TemporaryDirectory() as folder:
                make_checkpoint(Path(folder), SHAPES[shape], dtype)
                lengths = [int(length) for length in args.lengths.split(",")]
                report(f"{shape}, {dtype}", measure(Path(folder), dtype, lengths, args.repeats, args.new_tokens))


if __name__ == "__main__":
    main()
