"""SmolLM2-135M-Instruct, a published model, on the command line. Skipped where its package is not installed."""

from pathlib import Path

import pytest

import lce
from tests.command import run

CAPITAL = ("-p", "The capital of France is", "-n", "5")


def test_it_knows_the_capital_of_france_by_name_and_by_path(smollm2: Path) -> None:
    by_name, by_path = (run("generate", "-m", model, *CAPITAL, "--quiet") for model in ("smollm2", smollm2))
    assert by_name.stdout.startswith(" Paris")
    assert by_path.stdout == by_name.stdout


def test_it_is_described_without_its_weights(smollm2: Path) -> None:
    found = lce.info("smollm2")
    assert isinstance(found, lce.ModelInfo)
    assert (found.folder, found.family, found.config.window) == (smollm2, "llama", 8192)
    assert (found.parameters, found.chat_template) == (134_515_008, True)
    assert lce.plan("smollm2", tokens=8192).tiers["device"].weights < 1.15 * smollm2.stat().st_size


@pytest.mark.slow
def test_it_answers_in_a_chat(smollm2: Path) -> None:
    result = run("generate", "-m", "smollm2", "--chat", "-p", "What is the capital of France?", "-n", "20", "--quiet")
    assert "Paris" in result.stdout
    assert result.stdout.endswith(".\n")  # the turn has ended
