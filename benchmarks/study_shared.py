"""Reads a document once with one method, and asks its questions with many: what their choices alone cost.

    python benchmarks/study_shared.py --model MODEL.gguf --essays ESSAYS --length 2 --read "full rope=yarn" \
        --methods "full;pages placement=true budget=8192;longheads placement=true"

The rows of `--methods` are asked as `lce eval run --mode shared` asks: each reads the question's own tokens, and writes
the answer. But the document's keys are those that the method of `--read` made, and each row keeps of them, while they
are read, what it keeps of its own. So a long text is read once for all rows, and a row differs from `full` by its
choice alone. Answers are added to the record of study.py, with `read_by`; those that are recorded are not asked again.

The RoPE scaling of `--read` is that of all rows, with the factor length / window. Each kind of row has a copy of the
keys and values: rows that differ in what they choose alone (budgets, say) share one. `--length` below 100 is windows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from study import HERE, tokens
from torch import Tensor

import lce
from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.engine.context import context_of, new_context
from lce.engine.saving import ContextData
from lce.methods import Step
from lce.methods.wrapped import Wrapped
from lce.sizes import size_text
from lce_lab.eval.naming import described, told
from lce_lab.eval.perplexity import STRIDE
from lce_lab.eval.record import Loss, Record, text_hash
from lce_lab.eval.running import Asking, Shard, answers
from lce_lab.eval.scores import Score
from lce_lab.eval.suite import MadeSuite, make_tasks

CHOOSING = ("budget", "budget.local", "budget.sinks", "chunks", "local", "top_p", "rank", "dense_layers")


@dataclass(frozen=True)
class Follower:
    """A method that keeps of each pass what it would keep of its own, in a cache of its own."""

    method: lce.Method
    cache: KVCache

    def keep(self, k: Tensor, v: Tensor, layer: int, step: Step) -> None:
        if layer == 0:
            self.cache.begin()
            self.cache.reserve(step.stop)
        self.method.keep(k, v, self.cache.layers[layer], step)

    def keep_queries(self, q: Tensor, layer: int, step: Step) -> None:
        self.method.keep_queries(q, self.cache.layers[layer], step)
        if layer == len(self.cache.layers) - 1:
            self.cache.commit()


@dataclass(frozen=True)
class Read(Wrapped):
    """A method that runs unchanged, while followers keep what they need to answer."""

    followers: list[Follower] = field(default_factory=list, repr=False, compare=False)

    def own(self, step: Step, number: int) -> Step:
        """Return a follower's step, with a memo that all layers share."""
        return step.once(f"step of follower {number}", lambda: replace(step, memo={}, all_devices={}))

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        for number, follower in enumerate(self.followers):
            follower.keep(k, v, cache.index, self.own(step, number))
        self.inner.keep(k, v, cache, step)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        for number, follower in enumerate(self.followers):
            follower.keep_queries(q, cache.index, self.own(step, number))
        return self.inner.attend(q, cache, step)


@dataclass
class Sharing:
    """The engines of all rows, and the document that was read last. `note` takes a row's losses of its `tail`."""

    reader: lce.Engine
    reading: Read
    rows: Mapping[str, lce.Engine]
    tail: int
    note: Callable[[str, list[int], Tensor], None]
    document: list[int] = field(default_factory=list)
    held: dict[str, ContextData] = field(default_factory=dict)

    def context(self, row: str, document: Sequence[int], length: int) -> lce.Context:
        """Return a context of a row's engine with the document."""
        if self.document != list(document):
            self.read(list(document), length)
        return context_of(self.rows[row].setup, self.held[kind(row)])

    def read(self, document: list[int], length: int) -> None:
        """Read a document for all rows, and score its tail by each row before the reader goes on."""
        self.held.clear()
        tail = min(self.tail, len(document) // 2)
        engines = {kind(row): engine for row, engine in self.rows.items()}
        held = {name: new_context(engine.setup, length) for name, engine in engines.items()}
        self.reading.followers[:] = [Follower(engines[name].method, each.cache) for name, each in held.items()]
        started = time.perf_counter()
        with self.reader.prefill(document[:-tail], length=length) as context:
            print(f"{len(context):,} tokens read in {time.perf_counter() - started:.0f} s", flush=True)
            self.hold(held, context.token_ids)
            for row in self.rows:
                self.score(row, document, tail)
            self.held.clear()
            self.reader.prefill(document[-tail:], context=context)
        self.document = document
        self.hold(held, document)

    def hold(self, held: Mapping[str, lce.Context], ids: list[int]) -> None:
        """Hold what the followers kept of the tokens `ids`."""
        self.held = {name: replace(each.data, token_ids=ids, only_read=len(ids)) for name, each in held.items()}

    def score(self, row: str, document: list[int], tail: int) -> None:
        """Score the last `tail` tokens of a document, as a row predicts them."""
        with context_of(self.rows[row].setup, self.held[kind(row)]).fork() as context:
            nll = -self.rows[row].score(document[-tail:], context=context).logprobs.double()
        print(f"{row}: perplexity {nll.mean().exp():.3f} of the last {len(nll):,} tokens", flush=True)
        self.note(row, document, nll)


def kind(row: str) -> str:
    """Return a row without the knobs that decide only what is chosen."""
    return " ".join(word for word in row.split() if word.partition("=")[0] not in CHOOSING)


def method_of(row: str) -> lce.Method:
    """Return the method of a row, which has its name and knobs."""
    name, *words = row.split()
    return lce.methods.make(name, dict(word.split("=", 1) for word in words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--essays", required=True, help="a folder of .txt files, in which facts are hidden")
    parser.add_argument("--record", metavar="FOLDER", help="[default: benchmarks/record/study/MODEL]")
    parser.add_argument("--length", default="2")
    parser.add_argument("--documents", default="0", help="numbers below --samples")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", default="facts_medley")
    parser.add_argument("--questions", type=int, default=44)
    parser.add_argument("--kinds", help="of the questions, those of these kinds, separated by commas [default: all]")
    parser.add_argument("--read", default="full", help="the method that reads, and its rope=")
    parser.add_argument("--methods", required=True, help="the rows that answer, separated by ';'")
    parser.add_argument("--tail", type=int, default=2048, help="last tokens of the document, whose perplexity is noted")
    args = parser.parse_args()
    record = Path(args.record or HERE / "record" / "study" / Path(args.model).stem)
    record.mkdir(parents=True, exist_ok=True)
    plain = lce.load(args.model, "full", dtype=args.dtype)
    length = tokens(args.length, plain.window)
    rope = next((word[5:] for word in args.read.split() if word.startswith("rope=")), None)
    loading: dict[str, Any] = {"dtype": args.dtype, "sharing": plain}
    if rope and length > plain.window:
        loading |= {"rope": rope, "rope_factor": length / plain.window}
    reading = Read(method_of(" ".join(word for word in args.read.split() if not word.startswith("rope="))))
    reader = lce.load(args.model, reading, **loading)
    rows = {row.strip(): lce.load(args.model, method_of(row), **loading) for row in args.methods.split(";")}
    assert isinstance(reader.method, Read)

    def note(row: str, ids: list[int], nll: Tensor) -> None:
        asked = {"task": "perplexity", "setting": "stream", **described(rows[row]), "read_by": args.read}
        asked |= {"length": length, "text": text_hash(str(ids))}
        for at in range(0, len(nll), STRIDE):
            part, first = nll[at : at + STRIDE], len(ids) - len(nll) + at
            loss = Loss(nll=float(part.sum()), tokens=len(part), **told(rows[row]), checkpoint=Path(args.model).name)
            Record(record / "perplexity.jsonl").add({**asked, "first": first, "stop": first + len(part)}, loss)

    sharing = Sharing(reader, reader.method, rows, args.tail, note)
    (task,) = make_tasks([args.task])
    differs = {"read_by": args.read} | ({"kinds": args.kinds} if args.kinds else {})
    for document in map(int, args.documents.split(",")):
        asking = Asking("shared", Shard(document, args.samples))
        suite = MadeSuite(
            samples=args.samples,
            seed=args.seed,
            filler=f"essays:{args.essays}",
            questions=args.questions,
            asking=asking,
        )
        made = [x for x in suite.make(plain, task, length) if not args.kinds or x.kind in args.kinds.split(",")]
        for row, engine in rows.items():
            how: dict[str, Any] = {"setting": suite.setting(task, length) | differs, "asking": asking}
            engine.prefill = lambda ids, length, progress, row=row: sharing.context(row, ids, length)  # type: ignore
            how |= {"record": Record(record / "answers.jsonl"), "about": {"checkpoint": Path(args.model).name}}
            started = time.perf_counter()
            found = [answer for _, answer in answers(engine, made, **how)]
            score, seconds = Score.of(found), time.perf_counter() - started
            read = size_text(round(score.read_bytes or 0))
            print(f"{document} {row}: {score.mean:.1%} of {len(found)}, {read} a token, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
