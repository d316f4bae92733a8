"""An embedder's file under `mypy --strict`: the public face is typed, and nothing inside lce is reported."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.command import Process

ROOT = Path(__file__).parent.parent

EMBEDDER = """
from dataclasses import dataclass
from typing import assert_type

import numpy as np
import torch
from torch import Tensor

import lce
from lce.attention import Attention
from lce.methods import LongHeads, Step, register


@register("first_key")
@dataclass(frozen=True)
class FirstKey(lce.SelectiveMethod):
    scale: float = 1.0

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k[:, :, 0].repeat_interleave(len(q) // len(k), dim=0)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return self.scale * (q @ summary.mT)


method = assert_type(lce.methods.LongHeads(chunk_size=4), LongHeads)
engine = assert_type(lce.load("demo", method=method, kv_host_budget="1GiB"), lce.Engine)
sampling = assert_type(lce.Sampling(temperature=0.5, stop=["\\n"]), lce.Sampling)
generation = assert_type(engine.generate("text", max_tokens=3, sampling=sampling), lce.Generation)
assert_type(generation.text, str)
assert_type(generation.token_ids, list[int])
assert_type(generation.stats.decode_tokens_per_s, float)
assert_type(engine.generate(["one", "two"], temperature=0.7, seed=1), list[lce.Generation])
assert_type(engine.generate([[1, 2], [3]], stop=lambda text: "." in text), list[lce.Generation])
assert_type(engine.generate([1, 2], sampling={"top_p": 0.9}, progress=True), lce.Generation)
assert_type(engine.generate(np.array([1, 2]), max_tokens="1k"), lce.Generation)
assert_type(engine.generate(torch.tensor([1, 2]), logprobs=3).logprobs, list[lce.TokenLogprobs] | None)
options: lce.GenerationOptions = {"max_tokens": 8, "top_k": 3}
with engine.stream("text", **options) as stream:
    assert_type(stream, lce.Stream)


def progress(done: int, total: int) -> None:
    stream.cancel()


told: lce.Progress = progress


async def read() -> None:
    async for piece in engine.astream("text", progress=told):
        assert_type(piece, lce.Piece)


for piece in engine.stream("text"):
    assert_type(piece, lce.Piece)
    assert_type(piece.text, str)
context = assert_type(engine.prefill("document"), lce.Context)
assert_type(context.fork(), lce.Context)
with engine.prefill("document") as closed:
    assert_type(closed.truncate(3), None)
assert_type(engine.setup.beyond(1000), str | None)
assert_type(engine.open_context("document.lce"), lce.Context)
assert_type(engine.logits([1, 2]), Tensor)
assert_type(engine.trace([1, 2]), lce.Trace)
assert_type(lce.plan("demo", tokens=1000), lce.Plan)
assert_type(lce.plan("demo", tokens=1000).longest, int | None)
assert_type(lce.info("demo"), lce.ModelInfo | lce.ContextInfo)
assert_type(lce.methods.make("full"), lce.Method)
assert_type(FirstKey(chunk_size=4, scale=0.5), FirstKey)
assert_type(Attention.choose("auto"), Attention)
assert_type(lce.CapacityError.exit_code, int)
"""

MISTAKES = {
    'lce.lode("demo")': "attr-defined",
    'lce.load("demo", blok=3)': "call-arg",
    'lce.load("demo").generate(3)': "call-overload",
    'lce.load("demo").stream("x", max_token=3)': "call-arg",
    'lce.load("demo").stream("x", temperature="hot")': "arg-type",
    'lce.methods.LongHeads(chunk_size="4")': "arg-type",
    "lce.Sampling(temprature=1)": "call-arg",
}


def mypy(python: str | Path, folder: Path, text: str) -> tuple[int, str]:
    """Exit code and output of `mypy --strict` on a file of this text, in a new folder."""
    folder.mkdir(exist_ok=True)
    (folder / "embedder.py").write_text(text, encoding="utf-8")
    line = [python, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", "embedder.py"]
    process = Process(line, cwd=folder)
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


@pytest.mark.slow
def test_an_embedders_file_is_typed(tmp_path: Path) -> None:
    assert mypy(sys.executable, tmp_path, EMBEDDER) == (0, "Success: no issues found in 1 source file\n")
    code, output = mypy(sys.executable, tmp_path, "\n".join(["import lce", *MISTAKES]))
    assert code == 1
    kinds = [line.rpartition("  ")[2].strip("[]") for line in output.splitlines() if ": error: " in line]
    assert kinds == list(MISTAKES.values())


@pytest.mark.slow
def test_an_installed_package_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In editable form, in which a type checker finds a package less easily."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    source, python = tmp_path / "source", tmp_path / "venv" / "bin" / "python"
    source.mkdir()
    shutil.copytree(ROOT / "lce", source / "lce", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source / name)
    pip = [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
    for command in ([sys.executable, "-m", "venv", tmp_path / "venv"], [*pip, "-e", ".", "mypy"]):
        process = Process(command, cwd=source)
        _, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
    assert mypy(python, tmp_path / "user", EMBEDDER) == (0, "Success: no issues found in 1 source file\n")
