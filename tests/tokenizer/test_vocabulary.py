"""Both kinds of tokenizer file: as the tokenizers library and sentencepiece read them, and alike.

Oracles: the tokenizers library, sentencepiece itself, and transformers' LlamaTokenizer.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import models

from lce.errors import DataError, ModelError
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.source import Source
from tests.vocabularies import LLAMA2, TEXTS, merges_of, one_line, refused, write_json

Changed = Callable[[Mapping[str, Any]], Path]


@pytest.fixture
def changed(folders: dict[str, Path], tmp_path: Path) -> Changed:
    """Makes a folder of the byte-level tokenizer with changes in its file."""
    content = json.loads((folders["byte_level"] / "tokenizer.json").read_bytes())

    def change(changes: Mapping[str, Any]) -> Path:
        write_json(tmp_path, "tokenizer.json", content | changes)
        return tmp_path

    return change


@pytest.mark.parametrize("text", TEXTS)
def test_json_encodes_as_the_library_does(made: dict[str, Tokenizer], folders: dict[str, Path], text: str) -> None:
    for kind in ("byte_level", "llama", "unigram"):
        library = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
        assert made[kind].encode(text) == library.encode(text).ids
        assert made[kind].encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", [*TEXTS, "<s>[INST] hi [/INST] a </s><s>[INST] b", "</s>a<s>b<unk>c", "▁x"])
def test_both_files_of_a_model_agree(made: dict[str, Tokenizer], text: str) -> None:
    ids = made["sentencepiece"].encode(text)
    assert (ids, made["sentencepiece"].decode(ids)) == (made["llama"].encode(text), made["llama"].decode(ids))


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_llama2_is_bos_and_sentencepiece(llama2: Tokenizer, text: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(LLAMA2))
    ids = llama2.encode(text)
    assert (ids, llama2.decode(ids)) == ([1, *model.encode(text)], model.decode(ids))


def test_llama2_decodes_as_transformers_does(llama2: Tokenizer) -> None:
    from transformers import LlamaTokenizer

    model = sentencepiece.SentencePieceProcessor(model_file=str(LLAMA2))
    pieces = model.id_to_piece(list(range(len(model))))
    oracle = LlamaTokenizer({piece: rank for rank, piece in enumerate(pieces)}, merges_of(pieces))
    for text in ("Hello world", "x <s> y</s> z", "日本語 😀"):
        ids = llama2.encode(text)
        for cut in range(len(ids)):
            for skip in (True, False):
                assert llama2.decode(ids[cut:], skip_special=skip) == oracle.decode(ids[cut:], skip_special_tokens=skip)
    for text in ("Hello world", "a b", "x = 1\ny = 2"):
        assert llama2.encode(text, bos=False) == oracle(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("older", [True, False])
def test_added_tokens_over_sentencepiece(tiny_sentencepiece: bytes, tmp_path: Path, older: bool) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tiny_sentencepiece)
    config: dict[str, object] = {"additional_special_tokens": ["<|im_end|>"]}
    if older:
        write_json(tmp_path, "added_tokens.json", {"<|im_end|>": 400, "<tool>": 405})
    else:
        added = {"400": {"content": "<|im_end|>", "special": True}, "405": {"content": "<tool>", "special": False}}
        config["added_tokens_decoder"] = added
    write_json(tmp_path, "tokenizer_config.json", config)
    assert Source(tmp_path).tokenizer(vocab_size=406).vocab_size == 406
    tokenizer = Source(tmp_path).tokenizer(vocab_size=410)
    ids = tokenizer.encode("fox<|im_end|><tool>", bos=False)
    assert (ids[-2:], tokenizer.vocab_size, tokenizer.decode(ids)) == ([400, 405], 406, "fox<tool>")
    assert tokenizer.decode([402, *ids, 409]) == "fox<tool>"  # a gap in the vocabulary, and a row beyond it
    with refused(ModelError, "400", "399"):
        Source(tmp_path).tokenizer(vocab_size=399)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_an_added_token_beyond_the_embedding(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """It is refused where it occurs. All other texts, and all tokens within the embedding, are as before."""
    shutil.copytree(folders[kind], tmp_path, dirs_exist_ok=True)
    n_rows = Source(tmp_path).tokenizer().vocab_size
    if kind == "sentencepiece":
        write_json(tmp_path, "added_tokens.json", {"<image>": n_rows})
    else:
        library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        library.add_tokens(["<image>"])
        library.save(str(tmp_path / "tokenizer.json"))
    before, tokenizer = Source(folders[kind]).tokenizer(n_rows), Source(tmp_path).tokenizer(n_rows)
    assert (tokenizer.vocab_size, tokenizer.encode("a fox")) == (n_rows, before.encode("a fox"))
    assert tokenizer.decode(list(range(n_rows))) == before.decode(list(range(n_rows)))
    with refused(DataError, "the text has '<image>', a token", f"id {n_rows}", f"ids 0 to {n_rows - 1}; leave it out"):
        tokenizer.encode("a fox<image>")
    assert Source(tmp_path).tokenizer(n_rows + 1).encode("<image>")[-1] == n_rows
    with refused(ModelError, f"but the model's embedding has {n_rows - 9} rows"):
        Source(tmp_path).tokenizer(n_rows - 9)


def test_space_only_before_the_text_itself(tiny_sentencepiece: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tiny_sentencepiece)
    before_all = Source(tmp_path).tokenizer()
    write_json(tmp_path, "tokenizer_config.json", {"legacy": False})
    before_text = Source(tmp_path).tokenizer()
    assert before_all.encode("a fox") == before_text.encode("a fox")
    assert before_all.decode(before_all.encode("<s>a</s>b")) == "a b"
    assert before_text.decode(before_text.encode("<s>a</s>b")) == "ab"


def test_dropout_truncation_and_padding_of_the_file_are_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    library.enable_truncation(8)
    library.enable_padding(length=64)
    library.model.dropout = 0.9
    library.save(str(tmp_path / "tokenizer.json"))
    plain, tokenizer = (Source(folder).tokenizer() for folder in (folders["byte_level"], tmp_path))
    for text in ("fox", "The quick brown fox jumps over the lazy dog. " * 9):
        assert tokenizer.encode(text) == plain.encode(text)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_truncated_and_altered_files(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    (source,) = [path for path in folders[kind].iterdir() if path.name in ("tokenizer.json", "tokenizer.model")]
    content = source.read_bytes()
    for cut in range(0, len(content), len(content) // 25):
        (tmp_path / source.name).write_bytes(content[:cut])
        with pytest.raises(ModelError):
            Source(tmp_path).tokenizer()
        (tmp_path / source.name).write_bytes(content[:cut] + b"\xf5" + content[cut + 1 :])
        with contextlib.suppress(ModelError):  # an altered byte may go unnoticed; no other error may come
            Source(tmp_path).tokenizer().encode("the fox")


def test_a_vocabulary_without_the_texts_words(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Source(tmp_path).tokenizer()
    with refused(DataError, "cannot encode"):
        tokenizer.encode("fox")


def template(special: list[int], single: str) -> dict[str, Any]:
    """A post-processor: A is the text, S the special ids."""
    pieces = {"A": {"Sequence": {"id": "A", "type_id": 0}}, "S": {"SpecialToken": {"id": "S", "type_id": 0}}}
    return {
        "type": "TemplateProcessing",
        "single": [pieces[letter] for letter in single],
        "pair": [pieces["A"], {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"S": {"id": "S", "ids": special, "tokens": ["S"] * len(special)}},
    }


def replacing(old: str, new: str, times: int = 1) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": old}, "content": new}] * times


def sequence(kind: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {kind: {"type": "Sequence", f"{kind}s".replace("pre_tokenizers", "pretokenizers"): steps}}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

WORDPIECE = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 1001}
WORDPIECE |= {"continuing_subword_prefix": "##"}
BEYOND = r"puts the id {} around every text, but there are only ids 0 to 388"
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"post_processor": template([389], "SA")}, BEYOND.format(389)),
    ({"post_processor": template([0, 2**32 - 1], "AS")}, BEYOND.format(2**32 - 1)),
    ({"post_processor": {"type": "BertProcessing", "sep": ["x", 99999], "cls": ["y", 0]}}, BEYOND.format(99999)),
    ({"post_processor": template([0], "S")}, "its post-processor changes the text itself"),
    ({"post_processor": template([0], "AA")}, "its post-processor changes the text itself"),
    ({"post_processor": template([0], "ASA")}, "its post-processor changes the text itself"),
    ({"post_processor": template([0] * 65, "SA")}, "its post-processor adds 65 tokens to every text"),
    ({"model": WORDPIECE}, "max_input_chars_per_word is 1001; expected at most 1000"),
    ({"post_processor": template([0] * 9999, "S" * 9999 + "A")}, "its post-processor adds 99980001 tokens to every"),
    (sequence("normalizer", replacing("a", "a" * 10, 9)), "the tokenizer's normalizer makes a text more than 64 times"),
    (sequence("normalizer", replacing("", "x" * 64)), "the tokenizer's normalizer makes a text more than 64 times"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 65}}, "adds more than 64 characters at once"),
    (sequence("normalizer", [sequence("normalizer", replacing("a", "a" * 10, 9))["normalizer"]]), "than 64 times"),
    (sequence("decoder", replacing("a", "a" * 10, 9)), "the tokenizer's decoder makes a text more than 64 times"),
    (sequence("normalizer", [{"type": "ByteLevel"}] * 7), "the tokenizer's normalizer makes a text more than 64 times"),
    (sequence("pre_tokenizer", [split("a")] * 65), "the tokenizer's pretokenizer has more than 64 steps"),
    (sequence("pre_tokenizer", [BYTE_LEVEL] * 7), "the tokenizer's pretokenizer makes a text more than 64 times"),
    (sequence("normalizer", [{"type": "NFKD"}] * 65), "the tokenizer's normalizer has more than 64 steps"),
    ({"pre_tokenizer": split(r"(.*)\1\1$")}, "refers to an earlier match"),
    ({"pre_tokenizer": split(r"(?<x>a\g<x>?b)")}, "refers to an earlier match"),
    (sequence("pre_tokenizer", [split(r"(?<x>.*)\k<x>"), BYTE_LEVEL]), "refers to an earlier match"),
    ({"pre_tokenizer": split("|".join(f"a{i}" for i in range(1000)))}, "has more than 4096 characters"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": r"(.*)\1$"}, "content": ""}}, "refers to an earlier"),
    (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},  # a panic at every text
        "is not a tokenizer the tokenizers library accepts: index out of bounds",
    ),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_files_that_would_fail_later_are_refused(changed: Changed, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        Source(changed(change)).tokenizer()
    one_line(error)


@pytest.mark.parametrize("pattern", [r"\\\\1a", r"(?i:'s|'t)|\s+(?!\S)|\p{N}{1,3}", r"(?:a)(b)"])
def test_patterns_that_only_look_alike_are_read(changed: Changed, pattern: str) -> None:
    folder = changed(sequence("pre_tokenizer", [split(pattern), BYTE_LEVEL]))
    assert Source(folder).tokenizer().encode("fox")


def test_a_step_that_is_written_with_escapes_is_found_too(changed: Changed) -> None:
    file = changed(sequence("normalizer", replacing("a", "a" * 10, 9))) / "tokenizer.json"
    file.write_text(file.read_text().replace("Replace", "Repl\\u0061ce"))
    with pytest.raises(ModelError, match="the tokenizer's normalizer makes a text more than 64 times"):
        Source(file.parent).tokenizer()


@pytest.mark.parametrize("single", ["A", "SA", "AS", "SAS"])
def test_a_post_processor_gives_what_the_library_gives(changed: Changed, single: str) -> None:
    folder = changed({"post_processor": template([1, 2], single)})
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("", "a fox", "日本語"):
        assert Source(folder).tokenizer().encode(text) == library.encode(text).ids


def test_a_regular_expression_that_gives_up_is_an_error_of_the_text(changed: Changed) -> None:
    runaway = {"type": "Replace", "pattern": {"Regex": "(q+)+$"}, "content": ""}
    tokenizer = Source(changed({"normalizer": runaway})).tokenizer()
    assert tokenizer.encode("fox")
    with pytest.raises(DataError, match=r"cannot encode this text: .*retry-limit") as error:
        tokenizer.encode("q" * 60 + "!")
    one_line(error)


class Panic(BaseException):
    """As pyo3's, which is no Exception."""


def test_a_panic_is_a_data_error(made: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """And an interruption stays one."""

    class Broken:
        def encode(self, text: str, **_: object) -> None:
            raise {"panic": Panic("line\nbreak\x1b"), "stop": KeyboardInterrupt()}[text]

    monkeypatch.setattr(made["byte_level"]._vocabulary, "_library", Broken())
    with pytest.raises(DataError, match=r"cannot encode this text: 'line break\\x1b'; its vocabulary"):
        made["byte_level"].encode("panic")
    with pytest.raises(KeyboardInterrupt):
        made["byte_level"].encode("stop")
