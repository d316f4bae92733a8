"""An answer's bits follow from what was read and what was generated, and from nothing else."""

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.cache.kv import off_grid
from lce.engine.batch import Batch
from lce.engine.lanes import forward
from lce.engine.running import append, lane_of
from lce.kernels.product import panels
from lce.methods import available
from lce.models.products import SHARED_ROWS
from tests.checkpoints import save_tiny, tokens
from tests.command import within
from tests.gguf_models import as_saved, save_gguf
from tests.running import threads

# Queries of a block choose together; a block begins where a kept prompt ends. Where that is within a block, esa and
# infllm choose for fewer queries.
BY_BLOCKS = {"esa", "infllm"}
METHODS = [name for name in available() if name not in BY_BLOCKS]
KNOBS: dict[str, dict[str, Any]] = {
    "longheads": {"chunk_size": 8, "share": "head"},
    "esa": {"compress": "pca", "low_dim": 4},
}
KINDS = [{}, {"dtype": "bfloat16"}, {"weights": "int8"}, {"weights": "int4"}, {"kv_dtype": "int8-device"}]
SLOW = pytest.mark.slow
N = 230  # tokens, of a window of 64
pytestmark = [
    pytest.mark.timeout(600),  # it may compile the kernels of every method
    pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning"),
]

Said = tuple[list[int], list[float]]


def load(folder: Path, name: str, **options: Any) -> lce.Engine:
    if panels.arithmetic(getattr(torch, options.get("dtype", "float32"))) is None:
        pytest.skip("PyTorch multiplies many rows here, whose sums have no promised order")
    return lce.load(folder, lce.methods.make(name, KNOBS.get(name)), **options)


SHAPE = {"hidden_size": 96, "intermediate_size": 272, "num_hidden_layers": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bits"), **SHAPE)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of so many layers that one layer's attention may serve the others."""
    return save_tiny(tmp_path_factory.mktemp("deep"), **SHAPE | {"num_hidden_layers": 3})


def answer(
    engine: lce.Engine, ids: Sequence[int], cuts: Sequence[int] = (), fork: bool = False, restart: Any = None
) -> Said:
    """Read `ids` in parts that end at `cuts`, and generate; return the tokens and their log-probabilities.

    `restart`, if any, returns the engine and the context with which to go on behind a cut, for the context there.
    """
    context = None
    for first, last in pairwise((0, *cuts)):
        context = engine.prefill(ids[first:last], context=context, length=N + 16)
        engine, context = restart(context) if restart else (engine, context)
    if context is not None and fork:
        context = context.fork()
    rest = ids[cuts[-1] :] if cuts else ids
    found = engine.generate(rest, context=context, max_tokens=8, temperature=0, logprobs=0, stop=[])
    assert found.logprobs is not None
    return found.token_ids, [each.logprob for each in found.logprobs]


def restarting(folder: Path, file: Path, name: str, **options: Any) -> Callable[[lce.Context], Any]:
    """A `restart`: the context is saved, and opened by an engine that shares nothing with the one before."""

    def restart(context: lce.Context) -> tuple[lce.Engine, lce.Context]:
        context.save(file, force=True)
        engine = load(folder, name, **options)
        return engine, engine.open_context(file)

    return restart


def never_stopped(engine: lce.Engine, ids: Sequence[int]) -> lce.Context:
    context = engine.prefill(ids)
    engine.generate([], context=context, max_tokens=8, temperature=0, stop=[])
    return context


def random_cuts(chance: random.Random, n: int = N) -> list[int]:
    cuts, at = [], 0
    while (at := at + chance.choice([1, 1, 2, 5, 8, 9, 31, 64, 100])) < n:
        cuts.append(at)
    return cuts[: chance.randint(min(1, len(cuts)), len(cuts))]


QUICK = ("full", "longheads", "self_extend")


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(each, marks=SLOW) for each in KINDS[1:])], ids=str)
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in METHODS])
def test_neither_blocks_nor_hits_nor_forks_nor_restarts_nor_threads(
    name: str, kind: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    ids, chance = tokens(N, seed=1), random.Random(name)
    first = load(folder, name, block=64, **kind)
    truth = answer(first, ids)
    for block in (64, 7, 1, 100):
        engine = load(folder, name, block=block, sharing=first, **kind)
        with threads(chance.choice([1, 2, 3, 4])):
            assert answer(engine, ids) == truth, block
            cuts, fork = random_cuts(chance), bool(block % 2)
            restart = None if fork else restarting(folder, tmp_path / "a.lce", name, block=block, **kind)
            assert answer(engine, ids, cuts, fork, restart) == truth, (block, cuts)


@pytest.mark.parametrize(
    "name", [name if name in BY_BLOCKS else pytest.param(name, marks=SLOW) for name in available()]
)
def test_no_restart(name: str, folder: Path, tmp_path: Path) -> None:
    """A prompt that is kept, saved, and opened by another process' engine, as one that is kept in memory.

    Quick ones of the other methods are restarted in the test above.
    """
    ids, engine, chance = tokens(N, seed=1), load(folder, name, block=64), random.Random(name)
    restart, truth = restarting(folder, tmp_path / "a.lce", name, block=64), answer(engine, ids)
    for cuts in ([64], [128, 192], random_cuts(chance), random_cuts(chance)):
        found = answer(engine, ids, cuts, restart=restart)
        at_ends = not any(cut % 64 for cut in cuts)
        assert found == (truth if at_ends or name not in BY_BLOCKS else answer(engine, ids, cuts)), cuts


@pytest.mark.parametrize(
    "name", [name if name in {*QUICK, *BY_BLOCKS} else pytest.param(name, marks=SLOW) for name in available()]
)
def test_no_stop_on_the_way(name: str, folder: Path, tmp_path: Path) -> None:
    """An answer that ends at its limit, is saved, opened by another engine and goes on."""
    engine, ids = load(folder, name, block=64), tokens(N, seed=2)
    whole = answer(engine, ids)[0]
    context = engine.prefill(ids, length=N + 16)
    for n in (1, 3, 4):
        engine.generate([], context=context, max_tokens=n, temperature=0, stop=[])
        engine, context = restarting(folder, tmp_path / f"{n}.lce", name, block=64)(context)
    assert context.token_ids[N:] == whole
    assert torch.equal(context.logits, never_stopped(engine, ids).logits)


@pytest.mark.parametrize("name", ["full", "longheads", *(pytest.param(name, marks=SLOW) for name in available())])
def test_no_lanes_beside_it(name: str, folder: Path) -> None:
    """Eight chats behind one beginning, which is kept, at once and one after the other."""
    engine, first = load(folder, name, block=32), tokens(96, seed=2)
    prompts = [first + tokens(9 + 7 * i, seed=3 + i) for i in range(8)]
    alone = [answer(engine, ids) for ids in prompts]

    async def together() -> list[Said]:
        async with engine.batch(max_lanes=8) as batch:

            async def one(ids: Sequence[int]) -> Said:
                stream = batch.stream(ids, max_tokens=8, temperature=0, logprobs=0, stop=[])
                async for _ in stream:
                    pass
                assert stream.result.logprobs is not None
                return stream.result.token_ids, [each.logprob for each in stream.result.logprobs]

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(together()) == alone


@pytest.mark.parametrize(
    ("name", "kind"),
    [("longheads", KINDS[0]), ("esa", KINDS[0]), ("self_extend", KINDS[1]), ("full", KINDS[3])]
    + [pytest.param(name, kind, marks=SLOW) for name in available() for kind in random.Random(name).sample(KINDS, 2)],
    ids=str,
)
def test_no_tokens_that_are_proposed_with_it(name: str, kind: dict[str, Any], deep_folder: Path) -> None:
    """Several tokens of one context in a pass, beside those of another context."""
    engine, chance, proposed = load(deep_folder, name, block=64, **kind), random.Random(name), tokens(40, seed=6)
    setup, contexts = engine.setup, [engine.prefill(tokens(n, seed=n), length=N + 60) for n in (N, 90)]
    steps = []
    for context in [each.fork() for each in contexts]:
        one_by_one = [append(setup, context, [[id_]], decoding=True) for id_ in proposed]
        steps.append([(lane.drawn, lane.hidden) for lane in one_by_one])
    at = [0, 0]
    while min(at) < len(proposed):
        some = [min(chance.randint(1, SHARED_ROWS), len(proposed) - first) for first in at]
        own = [
            lane_of(setup, context, proposed[first : first + n], decoding=True)
            for context, first, n in zip(contexts, at, some, strict=True)
            if n
        ]
        with threads(chance.choice([1, 2, 3, 4])):
            forward(setup.model, own, setup.recorder)
        found = (x for lane in own for x in (lane.drawn, lane.hidden))
        for number, n in enumerate(some):
            for each in zip(*steps[number][at[number] : at[number] + n], strict=True) if n else ():
                whole: Any = next(found)
                assert torch.equal(whole, torch.cat(each)), (number, at, n)
            at[number] += n


# What `test_random_ways` draws from. More: LCE_BITS_CASES=2000 pytest "tests/engine/test_bits.py::test_random_ways[8]"
PACKED = ("int8", "int4", "Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
WEIGHTS = [*KINDS, *({"dtype": dtype, "weights": kind} for dtype in ("float32", "bfloat16") for kind in PACKED)]
TALKS = [((170, 8), (40, 6)), ((129, 3), (1, 8)), ((64, 8), (97, 4)), ((17, 5), (9, 8))]  # tokens read and generated
HOW: dict[str, Any] = {"temperature": 0, "logprobs": 0, "stop": []}


@dataclass
class Way:
    """A way to read and to generate. `chance` draws cuts, stops, forks, restarts, kept prefixes and lanes beside it.

    Without `chance` there are none of these. `restart` is as for `answer`.
    """

    engine: lce.Engine
    restart: Callable[[lce.Context], Any] | None = None
    chance: random.Random | None = None

    def talk(self, turns: Sequence[tuple[int, int]]) -> tuple[list[Said], torch.Tensor | None]:
        """Read and generate as many tokens as `turns` say; return the answers, and the logits at the end."""
        context, said = self.engine.new_context(2 * N), []
        for n_read, n in turns:
            ids = tokens(n_read, seed=n_read)
            cuts = self.cuts(context, n_read) if self.may() else []
            for first, last in pairwise((0, *cuts)):
                context = self.moved(self.engine.prefill(ids[first:last], context=context))
            ask = self.beside if self.may() else self.alone
            answer, context = ask(ids[cuts[-1] if cuts else 0 :], context, n)
            said.append(answer)
        return said, self.moved(context).logits

    def may(self) -> bool:
        return self.chance is not None and self.chance.random() < 0.5

    def cuts(self, context: lce.Context, n: int) -> list[int]:
        """Where `n` tokens behind a context are cut: where blocks end, if blocks decide what is chosen."""
        assert self.chance is not None
        if self.engine.setup.method.label not in BY_BLOCKS:
            return random_cuts(self.chance, n)
        block = self.engine.setup.block
        first = block - off_grid(context.cache) - len(context.uncached)
        return [end for end in range(first, n, block) if end > 0 and self.may()]

    def moved(self, context: lce.Context) -> lce.Context:
        if self.may():
            return context.fork() if self.may() else context
        if self.may() and self.restart is not None:
            self.engine, context = self.restart(context)
        return context

    def alone(self, ids: Sequence[int], context: lce.Context, n: int) -> tuple[Said, lce.Context]:
        """The answer of the loop over one context, which may stop on the way."""
        said, logprobs = list[int](), list[float]()
        stops = random_cuts(self.chance, n) if self.chance and self.may() else []
        for first, last in pairwise((0, *stops, n)):
            context = self.moved(context) if first else context
            found = self.engine.generate([] if first else ids, context=context, max_tokens=last - first, **HOW)
            said, logprobs = said + found.token_ids, logprobs + [each.logprob for each in found.logprobs or ()]
            if found.finish_reason != "length":
                break
        return (said, logprobs), context

    def beside(self, ids: Sequence[int], context: lce.Context, n: int) -> tuple[Said, lce.Context]:
        """The answer of a batch, which may keep a beginning of the prompt, beside up to seven others."""
        chance, by_blocks = self.chance, self.engine.setup.method.label in BY_BLOCKS
        assert chance is not None
        with self.engine.batch(max_lanes=8, repeatable=self.may()) as batch:
            kept = ids[: chance.choice([0, *self.cuts(context, len(ids))])]
            if kept and (by_blocks or self.may()):
                within(batch.read(kept, context=context).finish)
            elif kept:
                within(batch.stream([*kept, *tokens(50, seed=500)], context=context, max_tokens=4, stop=[]).finish)
            others = [
                batch.stream(
                    [*([] if by_blocks else kept), *tokens(chance.randint(1, 60), seed=i + 300)],
                    context=context if self.may() else None,
                    max_tokens=chance.randint(1, 12),
                )
                for i in range(chance.randint(0, 7))
            ]
            stream = batch.stream(ids, context=context, keep_context=True, max_tokens=n, **HOW)
            found, *_ = [within(each.finish) for each in (stream, *others)]
        assert stream.context is not None
        return (found.token_ids, [each.logprob for each in found.logprobs or ()]), stream.context


@pytest.mark.timeout(100_000)
@pytest.mark.parametrize("n_cases", [8, pytest.param(50, marks=SLOW)])
def test_random_ways(n_cases: int, folder: Path, tmp_path: Path) -> None:
    """Splits, hits, forks, restarts, stops, lanes and threads, of all methods and types of weights, drawn by seeds."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "max_position_embeddings": 64}
    saved, differing = as_saved(save_tiny(tmp_path, **wide)), list[object]()
    files, firsts, truths = dict[str, Path](), dict[str, lce.Engine](), dict[Any, Any]()
    weights = [each for each in WEIGHTS if panels.arithmetic(getattr(torch, each.get("dtype", "float32")))]
    for seed in range(*map(int, os.environ.get("LCE_BITS_CASES", f"{n_cases}").split("-"))):
        chance = random.Random(seed)
        name, options, turns = chance.choice(available()), dict(chance.choice(weights)), chance.choice(TALKS)
        block, n_threads = chance.choice([64, 64, 32, 7, 7, 100, 1]), chance.choice([1, 2, 3, 4])
        case, source = (name, str(options), turns, name in BY_BLOCKS and block), folder
        if (kind := options.get("weights", "int8")) not in ("int8", "int4"):
            if kind not in files:
                files[kind] = save_gguf(tmp_path / f"{kind}.gguf", saved, kind)
            del options["weights"]
            source = files[kind]
        if (loaded := str((source, options))) not in firsts:
            firsts[loaded] = load(source, "full", **options)
        if case not in truths:
            how = {**options, "block": block if case[-1] else 64, "sharing": firsts[loaded]}
            truths[case] = Way(load(source, name, **how)).talk(turns)
        engine = load(source, name, block=block, sharing=firsts[loaded], **options)
        restart = restarting(source, tmp_path / "a.lce", name, block=block, **options)
        with threads(n_threads):
            (said, logits), (true, last) = Way(engine, restart, chance).talk(turns), truths[case]
        if said != true or logits is None or not torch.equal(logits, last):
            differing.append((seed, *case, block, n_threads))
            print(f"differs: {differing[-1]}", flush=True)
    assert not differing


def asked(batch: Batch, ids: Sequence[int], **how: Any) -> tuple[Said, int]:
    """The answer of a batch, and how many tokens of the prompt were not read for it."""
    found = within(batch.stream(ids, max_tokens=8, **HOW, **how).finish)
    return (found.token_ids, [each.logprob for each in found.logprobs or ()]), found.stats.read_before


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=SLOW) for name in ("pages", "dca"))])
def test_repeatable_answers_follow_from_their_requests(name: str, folder: Path, tmp_path: Path) -> None:
    """Turns whose earlier answers were generated here, or by a batch that kept these in files, are as if asked anew."""
    engine, ids, histories, reads = load(folder, name, block=32), list[int](), list[list[int]](), list[list[int]]()
    for n in (100, 20, 30):
        ids = [*ids, *tokens(n, seed=n)]
        histories.append(ids)
        ids = [*ids, *answer(engine, ids)[0]]
    for repeatable in (False, True, True):  # the third batch finds the second one's files
        with engine.batch(cache_dir=tmp_path, repeatable=repeatable) as batch:
            found = [asked(batch, each) for each in histories]
        reads.append([n for _, n in found])
        if repeatable:
            assert [said for said, _ in found] == [answer(engine, each) for each in histories]
    assert reads[0][:2] == [0, 107]
    # A state may go back to where a chunk begins. The one file has the longest history: self_extend cannot go far back.
    expected = [0, 100, 128, 0 if name == "self_extend" else 100, 128, 166]
    assert all(0 <= most - n < 8 for most, n in zip(expected, reads[1] + reads[2], strict=True)), reads


def test_a_repeatable_answer_behind_a_context_follows_from_it(folder: Path) -> None:
    """A context's generated tokens are not those of a context that was read, nor the other way round."""
    engine, first, prompt = load(folder, "full", block=32), tokens(60, seed=4), tokens(30, seed=5)
    drawn, read = never_stopped(engine, first), engine.prefill([*first, *answer(engine, first)[0]])
    truths = [Way(engine).alone(prompt, each.fork(), 8)[0] for each in (drawn, read)]
    with engine.batch(repeatable=True) as batch:
        for each, truth in [(drawn, truths[0]), (read, truths[1])] * 2:
            assert asked(batch, prompt, context=each)[0] == truth
        assert asked(batch, [*read.token_ids, *prompt]) == (truths[1], 98)
    assert truths[0] != truths[1]
