"""Many clients for a while: `benchmarks/soak.py`, which compares each answer with its own, asked alone.

`LCE_SOAK_MINUTES=30` makes it as long as it is meant to be; by default it is short.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_answer_is_lost_or_another_ones(chat_model: Path) -> None:
    minutes = float(os.environ.get("LCE_SOAK_MINUTES", "0.2"))
    command = [sys.executable, SOAK, "-m", chat_model, "--minutes", str(minutes), "--check", str(minutes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * minutes + 900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 requests did not end; 0 answers of 500 or more" in done.stdout
    n_checked = int(done.stdout.partition(" answers were compared")[0].splitlines()[-1].split()[0])
    assert n_checked >= 10
