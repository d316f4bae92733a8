"""L-Eval (An et al., 2024): 20 tasks in English with several questions about one document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from lce_lab.eval.published.base import Answered, Benchmark, PublishedTask, Row, prompts
from lce_lab.eval.sample import Sample

_SCORED = ("exam", "f1", "rouge")  # other kinds are judged by people or models, and left out
_TOPICS = ("first", "second", "third")


class LEval(Benchmark):
    """The 7 closed-ended tasks of L-Eval, and the open-ended tasks that are scored by F1 or ROUGE.

    Prompts and Llama 2's template are those of llama2-chat-test.py; `--template chat` uses the model's own template.
    Long documents are shortened at the end, and code at the beginning, until the answer fits. Each question of `sci_fi`
    gives two samples: one about the document, and one about the real world.
    """

    name = "l-eval"
    answer_field = "lce_pred"

    def paths(self, task: PublishedTask) -> tuple[str, ...]:
        place = f"{'Closed' if task.category == 'closed-ended' else 'Open'}-ended-tasks/{task.name}.jsonl"
        return (place, f"LEval-data/{place}", f"{task.name}.jsonl")

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        if row.text("evaluation") not in _SCORED:
            return
        questions, answers = row.texts("instructions"), row.texts("outputs")
        for number, (question, answer) in enumerate(zip(questions, answers, strict=False)):
            source = {"query": question, "gt": answer, "evaluation": row.text("evaluation")}
            yield from _asked(row.text("input"), question, answer, task, number, source)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        if row.text("evaluation") not in _SCORED:
            return
        name = next((name for name in row.content if "_pred" in name), "lce_pred")
        text, right = row.text(name), row.text("gt")
        if task.name != "sci_fi":
            group = _TOPICS[index % 3] if task.name == "topic_retrieval_longchat" else ""
            yield Answered(text, (right,), group)
            return
        judged = row.content.get("judged")
        for group, answer, reference in zip(
            ("loyalty", "fact"), _two_judgements(text), _two_judgements(right), strict=True
        ):
            if judged in (None, group):
                yield Answered(text if judged else answer, (reference,), group)

    def task_of(self, path: Path) -> PublishedTask | None:
        found = [task for task in self.tasks if task.name in path.name]
        return found[0] if found else None

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        return {f"average ({kind})": fmean(members) for kind, members in self.by_category(scores).items()}


def _asked(
    document: str, question: str, answer: str, task: PublishedTask, number: int, source: dict[str, Any]
) -> Iterator[Sample]:
    data = prompts("leval")
    closed = task.category == "closed-ended"
    style = task.name if task.name in data["prompts"] else "closed" if closed else "open"
    prompt = data["prompts"][style]
    after = prompt["after"].replace("{inst}", question).replace("{words}", str(len(answer.split())))
    system = data["system"].get(task.name, data["system"]["closed" if closed else "open"])
    references = _two_judgements(answer) if task.name == "sci_fi" else (answer, "")
    group = {"sci_fi": "loyalty", "topic_retrieval_longchat": _TOPICS[number % 3]}.get(task.name, "")
    judged = {"judged": "loyalty"} if task.name == "sci_fi" else {}
    cut = "words_left" if task.name == "codeU" else "words_right"
    how = {"before": prompt["before"], "opening": prompt["opening"], "template": data["template"] + prompt["close"]}
    how |= {"system": system, "cut": cut, "group": group, "source": {**source, **judged}}
    yield task.sample(document, after, references[:1], **how)
    if task.name == "sci_fi":
        asked = question.replace(*data["fact"]["replace"]) + data["fact"]["after"]
        yield task.sample("", asked, references[1:], group="fact", source={**source, "judged": "fact"})


def _two_judgements(text: str) -> tuple[str, str]:
    """Split a text such as `true [fact: false]` into its two judgements, here `true` and `false`."""
    loyalty, _, fact = text.lower().partition("[fact:")
    return loyalty.strip(), fact.partition("[fact:")[0][:-1].strip()
