"""The engine: one text however it is asked for, its figures, and prompts and options that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from tests.checkpoints import tokens

TEXT = "The quick brown fox jumps over the lazy dog, and then over the moon and the other dogs. " * 3


def last_logits(context: lce.Context) -> Tensor:
    assert context.logits is not None
    assert not context.uncached
    return context.logits


# One text, however it is asked for


def test_generate_is_the_stream_joined(engine: lce.Engine) -> None:
    whole = engine.generate(TEXT, max_tokens=30)
    stream = engine.stream(TEXT, max_tokens=30)
    assert "".join(piece.text for piece in stream) == whole.text
    assert stream.result.token_ids == whole.token_ids
    assert stream.result.finish_reason == whole.finish_reason
    assert whole.text


def test_a_generation_may_be_continued(engine: lce.Engine) -> None:
    whole = engine.generate(TEXT, max_tokens=30)
    assert len(whole.token_ids) == 30
    context = engine.prefill(TEXT)
    parts = [engine.generate("", max_tokens=n, context=context) for n in (1, 9, 20)]
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert context.token_ids == engine.tokenizer.encode(TEXT) + whole.token_ids


def test_sampled_text_repeats_with_its_seed(engine: lce.Engine) -> None:
    def draw(seed: int) -> list[int]:
        sampling = lce.Sampling(temperature=1.0, seed=seed)
        return engine.generate(TEXT, max_tokens=20, sampling=sampling).token_ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_document_and_a_question_are_one_prompt(engine: lce.Engine) -> None:
    document, question = tokens(150), tokens(20, seed=1)
    asked = engine.generate(question, max_tokens=20, context=engine.prefill(document))
    assert asked.token_ids == engine.generate(document + question, max_tokens=20).token_ids


def test_a_question_as_text_gets_no_second_beginning(engine: lce.Engine) -> None:
    context = engine.prefill("The old miller")
    engine.generate(" took the bread", max_tokens=1, context=context)
    beginning = engine.tokenizer.encode("The old miller")
    assert beginning[0] == engine.tokenizer.bos_id
    said = beginning + engine.tokenizer.encode(" took the bread", bos=False)
    assert context.token_ids[:-1] == said


@pytest.mark.parametrize("block", [1, 7, 64, 512])
def test_blocks_do_not_matter(engine: lce.Engine, tiny_model: Path, block: int) -> None:
    ids = tokens(170)
    other = lce.load(tiny_model, engine.method, block=block)
    assert (other.logits(ids) - engine.logits(ids)).abs().max() <= 1e-4
    assert (last_logits(other.prefill(ids)) - engine.logits(ids)[-1]).abs().max() <= 1e-4


def test_logits_are_float32_for_every_token(engine: lce.Engine, tiny_model: Path) -> None:
    logits = engine.logits(tokens(70))
    assert logits.shape == (70, 300)
    assert logits.dtype == torch.float32
    assert lce.load(tiny_model, dtype="bfloat16").logits([5]).dtype == torch.float32
    greedy = engine.generate(tokens(70), max_tokens=1)
    assert greedy.token_ids == [int(logits[-1].argmax())]


def test_selecting_everything_is_full_attention(tiny_model: Path) -> None:
    ids = tokens(64)
    full, longheads = (lce.load(tiny_model, name).logits(ids) for name in ("full", "longheads"))
    assert (full - longheads).abs().max() <= 1e-4
    ids = tokens(200)
    full, longheads = (lce.load(tiny_model, name).logits(ids) for name in ("full", "longheads"))
    assert (full - longheads).abs().max() > 0.1


def test_stop_strings_end_the_text(engine: lce.Engine) -> None:
    whole = engine.generate(TEXT, max_tokens=30)
    stop = whole.text[5:8]
    cut = engine.generate(TEXT, max_tokens=30, stop=[stop])
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.finish_reason == "stop"
    assert engine.generate(TEXT, max_tokens=30, stop=stop).text == cut.text
    assert engine.generate(TEXT, max_tokens=30, sampling=lce.Sampling(stop=(stop,))).text == cut.text
    assert "".join(p.text for p in engine.stream(TEXT, max_tokens=30, stop=[stop])) == cut.text


def test_end_tokens_come_from_the_model_and_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    ids = lce.load(tiny_model).generate(TEXT, max_tokens=20).token_ids
    at = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    for file, key in (("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")):
        folder = shutil.copytree(tiny_model, tmp_path / file)
        path = folder / file
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | {key: [2, ids[at]]}))
        ended = lce.load(folder).generate(TEXT, max_tokens=20)
        assert ended.token_ids == ids[:at], file
        assert ended.finish_reason == "stop"


def test_the_figures_of_a_generation(engine: lce.Engine) -> None:
    result = engine.generate(tokens(100), max_tokens=8)
    stats = result.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (100, len(result.token_ids))
    assert 0 < stats.prefill_s <= stats.first_token_s
    assert stats.prefill_tokens_per_s == pytest.approx(100 / stats.prefill_s)
    assert stats.memory["device"] >= 100 * 2 * 2 * 2 * 16 * 4


def test_progress_is_told_after_each_block(engine: lce.Engine) -> None:
    told: list[tuple[int, int]] = []
    engine.generate(tokens(100), max_tokens=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(32, 100), (64, 100), (96, 100), (100, 100)]


def test_writing_moves_nothing(engine: lce.Engine) -> None:
    """Room for the whole answer is made before its first token."""
    context = engine.prefill(tokens(45))
    stream = engine.stream(tokens(5), max_tokens=60, context=context)
    next(stream)
    before = [layer.buffer.k.data_ptr() for layer in context.cache.layers]
    assert len(list(stream)) > 10
    assert [layer.buffer.k.data_ptr() for layer in context.cache.layers] == before


def test_an_engine_is_not_changed_by_use(engine: lce.Engine) -> None:
    def weights() -> dict[str, Tensor]:
        found = {f"{layer.index}.{name}": w for layer in engine.model.layers for name, w in layer.w.items()}
        model = engine.model
        found |= {"embed": model.embed, "head": model.head, "norm": model.final_norm}
        return {name: weight.clone() for name, weight in found.items() if weight is not None}

    before, fields = weights(), dict(vars(engine))
    engine.generate(TEXT, max_tokens=10, sampling=lce.Sampling(temperature=1.0))
    engine.logits(tokens(50))
    engine.trace(tokens(50))
    engine.prefill(TEXT).fork()
    assert vars(engine) == fields
    after = weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_engine_says_what_it_is(tiny_model: Path) -> None:
    assert repr(lce.load(tiny_model, "longheads", block=16, device="cpu")) == (
        "Engine(LongHeads(chunk_size=2, chunks=32, placement='side_by_side', share='head', rank='top', "
        "keep_first=True, keep_last=True, fix_head=False, fix_layer=False), window=64, block=16, cpu, torch.float32)"
    )


# What cannot be


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(engine: lce.Engine, prompt: Any) -> None:
    for call in (engine.generate, engine.stream, engine.prefill, engine.logits, engine.trace):
        with pytest.raises(lce.UsageError, match="the prompt is empty; expected some text"):
            call(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 300], "token id 300 is not in the model's vocabulary; expected 0 to 299"),
        ([-1], "token id -1"),
        ([5, 10**30], "token id 1000000"),
        ([5.0], "the prompt is a list; expected text or token ids"),
        (["a"], "the prompt is a list"),
        (None, "the prompt is a NoneType"),
    ],
)
def test_tokens_that_the_model_lacks_are_refused(engine: lce.Engine, prompt: Any, message: str) -> None:
    context = engine.prefill(tokens(10))
    for call in (engine.generate, engine.stream, engine.prefill, engine.logits, engine.trace):
        with pytest.raises(lce.UsageError, match=message):
            call(prompt)
    with pytest.raises(lce.UsageError, match=message):
        engine.generate(prompt, context=context)
    assert len(context) == 10


def test_token_ids_come_in_any_sequence(engine: lce.Engine) -> None:
    ids = tokens(40)
    expected = engine.logits(ids)
    for same in (tuple(ids), torch.tensor(ids), torch.tensor(ids).numpy()):
        assert torch.equal(engine.logits(same), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 or more"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"stop": [""]}, "none of them empty"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(engine: lce.Engine, values: dict[str, Any], message: str) -> None:
    context = engine.prefill(tokens(10))
    for call in (engine.generate, engine.stream):
        with pytest.raises(lce.UsageError, match=message):
            call("x", context=context, **values)
    assert len(context) == 10
