"""LongBench v2 (Bai et al., 2024): 503 questions with four options about texts of up to 2 million words."""

from __future__ import annotations

from collections.abc import Iterator

from lce.lab.eval.published.base import Answered, Item, Suite, Task, prompts
from lce.lab.eval.published.reading import Row


class LongBenchV2(Suite):
    """One task. Scores are also given by difficulty and by length, as in the published table.

    The published code draws answers at temperature 0.1; here answers are greedy. The published chain-of-thought prompts
    (a second question about the model's own answer) and retrieval are not here.
    """

    name = "longbench-v2"

    def paths(self, task: Task) -> tuple[str, ...]:
        return ("data.json", "data.jsonl", "longbench_v2.jsonl")

    def item(self, row: Row, index: int, task: Task, variant: str) -> Iterator[Item]:
        template = prompts("longbench_v2")[variant or "0shot"]
        for sign, name in (("$Q$", "question"), *((f"$C_{x}$", f"choice_{x}") for x in "ABCD")):
            template = template.replace(sign, row.text(name).strip())
        before, holds_text, after = template.partition("$DOC$")
        context = row.text("context").strip() if holds_text else ""
        fields = ("_id", "domain", "sub_domain", "difficulty", "length", "question", "answer")
        source = {name: row.content.get(name) for name in fields}
        yield Item(
            index, before, context, after, row.texts("answer"), task.metrics[0], task.max_tokens, template="chat",
            cut="middle_joined", group=_group(row), source=source,
        )  # fmt: skip

    def prediction(self, item: Item, text: str) -> dict[str, object]:
        return {**(item.source or {}), "response": text}

    def answered(self, row: Row, index: int, task: Task) -> Iterator[Answered]:
        response = row.content.get("response", row.content.get("pred"))
        yield Answered(response if isinstance(response, str) else "", row.texts("answer"), task.metrics, _group(row))

    def task_of(self, path: object) -> Task:
        return self.tasks[0]


def _group(row: Row) -> str:
    return f"{row.text('difficulty')}, {row.text('length')}"
