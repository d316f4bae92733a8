"""The suite of a published benchmark, which shortens long prompts and puts templates around prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lce
from lce.errors import UsageError, shown
from lce_lab.eval.published.base import Benchmark, PublishedTask
from lce_lab.eval.sample import Sample
from lce_lab.eval.suite import Suite

AUTO, NONE, CHAT = "auto", "none", "chat"
_FOR_ANSWER = 512  # the number of tokens that L-Eval leaves for the answer
_STEP = 250  # the number of words by which L-Eval shortens a document that is still too long


@dataclass(frozen=True)
class PublishedSuite(Suite):
    """A benchmark in a folder of the user's files, and how its prompts are made. Raises `UsageError` for wrong values.

    `template` is `auto` (as in the benchmark's own code), `chat` (the model's chat template), `none`, or a text with
    `{prompt}`, such as `[INST]{prompt}[/INST]`. Prompts of more than `max_length` tokens are shortened in the
    benchmark's own way. `most` is the largest number of questions per task. None means no limit.
    """

    scale = 100
    benchmark: Benchmark
    folder: Path
    variant: str = ""
    template: str = AUTO
    max_length: int | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.asking.mode == "turns":
            raise UsageError("mode is 'turns'; expected single or shared: its questions are independent")
        if self.template not in (AUTO, NONE, CHAT) and "{prompt}" not in self.template:
            expected = "auto, chat, none, or a text with {prompt} in it"
            raise UsageError(f"template is {shown(self.template)}; expected {expected}")
        if self.max_length is not None and self.max_length < 2:
            raise UsageError(f"max_length is {self.max_length}; expected 2 or more tokens")

    def tasks(self, names: Sequence[str] | None = None) -> list[PublishedTask]:
        """Return the named tasks, or all tasks that have files. Raises `UsageError`, and without files `DataError`."""
        return [self.benchmark.task(name) for name in names] if names else self.benchmark.present(self.folder)

    def make(self, engine: lce.Engine, task: PublishedTask, length: int = 0) -> list[Sample]:
        tokenizer = engine.tokenizer
        if self.template == CHAT:
            tokenizer.require_chat()
        found = self.benchmark.read(self.folder, task, self.variant, tokenizer)
        made = [self.prompted(sample, tokenizer) for sample in islice(found, self.most)]
        return [replace(sample, n_tokens=len(tokenizer.encode(sample.prompt))) for sample in made]

    def setting(self, task: PublishedTask, length: int = 0) -> dict[str, Any]:
        found = {"prompts": self.variant, "template": self.template, "max_length": self.max_length}
        usual = ("", AUTO, None, self.benchmark.variants[0])
        chosen = {name: value for name, value in found.items() if value not in usual}
        return {"task": f"{self.benchmark.name}:{task.name}", **chosen}

    def about(self, task: PublishedTask) -> dict[str, Any]:
        return {"suite": self.benchmark.name, "max_length": self.max_length}

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        return self.benchmark.averages(scores)

    def prediction(self, sample: Sample, text: str) -> dict[str, Any]:
        return self.benchmark.prediction(sample, text)

    def prompted(self, sample: Sample, tokenizer: Any) -> Sample:
        """Shorten a sample's prompt, and put the template around the prompt, into `before` and `question`."""
        if self.max_length is not None:
            sample = CUTS[sample.cut](sample, tokenizer, self.max_length)
        template = sample.template if sample.fixed or self.template == AUTO else self.template
        if template == NONE or (template == CHAT and tokenizer.chat_template is None):
            return sample
        prompt = sample.beginning + sample.question
        if template == CHAT:
            system = [{"role": "system", "content": sample.system}] if sample.system else []
            text = tokenizer.chat([*system, {"role": "user", "content": prompt}])
        else:
            text = template.replace("{system}", sample.system).replace("{prompt}", prompt)
        context = sample.document.strip()  # templates may strip white space around the prompt
        before, found, after = text.partition(context) if context else (text, "", "")
        return replace(sample, before=before, document=found, question=after)


def _middle(sample: Sample, tokenizer: Any, most: int, *, joined: bool = False) -> Sample:
    """Keep the first and the last `most // 2` tokens of the prompt (LongBench, InfiniteBench's open models).

    If `joined`, keep one more if `most` is odd, and decode both parts together (LongBench v2, InfiniteBench for GPT-4).
    """
    ids, half = tokenizer.encode(sample.beginning + sample.question), most // 2
    if len(ids) <= most:
        return sample
    decode = tokenizer.decode
    text = decode(ids[:half] + ids[-most // 2 :]) if joined else decode(ids[:half]) + decode(ids[-half:])
    return replace(sample, before="", document=text, question="")


def _words(sample: Sample, tokenizer: Any, most: int, *, keep_first: bool) -> Sample:
    """Drop words of the document (at its end if `keep_first`, else at its beginning) until the answer fits (L-Eval)."""
    limit, cut, text = most - _FOR_ANSWER, 0, sample.document
    while text and len(tokenizer.encode(text)) > limit:
        n_words = limit - cut
        if n_words <= 0:
            needed = f"the document and {_FOR_ANSWER} tokens of the answer"
            raise UsageError(f"max_length is {most}; expected more, for {needed}")
        words = text.split(" ")
        text = " ".join(words[:n_words] if keep_first else words[-n_words:])
        cut += _STEP
    return replace(sample, document=text)


def _uncut(sample: Sample, tokenizer: Any, most: int) -> Sample:
    n_tokens = len(tokenizer.encode(sample.beginning + sample.question))
    if n_tokens > most:
        found = f"a prompt has {n_tokens} tokens, max_length is {most}"
        raise UsageError(f"{found}, and this benchmark cuts none; give shorter data")
    return sample


CUTS: dict[str, Callable[[Sample, Any, int], Sample]] = {
    "middle": _middle,
    "middle_joined": partial(_middle, joined=True),
    "words_right": partial(_words, keep_first=True),
    "words_left": partial(_words, keep_first=False),
    "none": _uncut,
}
