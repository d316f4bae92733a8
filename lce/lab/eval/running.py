"""Asks an engine samples and scores the answers. A record makes runs resumable; shards divide a run.

Three modes (`MODES`): `single`, a prompt a sample; `shared` prefills the document of several samples once and asks each
question of a fork; `turns` asks a document's questions one after another in one context, which keeps the model's own
answers. Answers are greedy.
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
    """Part `index` of `count`, 0 first: every `count`-th document with all of its questions."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a shard, such as `0/2` and `1/2` for the two halves. Raises `UsageError`."""
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
    """Ask `samples` and score the answers; recorded answers are reused. `how` is for `answers`."""
    return Score.of(answer for _, answer in answers(engine, samples, **how))


def answers(
    engine: Engine, samples: Iterable[Sample], *, setting: Mapping[str, Any], mode: str = "single",
    record: Record | None = None, shard: Shard = WHOLE, contexts: str | Path | None = None, stop: Sequence[str] = (),
    about: Mapping[str, Any] | None = None, progress: Callable[[int, int], None] | None = None,
) -> list[tuple[Sample, Answer]]:  # fmt: skip
    """Ask `samples` and return the shard's samples with their answers. Samples of one document are adjacent.

    `setting`, the engine, `mode` and a sample's number identify the sample in `record`. `setting` has JSON values:
    first `task`, a name, then all else that the samples are made from, such as `length` and `seed`. `about` has further
    fields of `Answer` to record. `stop` ends answers and belongs to the task. `contexts` is a folder: the modes
    `shared` and `turns` save each document there as a context file. Later calls of either mode open the file; questions
    do not change the file.

    Repeat an interrupted call with its record to ask only missing samples. Raises `UsageError` for an unknown mode or
    metric, and `DataError` or `CapacityError` if an answer cannot be recorded.
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
    """Raise `UsageError` for a folder of contexts in the mode `single`, which saves none."""
    if contexts is not None and mode == "single":
        raise UsageError("contexts are for the modes shared and turns, where a document is asked often; not for single")


def _chances(numbered: Sequence[Numbered]) -> list[float | None]:
    """Return, for each sample, the score of the preceding sample's perfect answer: the score without a document."""
    found: list[float | None] = []
    for (_, before), (_, sample) in zip([numbered[-1], *numbered], numbered, strict=False):
        other = before.answer or next(iter(before.answers), "")
        found.append(None if len(numbered) == 1 else METRICS[sample.metric](other, sample.answers))
    return found


@dataclass(frozen=True)
class _Parts:
    """The tokens of a document and of its questions by number, and the length of the context for all."""

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
    key: dict[str, Any] = field(init=False)  # identifies a sample in the record, without its number

    def __post_init__(self) -> None:
        extra: dict[str, Any] = {} if self.mode == "single" else {"mode": self.mode}
        if self.stop:
            extra["stop"] = list(self.stop)
        self.about = told(self.engine) | self.about
        self.key = self.setting | extra | described(self.engine)

    def document(self, number: int, group: Sequence[Numbered]) -> Iterator[tuple[Sample, Answer]]:
        """Yield the answers to one document's questions, from the record or the model."""
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
        """Ask all questions, recorded ones too: later answers depend on earlier ones."""
        parts = self._parts(group)
        with self._prefilled(parts) as context:
            for index, sample in group:
                last = sample is group[-1][1]
                yield index, self._answer(index, sample, context, parts.questions[index], last=last)

    def _parts(self, group: Sequence[Numbered]) -> _Parts:
        """Return the tokens of a document and of its questions.

        Document and question joined have the prompt's tokens, so a model reads the same in every mode. Some tokenizers
        put a space before every text, an end behind, or the end of a document and a question into one token.
        """
        encode = self.engine.tokenizer.encode
        document, prompts = encode(group[0][1].document), {index: encode(sample.prompt) for index, sample in group}
        n = min(n_common(document, prompt[:-1]) for prompt in prompts.values())
        questions = {index: prompt[n:] for index, prompt in prompts.items()}
        sizes = [len(questions[index]) + answer_tokens(self.engine, sample) for index, sample in group]
        return _Parts(document[:n], questions, n + (sum(sizes) if self.mode == "turns" else max(sizes)))

    def _prefilled(self, parts: _Parts) -> AbstractContextManager[Context]:
        """Return the document in a context, announced with the length that questions and answers need."""
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
        """Return a file name for a document and engine; under RoPE scaling `dynamic`, also for the length."""
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
    """Make a decode step behind a context; return the bytes read of keys, values and their summaries."""
    more = [] if context.uncached else [context.token_ids[-1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WindowWarning)
        with lce.profiled(engine) as step:
            engine.prefill(more, context=context)
    return step.read_bytes


def make_folder(folder: str | Path, what: str) -> None:
    """Make a folder for `what`. Raises `UsageError` on failure."""
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown(str(folder))} is no folder for {what}: {reason}; name another") from None


def answer_tokens(engine: Engine, sample: Sample) -> int:
    """Return the most tokens of an answer: the sample's limit, or the perfect answer's tokens plus two."""
    if sample.max_tokens is not None:
        return sample.max_tokens
    return len(engine.tokenizer.encode(" " + sample.answer, bos=False)) + 2
