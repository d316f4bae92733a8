"""Asks an engine samples and scores its answers; resumable by a record, and shared out in shards.

Three ways to ask (`MODES`): `single`, a prompt a sample; `shared`, where the document of several samples is prefilled
once and each question is asked of a fork; `turns`, where the questions of a document are asked one after another in one
context, which keeps the model's own answers. Answers are greedy.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import lce
from lce.errors import DataError, UsageError, WindowWarning, nearest, shown
from lce.files import named
from lce.lab.eval.metrics import METRICS
from lce.lab.eval.naming import described, told
from lce.lab.eval.prefixes import n_common
from lce.lab.eval.record import Answer, text_hash
from lce.lab.eval.scores import Score

if TYPE_CHECKING:
    from lce import Context, Engine
    from lce.lab.eval.record import Record
    from lce.lab.eval.sample import Sample

MODES = ("single", "shared", "turns")
Numbered = tuple[int, "Sample"]  # a sample and its number in the run


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, 0 first. Every `count`-th document is in it, with all of its questions."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """`0/2` and `1/2` are the two halves. Raises `UsageError`."""
        index, _, count = text.partition("/")
        digits = index.isdecimal() and count.isdecimal() and max(len(index), len(count)) < 10
        if not (digits and int(index) < int(count)):
            raise UsageError(f"shard is {shown(text)}; expected i/n with i from 0 to n-1, such as 0/2")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, document: int) -> bool:
        return document % self.count == self.index


WHOLE = Shard()


def evaluate(engine: Engine, samples: Iterable[Sample], **how: Any) -> Score:
    """Ask `samples` and score the answers; those that the record has are taken from it. `how` is for `answers`."""
    return Score.of(answer for _, answer in answers(engine, samples, **how))


def answers(
    engine: Engine, samples: Iterable[Sample], *, setting: Mapping[str, Any], mode: str = "single",
    record: Record | None = None, shard: Shard = WHOLE, contexts: str | Path | None = None, stop: Sequence[str] = (),
    about: Mapping[str, Any] | None = None, progress: Callable[[int, int], None] | None = None,
) -> list[tuple[Sample, Answer]]:  # fmt: skip
    """Ask `samples`; those of one document follow each other. Returns the shard's samples with their answers.

    `setting` is what the samples are made from; by it, the engine, `mode` and its number a sample is found in `record`.
    It begins with `task`, a name, and has whatever else tells samples of one number apart, such as `length` and `seed`;
    all of it JSON values. `about` are fields of `Answer` that are recorded besides. `stop` ends answers, and belongs to
    the task. `contexts` is a folder: in the modes `shared` and `turns` each document is saved there as a context file,
    which later calls of either mode open, and which no question changes.

    An interrupted call, made again with its record, asks what is missing. Raises `UsageError` for a mode or a metric
    that does not exist, and `DataError` or `CapacityError` where an answer cannot be recorded.
    """
    if mode not in MODES:
        raise UsageError(f"unknown mode {shown(mode)}; {nearest(str(mode), MODES)}")
    if not setting or next(iter(setting)) != "task":
        raise UsageError(f"setting is {shown(setting)}; expected a mapping whose first name is task")
    check_contexts(contexts, mode)
    numbered = list(enumerate(samples))
    if not numbered:
        raise UsageError("there are no samples; expected one or more")
    for _, sample in numbered:
        if sample.metric not in METRICS:
            raise UsageError(f"unknown metric {shown(sample.metric)}; {nearest(sample.metric, METRICS)}")
    documents = [list(group) for _, group in groupby(numbered, key=lambda asked: asked[1].document)]
    mine = [(number, group) for number, group in enumerate(documents) if shard.has(number)]
    run = _Run(engine, mode, dict(setting), record, contexts, tuple(stop), dict(about or {}), _chances(numbered))
    found: list[tuple[Sample, Answer]] = []
    total = sum(len(group) for _, group in mine)
    if not total:
        raise UsageError(f"{len(documents)} documents have none for shard {shard}; take more")
    for number, group in mine:
        for sample, answer in run.document(number, group):
            found.append((sample, answer))
            if progress:
                progress(len(found), total)
    return found


def check_contexts(contexts: str | Path | None, mode: str) -> None:
    """Raise `UsageError` for a folder of contexts in the mode that saves none."""
    if contexts is not None and mode == "single":
        raise UsageError("contexts are for the modes shared and turns, where a document is asked often; not for single")


def _chances(numbered: Sequence[Numbered]) -> list[float | None]:
    """What the perfect answer to the sample before scores at each sample: what can be had without the document."""
    found: list[float | None] = []
    for (_, before), (_, sample) in zip([numbered[-1], *numbered], numbered, strict=False):
        other = before.answer or next(iter(before.answers), "")
        found.append(None if len(numbered) == 1 else METRICS[sample.metric](other, sample.answers))
    return found


@dataclass(frozen=True)
class _Parts:
    """The tokens of a document and, by their numbers, of its questions; and the length of the context for all."""

    document: list[int]
    questions: dict[int, list[int]]
    length: int


@dataclass
class _Run:
    """One call of `answers`."""

    engine: Engine
    mode: str
    setting: dict[str, Any]
    record: Record | None
    contexts: str | Path | None
    stop: tuple[str, ...]
    about: dict[str, Any]
    chances: list[float | None]
    key: dict[str, Any] = field(init=False)  # what the record calls a sample, without its number

    def __post_init__(self) -> None:
        extra: dict[str, Any] = {} if self.mode == "single" else {"mode": self.mode}
        if self.stop:
            extra["stop"] = list(self.stop)
        self.about = told(self.engine) | self.about
        self.key = self.setting | extra | described(self.engine)

    def document(self, number: int, group: Sequence[Numbered]) -> Iterator[tuple[Sample, Answer]]:
        """Return the answers to the questions of one document, from the record or the model."""
        known = {index: answer for index, sample in group if (answer := self._given(index, sample)) is not None}
        missing = [asked for asked in group if asked[0] not in known]
        if missing and self.record:
            self.record.prepare()
        if missing and self.mode == "turns":
            new = list(self._turns(group))
            added = [(index, answer) for index, answer in new if index not in known]
            self._add([(index, replace(answer, document=number)) for index, answer in added])
            known = dict(new) | known
            missing = []
        asking = self._single(missing) if self.mode == "single" else self._shared(group, missing)
        for index, sample in group:
            if index not in known:
                _, answer = next(asking)
                known[index] = replace(answer, document=number)
                self._add([(index, known[index])])
            yield sample, replace(known[index], document=number)

    def _given(self, index: int, sample: Sample) -> Answer | None:
        return None if self.record is None else self.record.given({**self.key, "index": index}, sample.prompt)

    def _add(self, new: Sequence[tuple[int, Answer]]) -> None:
        if self.record is not None and new:
            self.record.add_all([({**self.key, "index": index}, answer) for index, answer in new])

    def _single(self, asked: Sequence[Numbered]) -> Iterator[tuple[int, Answer]]:
        for index, sample in asked:
            ids, most = self.engine.tokenizer.encode(sample.prompt), answer_tokens(self.engine, sample)
            with self.engine.new_context(len(ids) + most) as context:
                yield index, self._answer(index, sample, context, ids)

    def _shared(self, group: Sequence[Numbered], asked: Sequence[Numbered]) -> Iterator[tuple[int, Answer]]:
        if not asked:
            return
        parts = self._parts(group)
        with self._prefilled(parts) as context:
            for index, sample in asked:
                with context.fork() as fork:
                    yield index, self._answer(index, sample, fork, parts.questions[index])

    def _turns(self, group: Sequence[Numbered]) -> Iterator[tuple[int, Answer]]:
        """Return all questions again, also those that are recorded: later answers depend on the earlier ones."""
        parts = self._parts(group)
        with self._prefilled(parts) as context:
            for index, sample in group:
                last = sample is group[-1][1]
                yield index, self._answer(index, sample, context, parts.questions[index], last=last)

    def _parts(self, group: Sequence[Numbered]) -> _Parts:
        """Return a document's tokens and those of its questions.

        Together they are those of the prompts, so that a model reads the same in every mode: some tokenizers put a
        space before every text, an end behind it, or the end of a document and a question into one token.
        """
        encode = self.engine.tokenizer.encode
        document, prompts = encode(group[0][1].document), {index: encode(sample.prompt) for index, sample in group}
        n = min(n_common(document, prompt[:-1]) for prompt in prompts.values())
        questions = {index: prompt[n:] for index, prompt in prompts.items()}
        sizes = [len(questions[index]) + answer_tokens(self.engine, sample) for index, sample in group]
        return _Parts(document[:n], questions, n + (sum(sizes) if self.mode == "turns" else max(sizes)))

    def _prefilled(self, parts: _Parts) -> AbstractContextManager[Context]:
        """Return the document in a context, announced to become as long as it will with all of its questions."""
        if self.contexts is None:
            return self.engine.prefill(parts.document, length=parts.length)
        path = Path(self.contexts) / f"{self._document_hash(parts)}.lce"
        if path.exists():
            context = self.engine.open_context(path)
            if context.token_ids == parts.document:
                return context
            context.close()
            raise DataError(f"{named(path)} holds another document than its name says; remove it")
        make_folder(path.parent, "contexts")
        context = self.engine.prefill(parts.document, length=parts.length)
        try:
            context.save(path)
        except BaseException:
            context.close()
            raise
        return context

    def _document_hash(self, parts: _Parts) -> str:
        """Return a name for a document in a context of this engine.

        Under RoPE scaling `dynamic` the length matters too.
        """
        length = parts.length if self.engine.rope.kind == "dynamic" else None
        identity = json.dumps([self.engine.identity.facts, length, parts.document], sort_keys=True, default=str)
        return hashlib.sha256(f"{identity}\n{self.engine.block}".encode()).hexdigest()[:32]

    def _answer(self, index: int, sample: Sample, context: Context, ids: list[int], *, last: bool = True) -> Answer:
        said = self.engine.generate(
            ids, context=context, max_tokens=answer_tokens(self.engine, sample), stop=list(self.stop)
        )
        score = METRICS[sample.metric](said.text, sample.answers)
        return Answer(
            right=score == 1, prompt=text_hash(sample.prompt), expected=sample.answer or list(sample.answers),
            answer=said.text, score=score, metric=sample.metric, depth=sample.depth, chance=self.chances[index],
            prompt_tokens=said.stats.read_before + said.stats.prompt_tokens,
            read_bytes=decode_bytes(self.engine, context) if last else None,
            **self.about,
        )  # fmt: skip


def decode_bytes(engine: Engine, context: Context) -> int:
    """Bytes of keys, values and what is kept of them that a decode step behind a context reads; the step is made."""
    more = [] if context.uncached else [context.token_ids[-1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WindowWarning)
        with lce.profiled(engine) as step:
            engine.prefill(more, context=context)
    return step.read_bytes


def make_folder(folder: str | Path, what: str) -> None:
    """Make a folder for files of a kind. Raises `UsageError` where that cannot be done."""
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown(str(folder))} is no folder for {what}: {reason}; name another") from None


def answer_tokens(engine: Engine, sample: Sample) -> int:
    """Return how many tokens an answer may have: what the sample says, or what the perfect one takes, and two more."""
    if sample.max_tokens is not None:
        return sample.max_tokens
    return len(engine.tokenizer.encode(" " + sample.answer, bos=False)) + 2
