"""The shared options: what they read, what they refuse, and how groups of them reach a command."""

import inspect
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import lce
from lce import cli
from lce.engine.options import SizeOptions
from lce.terminal import options
from lce.terminal.output import Output
from lce_lab.terminal.options import method_options, methods_options
from tests.command import assert_error, run, spawn

CONTEXT = click.Context(cli.cli)
OPTION = click.Option(["--option"])


def received(args: list[str], *decorators: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {}

    def command(**values: Any) -> None:
        arguments.update(values)

    for decorator in reversed(decorators):
        command = decorator(command)
    result = CliRunner().invoke(click.command()(command), args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return arguments


def test_a_group_of_options_is_one_argument() -> None:
    corner = options.packed("corner", complex, click.option("--real", type=int), click.option("--imag", type=int))
    args = ["--imag", "2", "--name", "c", "--real", "1"]
    assert received(args, click.option("--name"), corner) == {"name": "c", "corner": 1 + 2j}
    assert received(args, corner, click.option("--name")) == {"name": "c", "corner": 1 + 2j}


def test_each_group_packs_what_the_library_takes() -> None:
    sampling = received(["--temperature", "0.5", "--stop", "a", "--stop", "b"], options.sampling_options)["sampling"]
    assert sampling == {"temperature": 0.5, "stop": ("a", "b")}
    method = received(["--method", "longheads", "-o", "chunks=4"], method_options)["method"]
    assert method == lce.methods.LongHeads(chunks=4)
    several = received(["--method", "full,streaming", "-o", "streaming.sinks=2"], methods_options)["methods"]
    assert several == [lce.methods.Full(), lce.methods.Streaming(sinks=2)]
    loading = received(["--rope", "ntk", "--rope-factor", "2"], options.loading_options)["loading"]
    others = set("model method method_options sharing length prefill_method ranks".split())
    assert set(loading) == set(inspect.signature(lce.load).parameters) - others
    divided = received([], options.divided_loading_options)["loading"]
    assert (set(divided) - set(loading), divided["ranks"]) == ({"ranks"}, None)
    planning = received(["--block", "7"], options.planning_options)["planning"]
    assert set(planning) == set(SizeOptions.__annotations__) - {"method_options", "prefill_method"}
    both = received(["-o", "prefill_method.local=4", "--prefill-method", "rerope"], options.planned_methods_options)
    assert both["methods"] == {"method": lce.methods.Full(), "prefill_method": lce.methods.ReRope(local=4)}
    assert received(["--quiet"], options.output_options)["output"] == Output(json=False, quiet=True)
    assert received(["--json"], options.json_options)["output"] == Output(json=True)


def test_counts_in_units_of_1024() -> None:
    assert options.COUNTS.convert("512, 2k,1K", OPTION, CONTEXT) == [512, 2048, 1024]
    assert (options.COUNT.convert("1M", OPTION, CONTEXT), options.INDEX.convert("0", OPTION, CONTEXT)) == (1 << 20, 0)
    expected = r"^--option is .*; expected (a whole number, such as 512 or 4k|1 or more)"
    for text in ("", "many", "2k,", "0"):
        with pytest.raises(click.UsageError, match=expected):
            options.COUNTS.convert(text, OPTION, CONTEXT)


def every_option() -> list[tuple[str, click.Option]]:
    groups: list[tuple[str, click.Command]] = [("lce", cli.cli)]
    found = []
    for name, command in groups:
        if isinstance(command, click.Group):
            inner = {each: command.get_command(CONTEXT, each) for each in command.list_commands(CONTEXT)}
            groups += [(f"{name} {each}", one) for each, one in inner.items() if one is not None]
        found += [(name, param) for param in command.params if isinstance(param, click.Option)]
    return found


def test_every_count_is_parsed_by_one_rule() -> None:
    for command, param in every_option():
        wrong = f"{command} {param.opts} takes a plain integer; expected options.COUNT"
        assert param.type.name != "integer" or param.name == "seed", wrong


def test_targets_are_checked_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("precious")
    (tmp_path / "link").symlink_to("old")
    os.mkfifo(tmp_path / "pipe")
    for command in (("prefill", "-m", "none", "x", "--out"), ("generate", "-m", "none", "x", "--save")):
        assert_error(run(*command, tmp_path / "old"), 2, "old exists; name another file, or give --force")
        assert_error(run(*command, tmp_path / "no" / "file"), 2, "is not a folder")
        assert_error(run(*command, "/proc/file"), 2, "/proc is not a folder that can be written")
        assert_error(run(*command, ""), 2, "has no name")
        for name in ("link", "pipe"):
            assert_error(run(*command, tmp_path / name, "--force"), 3, f"{name} is a")
    for command in (("explain", "full", "--plot"), ("bench", "-m", "none", "--json")):
        assert_error(run(*command, tmp_path / "old"), 2, "old exists; name another file, or give --force")
    assert (tmp_path / "old").read_text() == "precious"


def test_texts_are_utf8_in_every_locale() -> None:
    """In some locales Python gives the bytes of an argument as surrogates."""
    as_given = "Zürich".encode().decode("ascii", "surrogateescape")
    for args in (["{}"], ["-p", "{}"], ["x", "--system", "{}"], ["x", "--stop", "{}"]):
        lines = [[arg.format(text) for arg in args] for text in ("Zürich", as_given)]
        plain, escaped = (run("generate", "-m", "demo", "-n", "1", "--json", *line) for line in lines)
        assert plain.stdout.partition('"stats"')[0] == escaped.stdout.partition('"stats"')[0]
        assert plain.exit_code == escaped.exit_code
    assert_error(run("generate", "-m", "demo", "-p", "abc\udcff"), 2, r"'abc\udcff' is not UTF-8 text", "convert it to")


def test_a_seed_that_changes_nothing_is_said() -> None:
    for args, said in (["--seed", "1"], True), (["--seed", "1", "--temperature", "0.5"], False), ([], False):
        result = run("generate", "-m", "none", "x", *args)
        assert ("lce: note: --seed changes nothing" in result.stderr) == said
        assert "none does not exist" in result.stderr


def test_defaults_are_those_of_the_library() -> None:
    without = "model prompt stop block window rope rope_factor seed method threads tokens prefill_method ranks".split()
    without += "kv_device_budget kv_host_budget spill_dir".split()
    library = [(cli.generate, function) for function in (lce.load, lce.Engine.stream)]
    for command, function in [*library, (cli.plan, lce.plan)]:
        defaults = {parameter.name: parameter.default for parameter in command.params}
        for name, parameter in inspect.signature(function).parameters.items():
            assert name in without or defaults.get(name, parameter.default) == parameter.default, name


def test_a_knob_given_as_an_option_says_how_knobs_are_given() -> None:
    generate = ("generate", "-m", "demo", "x")
    for args, said in (
        ((*generate, "--chunk-size", "64"), True),
        ((*generate, "--max-new-tokens", "5"), False),  # an option is nearer
        (("info", "demo", "--chunk-size", "64"), False),  # the command takes no knobs
    ):
        with spawn("", *args) as process:
            _, err = process.communicate()
        assert (process.returncode, "Knobs of a method are given as -o chunk_size=VALUE." in err) == (2, said)
