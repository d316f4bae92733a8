"""Models that ranks share: the logits, texts and context files of one rank, and errors that no rank waits for.

Logits are compared relative to the largest one: sums over ranks are added in another order than one rank adds them.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.engine.dividing import facts_of
from lce.engine.options import LoadOptions, options_of
from lce.errors import LceError, RankError, UsageError
from lce.models.layers import families, read_config
from lce.models.ranks import Division, Ranks
from lce.weights.source import Source
from tests.checkpoints import save_chat, save_tiny, tokens
from tests.command import PROMPT, Process, run
from tests.gguf_models import as_saved, save_gguf
from tests.ranks import begun, on_ranks

LIMIT = 1e-5  # of the largest logit
ROUNDED = 1e-3  # the same with a cache in 8 bits, where a number between two codes may get either
IDS, QUESTION = tokens(150), tokens(5, seed=1)
CHUNKS = {"chunk_size": 8, "chunks": 4}
slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore::lce.WindowWarning")


@dataclass(frozen=True)
class Asked:
    """A model with a method: the folder, and options of `lce.load`."""

    folder: Path
    name: str = "longheads"
    knobs: Mapping[str, Any] = field(default_factory=lambda: CHUNKS)
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, ranks: Any = None) -> lce.Engine:
        return lce.load(self.folder, lce.methods.make(self.name, self.knobs), ranks=ranks, block=32, **self.options)


@dataclass(frozen=True)
class Said:
    """What an engine computes. `after` follows a question to a context, `opened` to the same context from its file."""

    logits: Tensor
    greedy: list[int]
    drawn: list[int]
    after: list[int]
    opened: list[int]


def said(engine: lce.Engine, file: Path) -> Said:
    context = engine.prefill(IDS)
    context.fork().save(file)
    found = [engine.generate(QUESTION, context=x, max_tokens=6).token_ids for x in (context, engine.open_context(file))]
    stream = engine.stream(IDS, max_tokens=8)
    assert "".join(piece.text for piece in stream) == stream.result.text
    drawn = engine.generate(IDS, max_tokens=8, temperature=1.0).token_ids
    return Said(engine.logits(IDS), stream.result.token_ids, drawn, *found)


def all_said(group: Any, asked: Sequence[Asked], folder: Path) -> list[Said]:
    return [said(each.load(group), folder / f"{i}.lce") for i, each in enumerate(asked)]


def told(call: Any) -> str:
    try:
        call()
    except LceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def close(found: Tensor, expected: Tensor, limit: float = LIMIT) -> bool:
    return bool((found - expected).abs().max() <= limit * expected.abs().max())


def assert_as_one(found: Sequence[Said], asked: Asked, file: Path) -> None:
    """What all ranks said is the same, and what one rank says; the file that they wrote is that of one rank."""
    engine = asked.load()
    one = said(engine, file.with_suffix(".one"))
    for each in found:
        assert torch.equal(each.logits, found[0].logits)
        assert each.drawn == found[0].drawn
        assert close(each.logits, one.logits, ROUNDED if "kv_dtype" in asked.options else LIMIT)
        assert (each.greedy, each.after, each.opened) == (one.greedy, one.after, one.opened)
        assert each.after == each.opened
    assert file.stat().st_size == file.with_suffix(".one").stat().st_size
    opened = engine.open_context(file)
    assert engine.generate(QUESTION, context=opened, max_tokens=6).token_ids == one.opened


def everyday(group: Any, asked: Sequence[Asked], folder: Path) -> tuple[list[Said], list[str]]:
    refused = [
        lambda: lce.load(asked[0].folder, "infllm", ranks=group),
        lambda: lce.load(asked[0].folder, lce.methods.make("longheads", {"share": "layer"}), ranks=group),
        lambda: lce.load(asked[0].folder, lce.methods.make("longheads", {"fix_head": True}), ranks=group),
        lambda: lce.load(asked[0].folder, lce.methods.make("pages", {"select": "random"}), ranks=group),
        lambda: lce.load(folder / "one head", ranks=group),
        lambda: lce.load(asked[0].folder, block=8 << group.rank(), ranks=group),
        lambda: lce.load(asked[0].folder if group.rank() else folder / "absent", ranks=group),
    ]
    errors = [*map(told, refused)]
    found = all_said(group, asked, folder)
    engine = asked[0].load(group)
    calls = (lambda: engine.generate([[5], [6]]), engine.batch, lambda: engine.trace([5]))
    return found, [*errors, *map(told, (*calls, lambda: engine.prefill(IDS).save(folder / "0.lce")))]


@pytest.mark.slow
def test_two_ranks_are_as_one(tmp_path: Path, tiny_model: Path) -> None:
    save_tiny(_made(tmp_path / "one head"), num_key_value_heads=1)
    asked = [Asked(tiny_model)]
    (first, errors), (second, others) = on_ranks(2, tmp_path, everyday, asked, tmp_path)
    assert_as_one([first[0], second[0]], asked[0], tmp_path / "0.lce")
    expected = [
        "UsageError: infllm cannot be divided among 2 ranks: all heads make one choice",
        "UsageError: longheads cannot be divided among 2 ranks: all heads make one choice; give share=head",
        "UsageError: longheads cannot be divided among 2 ranks: all heads make one choice",
        "UsageError: pages cannot be divided among 2 ranks: random choices",
        "UsageError: 2 ranks; expected 1 or fewer: the model has 1 key/value heads",
        "UsageError: block is 8 on rank 0 and 16 on rank 1; expected the same on all ranks",
        "ModelError: ",
        "UsageError: a list of prompts is for a model on one rank",
        "UsageError: a batch is for a model on one rank",
        "UsageError: a trace is for a model on one rank",
        "UsageError: ",
    ]
    for one, words in zip(errors, expected, strict=True):
        assert one.startswith(words), one
    assert [others[i] for i in (6, 10)] == [f"RankError: rank 0: {errors[i].partition(': ')[2]}" for i in (6, 10)]
    assert [*others[:6], *others[7:10]] == [*errors[:6], *errors[7:10]]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "phi3": {"original_max_position_embeddings": 64},
    "gemma3_text": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16},
    "smollm3": {},
}
FAMILIES["gemma3_text"] |= {"sliding_window": 24, "sliding_window_pattern": 2}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("longheads", CHUNKS),
    ("longheads", CHUNKS | {"share": "group"}),
    ("dca", {"chunk_size": 24}),
    ("pages", {"page": 4}),
    ("quest", {"page": 4}),
    ("lm_infinite", {"local": 24, "top_k": 4}),
]
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4}  # of which 3 ranks have 2, 1 and 1 KV heads


@slow
def test_three_ranks_are_as_one(tmp_path: Path) -> None:
    """In every family, and with methods that keep states of their own, budgets, and 8 bits."""
    folders = {}
    for name, changes in FAMILIES.items():
        own = {"model_type": name, "architectures": [families()[name].architecture], **EIGHT, **changes}
        folders[name] = save_tiny(_made(tmp_path / name), **own)
    llama = folders["llama"]
    asked = [Asked(folder) for folder in folders.values()]
    asked += [Asked(llama, name, knobs) for name, knobs in METHODS]
    asked.append(Asked(llama, options={"kv_device_budget": 70_000, "spill_dir": tmp_path / "spill"}))
    asked += [Asked(llama, options={"kv_dtype": kv_dtype}) for kv_dtype in ("int8", "int8-device")]
    asked.append(Asked(llama, options={"prefill_method": "full"}))
    rounded = Asked(llama, "full", {}, {"dtype": "bfloat16"})
    found = on_ranks(3, tmp_path, all_said, [*asked, rounded], tmp_path, limit_s=300)
    for i, each in enumerate(asked):
        assert_as_one([ranks[i] for ranks in found], each, tmp_path / f"{i}.lce")
    exact, one, three = Asked(llama, "full", {}).load().logits(IDS), rounded.load().logits(IDS), found[0][-1].logits
    assert (three - exact).abs().mean() < 1.5 * (one - exact).abs().mean()


@slow
def test_quantised_matrices_are_divided(tmp_path: Path) -> None:
    """Those of a GGUF file, and those that loading rounds: a scale belongs to the same weights as on one rank."""
    wide = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
    folder = save_tiny(_made(tmp_path / "wide"), hidden_size=256, **wide)
    quantised = save_gguf(folder / "a.gguf", as_saved(folder), "Q4_K")
    options = {"dtype": "float32"}
    asked = [Asked(quantised, options=options), Asked(folder, options={"weights": "int8"})]
    found = on_ranks(2, tmp_path, all_said, asked, tmp_path, limit_s=200)
    for i, each in enumerate(asked):
        engine = each.load()
        assert torch.equal(found[0][i].logits, found[1][i].logits)
        assert (found[0][i].logits - engine.logits(IDS)).abs().max() < 0.02 * engine.logits(IDS).abs().max()


def logits(group: Any, asked: Asked) -> Tensor:
    return asked.load(group).logits(IDS)


@slow
def test_a_real_model_on_three_ranks(tmp_path: Path, smollm2: Path) -> None:
    """Beside float32, bfloat16 on three ranks is as exact as on one.

    A method that chooses keys would not tell: where two scores are nearly equal, rounding decides what is attended.
    """
    asked = [Asked(smollm2, "full", {}, {"dtype": dtype}) for dtype in ("float32", "bfloat16")]
    found = on_ranks(3, tmp_path, logits, asked[1], limit_s=100)
    exact, rounded = (each.load().logits(IDS) for each in asked)
    assert torch.equal(found[0], found[2])
    assert (found[0] - exact).abs().mean() < 1.2 * (rounded - exact).abs().mean()


def went_on(group: Any, asked: Asked, file: Path, out: Path) -> list[int]:
    engine = asked.load(group)
    context = engine.open_context(file)
    answer = engine.generate(QUESTION, context=context, max_tokens=6).token_ids
    context.save(out)
    return answer


@slow
def test_a_context_goes_from_two_ranks_to_three_and_to_one(tmp_path: Path) -> None:
    """As if the text had never stopped."""
    asked = Asked(save_tiny(_made(tmp_path / "tiny"), **EIGHT))
    engine = asked.load()
    context = engine.prefill(IDS)
    context.save(tmp_path / "a.lce")
    expected = [engine.generate(QUESTION, context=context, max_tokens=6).token_ids for _ in range(3)]
    files = [tmp_path / f"{name}.lce" for name in "abcd"]
    answers = []
    for count, (file, out) in zip((2, 3), pairwise(files), strict=False):
        found = on_ranks(count, tmp_path, went_on, asked, file, out)
        assert found == [found[0]] * count
        answers.append(found[0])
    answers.append(went_on(None, asked, files[2], files[3]))
    assert answers == expected


def in_other_ways(group: Any, model: Path, folder: Path) -> list[Any]:
    """What an engine says in chats, with another method, after an eviction and a truncation, and when it scores."""
    engine = lce.load(model, lce.methods.make("longheads", CHUNKS), ranks=group, block=32)
    chat, whole = engine.conversation("be brief"), lce.Engine(engine.setup.using("full"))
    found = [chat.stream(question, max_tokens=5).finish().token_ids for question in ("one", "two")]
    context, file = whole.prefill(IDS), folder / f"{group is None}.lce"
    half = whole.evict(context, 0.5)
    half.save(file)
    whole.prefill_file(IDS, file.with_suffix(".prefilled"), keep=0.5)
    context.truncate(30)
    contexts = half, context, whole.open_context(file), whole.open_context(file.with_suffix(".prefilled"))
    found += [whole.generate(QUESTION, context=each, max_tokens=5).token_ids for each in contexts]
    scores = engine.score(IDS).logprobs.tolist()
    return [*found, [round(score, 3) for score in scores]]


@slow
def test_chats_scores_and_evictions_are_those_of_one_rank(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}"
    model = save_chat(_made(tmp_path / "chatty"), template)
    found = on_ranks(2, tmp_path, in_other_ways, model, tmp_path)
    assert found == [in_other_ways(None, model, tmp_path)] * 2


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": "other"}),
    ("kv_dtype", {"kv_dtype": "int8-device"}),
    ("dtype", {"dtype": "bfloat16"}),
    ("window", {"window": 32}),
    ("method", {"method": "dca"}),
    ("rope kind", {"rope": "ntk", "rope_factor": 2}),
    ("attention", {"attention": "reference"}),
]


def apart(group: Any, folder: Path) -> list[str]:
    """What ranks say that load, and then ask, what the second alone was given. In the end they agree."""
    second = group.rank() == 1

    def load(**own: Any) -> lce.Engine:
        given = {"model": "one", "method": "longheads"} | (own if second else {})
        return lce.load(folder / given.pop("model"), given.pop("method"), ranks=group, block=32, **given)

    found = [told(lambda own=own: load(**own)) for _, own in MODELS]
    engine = load(kv_dtype="auto")
    ids, other = (IDS[:-1], [*IDS[:-1], IDS[-1] ^ 1]) if second else (IDS, IDS)
    found += [
        told(call)
        for call in (
            lambda: engine.generate(ids, max_tokens=2),
            lambda: engine.prefill(other),
            lambda: engine.logits(other),
            lambda: engine.score(ids),
            lambda: engine.stream([] if second else ids),
            lambda: engine.generate(IDS, max_tokens=2 + second),
            lambda: engine.generate(IDS, max_tokens=2, temperature=1.0 * second),
            lambda: engine.generate(IDS, max_tokens=2, temperature=1.0, seed=int(second)),
            lambda: engine.new_context(20 + second),
        )
    ]
    packed = lce.load(folder / "one", ranks=group, block=32, kv_dtype="int8-device")
    context = packed.prefill(IDS)
    context.save(folder / "packed.lce")
    context.fork().save(folder / "again.lce")
    found.append(told(lambda: packed.open_context(folder / ("again.lce" if second else "packed.lce"))))
    answers = [
        packed.generate(QUESTION, context=x, max_tokens=6).token_ids
        for x in (context, packed.open_context(folder / "packed.lce"))
    ]
    return [*found, str(answers)]


@pytest.mark.slow
def test_ranks_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """Other weights of one shape would answer garbage; other prompts would end in an error of gloo."""
    for seed, name in enumerate(("one", "other")):
        save_tiny(_made(tmp_path / name), seed)
    first, second = on_ranks(2, tmp_path, apart, tmp_path)
    expected = [f"UsageError: {name} is " for name, _ in MODELS]
    expected += ["UsageError: prompt is '150 tokens of SHA-256 ", *["UsageError: prompt is "] * 3]
    expected += ["RankError: rank 1: the prompt is empty", "UsageError: max_tokens is 2 on rank 0 and 3 on rank 1; "]
    expected += [
        "UsageError: temperature is 0.0 on rank 0 and 1.0 on",
        "UsageError: seed is 0 on",
        "UsageError: length is 20",
        "UsageError: file is ['",
    ]
    for one, words in zip(first[:-1], expected, strict=True):
        assert one.startswith(words), one
        assert one.startswith("Rank") or (" on rank 0 and " in one and " on rank 1; " in one)
    empty = expected.index("RankError: rank 1: the prompt is empty")
    assert second[empty].startswith("UsageError: the prompt is empty")
    assert first[:empty] + first[empty + 1 :] == second[:empty] + second[empty + 1 :]
    packed = lce.load(tmp_path / "one", block=32, kv_dtype="int8-device")
    one = [
        packed.generate(QUESTION, context=x, max_tokens=6).token_ids
        for x in (packed.prefill(IDS), packed.open_context(tmp_path / "packed.lce"))
    ]
    assert first[-1] == str(one)


def mistaken(group: Any, model: Path, folder: Path) -> list[str]:
    """What ranks say to calls whose arguments are wrong on the second rank alone. In the end they agree."""
    second = group.rank() == 1
    engine = lce.load(model, "full", ranks=group, block=32)

    def given(right: Any, wrong: Any) -> Any:
        return wrong if second else right

    context, chat, file = engine.prefill(IDS[:40]), engine.conversation(), folder / "mistaken.lce"
    calls: list[Callable[[], object]] = [
        lambda: engine.generate(IDS, max_tokens=given(2, -1)),
        lambda: engine.generate(IDS, **given({}, {"colour": 1})),
        lambda: engine.stream(IDS, temperature=given(0, "hot")),
        lambda: engine.generate(IDS, max_tokens=1, context=given(context, "context")),
        lambda: engine.prefill(IDS, progress=given(None, "bar")),
        lambda: engine.prefill(IDS, length=given(300, -3)),
        lambda: engine.score(IDS, progress=given(None, "bar")),
        lambda: engine.evict(context, given(0.5, 2.0)),
        lambda: engine.evict(context, 0.5, progress=given(None, "bar")),
        lambda: engine.prefill_file(IDS, file, keep=given(0.5, 7)),
        lambda: engine.prefill_file(IDS, given(file, 3)),
        lambda: engine.prefill_file(given(IDS, [-1]), file),
        lambda: engine.open_context(given(file, None)),
        lambda: engine.new_context(given(30, "many")),
        lambda: chat.ask(given("one", [{"role": "nobody"}]), max_tokens=2),
        lambda: chat.ask("one", max_tokens=2, context=given(None, context)),
        lambda: engine.chat("one", max_tokens=2, context=given(None, 5)),
        lambda: engine.generate(IDS, max_tokens=2, schema=given(None, {"type": "array"})),
    ]
    said = [told(call) for call in calls]
    return [*said, str(engine.generate(IDS, max_tokens=5).token_ids)]


def test_what_is_wrong_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    model = save_chat(_made(tmp_path / "chatty"), "{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}")
    first, second = on_ranks(2, tmp_path, mistaken, model, tmp_path)
    assert first[-1] == second[-1]
    for one, other in zip(first[:-1], second[:-1], strict=True):
        words = one.removeprefix("RankError: rank 1: ")
        assert (words in other and one != words) or (one == other and " on rank 0 and " in one), (one, other)


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "bfloat16"},
    "weights": {"weights": "int8"},
    "block": {"block": 16},
    "window": {"window": 32},
    "rope": {"rope": "ntk", "rope_factor": 4},
    "rope_factor": {"rope": "ntk", "rope_factor": 8},
    "kv_dtype": {"kv_dtype": "int8"},
    "prefill_method": {"prefill_method": "full"},
    "method_options": {"method_options": {"chunk_size": 8}},
    "attention": {"attention": "reference"},
}
OWN = {
    "kv_device_budget",
    "kv_host_budget",
    "spill_dir",
    "threads",
    "length",
    "ranks",
    "device",
}  # each rank has its own


def test_ranks_compare_every_option_that_can_change_a_token(tiny_model: Path) -> None:
    """An option of `lce.load` is compared, or cannot change a token of a given method and kind of device."""
    assert CHANGES.keys() | OWN == options_of(LoadOptions).keys()
    plain = lce.load(tiny_model, "longheads").setup
    found = [facts_of(lce.load(tiny_model, "longheads", **each).setup) for each in CHANGES.values()]
    distinct = {repr(facts) for facts in (facts_of(plain), *found)}
    assert len(distinct) == 1 + len(CHANGES)
    assert facts_of(replace(plain, eos_ids=frozenset({9}))) != facts_of(plain)


def lost(group: Any, folder: Path, ends: bool) -> str:
    """The error of the first rank, after the second was killed or did not answer."""
    engine = lce.load(folder, ranks=group)
    stream = engine.stream(tokens(20), max_tokens=2000)
    for n, _ in enumerate(stream):
        if group.rank() == 1 and n == 5:
            os.kill(os.getpid(), signal.SIGKILL if ends else signal.SIGSTOP)
    return "nothing"


@slow
@pytest.mark.parametrize("ends", [True, False])
def test_no_rank_waits_for_one_that_is_lost(ends: bool, tmp_path: Path, tiny_model: Path) -> None:
    first, second = begun(2, tmp_path, lost, tiny_model, ends, limit_s=8)
    with first, second:
        error = first.communicate()[1]
        second.kill()
        second.communicate()
    assert first.returncode == 1
    assert "RankError: another rank has ended or does not answer" in error


def torchrun(*args: Any, stdin: str = "") -> tuple[int, str, list[str]]:
    """A command line on two ranks: the exit code, what it wrote, and lce's lines of stderr."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lce", *args]
    with Process(line, stdin=-1) as process:
        out, err = process.communicate(stdin)
    return process.returncode, out, [x for x in err.splitlines() if x.startswith("lce: ") and "compiling" not in x]


@slow
def test_commands_on_two_ranks_print_once(tmp_path: Path, tiny_model: Path) -> None:
    model = "-m", tiny_model, "--method", "longheads", *(f"-o{key}={value}" for key, value in CHUNKS.items())
    expected = run("generate", *model, "-p", PROMPT, "-n", 8).stdout
    file = tmp_path / "a.lce"
    code, out, lines = torchrun("generate", "--ranks", *model, "-p", "-", "-n", "8", "--quiet", stdin=PROMPT)
    assert (code, out, lines) == (0, expected, [])
    code, out, lines = torchrun("prefill", "--ranks", *model, "-p", PROMPT, "--out", file, "--quiet")
    assert (code, out, lines) == (0, "", [])
    assert run("generate", *model, "-c", file, "-p", " then", "-n", 4).exit_code == 0
    code, out, lines = torchrun("generate", "--ranks", "-m", tiny_model, "--method", "infllm", "-p", PROMPT)
    assert (code != 0, out, len(lines)) == (True, "", 1)
    assert lines[0].startswith("lce: error: infllm cannot be divided")


def test_ranks_are_all_or_a_group(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="no torchrun started this process; run torchrun"):
        lce.load(tiny_model, ranks="all")
    for wrong in (2, "two", True, object()):
        with pytest.raises(UsageError, match="expected None, 'all' or a group"):
            lce.load(tiny_model, ranks=wrong)


@pytest.mark.parametrize(("total", "count", "unit"), [(4, 3, 1), (7, 7, 1), (100, 3, 16), (96, 2, 32), (5, 1, 16)])
def test_ranks_have_all_parts_once(total: int, count: int, unit: int) -> None:
    spans = [Ranks(rank, count).span(total, unit) for rank in range(count)]
    assert [i for first, stop in spans for i in range(first, stop)] == [*range(total)]
    assert all(first % unit == 0 for first, _ in spans)
    sizes = [-(-(stop - first) // unit) for first, stop in spans]
    assert max(sizes) - min(sizes) <= 1


def test_a_rank_has_whole_kv_heads_with_their_query_heads(tmp_path: Path) -> None:
    config = read_config(Source(save_tiny(tmp_path, **EIGHT)))
    parts = [Division(config, Ranks(rank, 3)) for rank in range(3)]
    sizes = [(x.own.n_heads, x.own.n_kv_heads, x.own.intermediate_size) for x in parts]
    assert (sizes, parts[1].spans["query"]) == ([(4, 2, 32), (2, 1, 32), (2, 1, 32)], [(64, 96)])
    assert parts[1].spans["qkv"] == [(64, 96), (128 + 32, 128 + 48), (128 + 64 + 32, 128 + 64 + 48)]
    for wrong in (Division(config, Ranks(0, 5)), Division(config, Ranks(0, 4), 96)):
        with pytest.raises(UsageError, match="or fewer"):
            wrong.check()


def test_an_error_of_one_rank_has_its_exit_code() -> None:
    assert (RankError("rank 1: x", 4).exit_code, RankError("x").exit_code, RankError.exit_code) == (4, 1, 1)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
