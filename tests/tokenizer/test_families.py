"""Tokenizers and chat templates as Qwen3 and Ministral 3 publish them, made here, beside transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

import lce
from lce.weights.source import Source
from tests.checkpoints import save_tiny
from tests.vocabularies import PROSE, QWEN2, TEKKEN, TEXTS, cut_by, train, write_json

SPELLED = [
    *(*TEXTS, "  two  spaces,\n\n\ttabs  \n and é"),
    "cafe\u0301 A\u030a \ufb01 \u1e9b\u0323",  # what NFC composes, and what it leaves alone
    "I'm WE'LL don't 12345 x_1 (a)[b]\n\n",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think>\n",
    "<s>[INST]Hi[/INST]",
]
QWEN_3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and message.content is string %}
        {%- set ns.searching = false %}{%- set ns.last_query = messages|length - 1 - loop.index0 %}
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

MINISTRAL = """{%- set fallback = 'You are Ministral.' %}{{- bos_token }}
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
    {%- endif %}{%- set ns.index = ns.index + 1 %}
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
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "ministral3": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>"],
}
TEMPLATES = {"qwen3": QWEN_3, "ministral3": MINISTRAL}


def library_of(kind: str) -> tokenizers.Tokenizer:
    """Byte-level BPE. Qwen composes characters first and has no BOS; tekken has one and looks up whole words first."""
    qwen = kind == "qwen3"
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=not qwen))
    if qwen:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = cut_by(QWEN2 if qwen else TEKKEN)
    library.decoder = decoders.ByteLevel()
    train(library, PROSE, 400, [] if qwen else SPECIAL[kind])  # Qwen's are at the end of the vocabulary
    library.add_special_tokens(SPECIAL[kind])
    if qwen:
        library.post_processor = processors.ByteLevel(trim_offsets=False)
        library.add_tokens([AddedToken(word, normalized=False, special=False) for word in ("<think>", "</think>")])
    else:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def config_of(kind: str) -> dict[str, Any]:
    if kind == "ministral3":
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return names | {"extra_special_tokens": ["[INST]", "[/INST]"]}
    library = library_of(kind)
    tokens = library.get_added_tokens_decoder().items()
    added = {str(i): {"content": x.content, "normalized": False, "special": x.special} for i, x in tokens}
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    names |= {"add_bos_token": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    return names | {"add_prefix_space": False, "added_tokens_decoder": added}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name), name) for name in TEMPLATES}


def write(folder: Path, kind: str) -> Path:
    library_of(kind).save(str(folder / "tokenizer.json"))
    write_json(folder, "tokenizer_config.json", config_of(kind) | {"chat_template": TEMPLATES[kind]})
    return folder


def oracle_of(folder: Path, kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    config = config_of(kind)
    own = {"tokenizer_file": str(folder / "tokenizer.json"), "chat_template": TEMPLATES[kind]}
    own |= {name: config[name] for name in ("bos_token", "eos_token")}
    return PreTrainedTokenizerFast(**own, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("text", SPELLED)
def test_ids_and_text_as_transformers(folders: dict[str, Path], kind: str, text: str) -> None:
    tokenizer, oracle = Source(folders[kind]).tokenizer(), oracle_of(folders[kind], kind)
    ids = tokenizer.encode(text)
    assert ids == oracle(text)["input_ids"] or text.startswith("<s>")  # lce puts no second BOS before a text with one
    assert tokenizer.encode(text, bos=False) == oracle(text, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip)
        stream = tokenizer.stream(skip_special=skip)
        assert "".join([stream.push(i) for i in ids]) + stream.finish() == tokenizer.decode(ids, skip_special=skip)


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


def test_an_engine_reads_a_chat_and_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """generation_config.json names two ends of text, `<|im_end|>` and `<|endoftext|>`, and a BOS that is not added."""
    names = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    save_tiny(tmp_path, seed=1, vocab_size=512, bos_token_id=None, eos_token_id=None, **names)
    write(tmp_path, "qwen3")
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
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free[: free.index(free[2])])
