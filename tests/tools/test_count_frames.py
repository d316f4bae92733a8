"""From `generate` to a kernel there are few frames, and a layer enters the methods a few times."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MOST_FRAMES, MOST_ENTRIES = 16, 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["longheads", "full"])
def test_prefill_is_a_short_way(method: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a short text, and longer than a window of the demo model. " * 40)
    words = f"generate -m demo --method {method} -f {text} -n 2 --quiet".split()
    command = [sys.executable, "-m", "tools.count_frames", "--stack", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr
    found = re.search(r"prefill: (\d+) frames from generate to a kernel; (\d+) entries of methods", run.stdout)
    assert found
    assert (int(found[1]) <= MOST_FRAMES, int(found[2]) <= MOST_ENTRIES) == (True, True), run.stdout
