"""The script for a machine with a GPU: every stage at toy sizes on the CPU, so that no slip waits for the machine."""

import json
import math
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch

from tests.pretended import Gpus


def errors(stage: dict[str, Any]) -> dict[str, Any]:
    """What failed, or does not hold, in a stage's figures."""
    wrong = {name: x for name, x in stage.items() if isinstance(x, dict) and ("error" in x or x.get("ok") is False)}
    return wrong | ({"stage": stage["error"]} if "error" in stage else {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_every_stage_runs_at_toy_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    status = gpu.main(["--device", "cpu", "--tiny", "--in-process", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: found for name, stage in results.items() if (found := errors(stage))} == {}
    assert (status, results["stage 1"]["status"]) == (0, "skipped: no CUDA")
    assert {stage["status"] for name, stage in results.items() if name != "stage 1"} == {"ran"}
    assert results["stage 3"]["tiers: longheads float32"]["same bits"]
    assert results["stage 3"]["tiers: longheads float32"]["traffic"]["kv_device_budget, spill_dir"]
    assert results["stage 4"]["longheads at 300"]["decode ms"] > 0
    assert capsys.readouterr().out.endswith((tmp_path / "summary.txt").read_text() + "\n")


@pytest.mark.slow
def test_a_stage_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own: one ends with an error, one hangs until its limit; what they had is kept."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, time\n"
        "words = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "open(words['--record'], 'w').write(json.dumps({'had': words['--stage']}))\n"
        "time.sleep(60) if words['--stage'] == '2' else sys.exit('something broke')\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "GRACE", 0.0)
    monkeypatch.setattr(gpu, "STAGES", {1: ("one", 20.0), 2: ("two", 2.0)})
    monkeypatch.setattr(gpu, "LEAST", 0.0)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path), "--stages", "1,2"]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: stage["had"] for name, stage in results.items()} == {"stage 1": "1", "stage 2": "2"}
    first, second = results.values()
    assert (first["status"], first["last lines"]) == ("failed: exit status 1", ["something broke"])
    assert second["status"] == "ended at its limit of 2 s"
    assert "something broke" in (tmp_path / "stages.log").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_drawn_models_run_on_a_pretended_gpu(gpus: Gpus, tmp_path: Path) -> None:
    assert gpu.run_stage(4, tmp_path, tmp_path / "record.json", "cuda", True, math.inf) == "ran"
    assert errors(json.loads((tmp_path / "record.json").read_text())) == {}


def test_a_run_goes_on_where_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that ran is kept, one that failed runs again; a checkpoint's pieces are put together."""
    out, asked = tmp_path / "out", list[Any]()
    out.mkdir()
    for number, text in enumerate(("one, ", "two")):
        (tmp_path / f"model.gguf.00{number}").write_text(text)
    had = {"stage 0": {"status": "ran", "figure": 1}, "stage 8": {"status": "failed", "full at 60": {"decode ms": 2}}}
    (out / "results.json").write_text(json.dumps(had))

    def stage(number: int, out: Path, record: Path, *rest: Any) -> str:
        asked.append((number, rest[-1].read_text(), gpu.earlier(out)[number]["full at 60"]))
        record.write_text("{}")
        return "ran"

    monkeypatch.setattr(gpu, "run_stage", stage)
    words = f"--device cpu --in-process --resume --model {tmp_path} --stages 0,8 --out {out}".split()
    assert (gpu.main(words), asked) == (0, [(8, "one, two", {"decode ms": 2})])
    assert "failed" not in (out / "results.json").read_text()


def test_without_a_gpu_every_stage_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = tmp_path / "record.json"
    assert gpu.run_stage(4, tmp_path, record, "cuda", False, 1.0) == "skipped: no CUDA"
    assert json.loads(record.read_text()) == {"skipped": "no CUDA"}


def test_bars_are_read_off_the_figures() -> None:
    cell = {"method": "full", "length": 32768, "decoded at": 32768, "decode ms": 8.0, "decode bytes": 30e9}
    fast = {**cell, "method": "longheads", "decode ms": 5.0, "decode bytes": 15e9}
    times = {"resident": 4.0, "offloaded": 9.0}
    results = {
        0: {"status": "ran", "copy": {"bytes_per_s": 4.3e12}},
        4: {"status": "ran", "full at 32768": cell, "longheads at 32768": fast},
        8: {
            "status": "ran",
            "dca at 2000": {"method": "dca", "length": 2000, "prefill tok/s": 12345.0, "block": 16384},
        },
        5: {"status": "ran"}
        | {f"longheads {where}": {"decode ms": ms, "decoded at": 9} for where, ms in times.items()},
    }
    lines = {line.split("  ")[0]: line.split()[-1] for line in gpu.summary(results).splitlines() if "=" in line}
    assert "dca     2,000   16384  12345" in gpu.summary(results)
    assert lines["full decode, of copying, 32k"] == "held"  # 30 GB in 8 ms are 87% of 4.3 TB/s
    assert lines["longheads over full, decode, 32k"] == "MISSED"  # 1.6
    assert lines["128k, 4 GiB on the GPU over resident, decode time"] == "MISSED"  # 2.25
    assert lines["lce over transformers, decode"] == "measured"
