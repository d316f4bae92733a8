"""Sampling: what each cut leaves, seeds, refusals. Scores of tokens: those of the whole logits, for any block."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

import lce
from lce.engine.answer import Sampler, probabilities_of
from lce.engine.arguments import Sampling
from lce.errors import shown
from tests.checkpoints import save_tokenizer, tokens
from tests.gguf_models import as_saved, save_gguf

# Logits on a grid, so that no two that differ are closer than float32 can tell; ties are frequent.
LOGITS = st.lists(st.integers(-200, 200), min_size=1, max_size=30).map(lambda grid: torch.tensor(grid) / 16.0)


@pytest.mark.parametrize("extreme", [{"temperature": 1e300, "top_k": 1}, {"top_p": 1e-300}, {"temperature": 1e-300}])
def test_extreme_cuts_keep_the_likeliest(extreme: dict[str, Any]) -> None:
    found = probabilities_of(torch.tensor([1.0, 3.0, 2.0]), Sampling(**{"temperature": 1.0, **extreme}))
    assert found.tolist() == [0, 1, 0]


@given(LOGITS, st.sampled_from([0.25, 1.0, 4.0]), st.integers(0, 35), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=200, deadline=None)
def test_cuts_leave_a_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    before, untouched = (logits.double() / temperature).softmax(-1), logits.clone()
    after = probabilities_of(logits, Sampling(temperature, top_k, top_p, min_p)).double()
    assert torch.equal(logits, untouched)
    kept = after > 0
    assert after.sum().item() == pytest.approx(1, abs=1e-5)
    assert kept[logits.argmax()]
    # The likelier are kept before the less likely, in their old proportions.
    if not kept.all():
        assert before[kept].min() >= before[~kept].max() - 1e-12
    torch.testing.assert_close(after[kept], before[kept] / before[kept].sum(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("n", [1, 30, 20_000])
def test_top_p_is_that_of_a_full_sort(n: int, spread: float, top_p: float) -> None:
    """Bit by bit, for even and for peaked distributions, with ties: logits are rounded to sixteenths."""
    random = torch.Generator().manual_seed(1)
    logits = (torch.randn(n, generator=random) * spread * 16).round() / 16
    probabilities = (logits - logits.max()).softmax(-1)
    ranked, order = probabilities.sort(descending=True, stable=True)
    probabilities[order[ranked.cumsum(0) - ranked >= top_p]] = 0
    got = probabilities_of(logits, Sampling(temperature=1.0, top_p=top_p))
    assert torch.equal(got, probabilities / probabilities.sum())


def test_the_cuts_come_in_their_order() -> None:
    """top_p counts what top_k left: 3/7 and 2/7 and 2/7 of 0.3, 0.2, 0.2, so 0.6 takes two of the three."""

    def n_kept(logits: Tensor, **cuts: Any) -> int:
        kept = (probabilities_of(logits, Sampling(temperature=1.0, **cuts)) > 0).tolist()
        assert kept == sorted(kept, reverse=True)
        return sum(kept)

    logits = torch.tensor([0.3, 0.2, 0.199, 0.151, 0.15]).log()
    assert (n_kept(logits, top_k=3, top_p=0.6), n_kept(logits, top_p=0.6)) == (2, 3)
    assert n_kept(logits, min_p=0.6) == 3  # of the likeliest: 1, .67, .66, .5, .5
    assert n_kept(torch.tensor([1.0, 2.0, 1.0, 0.0]), top_k=2) == 3


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.tensor([1.0, -torch.inf, 2.0, -torch.inf])
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.999), Sampling(1.0, min_p=0.01)):
        assert (probabilities_of(logits, sampling) > 0).tolist() == [True, False, True, False]
    assert probabilities_of(torch.tensor([1.0, 3.0, 2.0]), Sampling(1e-320)).tolist() == [0, 1, 0]


def test_draws_follow_the_distribution() -> None:
    shares, sampler = torch.tensor([0.5, 0.3, 0.2, 0.0]), Sampler(Sampling(temperature=1.0, seed=5))
    drawn = torch.tensor([sampler.pick(shares.log()) for _ in range(3000)])
    torch.testing.assert_close(torch.bincount(drawn, minlength=4) / 3000, shares, rtol=0, atol=0.03)


def test_a_seed_repeats_and_none_does_not() -> None:
    logits = torch.zeros(1000)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.pick(logits) for _ in range(8)]

    for seed in (0, 1, 2**63 - 1):
        assert draw(seed) == draw(seed)
    assert draw(1) != draw(2)
    assert draw(1) != draw(1 + 2**32), "all bits of a seed count"
    assert draw(None) != draw(None)


def test_sampling_neither_reads_nor_moves_the_global_random_numbers() -> None:
    logits = torch.zeros(1000)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = Sampler(Sampling(temperature=1.0, seed=3)).pick(logits)
    Sampler(Sampling(temperature=1.0)).pick(logits)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert Sampler(Sampling(temperature=1.0, seed=3)).pick(logits) == first


NAN, INF = float("nan"), float("inf")
NO_BIASES = [{-1: 1.0}, {1: 101}, {1: NAN}, {1: INF}, {1: "2"}, {1: True}, {"1": 1.0}, {1.5: 1.0}, [1], 3, None]
REFUSED: list[tuple[str, list[Any], str]] = [
    ("temperature", [-0.1, NAN, INF, "hot"], "a number, 0 or more"),
    ("top_k", [-1, 2.5], "a whole number, 0 (off) or more"),
    ("top_p", [0.0, 1.01, NAN], "more than 0 and at most 1"),
    ("min_p", [-0.01, 1.01], "0 (off) to 1"),
    ("seed", [-1, 2**63, 1.5], "a whole number from 0 to 2**63 - 1"),
    ("repetition_penalty", [0, NAN], "0.01 to 100; 1 is off"),
    ("presence_penalty", [2.1], "-2 to 2; 0 is off"),
    ("frequency_penalty", ["1"], "-2 to 2; 0 is off"),
    ("stop", [("a", ""), "", (3,)], "strings, none of them empty, or a function of the text"),
    ("logit_bias", NO_BIASES, "token ids with numbers from -100 to 100"),
]


@pytest.mark.parametrize(("knob", "values", "expected"), REFUSED)
def test_values_that_cannot_be_are_refused(knob: str, values: list[Any], expected: str) -> None:
    for value in values:
        with pytest.raises(lce.UsageError, match=re.escape(f"{knob} is {shown(value)}; expected {expected}")):
            Sampling(**{knob: value})


IDS = tokens(150)
PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.4},
]


def slowly_penalised(logits: Tensor, prompt: list[int], answer: list[int], knobs: dict[str, float]) -> Tensor:
    processor = RepetitionPenaltyLogitsProcessor(knobs.get("repetition_penalty", 1.0))
    logits = processor(torch.tensor([prompt + answer]), logits[None].clone())[0]
    for token_id in set(answer):
        logits[token_id] -= knobs.get("presence_penalty", 0.0)
    for token_id in answer:
        logits[token_id] -= knobs.get("frequency_penalty", 0.0)
    return logits


@pytest.mark.parametrize("knobs", PENALTIES, ids=str)
def test_penalties_are_those_of_the_field(engine: lce.Engine, knobs: dict[str, float]) -> None:
    """Repetition as in transformers, behind a context, too; presence and frequency as their definitions have them."""
    found = engine.generate(IDS[50:90], context=engine.prefill(IDS[:50]), max_tokens=20, logprobs=1, **knobs)
    logits = engine.logits(IDS[:90] + found.token_ids)[89:-1]
    rows = [slowly_penalised(x, IDS[:90], found.token_ids[:n], knobs) for n, x in enumerate(logits)]
    assert [int(row.argmax()) for row in rows] == found.token_ids != engine.generate(IDS[:90], max_tokens=20).token_ids
    own = [float(x.log_softmax(-1)[i]) for x, i in zip(logits, found.token_ids, strict=True)]
    assert [each.logprob for each in found.logprobs or []] == pytest.approx(own, abs=1e-4), "the model's own"
    sampler = Sampler(Sampling(temperature=0.8, seed=1, **knobs), IDS[:90])
    plain = Sampler(Sampling(temperature=0.8, seed=1))
    for n in range(20):
        assert sampler.pick(logits[n], found.token_ids[:n]) == plain.pick(rows[n])


def test_what_a_checkpoint_recommends(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    plain, file = lce.load(tiny_model), tmp_path / "generation_config.json"
    cases: list[tuple[dict[str, Any], Sampling | None]] = [
        ({"eos_token_id": 1, "temperature": None}, None),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Sampling(0.6, top_p=0.9)),
        ({"top_k": 20, "repetition_penalty": 1.05}, Sampling(1.0, top_k=20, repetition_penalty=1.05)),
        ({"do_sample": False, "temperature": 0.6}, Sampling()),
        ({"do_sample": True}, Sampling(1.0)),
    ]
    for fields, expected in cases:
        file.write_text(json.dumps(fields))
        engine = lce.load(tmp_path)
        assert (plain.setup.recommended_sampling, engine.setup.recommended_sampling) == (None, expected)
        ours, theirs = (each.setup.identity.fingerprint() for each in (engine, plain))
        assert ours == theirs, "contexts of either open in the other"
        assert engine.generate(IDS, max_tokens=5).token_ids == plain.generate(IDS, max_tokens=5).token_ids, "greedy"
    file.write_text('{"temperature": "hot"}')
    with pytest.raises(lce.ModelError, match=r"generation_config.json: temperature is 'hot'; .* temperature of 0"):
        _ = lce.load(tmp_path).setup.recommended_sampling


def slow(engine: lce.Engine, ids: list[int], first: int = 1) -> tuple[Tensor, Tensor]:
    """What `score` is to give, from the logits of the whole text."""
    logits, targets = engine.logits(ids)[:-1], torch.tensor(ids[1:])
    logprobs = logits.double().log_softmax(-1)[torch.arange(len(targets)), targets]
    return logprobs[first - 1 :], (logits.argmax(-1) == targets)[first - 1 :]


def equal(found: lce.TokenScores, expected: tuple[Tensor, Tensor]) -> bool:
    close = torch.allclose(found.logprobs.double(), expected[0], atol=1e-4, rtol=0)
    return close and found.logprobs.dtype == torch.float32 and torch.equal(found.likeliest, expected[1])


@pytest.mark.parametrize("first", [1, 33, 149, 150])
def test_scores_are_those_of_the_whole_logits(engine: lce.Engine, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr("lce.engine.scoring.LOGITS_AT_ONCE", 7 * engine.setup.model.config.vocab_size)
    found = engine.score(IDS, first=first)
    assert (found.first, len(found)) == (first, len(IDS) - first)
    assert equal(found, slow(engine, IDS, first))


def test_no_more_logits_are_made_than_fit(engine: lce.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    head = engine.setup.model.logits
    monkeypatch.setattr(engine.setup.model, "logits", lambda x, **how: rows.append(len(x)) or head(x, **how))
    monkeypatch.setattr("lce.engine.scoring.LOGITS_AT_ONCE", 7 * engine.setup.model.config.vocab_size)
    engine.score(IDS, first=140)
    assert max(rows) <= 7
    assert sum(rows) == 10 + 5  # those of the scored tokens, and of each block's last


def test_scores_behind_a_context_are_those_of_the_text(engine: lce.Engine) -> None:
    expected = slow(engine, IDS)
    context = engine.new_context(len(IDS))
    parts = [engine.score(IDS[a:b], context=context) for a, b in ((0, 1), (1, 60), (60, 61), (61, 150))]
    assert [part.first for part in parts] == [1, 0, 0, 0]
    found = lce.TokenScores(1, *(torch.cat([getattr(p, name) for p in parts]) for name in ("logprobs", "likeliest")))
    assert equal(found, expected)
    assert context.token_ids == IDS


def test_scores_behind_a_context_that_was_cut(engine: lce.Engine) -> None:
    context = engine.prefill(IDS)
    context.truncate(100)
    assert equal(engine.score(IDS[100:], context=context), slow(engine, IDS, 100))


def test_an_interrupted_score_leaves_the_context_as_it_was(engine: lce.Engine) -> None:
    context = engine.prefill(IDS[:50])
    with pytest.raises(KeyboardInterrupt):
        engine.score(IDS[50:], context=context, progress=Mock(side_effect=KeyboardInterrupt))
    assert context.token_ids == IDS[:50]
    assert equal(engine.score(IDS[50:], context=context), slow(engine, IDS, 50))


def test_what_cannot_be_scored_is_refused(engine: lce.Engine) -> None:
    for first, said in ((151, "first is 151; expected 150 or less"), (0, "first is 0")):
        with pytest.raises(lce.UsageError, match=said):
            engine.score(IDS, first=first)
    assert len(engine.score([], context=engine.prefill(IDS[:5]))) == 0


def test_biases_are_added_before_penalties_and_cuts() -> None:
    logits = torch.tensor([3.0, 2.0, -1.0, 0.0])
    untouched = logits.clone()
    assert Sampler(Sampling(logit_bias={2: 5.0})).pick(logits) == 2
    assert Sampler(Sampling(logit_bias={0: -100, 1: -100, 2: -100})).pick(logits) == 3
    # 2 has the logit 4 with its bias, and half of that with the penalty.
    assert Sampler(Sampling(logit_bias={2: 5.0}, repetition_penalty=2.0)).pick(logits, [2]) == 0
    draws = {Sampler(Sampling(temperature=1.0, top_k=1, logit_bias={3: 4.0}, seed=i)).pick(logits) for i in range(9)}
    assert draws == {3}
    assert torch.equal(logits, untouched)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_a_constraint_masks_first_and_is_told_each_token(how: dict[str, Any], engine: lce.Engine) -> None:
    class Even:
        def __init__(self) -> None:
            self.told: list[int] = []

        def apply(self, logits: Tensor) -> Tensor:
            allowed = torch.arange(len(logits)) % 2 == len(self.told) % 2
            return logits.masked_fill(~allowed, -torch.inf)

        def accept(self, token_id: int) -> None:
            self.told.append(token_id)

    constraint = Even()
    found = engine.generate(tokens(40), max_tokens=8, constraint=constraint, logprobs=0, **how)
    assert constraint.told[: len(found.token_ids)] == found.token_ids
    assert [token_id % 2 for token_id in found.token_ids] == [i % 2 for i in range(len(found.token_ids))]
    free = engine.generate(tokens(40), max_tokens=1, logprobs=300).logprobs
    assert free is not None
    assert found.logprobs is not None
    assert found.logprobs[0].logprob == dict(free[0].top)[found.token_ids[0]]  # of the model, without the mask


def test_what_a_gguf_file_recommends(tiny_model: Path, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    named = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.05}
    file = save_gguf(
        tmp_path / "a.gguf", as_saved(tiny_model), **{f"general.sampling.{k}": x for k, x in named.items()}
    )
    own = Sampling(0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.05)
    assert lce.load(file).setup.recommended_sampling == own
