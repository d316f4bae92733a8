"""Metrics: how an answer is scored, 0 to 1, by name."""

from __future__ import annotations

from collections.abc import Callable

from lce.lab.eval.metrics import infinitebench, leval, longbench, needles, overlap
from lce.lab.eval.metrics.plain import recall, similarity, starts

Metric = Callable[[str, tuple[str, ...]], float]  # (a model's answer, what was expected) to a score from 0 to 1

METRICS: dict[str, Metric] = {
    "starts": starts,
    "recall": recall,
    "similarity": similarity,
    "qa_f1": overlap.qa_f1,
    "qa_f1_zh": overlap.qa_f1_zh,
    "qa_f1_characters": overlap.qa_f1_characters,
    "rouge_l": overlap.rouge_l,
    "rouge_l_zh": overlap.rouge_l_zh,
    "rouge_lsum": overlap.rouge_lsum,
    "rouge_score_1": overlap.rouge_score_1,
    "rouge_score_2": overlap.rouge_score_2,
    "rouge_score_l": overlap.rouge_score_l,
    "longbench.classification": longbench.first_line(longbench.classification),
    "longbench.trivia_f1": longbench.first_line(overlap.qa_f1),
    "longbench.dialogue_rouge": longbench.first_line(overlap.rouge_l),
    "longbench.count": longbench.count,
    "longbench.retrieval": longbench.retrieval,
    "longbench.retrieval_zh": longbench.retrieval_zh,
    "longbench.code_similarity": longbench.code_similarity,
    "longbench.code_similarity_indel": longbench.code_similarity_indel,
    "longbench.stated_letter": longbench.stated_letter,
    "infinitebench.first_integer": infinitebench.first_integer,
    "infinitebench.word": infinitebench.word,
    "infinitebench.speaker": infinitebench.speaker,
    "infinitebench.last_integer": infinitebench.last_integer,
    "infinitebench.first_number": infinitebench.first_number,
    "infinitebench.running_values": infinitebench.running_values,
    "infinitebench.running_values_after_first": infinitebench.running_values_after_first,
    "infinitebench.option": infinitebench.option,
    "infinitebench.buggy_function": infinitebench.buggy_function,
    "leval.exact": leval.exact,
    "leval.letter": leval.letter,
    "leval.letters": leval.letters,
    "leval.worked_number": leval.worked_number,
    "leval.program_output": leval.program_output,
    "leval.judgement": leval.judgement,
    "ruler.match_all": needles.match_all,
    "ruler.match_part": needles.match_part,
    "needlebench.keywords": needles.keywords,
    "needlebench.boxed": needles.boxed,
    "counting_stars.stars": needles.stars,
    "counting_stars.corrected_stars": needles.corrected_stars,
}
