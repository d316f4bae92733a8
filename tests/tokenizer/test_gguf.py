"""Tokenizers made from GGUF metadata, beside the published tokenizers that the metadata stand for.

The metadata are written as llama.cpp's conversion writes them. The byte-level vocabulary merges across words, so that
ids show every place where a text is cut.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from lce.errors import ModelError
from lce.tokenizer.gguf import MOST_ADDED, MOST_ADDED_TOKEN, MOST_CHARS, MOST_TEMPLATE, RULES, end_ids, tokenizer_files
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.gguf_file import read_gguf
from lce.weights.source import Source
from tests import vocabularies
from tests.vocabularies import LLAMA2, PROSE, cut_by, one_line, refused, train

WHERE = Path("model.gguf")
SPECIAL, USED = ["<|begin|>", "<|im_end|>"], ["<think>", "  \n  "]
TEXTS = [
    *("Hello world", "  two  spaces,\n\n\ttabs  \n and é\r\n\r\n a\rb   ", "日本語の文章と 😀 नमस्ते हिन्दी 👩‍👩‍👧 ไทย"),
    *("12345 x1y22 ½ ² Ⅷ ٣٤ 1,234.56 0000", "don't DON'T we'Ll I'M 'sup ''s o'er 'ſ"),
    "cafe\u0301 A\u030a \u1e9b\u0323 \ufb01 \u0301x \u00a0\u3000z\u2028\u0085",
    "HTTPServer camelCase ÀÉa ǅx ʰa /usr/lib//x.py:\n/n ==/\n\n",
    "<|im_start|>user\nHi<|im_end|>\n<think> </think><|begin|>x  \n  y",
    *(b"\xff\xfe abc \xe2\x82".decode(errors="replace") + "\x00\x7f", "", " "),
]
# How the published tokenizer.json files cut words, whether they normalize, and whether a word may be a token unmerged.
GPT2 = ByteLevel(add_prefix_space=False)
PUBLISHED: dict[str, tuple[Any, bool, bool]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (cut_by(vocabularies.LLAMA3), False, True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), (cut_by(vocabularies.LLAMA3), False, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (cut_by(vocabularies.QWEN2), True, False)),
    "qwen35": (cut_by(vocabularies.QWEN35), True, False),
    "tekken": (cut_by(vocabularies.TEKKEN), False, True),
    **dict.fromkeys(("gpt-4o", "llama4"), (cut_by(vocabularies.O200K), False, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (Sequence([Digits(True), GPT2]), False, False)),
    "command-r": (Sequence([Digits(True), GPT2]), True, False),
    "gpt-2": (GPT2, False, False),
    "olmo": (GPT2, True, False),
}


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    """A byte-level BPE whose tokens go across words."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [*PROSE[:4], *TEXTS]
    parts = [text[i : i + 9] for text in texts for i in range(0, len(text), 3)]
    train(made, parts, 1500, SPECIAL)
    made.add_tokens(USED)
    made.decoder = decoders.ByteLevel()
    return made


def byte_level(library: tokenizers.Tokenizer, pre: str = "gpt-2") -> dict[str, Any]:
    """Return the metadata of a byte-level BPE, with two tokens behind the vocabulary that pad the embedding."""
    ids = library.get_vocab(with_added_tokens=True)
    tokens = [*sorted(ids, key=ids.__getitem__), "[PAD1]", "[PAD2]"]
    kinds = dict.fromkeys(SPECIAL, 3) | dict.fromkeys(USED, 4) | dict.fromkeys(tokens[-2:], 5)
    types, pairs = [kinds.get(token, 1) for token in tokens], json.loads(library.to_str())["model"]["merges"]
    made = named(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=[" ".join(pair) for pair in pairs])
    return made | named(bos_token_id=0, eos_token_id=1)


def named(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    files = tokenizer_files(metadata, WHERE)
    return Tokenizer.from_files(lambda name, most: files.get(name), WHERE)


@pytest.fixture(scope="module")
def pairs(library: tokenizers.Tokenizer) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """The tokenizer of each name of `pre`, and the published one."""
    made = {}
    for pre, (words, normalizes, ignore_merges) in PUBLISHED.items():
        published = tokenizers.Tokenizer.from_str(library.to_str())
        published.pre_tokenizer, published.model.ignore_merges = words, ignore_merges
        if normalizes:
            published.normalizer = normalizers.NFC()
        made[pre] = tokenizer_of(byte_level(library, pre)), published
    return made


def test_every_name_of_rules_is_tried() -> None:
    assert PUBLISHED.keys() == RULES.keys()


@pytest.mark.parametrize("pre", PUBLISHED)
def test_ids_of_byte_level_tokenizers_are_those_of_the_published_one(pairs: dict[str, Any], pre: str) -> None:
    tokenizer, published = pairs[pre]
    for text in TEXTS:
        ids = published.encode(text).ids
        assert tokenizer.encode(text, bos=False) == ids
        for skip in (True, False):
            whole = published.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special=skip) == whole
            stream = tokenizer.stream(skip_special=skip)
            assert "".join([stream.push(i) for i in ids]) + stream.finish() == whole


CHARACTERS = st.sampled_from(" \n\r\t'sSdLabÉé019½_./-日ก\u0301\u00a0😀ªſ") | st.characters(exclude_categories=["Cs"])


@settings(max_examples=60, deadline=None)
@given(text=st.text(CHARACTERS, max_size=12))
def test_any_text_is_cut_as_published(pairs: dict[str, Any], text: str) -> None:
    for pre in ("llama-bpe", "qwen35", "tekken", "gpt-4o", "smollm"):
        tokenizer, published = pairs[pre]
        assert tokenizer.encode(text, bos=False) == published.encode(text).ids


def test_a_bos_comes_first_where_the_rules_or_the_metadata_say_so(library: tokenizers.Tokenizer) -> None:
    ids = {pre: tokenizer_of(byte_level(library, pre)).encode("")[:1] for pre in RULES}
    assert {pre for pre, first in ids.items() if first == [0]} == {"llama-bpe", "llama3", "llama-v3", "tekken"}
    assert tokenizer_of(byte_level(library) | named(add_bos_token=True)).encode("") == [0]
    assert tokenizer_of(byte_level(library, "tekken") | named(add_bos_token=False)).encode("") == []
    assert tokenizer_of(byte_level(library) | named(add_eos_token=True)).encode("") == [1]


def test_tokens_that_pad_the_embedding_have_no_text(library: tokenizers.Tokenizer) -> None:
    metadata = byte_level(library)
    files, size = tokenizer_files(metadata, WHERE), len(metadata["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_files(lambda name, most: files.get(name), WHERE, size)
    assert tokenizer.decode([size - 2, *tokenizer.encode("a"), size - 1]) == "a"
    assert size - 2 not in tokenizer.encode("[PAD1]")


def test_a_word_that_is_a_token_is_never_cut_where_the_rules_say_so() -> None:
    metadata = named(model="gpt2", tokens=["a", "b", "c", "ab", "abc"], token_type=[1] * 5, merges=["a b"])
    uncut = {pre for pre in RULES if tokenizer_of(metadata | named(pre=pre)).encode("abc") == [4]}
    assert uncut == {"llama-bpe", "llama3", "llama-v3", "tekken"}


SMOLLM2 = {  # as llama.cpp's own tokenizer gives them for this file
    "Hello 1234 world's": [19556, 216, 33, 34, 35, 36, 905, 506],
    "  two  spaces,\n\ttabs\r\n\r\nand é": [216, 827, 216, 5600, 28, 198, 197, 100, 7366, 7209, 198, 397, 26411],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    "½ ٣٤ x²": [16738, 216, 164, 113, 164, 114, 1792, 19133],
    "don't DON'T we'Ll 'sup": [12420, 982, 422, 2154, 23, 68, 392, 23, 60, 92, 637, 35375],
    "cafe\u0301 \ufb01 \u00a0\u3000z": [83, 9980, 151, 219, 40367, 3351, 250, 12109, 218, 106],
    "b\ufffd\x00c": [82, 24211, 190, 83],
}


def test_smollm2_reads_texts_as_llama_cpp_does(smollm2: Path) -> None:
    metadata = dict(read_gguf(smollm2).metadata)
    tokenizer = tokenizer_of(metadata)
    assert {text: tokenizer.encode(text) for text in SMOLLM2} == SMOLLM2
    assert tokenizer.decode(SMOLLM2["½ ٣٤ x²"]) == "½ ٣٤ x²"
    assert end_ids(metadata) == [2, 0]  # <|im_end|>, which the metadata name, and <|endoftext|>
    text = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    long = "naïve" * 20_000
    assert tokenizer.decode(tokenizer.encode(long)) == long


RUNS = (*("\n" * n for n in range(1, 12)), *("▁" * n for n in range(2, 12)), "<td>", "</td>")


@pytest.fixture(scope="module")
def gemma() -> sentencepiece.SentencePieceProcessor:
    """A vocabulary of Gemma's kind: no space before a text, and runs of spaces and newlines as user-defined tokens."""
    found = ["<start_of_turn>", "<end_of_turn>", *RUNS]
    raw = vocabularies.sentencepiece_model(460, add_dummy_prefix=False, user_defined_symbols=found)
    return sentencepiece.SentencePieceProcessor(model_proto=raw)


def scored(model: sentencepiece.SentencePieceProcessor, runs: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """Return the metadata of a sentencepiece model. The tokens `runs`, user-defined, have plain spaces and no score."""
    ids = list(range(len(model)))
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    tokens, scores = model.id_to_piece(ids), list(model.get_score(ids))
    for i, token in enumerate(tokens):
        if token in runs or token.endswith("_of_turn>"):
            kinds[i], scores[i], tokens[i] = 4 if token in runs else 3, -1000.0, token.replace("▁", " ")
    made = named(model="llama", pre="default", tokens=tokens, scores=scores, token_type=kinds)
    return made | named(bos_token_id=1, eos_token_id=2, unknown_token_id=0) | named(**changes)


SPACED = [*TEXTS, "a   b\n\n\nc  ", " <td>  x</td>\n", "x" * 2000 + " y" * 500, "<0x0A>▁<unk>"]


def test_ids_of_gemmas_kind_are_sentencepieces(gemma: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = tokenizer_of(scored(gemma, RUNS, add_space_prefix=False))
    for text in SPACED:
        if "<unk>" not in text:  # sentencepiece never finds control tokens in a text
            assert tokenizer.encode(text) == [1, *gemma.encode(text)]
            assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    turn = tokenizer.encode("<start_of_turn>a", bos=False)
    assert turn == [gemma.piece_to_id("<start_of_turn>"), *gemma.encode("a")]


@pytest.mark.parametrize("name", ["made", "llama2"])
def test_ids_of_llamas_kind_are_those_of_its_own_file(name: str, tiny_sentencepiece: bytes, tmp_path: Path) -> None:
    if name == "llama2" and not LLAMA2.exists():
        pytest.skip("Llama 2's vocabulary is not at ../shared/data/llama2_tokenizer.model")
    raw = tiny_sentencepiece if name == "made" else LLAMA2.read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(raw)
    expected = Source(tmp_path).tokenizer()
    metadata = scored(sentencepiece.SentencePieceProcessor(model_proto=raw))
    tokenizer = tokenizer_of(metadata)
    for text in [*SPACED, "<s>one</s> two", "é" * 300]:
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(expected.encode(text))
    assert (tokenizer.bos_id, tokenizer.eos_ids, end_ids(metadata)) == (1, (2,), [2])
    unknown = [2, 2, 2, *metadata["tokenizer.ggml.token_type"][3:]]  # other unknown tokens are control tokens
    assert tokenizer_of(metadata | named(token_type=unknown)).encode("<s>one") == expected.encode("<s>one")
    whole = [round(score) for score in metadata["tokenizer.ggml.scores"]]
    assert tokenizer_of(metadata | named(scores=whole)).encode("one two") == expected.encode("one two")


@pytest.mark.parametrize("unknown", [3, 20])
def test_a_byte_may_be_the_unknown_token(unknown: int, tiny_sentencepiece: bytes) -> None:
    """Every text has bytes, so ids and texts are those of the same file with another unknown token."""
    metadata = scored(sentencepiece.SentencePieceProcessor(model_proto=tiny_sentencepiece))
    tokenizer, expected = tokenizer_of(metadata | named(unknown_token_id=unknown)), tokenizer_of(metadata)
    for text in [*SPACED, "a\x00\ufffd日"]:
        ids = expected.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == expected.decode(ids)


def test_ends_are_named_or_known(library: tokenizers.Tokenizer) -> None:
    metadata = byte_level(library) | named(eos_token_id=0, eot_token_id=5, eom_token_id=None)
    assert end_ids(metadata) == [0, 5, 1]  # <|im_end|> is 1
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens[7:10] = "</s>", "<end_of_turn>", "<|eot_id|>"
    kinds[7:10] = 1, 3, 4  # a normal token ends nothing: `</s>` may be the end of a tag
    assert end_ids(metadata) == [0, 5, 1, 8, 9]
    assert end_ids(named(model="llama", tokens=["a", "b", "c"], token_type=[1, 1, 1])) == [2]
    assert end_ids(named(eos_token_id="x", eot_token_id=9, tokens=3)) == []


def test_the_default_template_is_read(library: tokenizers.Tokenizer) -> None:
    default = {"tokenizer.chat_template": "{{ messages[0].content }}é{{ eos_token }}"}
    tokenizer = tokenizer_of(byte_level(library) | default | {"tokenizer.chat_template.tool": 3})
    assert tokenizer.chat([{"role": "user", "content": "Hi"}]) == "Hié<|im_end|>"


def test_empty_tokens_have_no_text(library: tokenizers.Tokenizer, gemma: sentencepiece.SentencePieceProcessor) -> None:
    for metadata in (byte_level(library), scored(gemma, RUNS)):
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        tokens += ["", ""]
        kinds += [1, 5]
        if "tokenizer.ggml.scores" in metadata:
            metadata["tokenizer.ggml.scores"] += [0.0, 0.0]
        tokenizer = tokenizer_of(metadata)
        ids = tokenizer.encode("a b", bos=False)
        assert tokenizer.decode(ids) == "a b"
        assert max(ids) < len(tokens) - 2


LONG = "<" + "x" * (MOST_ADDED_TOKEN - 1) + ">"
MANY = [f"{i:0{MOST_ADDED_TOKEN}}" for i in range(MOST_ADDED // MOST_ADDED_TOKEN + 1)]
WRONG: dict[str, list[dict[str, Any]]] = {
    "expected 'gpt2' or 'llama'": [{"model": "bert"}],
    "is 't5'": [{"model": "t5"}],
    "is 'none'": [{"model": "none"}],
    "is None": [{"model": None}],
    "did you mean 'smollm'? valid: command-r": [{"pre": "smolm"}],
    "valid: command-r": [{"pre": None}],
    "'x\\ny'": [{"pre": "x\ny"}],
    "a list of strings": [{"tokens": "abc"}, {"tokens": ["a", 1, "ab"]}, {"tokens": []}],
    "ids 0 and 2 have it": [{"tokens": ["a", "b", "a"]}],
    "Unicode text": [{"tokens": ["a", "\ud800", "c"]}],
    "characters in all": [{"tokens": ["a", "b", "x" * MOST_CHARS]}],
    "256 characters in each control": [
        *({"tokens": ["a", "b", LONG], "token_type": [1, 1, 3]}, {"tokens": MANY, "token_type": [4] * len(MANY)})
    ],
    "a number for each token": [
        *({"token_type": None}, {"token_type": [1, 1, 1.0]}, {"model": "llama", "scores": [1, 2, "3"]})
    ],
    "expected 3 numbers, one for each token, and there are 2": [{"token_type": [1, 1]}],
    "token_type is 7": [{"token_type": [1, 1, 7]}],
    "merges is None": [{"merges": None}],
    "out of vocabulary": [{"merges": ["a z"]}, {"merges": ["b a"]}],
    "invalid": [{"merges": ["ab"]}],
    "below 3": [{"bos_token_id": 3}, {"eot_token_id": -1}, {"eos_token_id": True}],
    "the id of a token": [{"tokens": ["a", "", "ab"], "bos_token_id": 1}],
    "true or false": [{"add_bos_token": 1}, {"model": "llama", "add_space_prefix": "no"}],
    "scores is None": [{"model": "llama", "scores": None}],
    "there are 1": [{"model": "llama", "scores": [1.0]}],
    "finite": [{"model": "llama", "scores": [0.0, 0.0, wrong]} for wrong in (float("nan"), 1e39)],
    "<0x00> to <0xFF>": [{"model": "llama", "tokens": ["a", "b", "<0x-1>"], "token_type": [1, 1, 6]}],
    "256": [{"model": "llama", "tokens": ["a", "b", "<0x0A>"]}],
    "null character": [{"model": "llama", "tokens": ["a", "b", "c\0"]}],
}


@pytest.mark.parametrize(("message", "change"), [(text, each) for text, wrong in WRONG.items() for each in wrong])
def test_wrong_metadata_are_one_line(message: str, change: dict[str, Any]) -> None:
    metadata = named(model="gpt2", pre="gpt-2", tokens=["a", "b", "ab"], token_type=[1, 1, 1], merges=["a b"])
    assert tokenizer_of(metadata).encode("ab") == [2]
    with pytest.raises(ModelError, match=re.escape(message)) as error:
        tokenizer_of(metadata | named(scores=[0.0, 0.0, 0.0]) | named(**change))
    assert "model.gguf" in one_line(error)


def test_a_template_that_is_no_text_is_one_line(library: tokenizers.Tokenizer) -> None:
    for value in (3, ["a"], "\ud800", "x" * (MOST_TEMPLATE + 1)):
        with refused(ModelError, "tokenizer.chat_template is"):
            tokenizer_files(byte_level(library) | {"tokenizer.chat_template": value}, WHERE)
