"""Text to ids and back, in one piece and as a stream, for every kind of vocabulary."""

import threading
import time
from itertools import chain, pairwise
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from lce.errors import DataError, ModelError, UsageError
from lce.tokenizer import files
from lce.tokenizer.tokenizer import Tokenizer, checked_ids
from lce.weights.source import Source
from tests.command import output
from tests.vocabularies import KINDS, PROSE, TEXTS, byte_ids, byte_level_library, refused, write_json

Made = dict[str, Tokenizer]


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer.bos_id is None:
        text = text.strip()  # the unigram one, whose decoder drops every space of the first token
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_by_the_tokenizers_own_rule_or_forced(made: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "llama", "sentencepiece"):
        tokenizer = made[kind]
        plain = tokenizer.encode("a fox", bos=False)
        assert tokenizer.bos_id not in plain
        assert tokenizer.encode("a fox") == tokenizer.encode("a fox", bos=True) == [tokenizer.bos_id, *plain]
        for bos in (None, True, False):  # never doubled
            ids = tokenizer.encode(f"{tokenizer.bos_token}a fox", bos=bos)
            assert [index for index, token_id in enumerate(ids) if token_id == tokenizer.bos_id] == [0]


def test_no_bos_to_force(made: dict[str, Tokenizer]) -> None:
    tokenizer = made["unigram"]
    assert tokenizer.bos_id is None
    assert tokenizer.encode("fox") == tokenizer.encode("fox", bos=False)
    with refused(UsageError, "no BOS token"):
        tokenizer.encode("fox", bos=True)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "sentencepiece"])
def test_config_overrides_the_rule(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders[kind].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    plain = Source(folders[kind]).tokenizer()
    names = {"bos_token": plain.bos_token, "eos_token": {"content": plain.eos_token, "lstrip": False}}
    write_json(tmp_path, "tokenizer_config.json", {**names, "add_bos_token": False, "add_eos_token": True})
    turned = Source(tmp_path).tokenizer()
    bare = plain.encode("a fox", bos=False)
    assert turned.encode("a fox") == [*bare, plain.eos_ids[0]]
    assert turned.encode("a fox", bos=True) == [plain.bos_id, *bare, plain.eos_ids[0]]


def test_bos_and_eos_without_any_config(folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["llama"] / "tokenizer.json"))
    special = [("<s>", 1), ("</s>", 2)]
    library.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Source(tmp_path).tokenizer()
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.eos_token, tokenizer.eos_ids) == ("<s>", 1, "</s>", (2,))
    assert (tokenizer.encode("a"), tokenizer.encode("a")[-1]) == ([1, *tokenizer.encode("a", bos=False)], 2)


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
    tokenizer = Source(tmp_path).tokenizer()
    ids = tokenizer.encode("fox<|tool|>dog")
    assert tokenizer.decode(ids) == "foxdog"
    assert tokenizer.vocab_size == Source(folders["byte_level"]).tokenizer().vocab_size


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, special ones and bytes drawn more often; and texts cut anywhere."""
    kinds = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 3) | st.integers(3, 260)
    cut_texts = st.tuples(st.text(max_size=12), st.integers(0, 6)).map(lambda c: tokenizer.encode(c[0])[c[1] :])
    several = st.lists(cut_texts, max_size=3).map(lambda parts: [*chain(*parts)])
    return st.lists(kinds, max_size=24) | cut_texts | several


checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
fixtures_are_shared = settings(max_examples=80, deadline=None, suppress_health_check=checks)


@fixtures_are_shared
@given(data=st.data(), skip=st.booleans())
def test_decode_is_the_librarys(made: Made, folders: dict[str, Path], data: st.DataObject, skip: bool) -> None:
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


@pytest.mark.parametrize("token_id", [-1, 1 << 40, "1", 1.5, None])
def test_ids_out_of_range(made: dict[str, Tokenizer], token_id: object) -> None:
    for kind in KINDS:
        with refused(UsageError, "token id"):
            made[kind].decode([token_id])


@pytest.mark.parametrize("text", ["a\ud800b", b"bytes", None, 3])
def test_not_a_text(made: dict[str, Tokenizer], text: str) -> None:
    for kind in KINDS:
        with refused(DataError, "text"):
            made[kind].encode(text)


def test_no_tokenizer(tmp_path: Path) -> None:
    """Ids need none: the stream has no text. A text is refused."""
    tokenizer = Source(tmp_path).tokenizer(300)
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id, tokenizer.chat_template) == (300, (), None, None)
    assert streamed(tokenizer, [5, 299, 1000]) == ["", "", "", ""]
    chat = [{"role": "user", "content": "Hi"}]
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1]), lambda: tokenizer.chat(chat)):
        with refused(ModelError, "expected tokenizer.json, tokenizer.model or tekken.json; give token ids, or copy"):
            call()


def test_importing_it_or_configs_or_the_command_line_is_light() -> None:
    check = "import sys, lce.tokenizer.tokenizer, lce.models.config, lce.cli, lce_serve.serving\n"
    check += "print({'torch', 'transformers', 'starlette', 'uvicorn'} & {*sys.modules})"
    assert output(check) == "set()\n"


def test_a_prompt_of_ids() -> None:
    assert checked_ids((0, 3, True), 4) == [0, 3, 1]
    with pytest.raises(UsageError, match="token id 4 is not in the model's vocabulary; expected 0 to 3"):
        checked_ids([1, 4], 4)
    with pytest.raises(UsageError, match="the prompt is a list; expected text or token ids"):
        checked_ids([1.5], 4)


@pytest.mark.parametrize("kind", ["llama", "unigram", "sentencepiece"])
def test_a_broken_byte_leaves_its_neighbours_whole(made: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = made[kind]
    assert tokenizer.decode(byte_ids("é€😀".encode())) == "é€😀"
    assert tokenizer.decode(byte_ids("é".encode() + b"\xff" + "€".encode())) == "é\ufffd€"
    assert tokenizer.decode(byte_ids(b"\xe2\x82A\xf0\x9f")) == "\ufffd\ufffdA\ufffd\ufffd"


@fixtures_are_shared
@given(raw=st.lists(st.integers(0, 255) | st.integers(0x80, 0xFF), max_size=16))
def test_broken_bytes_read_as_in_sentencepiece(made: Made, tiny_sentencepiece: bytes, raw: list[int]) -> None:
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


def test_without_a_decoder_tokens_are_joined_by_spaces(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "fox": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Source(tmp_path).tokenizer()
    assert tokenizer.decode(tokenizer.encode("a fox dog")) == "a fox ?"


@pytest.mark.parametrize(
    "decoder",
    [
        *(decoders.CTC(), decoders.BPEDecoder(), decoders.WordPiece(), decoders.Replace(tokenizers.Regex("a+"), "b")),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_cannot_be_streamed(decoder: decoders.Decoder, folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    with refused(ModelError, "token by token"):
        Source(tmp_path).tokenizer()


def test_a_long_text_has_the_ids_that_short_ones_have(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick brown fox, 123 jumps!\n<|end|></s> é€😀  <s>x " * 400
    assert len(text) > files.LONG_TEXT
    ids = tokenizer.encode(text)
    monkeypatch.setattr(files, "LONG_TEXT", 1 << 30)
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_a_long_text_holds_up_no_other_thread(made: dict[str, Tokenizer], kind: str) -> None:
    text, ended, gaps = " ".join(PROSE * (400_000 // len("".join(PROSE)))), threading.Event(), list[float]()

    def tick() -> None:
        before = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    made[kind].encode(text)
    took = time.perf_counter() - began
    ended.set()
    thread.join(10)
    assert max(gaps) < max(0.25, took * 0.6)
