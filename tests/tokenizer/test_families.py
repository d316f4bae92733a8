"""Tokenizers and chat templates as Qwen2.5, Qwen3 and Ministral 3 publish them, made here, beside transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

import lce
from lce.weights.source import Source
from tests.checkpoints import save_tiny

PROSE = [
    "The quick brown fox jumps over the lazy dog, and then over the moon: 1234 times.",
    "I'm sure they've said it'd work; we'll see, don't worry. I'M SURE!",
    "Längere Kontexte brauchen kleine Köpfe.\n\n日本語の文章と😀の絵文字。\r\n",
    "def f(x):\n    return x * 2\n",
] * 8
TEXTS = [
    "Hello world",
    "  two  spaces,\n\n\ttabs  \n and é",
    "cafe\u0301 A\u030a \ufb01 \u1e9b\u0323",  # what NFC composes, and what it leaves alone
    "日本語 😀 नमस्ते 👩‍👩‍👧",
    "I'm WE'LL don't 12345 x_1 (a)[b]\n\n",
    "",
    " ",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think>\n",
    "<s>[INST]Hi[/INST]",
]
# Both as published.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_2_5 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN_3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MINISTRAL = """{%- set fallback = 'You are Ministral.' %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = fallback %}{%- set rest = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""

CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "one": [{"role": "user", "content": "Hi 😀"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " cafe\u0301\n"}],
    "thoughts": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\n2"},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": "<think>\n\n</think>\n\n4"},
    ],
}
SPECIAL = {
    "qwen2.5": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "ministral3": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>"],
}
TEMPLATES = {"qwen2.5": QWEN_2_5, "qwen3": QWEN_3, "ministral3": MINISTRAL}


def library_of(kind: str) -> tokenizers.Tokenizer:
    """Byte-level BPE. Qwen composes characters first and has no BOS; tekken has one and looks up whole words first."""
    qwen = kind.startswith("qwen")
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=not qwen))
    if qwen:
        library.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT if qwen else TEKKEN_SPLIT), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[] if qwen else SPECIAL[kind],  # at the end of Qwen's vocabulary, at the start of tekken's
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(PROSE, trainer)
    library.add_special_tokens(SPECIAL[kind])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    if kind == "qwen3":
        library.add_tokens([AddedToken(word, normalized=False, special=False) for word in ("<think>", "</think>")])
    if not qwen:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def config_of(kind: str) -> dict[str, Any]:
    if kind == "ministral3":
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return names | {"extra_special_tokens": ["[INST]", "[/INST]"]}
    library = library_of(kind)
    added = {
        str(token_id): {"content": token.content, "normalized": False, "special": token.special}
        for token_id, token in library.get_added_tokens_decoder().items()
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in TEMPLATES}
    for name, folder in made.items():
        write(folder, name)
    return made


def write(folder: Path, kind: str) -> None:
    library_of(kind).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config_of(kind) | {"chat_template": TEMPLATES[kind]}), encoding="utf-8"
    )


def oracle_of(folder: Path, kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    config = config_of(kind)
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
        chat_template=TEMPLATES[kind],
        clean_up_tokenization_spaces=False,
    )


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_as_transformers(folders: dict[str, Path], kind: str, text: str) -> None:
    tokenizer, oracle = Source(folders[kind]).tokenizer(), oracle_of(folders[kind], kind)
    ids = tokenizer.encode(text)
    assert ids == oracle(text)["input_ids"] or text.startswith("<s>")  # lce puts no second BOS before a text with one
    assert tokenizer.encode(text, bos=False) == oracle(text, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip)
        stream = tokenizer.stream(skip_special=skip)
        assert "".join([stream.push(i) for i in ids]) + stream.finish() == tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), kind=st.sampled_from(sorted(TEMPLATES)))
def test_any_text_as_transformers(folders: dict[str, Path], kind: str, text: str) -> None:
    tokenizer = Source(folders[kind]).tokenizer()
    library = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_chats_as_transformers(folders: dict[str, Path], kind: str, name: str, prompt: bool) -> None:
    tokenizer, oracle = Source(folders[kind]).tokenizer(), oracle_of(folders[kind], kind)
    conversation = CONVERSATIONS[name]
    text = tokenizer.chat(conversation, add_generation_prompt=prompt)
    assert text == oracle.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)
    ids = oracle.apply_chat_template(conversation, add_generation_prompt=prompt, return_dict=False)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode_parts(tokenizer.render_chat(conversation, add_generation_prompt=prompt)) == ids
    assert ids.count(1 if kind == "ministral3" else -1) == (kind == "ministral3")  # one BOS, or none


@pytest.mark.parametrize(("kind", "model_type"), [("qwen2.5", "qwen2"), ("qwen3", "qwen3")])
def test_an_engine_reads_a_chat_and_stops_at_the_end_of_a_turn(tmp_path: Path, kind: str, model_type: str) -> None:
    """generation_config.json names two ends of text, `<|im_end|>` and `<|endoftext|>`, and a BOS that is not added."""
    names = {"model_type": model_type, "architectures": [f"{model_type.title()}ForCausalLM"]}
    save_tiny(tmp_path, seed=1, vocab_size=512, bos_token_id=None, eos_token_id=None, **names)
    write(tmp_path, kind)
    tokenizer = Source(tmp_path).tokenizer()
    ends = [tokenizer.encode(token)[0] for token in ("<|im_end|>", "<|endoftext|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "bos_token_id": ends[1]}))
    engine = lce.load(tmp_path)
    assert engine.setup.model.config.eos_ids == tuple(ends)
    text = engine.tokenizer.chat(CONVERSATIONS["system"])
    result = engine.generate(text, max_tokens=4)
    assert result.stats.prompt_tokens == len(tokenizer.encode(text))
    free = result.token_ids
    assert len(free) == 4
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ends[0], free[2]]}))
    stopped = lce.load(tmp_path).generate(text, max_tokens=4)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free[: free.index(free[2])]
