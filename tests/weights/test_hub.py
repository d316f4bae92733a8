"""Models of the hub: from its cache, and downloaded into it from a stand-in for the hub on this machine."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download
from safetensors.torch import load

import lce
from lce.errors import ModelError
from tests.command import assert_error, run, start
from tests.gguf_models import as_saved, save_gguf
from tests.hub import Hub, serving

NAME = "owner/tiny-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub that answers, and an empty cache."""
    with serving() as found:
        url, cache = f"{found.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}", str(tmp_path / "cache")
        hub = {"ENDPOINT": found.address, "HUGGINGFACE_CO_URL_TEMPLATE": url}
        for name, value in (hub | {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": cache}).items():
            monkeypatch.setattr(constants, name, value)
        yield found


def snapshot(hub: Hub, name: str = NAME) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots" / hub.commit(name)


def shard_all(files: dict[str, bytes], shard: str) -> None:
    """Have the weights in one shard of this name, and an index."""
    whole = files.pop("model.safetensors")
    index = {"weight_map": dict.fromkeys(load(whole), shard)}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), shard: whole}


def same(name: str, folder: Path) -> bool:
    """Whether a name loads the weights that a folder has."""
    return bool(lce.load(name).setup.fingerprint == lce.load(folder).setup.fingerprint)


def test_only_what_is_needed_is_downloaded_and_only_once(hub: Hub, tiny_model: Path) -> None:
    hub.add(NAME, tiny_model)
    others = ("modeling.py", "pytorch_model.bin", "model.onnx", "picture.png", ".gitattributes", "../../out.json")
    hub.models[NAME] |= dict.fromkeys((*others, "onnx/config.json", "tokenizer.model"), b"x")
    engine = lce.load(NAME)
    assert sorted(hub.fetched()) == sorted(x.name for x in tiny_model.iterdir())
    assert sorted(x.name for x in snapshot(hub).iterdir()) == sorted(x.name for x in tiny_model.iterdir())
    assert (snapshot(hub) / "config.json").is_symlink()
    n_asked = len(hub.asked)
    assert lce.load(NAME).setup.fingerprint == engine.setup.fingerprint == lce.load(tiny_model).setup.fingerprint
    found, there = lce.info(NAME), lce.info(snapshot(hub))
    assert (found.folder, found.identity, len(hub.asked)) == (there.folder, there.identity, n_asked)
    hub.models[NAME]["config.json"] += b" "  # another commit: what is here is taken all the same
    assert (lce.load(NAME).setup.fingerprint, len(hub.asked)) == (engine.setup.fingerprint, n_asked)


def test_shards_are_those_of_the_index(hub: Hub, tiny_model: Path) -> None:
    hub.add(NAME, tiny_model)
    shard = "model-00001-of-00001.safetensors"
    shard_all(hub.models[NAME], shard)
    hub.models[NAME] |= {"other.safetensors": b"x", "adapter.safetensors": b"x"}
    assert same(NAME, tiny_model)
    assert hub.fetched()[-2:] == ["model.safetensors.index.json", shard]
    n_asked = len(hub.asked)
    lce.load(NAME)
    assert len(hub.asked) == n_asked


def test_plan_and_info_download_no_weights(hub: Hub, tiny_model: Path) -> None:
    hub.add(NAME, tiny_model)
    found = lce.info(NAME)
    assert (found.dtype, found.weight_bytes, found.fingerprint) == (None, None, None)
    assert "download it by `hf download owner/tiny-model`" in found.refused["esa"]
    assert lce.plan(NAME, tokens=9).tiers["device"].weights == lce.plan(tiny_model, tokens=9).tiers["device"].weights
    assert "model.safetensors" not in hub.fetched()
    assert same(NAME, tiny_model)
    assert hub.fetched().count("config.json") == 1
    assert lce.info(NAME).fingerprint == lce.load(tiny_model).setup.fingerprint


def test_a_cache_that_another_tool_left_is_enough(hub: Hub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, tiny_model)
    snapshot_download(NAME, cache_dir=constants.HF_HUB_CACHE, endpoint=hub.address, revision="v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    n_asked = len(hub.asked)
    for name in (f"{NAME}@v1", f"{NAME}@{hub.commit(NAME)}", f"{NAME}@v1/"):
        assert same(name, tiny_model)
    assert len(hub.asked) == n_asked
    with pytest.raises(ModelError, match=f"{NAME} is no file or folder, and is not in the hub's cache, .*OFFLINE"):
        lce.load(NAME)  # nobody said what `main` is


def test_what_the_cache_lacks_is_fetched_or_named(hub: Hub, tiny_model: Path, monkeypatch: Any, capsys: Any) -> None:
    hub.add(NAME, tiny_model)
    lce.load(NAME)
    (snapshot(hub) / "tokenizer_config.json").unlink()
    (snapshot(hub) / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lce.plan(NAME, tokens=1)
    assert "files of the tokenizer of owner/tiny-model may be missing, and HF_HUB_OFFLINE" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"is in the hub's cache, .*, without its weights, and HF_HUB_OFFLINE forbids"):
        lce.load(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.models["owner/other"] = {}
    lce.load(NAME)
    assert (snapshot(hub) / "tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    ("name", "code", "refused", "words"),
    [
        ("owner/tiny-modle", 3, {}, "is no file or folder (did you mean 'owner/tiny-model'?), and http://"),
        ("meta/gated", 3, {"meta/gated": "GatedRepo"}, "is gated: accept its terms at http://"),
        (f"{NAME}@v7", 3, {}, "has no revision 'v7'; give a branch, tag or commit of http://"),
        ("meta/gated", 3, {"meta/gated": "Down"}, "it cannot be downloaded from http://"),
        ("meta/pickle", 3, {}, "has weights only as 'pytorch_model.bin'; lce reads safetensors and GGUF"),
        ("meta/none", 3, {}, "has no config.json with safetensors and no GGUF file"),
        ("meta/large", 3, {}, "config.json has 1.0 TiB, which no such file has; use a checkpoint from a source"),
        ("meta/huge", 4, {}, "the download takes 8192.0 TiB, and "),
    ],
)
def test_what_cannot_be_had(hub: Hub, tiny_model: Path, name: str, code: int, refused: Any, words: str) -> None:
    hub.add(NAME, tiny_model)
    for other in ("gated", "large", "huge", "pickle"):
        hub.add(f"meta/{other}", tiny_model)
    hub.models["meta/none"] = {"README.md": b"x"}
    hub.models["meta/pickle"]["pytorch_model.bin"] = hub.models["meta/pickle"].pop("model.safetensors")
    hub.sizes = {"meta/large": {"config.json": 1 << 40}, "meta/huge": {"model.safetensors": 1 << 53}}
    hub.refused = refused
    lce.plan(NAME, tokens=1)  # so that the cache knows one name
    result = run("generate", "-m", name, "-p", "x", "-n", "1", "--quiet")
    assert_error(result, code, words)


def test_an_address_that_nobody_answers_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    words = r"and it cannot be downloaded from http://127.0.0.1:9: .*refused.*; try again"
    with pytest.raises(ModelError, match=words) as error:
        lce.load(NAME)
    assert "\n" not in str(error.value)


def test_nothing_outside_the_cache_is_read_or_written(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "model.safetensors", tmp_path / "secret.safetensors")
    shards = ("../../../../../secret.safetensors", "/etc/passwd", ".hidden.safetensors")
    for number, shard in enumerate(shards):
        hub.add(f"bad/model{number}", tiny_model)
        shard_all(hub.models[f"bad/model{number}"], shard)
        with pytest.raises(ModelError, match=r"is not a plain \*.safetensors name|lacks .* on the hub"):
            lce.load(f"bad/model{number}")
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "secret.safetensors"}
    hub.add(NAME, tiny_model)
    lce.load(NAME)
    (snapshot(hub) / "model.safetensors").unlink()
    (snapshot(hub) / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ModelError, match=r"is a link to .*secret.safetensors, outside the hub's cache; remove the"):
        lce.load(NAME)


def test_another_host_gets_no_token(hub: Hub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add(NAME, tiny_model)
    with serving() as other:
        other.add(NAME, tiny_model)
        hub.elsewhere = other.address.replace("127.0.0.1", "localhost")
        assert same(NAME, tiny_model)
        assert other.fetched()
        assert {token for *_, token in other.asked} == {None}
        assert {token for *_, token in hub.asked} == {"Bearer hf_secret"}


def test_what_is_here_is_no_hub_id(hub: Hub, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / NAME)
    assert same(NAME, tiny_model)
    (tmp_path / "owner" / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config.json; expected a checkpoint's folder"):
        lce.load("owner/empty")
    assert hub.asked == []


@pytest.mark.slow
def test_the_command_asks_where_hf_endpoint_says(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    hub.add(NAME, tiny_model)
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = "from lce.cli import main; main()", "generate", "-m", NAME, "-p", "fox", "-n", "2"
    process = start(*command, env=os.environ | own)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert f"lce: downloading model.safetensors of {NAME}, 393.3 KiB" in err
    assert out
    assert (tmp_path / "home" / "hub" / "models--owner--tiny-model" / "refs" / "main").read_text() == hub.commit(NAME)


FILES = ("a-Q4_0.gguf", "sub/a-Q4_K_M-00001-of-00002.gguf", "sub/a-Q4_K_M-00002-of-00002.gguf", "a-BF16.gguf")


@pytest.mark.parametrize(
    ("file", "found"),
    [
        *(("a-Q4_0.gguf", ["a-Q4_0.gguf"]), ("q4_k_m", list(FILES[1:3])), (FILES[2], list(FILES[1:3]))),
        ("bf16", ["a-BF16.gguf"]),
        ("F16", "has no GGUF file 'F16'; valid: a-BF16.gguf, a-Q4_0.gguf, sub/a-Q4_K_M.gguf"),
        ("a-Q4_O.gguf", "has no GGUF file 'a-Q4_O.gguf'; did you mean 'a-Q4_0.gguf'? valid:"),
        (None, "has several GGUF files; name one, as in owner/x:a-BF16.gguf: a-BF16.gguf, a-Q4_0.gguf, sub/a-Q4_K_M"),
    ],
)
def test_a_gguf_file_is_named_by_its_name_or_its_quantisation(hub: Hub, file: str | None, found: Any) -> None:
    hub.add("owner/x", {name: name.encode() for name in (*FILES, "mmproj-BF16.gguf", "config.json")})
    fetched, words = (found, ".gguf") if isinstance(found, list) else ([], found)
    with pytest.raises(ModelError, match=re.escape(words)):
        lce.load(f"owner/x:{file}" if file else "owner/x")
    assert hub.fetched() == fetched


def test_a_gguf_file_of_the_hub_is_a_model(hub: Hub, tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    path = save_gguf(tmp_path / "x-Q8_0.gguf", as_saved(tiny_model), "Q8_0")
    hub.add("owner/x-GGUF", {path.name: path.read_bytes(), "imatrix.gguf": b"x", "config.json": b'{"model_type": "x"}'})
    hub.sizes = {"owner/x-GGUF": {path.name: 5 << 30}}
    words = r"x-Q8_0.gguf has 5.0 GiB, .*; run `hf download owner/x-GGUF --include '\*x-Q8_0.gguf\*'` first$"
    for call in (lambda: lce.plan("owner/x-GGUF", tokens=9), lambda: lce.info("owner/x-GGUF")):
        with pytest.raises(ModelError, match=words):
            call()
    hub.sizes = {}
    assert same("owner/x-GGUF:q8_0", path)
    assert hub.fetched() == [path.name]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert lce.info("owner/x-GGUF").identity == lce.info(path).identity
    with pytest.raises(ModelError, match=r"has no GGUF file 'Q4_0'; valid: x-Q8_0.gguf, and HF_HUB_OFFLINE forbids"):
        lce.load("owner/x-GGUF:Q4_0")
