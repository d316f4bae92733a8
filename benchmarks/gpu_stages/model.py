"""Stages 8 to 11: one model, a checkpoint by its path or else Llama-3-8B's shape with drawn weights.

`methods` measures prefill and decode of every method, and of transformers; `lanes` batches, also over `lce serve`;
`packed` how weights are stored: memory, seconds to load, decode; `first` a first use, with nothing compiled before.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import lce
from gpu_stages.drawn import engine_of, random_ids
from gpu_stages.neighbour import forward
from gpu_stages.setup import Setup, Skip, graph_figures
from gpu_stages.speed import free

ROOT = Path(__file__).parent.parent.parent
FIRST = ("full", "longheads", "dca", "esa", "infllm")  # the other methods follow
LENGTHS, NEW_TOKENS = (2000, 30_000, 120_000), 33
LANES, PROMPT, ANSWER = (1, 8, 32), 2000, 64
STORED: dict[str, dict[str, Any]] = {
    "as stored": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"weights": "int8"}, "int4": {"weights": "int4"},
}  # fmt: skip


def loaded(setup: Setup, method: str, sharing: lce.Engine | None = None, **options: Any) -> lce.Engine:
    """Load the model with a method; methods with learned maps make their own of the text."""
    knobs = {"compress": "pca"} if method == "esa" else {}
    if setup.model is None and not setup.tiny:
        return engine_of("llama-3-8b", lce.methods.make(method, knobs), setup.device, sharing, **options)
    given = {"dtype": "bfloat16", "method_options": knobs, **options}
    return lce.load(setup.model or "demo", method, device=setup.device, sharing=sharing, **given)


def methods(setup: Setup) -> None:
    """Measure every method at all lengths, the shortest first; with what is already there, a stage goes on."""
    lengths, names = (LENGTHS, lce.methods.available()) if not setup.tiny else ((60, 150), ["full", "longheads"])
    first: lce.Engine | None = None
    for length in lengths:
        for name in sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
            label = f"{name} at {length}"
            if "decode ms" in setup.before.get(label, {}):
                setup.record[label] = setup.before[label]
                continue
            if setup.left() < 5:
                raise TimeoutError("no time left: --resume goes on here")
            with setup.record.attempt(label) as cell:
                free(setup)
                engine = loaded(setup, name, first)
                first = first or engine
                cell.update(method=name, length=length, **twice(setup, engine, length))
        beside(setup, length)


def twice(setup: Setup, engine: lce.Engine, length: int) -> dict[str, Any]:
    """Read and answer twice, and return the figures of both; the second time all is compiled and recorded."""
    found: dict[str, Any] = {"block": engine.setup.block}
    for prefix in ("first ", ""):
        setup.synchronize()
        started = time.perf_counter()
        with engine.prefill(random_ids(engine, length), length=length + 2 * NEW_TOKENS) as context:
            setup.synchronize()
            found[f"{prefix}prefill tok/s"] = length / (time.perf_counter() - started)
            stats = engine.generate([], context=context, max_tokens=NEW_TOKENS).stats
            found[f"{prefix}decode ms"] = stats.decode_s / (NEW_TOKENS - 1) * 1e3
            if not prefix:
                found |= graph_figures(engine)
    return found | ({"peak memory bytes": torch.cuda.max_memory_allocated()} if setup.cuda else {})


def beside(setup: Setup, length: int) -> None:
    """Measure transformers with the checkpoint, if it is a folder that transformers can load."""
    if setup.model is None or not setup.model.is_dir():
        return
    with setup.record.attempt(f"transformers at {length}") as cell:
        free(setup)
        model = transformers_model(setup)
        ids = [7 + i % 1000 for i in range(length)]
        forward(setup, model, ids, 3)
        cell.update(method="transformers", length=length, **forward(setup, model, ids, NEW_TOKENS))


def transformers_model(setup: Setup) -> Any:
    """Load the checkpoint with transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16)
    return model.to(setup.device).eval()


def lanes(setup: Setup) -> None:
    """Measure answers to 1, 8 and 32 prompts at once: tokens a second of all together, without and with prompts.

    `others` counts the tokens that differ from those of the same prompts asked one by one.
    """
    counts, prompt, answer = (LANES, PROMPT, ANSWER) if not setup.tiny else ((1, 2), 40, 4)
    first: lce.Engine | None = None
    for name in ("full", "longheads"):
        engine = loaded(setup, name, first)
        first = first or engine
        for n in counts:
            with setup.record.attempt(f"{name}, {n} lanes") as cell, engine.batch(max_lanes=n) as batch:
                for part in ("first ", ""):
                    prompts = [random_ids(engine, prompt, seed=i) for i in range(n)]
                    began = time.perf_counter()
                    for stream in [batch.read(each) for each in prompts]:
                        list(stream)
                    started = time.perf_counter()
                    streams = [batch.stream(each, max_tokens=answer, temperature=0) for each in prompts]
                    found = [stream.finish().token_ids for stream in streams]
                    ended = time.perf_counter()
                    cell[f"{part}tok/s"] = n * answer / (ended - started)
                    cell[f"{part}whole tok/s"] = n * answer / (ended - began)
                alone = [engine.generate(each, max_tokens=answer, temperature=0).token_ids for each in prompts]
                pairs = itertools.chain(*map(zip, found, alone))
                cell["others"] = sum(a != b for a, b in pairs)
        if setup.model is not None:
            with setup.record.attempt(f"{name}, lce serve") as cell:
                more = ["--method", name, "--lanes", ",".join(map(str, counts)), "--only", "lanes", "--repeats", "1"]
                cell["said"] = said(setup, [str(ROOT / "benchmarks/serving.py"), "-m", str(setup.model), *more])
    if setup.model is not None and setup.model.is_dir():
        with setup.record.attempt(f"transformers, {counts[-1]} prompts in one static batch") as cell:
            free(setup)
            ids = torch.tensor([random_ids(engine, prompt, seed=i) for i in range(counts[-1])], device=setup.device)
            model = transformers_model(setup)
            for part in ("first ", ""):
                started = time.perf_counter()
                model.generate(ids, max_new_tokens=answer, min_new_tokens=answer, do_sample=False)
                setup.synchronize()
                cell[f"{part}whole tok/s"] = counts[-1] * answer / (time.perf_counter() - started)


def packed(setup: Setup) -> None:
    """Measure how weights are stored: bytes on the device, seconds to load, and decode behind 2,000 tokens."""
    for name, options in STORED.items():
        with setup.record.attempt(name) as cell:
            free(setup)
            started = time.perf_counter()
            engine = loaded(setup, "full", **{"dtype": "auto", **options} if setup.model else options)
            setup.synchronize()
            cell["load s"] = time.perf_counter() - started
            if setup.cuda:
                cell["bytes"] = torch.cuda.memory_allocated()
            cell.update(twice(setup, engine, 40 if setup.tiny else PROMPT))
            del engine


def first(setup: Setup) -> None:
    """Time `lce generate` in a fresh process with an empty cache of kernels, and once more."""
    model = "demo" if setup.tiny else setup.model
    if model is None:
        raise Skip("no --model")
    text = ["-p", "Say it."] if setup.tiny else ["-f", str(ROOT / "examples" / "haystack.txt")]
    for name in ("full",) if setup.tiny else ("full", "longheads"):
        with tempfile.TemporaryDirectory() as folder:
            for which in ("empty cache", "again"):
                with setup.record.attempt(f"{name}, {which}") as cell:
                    words = ["-m", "lce", "generate", "--quiet", "-m", str(model), "--method", name]
                    words += [*text, "-n", "24", "--device", setup.device.type]
                    cell["seconds to the first token"], cell["seconds"] = timed(words, {"TRITON_CACHE_DIR": folder})


def timed(words: list[str], more: dict[str, str]) -> tuple[float, float]:
    """Run Python; return the seconds to the first byte that it prints and to its end."""
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, *words], env={**os.environ, **more}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        began = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}")
    return began, time.perf_counter() - started


def said(setup: Setup, words: list[str]) -> list[str]:
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=setup.left(), check=True)
    return run.stdout.splitlines()
