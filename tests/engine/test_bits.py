"""An answer's bits follow from what was read and what was generated, and from nothing else."""

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.kernels.cpu import panels
from lce.methods import available
from tests.checkpoints import save_tiny, tokens
from tests.running import threads

# Queries of a block choose, or are corrected, together; a block begins where a kept prompt ends. Where that is within a
# block, esa and infllm choose for fewer queries, xattention attends all keys, and delta corrects no block of one query.
BY_BLOCKS = {"delta", "esa", "infllm", "xattention"}
METHODS = [name for name in available() if name not in BY_BLOCKS]
KNOBS: dict[str, dict[str, Any]] = {"longheads": {"chunk_size": 8}, "esa": {"compress": "pca", "low_dim": 4}}
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 96, "intermediate_size": 272, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return save_tiny(tmp_path_factory.mktemp("bits"), **shape)


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


def random_cuts(chance: random.Random) -> list[int]:
    cuts, at = [], 0
    while (at := at + chance.choice([1, 1, 2, 5, 8, 9, 31, 64, 100])) < N:
        cuts.append(at)
    return cuts[: chance.randint(1, len(cuts))]


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(each, marks=SLOW) for each in KINDS[1:])], ids=str)
@pytest.mark.parametrize("name", METHODS)
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


@pytest.mark.parametrize("name", available())
def test_no_restart(name: str, folder: Path, tmp_path: Path) -> None:
    """A prompt that is kept, saved, and opened by another process' engine, as one that is kept in memory."""
    ids, engine, chance = tokens(N, seed=1), load(folder, name, block=64), random.Random(name)
    restart, truth = restarting(folder, tmp_path / "a.lce", name, block=64), answer(engine, ids)
    for cuts in ([64], [128, 192], random_cuts(chance), random_cuts(chance)):
        found = answer(engine, ids, cuts, restart=restart)
        at_ends = not any(cut % 64 for cut in cuts)
        assert found == (truth if at_ends or name not in BY_BLOCKS else answer(engine, ids, cuts)), cuts


@pytest.mark.parametrize("name", available())
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
