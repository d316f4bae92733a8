"""Compares a GGUF file in lce with the same file in transformers and in llama.cpp.

    python benchmarks/parity.py --model smollm2 --text FILE

transformers unpacks all weights to float32. Printed are: the largest difference of logits at each length; whether
200 greedy tokens are the same; the Kullback-Leibler divergence from transformers' predictions over 2,000 positions, in
nats a token; and the time to the first token of a prompt of 500 tokens. Rows of llama.cpp need llama-cpp-python, those
of transformers need the package gguf.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lce

sys.path.insert(0, str(Path(__file__).parent))
from quantisation import LlamaCpp, Logits

PROMPT = 500  # tokens of the prompt whose first token is timed


def transformers_model(path: Path) -> Any:
    """Return transformers' model of a GGUF file, with weights in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@contextmanager
def exact_angles(model: Any) -> Iterator[None]:
    """Have transformers compute RoPE's angles in float64, as lce does, for a model without RoPE scaling."""
    config, rotary = model.config, model.model.rotary_emb
    assert config.rope_parameters["rope_type"] == "default", config.rope_parameters
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids.double()[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    usual, rotary.forward = rotary.forward, forward
    try:
        yield
    finally:
        rotary.forward = usual


@torch.inference_mode()
def compare_logits(model: Any, engine: lce.Engine, ids: list[int], lengths: list[int]) -> None:
    """Print the largest difference between the logits of all positions, for each length.

    transformers computes RoPE's angles in float32. The second column is with its angles in float64, and the third is
    what the angles alone change in transformers.
    """
    print("| tokens | lce - transformers | with exact angles | transformers, by its angles | same first choice |")
    print("|---:|---:|---:|---:|---:|")

    def difference(a: Tensor, b: Tensor) -> float:
        return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))

    for n in lengths:
        theirs, ours = model(torch.tensor([ids[:n]])).logits[0], engine.logits(ids[:n])
        with exact_angles(model):
            exact = model(torch.tensor([ids[:n]])).logits[0]
        found = [difference(ours, theirs), difference(ours, exact), difference(theirs, exact)]
        same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean().item()
        print(f"| {n:,} | {' | '.join(f'{x:.1e}' for x in found)} | {same:.4f} |", flush=True)


@torch.inference_mode()
def compare_greedy(model: Any, engine: lce.Engine, ids: list[int], lengths: list[int], n_new: int) -> None:
    """Print how many of `n_new` greedy tokens are the same, behind the first tokens of a text."""
    print("\n| prompt | same greedy tokens |\n|---:|---:|")
    for n in lengths:
        found = model.generate(torch.tensor([ids[:n]]), do_sample=False, min_new_tokens=n_new, max_new_tokens=n_new)
        theirs = found[0, n:].tolist()
        context = engine.prefill(ids[:n])
        ours: list[int] = []
        logits = context.logits
        while len(ours) < n_new:
            ours.append(int(logits.argmax()))
            context = engine.prefill([ours[-1]], context=context)
            logits = context.logits
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), n_new)
        print(f"| {n:,} | {same} of {n_new} |", flush=True)


def compare_predictions(rows: dict[str, Logits], ids: list[int]) -> None:
    """Print each row's divergence from the first row's predictions, over all positions of `ids`."""
    print(f"\n{len(ids):,} positions\n\n| engine | KL | same first choice |\n|---|---:|---:|")
    exact = None
    for name, logits in rows.items():
        found = logits(ids).log_softmax(-1)
        exact = found if exact is None else exact
        pairs = list(zip(found, exact, strict=True))
        kl = statistics.fmean(
            torch.nn.functional.kl_div(a, b, log_target=True, reduction="sum").item() for a, b in pairs
        )
        same = (found.argmax(-1) == exact.argmax(-1)).float().mean().item()
        print(f"| {name} | {kl:.2e} | {same:.4f} |", flush=True)


def compare_first_tokens(calls: dict[str, Callable[[], object]], repeats: int) -> None:
    """Print the median time of each call, run in turn, and its ratio to the last call's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:  # the first round compiles kernels and warms caches
                times[name].append(time.perf_counter() - start)
    print(f"\n| engine | first token of {PROMPT} | of the last row's |\n|---|---:|---:|")
    base = statistics.median(next(reversed(times.values())))
    for name, found in times.items():
        print(f"| {name} | {statistics.median(found) * 1000:.0f} ms | {statistics.median(found) / base:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what lce.load takes for a GGUF file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[300, 3000, 8000])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    path = Path(lce.info(options.model).folder)
    wide, usual = lce.load(options.model, dtype="float32"), lce.load(options.model)
    ids = usual.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    print(f"{path.name}, {torch.get_num_threads()} threads\n")
    model = transformers_model(path)
    compare_logits(model, wide, ids, options.lengths)
    compare_greedy(model, wide, ids, options.lengths[:-1], options.new_tokens)
    part = ids[: options.positions]

    @torch.inference_mode()
    def theirs(part: list[int]) -> Tensor:
        return model(torch.tensor([part])).logits[0]

    usual_name = str(usual.setup.layout.dtype).removeprefix("torch.")
    rows: dict[str, Logits] = {"transformers, float32": theirs, "lce, float32": wide.logits}
    rows[f"lce, {usual_name}"] = usual.logits
    prompt = ids[:PROMPT]
    calls: dict[str, Callable[[], object]] = {f"lce, {usual_name}": lambda: usual.prefill(prompt)}
    if importlib.util.find_spec("llama_cpp"):
        threads = torch.get_num_threads()
        rows["llama.cpp"] = LlamaCpp(path, options.positions, threads).logits
        llm = LlamaCpp(path, PROMPT, threads, logits_all=False).llm
        calls["llama.cpp"] = lambda: (llm.reset(), llm.eval(prompt))
    compare_predictions(rows, part)
    compare_first_tokens(calls, options.repeats)


if __name__ == "__main__":
    main()
