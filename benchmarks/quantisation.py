"""Measures weights in 8 and 4 bits: bytes, perplexity of a text, and divergence of predictions.

    python benchmarks/quantisation.py --model demo --text examples/haystack.txt

Each row reads one window of the text. `KL` is in nats a token against the stored weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import lce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    exact: list[torch.Tensor] = []
    print("| weights | MiB | perplexity | KL | same first choice |\n|---|---:|---:|---:|---:|")
    for weights in ("auto", "int8", "int4"):
        engine = lce.load(options.model, weights=weights)
        n = engine.window
        ids = engine.tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.windows * n]
        loss = kl = same = 0.0
        parts = [ids[i : i + n] for i in range(0, len(ids), n)]
        for i, part in enumerate(parts):
            found = engine.logits(part).log_softmax(-1)
            if weights == "auto":
                exact.append(found)
            loss -= found[:-1].gather(1, torch.tensor(part[1:])[:, None]).sum().item()
            kl += (exact[i].exp() * (exact[i] - found)).sum().item()
            same += (exact[i].argmax(-1) == found.argmax(-1)).sum().item()
        size = lce.plan(options.model, tokens=n, weights=weights).tiers["device"].weights / 2**20
        perplexity = torch.tensor(loss / (len(ids) - len(parts))).exp().item()
        print(f"| {weights} | {size:.1f} | {perplexity:.4f} | {kl / len(ids):.2e} | {same / len(ids):.4f} |")


if __name__ == "__main__":
    main()
