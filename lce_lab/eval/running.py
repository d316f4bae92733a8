"""Asks an engine the questions of samples, and scores the greedy answers.

A record makes a run resumable. Shards divide a run among processes. There are three modes of asking. `single` reads
each sample's prompt by itself. `shared` prefills a document once and asks each of its questions in a fork of the
context. `turns` asks a document's questions one after the other in one context, which keeps the model's answers.
In the modes `single` and `shared`, some questions are answered at once, by a batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import lce
from lce.errors import DataError, UsageError, nearest, shown
from lce.files import check_folder, named
from lce_lab.eval.metrics import METRICS
from lce_lab.eval.naming import described, told
from lce_lab.eval.prefixes import n_common
from lce_lab.eval.record import Answer, Record, text_hash
from lce_lab.eval.sample import Sample
from lce_lab.eval.scores import Score

MODES = ("single", "shared", "turns")
Numbered = tuple[int, Sample]  # a sample's number in the run, and the sample
Asked = Generator[tuple[int, Answer]]  # numbers of samples, and their answers
Progress = Callable[[int, int], None]  # called with the samples done, first with those recorded, and their total


@dataclass(frozen=True)
class Shard:
    """Part `index` of a run, counted from 0: every `count`-th document with all of its questions."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a shard, such as `0/2` and `1/2` for the two halves. Raises `UsageError` for other texts."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise UsageError(f"shard is {shown(text)}; expected i/n with i from 0 to n-1, such as 0/2")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class Asking:
    """How samples are asked: in which mode, and which shard of the samples.

    With `contexts`, a folder, the modes `shared` and `turns` save each prefilled document as a context file, and open
    this file instead of prefilling again. With `brief`, an answer ends as soon as its score is certain. Up to `lanes`
    questions are answered at once, fewer if memory is short; the answers are the same. `reading` is called with the
    tokens of a document that are read, and with all; an error that it raises ends the asking.
    """

    mode: str = "single"
    shard: Shard = Shard()
    contexts: str | Path | None = None
    brief: bool = False
    lanes: int = 8
    reading: Progress | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"unknown mode {shown(self.mode)}; {nearest(str(self.mode), MODES)}")
        if self.contexts is not None and self.mode == "single":
            raise UsageError("contexts are for the modes shared and turns, where documents are asked often; not single")


ALONE = Asking()  # the mode `single`, without shards


def evaluate(engine: lce.Engine, samples: Iterable[Sample], **how: Any) -> Score:
    """Ask samples and return the score of the answers. `how` is for `answers`."""
    return Score.of(answer for _, answer in answers(engine, samples, **how))


def answers(
    engine: lce.Engine,
    samples: Iterable[Sample],
    *,
    setting: Mapping[str, Any],
    asking: Asking = ALONE,
    record: Record | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> list[tuple[Sample, Answer]]:
    """Ask the samples of a shard and return each with its answer. Samples of one document must be adjacent.

    In `record`, a sample is identified by `setting`, the engine, the mode and the sample's number. `setting` has JSON
    values: first `task`, a name, then everything that the samples are made from, such as `length` and `seed`. Recorded
    answers are reused, so an interrupted call can be repeated. `about` has further fields of `Answer` to record.

    Raises `UsageError` for an unknown metric, and `DataError` or `CapacityError` if an answer cannot be recorded.
    """
    if next(iter(setting), None) != "task":
        raise UsageError(f"setting is {shown(setting)}; expected a mapping whose first name is task")
    if not (numbered := list(enumerate(samples))):
        raise UsageError("there are no samples; expected one or more")
    if unknown := next((sample.metric for _, sample in numbered if sample.metric not in METRICS), None):
        raise UsageError(f"unknown metric {shown(unknown)}; {nearest(unknown, METRICS)}")
    documents = [list(group) for _, group in groupby(numbered, key=lambda asked: asked[1].beginning)]
    mine = list(enumerate(documents))[asking.shard.index :: asking.shard.count]
    run = _Run(engine, asking, dict(setting), record or Record(), told(engine) | dict(about or {}), _chances(numbered))
    missing = {index for _, group in mine for index in dict(group).keys() - run.known(group).keys()}
    total = sum(len(group) for _, group in mine)
    done, found = total - len(missing), []
    progress = progress or (lambda done, total: None)
    progress(done, total)
    with closing(run.single(asked for _, group in mine for asked in group if asked[0] in missing)) as single:
        for number, group in mine:
            for (index, _), each in zip(group, run.document(number, group, single), strict=True):
                found.append(each)
                if index in missing:
                    progress(done := done + 1, total)
    return found


def _chances(numbered: Sequence[Numbered]) -> list[float | None]:
    """Return for each sample the score that the preceding sample's right answer gets, as an estimate of chance."""
    found: list[float | None] = []
    for (_, before), (_, sample) in zip([numbered[-1], *numbered], numbered, strict=False):
        other = before.answer or next(iter(before.answers), "")
        found.append(None if len(numbered) == 1 else METRICS[sample.metric](other, sample.answers))
    return found


@dataclass
class _Run:
    engine: lce.Engine
    asking: Asking
    setting: dict[str, Any]
    record: Record
    about: dict[str, Any]
    chances: list[float | None]
    prefill_s: float | None = None  # the seconds that the latest document took to read; None if it was opened

    def key(self, index: int, sample: Sample) -> dict[str, Any]:
        """Return the fields that identify a sample in the record."""
        about = described(self.engine) | ({} if self.asking.mode == "single" else {"mode": self.asking.mode})
        own = {} if sample.length is None else {"length": sample.length}
        return {**self.setting, **own, **about, "index": index}

    def known(self, group: Sequence[Numbered]) -> dict[int, Answer]:
        """Return the recorded answers to a document's samples, by number."""
        found = {index: self.record.get(self.key(index, sample), sample.prompt) for index, sample in group}
        return {index: answer for index, answer in found.items() if answer}

    def document(self, number: int, group: Sequence[Numbered], single: Asked) -> Iterator[tuple[Sample, Answer]]:
        """Yield one document's samples with their answers; `single` has the missing answers of the mode `single`."""
        keys = {index: self.key(index, sample) for index, sample in group}
        known = self.known(group)
        missing = [asked for asked in group if asked[0] not in known]
        if missing:
            self.record.prepare()
        if missing and self.asking.mode == "turns":
            made = {index: replace(answer, document=number) for index, answer in self._turns(group)}
            self.record.add_all([(keys[index], made[index]) for index, _ in missing])
            known = made | known
        with closing(self._shared(group, missing)) as shared:
            asking = single if self.asking.mode == "single" else shared
            for index, sample in group:
                if index not in known:
                    _, answer = next(asking)
                    known[index] = replace(answer, document=number)
                    self.record.add(keys[index], known[index])
                yield sample, replace(known[index], document=number)

    def single(self, asked: Iterable[Numbered]) -> Asked:
        """Yield the answers to samples, each with a context of its own."""
        encode = self.engine.tokenizer.encode
        yield from self._at_once((index, sample, encode(sample.prompt), None) for index, sample in asked)

    def _shared(self, group: Sequence[Numbered], asked: Sequence[Numbered]) -> Asked:
        with self._prefilled(group) as (context, questions):
            yield from self._at_once((index, sample, questions[index], context) for index, sample in asked)

    def _at_once(self, asked: Iterable[tuple[int, Sample, list[int], lce.Context | None]]) -> Asked:
        """Yield the answers to samples in their order, of tokens that continue a context; as many at once as lanes."""
        lanes: deque[tuple[int, Sample, int, lce.BatchStream]] = deque()
        with lce.Batch(self.engine.setup, self.asking.lanes, reuse=False) as batch:
            for index, sample, ids, start in asked:
                stream = batch.stream(ids, context=start, keep_context=True, **self._options(sample))
                lanes.append((index, sample, len(ids) + (0 if start is None else len(start)), stream))
                if len(lanes) == self.asking.lanes:
                    yield self._ended(*lanes.popleft())
            while lanes:
                yield self._ended(*lanes.popleft())

    def _ended(self, index: int, sample: Sample, n_prompt: int, stream: lce.BatchStream) -> tuple[int, Answer]:
        said = stream.finish()
        assert stream.context is not None
        with stream.context as context:
            n_bytes = lce.profiled_step(self.engine, context).read_bytes
            return index, self._answer(index, sample, said, n_prompt, n_bytes)

    def _turns(self, group: Sequence[Numbered]) -> Iterator[tuple[int, Answer]]:
        """Ask all questions, even those with recorded answers, because later answers depend on earlier ones."""
        with self._prefilled(group) as (context, questions):
            for index, sample in group:
                n_prompt = len(context) + len(questions[index])
                said = self.engine.generate(questions[index], context=context, **self._options(sample))
                is_last = sample is group[-1][1]
                n_bytes = lce.profiled_step(self.engine, context).read_bytes if is_last else None
                yield index, self._answer(index, sample, said, n_prompt, n_bytes)

    @contextmanager
    def _prefilled(self, group: Sequence[Numbered]) -> Iterator[tuple[lce.Context, dict[int, list[int]]]]:
        """Yield a context with the prefilled document, and the tokens of each question by its number.

        A model must read the same tokens in every mode, but some tokenizers add tokens around a text, or encode the end
        of the document and the question as one token. So whole prompts are encoded, then split after common tokens.
        """
        engine = self.engine
        prompts = {index: engine.tokenizer.encode(sample.prompt) for index, sample in group}
        document = engine.tokenizer.encode(group[0][1].beginning)
        document = document[: min(n_common(document, prompt[:-1]) for prompt in prompts.values())]
        questions = {index: prompt[len(document) :] for index, prompt in prompts.items()}
        sizes = [len(questions[index]) + answer_tokens(engine, sample) for index, sample in group]
        length = len(document) + (sum(sizes) if self.asking.mode == "turns" else max(sizes))
        path = self._context_file(document, length)
        is_saved, started = path is not None and path.exists(), time.perf_counter()
        with (
            engine.open_context(path)
            if path and is_saved
            else engine.prefill(document, length=length, progress=self.asking.reading) as context
        ):
            if context.token_ids != document:
                raise DataError(f"{named(str(path))} holds another document than its name says; remove it")
            self.prefill_s = None if is_saved else time.perf_counter() - started
            if path and not is_saved:
                make_folder(path.parent, "contexts")
                context.save(path)
            yield context, questions

    def _context_file(self, document: Sequence[int], length: int) -> Path | None:
        """Return the path of the file for a document, this engine and, with the RoPE scaling `dynamic`, this length."""
        if self.asking.contexts is None:
            return None
        facts = [self.engine.setup.identity.facts, length if self.engine.setup.rope.follows_length else None, document]
        identity = f"{json.dumps(facts, sort_keys=True, default=str)}\n{self.engine.setup.block}"
        return Path(self.asking.contexts) / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.lce"

    def _options(self, sample: Sample) -> dict[str, Any]:
        stop = partial(is_decided, sample) if self.asking.brief else ()
        return {"max_tokens": answer_tokens(self.engine, sample), "stop": stop}

    def _answer(self, index: int, sample: Sample, said: lce.Generation, n_prompt: int, n_bytes: int | None) -> Answer:
        score, expected = METRICS[sample.metric](said.text, sample.answers), sample.answer or list(sample.answers)
        asked = {"metric": sample.metric, "depth": sample.depth, "kind": sample.kind or None}
        cost = {"prompt_tokens": n_prompt, "prefill_s": self.prefill_s, "read_bytes": n_bytes}
        more: dict[str, Any] = {"chance": self.chances[index], **asked, **cost, **self.about}
        return Answer(score == 1, text_hash(sample.prompt), expected, said.text, score, **more)


def make_folder(folder: str | Path, what: str) -> None:
    """Create a folder for `what`, such as "pictures". Raises an error if files cannot be written in the folder."""
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown(str(folder))} is no folder for {what}: {reason}; name another") from None
    check_folder(Path(folder) / what)


def is_decided(sample: Sample, beginning: str) -> bool:
    """Return whether all answers with this beginning have the same score. False for most metrics: not known."""
    if sample.metric != "starts":
        return False
    text = beginning.strip()
    return text.startswith(sample.answers) or not any(answer.startswith(text) for answer in sample.answers)


def answer_tokens(engine: lce.Engine, sample: Sample) -> int:
    """Return the largest number of tokens of an answer: the sample's, or that of the perfect answer plus two."""
    if sample.max_tokens is not None:
        return sample.max_tokens
    return len(engine.tokenizer.encode(" " + sample.answer, bos=False)) + 2
