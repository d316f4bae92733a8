"""InfiniteBench (Zhang et al., 2024): 12 tasks with texts of over 100,000 tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lce.errors import DataError
from lce_lab.eval.published.base import Answered, Benchmark, PublishedTask, Row, filled, prompts
from lce_lab.eval.sample import Sample

WITH_OPTIONS = frozenset({"longbook_choice_eng", "code_debug"})


class InfiniteBench(Benchmark):
    """The 12 tasks, with the published prompts for open models (`yarn-mistral`) or for other models.

    The example conversation that the published code puts before Math.Calc for GPT-4 is left out.
    """

    name = "infinitebench"
    files = ("{task}.jsonl", "data/{task}.jsonl")
    answer_field = "prediction"

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        variant = variant or self.variants[0]
        template: str = prompts("infinitebench")[variant][task.name]
        before, context, after = filled(template, **_values(row, task))
        is_open = variant == "yarn-mistral"
        how = {"template": "none", "cut": "middle"} if is_open else {"template": "chat", "cut": "middle_joined"}
        references = _references(row, task)
        truth = list(references) if task.name in WITH_OPTIONS else row.content["answer"]
        source = {"id": index, "ground_truth": truth}
        yield task.sample(context, after, references, before=before, source=source, **how)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        yield Answered(row.text("prediction", "pred"), row.texts("ground_truth", "label"))

    def task_of(self, path: Path) -> PublishedTask | None:
        name = path.name.partition(".")[0].removeprefix("preds_")
        found = [task for task in self.tasks if re.fullmatch(rf"{task.name}(_\d+-\d+)?", name)]
        return found[0] if found else None


def _values(row: Row, task: PublishedTask) -> dict[str, str]:
    asked = row.text("input")
    values = {"context": row.text("context", "content"), "input": asked, "question": asked}
    if task.name in WITH_OPTIONS:
        values |= {f"OPTION_{letter}": text for letter, text in zip("ABCD", _options(row), strict=True)}
    if task.name == "code_run":
        call = _found(r"func_[0-9]+\(-?[0-9]+\)", row, asked)
        values |= {"func_call": call, "func": call.partition("(")[0]}
    if task.name == "math_find":
        values["prefix"] = f"What is {_found('The .+ of', row, asked).lower()[:-3]} in the following list?"
    return values


def _found(pattern: str, row: Row, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise DataError(f"'input' of {row.where} has no {pattern!r}; expected the published layout")
    return found[0]


def _options(row: Row) -> tuple[str, ...]:
    options = row.texts("options")
    if len(options) != 4:
        raise DataError(f"{row.where} has {len(options)} options; expected 4")
    return options


def _references(row: Row, task: PublishedTask) -> tuple[str, ...]:
    answers = row.texts("answer")
    if task.name not in WITH_OPTIONS or (len(answers) == 2 and answers[1] in tuple("ABCD")):
        return answers
    options = _options(row)
    if answers[0] not in options:
        raise DataError(f"'answer' of {row.where} is none of its options; expected one of them")
    return answers[0], "ABCD"[options.index(answers[0])]
