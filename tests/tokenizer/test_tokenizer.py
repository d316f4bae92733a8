"""Tokenizers made here, small, and Llama 2's own vocabulary where shared/ has it.

Oracles: the tokenizers library's decode, sentencepiece itself, and transformers' LlamaTokenizer.
"""

import contextlib
import io
import json
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lce.errors import DataError, LceError, ModelError, UsageError
from lce.tokenizer.tokenizer import Tokenizer

LLAMA2 = Path(__file__).parents[3] / "shared" / "data" / "llama2_tokenizer.model"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PROSE = [
    "The quick brown fox jumps over the lazy dog, and then over the moon.",
    "Längere Kontexte brauchen kleine Köpfe; naïve façades don't.",
    "日本語の文章と😀の絵文字。",
    "def f(x):\n    return x * 2\n",
] * 8
TEXTS = [
    "Hello world",
    "  two  spaces,\n\ttabs and é",
    "日本語 😀 नमस्ते 👩‍👩‍👧",
    "",
    " ",
    "a\x00b\ufffd",
    "The quick brown fox " * 20,
]


def write_json(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def byte_level_library() -> tokenizers.Tokenizer:
    """Llama 3's kind: byte-level BPE, a BOS from the post-processor."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        PROSE,
        trainers.BpeTrainer(
            vocab_size=400,
            show_progress=False,
            special_tokens=["<|begin|>", "<|end|>", "<|eot|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    library.add_tokens(["<|tool|>", "plain added é"])
    library.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return library


def merges_of(pieces: list[str]) -> list[tuple[str, str]]:
    """The merges behind a sentencepiece BPE vocabulary, whose pieces stand in the order of their merges."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces[259:]
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]


def llama_library(model: sentencepiece.SentencePieceProcessor) -> tokenizers.Tokenizer:
    """Llama 2's kind of tokenizer.json, of a sentencepiece BPE model."""
    pieces = model.id_to_piece(list(range(len(model))))
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(
        models.BPE(vocab, merges_of(pieces), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def unigram_library() -> tokenizers.Tokenizer:
    """A unigram vocabulary with byte fallback and Metaspace for its decoder."""
    words = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁the", "▁fox", "fox", "o", "f", "x", "▁▁"]
    library = tokenizers.Tokenizer(
        models.Unigram([(word, -1.0 - rank / 100) for rank, word in enumerate(words)], 0, byte_fallback=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


@pytest.fixture(scope="session")
def tiny_sentencepiece() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_sentencepiece: bytes) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("byte_level", "llama", "unigram", "sentencepiece")}
    byte_level_library().save(str(made["byte_level"] / "tokenizer.json"))
    write_json(made["byte_level"], "tokenizer_config.json", {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    model = sentencepiece.SentencePieceProcessor(model_proto=tiny_sentencepiece)
    llama_library(model).save(str(made["llama"] / "tokenizer.json"))
    write_json(made["llama"], "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    unigram_library().save(str(made["unigram"] / "tokenizer.json"))
    (made["sentencepiece"] / "tokenizer.model").write_bytes(tiny_sentencepiece)
    return made


@pytest.fixture(scope="session")
def made(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if not LLAMA2.exists():
        pytest.skip("Llama 2's vocabulary is not at ../shared/data/llama2_tokenizer.model")
    folder = tmp_path_factory.mktemp("llama2")
    (folder / "tokenizer.model").symlink_to(LLAMA2)
    return Tokenizer.from_folder(folder, vocab_size=32000)


KINDS = ["byte_level", "llama", "unigram", "sentencepiece"]


@pytest.fixture(params=[*KINDS, "llama2"])
def tokenizer(request: pytest.FixtureRequest, made: dict[str, Tokenizer]) -> Tokenizer:
    if request.param == "llama2":
        request.getfixturevalue("llama2")
    return made[request.param] if request.param in made else request.getfixturevalue("llama2")


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


def one_line(error: pytest.ExceptionInfo[LceError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# Text to ids and back


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer.bos_id is None:
        text = text.strip()  # the unigram one, whose decoder drops every space of the first token
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_json_encodes_as_the_library_does(made: dict[str, Tokenizer], folders: dict[str, Path], text: str) -> None:
    for kind in ("byte_level", "llama", "unigram"):
        library = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
        assert made[kind].encode(text) == library.encode(text).ids
        assert made[kind].encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", [*TEXTS, "<s>[INST] hi [/INST] a </s><s>[INST] b", "</s>a<s>b<unk>c", "▁x"])
def test_both_files_of_a_model_agree(made: dict[str, Tokenizer], text: str) -> None:
    ids = made["sentencepiece"].encode(text)
    assert ids == made["llama"].encode(text)
    assert made["sentencepiece"].decode(ids) == made["llama"].decode(ids)


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_llama2_is_bos_and_sentencepiece(llama2: Tokenizer, text: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(LLAMA2))
    ids = llama2.encode(text)
    assert ids == [1, *model.encode(text)]
    assert llama2.decode(ids) == model.decode(ids)


def test_llama2_known_ids(llama2: Tokenizer) -> None:
    assert llama2.encode("Hello this is a test") == [1, 15043, 445, 338, 263, 1243]
    assert (llama2.vocab_size, llama2.bos_id, llama2.eos_ids) == (32000, 1, (2,))
    assert (llama2.bos_token, llama2.eos_token, llama2.chat_template) == ("<s>", "</s>", None)


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


# BOS, EOS and special tokens


def test_bos_by_the_tokenizers_own_rule_or_forced(made: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "llama", "sentencepiece"):
        tokenizer = made[kind]
        plain = tokenizer.encode("a fox", bos=False)
        assert tokenizer.bos_id not in plain
        assert tokenizer.encode("a fox") == tokenizer.encode("a fox", bos=True) == [tokenizer.bos_id, *plain]


def test_bos_is_never_doubled(made: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "llama", "sentencepiece"):
        tokenizer = made[kind]
        for bos in (None, True, False):
            ids = tokenizer.encode(f"{tokenizer.bos_token}a fox", bos=bos)
            assert [index for index, token_id in enumerate(ids) if token_id == tokenizer.bos_id] == [0]


def test_no_bos_to_force(made: dict[str, Tokenizer]) -> None:
    tokenizer = made["unigram"]
    assert tokenizer.bos_id is None
    assert tokenizer.encode("fox") == tokenizer.encode("fox", bos=False)
    with pytest.raises(UsageError) as error:
        tokenizer.encode("fox", bos=True)
    assert "no BOS token" in one_line(error)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "sentencepiece"])
def test_config_overrides_the_rule(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders[kind].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    plain = Tokenizer.from_folder(folders[kind])
    names = {"bos_token": plain.bos_token, "eos_token": {"content": plain.eos_token, "lstrip": False}}
    write_json(tmp_path, "tokenizer_config.json", {**names, "add_bos_token": False, "add_eos_token": True})
    turned = Tokenizer.from_folder(tmp_path)
    bare = plain.encode("a fox", bos=False)
    assert turned.encode("a fox") == [*bare, plain.eos_ids[0]]
    assert turned.encode("a fox", bos=True) == [plain.bos_id, *bare, plain.eos_ids[0]]


def test_bos_and_eos_without_any_config(folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["llama"] / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token, tokenizer.bos_id) == ("<s>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_ids) == ("</s>", (2,))
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", bos=False)]
    assert tokenizer.encode("a")[-1] == 2


def test_every_id_that_ends_a_generation(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    write_json(tmp_path, "tokenizer_config.json", {"eos_token": "<|eot|>"})
    write_json(tmp_path, "generation_config.json", {"eos_token_id": [1, 2, 10**9]})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_token, tokenizer.eos_ids) == ("<|eot|>", (2, 1))
    write_json(tmp_path, "generation_config.json", {"eos_token_id": 1})
    assert Tokenizer.from_folder(tmp_path).eos_ids == (2, 1)


def test_special_tokens_are_skipped_or_shown(made: dict[str, Tokenizer]) -> None:
    tokenizer = made["byte_level"]
    ids = tokenizer.encode("fox<|end|><|tool|>dog")
    assert tokenizer.decode(ids) == "fox<|tool|>dog"
    assert tokenizer.decode(ids, skip_special=False) == "<|begin|>fox<|end|><|tool|>dog"
    tokenizer = made["sentencepiece"]
    assert tokenizer.decode(tokenizer.encode("fox</s>"), skip_special=False) == "<s> fox</s>"


def test_a_token_that_only_the_config_calls_special(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    write_json(tmp_path, "tokenizer_config.json", {"additional_special_tokens": ["<|tool|>", "<|not in it|>"]})
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("fox<|tool|>dog")
    assert tokenizer.decode(ids) == "foxdog"
    assert tokenizer.vocab_size == Tokenizer.from_folder(folders["byte_level"]).vocab_size


@pytest.mark.parametrize("older", [True, False])
def test_added_tokens_over_sentencepiece(tiny_sentencepiece: bytes, tmp_path: Path, older: bool) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tiny_sentencepiece)
    config: dict[str, object] = {"additional_special_tokens": ["<|im_end|>"]}
    if older:
        write_json(tmp_path, "added_tokens.json", {"<|im_end|>": 400, "<tool>": 405})
    else:
        config["added_tokens_decoder"] = {
            "400": {"content": "<|im_end|>", "special": True},
            "405": {"content": "<tool>", "special": False},
        }
    write_json(tmp_path, "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_folder(tmp_path, vocab_size=410)
    ids = tokenizer.encode("fox<|im_end|><tool>", bos=False)
    assert ids[-2:] == [400, 405]
    assert tokenizer.vocab_size == 406
    assert tokenizer.decode(ids) == "fox<tool>"
    assert tokenizer.decode([402, *ids]) == "fox<tool>"  # a gap in the vocabulary
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(tmp_path, vocab_size=400)
    assert "406" in one_line(error)
    assert "400" in one_line(error)


def test_space_only_before_the_text_itself(tiny_sentencepiece: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tiny_sentencepiece)
    before_all = Tokenizer.from_folder(tmp_path)
    write_json(tmp_path, "tokenizer_config.json", {"legacy": False})
    before_text = Tokenizer.from_folder(tmp_path)
    assert before_all.encode("a fox") == before_text.encode("a fox")
    assert before_all.decode(before_all.encode("<s>a</s>b")) == "a b"
    assert before_text.decode(before_text.encode("<s>a</s>b")) == "ab"


def test_truncation_and_padding_of_the_file_are_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    library.enable_truncation(8)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("brown fox " * 50)) == "brown fox " * 50
    assert len(tokenizer.encode("fox")) < 8


# Streaming


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, special ones and bytes drawn more often; and texts cut anywhere."""
    kinds = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 3) | st.integers(3, 260)
    cut_texts = st.tuples(st.text(max_size=12), st.integers(0, 6)).map(lambda c: tokenizer.encode(c[0])[c[1] :])
    return (
        st.lists(kinds, max_size=24) | cut_texts | st.lists(cut_texts, max_size=3).map(lambda parts: [*chain(*parts)])
    )


fixtures_are_shared = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@fixtures_are_shared
@given(data=st.data(), skip=st.booleans())
def test_the_stream_is_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_of(tokenizer))
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special=skip)


@fixtures_are_shared
@given(data=st.data(), skip=st.booleans())
def test_decode_is_the_librarys(
    made: dict[str, Tokenizer], folders: dict[str, Path], data: st.DataObject, skip: bool
) -> None:
    kind = data.draw(st.sampled_from(["byte_level", "llama", "unigram"]))
    ids = data.draw(ids_of(made[kind]))
    library = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    text = made[kind].decode(ids, skip_special=skip)
    if kind == "byte_level" or "\ufffd" not in text:  # broken bytes: see the next tests
        assert text == library.decode(ids, skip_special_tokens=skip)


@fixtures_are_shared
@given(text=st.text(max_size=20).filter(lambda text: "\ufffd" not in text and "▁" not in text))
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    for before, after in pairwise(range(len(ids) + 1)):
        assert tokenizer.decode(ids[:after]).startswith("".join(pieces[:before]))


def byte_ids(raw: bytes) -> list[int]:
    """The ids of single bytes in a vocabulary with byte fallback."""
    return [3 + byte for byte in raw]


@pytest.mark.parametrize("kind", ["llama", "unigram", "sentencepiece"])
def test_a_broken_byte_takes_no_sound_character_with_it(made: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = made[kind]
    assert tokenizer.decode(byte_ids("é€😀".encode())) == "é€😀"
    assert tokenizer.decode(byte_ids("é".encode() + b"\xff" + "€".encode())) == "é\ufffd€"
    assert tokenizer.decode(byte_ids(b"\xe2\x82A\xf0\x9f")) == "\ufffd\ufffdA\ufffd\ufffd"


@fixtures_are_shared
@given(raw=st.lists(st.integers(0, 255) | st.integers(0x80, 0xFF), max_size=16))
def test_broken_bytes_read_as_in_sentencepiece(
    made: dict[str, Tokenizer], tiny_sentencepiece: bytes, raw: list[int]
) -> None:
    ids = byte_ids(bytes(raw))
    model = sentencepiece.SentencePieceProcessor(model_proto=tiny_sentencepiece)
    space = " " if raw[:1] == [0x20] else ""  # a byte is never sentencepiece's own space, but is for the JSON decoder
    assert space + made["sentencepiece"].decode(ids) == model.decode(ids)


@pytest.mark.parametrize("byte", [0x80, 0xC3, 0xE2, 0xF0, 0xFF])
def test_broken_bytes_come_out_within_a_few_tokens(made: dict[str, Tokenizer], byte: int) -> None:
    char = {0x80: "Ģ"}.get(byte, chr(byte))  # how a byte-level vocabulary writes the byte
    for kind in KINDS:
        tokenizer = made[kind]
        token_id = byte_level_library().get_vocab()[char] if kind == "byte_level" else 3 + byte
        stream = tokenizer.stream()
        seen = ""
        for count in range(1, 50):
            seen += stream.push(token_id)
            assert len(seen) >= count - 3
        assert len(seen + stream.finish()) == 49


def test_finish_completes_what_is_left(made: dict[str, Tokenizer]) -> None:
    stream = made["sentencepiece"].stream()
    assert [stream.push(token_id) for token_id in byte_ids(b"a\xf0\x9f\x98")] == [
        "a",
        "",
        "",
        "",
    ]
    assert stream.finish() == "\ufffd" * 3
    assert stream.finish() == ""


def test_streams_do_not_share_anything(made: dict[str, Tokenizer]) -> None:
    tokenizer = made["sentencepiece"]
    one, two = tokenizer.stream(), tokenizer.stream()
    smile = byte_ids("😀".encode())
    assert [one.push(smile[0]), two.push(smile[0]), one.push(smile[1]), two.push(smile[1])] == [""] * 4
    assert [one.push(smile[2]), one.push(smile[3]), two.push(smile[2]), two.push(smile[3])] == ["", "😀", "", "😀"]


def test_without_a_decoder_tokens_are_joined_by_spaces(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "fox": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a fox dog")) == "a fox ?"
    assert streamed(tokenizer, [0, 1, 2]) == ["a", " fox", " ?", ""]


# Refusals


def test_larger_than_the_embedding(folders: dict[str, Path]) -> None:
    size = Tokenizer.from_folder(folders["byte_level"]).vocab_size
    assert Tokenizer.from_folder(folders["byte_level"], vocab_size=size).vocab_size == size
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(folders["byte_level"], vocab_size=size - 1)
    assert str(size) in one_line(error)
    assert str(size - 1) in one_line(error)


def test_ids_that_pad_the_embedding_have_no_text(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(folders["byte_level"], vocab_size=1024)
    fox = tokenizer.encode("fox")
    assert tokenizer.decode([1023, *fox, 1000]) == "fox"


@pytest.mark.parametrize("token_id", [-1, 1 << 40, "1", 1.5, None])
def test_ids_out_of_range(made: dict[str, Tokenizer], token_id: object) -> None:
    for kind in KINDS:
        with pytest.raises(UsageError) as error:
            made[kind].decode([token_id])  # type: ignore[list-item]
        assert "token id" in one_line(error)


@pytest.mark.parametrize("text", ["a\ud800b", b"bytes", None, 3])
def test_not_a_text(made: dict[str, Tokenizer], text: str) -> None:
    for kind in KINDS:
        with pytest.raises(DataError) as error:
            made[kind].encode(text)
        assert "text" in one_line(error)


def test_no_tokenizer(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelError) as error:
            Tokenizer.from_folder(folder)
        assert "expected tokenizer.json or tokenizer.model" in one_line(error)


WRONG_FILES: list[tuple[str, bytes]] = [
    ("tokenizer.json", b""),
    ("tokenizer.json", b"{"),
    ("tokenizer.json", b"[]"),
    ("tokenizer.json", b'{"version": "1.0"}'),
    ("tokenizer.json", b"\xff\xfe"),
    ("tokenizer.model", b""),
    ("tokenizer.model", b"IQ== 0\nIg== 1\n"),
    ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f"),
    ("tokenizer_config.json", b"{"),
    ("tokenizer_config.json", b"[1]"),
    ("tokenizer_config.json", b"[" * 100_000),
    ("tokenizer_config.json", b'{"bos_token": 3}'),
    ("tokenizer_config.json", b'{"bos_token": {"content": 3}}'),
    ("tokenizer_config.json", b'{"bos_token": "<nowhere>"}'),
    ("tokenizer_config.json", b'{"add_bos_token": "yes"}'),
    ("tokenizer_config.json", b'{"additional_special_tokens": 3}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": [3]}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"3": {}}}'),
    ("tokenizer_config.json", b'{"chat_template": 3}'),
    ("special_tokens_map.json", b"\x00"),
    ("added_tokens.json", b'{"a": "b"}'),
    ("added_tokens.json", b'{"a": -1}'),
    ("generation_config.json", b"nonsense"),
    ("chat_template.json", b"nonsense"),
    ("chat_template.jinja", b"\xff"),
]


@pytest.mark.parametrize(("name", "content"), WRONG_FILES)
def test_broken_files(folders: dict[str, Path], tmp_path: Path, name: str, content: bytes) -> None:
    model = folders["sentencepiece"] / "tokenizer.model"
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(tmp_path)
    assert len(one_line(error)) < 600


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_truncated_and_altered_files(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    (source,) = [path for path in folders[kind].iterdir() if path.name in ("tokenizer.json", "tokenizer.model")]
    content = source.read_bytes()
    for cut in range(0, len(content), len(content) // 25):
        (tmp_path / source.name).write_bytes(content[:cut])
        with pytest.raises(ModelError):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / source.name).write_bytes(content[:cut] + b"\xf5" + content[cut + 1 :])
        with contextlib.suppress(ModelError):  # an altered byte may go unnoticed; no other error may come
            Tokenizer.from_folder(tmp_path).encode("the fox")


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(tmp_path)
    assert str(256 << 20) in one_line(error)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.WordPiece(),
        decoders.Replace(tokenizers.Regex("a+"), "b"),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_cannot_be_streamed(decoder: decoders.Decoder, folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(tmp_path)
    assert "token by token" in one_line(error)


def test_a_vocabulary_without_the_texts_words(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ModelError) as error:
        tokenizer.encode("fox")
    assert "cannot encode" in one_line(error)


def test_importing_it_is_light() -> None:
    check = "import lce.tokenizer.tokenizer, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"
