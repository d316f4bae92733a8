"""Write a text to calibrate the demo model's maps: prose with hidden facts and questions.

python -m tools.make_calibration_text --out calibration.txt
lce calibrate --model demo --text calibration.txt --out lce/models/demo/esa_maps.safetensors --force
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import lce
from lce_lab.eval.prose import sentences
from lce_lab.eval.tasks.keys import NEEDLES
from tools.make_haystack import hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=52_000, help="about this many of the demo model's tokens")
    parser.add_argument("--seed", type=int, default=77)
    args = parser.parse_args()
    tokenizer = lce.load("demo").tokenizer
    rng = Random(args.seed)
    prose, texts, written = sentences(rng), [], 0
    while written < args.tokens:
        needle = rng.choice(NEEDLES).draw(rng)
        text = hidden(needle, 500, rng.random(), prose, lambda text: len(tokenizer.encode(text)))
        texts.append(f"{text} {needle.answer}.")
        written += len(tokenizer.encode(texts[-1]))
    args.out.write_text("\n".join(texts), encoding="utf-8")
    print(f"{args.out}: {written} tokens")


if __name__ == "__main__":
    main()
