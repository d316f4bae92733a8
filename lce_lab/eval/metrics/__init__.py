"""Metrics score answers from 0 to 1. `METRICS` maps names to functions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from lce_lab.eval.metrics import infinitebench, leval, longbench, needles, overlap

Metric = Callable[[str, tuple[str, ...]], float]  # (answer of a model, expected texts) -> score

_NAMES: tuple[tuple[ModuleType, str, str], ...] = (  # module, prefix of the metrics' names, functions
    (overlap, "", "starts recall similarity qa_f1 qa_f1_zh qa_f1_characters"),
    (overlap, "", "rouge_l rouge_l_zh rouge_lsum rouge_score_1 rouge_score_2 rouge_score_l"),
    (longbench, "longbench.", "classification trivia_f1 dialogue_rouge count retrieval stated_letter"),
    (longbench, "longbench.", "code_similarity code_similarity_indel"),
    (infinitebench, "infinitebench.", "first_integer word speaker last_integer first_number option buggy_function"),
    (infinitebench, "infinitebench.", "running_values running_values_after_first"),
    (leval, "leval.", "exact letter letters worked_number program_output judgement"),
    (needles, "ruler.", "match_all match_part"),
    (needles, "needlebench.", "keywords boxed"),
    (needles, "counting_stars.", "stars corrected_stars"),
)
METRICS: dict[str, Metric] = {
    f"{suite}{name}": getattr(module, name) for module, suite, names in _NAMES for name in names.split()
}
