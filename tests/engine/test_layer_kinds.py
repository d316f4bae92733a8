"""Models whose layers differ: a method acts in plain layers; elsewhere the layer's own window and RoPE hold."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.attention import Attention
from lce.cache.limits import Limits
from lce.cache.tiers import TierStack
from lce.engine.lanes import forward
from lce.engine.running import lane_of
from lce.kernels.runtime import launching
from lce.methods import Observed, QueryBlock
from lce.methods.costs import cost
from lce.models.config import LayerKind, ModelConfig, RopeConfig
from lce.models.layers import read_config
from lce.models.rope import Rope
from lce.terminal.figures import model_lines
from lce.weights.source import Source
from lce_lab.eval.meter import AttentionMeter
from lce_lab.study.recording import record
from tests.checkpoints import tokens
from tests.engine.test_graph import PlainRuns, graph_of, taped
from tests.kinds import ACTING, KINDS, METHODS, SLIDING, attended, load, of_kinds, save_made, true_logits
from tests.pretended import pretended_gpus

each_method = pytest.mark.parametrize("name", METHODS)
TEXT = tokens(80)


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the made model, whose layers are of several kinds as long as the module's tests run."""
    with of_kinds():
        yield save_made(tmp_path_factory.mktemp("made"))


def answer(engine: lce.Engine, context: lce.Context) -> list[int]:
    return engine.generate(tokens(5, 1), max_tokens=6, context=context).token_ids


@each_method
def test_each_layer_attends_by_its_kind(made: Path, name: str) -> None:
    truth = None
    for block in (64, 7, 1):
        if truth is None or name == "esa":  # the queries of a block choose together
            truth = true_logits(load(made, name), TEXT, name, block)
        assert (load(made, name, block=block).logits(TEXT) - truth).abs().max() <= 1e-3, block


def test_a_users_scaling_and_window_are_for_plain_layers(made: Path) -> None:
    engine = load(made, "dca", rope="linear", rope_factor=4.0, block=32)
    assert (engine.logits(TEXT) - true_logits(engine, TEXT, "dca", 32, stretch=4.0)).abs().max() <= 1e-3
    full = load(made, "full", window=64, block=32)
    assert torch.equal(full.logits(TEXT[:60]), load(made, "full", block=32).logits(TEXT[:60]))


def test_no_rotation_is_exactly_none() -> None:
    rope = Rope(RopeConfig("yarn", factor=4.0), 16, 32)
    for at in (torch.arange(5000), torch.tensor(-7), torch.tensor([0.5, 1e9])):
        cos, sin = rope.of(LayerKind(rotated=False)).turn(at, torch.float32)
        assert (cos == 1).all()
        assert (sin == 0).all()
    assert rope.of(LayerKind()) is rope
    assert rope.of(KINDS[0]) is rope.of(KINDS[2]), "made once"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@each_method
def test_contexts_go_on_from_files_forks_and_cuts(made: Path, name: str, kv_dtype: str, tmp_path: Path) -> None:
    engine = load(made, name, block=16, kv_dtype=kv_dtype)
    context = engine.prefill(TEXT)
    expected = answer(engine, context.fork())
    context.save(tmp_path / "text.lce")
    assert answer(engine, engine.open_context(tmp_path / "text.lce")) == expected
    longer = engine.prefill(tokens(40, 2), context=context.fork())
    mark = context.cache.mark()
    answer(engine, context)
    context.cache.go_back(mark)
    del context.token_ids[context.cache.length :]
    assert torch.equal(engine.prefill(tokens(40, 2), context=context).logits, longer.logits)


@each_method
def test_budgets_change_nothing_and_old_chunks_of_sliding_layers_stay_down(
    made: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, read = tokens(700 if name in ("full", "esa") else 200), set[int]()
    for what in ("chunks", "tokens", "rounds"):
        monkeypatch.setattr(TierStack, what, noting(getattr(TierStack, what), read))
    whole = load(made, name, block=16)
    expected, layout = whole.prefill(ids), whole.setup.layout
    options: dict[str, Any] = {"block": 16, "kv_host_budget": Limits(layout).least_budget, "spill_dir": tmp_path}
    engine = load(made, name, **options)
    context = engine.prefill(ids)
    assert torch.equal(context.logits, expected.logits)
    assert (answer(engine, context), read) == (answer(whole, expected), {*ACTING})
    tiers = lce.plan(made, engine.method, tokens=len(ids), **options).tiers
    assert context.cache.bytes_by_tier["disk"] <= tiers["disk"].needed
    assert tiers["device"].keys_and_values <= Limits(layout).least_budget
    assert context.cache.bytes_by_tier["disk"] > 0


def noting(method: Callable[..., Any], found: set[int]) -> Callable[..., Any]:
    def noted(stack: TierStack, layer: int, *args: Any) -> Any:
        found.add(layer)
        return method(stack, layer, *args)

    return noted


@each_method
def test_a_plan_counts_state_where_the_method_acts(made: Path, name: str) -> None:
    cache = load(made, name).prefill(tokens(200)).cache
    needed = lce.plan(made, lce.methods.make(name, METHODS[name]), tokens=200).tiers["device"]
    kept = [sum(state.n_bytes for state in layer.state.values()) for layer in cache.layers]
    assert [layer for layer, n_bytes in enumerate(kept) if n_bytes] == ([] if name in ("full", "dca") else [*ACTING])
    assert sum(kept) <= needed.besides <= 2 * sum(kept) + 5000


def test_lanes_of_a_pass_attend_on_their_own(made: Path) -> None:
    engine = load(made, "longheads", block=16)
    contexts = [engine.prefill(tokens(30 + 25 * i, i)) for i in range(3)]
    alone = [engine.prefill([7], context=context.fork()).logits for context in contexts]
    found = forward(engine.setup.model, [lane_of(engine.setup, x, [7]) for x in contexts])
    assert torch.equal(torch.stack(found), torch.stack(alone))


def test_layers_on_two_devices(made: Path) -> None:
    ids = TEXT[:60]
    with pretended_gpus(2):
        engine = load(made, "dca", device="cuda:0,cuda:1", block=64)
        assert (engine.logits(ids).cpu() - load(made, "dca", device="cpu").logits(ids)).abs().max() <= 1e-3
        assert [part.acting_layers for part in engine.setup.layout.by_device] == [(1,), (3,)]


@pytest.mark.parametrize("name", ["dca", "longheads"])
def test_recorded_steps_turn_by_each_layers_rope(made: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where the work is done again, and on a pretended GPU, whose graph holds operators alone."""
    engine = load(made, name, block=32)
    expected = engine.generate(TEXT, max_tokens=14).token_ids
    context = taped(engine).prefill(TEXT)
    assert engine.generate("", max_tokens=14, context=context).token_ids == expected
    assert graph_of(engine, context).n_replayed >= 6, graph_of(engine, context).refused
    if name == "dca":
        monkeypatch.setattr(Attention, "choose", lambda name: PlainRuns())
        monkeypatch.setattr(launching, "installed", lambda: False)
        with pretended_gpus():
            engine = load(made, name, block=64, device="cuda")
            context = engine.prefill(TEXT)
            assert engine.generate("", max_tokens=7, context=context).token_ids == expected[:7]
            assert graph_of(engine, context).n_replayed >= 3, graph_of(engine, context).refused


def test_a_trace_shows_that_sliding_layers_choose_nothing(made: Path) -> None:
    trace = load(made, "longheads", block=32).trace(TEXT, scores=True)
    assert [chosen.shape[-1] for chosen in trace.chosen] == [0, 4, 0, 4, 0]
    assert [scores.shape[-1] for scores in trace.all_scores] == [0, 20, 0, 20, 0]


def test_all_layers_take_the_choice_of_the_first_that_chooses(made: Path) -> None:
    method = lce.methods.LongHeads(chunk_size=4, chunks=5, fix_layer=True)
    chosen = lce.load(made, method, block=32).trace(TEXT).chosen
    assert chosen[1].shape[-1] == 4
    assert torch.equal(chosen[1], chosen[3])
    scores = [cost(method.resolve(32), QueryBlock(88, 89, 4, 2, 16, layer=at, first_layer=1)).scores for at in ACTING]
    assert scores == [4 * 22 * 16, 0]
    counted = lce.operations(made, method, tokens=89)
    assert counted.paper_figures[0].value == 5 * 2 * len(ACTING), "chunks of KV heads and layers"
    assert counted.decode.scores == 4 * (21 + 21 + 22 + 22) * 16  # the last four tokens


@pytest.mark.parametrize("states", ["own", "judge"])
def test_a_sliding_layer_loses_nothing_of_true_attention(made: Path, states: Any) -> None:
    meter = AttentionMeter(states=states)
    meter.begin(70)
    engine = lce.load(made, Observed(lce.methods.make("longheads", METHODS["longheads"]), meter), block=32)
    engine.prefill(TEXT)
    found = meter.end()
    for layer, kind in enumerate(KINDS):
        least = min(found.recall[layer])
        assert (least > 0.9999) == (kind.sliding_window is not None), layer
        if kind.sliding_window is not None:
            assert found.tokens[layer] == [kind.sliding_window] * 4


def test_a_recording_has_all_layers_with_their_own_distances(made: Path) -> None:
    text = "the old dogs and the other dogs " * 3
    run = record(made, [lce.methods.make("longheads", METHODS["longheads"])], text, max_tokens=2, last=2)["runs"][0]
    assert [layer["chooses"] for layer in run["layers"]] == [layer in ACTING for layer in range(5)]
    look = run["segments"][-1]["looks"][str(max(run["looked"]))]
    for layer, kind in zip(look["layers"], KINDS, strict=True):
        assert (min(head["recall"] for head in layer["heads"]) == 1) == (kind.sliding_window is not None)


def test_costs_are_those_of_each_layers_window(made: Path) -> None:
    n, pair = len(TEXT), 2 * 4 * 16
    counted = lce.operations(made, tokens=n, block=32)
    pairs = sum(attended(n, kind.sliding_window or n) for kind in KINDS)
    assert counted.prefill.attention == pair * pairs
    assert counted.decode.attention == pair * (2 * SLIDING + 2 * SLIDING + 2 * n)
    assert counted.decode.key_bytes == 4 * 2 * 2 * 16 * (2 * SLIDING + 2 * SLIDING + 2 * n)


def test_maps_are_learned_where_esa_acts(made: Path, tmp_path: Path) -> None:
    text, out = "Längere Kontexte brauchen kleine Köpfe. " * 40, tmp_path / "maps.safetensors"
    from lce_lab.calibrate import Calibration, calibrate

    found = calibrate(made, text, out, Calibration(low_dim=32, tokens=512, epochs=1, far=12))
    assert [recall.layer for recall in found] == [*ACTING]
    method = lce.methods.make("esa", METHODS["esa"] | {"compress": "calibrated", "low_dim": 32, "maps": str(out)})
    engine = lce.load(made, method, block=16)
    assert [*engine.method.maps.layers] == [*ACTING]
    exact = load(made, "esa", block=16).logits(TEXT)
    assert (engine.logits(TEXT) - exact).abs().max() <= 1e-3, "as many dimensions as the keys have"


def test_kinds_are_part_of_the_model_and_a_plain_model_stays_what_it_was(made: Path) -> None:
    config = read_config(Source(made))
    plain, identity = replace(config, layer_kinds=()), "0" * 64
    assert "layer_kinds" not in repr(plain)
    before = ModelConfig("LlamaForCausalLM", 300, 64, 96, 2, 4, 2, 16, 64)  # files of 0.1 have this identity
    assert before.identity(identity).startswith("86593ceb64010ccf")
    others = (replace(KINDS[0], sliding_window=10), replace(KINDS[3], rotated=True), LayerKind(SLIDING))
    kinds = [(), KINDS, *((*KINDS[:4], other) for other in others)]
    assert len({replace(config, layer_kinds=each).identity(identity) for each in kinds}) == len(kinds)
    lines = model_lines(lce.info(made))
    assert any("; 2 with a sliding window of 9 and theta 100" in line for line in lines), lines
    assert any("1 with no rotation" in line for line in lines)


def test_pages_of_sliding_layers_leave_the_pool_first(made: Path, tmp_path: Path) -> None:
    least = Limits(load(made, "longheads", block=16).setup.layout).least_budget
    engine = load(made, "longheads", block=16, kv_host_budget=2 * least, spill_dir=tmp_path)
    pool = engine.prefill(tokens(300)).cache.tiers[0]
    layers = (pool.slots.group[pool.slots.group >= 0] // engine.setup.layout.n_groups).tolist()
    assert len(layers) > 100
    assert sum(layer in ACTING for layer in layers) >= 0.9 * len(layers)
