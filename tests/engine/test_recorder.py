"""A decode step that replays the kernels of an earlier one computes the same as the model's own code."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import lce
from lce.cache.layer import LayerCache
from lce.engine.lanes import Recorder, forward
from lce.engine.recorder import KernelLists
from lce.engine.running import lane_of
from lce.kernels.runtime.layer_jobs import LayerJobs
from lce.kernels.runtime.threads import Jobs
from lce.methods.step import Step
from lce.models.layers import Layer, families
from lce.weights.gguf_packed import SCHEMES
from lce.weights.packed import Stacked
from tests.checkpoints import TINY, save_tiny, tokens
from tests.command import together
from tests.gguf_models import as_saved, save_gguf

T = TypeVar("T")
KNOBS: dict[str, dict[str, object]] = {"esa": {"compress": "none"}}  # by default it needs maps that were learned
NESTED = {"gemma3": "gemma3_text", "mistral3": "ministral3"}  # the family of the text model
CONVERTING = ("llama", "qwen3", "gemma3_text", "olmo2", "phi3")  # each with norms of its own, or channels in an order
QUICK = ("Q4_K", "Q6_K")  # kernels of a layout compile for some seconds


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers."""
    return save_tiny(tmp_path_factory.mktemp("deep"), num_hidden_layers=4)


def steps(engine: lce.Engine) -> list[tuple[int, float]]:
    """Eight tokens behind a text of 90, and the logarithms of their probabilities."""
    found = engine.generate(tokens(90), max_tokens=8, temperature=0, logprobs=1)
    return [(each.token_id, each.logprob) for each in found.logprobs or []]


def calls_of(owner: type[T], name: str, patch: pytest.MonkeyPatch) -> list[T]:
    """The objects whose method of this name is called, as it is called."""
    found, method = list[T](), getattr(owner, name)

    def noted(self: T, *args: Any) -> Any:
        found.append(self)
        return method(self, *args)

    patch.setattr(owner, name, noted)
    return found


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Jobs]:
    """The recorded kernels that were run again."""
    return calls_of(Jobs, "linked", monkeypatch)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> list[LayerJobs]:
    """The kernels of one layer's attention that were run for other layers."""
    return calls_of(LayerJobs, "set", monkeypatch)


def save_family(folder: Path, kind: str, **changes: Any) -> Path:
    text = NESTED.get(kind, kind)
    own = {"architectures": [families()[text].architecture], "model_type": text}
    own |= {"partial_rotary_factor": 0.75, "sliding_window": 32} if kind == "phi3" else {}
    if kind in NESTED:
        own = {"architectures": [families()[kind].architecture], "model_type": kind, "text_config": TINY | own}
    return save_tiny(folder, **own, **changes)


def assert_recorded(load: Callable[..., lce.Engine], replayed: list[Jobs], *methods: lce.Method) -> None:
    """Steps of one context and of three are replayed, with the bits of those that are not recorded."""

    def answers(method: lce.Method) -> list[Any]:
        engine = load(method=method)
        three = engine.generate([tokens(30, seed=i) for i in range(3)], max_tokens=5, temperature=0, logprobs=1)
        return [steps(engine), *(each.logprobs for each in three)]

    for method in methods:
        replayed.clear()
        found = answers(method)
        assert replayed, method
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KernelLists, "layers", Recorder.layers)
            assert found == answers(method), method


CHUNKS = lce.methods.LongHeads(chunk_size=8)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=[pytest.mark.slow] * (i % 2 != j))
        for i, kind in enumerate(families())
        for j, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_steps_of_every_family_are_recorded(kind: str, dtype: str, replayed: list[Jobs], tmp_path: Path) -> None:
    folder = save_family(tmp_path, kind, torch_dtype=dtype)
    assert_recorded(partial(lce.load, folder), replayed, lce.methods.Streaming(), CHUNKS)


@pytest.mark.parametrize("weights", ["int8", "int4", pytest.param("float16", marks=pytest.mark.slow)])  # a third dtype
@pytest.mark.parametrize("kind", CONVERTING)
@pytest.mark.covering
def test_steps_with_weights_of_every_type_are_recorded(
    kind: str, weights: str, replayed: list[Jobs], tmp_path: Path
) -> None:
    name, folder = "dtype" if weights == "float16" else "weights", save_family(tmp_path, kind)
    assert_recorded(partial(lce.load, folder, **{name: weights}), replayed, CHUNKS)
    if name == "weights":
        assert_recorded(partial(lce.load, folder, dtype="bfloat16", weights=weights), replayed, CHUNKS)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in [*SCHEMES, "F16", "BF16"]]
)
def test_steps_of_every_gguf_type_are_recorded(kind: str, replayed: list[Jobs], tmp_path: Path) -> None:
    for family in ("llama", "gemma3_text"):
        (tmp_path / family).mkdir()
        kinds = {"sliding_window": 32, "layer_types": ["sliding_attention"] * 2} if family == "gemma3_text" else {}
        model = as_saved(save_family(tmp_path / family, family, hidden_size=256, intermediate_size=256, **kinds))
        file = save_gguf(tmp_path / family / "a.gguf", model, {"*norm*": "F32", "*": kind})
        assert_recorded(partial(lce.load, file), replayed, lce.methods.Streaming())


@pytest.mark.parametrize("name", lce.methods.available())
def test_steps_of_every_method_are_recorded(name: str, replayed: list[Jobs], deep_model: Path) -> None:
    assert_recorded(partial(lce.load, deep_model), replayed, lce.methods.make(name, KNOBS.get(name)))


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_with_weights_of_several_types_is_replayed(
    n: int, replayed: list[Jobs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files of K-quants have them: q and k of one type, v of another."""
    model = as_saved(save_tiny(tmp_path, hidden_size=256, intermediate_size=256))
    file, prompts = save_gguf(tmp_path / "a.gguf", model, {"*attn_v*": "Q6_K", "*": "Q4_K"}), [tokens(30)] * n

    def said() -> list[list[int]]:
        engine = lce.load(file, method="full")
        assert isinstance(engine.setup.model.layers[0].w["qkv"], Stacked)
        return [each.token_ids for each in engine.generate(prompts, max_tokens=8, temperature=0.5, seed=1)]

    found = said()
    assert replayed
    monkeypatch.setattr(KernelLists, "layers", Recorder.layers)
    assert said() == found


PAGES: dict[str, object] = {"page": 4, "budget": 24}
ALIKE: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in "full dca streaming rerope self_extend lm_infinite".split()),
    ("longheads", {"chunk_size": 8, "prefill_method": "self_extend"}),  # a prompt is handed over
    *(("longheads", {"chunk_size": 8, **more}) for more in ({}, {"placement": "true"})),
    ("quest", {"dense_layers": 0, **PAGES}),
    *(("pages", PAGES | knobs) for knobs in ({}, {"share": "group"}, {"select": "mean", "placement": "true"})),
]
NOT_ALIKE: list[tuple[str, dict[str, object]]] = [
    ("quest", {}),  # layers of two kinds
    ("longheads", {"chunk_size": 8, "top_p": 0.5}),  # operators choose fewer
    ("esa", {"compress": "none", "sinks": 4}),
    ("infllm", {}),
    ("reattention", {}),
]
OTHERS = [(name, {}) for name in lce.methods.available() if name not in dict([*ALIKE, *NOT_ALIKE])]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8-device"])
@pytest.mark.parametrize(
    ("method", "knobs", "serves"),
    [(*case, serves) for serves, cases in ((True, ALIKE), (False, NOT_ALIKE), (None, OTHERS)) for case in cases],
    ids=str,
)
@pytest.mark.covering("method", "serves")
def test_one_layers_attention_serves_layers_alike(
    method: str, knobs: Any, serves: Any, kv_dtype: str, alike: list[LayerJobs], deep_model: Path, monkeypatch: Any
) -> None:
    """Also where forks write beside what they share, where chunks are completed, and in the first step behind a cut."""

    def answers() -> list[Any]:
        given = dict(knobs)
        options: dict[str, Any] = {"prefill_method": given.pop("prefill_method", None), "kv_dtype": kv_dtype}
        engine = lce.load(deep_model, method=lce.methods.make(method, given), **options)
        context = engine.prefill(tokens(150))
        asked = [context.fork(), context, context.fork()]
        asked[1].truncate(145)
        return [
            engine.generate(tokens(9, seed=i), context=each, max_tokens=6, temperature=0, logprobs=1).logprobs
            for i, each in enumerate(asked)
        ]

    ours = answers()
    assert serves is None or bool(alike) is serves
    monkeypatch.setattr(KernelLists, "layers", Recorder.layers)
    assert ours == answers()


def test_a_method_that_looks_on_sees_every_layer(alike: list[LayerJobs], deep_model: Path) -> None:
    seen: list[int] = []

    class Looking(lce.methods.Full):
        def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
            seen.append(cache.index)
            super().keep(k, v, cache, step)

    steps(lce.load(deep_model, method=Looking()))
    assert not alike
    assert len(seen) == 4 * seen.count(0)


def test_attention_may_keep_copies_of_what_it_is_given(tiny_model: Path, replayed: list[Jobs]) -> None:
    def queries() -> list[Tensor]:
        kept: list[Tensor] = []

        class Keeping(lce.methods.Streaming):
            def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
                kept.append(q.clone())
                return super().attend(q, cache, step)

        steps(lce.load(tiny_model, method=Keeping()))
        return kept

    ours = queries()
    assert replayed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelLists, "layers", Recorder.layers)
        assert all(
            map(
                torch.equal,
                ours,
                queries(),
            )
        )


def test_a_step_that_failed_is_recorded_anew(tiny_model: Path, replayed: list[Jobs]) -> None:
    failed: list[int] = []

    class Failing(lce.methods.Streaming):
        def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
            if step.start == 93 and cache.index and not failed:
                failed.append(step.start)
                raise KeyError("once")
            return super().attend(q, cache, step)

    engine = lce.load(tiny_model, method=Failing())
    with pytest.raises(KeyError, match="once"):
        steps(engine)
    assert replayed
    assert steps(engine) == steps(lce.load(tiny_model, method="streaming"))


def test_attention_may_answer_in_another_form(tiny_model: Path, replayed: list[Jobs]) -> None:
    """Later steps go on with the model's own code from the first such answer."""

    class Turning(lce.methods.Streaming):
        def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
            out = super().attend(q, cache, step)
            return out.transpose(0, 1).contiguous().transpose(0, 1) if step.start % 2 and cache.index else out

    engine = lce.load(tiny_model, method="streaming")
    assert steps(lce.load(tiny_model, method=Turning(), sharing=engine)) == steps(engine)
    assert replayed


def test_threads_do_not_share_a_recording(tiny_model: Path, replayed: list[Jobs]) -> None:
    engine = lce.load(tiny_model, method="streaming")
    expected = steps(engine)
    found = together([lambda: steps(engine)] * 3)
    assert replayed
    assert found == [expected] * 3


def test_a_profile_sees_the_steps_own_parts(tiny_model: Path, replayed: list[Jobs]) -> None:
    engine = lce.load(tiny_model, method="streaming")
    steps(engine)
    replayed.clear()
    with lce.profiled(engine) as profile:
        steps(engine)
    assert profile.seconds["products"] > 0
    assert not replayed


def test_a_notice_says_once_why_steps_are_not_recorded(
    tiny_model: Path, replayed: list[Jobs], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the level of the logger that `--debug` sets."""
    project = Layer.project
    monkeypatch.setattr(Layer, "project", lambda self, name, x, **how: project(self, name, x + 0, **how))
    for level, n in ((logging.INFO, 0), (logging.DEBUG, 1)):
        caplog.set_level(level, "lce")
        engine = lce.load(tiny_model, method="streaming")
        steps(engine)
        steps(engine)
        engine.generate([tokens(9)] * 3, max_tokens=3, temperature=0)
        assert caplog.messages.count("steps are not recorded: aten.add.Tensor computes between kernels") == n
    assert not replayed


MIXES = {  # and whether one layer's attention serves others
    "full streaming dca rerope longheads full self_extend lm_infinite": True,
    "full streaming infllm dca": False,
    "full full full full full full full full": True,
}


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_dtype": "int8-device"}], ids=str)
@pytest.mark.parametrize("methods", MIXES)
@pytest.mark.covering("methods", "options", "n_threads")
def test_replayed_passes_of_several_lanes_have_the_same_bits(
    methods: str, options: Any, n_threads: int, replayed: Any, alike: Any, deep_model: Path, monkeypatch: Any
) -> None:
    """Lanes come, go and change places, so that recordings of each number of lanes serve others than they were made of.

    Chains of kernels, one for each lane, run on several threads.
    """
    torch.set_num_threads(n_threads)
    engines: dict[str, lce.Engine] = {}
    for name in methods.split():
        engines[name] = lce.load(deep_model, name, sharing=next(iter(engines.values()), None), **options)

    def passes() -> list[Tensor]:
        contexts = [engines[name].prefill(tokens(40 + 30 * i, seed=i)) for i, name in enumerate(methods.split())]
        lanes, found = list(zip(methods.split(), contexts, strict=True)), []
        for turn in range(16):
            n = (len(lanes), 3, 1, len(lanes))[turn % 4]
            shift = turn // 5 % len(lanes)
            some = [*lanes[shift:], *lanes[:shift]][:n]
            now = [lane_of(engines[name].setup, each, [5 + turn], decoding=True) for name, each in some]
            own = engines[some[0][0]].setup
            found.append(torch.stack(forward(own.model, now, own.recorder)))
            for lane in now:
                lane.check()
        return found

    ours = passes()
    assert replayed
    assert alike or not MIXES[methods]
    monkeypatch.setattr(KernelLists, "layers", Recorder.layers)
    for one, other in zip(ours, passes(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["full", "rerope", "lm_infinite"])
def test_one_layers_attention_serves_several_tokens_of_a_context(
    method: str, alike: list[LayerJobs], deep_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lce.load(deep_model, method)
    setup = engine.setup

    def drawn() -> list[Tensor]:
        found, contexts = [], [engine.prefill(tokens(40 + 50 * i, seed=i)) for i in range(2)]
        for sizes in ((3, 2), (3, 2), (1, 4), (5, 0)):
            ids = [tokens(n, seed=n) for n in sizes]
            lanes = [
                lane_of(setup, each, some, decoding=True) for each, some in zip(contexts, ids, strict=True) if some
            ]
            forward(setup.model, lanes, setup.recorder)
            found += [lane.drawn for lane in lanes]
        return found

    ours = drawn()
    assert alike
    monkeypatch.setattr(KernelLists, "layers", Recorder.layers)
    assert all(map(torch.equal, ours, drawn()))


def test_a_reshape_that_copies_is_no_view() -> None:
    """Queries in another order than their memory has: a recording must not take the copy for the answer itself."""
    recorder, heads = KernelLists(), torch.arange(24.0).view(2, 3, 4)

    def model(x: Tensor, attend: Callable[..., Tensor], generated: bool) -> Tensor:
        out: Tensor = attend(0, x, x, x).transpose(0, 1).reshape(3, 8)
        return out

    with torch.inference_mode():
        for step in range(3):
            expected = (heads + step).transpose(0, 1).reshape(3, 8)
            assert torch.equal(recorder.layers(model, torch.zeros(3, 8), lambda *_, s=step: heads + s), expected)
