"""A model's layers on several GPUs, which are pretended: strict about tensors of two devices in one operator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lce
from lce.cache.layout import devices_text
from lce.engine.sizing import counts_of, devices_of
from lce.errors import CapacityError, UsageError
from lce.terminal.figures import plan_lines
from tests.checkpoints import save_tiny, tokens
from tests.pretended import Gpus, pretended_gpus

BOTH = "cuda:0,cuda:1"
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3, "tie_word_embeddings": True},
    "ministral3": {"architectures": ["Ministral3ForCausalLM"], "num_hidden_layers": 2, "rope_parameters": YARN},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of model."""
    return {
        name: save_tiny(tmp_path_factory.mktemp("model"), model_type=name, **changes) for name, changes in KINDS.items()
    }


@pytest.fixture
def two() -> Iterator[Gpus]:
    with pretended_gpus(2) as gpus:
        yield gpus


def said(engine: lce.Engine, ids: list[int]) -> tuple[list[int], Tensor]:
    """Tokens that follow, and the logits of a prompt, on the CPU."""
    return engine.generate(ids, max_tokens=3).token_ids, engine.logits(ids[:80]).cpu()


CHUNKS = lce.methods.LongHeads(chunk_size=8, chunks=4)
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "longheads": {"chunk_size": 8, "chunks": 4},
    "longheads, one choice": {"chunk_size": 8, "chunks": 4, "fix_layer": True},
    "dca": {"chunk_size": 24},
    "esa": {"compress": "none", "sinks": 4, "local": 16, "top_k": 16},
    "infllm": {"block_size": 8},
}


@pytest.mark.parametrize(
    ("kind", "method"),
    [*(("llama", method) for method in METHODS), *((kind, "full") for kind in KINDS if kind != "llama")],
)
@pytest.mark.covering("kind")
def test_two_devices_give_what_one_gives(two: Gpus, models: dict[str, Path], kind: str, method: str) -> None:
    chosen = lce.methods.make(method.partition(",")[0], METHODS[method])
    ids, found = tokens(90), []
    for device in ("cuda:1", BOTH):
        found.append(said(lce.load(models[kind], chosen, device=device), ids))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_each_tensor_is_where_its_layer_is(two: Gpus, models: dict[str, Path]) -> None:
    engine = lce.load(models["qwen3"], CHUNKS, device=[torch.device("cuda:0"), "cuda:1"])
    assert [(part.first_layer, part.n_layers) for part in engine.setup.layout.by_device] == [(0, 2), (2, 1)]
    assert "layers 0 to 1 on cuda:0; layers 2 to 2 on cuda:1" in repr(engine)
    model, first, last = engine.setup.model, torch.device("cuda:0"), torch.device("cuda:1")
    wanted = [first, first, last]
    assert [{w.device for w in layer.w.values()} for layer in model.layers] == [{device} for device in wanted]
    assert (model.embed.device, model.head.device, model.final_norm.device) == (first, last, last)
    context = engine.prefill(tokens(100))
    for device, layer in zip(wanted, context.cache.layers, strict=True):
        kept = [x for state in layer.state.values() if (x := state.committed(100)[0]) is not None]
        assert kept
        assert {x.device for x in (layer.buffer.k, layer.buffer.v, *kept)} == {device}
    assert context.logits.device == last
    held = context.cache.bytes_by_tier
    assert list(held) == ["cuda:0", "cuda:1", "host", "disk"]
    assert held["cuda:0"] == 2 * held["cuda:1"] > 0
    assert repr(context) == f"Context(100 tokens, {3 * held['cuda:1']} bytes)"


class Copies(TorchDispatchMode):
    """Notes copies from one GPU to another: where from, where to, and how many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy"):
            source = args[1] if name == "aten::copy_" else args[0]
            to = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or source.device)
            if source.is_cuda and to.type == "cuda" and to != source.device:
                self.found.append((str(source.device), str(to), source.numel()))
        return func(*args, **kwargs)


def test_hidden_states_move_once_at_each_border(models: dict[str, Path]) -> None:
    with pretended_gpus(3):
        engine = lce.load(models["llama"], CHUNKS, device="cuda:all")
        assert devices_text(engine.setup.layout) == "cuda:0,cuda:1,cuda:2"
        assert engine.setup.model.borders == {1: torch.device("cuda:1"), 2: torch.device("cuda:2")}
        with Copies() as copies:
            engine.prefill(tokens(20))
    assert copies.found == [("cuda:0", "cuda:1", 20 * 64), ("cuda:1", "cuda:2", 20 * 64)]


@pytest.mark.slow
def test_engines_share_weights_where_they_are(two: Gpus, models: dict[str, Path]) -> None:
    engine = lce.load(models["llama"], device=BOTH)
    filled = torch.zeros(3 << 30, dtype=torch.uint8, device="cuda:0")
    other = lce.load(models["llama"], "dca", device=BOTH, sharing=engine)
    assert filled.is_cuda
    assert other.setup.layout.borders == engine.setup.layout.borders
    assert other.setup.model is engine.setup.model
    assert not other.prefill(tokens(30)).cache.stacks
    with pytest.raises(UsageError, match=r"on cuda:0,cuda:1; expected torch.float32 on cuda:0, as asked"):
        lce.load(models["llama"], device="cuda:0", sharing=engine)


@pytest.mark.slow
def test_contexts_move_between_one_device_and_two(two: Gpus, models: dict[str, Path], tmp_path: Path) -> None:
    ids, more = tokens(80), tokens(5, seed=1)
    engines = [lce.load(models["llama"], CHUNKS, device=device) for device in ("cuda:0", BOTH)]
    wanted = engines[0].generate(ids + more, max_tokens=3).token_ids
    for writes, reads in ((1, 0), (0, 1)):
        path = tmp_path / f"{writes}{reads}.lce"
        engines[writes].prefill(ids).save(path)
        context = engines[reads].open_context(path)
        assert context.cache.in_file
        fork = context.fork()
        assert engines[reads].generate(more, context=context, max_tokens=3).token_ids == wanted
        assert engines[reads].generate(more, context=fork, max_tokens=3).token_ids == wanted
        context.truncate(len(ids))
        assert engines[reads].generate(more, context=context, max_tokens=3).token_ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "n", "budgets"),
    [
        ("full", 800, {"kv_device_budget": "384KiB"}),
        ("longheads", 120, {"kv_device_budget": 48_000}),
        ("longheads", 120, {"kv_device_budget": 48_000, "kv_host_budget": 40_000, "spill_dir": "spill"}),
        ("longheads", 120, {"kv_device_budget": 48_000, "kv_dtype": "int8"}),
    ],
    ids=["full, host", "host", "disk", "8 bits"],
)
def test_each_device_has_tiers_of_its_own(
    two: Gpus, models: dict[str, Path], tmp_path: Path, method: str, n: int, budgets: dict[str, Any]
) -> None:
    ids = tokens(n)
    options: dict[str, Any] = {"method": CHUNKS if method == "longheads" else method, "block": 32}
    kept = {"kv_dtype": budgets.get("kv_dtype", "auto")}
    whole = lce.load(models["llama"], **options, **kept, device="cuda:0").prefill(ids)
    if "spill_dir" in budgets:
        budgets = budgets | {"spill_dir": tmp_path / "spill"}
    engine = lce.load(models["llama"], **options, device=BOTH, **budgets)
    context = engine.prefill(ids)
    assert context.cache.growing
    assert torch.equal(context.logits.cpu(), whole.logits.cpu())
    for part, stack in zip(context.cache.layout.by_device, context.cache.stacks, strict=True):
        assert stack.top.slots.slabs[0][0].device == part.device
    assert {"cuda:0", "cuda:1"} < {*context.cache.traffic}
    path = tmp_path / "context.lce"
    context.fork().save(path)
    opened = engine.open_context(path)
    said_by = [engine.generate([5, 6], context=each, max_tokens=4).token_ids for each in (context, opened)]
    assert said_by[0] == said_by[1]
    engine.prefill_file(ids, tmp_path / "other.lce", checkpoint_every=80)
    opened = engine.open_context(tmp_path / "other.lce")
    assert engine.generate([5, 6], context=opened, max_tokens=4).token_ids == said_by[0]


def test_plans_count_each_device(two: Gpus, models: dict[str, Path]) -> None:
    folder, layer = models["llama"], (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) * 4
    plan = lce.plan(folder, tokens=1000, device=BOTH)
    assert (plan.device, plan.layers, plan.fits) == (BOTH, {"cuda:0": (0, 1), "cuda:1": (2, 2)}, True)
    assert list(plan.tiers) == ["cuda:0", "cuda:1", "host"]
    needs = [plan.tiers[f"cuda:{i}"] for i in range(2)]
    assert [need.weights for need in needs] == [2 * layer + 300 * 64 * 4, layer + 301 * 64 * 4]
    assert needs[0].keys_and_values == 2 * needs[1].keys_and_values == 2 * 1024 * 2 * 32 * 4
    assert [line.split("  ")[0] for line in plan_lines(plan)[3:5]] == ["cuda:0, layers 0 to 1", "cuda:1, layers 2 to 2"]
    assert lce.plan(folder, tokens=1000, device="cuda:1").layers == {}
    small = lce.plan(folder, tokens=1000, device=BOTH, kv_device_budget=200_000)
    assert [small.tiers[f"cuda:{i}"].budget for i in range(2)] == [200_000, 100_000]
    engine = lce.load(folder, device=BOTH)
    context = engine.prefill(tokens(300), length=1000)
    assert {name: size for name, size in context.cache.bytes_by_tier.items() if size} == {
        f"cuda:{i}": need.keys_and_values for i, need in enumerate(needs)
    }


def test_what_does_not_fit_on_one_of_them_is_refused(models: dict[str, Path]) -> None:
    with pretended_gpus(2, memory=4 << 20):
        engine = lce.load(models["llama"], device=BOTH)
        with pytest.raises(CapacityError, match=r"memory on cuda:0, and .* is available; .* give a --kv-device-budget"):
            engine.prefill(tokens(40), length=20_000)
        filled = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda:0")
        plan = lce.plan(models["llama"], tokens=100, device=BOTH)
        assert plan.layers == {"cuda:0": (0, 0), "cuda:1": (1, 2)}, "fewer layers where less is free"
        free = [torch.cuda.mem_get_info(device)[0] for device in ("cuda:0", "cuda:1")]
        rest = [torch.zeros(n - 90_000, dtype=torch.uint8, device=f"cuda:{i}") for i, n in enumerate(free)]
        with pytest.raises(CapacityError, match=r"the weights of .* memory on cuda:0"):
            lce.load(models["llama"], device=BOTH)
        assert filled.is_cuda == rest[0].is_cuda


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:0,cuda:2", "cuda:2' is not available here"),
        ("cuda:0,cuda:0", "each device once"),
        ("cuda,cuda:0", "each device once"),
        ("cuda:0,cpu", "several GPUs"),
        ("auto,cuda:1", "several GPUs"),
        ("cuda:0,", "unknown device ''"),
        ([], r"device is \[\]; expected auto"),
        ([0, 1], "device is 0; expected auto"),
        (7, "device is 7; expected auto"),
    ],
)
def test_devices_that_cannot_be_had(two: Gpus, device: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        devices_of(device)


def test_devices_that_can(two: Gpus) -> None:
    assert devices_of("cpu") == (torch.device("cpu"),)
    assert devices_of("auto") == devices_of(None) == devices_of(["cuda"]) == (torch.device("cuda"),)
    assert devices_of("cuda:1, cuda") == (torch.device("cuda:1"), torch.device("cuda:0"))
    assert devices_of("cuda:all") == devices_of(("cuda:0", torch.device("cuda:1")))


def test_more_devices_than_layers(models: dict[str, Path]) -> None:
    with pretended_gpus(4), pytest.raises(UsageError, match="4 devices for 3 layers; expected one layer or more"):
        lce.load(models["llama"], device="cuda:all")


def test_layers_are_cut_by_free_memory() -> None:
    assert counts_of([40, 40, 20], 7) == [3, 3, 1]
    assert counts_of([80, 80], 32) == [16, 16]
    assert counts_of([79, 80, 78, 80], 80) == [20, 20, 20, 20]
    assert counts_of([-5, 10], 3) == [1, 2]
