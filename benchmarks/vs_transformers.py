"""The speed of lce relative to transformers: the same random weights, on the same machine, in one run.

    python benchmarks/vs_transformers.py                       # both shapes, float32 and bfloat16
    python benchmarks/vs_transformers.py --shape small --dtype float32 --lengths 512,2048

Each engine runs in its own process. They are measured in turn, so that a drift of the machine's speed affects both.
transformers runs its model's forward, with its own cache and SDPA attention and the logits of the last token alone,
without the overhead of its `generate`. Load time excludes imports; peak memory is that of the process, mapped pages
included. Speeds are medians. lce is better where a ratio of speeds is above 1, or one of load time or memory below 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {
    # TinyLlama's: 1.1 billion parameters.
    "tinyllama": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
    },
}
WINDOW = 16384


def make_checkpoint(folder: Path, shape: dict[str, int], dtype: str) -> None:
    """A random checkpoint in the published layout, with the demo model's tokenizer beside it."""
    import torch
    from safetensors.torch import save_file

    from lce.engine.loading import DEMO
    from lce.models.registry import model_class, read_config

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "hidden_act": "silu",
        "max_position_embeddings": WINDOW,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = read_config(folder)
    tensors = {
        name: torch.ones(size, dtype=kind) if len(size) == 1 else torch.empty(size, dtype=kind).normal_(std=0.02)
        for name, size in model_class(model).weights(model).values()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Lce:
    """lce, as a worker."""

    def load(self, folder: str, dtype: str) -> float:
        import lce
        import lce.engine.loading

        started = time.perf_counter()
        self.engine = lce.load(folder, method="full", dtype=dtype)
        return time.perf_counter() - started

    def run(self, length: int, new_tokens: int) -> tuple[float, float]:
        ids = [(i * 7919) % 31000 + 2 for i in range(length)]
        stats = self.engine.generate(ids, max_tokens=new_tokens).stats
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

        ids = torch.tensor([[(i * 7919) % 31000 + 2 for i in range(length)]])
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


def peak_memory() -> int:
    """Bytes of this process's largest resident set."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(name: str) -> None:
    """Answer the parent's requests, a JSON line each."""
    worker = ENGINES[name]()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("what")
        result: Any = peak_memory() if what == "memory" else getattr(worker, what)(**request)
        answers.write(json.dumps(result) + "\n")
        answers.flush()


class Remote:
    """One engine in its own process."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(folder: Path, dtype: str, lengths: list[int], repeats: int, new_tokens: int) -> dict[str, dict[str, float]]:
    """Figures by name, each `{engine: median}`."""
    loads: dict[str, list[float]] = {name: [] for name in ENGINES}
    for _ in range(repeats):
        for name in ENGINES:
            remote = Remote(name)
            loads[name].append(remote.ask("load", folder=str(folder), dtype=dtype))
            remote.close()
    figures = {"load s": {name: statistics.median(times) for name, times in loads.items()}}
    remotes = {name: Remote(name) for name in ENGINES}
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
    """One table, as Markdown."""
    print(f"\n### {title}\n\n| figure | lce | transformers | lce / transformers |\n|---|---:|---:|---:|")
    for what, values in figures.items():
        ratio = values["lce"] / values["transformers"]
        print(f"| {what} | {values['lce']:.4g} | {values['transformers']:.4g} | {ratio:.2f} |", flush=True)


def machine() -> str:
    import torch
    import transformers

    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return (
        f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__} with {torch.get_num_threads()} threads, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )


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
        serve(args.serve)
        return
    print(f"{machine()}; medians of {args.repeats}", flush=True)
    for shape in args.shape or SHAPES:
        for dtype in args.dtype or ["float32", "bfloat16"]:
            with tempfile.TemporaryDirectory() as folder:
                make_checkpoint(Path(folder), SHAPES[shape], dtype)
                lengths = [int(length) for length in args.lengths.split(",")]
                report(f"{shape}, {dtype}", measure(Path(folder), dtype, lengths, args.repeats, args.new_tokens))


if __name__ == "__main__":
    main()
