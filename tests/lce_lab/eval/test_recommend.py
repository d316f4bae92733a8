"""`recommend`: turns within the time, the length that the time affords, what is told apart, and the command."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lce.methods import measured
from lce.methods.choices import CANDIDATES, Choice
from lce_lab.eval import recommend as module
from lce_lab.eval.recommend import FULL, Probe, Recommendation, recommend
from lce_lab.eval.scores import Score
from tests.advising import advised, asked
from tests.command import ran, run

SOME = CANDIDATES[:2]
ALL = [each.at(256) for each in CANDIDATES]  # for a window of 256
OWN = [each for each in ALL if each.window is None]  # what is asked if a user named the window


@pytest.fixture(autouse=True)
def _kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept in the test's folder."""
    monkeypatch.setattr(measured, "cache_home", lambda: tmp_path / "cache")


class Clock:
    """A clock that stands still, except while a method is asked a text: then `pace(its name, length)` seconds pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pace: Callable[[str, int], float]) -> None:
        self.now, self.asked = 0.0, list[tuple[str, int]]()
        asking = module.MadeSuite.answers
        monkeypatch.setattr(module, "speed", lambda engine, clock: 1e-9)
        monkeypatch.setattr(module, "work", lambda engine, n_tokens: float(n_tokens**1.5))
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

        def answers(suite: module.MadeSuite, engine: module.lce.Engine, *what: object, **how: object) -> object:
            name, length = engine.method.label, what[1]
            assert isinstance(length, int)
            self.asked.append((name, length))
            self.now += pace(name, length)
            return asking(suite, engine, *what, **how)  # type: ignore[arg-type]

        monkeypatch.setattr(module.MadeSuite, "answers", answers)


def test_with_time_every_method_reads_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    Clock(monkeypatch, lambda name, n_tokens: 1.0)
    found = recommend("demo", seconds=8.0, task="passkey", some=SOME, progress=lambda *done: told.append(done))
    assert (found.left, len({(probe.length, len(probe.values)) for probe in found.probes})) == ([], 1)
    scores = [(-probe.score.mean, probe.score.read_bytes or 0) for probe in found.probes]
    assert scores == sorted(scores)
    assert found.ceiling.score.mean > 0.9, "the demo model finds pass keys within its window"
    assert (told, {total for _, total in told}) == (sorted(told), {8})


@pytest.mark.parametrize(
    ("seconds", "length", "rounds"),
    [(100.0, 384, 6), (17.0, 384, 1), (16.0, 352, 1), (13.0, 320, 1), (12.0, 288, 1), (9.0, 288, 0)],
)
def test_the_time_affords_a_length_and_rounds(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, length: int, rounds: int
) -> None:
    """A text of 128 tokens takes a second. Three methods take turns in whole rounds, behind one text of each."""
    clock = Clock(monkeypatch, lambda name, n_tokens: (n_tokens / 128) ** 1.5)
    some = CANDIDATES[:3]
    found = recommend(str(tiny_model), seconds=seconds, task="code", some=some, window=256)
    assert {n_tokens for name, n_tokens in clock.asked if name != "full"} == {length}
    assert clock.asked[0] == ("full", 128)
    assert clock.now <= seconds
    if rounds:
        whole = [("full", 128), *((each.method, length) for each in some)] * rounds
        assert (clock.asked, found.left) == (whole, [])
    assert len({len(each.values) for each in found.probes}) == 1


def test_a_turn_that_does_not_fit_is_not_begun(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda name, n_tokens: 1.0 if name == "full" else 10.0)
    found = recommend(str(tiny_model), seconds=25.0, length=300, task="code", some=ALL, window=256)
    assert sorted((ALL.index(each.choice), each.length) for each in found.probes) == [(0, 300), (1, 300)]
    assert (list(found.left), clock.now) == (list(ALL[2:]), 21.0)


def made(method: str, right: str, read_bytes: float) -> Probe:
    """A probe whose answers are right where `right` has a 1."""
    values = [float(each) for each in right]
    score = Score(len(values), sum(values) / len(values), 0.0, 1.0, "Wilson", read_bytes)
    return Probe(Choice(method), values, read_bytes, 300, score, 1.0)


@pytest.mark.parametrize(
    ("usual", "chosen"),
    [("rerope", "rerope"), ("pages", "pages"), ("longheads", "pages")],  # longheads is told apart: pages reads less
)
def test_what_auto_takes_is_chosen_unless_others_are_better(usual: str, chosen: str) -> None:
    probes = made("rerope", "11111111", 30), made("pages", "10101111", 20), made("longheads", "10000000", 10)
    found = Recommendation(300, Choice(usual), made("full", "11111111", 10), probes, [])
    assert [each.choice.method for each in found.alike] == ["rerope", "pages"]
    assert found.chosen.method == chosen
    assert Recommendation(300, Choice(usual), None, [], []).chosen.method == usual


def test_a_reading_that_takes_too_long_is_left(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is read block by block; when the time is over, no further block is read."""
    monkeypatch.setattr(module, "speed", lambda engine, clock: 1e-9)
    now, prefill, ended = [0.0], module.lce.Engine.prefill, list[int]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(engine: module.lce.Engine, ids: list[int], *, progress: Callable[[int, int], None], **how: Any) -> Any:
        def tick(done: int, total: int) -> None:
            now[0] += 0.01 if engine.method.name == "full" else 1.0
            ended.append(done)
            progress(done, total)

        return prefill(engine, ids, progress=tick, **how)

    monkeypatch.setattr(module.lce.Engine, "prefill", slow)
    found = recommend(str(tiny_model), seconds=5.0, task="code", window=256, length=300, block=16)
    assert ([*found.left], [*found.probes]) == (OWN, [])
    assert found.chosen == found.usual == advised(300, tiny_model, window=256)
    assert now[0] < 7.0
    assert ended[-1] < 150, "of 300 tokens"


@pytest.mark.parametrize(("seconds_a_token", "read"), [(1e-3, [16, 16, 64]), (1.0, [16, 16])])
def test_a_slow_model_reads_few_tokens_first(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, seconds_a_token: float, read: list[int]
) -> None:
    now, seen, prefill = [0.0], list[int](), module.lce.Engine.prefill
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(engine: module.lce.Engine, ids: list[int], **how: Any) -> Any:
        seen.append(len(ids))
        now[0] += seconds_a_token * len(ids)
        return prefill(engine, ids, **how)

    monkeypatch.setattr(module.lce.Engine, "prefill", slow)
    recommend(str(tiny_model), seconds=60.0, task="code", window=256, some=SOME)
    assert seen[: len(read)] == read
    assert now[0] <= 60.0


def test_a_slow_model_is_asked_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first small reading says that no method's text would end in time."""
    told = list[str]()
    monkeypatch.setattr(module.MadeSuite, "answers", None)
    monkeypatch.setattr(module, "speed", lambda engine, clock: 1.0)
    found = recommend(str(tiny_model), seconds=100.0, task="code", window=256, tell=told.append)
    assert (found.ceiling, [*found.probes], found.left[0], found.length) == (None, [], found.usual, 288)
    assert found.needed > 100
    assert told[0].startswith("full attention reads ")


def test_the_command(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time it says at once what it does, what it could not do, and what `auto` takes."""
    asked = ("recommend", "--model", str(tiny_model), "--window", "256", "--task", "code", "--seconds")
    result = ran(*asked, "0")
    head, *left, _, best = result.stdout.splitlines()
    assert head.split()[:3] == ["method", "tokens", "right"]
    assert [line.split() for line in left] == [[*each.spelled.split(), "288", "not", "asked"] for each in OWN]
    assert best.startswith(
        "take --method rerope: no method was asked; --method auto takes it for texts of 288 tokens: "
    )
    first, *_ = result.stderr.splitlines()
    assert first.endswith("is asked for facts in texts beyond its window, by several methods, 0 s at most")
    assert "there was no time for rerope, self_extend" in result.stderr
    Clock(monkeypatch, lambda name, n_tokens: 1.0)
    result = ran(*asked, "7")
    head, ceiling, first, *_, best = result.stdout.splitlines()
    assert (ceiling.split()[0], first.split()[1]) == (FULL.method, "288")
    assert "A row is a method: " in result.stdout
    others = best.partition("cannot tell ")[2].removesuffix(" apart from it").split(", ")
    assert best.startswith("take --method rerope: --method auto takes it for texts of 288 tokens, and 1 question ")
    assert {*others} == {each.spelled for each in OWN[1:]}
    assert "what methods find says little" in result.stderr  # random weights find nothing
    Clock(monkeypatch, lambda name, n_tokens: 1.0)
    found = json.loads(run(*asked, "7", "--json", "--quiet").stdout)
    assert (found["ceiling"]["questions"], found["ceiling"]["length"], found["length"]) == (1, 128, 288)
    assert found["recommended"] == found["auto"] == {"method": "rerope", "knobs": {}}
    assert found["not_asked"] == []


def test_what_cannot_be_asked(tiny_model: Path) -> None:
    for options, words in (("--task cod", "did you mean 'code'"), ("--length 8", "at least"), ("--seconds -1", "-1")):
        result = run("recommend", "--model", str(tiny_model), *options.split())
        assert result.exit_code == 2
        assert words in result.stderr.splitlines()[-1]


def test_auto_takes_what_was_kept(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command keeps the scores of all methods, and from then on `auto` names what was found on this model."""
    Clock(monkeypatch, lambda name, n_tokens: 1.0)
    how = ("--model", str(tiny_model), "--window", "256", "--task", "code", "--seconds", "7", "--json")
    monkeypatch.setattr("lce_lab.eval.report.fails", lambda score: None)  # random weights find nothing
    found = json.loads(ran("recommend", *how).stdout)
    (kept,) = measured.measurements(asked(tiny_model).source.checkpoint.fingerprint)
    assert (str(tmp_path / "cache" / "measured"), kept.length, kept.window) == (
        str(Path(found["kept"]).parent),
        288,
        256,
    )
    assert [each.choice.method for each in kept.trials] == [each["method"] for each in found["probes"]]
    assert kept.settings["task"] == "code"
    assert f"measured on this model on {kept.day}" in advised(288, tiny_model, window=256).reason
    assert "SmolLM2" in advised(288, tiny_model, window=250).reason, "another window"


def test_what_tells_little_or_has_a_scaling_is_not_kept(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda name, n_tokens: 1.0)
    how = ("--model", str(tiny_model), "--window", "256", "--task", "code", "--seconds", "7", "--json")
    assert json.loads(ran("recommend", *how).stdout)["kept"] is None
    monkeypatch.setattr("lce_lab.eval.report.fails", lambda score: None)
    assert json.loads(ran("recommend", *how, "--rope", "ntk", "--rope-factor", "1").stdout)["kept"] is None


def test_it_says_which_lengths_fit(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    Clock(monkeypatch, lambda name, n_tokens: (n_tokens / 128) ** 1.5)
    some = CANDIDATES[:3]
    found = recommend(str(tiny_model), seconds=13.0, task="code", some=some, window=256, tell=told.append)
    assert list(found.affords) == [320, 288]
    assert told[-1] == "of 384, 352, 320, 288 tokens, the time is enough for every method at 320, 288"
