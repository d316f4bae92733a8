"""Runs all measurements and tests for a GPU in one command, in stages of at most eight minutes, correctness first.

    python benchmarks/gpu.py --out results                 # all stages
    python benchmarks/gpu.py --out results --stages 0,4    # some of them
    python benchmarks/gpu.py --out results --model DIR --resume    # those that have not run yet, with a checkpoint
    python benchmarks/gpu.py --out results --device cpu --tiny    # every stage at toy sizes, to try the script

| stage | what it does |
|---|---|
| 0 | the machine, versions, and its ceilings: copies, products, transfers, launches; kernels alone |
| 1 | the tests that need a GPU |
| 2 | every method in half precision against the float64 oracle; more than 65,535 (head, chunk) pairs |
| 3 | the demo model beside the CPU; tiers, files, forks; graphs beside eager steps |
| 4 | Llama-2-7B's shape: methods at 4k to 128k tokens, prefill and decode |
| 5 | Llama-3-8B's shape at 128k under 4 GiB for keys and values, beside all of them on the GPU |
| 6 | a profile of five tokens and of one block |
| 7 | transformers with the same weights |
| 8 | every method at 2,000, 30,000 and 120,000 tokens, and transformers |
| 9 | 1, 8 and 32 lanes, in Python and over `lce serve` |
| 10 | weights as stored, in bfloat16, in 8 and 4 bits: memory, loading, decode |
| 11 | first use, with no kernel compiled before |

Stages 8 to 11 take `--model`, a checkpoint: a path, or the pieces of one file in a folder (`NAME.gguf.000`, ...).
Without it they draw Llama-3-8B's shape. `--resume` keeps stages, and methods of stage 8, that have their figures.

Each stage is a process with its own limit; stages that time nothing run side by side. `results.json` is rewritten after
each stage, with the last lines of failures; `summary.txt` and `stages.log` are beside it. Needs no network and no
package but lce's own; stages 1 to 3 need this checkout's tests, stages 1, 2 and 7 transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_stages.summary import summary  # noqa: E402  # behind the path

# A stage's module, and its limit in seconds.
STAGES: dict[int, tuple[str, float]] = {
    0: ("hardware", 75), 1: ("suite", 110), 2: ("exactness", 100), 3: ("demo", 110), 4: ("speed", 190),
    5: ("offload", 90), 6: ("profiles", 50), 7: ("neighbour", 60), 8: ("model:methods", 470), 9: ("model:lanes", 300),
    10: ("model:packed", 200), 11: ("model:first", 200),
}  # fmt: skip
ORDER = ([0], [1, 2, 3], [11], [8], [9], [10], [4], [5], [7], [6])  # stages of one group run side by side
TOTAL = 1800.0
LEAST = 10.0  # seconds that a stage needs
GRACE = 3.0  # seconds between a stage's own limit and its end by force
LOG_LINES = 15


def run_stage(
    number: int, out: Path, record: Path, device: str, tiny: bool, deadline: float, model: Path | None = None
) -> str:
    """Run a stage in this process until `deadline` of `time.monotonic`, which processes share; return its status."""
    import importlib
    import warnings

    import torch
    from gpu_stages.setup import Record, Setup, Skip, last_lines

    warnings.simplefilter("ignore")  # texts are longer than windows
    module, _, function = STAGES[number][0].partition(":")
    setup = Setup(torch.device(device), tiny, out, Record(record), deadline, model, earlier(out).get(number, {}))
    try:
        if setup.cuda and not torch.cuda.is_available():
            raise Skip("no CUDA")
        getattr(importlib.import_module(f"gpu_stages.{module}"), function or "run")(setup)
    except Skip as reason:
        setup.record["skipped"] = str(reason)
        return f"skipped: {reason}"
    except Exception as error:
        setup.record["error"] = last_lines(error)
        return "failed"
    return "ran"


class Running:
    """A stage in its own process."""

    def __init__(self, number: int, args: argparse.Namespace, scratch: Path, limit: float) -> None:
        self.number, self.limit = number, limit
        self.record = scratch / f"stage{number}.json"
        self.log = scratch / f"stage{number}.log"
        self.started = time.monotonic()
        command = [
            sys.executable, __file__, "--stage", str(number), "--out", str(args.out), "--record", str(self.record),
            "--device", args.device, "--deadline", str(self.started + limit), *(["--tiny"] if args.tiny else []),
            *(["--model", str(args.model)] if args.model else []),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if args.device != "cpu":
            environment.pop("TRITON_INTERPRET", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def result(self) -> dict[str, Any]:
        """Wait for the stage, or end it at its limit; return its record."""
        try:
            status = self.process.wait(max(0.0, self.started + self.limit + GRACE - time.monotonic()))
            said = "ran" if status == 0 else f"failed: exit status {status}"
        except subprocess.TimeoutExpired:
            said = f"ended at its limit of {self.limit:.0f} s"
        self.end()
        found: dict[str, Any] = json.loads(self.record.read_text()) if self.record.exists() else {}
        if "skipped" in found:
            said = f"skipped: {found['skipped']}"
        lines = self.log.read_text(errors="replace").splitlines()
        return {
            "status": said, "seconds": round(time.monotonic() - self.started, 1), **found,
            "last lines": [] if said == "ran" else lines[-LOG_LINES:],
        }  # fmt: skip

    def end(self) -> None:
        """End the process and its children."""
        if self.process.poll() is None or self.number == 1:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run_all(args: argparse.Namespace, wanted: list[int]) -> dict[int, dict[str, Any]]:
    started, results = time.monotonic(), earlier(args.out) if args.resume else {}
    wanted = [number for number in wanted if results.get(number, {}).get("status") != "ran"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for group in ORDER:
            left = math.inf if args.in_process else args.total - (time.monotonic() - started)
            numbers = [number for number in group if number in wanted]
            running = []
            for number in numbers:
                limit = math.inf if args.in_process else min(STAGES[number][1], left - GRACE)
                if limit < LEAST:
                    results[number] = {"status": "not run: no time left"}
                elif args.in_process:
                    record = scratch / f"stage{number}.json"
                    status = run_stage(number, args.out, record, args.device, args.tiny, limit, args.model)
                    results[number] = {"status": status, **json.loads(record.read_text())}
                else:
                    running.append(Running(number, args, scratch, limit))
            try:
                for stage in running:
                    results[stage.number] = stage.result()
                    write(args.out, results)
                    print(f"stage {stage.number}: {results[stage.number]['status']}, ", end="", flush=True)
                    print(f"{results[stage.number]['seconds']} s", flush=True)
            finally:
                for stage in running:
                    stage.end()
                    with (args.out / "stages.log").open("a") as log:
                        log.write(f"\n=== stage {stage.number}\n{stage.log.read_text(errors='replace')}")
            write(args.out, results)
    return results


def earlier(out: Path) -> dict[int, dict[str, Any]]:
    """Return the stages of an earlier run into the same folder."""
    file = out / "results.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return {int(name.removeprefix("stage ")): stage for name, stage in found.items()}


def whole(model: Path, out: Path) -> Path:
    """Return the path of a checkpoint; pieces `NAME.000`, `NAME.001`, ... in a folder are put together in `out`."""
    pieces = sorted(model.glob("*.[0-9][0-9][0-9]")) if model.is_dir() else []
    if not pieces:
        return model
    file = out / pieces[0].stem
    if not file.exists() or file.stat().st_size != sum(piece.stat().st_size for piece in pieces):
        with file.open("wb") as target:
            for piece in pieces:
                target.write(piece.read_bytes())
    return file


def write(out: Path, results: dict[int, dict[str, Any]]) -> None:
    draft = out / "results.draft"
    draft.write_text(json.dumps({f"stage {number}": found for number, found in sorted(results.items())}, indent=1))
    os.replace(draft, out / "results.json")
    (out / "summary.txt").write_text(summary(results))


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the results")
    parser.add_argument("--stages", default=",".join(map(str, STAGES)), help="numbers, with commas between them")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds that all stages may take")
    parser.add_argument("--model", type=Path, help="a checkpoint for stages 8 to 11, or a folder with its pieces")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run into the folder measured")
    parser.add_argument("--in-process", action="store_true", help="no process a stage, and no limits")
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if args.stage is not None:
        status = run_stage(args.stage, args.out, args.record, args.device, args.tiny, args.deadline, args.model)
        print(status)
        return 1 if status == "failed" else 0
    wanted = [int(number) for number in args.stages.split(",")]
    if unknown := set(wanted) - set(STAGES):
        print(f"gpu.py: no stage {', '.join(map(str, sorted(unknown)))}; expected {', '.join(map(str, STAGES))}")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = args.model and whole(args.model, args.out)
    (args.out / "stages.log").write_text("")
    results = run_all(args, wanted)
    print(summary(results))
    return 0 if all(found["status"].startswith(("ran", "skipped")) for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
