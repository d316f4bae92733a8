"""Measures the loss of accuracy from keys and values in 8 bits: perplexity, and changes of logits.

    python benchmarks/kv_dtype.py                                          # the demo model on its own kind of prose
    python benchmarks/kv_dtype.py --model path --text essay.txt --tokens 8192 --method full --method longheads
    python benchmarks/kv_dtype.py --kv-dtype int8-device                   # all keys and values, as soon as computed

Each method reads the text twice, in blocks of `--block` tokens: with keys and values as computed, and with 8 bits
(`int8`: behind a block's local reach). The KL divergence is of the second run's next-token distribution from the
first's, in nats, averaged over all tokens behind the first block. "same" is how often both have the same likeliest
token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import lce
from lce_lab.eval.prose import sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="a UTF-8 file, or a folder of .txt files"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--method", action="append")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", choices=["int8", "int8-device"], default="int8")
    parser.add_argument("--block", type=int, default=256)
    args = parser.parse_args()
    missing = [str(path) for path in args.text if not path.exists()]
    if missing:
        print(f"skipped: there is no {', '.join(missing)}; give --text FILE, or none for prose made here")
        return
    text = read(args.text) if args.text else made()
    print(f"PyTorch {torch.__version__}, {args.model}, {args.tokens:,} tokens, dtype {args.dtype}\n")
    print("| method | perplexity | in 8 bits | KL, nats | same |\n|---|---:|---:|---:|---:|")
    for method in args.method or ["full", "longheads", "infllm", "streaming"]:
        exact, rounded = (logits_of(text, args, method, kv_dtype) for kv_dtype in ("auto", args.kv_dtype))
        print(row(method, exact, rounded, args.block), flush=True)


def read(paths: list[Path]) -> str:
    files = [file for path in paths for file in (sorted(path.glob("*.txt")) if path.is_dir() else [path])]
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def made() -> str:
    """Return enough simple prose, always the same."""
    prose = sentences(Random(0))
    return " ".join(next(prose) for _ in range(20_000))


def logits_of(text: str, args: argparse.Namespace, method: str, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """Return the text's token ids behind the first, and the logits that predict each id."""
    engine = lce.load(args.model, method, dtype=args.dtype, block=args.block, kv_dtype=kv_dtype)
    ids = engine.tokenizer.encode(text[: 12 * args.tokens])[: args.tokens]
    return torch.tensor(ids[1:]), engine.logits(ids)[:-1]


def row(method: str, exact: tuple[Tensor, Tensor], rounded: tuple[Tensor, Tensor], block: int) -> str:
    ids, logits, other = exact[0][block:], exact[1][block:], rounded[1][block:]
    perplexity, in_8_bits = (cross_entropy(x, ids).exp().item() for x in (logits, other))
    kl = kl_div(other.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="batchmean").item()
    same = (logits.argmax(-1) == other.argmax(-1)).float().mean().item()
    return f"| {method} | {perplexity:.4f} | {in_8_bits:.4f} | {kl:.1e} | {same:.1%} |"


if __name__ == "__main__":
    main()
