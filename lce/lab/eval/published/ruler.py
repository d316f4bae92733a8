"""RULER (Hsieh et al., 2024): the samples that its own generator wrote for a tokenizer, a length and a template."""

from __future__ import annotations

from collections.abc import Iterator

from lce.lab.eval.published.base import Answered, Benchmark, PublishedTask
from lce.lab.eval.published.reading import Row
from lce.lab.eval.sample import Sample


class Ruler(Benchmark):
    """The 13 tasks of RULER's synthetic.yaml.

    A line's `input` is the prompt, `answer_prefix` begins the answer and `outputs` is expected. `input` already has the
    model's template if the generator's `--model_template_type` was not `base`, so only `--template` adds one. Data are
    made for a length; nothing is cut.
    """

    name = "ruler"
    files = ("{task}/validation.jsonl", "data/{task}/validation.jsonl", "{task}/test.jsonl")

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        opening = row.text("answer_prefix") if "answer_prefix" in row else ""
        source = {name: row.content.get(name) for name in ("index", "outputs", "length")}
        source |= {"input": row.text("input") + opening, "others": row.content.get("others", {})}
        yield task.sample(row.text("input"), "", row.texts("outputs"), opening=opening, cut="none", source=source)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        yield Answered(row.text("pred"), row.texts("outputs", "output"))
