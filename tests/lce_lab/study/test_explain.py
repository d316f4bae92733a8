"""What `lce explain` finds: for our methods the oracle's masks and distances; for others the truth or a refusal."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from lce.attention import rotate
from lce.cache.layer import LayerCache
from lce.errors import UsageError
from lce.methods import Method, Step, available, make, settings
from lce_lab.analysis.oracle import selects
from lce_lab.papers import ENTRIES
from lce_lab.study.explain import HEADS, MOST_TOKENS, REACH, explain, vectors
from tests import oracle
from tests.command import assert_error, run
from tests.running import cut

WINDOW, TOKENS = 16, 34
SETTINGS = {
    "dca": "; chunk_size=5; chunk_size=16; temperature=true",
    "esa": "compress=none sinks=4 top_k=5; compress=none sinks=0 local=3 top_k=4 eps=0 far=500",
    "full": "",
    "infllm": "block_size=4 sinks=3 top_k=2 repr_tokens=2; block_size=3 sinks=0 top_k=1 far=13",
    "lm_infinite": "sinks=2 local=9; sinks=0 local=1; sinks=3 top_k=3",
    "longheads": "chunk_size=2; chunk_size=4 share=group; chunk_size=3 rank=last keep_first=false; chunk_size=1; "
    "chunk_size=2 placement=true; chunk_size=3 placement=constant",
    "oracle": "chunk_size=2",
    "pages": "page=2 budget=8 placement=side_by_side; "
    "page=3 budget=15 select=summary placement=grouped placement.group=3 budget.local=3; "
    "page=2 budget=10 select=mean placement=dual placement.chunk_size=6; "
    "page=2 budget=8 placement=constant select=representatives",
    "quest": "; dense_layers=0 page=2 budget=8",
    "random": "chunk_size=2",
    "reattention": "; span=3 local=4 sinks=0 top_k=1; span=2 top_k=1 share=group",
    "rerope": "; local=1; log_scale=true",
    "self_extend": "; local=7 group=3",
    "streaming": "; sinks=0; sinks=1 local=1",
}


def knobs_of(name: str, text: str) -> dict[str, object]:
    given = dict(knob.split("=", 1) for knob in text.split())
    return {knob: value for knob, value in settings(make(name, given)).items() if knob in given}


KNOBS = {name: [knobs_of(name, text) for text in texts.split(";")] for name, texts in SETTINGS.items()}
# Figure 2 of Dual Chunk Attention: 12 tokens, chunks of 6, a model trained on 10.
FIGURE_2 = [line.split() for line in ENTRIES["dca:figure2"].measures[0].printed["with successive"].split("\n") if line]
FIGURE_2_ARGS = ("explain", "dca", "--tokens", "12", "--window", "10", "-o", "chunk_size=6")


def test_every_method_is_held_to_its_definition() -> None:
    assert set(KNOBS) == set(available()) == set(oracle.DEFINITIONS)


@pytest.mark.parametrize(("block", "head"), [(5, 0), pytest.param(None, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "knobs"), [(name, knobs) for name in KNOBS for knobs in KNOBS[name]], ids=str)
@pytest.mark.covering("name")
def test_finds_what_the_definition_says(name: str, knobs: dict[str, object], block: int | None, head: int) -> None:
    found = explain(make(name, knobs), tokens=TOKENS, window=WINDOW, block=block, head=head)
    q, k, v = vectors(TOKENS, 0)
    setting = oracle.Setting(WINDOW, cut(TOKENS, found.block), frequencies=torch.zeros(q.shape[-1] // 2))
    truth = oracle.DEFINITIONS[name](q, k, v, setting, **knobs)
    assert torch.equal(found.attended, truth.mask[head])
    assert torch.equal(found.distance, truth.distance[head].masked_fill(~truth.mask[head], -1))
    scale = torch.ones(TOKENS) if truth.scale is None else truth.scale
    several = found.attended.sum(dim=-1) > 1  # one weight is 1 whatever its logit is multiplied by
    assert (found.factor - scale)[several].abs().max() < 1e-3 if several.any() else True
    assert found.factor[~several].eq(1).all()


def test_large_distances() -> None:
    far = explain(make("infllm", {"sinks": 2, "local": 3, "far": REACH}), tokens=8)
    assert far.rows()[7][:5] == [REACH] * 5
    with pytest.raises(UsageError, match=f"beyond {REACH:,}"):
        explain(make("infllm", {"sinks": 2, "local": 3, "far": 2 * REACH}), tokens=8)


@dataclass(frozen=True)
class Seen(Method):
    """A method of somebody else: full attention but for what a test makes of it."""

    name: ClassVar[str] = "seen"

    shift: int = 0  # how much farther a query sees all keys
    stretch: float = 1.0  # of positions

    def key_positions(self, indices: Tensor) -> Tensor:
        return indices * self.stretch

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        places = (step.positions(q.device) + self.shift) * self.stretch
        return self.see(rotate(q, step.rope.turn(places, q.dtype)), *cache.span(0, cache.stop), step)

    def see(self, placed: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return step.attention.dense(placed, k, v, causal=True)[0]


@dataclass(frozen=True)
class Biased(Seen):
    """A penalty on old keys that is none of RoPE's, and a factor for each query."""

    def see(self, placed: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        behind = step.positions(placed.device)[:, None] - torch.arange(step.stop)
        factor = 1 + step.positions(placed.device)[:, None] / 20
        logits = placed @ k.repeat_interleave(2, 0).mT / math.sqrt(placed.shape[-1]) * factor - 0.3 * behind
        return logits.masked_fill(behind < 0, -math.inf).softmax(-1) @ v.repeat_interleave(2, 0)


@dataclass(frozen=True)
class Fickle(Seen):
    """Sees a few keys in one run of `every`, and all in the others; in every run other keys where that is 0."""

    every: int = 3
    runs: ClassVar[int] = 0

    def see(self, placed: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        n = Fickle.runs
        Fickle.runs += 1
        few = 1 + n if not self.every else 4 if n % self.every == 0 else None
        return step.attention.dense(placed, k, v, causal=True, window=few)[0]


class NoMean(Seen):
    """Gives the queries back."""

    def see(self, placed: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return placed


class Squared(Seen):
    """Weights, but no softmax."""

    def see(self, placed: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        weights = (placed @ k.repeat_interleave(2, 0).mT).square().tril(step.start)
        return weights / weights.sum(dim=-1, keepdim=True) @ v.repeat_interleave(2, 0)


def lower(n: int, distance: Callable[[int, int], int]) -> list[list[int | None]]:
    """A matrix for queries that see the keys up to their own."""
    return [[distance(i, j) if j <= i else None for j in range(n)] for i in range(n)]


def test_another_method_is_found_out_as_well() -> None:
    true = lower(20, lambda i, j: i - j)
    assert explain(Seen(), tokens=20).rows() == explain(Biased(), tokens=20).rows() == true
    assert explain(Seen(stretch=2), tokens=20).rows() == lower(20, lambda i, j: 2 * (i - j))
    assert explain(Seen(stretch=-1), tokens=20).rows() == lower(20, lambda i, j: j - i)


@pytest.mark.parametrize("shift", [1, 300, -7])
def test_a_query_may_see_itself_elsewhere(shift: int) -> None:
    """All but the first one: that it sees itself somewhere makes no difference to it."""
    found = explain(Seen(shift), tokens=20).rows()
    assert (found[0][0], found[2:]) == (0, lower(20, lambda i, j: i - j + shift)[2:])


def test_a_choice_that_changes_between_runs_does_not_mislead() -> None:
    Fickle.runs = 0
    found = explain(Fickle(every=3), tokens=20)
    assert found.rows() == [[i - j if 0 <= i - j < 4 else None for j in range(20)] for i in range(20)]
    assert Fickle.runs > 30  # of which every third could be used


def test_a_method_that_cannot_be_read_is_refused() -> None:
    Fickle.runs = 0
    refused = {Seen(stretch=0.5): "not whole", Fickle(every=0): "attends other keys at the slightest change"}
    for method, why in (refused | {NoMean(): "no weighted mean", Squared(): "no softmax over products"}).items():
        with pytest.raises(UsageError, match=f"seen: the distances cannot be read off its output: .*{why}"):
            explain(method)


def test_what_cannot_be_asked() -> None:
    for asked, message in (
        ({"tokens": 0}, "tokens is 0; expected 1 or more"),
        ({"tokens": MOST_TOKENS + 1}, f"expected {MOST_TOKENS} or less"),
        ({"window": REACH + 1}, f"expected {REACH} or less"),
        ({"block": 0}, "block is 0; expected 1 or more"),
        ({"head": HEADS}, f"head is {HEADS}; expected {HEADS - 1} or less"),
        ({"head": -1}, "head is -1"),
    ):
        with pytest.raises(UsageError, match=message):
            explain(make("full"), **asked)
    assert explain(make("full"), tokens=1).rows() == [[0]]


@pytest.mark.parametrize("name", available())
def test_a_name_alone_shows_the_idea(name: str) -> None:
    """An example is small, and in it chunks are larger than a token and choices are left open."""
    found = explain(name)
    assert found.tokens < 2 * found.window + 1
    assert found.distance.max() < found.window or name in {"full", "quest"}
    if selects(found.method):
        assert found.method.choices[1] > 1 or name == "esa"
        other = explain(name, seed=1) if name != "random" else explain(name, knobs={"seed": 1})
        assert not torch.equal(found.attended, other.attended)
        assert not torch.equal(found.attended, found.attended.tril().cummax(dim=0).values.tril())  # it lets go
    else:
        assert torch.equal(found.attended, explain(name, seed=1).attended) or name == "lm_infinite"


def test_what_a_name_stands_for() -> None:
    assert explain("longheads").method == make("longheads", {"chunk_size": 2, "chunks": 6, "local": 2})
    assert explain("longheads", knobs={"chunk_size": "3"}).method == make(
        "longheads", {"chunk_size": 3, "chunks": 4, "local": 3}
    )
    assert explain("longheads", window=64).method == make("longheads").resolve(64)
    assert (explain("infllm").block, explain("infllm", block=2).block) == (3, 2)
    with pytest.raises(UsageError, match="2 chunks of 256 tokens"):
        explain("longheads", knobs={"preset": "released", "chunks": 2})
    with pytest.raises(UsageError, match="give an instance its knobs"):
        explain(make("dca"), knobs={"chunk_size": 3})


def test_prints_an_aligned_matrix_or_json() -> None:
    result = run(*FIGURE_2_ARGS)
    assert (result.exit_code, result.stderr) == (0, "")
    title, setting, empty, heads, rule, *rows = result.stdout.splitlines()
    assert title == "dca(chunk_size=6, parts=all, temperature=False, far=9)"
    assert setting.startswith("window 10, 12 tokens, block 12, head 0")
    assert (empty, rule, heads.split()) == ("", "----+" + "-" * 36, ["i\\j", "|", *map(str, range(12))])
    assert {len(line) for line in (heads, rule, *rows)} == {41}
    assert [row.split() for row in rows] == [[str(i), "|", *row] for i, row in enumerate(FIGURE_2)]
    got = json.loads(run(*FIGURE_2_ARGS, "--json", "--block", "5", "--head", "2").stdout)
    assert got.pop("distances") == [[None if d == "." else int(d) for d in row] for row in FIGURE_2]
    knobs = {"chunk_size": 6, "parts": "all", "temperature": False, "far": 9}
    assert got == {"method": "dca", "knobs": knobs, "window": 10, "tokens": 12, "block": 5, "head": 2, "seed": 0}


def test_refuses_in_one_line(tmp_path: Path) -> None:
    assert_error(run("explain", "dcaa"), 2, "unknown method 'dcaa'; did you mean 'dca'?")
    assert_error(run("explain", "dca", "-o", "chunk_size=13"), 2, "at most the window, 12")
    assert_error(run("explain", "dca", "--plot", tmp_path / "a.pgn"), 2, "a.pgn", "did you mean '.png'?", ".svg")
    assert list(tmp_path.iterdir()) == []
