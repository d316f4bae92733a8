"""Records of options: a field is the only place where an option is declared."""

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import lce
from lce.engine.answer import GenerationOptions, Options
from lce.engine.arguments import Sampling
from lce.engine.options import Counted, LoadOptions, SizeOptions, option, options_of, takes
from lce.terminal.options import flags_of


@dataclass(frozen=True, kw_only=True)
class Longer(LoadOptions):
    """The options of `load` and one more."""

    n_drafts: int | str = option(4, "Tokens drafted in a step.", "N", more="0 is none.", parse=Counted(0))


@takes(Longer)
def n_drafts(given: Longer) -> object:
    """Return an option."""
    return given.n_drafts


def test_a_field_is_a_keyword_a_flag_and_a_check() -> None:
    def command(**values: Any) -> None:
        click.echo(values["n_drafts"])

    for declare in flags_of(Longer).values():
        command = declare(command)
    made, run = click.command(command), CliRunner().invoke
    assert (run(made, []).output, run(made, ["--n-drafts", "2k"]).output) == ("4\n", "2048\n")
    assert "--n-drafts is '-1'; expected a whole number" in run(made, ["--n-drafts=-1"]).output
    assert "--n-drafts N" in run(made, ["--help"]).output
    assert "Tokens drafted in a step." in run(made, ["--help"]).output
    assert "0 is none." not in run(made, ["--help"]).output
    assert (n_drafts(), n_drafts(n_drafts="2k")) == (4, 2048)
    assert inspect.signature(n_drafts).parameters["n_drafts"].default == 4
    assert "- `n_drafts`: Tokens drafted in a step. 0 is none." in str(n_drafts.__doc__)
    with pytest.raises(lce.UsageError, match="n_drafts is -1; expected 0 or more"):
        n_drafts(n_drafts=-1)
    with pytest.raises(lce.UsageError, match="unknown option 'n_draft'; did you mean 'n_drafts'"):
        n_drafts(n_draft=1)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Longer().n_drafts = 3  # type: ignore[misc]


def test_functions_take_the_fields() -> None:
    for function, record, more in (
        (lce.load, LoadOptions, ["model", "method", "sharing"]),
        (lce.plan, SizeOptions, ["model", "method", "tokens"]),
        (lce.operations, SizeOptions, ["model", "method", "tokens"]),
    ):
        parameters = inspect.signature(function).parameters
        assert set(parameters) == {*options_of(record), *more}
        assert {name: parameters[name].default for name in options_of(record)} == {
            name: each.default for name, each in options_of(record).items()
        }
        assert all(f"- `{name}`: " in str(function.__doc__) for name in options_of(record))
    with pytest.raises(lce.UsageError, match="unknown option 'blok'; did you mean 'block'"):
        lce.load("demo", blok=3)  # type: ignore[call-arg]
    with pytest.raises(lce.UsageError, match="unknown option 'threads'"):
        lce.plan("demo", tokens=3, threads=1)  # type: ignore[call-arg]


def test_generation_options_are_the_knobs_and_the_fields() -> None:
    assert set(GenerationOptions.__annotations__) == {*options_of(Sampling), *options_of(Options)}


def test_an_engine_with_another_method_has_the_same_options(tiny_model: Path) -> None:
    given: dict[str, Any] = {"window": 48, "block": "1k", "rope": "linear", "rope_factor": 2, "kv_host_budget": "1MiB"}
    engine = lce.load(tiny_model, "full", dtype="bfloat16", prefill_method="streaming", **given)
    other = engine.setup.using("streaming")
    assert (other.window, other.block, other.rope, other.dtype) == (48, 1024, engine.setup.rope, engine.setup.dtype)
    assert other.layout.budgets == engine.setup.layout.budgets
    assert other.method == lce.methods.Streaming(local=44)
    sharing = lce.load(tiny_model, "full", sharing=engine, **given | {"window": 64}, dtype="bfloat16")
    assert sharing.setup.using("streaming").window == 64


def test_none_is_an_option_that_is_not_given() -> None:
    assert SizeOptions(block=None, spill_dir=None) == SizeOptions()
    assert SizeOptions(block="2k", kv_host_budget="2k") == SizeOptions(block=2048, kv_host_budget=2048)
