"""The methods that a command line names, what `all` stands for, and whether a text fits."""

import json
from pathlib import Path

import pytest

import lce
from lce.engine.options import SizeOptions
from lce.errors import UsageError
from lce.methods import registry
from lce_lab.terminal.methods import check_capacity, knobs_for, methods_of
from tests.command import assert_error, run

ANALYSIS = {name for name in lce.methods.available() if "analysis" in lce.methods.promises_of(lce.methods.find(name))}
SERVING = [name for name in lce.methods.available() if name not in ANALYSIS]

OUT = {"full", "esa"}  # the first, and the one without maps


def names_of(found: list[lce.Method]) -> list[str]:
    return [method.name for method in found]


def test_a_knob_for_all_methods_and_for_one() -> None:
    knobs = {"window": "8", "dca.window": "9", "dca.parts": "all"}
    assert knobs_for("full", knobs, ["full", "dca"]) == {"window": "8"}
    assert knobs_for("dca", knobs, ["full", "dca"]) == {"window": "9", "parts": "all"}
    with pytest.raises(UsageError, match="did you mean 'dca'"):
        knobs_for("dca", {"dac.parts": "all"}, ["dca"])


def test_all_are_those_that_serve_the_model(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = methods_of(["all"], {}, {"model": "demo"})
    assert names_of(demo) == ["full", *(name for name in SERVING if name != "full")]
    assert demo == [lce.methods.make(method.name) for method in demo], "with their defaults"
    assert capsys.readouterr().err == ""
    assert set(SERVING) - set(names_of(methods_of(["all"], {}, {"model": tiny_model}))) == {"esa"}
    assert capsys.readouterr().err.startswith("lce: note: --method all leaves esa out: esa: this model has no calibrat")
    assert names_of(methods_of(["all", "oracle"], {}, {"model": "demo"})) == [*names_of(demo), "oracle"]
    selecting = methods_of(["all"], {}, {"model": "demo"}, selecting=True)
    assert set(names_of(selecting)) == {"esa", "infllm", "longheads", "pages", "quest", "reattention"}


def test_knobs_with_all_are_for_those_that_have_them(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {x.name: x for x in methods_of(["all"], {"top_p": "0.9", "esa.compress": "none"}, {"model": tiny_model})}
    assert (found["full"], found["longheads"]) == (lce.methods.Full(), lce.methods.LongHeads(top_p=0.9))
    assert found["esa"] == lce.methods.ESA(top_p=0.9, compress="none")
    assert capsys.readouterr().err == "", "no maps are missed"
    assert "esa" not in {x.name for x in methods_of(["all"], {"top_p": "0.9"}, {"model": tiny_model})}
    presets = {x.name: x for x in methods_of(["all"], {"preset": "released"}, {"model": "demo", "window": 4096})}
    assert presets["longheads"] == lce.methods.make("longheads", {"preset": "released"})
    for knobs, words in (
        ({"top_q": "0.9"}, "no method has the knob 'top_q'; did you mean 'top_p'"),
        ({"preset": "releases"}, "no method has the preset 'releases'; did you mean 'released'"),
        ({"oracle.budget": "64"}, "is for a method that --method does not name"),
        ({"chunk_size": "x"}, "chunk_size=x is not a whole number"),
        ({"esa.top_k": "3"}, "no calibrated maps"),  # asked for by its name
    ):
        with pytest.raises(UsageError, match=words):
            methods_of(["all"], knobs, {"model": tiny_model})


def test_a_broken_method_hides_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registry, "available", lambda: ["broken", "full"])
    monkeypatch.setattr(lce.methods, "available", registry.available)
    assert names_of(methods_of(["all"], {}, {"model": "demo"})) == ["full"]
    assert "leaves broken out: unknown method 'broken'" in capsys.readouterr().err


def test_commands_take_all(tiny_model: Path, tmp_path: Path) -> None:
    args = ("--method", "all", "--lengths", "256", "--samples", "1", "--json")
    result = run("eval", "passkey", "-m", tiny_model, "--no-ceiling", *args)
    assert [score["method"] for score in json.loads(result.stdout)][1:] == [x for x in SERVING if x not in OUT]
    assert "lce: note: --method all leaves esa out" in result.stderr
    assert_error(run("eval", "passkey", "-m", tmp_path / "none", *args), 3, "does not exist")
    assert_error(run("eval", "why", "-m", "demo", *args, "-o", "chunks=2"), 2, "longheads: 2 chunks")


def test_the_first_method_that_does_not_fit_is_refused(tiny_model: Path) -> None:
    auto = dict.fromkeys(("device", "dtype", "weights", "kv_dtype"), "auto")
    loading = dict.fromkeys(SizeOptions.__annotations__) | auto
    methods = [lce.methods.make("full"), lce.methods.make("streaming")]
    check_capacity(str(tiny_model), methods, 100, loading)
    with pytest.raises(lce.CapacityError, match="tokens"):
        check_capacity(str(tiny_model), methods, 1 << 40, loading)
