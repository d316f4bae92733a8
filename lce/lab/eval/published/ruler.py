"""RULER (Hsieh et al., 2024): the samples that its own generator wrote for a tokenizer, a length and a template."""

from __future__ import annotations

from collections.abc import Iterator

from lce.lab.eval.published.base import Answered, Item, Suite, Task
from lce.lab.eval.published.reading import Row

_NEEDLES = (
    "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue "
    "niah_multiquery"
)


class Ruler(Suite):
    """The 13 tasks of its synthetic.yaml.

    A line's `input` is the prompt, `answer_prefix` begins the answer and `outputs` is expected. The template of a model
    is already in `input` where the generator got another `--model_template_type` than `base`; so none is added, unless
    `--template` asks for one. Data are made for a length; nothing is cut.
    """

    name = "ruler"
    title = "RULER"
    source = "NVIDIA/RULER (scripts/data, scripts/eval, scripts/pred/call_api.py)"
    data = "NVIDIA/RULER, whose scripts/data/prepare.py makes them"
    layout = "the generator's folder of one length: niah_single_1/validation.jsonl, ... with input, outputs, length"
    tasks = (
        *(Task(name, ("ruler.match_all",), 128, "retrieval") for name in _NEEDLES.split()),
        Task("vt", ("ruler.match_all",), 30, "multi-hop tracing"),
        Task("cwe", ("ruler.match_all",), 120, "aggregation"),
        Task("fwe", ("ruler.match_all",), 50, "aggregation"),
        Task("qa_1", ("ruler.match_part",), 32, "question answering"),
        Task("qa_2", ("ruler.match_part",), 32, "question answering"),
    )

    def paths(self, task: Task) -> tuple[str, ...]:
        return (f"{task.name}/validation.jsonl", f"data/{task.name}/validation.jsonl", f"{task.name}/test.jsonl")

    def item(self, row: Row, index: int, task: Task, variant: str) -> Iterator[Item]:
        opening = row.text("answer_prefix") if "answer_prefix" in row else ""
        source = {name: row.content.get(name) for name in ("index", "outputs", "length")}
        source |= {"input": row.text("input") + opening, "others": row.content.get("others", {})}
        yield Item(
            index, "", row.text("input"), "", row.texts("outputs"), task.metrics[0], task.max_tokens, opening=opening,
            cut="none", source=source,
        )  # fmt: skip

    def answered(self, row: Row, index: int, task: Task) -> Iterator[Answered]:
        yield Answered(row.text("pred"), row.texts("outputs", "output"), task.metrics)
