"""The commands `lce eval ...`: that they are there, and read their help at once. What they do is tested beside it."""

from __future__ import annotations

from lce import cli
from lce.terminal.evaluation import evaluation
from tests.command import output


def test_the_group_is_a_command_of_lce() -> None:
    assert cli.cli.commands["eval"] is evaluation
    assert {"run", "passkey", "perplexity", "selection", "why", "report"} <= evaluation.commands.keys()


def test_the_help_of_every_command_imports_nothing_heavy() -> None:
    check = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from lce.terminal.evaluation import evaluation\n"
        "for name in evaluation.commands:\n"
        "    result = CliRunner().invoke(evaluation, [name, '--help'])\n"
        "    assert result.exit_code == 0 and result.stdout.startswith('Usage: eval'), (name, result)\n"
        "print({'torch', 'numba', 'matplotlib'} & sys.modules.keys())\n"
    )
    assert output(check) == "set()\n"
