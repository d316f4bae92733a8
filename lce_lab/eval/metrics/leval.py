"""Metrics of L-Eval's closed-ended tasks (An et al., 2024), as its auto_eval.py and em.py, with their oddities."""

from __future__ import annotations

import re
from itertools import takewhile

from lce_lab.eval.metrics.overlap import normalised

_LETTERS = "ABCD"
_CODE_PHRASES = ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed")
_CODE_SIGNS = ((",", ""), ("'", ""), ("\\", ""), (".0", ""), ("] [", "]["), ("[ [", "[["), ("] ]", "]]"))


def exact(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer agrees with a reference, else 0.

    If the reference is letters of options, an answer with only a part of these letters, and no other letter, gets 1/4.
    Numbers are compared as numbers. Other answers must contain the reference; spaces and case are ignored.
    """
    return max(_exact(prediction, reference) for reference in references)


def _exact(prediction: str, reference: str) -> float:
    chosen, right = normalised(prediction, lower=False), normalised(reference, lower=False)
    if set(right) <= set(_LETTERS):
        return 1.0 if chosen == right else 0.25 * (set(chosen) <= set(right))
    try:
        return float(float(prediction) == float(reference))
    except ValueError:
        return float(reference.lower().replace(" ", "") in prediction.lower().replace(" ", ""))


def letter(prediction: str, references: tuple[str, ...]) -> float:
    """Score the first letter from A to D in the answer against the reference's letters (TOEFL, QuALITY)."""
    return exact(_chosen(prediction, several=False), tuple(map(_right_letters, references)))


def letters(prediction: str, references: tuple[str, ...]) -> float:
    """Score the letters of all options that the answer chooses against the reference's letters (Coursera)."""
    return exact(_chosen(prediction, several=True), tuple(map(_right_letters, references)))


def _right_letters(reference: str) -> str:
    return re.sub("[^A-D]", "", next(iter(reference.split()), "")) or "A"


def _chosen(answer: str, *, several: bool) -> str:
    """Return the letters of the options that `answer` chooses; `A` if the answer names no option."""
    if not answer.strip():
        return "None"
    if answer in _LETTERS:
        return answer
    if not several and (named := next((c for c in answer if c in _LETTERS), None)):
        return named
    head = "".join(takewhile(lambda c: c in _LETTERS, answer))
    if len(head) > 1:
        return "".join(sorted(set(head)))
    rest = answer[len(head) :].split("Question")[0]
    options = head + "".join(re.findall(r"\s*[A-Z](?=[\s.)])", rest))
    if found := sorted(set(options) & set(_LETTERS)):
        return "".join(found)
    run = re.search("[A-D]+", rest)
    return run[0] if run else "A"


def worked_number(prediction: str, references: tuple[str, ...]) -> float:
    """Score the number after `The answer is`, or else the last number of the answer's first paragraph (GSM)."""
    return exact(_number(prediction), tuple(map(_number, references)))


def _number(text: str) -> str:
    if found := re.search(r"The answer is (\S+)", text):
        number = found[1]
    else:
        words = text.split("\n\n")[0].split(" ")
        number = next((word for word in reversed(words) if any(map(str.isdigit, word))), "")
    return "".join(filter(str.isdigit, number.partition(".")[0]))


def program_output(prediction: str, references: tuple[str, ...]) -> float:
    """Score the output that the answer states at its end or after the words `the final output` (CodeU)."""
    return max(_exact(_stated_output(prediction, reference), _tidied(reference)) for reference in references)


def _tidied(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    for sign, other in _CODE_SIGNS:
        text = text.replace(sign, other)
    return text


def _stated_output(answer: str, reference: str) -> str:
    text = _tidied(answer)
    for phrase in _CODE_PHRASES:
        text = text.replace(phrase, "")
    n_words = len(reference.split()) + 3
    if "the final output" in text:
        return " ".join(re.split(r"\s+", text.split("the final output")[-1])[:n_words])
    return " ".join(re.split(r"\s+", text)[-n_words:])


def judgement(prediction: str, references: tuple[str, ...]) -> float:
    """Score the answer's first `true` or `false` against the reference (SFiction)."""
    words = prediction.lower().split()
    stated = next(("true" if "true" in word else "false" for word in words if "true" in word or "false" in word), None)
    return 0.0 if stated is None else exact(stated, tuple(reference.lower().strip() for reference in references))
