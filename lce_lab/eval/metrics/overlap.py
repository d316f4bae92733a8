"""The metrics of the tasks that lce generates, and F1 and ROUGE, which score words shared with the best reference."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from lce_lab.eval.metrics import libraries

_ASCII_SIGNS = frozenset(string.punctuation)
_CHINESE_SIGNS = _ASCII_SIGNS | frozenset(  # the punctuation that LongBench and InfiniteBench remove
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)

Tokens = Callable[[str], Sequence[str]]


def starts(answer: str, expected: tuple[str, ...]) -> float:
    """Return 1 if the answer, without leading white space, begins with one of the expected texts."""
    return float(answer.strip().startswith(expected))


def recall(answer: str, expected: tuple[str, ...]) -> float:
    """Return the share of the expected texts that the answer's first sentence contains (RULER's string match)."""
    first = answer.partition(".")[0]
    return sum(text in first for text in expected) / len(expected)


def similarity(answer: str, expected: tuple[str, ...]) -> float:
    """Return difflib's ratio between the answer's first sentence and the best expected text (MRCR)."""
    first = answer.strip().partition(".")[0]
    return max(SequenceMatcher(None, first, text).ratio() for text in expected)


def normalised(text: str, *, lower: bool = True) -> str:
    """Return English text without punctuation, articles and repeated white space, in lower case if `lower`."""
    text = "".join(c for c in (text.lower() if lower else text) if c not in _ASCII_SIGNS)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalised_chinese(text: str) -> str:
    """Return text without white space and English or Chinese punctuation, in lower case."""
    return "".join("".join(c for c in text.lower() if c not in _CHINESE_SIGNS).split())


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of two bags of tokens; 0 without a common token."""
    common = sum((Counter(prediction) & Counter(reference)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def _best_f1(prediction: str, references: Sequence[str], tokens: Tokens) -> float:
    found = tokens(prediction)
    return max((f1(found, tokens(reference)) for reference in references), default=0.0)


def qa_f1(prediction: str, references: tuple[str, ...]) -> float:
    """Return F1 over normalised English words (SQuAD, LongBench, InfiniteBench, L-Eval)."""
    return _best_f1(prediction, references, lambda text: normalised(text).split())


def qa_f1_zh(prediction: str, references: tuple[str, ...]) -> float:
    """Return F1 over Chinese words, cut by jieba and normalised one by one (LongBench)."""
    cut = libraries.cut_chinese()
    return _best_f1(prediction, references, lambda text: [w for w in map(normalised_chinese, cut(text)) if w])


def qa_f1_characters(prediction: str, references: tuple[str, ...]) -> float:
    """Return F1 over the characters of normalised Chinese text (InfiniteBench's Zh.QA)."""
    return _best_f1(prediction, references, lambda text: list(normalised_chinese(text)))


def rouge_l(prediction: str, references: tuple[str, ...]) -> float:
    """Return ROUGE-L by the library rouge (LongBench)."""
    return max((libraries.rouge()(prediction, reference) for reference in references), default=0.0)


def rouge_l_zh(prediction: str, references: tuple[str, ...]) -> float:
    """Return ROUGE-L over Chinese words, cut by jieba (LongBench)."""
    cut = libraries.cut_chinese()
    return rouge_l(" ".join(cut(prediction)), tuple(" ".join(cut(reference)) for reference in references))


def _by_rouge_score(kind: str) -> Callable[[str, tuple[str, ...]], float]:
    return lambda prediction, references: libraries.rouge_scorer(kind)(references, prediction)


rouge_lsum = _by_rouge_score("rougeLsum")  # each line is a sentence (InfiniteBench's En.Sum)
rouge_score_1, rouge_score_2, rouge_score_l = map(_by_rouge_score, ("rouge1", "rouge2", "rougeL"))  # for L-Eval
