"""Why an answer is wrong, on a hand-made model whose misses have known causes (tests/lookup.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

import lce
from lce.errors import UsageError
from lce.methods import make
from lce_lab.eval.check import Question, check
from tests.command import assert_error, ran, run
from tests.lookup import save_lookup, text

pytestmark = pytest.mark.filterwarnings("ignore::lce.WindowWarning")
FAR = text(50, "7", 150)  # 150 positions away: beyond the window, and not in the first chunk or the last ones


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_lookup(tmp_path_factory.mktemp("lookup")))


def asked(document: str, expect: str = "7", fact: str = "7") -> Question:
    return Question(document, "?", expect, fact, max_tokens=1)


@pytest.mark.parametrize(
    ("name", "knobs", "document", "expect", "cause", "first"),
    [
        ("rerope", {}, FAR, "7", "answered", None),
        ("full", {}, FAR, "7", "beyond", "--method self_extend"),
        ("full", {}, FAR, "4", "model", "other words for the question"),
        ("full", {}, text(9, "7", 9), "4", "model", "other words for the question"),
        ("longheads", {"chunk_size": 8, "chunks": 8, "rank": "last"}, FAR, "7", "selection", "-o chunks=16"),
        ("longheads", {"chunk_size": 8, "chunks": 3}, FAR, "7", "placement", "--method self_extend"),
        ("esa", {"compress": "none", "sinks": 4, "local": 8, "top_k": 4}, FAR, "7", "selection", "-o top_k=8"),
        ("streaming", {}, FAR, "7", "placement", "--method self_extend"),
    ],
)
def test_known_causes(
    model: str, name: str, knobs: Any, document: str, expect: str, cause: str, first: str | None
) -> None:
    found = check(model, asked(document, expect), {"method": make(name, knobs)})
    assert (found.cause, found.tokens) == (cause, len(document) + 3), found.answers
    assert next(iter(found.next), None) == first
    assert f"--method {name}" not in found.next


def test_the_text_is_read_once_and_a_part_within_the_window(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, told, prefill = list[int](), list[str](), lce.Engine.prefill

    def counted(engine: lce.Engine, ids: list[int], **how: Any) -> lce.Context:
        read.append(len(ids))
        return prefill(engine, ids, **how)

    monkeypatch.setattr(lce.Engine, "prefill", counted)
    method = make("longheads", {"chunk_size": 8, "chunks": 8, "rank": "last"})
    found = check(model, asked(FAR), {"method": method}, tell=told.append)
    (whole,) = read
    assert whole <= found.tokens
    assert [*found.answers] == ["longheads", "full, 30 tokens around the fact", "chosen by true attention"]
    assert told == ["longheads reads 204 tokens, then full attention some of them within the window"]


def test_the_command(model: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(FAR)
    ask = ("check", "-m", model, "-f", tmp_path / "text.txt", "-p", "?", "-n", "1", "--expect")
    result = ran(*ask, "7")
    *answers, _, reason, advice = result.stdout.splitlines()
    assert [line.split()[0] for line in answers] == ["full", "full,"]
    assert (reason, advice) == (
        "205 tokens are beyond the 64 that the method reads of this model",
        "try --method self_extend",
    )
    assert "lce: full reads 204 tokens" in result.stderr
    tried = json.loads(ran(*ask, "7", "--method", "auto", "--json").stdout)
    assert (tried["cause"], tried["method"], tried["next"]) == ("answered", "self_extend", [])
    assert json.loads(ran(*ask, "4", "--fact", "7", "--json").stdout)["cause"] == "model"
    assert_error(run(*ask, "8"), 2, "the text does not have '8'", "give --fact")
    with pytest.raises(UsageError, match="--fact"):
        asked(FAR, fact="none").at()
