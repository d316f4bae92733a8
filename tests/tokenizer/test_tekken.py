"""tekken.json alone: the ids of a trained library, of tiktoken, and of mistral_common with its own published file."""

import base64
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

import lce
from lce.errors import ModelError
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.source import Source
from tests import vocabularies
from tests.checkpoints import save_tiny
from tests.vocabularies import PROSE, TEKKEN, TEXTS, cut_by, refused, write_json

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
N_SPECIAL, N_TOKENS = 24, 400
MORE = [*TEXTS, *PROSE, "aaaa" * 9, " \n\n \t x", "don't WON'T ÉCOLEs 1234", "</s", "\u200b\u00a0", "ab" * 40 + "ba"]


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = cut_by(TEKKEN)
    vocabularies.train(made, PROSE, N_TOKENS - N_SPECIAL, [])
    return made


@pytest.fixture
def content(library: tokenizers.Tokenizer) -> dict[str, Any]:
    """A tekken.json whose ranks are the order of the library's merges; a few tokens more than the model has."""
    names = {char: byte for byte in range(256) for char in lce.tokenizer.spelling.characters_of(bytes([byte]))}
    tokens = sorted(library.get_vocab(), key=lambda token: (len(token) > 1 or -1, library.token_to_id(token)))
    raw = [bytes(names[char] for char in token) for token in tokens]
    raw = [*sorted(raw[:256]), *raw[256:], b"unused token"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(x).decode(), "token_str": None} for i, x in enumerate(raw)]
    config = {"pattern": TEKKEN, "num_vocab_tokens": len(raw), "default_vocab_size": N_TOKENS, "version": "v11"}
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(SPECIAL)]
    return {"config": config | {"default_num_special_tokens": N_SPECIAL}, "vocab": vocab, "special_tokens": special}


def tokenizer_in(folder: Path, content: dict[str, Any]) -> Tokenizer:
    write_json(folder, "tekken.json", content)
    return Source(folder).tokenizer(N_TOKENS)


def ranks_of(content: dict[str, Any]) -> dict[bytes, int]:
    entries = content["vocab"][: N_TOKENS - N_SPECIAL]
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}


def assert_same(tokenizer: Tokenizer, texts: Iterable[str], encode: Any) -> None:
    for text in texts:
        assert tokenizer.encode(text) == encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_those_of_the_library(tmp_path: Path, content: dict[str, Any], library: tokenizers.Tokenizer) -> None:
    tokenizer, ranks = tokenizer_in(tmp_path, content), ranks_of(content)
    raw = {
        name: lce.tokenizer.spelling.Spelling(form="byte_level").bytes_of(name, False) for name in library.get_vocab()
    }
    assert_same(tokenizer, MORE, lambda x: [1, *(N_SPECIAL + ranks[raw[name]] for name in library.encode(x).tokens)])
    assert (tokenizer.vocab_size, tokenizer.bos_token, tokenizer.eos_ids) == (N_TOKENS, "<s>", (2,))
    assert tokenizer.encode("[INST]a[/INST]<SPECIAL_9>")[1::2][:2] == [3, 4]
    assert tokenizer.encode("<SPECIAL_9>") == [1, 9]


def test_ids_are_those_of_tiktoken(tmp_path: Path, content: dict[str, Any]) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    other = tiktoken.Encoding("x", pat_str=TEKKEN, mergeable_ranks=ranks_of(content), special_tokens={})
    assert_same(tokenizer_in(tmp_path, content), MORE, lambda x: [1, *(N_SPECIAL + i for i in other.encode(x))])


def test_a_model_with_tekken_alone_says_that_it_lacks_a_template(tmp_path: Path, content: dict[str, Any]) -> None:
    save_tiny(tmp_path, vocab_size=N_TOKENS)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    write_json(tmp_path, "tekken.json", content)
    engine, chat = lce.load(tmp_path), [{"role": "user", "content": "The dog"}]
    assert engine.generate("The quick brown fox", max_tokens=4).stats.prompt_tokens > 1
    assert Source(tmp_path).vocabulary == "tekken.json"
    with refused(ModelError, "tekken.json has no chat template", "put the chat_template.jinja of"):
        engine.chat(chat)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    tokenizer = lce.load(tmp_path).tokenizer
    ids = tokenizer.encode_parts(tokenizer.render_chat(chat))
    assert (ids[:2], ids[-1], tokenizer.decode(ids)) == ([1, 3], 4, "The dog")


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"special_tokens": [{"rank": i, "token_str": f"<{i}>"} for i in range(N_SPECIAL + 1)]},
        {"vocab": 3},
        {"vocab": [{"rank": 0, "token_bytes": "AA=="}]},
        {"special_tokens": [{"rank": 1, "token_str": "<s>"}]},
        {"special_tokens": [{"rank": 0, "token_str": "a"}]},
        {"config": {"default_num_special_tokens": 1 << 40, "default_vocab_size": 1 << 41}},
        {"config": {"default_num_special_tokens": "x", "default_vocab_size": None}},
    ],
)
def test_broken_files_are_refused(tmp_path: Path, content: dict[str, Any], changes: dict[str, Any]) -> None:
    with refused(ModelError, "tekken.json"):
        tokenizer_in(tmp_path, content | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_ids_are_those_of_mistral_common(tmp_path: Path, name: str) -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    (spec,) = importlib.util.find_spec("mistral_common").submodule_search_locations  # type: ignore[union-attr]
    file = Path(spec) / "data" / name
    (tmp_path / "tekken.json").write_bytes(file.read_bytes())
    other, tokenizer = tekken.Tekkenizer.from_file(file), Source(tmp_path).tokenizer(131072)
    texts = [
        *MORE,
        *(re.sub(r"\[/?[A-Z_]+\]|</?s>", "", page.read_text()) for page in Path(__file__).parents[2].glob("docs/*.md")),
    ]
    texts += [json.dumps(texts), "".join(map(chr, range(1, 0xD800))), "".join(map(chr, range(0x1F300, 0x1FAFF)))]
    assert_same(tokenizer, texts, lambda text: other.encode(text, bos=True, eos=False))
