"""Documents that stay read: with every method, another question about a text finds nearly all of it cached."""

from pathlib import Path

import pytest
import torch

import lce
from lce.engine import kept_files
from lce.methods import registry
from tests.checkpoints import tokens
from tests.command import within
from tests.engine.test_walks import WALKED

MORE = [
    "pages page=4 budget=16 placement=grouped placement.group=4",
]
NAMES = {each.split()[0] for each in (*WALKED, *MORE)}
METHODS = [*WALKED, *MORE, *(name for name in registry.available() if name not in NAMES)]
EVERYDAY = ("self_extend local=8 group", "longheads", MORE[0])
DOCUMENT = tokens(405, seed=1)


@pytest.mark.parametrize(
    "spelled", [pytest.param(each, marks=() if each.startswith(EVERYDAY) else pytest.mark.slow) for each in METHODS]
)
def test_a_document_is_read_once(
    tiny_model: Path, tmp_path: Path, spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_files, "LEAST_IDLE_S", 0.0)
    name, *knobs = spelled.split()
    method = lce.methods.make(name, dict(each.split("=", 1) for each in knobs))
    prompts = [[*DOCUMENT, *tokens(30, seed=seed)] for seed in range(2, 8)]
    engine = lce.load(tiny_model, method, block=16)
    fresh = [engine.generate(ids, max_tokens=4).token_ids for ids in prompts]
    for some in (slice(0, 3), slice(3, 6)):  # the second time as after a restart
        with engine.batch(cache_dir=tmp_path) as batch:
            for ids, expected in zip(prompts[some], fresh[some], strict=True):
                found = within(batch.stream(ids, max_tokens=4).finish)
                assert found.stats.read_before >= (0 if ids is prompts[0] else 0.9 * len(DOCUMENT))
                assert found.token_ids == expected


@pytest.mark.parametrize("name", ["esa compress=none", "infllm block_size=4"])
def test_the_turns_of_a_conversation_are_points_to_return_to(tiny_model: Path, name: str) -> None:
    name, *knobs = f"{name} sinks=4 local=16 top_k=4".split()
    engine = lce.load(tiny_model, lce.methods.make(name, dict(each.split("=", 1) for each in knobs)), block=16)
    turns = [tokens(61, seed=seed) for seed in range(4)]
    context = engine.new_context(300)
    for turn in turns:
        engine.prefill(turn, context=context)
    before = context.logits
    context.truncate(200)
    assert context.cache.n_tokens == 192
    again = engine.prefill(turns[3][200 - 183 :], context=context).logits
    assert before is not None
    assert again is not None
    assert torch.equal(before, again)


@pytest.mark.parametrize(
    "spelled", [pytest.param(each, marks=() if each.startswith(EVERYDAY) else pytest.mark.slow) for each in METHODS]
)
def test_another_conversation_that_begins_alike_finds_its_beginning(tiny_model: Path, spelled: str) -> None:
    """Also when the first one has grown so long that nothing can go back to its beginning."""
    name, *knobs = spelled.split()
    method = lce.methods.make(name, dict(each.split("=", 1) for each in knobs))
    engine, system = lce.load(tiny_model, method, block=16), DOCUMENT[:96]
    history = [*system, *tokens(16, seed=2)]
    with engine.batch() as batch:
        for turn in range(12):
            found = within(batch.stream(history, max_tokens=4).finish)
            history += [*found.token_ids, *tokens(40, seed=10 + turn)]
        other = [*system, *tokens(20, seed=3)]
        found = within(batch.stream(other, max_tokens=4).finish)
        assert found.stats.read_before >= 80
        assert found.token_ids == engine.generate(other, max_tokens=4).token_ids
        assert len(batch._prefixes._entries) <= 5
        again = within(batch.stream(history, max_tokens=4).finish)
        assert again.stats.read_before >= len(history) - 41 - 16
