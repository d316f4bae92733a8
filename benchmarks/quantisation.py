"""Measures what dtypes and quantised weights change: bytes, perplexity of a text, and divergence of predictions.

    python benchmarks/quantisation.py --model demo --text examples/haystack.txt
    python benchmarks/quantisation.py --model MODEL --text FILE --groups 16,32,64,128 --shuffle

The first row is float32, with which all other rows are compared. `KL` is the Kullback-Leibler divergence from its
predictions, in nats a token. `ties` counts the positions where two tokens have the highest logit. With `--groups`, the
matrices of the layers are rounded to 4 bits as `int4` rounds them, but in groups of other sizes, and multiplied in
float32. With `--shuffle`, the channels of a Llama are shuffled first: a model that was quantised before loses nearly
nothing when it is quantised the same way again. If llama-cpp-python and gguf are installed and the model is a Llama's
folder, a row is added for each of llama.cpp's kinds of weights. There, keys and values are float16, and MiB are those
of the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import lce
from lce.models.config import ModelConfig

KINDS = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")  # llama.cpp's names of kinds of weights
Logits = Callable[[list[int]], Tensor]
SHRINKS, FITS = 4, 3  # as in the kernel that packs 4 bits: ranges tried for each group, and fits of each range


def rounded(weight: Tensor, size: int) -> Tensor:
    """Return `weight [out, in]` rounded to 4 bits as `int4` does, in groups of `size` inputs: float32."""
    whole = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % size))
    w = whole.view(len(weight), -1, size)
    low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    best, least_error = torch.zeros_like(w), torch.full_like(low, torch.inf)
    for attempt in range(SHRINKS):
        factor = 1 - 0.06 * attempt
        step, least = (high - low) / 15 * factor, low * factor
        for _ in range(FITS):
            scale = step.bfloat16().float().clamp(min=1e-30)
            zero = (-16 * least / scale + 0.5).floor().clamp(0, 255) / 16
            code = (w / scale + zero + 0.5).floor().clamp(0, 15)
            found = scale * (code - zero)
            error = (w - found).square().sum(-1, keepdim=True)
            best, least_error = torch.where(error < least_error, found, best), torch.minimum(error, least_error)
            sum_w, sum_c = w.sum(-1, keepdim=True), code.sum(-1, keepdim=True)
            spread = (code.square().sum(-1, keepdim=True) * size - sum_c.square()).clamp(min=1)
            step = ((w * code).sum(-1, keepdim=True) * size - sum_c * sum_w) / spread
            least = (sum_w - step * sum_c) / size
    return best.view(len(weight), -1)[:, : weight.shape[1]].contiguous()


def changed(folder: Path, change: Callable[[str, Tensor], Tensor], out: Path) -> Path:
    """Copy a checkpoint's folder to `out`, with `change(name, tensor)` in the place of each tensor."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    for path in out.glob("*.safetensors"):
        save_file({name: change(name, x).contiguous() for name, x in load_file(path).items()}, path)
    return out


def shuffled(config: ModelConfig) -> Callable[[str, Tensor], Tensor]:
    """Return a change of a Llama's weights that shuffles hidden and inner channels, and the dimensions of values.

    The model computes the same with shuffled channels. Weights that were quantised before no longer lie in groups that
    rounding would find again without an error.
    """
    torch.manual_seed(0)
    hidden, inner, value = (torch.randperm(n) for n in (config.hidden_size, config.intermediate_size, config.head_dim))
    by_head = {
        n: (torch.arange(n)[:, None] * config.head_dim + value).flatten() for n in (config.n_heads, config.n_kv_heads)
    }
    rows = {
        "v_proj": by_head[config.n_kv_heads],
        "o_proj": hidden,
        "down_proj": hidden,
        "gate_proj": inner,
        "up_proj": inner,
    }
    columns = {"o_proj": by_head[config.n_heads], "down_proj": inner}

    def change(name: str, x: Tensor) -> Tensor:
        part = name.split(".")[-2]
        if x.ndim == 1:
            return x[hidden]
        x = x[rows[part]] if part in rows else x
        return x[:, columns.get(part, hidden)]

    return change


def in_groups(size: int, name: str, x: Tensor) -> Tensor:
    """Round a matrix of a layer by `rounded`; leave other tensors as they are."""
    return rounded(x, size) if x.ndim == 2 and ".layers." in name else x.float()


class LlamaCpp:
    """A GGUF file, run by llama.cpp."""

    def __init__(self, path: Path, n_ctx: int, threads: int, logits_all: bool = True) -> None:
        import llama_cpp

        self.llm = llama_cpp.Llama(
            str(path), n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, logits_all=logits_all, verbose=False
        )

    def logits(self, ids: list[int]) -> Tensor:
        """Return the logits `[T, vocab]` of a text of token ids."""
        self.llm.reset()
        self.llm.eval(ids)
        return torch.from_numpy(self.llm.scores[: len(ids)].copy())


def subjects(options: argparse.Namespace, n: int, scratch: Path) -> Iterator[tuple[str, float, Logits]]:
    """Yield the name, the MiB of weights, and the logits' function of each row."""
    info = lce.info(options.model)
    model = info.folder
    if options.shuffle:
        model = changed(model, shuffled(info.config), scratch / "shuffled")
    rows = [("float32", "auto"), (info.dtype, "auto"), (info.dtype, "int8"), (info.dtype, "int4"), ("float32", "int4")]
    for dtype, weights in dict.fromkeys(rows):
        plan = lce.plan(model, tokens=n, dtype=dtype, weights=weights)
        name = dtype if weights == "auto" else f"{weights}, {dtype}"
        yield name, plan.tiers["device"].weights / 2**20, lce.load(model, dtype=dtype, weights=weights).logits
    for size in options.groups:
        folder = changed(model, partial(in_groups, size), scratch / f"groups-{size}")
        yield f"4 bits in groups of {size}, float32", float("nan"), lce.load(folder, dtype="float32").logits
    if all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf")) and info.family == "llama":
        from models import write_gguf
        from vs_llama_cpp import physical_cores, quantise

        write_gguf(model, plain := scratch / "model.BF16.gguf")
        for kind in KINDS:
            path = scratch / f"model.{kind}.gguf"
            if path != plain:
                quantise(plain, kind, path)
            run = LlamaCpp(path, n, physical_cores())
            yield f"llama.cpp {kind}", path.stat().st_size / 2**20, run.logits


def measure(logits: Logits, parts: list[list[int]], exact: list[Tensor]) -> str:
    """Return the cells of a row, after its MiB. The first call fills `exact` with float32's log-probabilities."""
    loss = kl = 0.0
    same = ties = 0
    first = not exact
    for i, part in enumerate(parts):
        found = logits(part)
        best = found.topk(2, dim=-1).values
        ties += int((best[:, 0] == best[:, 1]).sum())
        found = found.log_softmax(-1)
        if first:
            exact.append(found)
        loss -= found[:-1].gather(1, torch.tensor(part[1:])[:, None]).sum().item()
        kl += sum(
            torch.nn.functional.kl_div(a, b, log_target=True, reduction="sum").item()
            for a, b in zip(found, exact[i], strict=True)
        )
        same += int((exact[i].argmax(-1) == found.argmax(-1)).sum())
    n = sum(map(len, parts))
    perplexity = torch.tensor(loss / (n - len(parts))).exp().item()
    return f"{perplexity:.4f} | {kl / n:.2e} | {ties} | {same / n:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2000, help="of the text, read in parts of at most a window")
    parser.add_argument("--shuffle", action="store_true", help="a Llama's channels first: see `shuffled`")
    parser.add_argument("--groups", type=lambda text: [int(n) for n in text.split(",")], default=[], help="like 16,32")
    options = parser.parse_args()
    ids = lce.load(options.model).tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    n = min(lce.info(options.model).config.window, len(ids))
    parts, exact = [ids[i : i + n] for i in range(0, len(ids), n)], list[Tensor]()
    print(f"{len(ids):,} tokens\n")
    print("| weights | MiB | perplexity | KL | ties | same first choice |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, size, logits in subjects(options, n, Path(scratch)):
            print(f"| {name} | {size:.1f} | {measure(logits, parts, exact)} |", flush=True)


if __name__ == "__main__":
    main()
