"""A method of a user's file on the command line."""

from pathlib import Path

from tests.command import assert_error, run
from tests.methods.user_file import TEXT, mine

__all__ = ["mine"]


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
