"""The engine: one text however it is asked for, its figures, and prompts and options that are refused."""

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lce
from lce.models.products import SHARED_ROWS
from tests.checkpoints import tokens
from tests.command import output

TEXT = "The quick brown fox jumps over the lazy dog, and then over the moon and the other dogs. " * 3


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
    context = engine.prefill(TEXT)
    engine.generate(TEXT, max_tokens=1, context=context)
    behind = engine.tokenizer.encode(TEXT, bos=False)
    assert context.token_ids[:-1] == engine.tokenizer.encode(TEXT) + behind != 2 * engine.tokenizer.encode(TEXT)


def test_a_document_and_a_question_are_one_prompt(engine: lce.Engine) -> None:
    document, question = tokens(150), tokens(20, seed=1)
    asked = engine.generate(question, max_tokens=20, context=engine.prefill(document))
    assert asked.token_ids == engine.generate(document + question, max_tokens=20).token_ids


def test_stop_ends_the_text(engine: lce.Engine) -> None:
    whole, seen = engine.generate(TEXT, max_tokens=30, stop=None).text, list[str]()
    stop = whole[5:8]
    for given in (stop, [stop]):
        cut = engine.generate(TEXT, max_tokens=30, stop=given)
        assert (cut.text, cut.finish_reason) == (whole[: whole.find(stop)], "stop")
    cut = engine.generate(TEXT, max_tokens=30, stop=lambda text: seen.append(text) or len(text) >= 6)
    assert whole.startswith(cut.text)
    assert (cut.text, cut.finish_reason) == (seen[-1], "stop")
    assert all(len(text) < 6 for text in seen[:-1])


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


def test_an_engine_is_not_changed_by_use(engine: lce.Engine) -> None:
    model = engine.setup.model

    def weights() -> dict[str, Tensor]:
        found = {f"{layer.index}.{name}": w for layer in model.layers for name, w in layer.w.items()}
        found |= {"embed": model.embed, "head": model.head, "norm": model.final_norm}
        return {name: weight.clone() for name, weight in found.items() if weight is not None}

    before, fields = weights(), dict(vars(engine))
    engine.generate(TEXT, max_tokens=10, temperature=1.0)
    engine.logits(tokens(50))
    engine.trace(tokens(50))
    engine.prefill(TEXT).fork()
    assert vars(engine) == fields
    after = weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_engine_says_what_it_is(tiny_model: Path) -> None:
    assert repr(lce.load(tiny_model, "longheads", block=16, device="cpu")) == (
        "Engine(LongHeads(chunk_size=2, chunks=16, placement='side_by_side', top_p=None, share='group', rank='top', "
        "keep_first=True, local=4, fix_head=False, fix_layer=False, summary='keys'), window=64, block=16, "
        "cpu, torch.float32)"
    )


# Several prompts


def test_a_list_of_prompts_gives_a_list(engine: lce.Engine) -> None:
    texts = ["The old miller", "In the morning", "日本語"]
    expected = [engine.generate(text, max_tokens=6).token_ids for text in texts]
    assert [g.token_ids for g in engine.generate(texts, max_tokens=6)] == expected
    assert [g.token_ids for g in engine.generate([engine.tokenizer.encode(t) for t in texts], max_tokens=6)] == expected
    with pytest.raises(lce.UsageError, match="the prompt is empty"):
        engine.generate(["a", ""])


def test_prompts_of_a_list_are_asked_on_forks(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(50))
    questions = [tokens(9, seed) for seed in (1, 2)]
    expected = [engine.generate(q, max_tokens=6, context=context.fork()).token_ids for q in questions]
    assert [g.token_ids for g in engine.generate(questions, max_tokens=6, context=context)] == expected
    assert context.token_ids == tokens(50)


# Log-probabilities


def test_logprobs_are_those_of_the_model(engine: lce.Engine) -> None:
    """Whatever the filters: the distribution is the raw one."""
    prompt = tokens(40)
    for sampling in ({}, {"temperature": 0.7, "top_k": 5, "seed": 1}):
        result = engine.generate(prompt, max_tokens=8, logprobs=3, **sampling)
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        rows = engine.logits([*prompt, *result.token_ids]).double().log_softmax(-1)[len(prompt) - 1 : -1]
        for row, entry in zip(rows, result.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            best = row.topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [x for _, x in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert engine.generate(prompt, max_tokens=2).logprobs is None
    none, everything = (engine.generate(prompt, max_tokens=1, logprobs=k).logprobs for k in (0, 10**6))
    assert [len(none[0].top), len(everything[0].top)] == [0, 300]


# Logits of half-precision and quantised models


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "float16"}, marks=pytest.mark.slow),  # kernels of a third dtype compile for some seconds
        {"dtype": "bfloat16", "weights": "int8"},
        {"weights": "int4"},
    ],
)
def test_logits_are_not_rounded_to_the_dtype_of_the_model(kind: dict[str, str], n: int, tiny_model: Path) -> None:
    """Two candidates of a real model differ by less than bfloat16 resolves: rounded, the lower id would win."""
    engine = lce.load(tiny_model, **{"dtype": "bfloat16"} | kind)
    model, dtype, logits = engine.setup.model, engine.setup.dtype, engine.logits(tokens(n))
    assert logits.dtype == torch.float32
    assert (logits == logits.to(dtype).float()).float().mean() < 0.05
    hidden = torch.randn(n, model.config.hidden_size, generator=torch.Generator().manual_seed(n)).to(dtype)
    head, norm = model.head, model.final_norm.double()
    exact = head if isinstance(head, torch.Tensor) else head.unpacked(0, torch.empty(head.shape))
    normed = torch.nn.functional.rms_norm(hidden.double(), norm.shape, norm, model.config.norm_eps)
    found = model.logits(hidden)
    most = 1e-3 if "weights" in kind else 3e-6  # packed weights are multiplied with 16-bit integers
    assert (found - normed @ exact.double().T).abs().max() <= most
    alone = torch.cat([model.logits(row[None]) for row in hidden])
    assert (alone - found).abs().max() <= 2 * most
    assert n > SHARED_ROWS or torch.equal(alone, found)


# Logits that are no numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weight", ["head", "embed", "down"])
def test_logits_that_are_not_finite_drop_their_block(tiny_model: Path, value: float, weight: str) -> None:
    engine = lce.load(tiny_model, block=16)
    model, last = engine.setup.model, engine.setup.model.layers[1].w
    model.embed, model.head, last["down"] = model.embed.clone(), model.head.clone(), last["down"].clone()
    context = engine.prefill(tokens(20))
    before = context.logits.clone()
    changed = {"head": model.head[7], "embed": model.embed[9], "down": last["down"][5]}  # embed: of one token only
    changed[weight][3] = value
    question = [*tokens(3), 9]
    for call in (engine.generate, engine.prefill):
        with pytest.raises(lce.ModelError, match="the model's logits are not finite after token 23: its weights hold"):
            call(question, context=context)
        assert context.token_ids == tokens(20)
        assert torch.equal(context.logits, before)
    for call in (engine.logits, engine.score):
        with pytest.raises(lce.ModelError, match="not finite after token 3:"):
            call(question)


# Memory

RSS = """
import gc, sys, torch
import lce
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
torch.set_num_threads(1)
lce.load(sys.argv[1], "longheads", dtype="bfloat16").generate([5] * 1500, max_tokens=2)  # with the kernels that choose
gc.collect()
found = [rss()]
for _ in range(3):
    engine = lce.load(sys.argv[1], "longheads", dtype="bfloat16")
    context = engine.prefill([5] * 7000)
    engine.generate([5], context=context, max_tokens=2)
    found.append(rss())
    del engine, context
    found.append(rss())
print(*found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_memory_is_given_back_when_an_engine_ends() -> None:
    before, held, after, *_, last = map(float, output(RSS, "demo").split())
    assert held - before > 60, "a model, a context and activations"
    assert after - before < 0.13 * (held - before)
    assert last - after < 0.03 * (held - before), "no engine leaves more than the first"


# A checkpoint without a tokenizer


def test_without_a_tokenizer_ids_come_and_go(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    whole, engine = lce.load(tiny_model), lce.load(folder)
    ids = tokens(40)
    expected = whole.generate(ids, max_tokens=12)
    given = engine.generate(ids, max_tokens=12)
    assert (given.text, given.token_ids, given.finish_reason) == ("", expected.token_ids, expected.finish_reason)
    assert list(engine.stream(ids, max_tokens=12)) == []
    context = engine.prefill(ids)
    assert engine.generate([], max_tokens=12, context=context).token_ids == expected.token_ids
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": expected.token_ids[2]}
    (folder / "config.json").write_text(json.dumps(config))
    ended = lce.load(folder).generate(ids, max_tokens=12)
    assert ended.token_ids == expected.token_ids[: expected.token_ids.index(expected.token_ids[2])]
    assert ended.finish_reason == "stop"
    for call in (engine.generate, engine.stream, engine.prefill, engine.logits):
        with pytest.raises(lce.ModelError, match=r"no tokenizer in .*; give token ids"):
            call("text")
    for stop in ("x", ["x"], lambda text: True):
        with pytest.raises(lce.UsageError, match="stop is given, but this checkpoint has no tokenizer"):
            engine.generate(ids, stop=stop)


def test_writing_moves_nothing(engine: lce.Engine) -> None:
    """Room for the whole answer is made before its first token."""
    context = engine.prefill(tokens(45))
    stream = engine.stream(tokens(5), max_tokens=60, context=context)
    next(stream)
    before = [layer.buffer.k.data_ptr() for layer in context.cache.layers]
    assert len(list(stream)) > 10
    assert [layer.buffer.k.data_ptr() for layer in context.cache.layers] == before


# Structure

PACKAGES = ("lce", "lce_lab", "lce_serve")


def private_names(tree: ast.AST) -> set[str]:
    """The names with one underscore that the classes of a file define: methods, fields and attributes of `self`."""
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    found: set[str] = set()
    for node in (node for owner in owners for node in ast.walk(owner)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def strangers(folder: Path) -> list[str]:
    """The places where a file uses a `_name` of another object that only classes of other files define."""
    trees = {file: ast.parse(file.read_text()) for name in PACKAGES for file in (folder / name).rglob("*.py")}
    private = {file: private_names(tree) for file, tree in trees.items()}
    every = set().union(*private.values())
    others = {file: every - own for file, own in private.items()}
    return [
        f"{file.relative_to(folder)}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in others[file]
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_no_file_uses_what_is_private_to_another_files_class() -> None:
    assert strangers(Path(lce.__file__).parents[1]) == []


def test_a_use_of_what_is_private_is_found(tmp_path: Path) -> None:
    (tmp_path / "lce").mkdir()
    (tmp_path / "lce" / "one.py").write_text("class One:\n    def __init__(self):\n        self._own = 1\n")
    (tmp_path / "lce" / "two.py").write_text("def f(one):\n    return one._own + one._other\n")
    assert strangers(tmp_path) == ["lce/two.py:2: one._own"]


def test_whoever_generates_loads_no_other_feature() -> None:
    loaded = output("import sys, lce; lce.load('demo').generate('x', max_tokens=1); print(*sys.modules)").split()
    others = "batch chat divided_files dividing eviction graph info operations scoring trace".split()
    assert not {f"lce.engine.{name}" for name in others} & {*loaded}
    assert "lce.engine.running" in loaded
