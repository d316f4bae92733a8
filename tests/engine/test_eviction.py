"""Contexts of which keys were evicted: as a plain, slow model with masks says, in memory and in files."""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import lce
from lce.cache.kv import Eviction
from lce.cache.limits import Limits
from lce.cache.manifest import EVICTED, FORMAT
from lce.engine import eviction
from lce.engine.eviction import attention_peaks, best_rows, repetitions
from lce.errors import DataError, UsageError, WindowWarning
from lce.methods import Full
from lce.weights.safetensors_file import read_header
from tests.checkpoints import save_tiny, tokens
from tests.engine.test_graph import Again, graph_of, loaded
from tests.engine.test_saving import forged, go_on, manifest_of

N, WINDOW, BLOCK = 150, 1024, 32
DOCUMENT, QUESTION = tokens(N), tokens(9, 1)


def load(folder: Path, **options: Any) -> lce.Engine:
    return lce.load(folder, **{"window": WINDOW, "block": BLOCK, **options})


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 150 tokens is repeated in three passes, each of several blocks."""
    monkeypatch.setattr(eviction, "CHUNK", 64)
    monkeypatch.setattr(eviction, "LEAST", 16)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> lce.Engine:
    return load(tiny_model)


@pytest.fixture
def kept(engine: lce.Engine) -> lce.Context:
    return engine.evict(engine.prefill(DOCUMENT), 0.5)


@pytest.fixture(scope="module")
def peer(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager")


@torch.inference_mode()
def plain(peer: Any, ids: Sequence[int], masks: Sequence[Tensor] = ()) -> tuple[Tensor, list[Tensor]]:
    """The logits `[N, vocab]`, and each layer's attention weights `[H, N, N]`.

    Masks `[H, N, N]` say for each layer which keys a query sees; without masks it sees all earlier ones.
    """
    with ExitStack() as hooks:
        for layer, mask in zip(peer.model.layers, masks, strict=False):
            bias = torch.zeros(1, *mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)
            hook = layer.self_attn.register_forward_pre_hook(
                lambda _, args, how, bias=bias: (args, how | {"attention_mask": bias}), with_kwargs=True
            )
            hooks.callback(hook.remove)
        found = peer(torch.tensor([ids]), output_attentions=True, use_cache=False)
    return found.logits[0], [weights[0] for weights in found.attentions]


def plain_peaks(peer: Any, engine: lce.Engine) -> list[Tensor]:
    peaks = [torch.zeros(2, N, dtype=torch.float64) for _ in range(2)]
    first, later = (engine.tokenizer.encode(x, bos=False) for x in (eviction.FIRST, eviction.LATER))
    for start in range(0, N, 64):
        chunk = [*range(start, min(start + 64, N))]
        prompt = [*later, *DOCUMENT[start - 8 : start]] if start else first
        ids = [*DOCUMENT, *prompt, *(DOCUMENT[i] for i in chunk)]
        columns = [*(range(4) if start else []), *chunk, *range(N, len(ids))]
        for found, weights in zip(peaks, plain(peer, ids)[1], strict=True):
            share = weights[:, N:, chunk] / weights[:, N:, columns].sum(-1, keepdim=True)  # [H, T, n]
            found[:, chunk] = share.unflatten(0, (2, -1)).amax(dim=(1, 2))
    return peaks


def plain_masks(rows: Sequence[Tensor], n: int) -> list[Tensor]:
    """Return masks `[H, N, N]` of each layer: tokens after the document see its kept keys, and each other."""
    found = [torch.ones(4, n, n, dtype=torch.bool).tril() for _ in rows]
    for mask, kept_rows in zip(found, rows, strict=True):
        for head in range(4):
            mask[head, N:, :N] &= torch.zeros(N, dtype=torch.bool).index_fill(0, kept_rows[head // 2], True)
    return found


def scored(engine: lce.Engine, context: lce.Context) -> list[Tensor]:
    passes = repetitions(context.token_ids, engine.tokenizer, None)
    return attention_peaks(engine.setup, context, passes, lambda done, total: None)


def rows_of(engine: lce.Engine, n_rows: int = N // 2) -> list[Tensor]:
    return [best_rows(peaks, n_rows) for peaks in scored(engine, engine.prefill(DOCUMENT))]


@pytest.mark.parametrize("block", [512, BLOCK, 7])
def test_scores_are_those_of_the_definition(block: int, tiny_model: Path, peer: Any) -> None:
    """The largest weight over queries and grouped heads; the softmax over the sinks, the chunk and the pass itself."""
    engine = load(tiny_model, block=block)
    context = engine.prefill(DOCUMENT)
    logits = context.logits
    for ours, theirs in zip(scored(engine, context), plain_peaks(peer, engine), strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-5)
    assert (len(context), context.cache.length) == (N, N)
    assert torch.equal(context.logits, logits)


def test_each_head_keeps_its_best_keys_and_the_first_four(peer: Any, engine: lce.Engine) -> None:
    for ours, theirs in zip(rows_of(engine), plain_peaks(peer, engine), strict=True):
        for head in range(2):
            others = theirs[head, 4:].argsort(descending=True)[: N // 2 - 4] + 4
            assert ours[head].tolist() == sorted([0, 1, 2, 3, *others.tolist()])
    assert len({tuple(x.tolist()) for x in ours}) > 1, "heads differ"


def test_passes_fit_the_window(engine: lce.Engine) -> None:
    """A pass ends within `longest` tokens if 16 tokens can be repeated there; every token is repeated once."""
    first, later = (len(engine.tokenizer.encode(x, bos=False)) for x in (eviction.FIRST, eviction.LATER))
    for longest, size in ((None, 64), (WINDOW, 64), (N + later + 8 + 20, 20), (N, 16)):
        passes = repetitions(DOCUMENT, engine.tokenizer, longest)
        assert [each.start for each in passes] == [*range(0, N, size)]
        assert [each.stop for each in passes] == [*range(size, N, size), N]
        assert [len(each.ids) for each in passes][:2] == [first + size, later + 8 + size]
    begun = repetitions([engine.tokenizer.bos_id, *DOCUMENT], engine.tokenizer, None)[0]
    assert begun.ids[first:] == DOCUMENT[:63], "the beginning of a text is not repeated"


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_later_tokens_attend_what_is_kept(share: float, engine: lce.Engine, peer: Any) -> None:
    kept = engine.evict(engine.prefill(DOCUMENT), share)
    assert kept.cache.length == round(share * N)
    assert len(kept) == kept.cache.n_tokens == N
    ids = [*QUESTION, *engine.generate(QUESTION, context=kept.fork(), max_tokens=5).token_ids, *tokens(40, 3)]
    masks = plain_masks(rows_of(engine, round(share * N)), N + len(ids))
    truth = plain(peer, [*DOCUMENT, *ids], masks)[0][N:].float()
    assert not torch.allclose(truth, engine.logits([*DOCUMENT, *ids])[N:], atol=0.1), "evicted keys matter"
    assert torch.allclose(kept.logits, engine.prefill(DOCUMENT).logits, atol=1e-4)
    for n, more in ((9, ids[:9]), (12, ids[9:12]), (len(ids), ids[12:])):
        engine.prefill(more, context=kept)
        assert torch.allclose(kept.logits, truth[n - 1], atol=1e-4)
    scores = engine.score(ids, context=engine.evict(engine.prefill(DOCUMENT), share)).logprobs
    picked = truth.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.allclose(torch.as_tensor(scores)[1:].double(), picked.double(), atol=1e-3)


def test_recorded_decode_steps_agree(tiny_model: Path) -> None:
    said = []
    for tape in (None, Again):
        engine = loaded(tiny_model, Full(), tape, window=WINDOW)
        kept = engine.evict(engine.prefill(DOCUMENT, length=300), 0.5)
        said.append(engine.generate(QUESTION, context=kept, max_tokens=20).token_ids)
    assert graph_of(engine, kept).n_replayed > 10
    assert said[0] == said[1]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int8-device"])
@pytest.mark.parametrize("budget", [True, False])
@pytest.mark.covering
def test_saving_and_going_on_equals_never_having_stopped(
    budget: bool, kv_dtype: str, tiny_model: Path, tmp_path: Path
) -> None:
    straight = load(tiny_model, kv_dtype=kv_dtype)
    least = {"kv_host_budget": Limits(straight.setup.layout).least_budget, "spill_dir": tmp_path} if budget else {}
    engine, document, path = load(tiny_model, kv_dtype=kv_dtype, **least), tokens(600), tmp_path / "a.lce"
    truth, context = straight.evict(straight.prefill(document), 0.6), engine.evict(engine.prefill(document), 0.6)
    assert truth.cache.length == context.cache.length == 360
    assert go_on((straight, truth), (engine, context), path).cache.evicted == Eviction(600, 360)
    assert manifest_of(path)["format"] == EVICTED


def test_the_file_is_smaller_and_says_so(engine: lce.Engine, tmp_path: Path) -> None:
    whole, half, again = (tmp_path / name for name in ("whole", "half", "again"))
    told: list[tuple[int, int]] = []
    engine.prefill_file(DOCUMENT, whole)
    stats = engine.prefill_file(DOCUMENT, half, keep=0.5, progress=lambda *x: told.append(x))
    assert (told[-1], told) == ((2 * N, 2 * N), sorted(told))
    assert min(stats.prefill_s, stats.more_s["evict"]) > 0
    rows = [json.loads(json.dumps(read_header(path)[0]["layers.1.kv"].shape)) for path in (whole, half)]
    assert [x[1] for x in rows] == [N, N // 2]
    info = lce.info(half)
    assert isinstance(info, lce.ContextInfo)
    assert (info.tokens, info.cached, info.cached - info.rows, info.format) == (N, N, N // 2, EVICTED)
    assert (lce.info(whole).cached - lce.info(whole).rows, lce.info(whole).format) == (0, FORMAT)
    opened = engine.open_context(half)
    engine.prefill_file(QUESTION, again, context=opened)
    engine.prefill_file(QUESTION, half, context=opened)  # the file that it was opened from
    engine.prefill(QUESTION, context=opened)
    for path in (again, half):
        other = engine.open_context(path)
        assert (other.token_ids, other.cache.evicted) == (opened.token_ids, (N, N // 2))
        assert torch.equal(other.logits, opened.logits)


def test_everything_kept_is_untouched(engine: lce.Engine, tmp_path: Path) -> None:
    engine.prefill_file(DOCUMENT, tmp_path / "whole", keep=1.0)
    assert manifest_of(tmp_path / "whole")["format"] == FORMAT
    context = engine.prefill(DOCUMENT)
    for each in (engine.evict(context, 1), engine.evict(context, 0.999), engine.open_context(tmp_path / "whole")):
        assert each.cache.fixed == 0
        assert torch.equal(engine.prefill(QUESTION, context=each).logits, engine.prefill([*DOCUMENT, *QUESTION]).logits)


def test_forks_and_going_back(engine: lce.Engine, kept: lce.Context) -> None:
    said = engine.generate(QUESTION, context=kept.fork(), max_tokens=6).token_ids
    fork = kept.fork()
    engine.generate(tokens(30, 4), context=fork, max_tokens=3)
    fork.truncate(N)
    assert engine.generate(QUESTION, context=fork, max_tokens=6).token_ids == said
    fork.truncate(N + 5)
    assert engine.generate(QUESTION[5:], context=fork, max_tokens=6).token_ids == said
    gone = "cannot go back into its first 150 tokens"
    with pytest.raises(UsageError, match=f"{gone}, of which keys were evicted; prefill"):
        fork.truncate(N - 1)
    fork.truncate(N)
    with pytest.raises(UsageError, match=gone):
        engine.generate("", context=fork)
    with pytest.raises(UsageError, match="cannot go back"):
        fork.truncate(0)
    assert (engine.generate(QUESTION, context=fork, max_tokens=6).token_ids, len(kept)) == (said, N)


def test_a_failure_changes_no_context(engine: lce.Engine, kept: lce.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    context = engine.prefill(DOCUMENT)
    with monkeypatch.context() as patched:
        patched.setattr(eviction.AttentionPeaks, "observe", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.evict(context, 0.5)
        engine.generate(QUESTION, context=context.fork(), max_tokens=1)
    again = engine.evict(context, 0.5)
    assert torch.equal(engine.prefill(QUESTION, context=again).logits, engine.prefill(QUESTION, context=kept).logits)


def test_tokens_that_are_not_read_yet_are_read_first(engine: lce.Engine) -> None:
    context = engine.prefill(DOCUMENT)
    engine.generate(QUESTION, context=context, max_tokens=4)
    assert context.uncached
    kept = engine.evict(context, 0.5)
    assert (kept.token_ids, kept.cache.n_tokens) == (context.token_ids, len(kept))
    assert kept.logits is not None


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, math.nan, "half", True, None])
def test_shares_that_cannot_be_kept(keep: Any, engine: lce.Engine) -> None:
    with pytest.raises(UsageError, match="; expected a share above 0, at most 1"):
        engine.evict(engine.prefill(DOCUMENT), keep)


def test_what_is_refused(engine: lce.Engine, kept: lce.Context, tiny_model: Path, tmp_path: Path) -> None:
    again = lambda: engine.prefill_file(QUESTION, tmp_path / "a", context=kept, keep=0.5)  # noqa: E731
    for call in (lambda: engine.evict(kept, 0.5), again):
        with pytest.raises(UsageError, match="were evicted before, which is done once"):
            call()
    with pytest.raises(UsageError, match="checkpoint_every is for a prefill on one rank that keeps all keys"):
        engine.prefill_file(DOCUMENT, tmp_path / "a", keep=0.5, checkpoint_every=32)
    with pytest.raises(UsageError, match="made by another engine"):
        load(tiny_model).evict(kept, 0.5)
    for name in ("rerope", "longheads"):
        other = load(tiny_model, method=name)
        with pytest.raises(UsageError, match=f"under the method full alone, and this engine has {name}; load full"):
            other.prefill_file(DOCUMENT, tmp_path / "a", keep=0.5)
    sliding = load(save_tiny(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=40))
    with pytest.raises(UsageError, match="not evicted of a model with a sliding window"):
        sliding.evict(sliding.prefill(DOCUMENT), 0.5)
    (tmp_path / "a").write_text("something else")
    with pytest.raises(UsageError, match="exists"):
        engine.prefill_file(DOCUMENT, tmp_path / "a", keep=0.5)
    short = lce.load(tiny_model, block=BLOCK)
    with pytest.warns(WindowWarning, match="more than the 64"):
        short.evict(short.prefill(tokens(60)), 0.5)


def test_a_file_cannot_lie_about_its_eviction(kept: lce.Context, engine: lce.Engine, tmp_path: Path) -> None:
    kept.save(tmp_path / "a")
    lies = ([N, N], [N, 0], [N + 1, N // 2], [N, N // 2 + 1], "x", [N], None)
    for number, change in enumerate(({"format": FORMAT}, *({"evicted": lie} for lie in lies))):
        path = tmp_path / str(number)
        forged(tmp_path / "a", path, lambda manifest, small, change=change: manifest.update(change))
        with pytest.raises(DataError, match="its header contradicts its contents"):
            engine.open_context(path)
