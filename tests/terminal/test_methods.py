"""The methods that a command line names, what `all` stands for, and whether a text fits."""

import json
from pathlib import Path

import pytest

import lce
from lce.engine.loading import SizeOptions
from lce.errors import UsageError
from lce.methods import registry
from lce.terminal.methods import check_capacity, knobs_for, methods_of
from tests.command import assert_error, run
from tests.methods.user_file import TEXT, mine

__all__ = ["mine"]

ANALYSIS = {name for name in lce.methods.available() if lce.methods.find(name).analysis}
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
    without_maps = methods_of(["all"], {}, {"model": tiny_model})
    assert set(SERVING) - set(names_of(without_maps)) == {"esa"}
    assert capsys.readouterr().err.startswith("lce: note: --method all leaves esa out: esa: this model has no calibrat")
    assert names_of(methods_of(["all", "oracle"], {}, {"model": "demo"})) == [*names_of(demo), "oracle"]
    selecting = methods_of(["all"], {}, {"model": "demo"}, suits=lce.methods.selects)
    assert set(names_of(selecting)) == {"esa", "infllm", "longheads", "pages", "quest", "reattention"}


def test_knobs_with_all_are_for_those_that_have_them(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {x.name: x for x in methods_of(["all"], {"top_p": "0.9", "esa.compress": "none"}, {"model": tiny_model})}
    assert found["full"] == lce.methods.Full()
    assert found["longheads"] == lce.methods.LongHeads(top_p=0.9)
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


def test_a_method_that_cannot_be_made_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_file_of_the_users_own_runs_only_where_it_is_named(tiny_model: Path, mine: Path, tmp_path: Path) -> None:
    saved, ask = tmp_path / "x.lce", ["generate", "-m", tiny_model, "-p", "the quick brown fox", "-n", 2]
    made = run(*ask, "--method", mine, "-o", "chunk_size=2", "--save", saved)
    assert made.exit_code == 0
    assert f"lce: note: {mine} runs as your own code" in made.stderr
    assert f"method file  {mine}\n" in run("info", saved).stdout
    assert "which is not run here" in run("info", saved, "-m", tiny_model).stderr
    assert_error(run(*ask, "-c", saved), 2, f"method mine of {mine}, which is code and runs only if you name it")
    assert_error(run(*ask, "-c", saved, "--method", "full"), 3, f"give --method {mine}, or")
    assert run(*ask, "-c", saved, "--method", mine).exit_code == 0, "with the knobs of the file"
    mine.write_text(f"{TEXT}# other code may choose other tokens")
    assert "made with other code of the method mine" in run(*ask, "-c", saved, "--method", mine).stderr
    assert "multiplies the mean key" in run("methods", mine).stdout
    mine.write_text(TEXT.replace("self.factor *", "missing *"))
    failed = run(*ask, "--method", mine, "-o", "chunk_size=2").stderr
    assert failed.endswith("name 'missing' is not defined; correct the file, or run with --debug for the traceback\n")
    assert f"lce: error: {mine}, line 12: NameError: " in failed
