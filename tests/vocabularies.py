"""Small tokenizers of every kind, made here."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lce.errors import LceError
from tests.checkpoints import byte_level

LLAMA2 = Path(__file__).parents[2] / "shared" / "data" / "llama2_tokenizer.model"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PROSE = [
    "The quick brown fox jumps over the lazy dog, and then over the moon.",
    *("Längere Kontexte brauchen kleine Köpfe; naïve façades don't.", "日本語の文章と😀の絵文字。"),
    "def f(x):\n    return x * 2\n",
] * 8
TEXTS = ["Hello world", "  two  spaces,\n\ttabs and é", "日本語 😀 नमस्ते 👩‍👩‍👧", "", " ", "a\x00b\ufffd"]
TEXTS += ["The quick brown fox " * 20]
# The regular expressions that published byte-level tokenizers cut words by.
SHORT, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{LOWER}|{UPPER}|\p{{N}}|{PATHS}|{SPACES}"
O200K = rf"{LOWER}{SHORT}?|{UPPER}{SHORT}?|\p{{N}}{{1,3}}|{PATHS}|{SPACES}"
KINDS = ["byte_level", "llama", "unigram", "sentencepiece"]


def write_json(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def cut_by(regex: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"), byte_level])


def train(library: tokenizers.Tokenizer, texts: list[str], size: int, special: list[str]) -> None:
    """Make a byte-level vocabulary of `size` tokens, the special ones first."""
    options = {"show_progress": False, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    library.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, **options))


def byte_level_library() -> tokenizers.Tokenizer:
    """Llama 3's kind: byte-level BPE, a BOS from the post-processor."""
    return byte_level(PROSE, 400, "<|begin|>", "<|end|>", "<|eot|>", added=["<|tool|>", "plain added é"])


def merges_of(pieces: list[str]) -> list[tuple[str, str]]:
    """The merges behind a sentencepiece BPE vocabulary, whose pieces stand in the order of their merges."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    cuts = [(piece[:cut], piece[cut:]) for piece in pieces[259:] for cut in range(1, len(piece))]
    return [(left, right) for left, right in cuts if left in ranks and right in ranks]


def llama_library(source: sentencepiece.SentencePieceProcessor) -> tokenizers.Tokenizer:
    """Llama 2's kind of tokenizer.json, of a sentencepiece BPE model."""
    pieces = source.id_to_piece(list(range(len(source))))
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    model = models.BPE(vocab, merges_of(pieces), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def unigram_library() -> tokenizers.Tokenizer:
    """A unigram vocabulary with byte fallback and Metaspace for its decoder."""
    words = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁the", "▁fox", "fox", "o", "f", "x", "▁▁"]
    scores = [(word, -1.0 - rank / 100) for rank, word in enumerate(words)]
    library = tokenizers.Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def sentencepiece_model(vocab_size: int = 400, **changes: object) -> bytes:
    """A sentencepiece BPE with byte fallback, as the bytes of its file."""
    own = changes or {"allow_whitespace_only_pieces": True, "split_digits": True}
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    options = {"model_type": "bpe", "vocab_size": vocab_size, "num_threads": 1, "minloglevel": 2, **plain, **own}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(PROSE), model_writer=model, **options)
    return model.getvalue()


def byte_ids(raw: bytes) -> list[int]:
    return [3 + byte for byte in raw]


def one_line(error: pytest.ExceptionInfo[LceError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


@contextmanager
def refused(kind: type[LceError], *words: str) -> Iterator[None]:
    """Expect an error of one line with these words."""
    with pytest.raises(kind) as error:
        yield
    assert all(each in one_line(error) for each in words), error.value
