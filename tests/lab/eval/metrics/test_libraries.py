"""A library that is not installed is an error that names the extra."""

import sys

import pytest

from lce.errors import UsageError
from lce.lab.eval.metrics import METRICS, libraries


@pytest.mark.parametrize(
    ("metric", "module", "named"),
    [
        ("rouge_l", "rouge", "rouge"),
        ("rouge_lsum", "rouge_score.rouge_scorer", "rouge_score"),
        ("qa_f1_zh", "jieba", "jieba"),
        ("counting_stars.stars", "json_repair", "json_repair"),
        ("longbench.code_similarity_indel", "rapidfuzz.fuzz", "rapidfuzz"),
    ],
)
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, metric: str, module: str, named: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for cached in (libraries.rouge, libraries.rouge_scorer, libraries.cut_chinese):
        cached.cache_clear()
    with pytest.raises(UsageError, match=rf"needs the library {named}, .*; run pip install 'lce\[eval\]'"):
        METRICS[metric]("[x", ("1",))
