"""`recommend`: turns within the time, the order of what was found, and the command."""

import json
from pathlib import Path

import pytest

from lce.lab.eval.recommend import recommend
from lce.methods.auto import CANDIDATES
from tests.command import assert_error, run

SOME = CANDIDATES[:2]


def test_without_time_the_ceiling_and_one_method_are_asked(tiny_model: Path) -> None:
    found = recommend(str(tiny_model), seconds=0.0, task="code", candidates=SOME, window=256)
    assert found.ceiling.choice.method == "full"
    assert [probe.choice for probe in found.probes] == [SOME[0]]
    assert list(found.left) == [SOME[1]]
    assert found.ceiling.length < found.probes[0].length


@pytest.mark.slow
def test_with_time_every_method_reads_the_same_texts() -> None:
    told: list[tuple[int, int]] = []
    found = recommend("demo", seconds=8.0, task="passkey", candidates=SOME, progress=lambda *done: told.append(done))
    assert found.left == []
    assert {probe.length for probe in found.probes} == {768}
    scores = [(-probe.score.mean, probe.score.read_bytes or 0) for probe in found.probes]
    assert scores == sorted(scores)
    assert found.ceiling.score.mean > 0.9, "the demo model finds pass keys within its window"
    assert told == sorted(told)
    assert all(total == 8 for _, total in told)


def test_the_command(tiny_model: Path) -> None:
    asked = ("recommend", "--model", str(tiny_model), "--window", "256", "--seconds", "0", "--task", "code")
    result = run(*asked)
    assert result.exit_code == 0, result.stderr
    head, ceiling, *_, best = result.stdout.splitlines()
    assert head.split()[:3] == ["method", "tokens", "right"]
    assert ceiling.split()[0] == "full"
    assert best == f"best of these: --method {CANDIDATES[0].spelled}"
    assert "there was no time for" in result.stderr
    assert "what methods find says little" in result.stderr, "random weights find nothing"
    found = json.loads(run(*asked, "--json", "--quiet").stdout)
    assert found["probes"][0]["method"] == CANDIDATES[0].method
    assert found["ceiling"]["questions"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "cod"), "unknown task 'cod'; did you mean 'code'"),
        (("--length", "8", "--task", "code"), "expected at least"),
        (("--seconds", "-1"), "-1"),
    ],
)
def test_what_cannot_be_asked(tiny_model: Path, options: tuple[str, ...], message: str) -> None:
    assert_error(run("recommend", "--model", str(tiny_model), *options), 2, message)
