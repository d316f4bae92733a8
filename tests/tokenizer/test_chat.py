"""Chat templates: parity with transformers on three formats, and hostile templates."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from lce.errors import DataError, LceError, ModelError
from lce.tokenizer.chat import choose_template, render_chat
from lce.tokenizer.tokenizer import Tokenizer

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set rest = messages[1:] %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set rest = messages %}{% set system = '' %}
{% endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ bos_token ~ '[INST] ' ~ (system if loop.first else '') ~ message['content'].strip() ~ ' [/INST]' }}
    {%- else %}
{{ ' ' ~ message['content'] | trim ~ ' ' ~ eos_token }}
    {%- endif %}
{% endfor %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if tools is not none %}{{- 'Tools: ' + tools | tojson(indent=4) }}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- set ns = namespace(index=0, user=none) %}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.last %}{% set ns.user = message.content %}{% break %}{% endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages | rejectattr('role', 'equalto', 'system') %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
{{- '|' ~ ns.index ~ '|' ~ {'a': '<é>'} | tojson }}
"""

CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", " Hi <b>\n"), ("assistant", "Hello."), ("user", "日本語 😀?")],
    [("user", "{{ 7 * 7 }} {% raw %}"), ("assistant", "'\"\\")],
]


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def rendered(template: str, turns: list[tuple[str, str]] = CONVERSATIONS[0], prompt: bool = True) -> str:
    return render_chat(template, messages(turns), bos_token="<s>", eos_token="</s>", add_generation_prompt=prompt).text


def one_line(error: pytest.ExceptionInfo[LceError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("template", [LLAMA2, LLAMA3, MISTRAL], ids=["llama2", "llama3", "mistral"])
def test_as_transformers_renders(template: str, turns: list[tuple[str, str]], prompt: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>")),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    expected = oracle.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=prompt)
    assert rendered(template, turns, prompt) == expected


def test_llama2_by_hand() -> None:
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")]
    assert rendered(LLAMA2, turns) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]"
    )


def test_json_is_not_escaped_and_undefined_names_are_empty() -> None:
    assert rendered("{{ {'a': '<é&>', 'b': [1]} | tojson }}{{ nothing }}") == '{"a": "<é&>", "b": [1]}'
    assert rendered("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_strftime_now() -> None:
    assert rendered("{{ strftime_now('%Y') }}").isdecimal()


def test_a_template_refuses_messages() -> None:
    with pytest.raises(DataError) as error:
        rendered(LLAMA2, [("assistant", "first")])
    assert "Roles must alternate" in one_line(error)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        None,
        "Hi",
        {"role": "user", "content": "Hi"},
        ["Hi"],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [{"role": 1, "content": "Hi"}],
        [{"role": "user", "content": "Hi", "name": 3}],
    ],
)
def test_wrong_messages_are_refused(wrong: object) -> None:
    with pytest.raises(DataError) as error:
        render_chat(LLAMA3, wrong, bos_token="", eos_token="")  # type: ignore[arg-type]
    assert "expected a list" in one_line(error)


def test_the_messages_stay_as_they_are() -> None:
    given = messages(CONVERSATIONS[1])
    with pytest.raises(ModelError):
        render_chat("{{ messages.append(1) }}", given, bos_token="", eos_token="")
    with pytest.raises(ModelError):
        render_chat("{{ messages[0].update({'role': 'x'}) }}", given, bos_token="", eos_token="")
    assert given == messages(CONVERSATIONS[1])


BROKEN = [
    "{% if %}",
    "{{ 'a' ",
    "{% for m in messages %}",
    "{% nonsense %}",
    "{{ messages[0].nothing.more }}",
    "{{ messages | nonsense }}",
    "{{ nothing() }}",
    "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}",
    "{% generation %}",
    "{% include 'other' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages | tojson(separators=3) }}",
    "{% for a in 3 %}{% endfor %}",
    "(" * 300 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "x" * ((1 << 20) + 1),
]

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__()[0].x }}",
    "{{ ''['__class__']['__mro__']() }}",
    "{{ (''|attr('__class__'))() }}",
    "{{ raise_exception.__globals__['os'].system('true') }}",
    "{{ strftime_now.__init__.__globals__.x }}",
    "{{ self.__init__.__globals__.x }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '{0.__class__.__mro__}'.format('').x() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages.clear() }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ namespace(__init__=1) }}",
    "{{ namespace({'__call__': 'a'.format}) }}",
    "{{ messages | map('attr', '__class__') | list | tojson }}",
    "{{ messages | map(attribute='__class__') | list | tojson }}",
]

BOMBS = [
    "{{ range(10 ** 9) | list }}",
    "{% for a in range(999999999) %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(90000) recursive %}{{ loop(range(90000)) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** 9 * 'a' }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a' | indent(width=10 ** 9, first=true) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ lipsum(10 ** 5) }}",
    "{% for i in range(100000) %}" + "x" * 100 + "{% endfor %}",
]


@pytest.mark.parametrize("template", BROKEN)
def test_broken_templates(template: str) -> None:
    with pytest.raises(ModelError) as error:
        rendered(template)
    assert "the chat template failed" in one_line(error)


@pytest.mark.parametrize("template", ESCAPES)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(ModelError) as error:
        rendered(template)
    assert "the chat template failed" in one_line(error)


@pytest.mark.parametrize("template", BOMBS)
def test_bombs_end_in_an_error(template: str) -> None:
    with pytest.raises(ModelError) as error:
        rendered(template)
    assert "the chat template failed" in one_line(error)


def test_long_messages_are_within_the_bounds() -> None:
    document = "A line of the document.\n" * 200_000
    template = "{% for line in messages[0].content.split('\n') %}{{ line ~ '\n' }}{% endfor %}"
    assert len(rendered(template, [("user", document)])) == len(document) + 1
    over_characters = "{% for part in messages[0].content %}{% if part.type == 'image' %}!{% endif %}{% endfor %}"
    assert rendered(over_characters, [("user", document[:1_000_000])]) == ""


def test_choosing_a_template() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert choose_template(None) is None
    assert choose_template("plain") == "plain"
    assert choose_template(named) == "D"
    assert choose_template(named[:1]) is None
    for wrong in (3, {"default": "D"}, [3], [{"name": "default", "template": 3}]):
        with pytest.raises(ModelError) as error:
            choose_template(wrong)
        assert "expected a string" in one_line(error)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    library = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "?": 2, "hi": 3, "[INST]": 4}, "?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": LLAMA2}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_tokenizer_chats_and_adds_no_second_bos(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = tokenizer.chat(messages([("user", "hi")]))
    assert text == "<s>[INST] hi [/INST]"
    assert tokenizer.encode(text) == [0, 4, 3, 2]
    assert tokenizer.encode("hi") == [0, 3]


def test_where_a_template_is_found(folder: Path) -> None:
    turns = messages([("user", "hi")])
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.from_folder(folder).chat(turns) == "json"
    (folder / "chat_template.jinja").write_text("jinja{{ '!' if add_generation_prompt }}")
    assert Tokenizer.from_folder(folder).chat(turns) == "jinja!"
    assert Tokenizer.from_folder(folder).chat(turns, add_generation_prompt=False) == "jinja"


def test_a_tokenizer_without_a_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(DataError) as error:
        tokenizer.chat(messages([("user", "hi")]))
    assert "without a chat template" in one_line(error)
