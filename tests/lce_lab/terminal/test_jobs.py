"""`lce eval run --ray`: a Ray Data job of real Ray records what the command records."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.command import Process, assert_error, run

OPTIONS = ["--method", "full,streaming", "--lengths", "200,300", "--samples", "5", "--task", "passkey,variables"]


def evaluated(record: Path, *more: str) -> list[dict[str, object]]:
    """Return the cells that the command prints in a process of its own."""
    line = [sys.executable, "-m", "lce", "eval", "run", "-m", "demo", *OPTIONS, "--threads", "1", "--json", "--quiet"]
    process = Process([*line, "--record", record, *more], env={**os.environ, "OMP_NUM_THREADS": "1"})
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return list(json.loads(out))


@pytest.mark.slow
def test_a_job_records_what_the_command_records(tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="lce[ray] is not installed")
    local, job = tmp_path / "local.jsonl", tmp_path / "job.jsonl"
    cells, lines = evaluated(local), sorted(local.read_text().splitlines())
    before = "\n".join(lines[:17]) + "\n"  # of a job that was interrupted
    job.write_text(before)
    assert evaluated(job, "--ray", "--workers", "2") == cells
    assert job.read_text().startswith(before)
    assert sorted(job.read_text().splitlines()) == lines


def test_workers_need_a_cluster() -> None:
    assert_error(run("eval", "run", "-m", "demo", "--lengths", "200", "--workers", "2"), 2, "--ray")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = ["eval", "run", "-m", "demo", "--lengths", "200", "--samples", "1", "--no-ceiling", "--quiet", "--ray"]
    assert_error(run(*line), 2, "pip install 'lce[ray]'")
