"""Functions of third-party libraries, with which benchmarks compute metrics. A library is imported on first use."""

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
    """Import a library of the extra `lce[eval]`. Raises `UsageError`, with the extra's name, if the import fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing jieba shows warnings about jieba's code
            return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UsageError(f"this metric needs the library {package}, which is not installed; run {INSTALL}") from None


@cache
def rouge() -> Callable[[str, str], float]:
    """Return a function of prediction and reference that computes ROUGE-L F1 by the library rouge (LongBench)."""
    scorer = library("rouge").Rouge(metrics=["rouge-l"])

    def score(prediction: str, reference: str) -> float:
        try:
            return float(scorer.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
        except (ValueError, RecursionError):  # a text without words, or a very long sentence, scores 0 in LongBench
            return 0.0

    return score


@cache
def rouge_scorer(kind: str) -> Callable[[Sequence[str], str], float]:
    """Return a function of references and prediction that computes F1 of `kind`, such as `rougeL`, by rouge-score."""
    scorer = library("rouge_score.rouge_scorer").RougeScorer([kind], use_stemmer=False)
    return lambda references, prediction: float(scorer.score_multi(list(references), prediction)[kind].fmeasure)


@cache
def cut_chinese() -> Callable[[str], list[str]]:
    """Return a function that cuts Chinese text into words by the library jieba."""
    jieba: Any = library("jieba")
    jieba.setLogLevel(logging.WARNING)  # jieba reports on stderr how long its dictionary took
    return lambda text: list(jieba.cut(text, cut_all=False))
