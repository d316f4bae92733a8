"""A tokenizer, and small files in the layouts of the published benchmarks, and what a perfect model answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lce.errors import ModelError
from lce_lab.eval.sample import Sample


class Letters:
    """A tokenizer with a token a character and one before them, and perhaps a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        return ([] if bos is False else [0]) + [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids if i)

    def require_chat(self) -> None:
        if self.chat_template is None:
            raise ModelError("no chat template")

    def chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content'].strip()}" for m in messages) + "<assistant>"


@dataclass(frozen=True)
class Layout:
    """A file's place and rows; files that go beside it; the right answer to a sample."""

    place: str
    rows: list[dict[str, Any]]
    perfect: Callable[[Sample], str] = lambda sample: sample.answers[0]
    beside: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, suite: str, task: str) -> None:
    layout = LAYOUTS[suite][task]
    path = folder / layout.place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(layout.rows), encoding="utf-8")
    else:
        path.write_text(_lines(layout.rows), encoding="utf-8")
    for name, content in layout.beside.items():
        text = _lines(content) if isinstance(content, list) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _longbench(answers: list[str], *lengths: int, **more: Any) -> list[dict[str, Any]]:
    row = {"input": "What is it?", "context": "It is red.", "answers": answers, "all_classes": None, **more}
    return [{**row, "length": length} for length in lengths]


def _leval(question: str, answer: str, evaluation: str) -> list[dict[str, Any]]:
    row = {"instructions": [question], "outputs": [answer], "input": "The story.", "evaluation": evaluation}
    return [row, {**row, "evaluation": "human" if evaluation != "exam" else "LLM"}]


def _infinite(answer: list[Any], **more: Any) -> list[dict[str, Any]]:
    return [{"id": 0, "context": "The book.", "input": "Who?", "answer": answer, "options": [], **more}]


_OPTIONS = ["alpha", "beta", "gamma", "delta"]
_TREC = {"context": "Question: {b}\nType: City", "input": "Question: a?\nType:", "all_classes": ["City", "Person"]}
_V2 = {f"choice_{letter}": f" option {letter}" for letter in "ABCD"} | {"difficulty": "easy", "length": "short"}
_V2 |= {"_id": "x", "context": "Text", "question": "Which?", "answer": "B"}
_STAR = "The little penguin counted {} ★, but found that a mistake had been made, so the counting was done again, "
_CORRECTED = _STAR.format(6) + "and this time 5 ★ was counted correctly. " + _STAR.format(8) + "and this time 9 ★ was"
_COUNTS = {"retrieval_question": " Q", "reference_counting_results": [5, 9]}
_RULER = {"index": 0, "input": "A number is hidden: 17.", "outputs": ["17"], "length": 20, "answer_prefix": " It is"}
_ASKED = "What is {}? Please answer in the format 'It is __.'"
_FACTS = [{"arg1": f"s{n}", "arg2": f"k{n}", "needle": f"Needle {n} is k{n}."} for n in range(12)]
_NEEDLES = [{"language": "English", "retrieval_question": _ASKED.format(n), **fact} for n, fact in enumerate(_FACTS)]
_ESSAYS = "PaulGrahamEssays.jsonl", [{"text": "abcdefghi. " * 500}]
_NAMES = {"names.json": {"English": ",".join(f"Name{n}" for n in range(100, 120)), "Chinese": "a,b,c,d,e,f"}}

LAYOUTS: dict[str, dict[str, Layout]] = {
    "longbench": {
        "qasper": Layout("data/qasper.jsonl", _longbench(["red", "blue"], 3)),
        "trec": Layout("trec.jsonl", _longbench(["City"], 3, **_TREC)),
        "lcc": Layout("lcc.jsonl", _longbench(["return x"], 3)),
        "gov_report": Layout("gov_report.jsonl", _longbench(["a report of it"], 3)),
        "passage_retrieval_zh": Layout("passage_retrieval_zh.jsonl", _longbench(["段落7"], 3)),
    },
    "longbench-e": {"qasper": Layout("qasper_e.jsonl", _longbench(["red"], 3999, 4000, 8000))},
    "longbench-v2": {"longbench_v2": Layout("data.json", [_V2], lambda x: f"The correct answer is ({x.answers[0]})")},
    "infinitebench": {
        "passkey": Layout("passkey.jsonl", _infinite(["71432"])),
        "longbook_choice_eng": Layout("longbook_choice_eng.jsonl", _infinite(["beta"], options=_OPTIONS)),
        "code_debug": Layout(
            "code_debug.jsonl", _infinite(["beta"], options=_OPTIONS), lambda x: f"{x.answers[1]}. it"
        ),
        "code_run": Layout("code_run.jsonl", _infinite([-7], context="def f", input="What is func_1(-3)?")),
        "math_find": Layout("math_find.jsonl", _infinite([3.5], input="The smallest number of the list is")),
        "math_calc": Layout("math_calc.jsonl", _infinite([[3, 5]]), lambda sample: " ".join(sample.answers)),
        "longbook_sum_eng": Layout("longbook_sum_eng.jsonl", _infinite(["A book about it"])),
    },
    "ruler": {
        "niah_single_1": Layout("niah_single_1/validation.jsonl", [_RULER]),
        "qa_1": Layout("qa_1/validation.jsonl", [{**_RULER, "outputs": ["17", "seventeen"]}]),
    },
    "l-eval": {
        "tpo": Layout("Closed-ended-tasks/tpo.jsonl", _leval("Which?", "B", "exam")),
        "sci_fi": Layout(
            "Closed-ended-tasks/sci_fi.jsonl",
            _leval("Is it so, based on the world described in the document.", "True [fact: False]", "exam"),
        ),
        "financial_qa": Layout("Open-ended-tasks/financial_qa.jsonl", _leval("What?", "ten million", "f1")),
        "news_summ": Layout("Open-ended-tasks/news_summ.jsonl", _leval("Sum up.", "this and that", "rouge")),
    },
    "needlebench": {
        "single_en": Layout(*_ESSAYS, beside={"needles.jsonl": _NEEDLES}),
        "multi_retrieval_en": Layout(*_ESSAYS, lambda x: " ".join(x.answers), {"needles.jsonl": _NEEDLES}),
        "multi_reasoning_3_en": Layout(*_ESSAYS, lambda x: f"\\boxed{{{x.answers[0]}}}", _NAMES),
    },
    "counting-stars": {
        "acquisition_zh": Layout(
            "test_data/Counting_Stars_ZH_multi-evidence-retrieval-searching_128000_32_32.jsonl",
            [{"question": "text Q", **_COUNTS}],
            lambda sample: json.dumps({"小企鹅": [int(x) for x in sample.answers]}),
        ),
        "reasoning_en": Layout(
            "Counting_Stars_EN_reasoning_128000_32_32.jsonl",
            [{"question": f"{_CORRECTED} Q", "context_size": 9, **_COUNTS}],
            lambda sample: json.dumps({"little_penguin": [int(x.split("/")[0]) for x in sample.answers]}),
        ),
    },
}
