"""Calls of the libraries that compute published metrics. A library is imported on first use."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from lce.errors import UsageError

INSTALL = "pip install 'lce[eval]'"


def library(name: str) -> ModuleType:
    """Import a library of the extra `lce[eval]`. Raises `UsageError`, which names the extra, if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jieba warns of its own code
            return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UsageError(f"this metric needs the library {package}, which is not installed; run {INSTALL}") from None


@cache
def rouge() -> Callable[[str, str], float]:
    """Return the library rouge's function that computes F of ROUGE-L for a prediction and a reference (LongBench)."""
    scorer = library("rouge").Rouge(metrics=["rouge-l"])

    def score(prediction: str, reference: str) -> float:
        try:
            return float(scorer.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
        except (ValueError, RecursionError):  # a text without words, or a very long sentence, scores 0 in LongBench
            return 0.0

    return score


@cache
def rouge_scorer(kind: str) -> Callable[[Sequence[str], str], float]:
    """Return rouge-score's function that computes F of `kind`, such as `rougeLsum`, with the best reference."""
    scorer = library("rouge_score.rouge_scorer").RougeScorer([kind], use_stemmer=False)
    return lambda references, prediction: float(scorer.score_multi(list(references), prediction)[kind].fmeasure)


@cache
def cut_chinese() -> Callable[[str], list[str]]:
    """Return the function of the library jieba that cuts Chinese text into words."""
    jieba: Any = library("jieba")
    jieba.setLogLevel(logging.WARNING)  # jieba reports on stderr how long its dictionary took
    return lambda text: list(jieba.cut(text, cut_all=False))
