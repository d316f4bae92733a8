"""Metrics of InfiniteBench (Zhang et al., 2024), scored as its compute_scores.py does, including its oddities."""

from __future__ import annotations

import re

_SIGNS = "\n:\"'.,?!{}"


def _spaced(text: str, *signs: str) -> str:
    for sign in signs:
        text = text.replace(sign, " ")
    return text


def first_integer(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer's first run of digits is the right number (Retrieve.PassKey, Retrieve.Number)."""
    found = re.search(r"[0-9]+", prediction)
    return float((found[0] if found else "") == references[0])


def word(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the right text is a word of the answer without punctuation (Retrieve.KV)."""
    return float(references[0] in _spaced(prediction, *_SIGNS).split())


def speaker(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the first reference is a word of the answer, which is first put into capitals (En.Dia)."""
    return float(references[0] in _spaced(prediction.strip(), *_SIGNS).upper().split())


def last_integer(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer's last word is the right number (Code.Run)."""
    words = _spaced(prediction.strip(), *"\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == int(references[0]))
    except ValueError:
        return 0.0


def first_number(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer's first number is the right number (Math.Find).

    If the right number is whole, an answer with a decimal point is wrong; InfiniteBench's own code raises an error.
    """
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None:
        return 0.0
    if "." in references[0]:
        return float(float(found[0]) == float(references[0]))
    return float("." not in found[0] and int(found[0]) == int(references[0]))


def running_values(prediction: str, references: tuple[str, ...]) -> float:
    """Return the share of expected numbers before the answer's first wrong number. Signs are ignored (Math.Calc)."""
    return _agreement([int(text) for text in re.findall("[0-9]+", prediction)], references)


def running_values_after_first(prediction: str, references: tuple[str, ...]) -> float:
    """Score like `running_values`, without the answer's first number, as InfiniteBench does for GPT-4."""
    return _agreement([int(text) for text in re.findall("[0-9]+", prediction)][1:], references)


def _agreement(values: list[int], references: tuple[str, ...]) -> float:
    right = 0
    for value, reference in zip(values, references, strict=False):
        if value != int(reference):
            break
        right += 1
    return right / len(references)


def option(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer chooses the right option. The references are the option's text and letter (En.MC)."""
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = _single_spaced(_spaced(text, *"\n\"'.,?!{}"))
    prefixes = ("answer is:", "answer:", "answer is", "option is")
    if (rest := _after(text, prefixes)) is not None:
        return float(rest.startswith(references))
    found = next((word for word in text.split() if word in "ABCD"), None)
    return float(found in references)


def buggy_function(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer chooses the right function. The references are the name and the letter (Code.Debug)."""
    name, letter = references
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = _single_spaced(_spaced(text, *"\n`'\"-*", "Option", "option"))
    rest = _after(text, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(rest is not None and rest.startswith((letter, name)))


def _single_spaced(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def _after(text: str, prefixes: tuple[str, ...]) -> str | None:
    """Find the first of `prefixes` that `text` contains, skip one more character, and return the rest, or None."""
    prefix = next((prefix for prefix in prefixes if prefix in text), None)
    return None if prefix is None else text[text.find(prefix) + len(prefix) + 1 :]
