"""Chat templates: parity with transformers on three formats, and hostile templates."""

import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jinja2.filters
import psutil
import pytest
import tokenizers
from _pytest.mark import ParameterSet
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models

from lce.errors import DataError, LceError, ModelError
from lce.tokenizer import chat
from lce.tokenizer.chat import MAX_BYTES, render_chat
from lce.tokenizer.template import render
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.source import Source
from tests.command import output
from tests.depth import pairs
from tests.vocabularies import KINDS, one_line, refused

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

# What published templates use beside plain Jinja.
SNIPPETS = [
    "{{- bos_token }}{%- if not date is defined %}{%- set date = '26 Jul' %}{%- endif %}{{ date }}",
    "{%- set ns = namespace(n=0, user=none) %}{%- for m in messages if m.role != 'tool' %}\n"
    "    {%- if loop.last %}{% set ns.user = m.content %}{% break %}{% endif %}\n"
    "    {%- set ns.n = ns.n + 1 %}\n{%- endfor %}\n{{ ns.n ~ ns.user }}",
    "{%- for m in messages | rejectattr('role', 'equalto', 'tool') %}{{ m['content'] | trim + '|' }}{% endfor %}",
    "{%- generation %}{{- ' ' + messages[0]['content'] + eos_token }}{%- endgeneration %}",
    "{{ {'a': '<é&>', 'b': [1]} | tojson }}{{ [1] | tojson(indent=2) }}{{ nothing }}",
    "{%- if add_generation_prompt %}\n    {{- 'assistant\\n' }}\n{%- endif %}\n",
]
CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", " Hi <b>\n"), ("assistant", "Hello."), ("user", "日本語 😀?")],
    [("user", "{{ 7 * 7 }} {% raw %}"), ("assistant", "'\"\\")],
]


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def joined(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    """The messages with the system text in the first user's message."""
    return messages([("user", f"{turns[0][1]}\n\n{turns[1][1]}"), *turns[2:]])


def rendered(template: str, turns: list[tuple[str, str]] = CONVERSATIONS[0], prompt: bool = True) -> str:
    special: dict[str, str | bool] = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt}
    return render_chat(template, messages(turns), special).text


@pytest.mark.parametrize(("template", "turns", "prompt"), pairs([LLAMA2, *SNIPPETS], CONVERSATIONS, [True, False]))
def test_as_transformers_renders(template: str, turns: list[tuple[str, str]], prompt: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    oracle = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", chat_template=template)
    expected = oracle.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=prompt)
    if turns[0][0] == "system" and turns[0][1] not in expected:  # transformers loses it
        expected = oracle.apply_chat_template(joined(turns), tokenize=False, add_generation_prompt=prompt)
    assert rendered(template, turns, prompt) == expected


TOO_LONG = "it makes a text of more than 2000 characters"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ ('a' * 2000) | length }}{{ x | int }}", {"text": "2000123"}),
        ("{% for a in (1, 2, 3) %}{{ 'a' * 700 }}{% endfor %}", {"failed": TOO_LONG}),
        ("{{ 1 / 0 }}", {"failed": "ZeroDivisionError: division by zero"}),
        ("{{ raise_exception('n' * 1999) }}", {"refused": "n" * 400}),
    ],
)
def test_what_becomes_of_a_template(text: str, expected: dict[str, str]) -> None:
    assert render(text, {"x": "123"}, 2000) == expected


def test_half_a_surrogate_pair_is_rendered_and_the_time_is_known() -> None:
    assert rendered("{{ 'é' ~ messages[0].content }}", [("user", "\ud800")]) == "é\ud800"
    assert rendered("{{ strftime_now('%Y') }}").isdecimal()


PARTS = """{% for m in messages %}{{ m.role }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}
{%- for part in m.content %}{% if part['type'] == 'text' %}{{ part.text }}{% endif %}{% endfor %}|{% endfor %}"""
EITHER = """{% for m in messages %}{% if m.content is string %}{{ m.content }}
{%- else %}{{ m.content[0].text }}?{% endif %}{% endfor %}"""


@pytest.mark.parametrize(("template", "expected"), [(PARTS, "system: S|user: Hi|assistant: A|"), (EITHER, "SHiA")])
def test_a_template_of_parts_is_given_parts(template: str, expected: str) -> None:
    """A template that takes texts is given texts."""
    turns = [("system", "S"), ("user", "Hi"), ("assistant", "A")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert render_chat(template, messages, {}).text == expected
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + template
    assert "S" in render_chat(strict, messages, {}).text
    assert render_chat(template, [{"role": "user", "content": "<|x|>"}], {}, ["<|x|>"]).cuts


def test_a_template_refuses_messages_in_one_line() -> None:
    long = "{{ raise_exception('a\\n\x1b[2J' ~ 'b' * 9999) }}"
    for template, words in ((LLAMA2, "Roles must alternate"), (long, "bbb")):
        with pytest.raises(DataError) as error:
            rendered(template, [("user", "first"), ("tool", "1"), ("tool", "2")])
        assert words in one_line(error)
        assert one_line(error).isprintable()


WRONG = [[], None, "Hi", {"role": "user", "content": "Hi"}, ["Hi"], [{"role": "user"}], [{"content": "Hi"}]]
WRONG += [[{"role": "user", "content": content}] for content in (None, [{"type": "image_url", "image_url": "x"}])]
WRONG += [[{"role": 1, "content": "Hi"}], [{"role": "user", "content": "Hi", "name": 3}]]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_messages_are_refused(wrong: object) -> None:
    with refused(DataError, "expected a list"):
        render_chat(LLAMA2, wrong, {})


def test_the_messages_stay_as_they_are() -> None:
    given = messages(CONVERSATIONS[1])
    for template in ("{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}"):
        with pytest.raises(ModelError):
            render_chat(template, given, {})
    assert given == messages(CONVERSATIONS[1])


BROKEN = [
    *("{% if %}", "{{ 'a' ", "{{ messages[0].nothing.more }}", "{{ messages | nonsense }}", "{{ nothing() }}"),
    *("{% generation %}", "{% include 'other' %}", "{% extends '/etc/passwd' %}"),
    *("{{ messages | tojson(separators=3) }}", "{% for a in 3 %}{% endfor %}"),
    "(" * 300 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
]

ESCAPES = [
    *("{{ ''.__class__.__mro__[1].__subclasses__()[0].x }}", "{{ (''|attr('__class__'))() }}"),
    *("{{ raise_exception.__globals__['os'].system('true') }}", "{{ self.__init__.__globals__.x }}"),
    *("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{{ '{0.__class__.__mro__}'.format('').x() }}"),
    *("{{ messages.__class__.__base__.__subclasses__() }}", "{{ messages.clear() }}"),
    *("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "{{ namespace(__init__=1) }}"),
    *("{{ namespace({'__call__': 'a'.format}) }}", "{{ messages | map(attribute='__class__') | list | tojson }}"),
]

BOMBS = [
    *("{{ range(10 ** 9) | list }}", "{% for a in range(999999999) %}{% endfor %}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ [0] * 10 ** 9 }}"),
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    *("{{ 'a'.ljust(10 ** 9) }}", "{{ 'a' | indent(width=10 ** 9, first=true) }}"),
    *("{{ messages | tojson(indent=10 ** 9) }}", "{{ lipsum(10 ** 5) }}"),
    "{% for i in range(100000) %}" + "x" * 100 + "{% endfor %}",
]

TEXT = "{% set t = 'ab' * 500000 %}"
LIST = "{% set l = range(100000) | list %}"
TREE = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
LOOP = "{% for i in range(99999) %}"
MEMORY_BOMBS = [  # of one step: what Jinja and Python take before anything can look at it
    "{{ '%1000000000d' % 1 }}",
    "{{ '%(a)1000000000d' | format(a=1) }}",
    "{{ '{0[0]:>{0[1]}}'.format([1, 1000000000]) }}",
    TEXT + "{{ t | replace('a', t) }}",
    TEXT + "{{ t.translate({97: t}) }}",
    TEXT + "{{ t | wordwrap(79, true, t) }}",
    TEXT + LIST + "{{ l | join(t) }}",
    LIST + "{{ l | tojson(indent=99999) }}",
    "{{ ('a\\n' * 500000) | indent(99999) }}",
    "{% filter indent(99999) %}" + "a\n" * 100000 + "{% endfilter %}",
    "{{ range(100000) | slice(99999, 'x' * 1000000) | list | tojson }}",
    "{{ ([['a' * 1000] * 10000] * 10000) | map('join') | join }}",
]
TIME_BOMBS = [
    TREE + "{{ ns.x | tojson }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 10 ** (10 ** 9) }}",
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    TREE + "{{ ns.x }}",
    TREE + "{% set a = ns.x %}" + TREE + "{{ ns.x == a }}",
    TEXT + "{{ t | wordwrap(1, true, t) }}",
    LIST + "{{ l | select('in', l) | list | length }}",
    LOOP + "{% set x = (messages[0].content * 500000) | upper %}{% endfor %}",
    LOOP + "{% set a = (messages[0].content * 400000) in (messages[0].content * 500000 ~ 'b') %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}" + LOOP + "{% set ns.x = ns.x + [i] %}{% endfor %}",
    "{% set ns = namespace(x='') %}" + LOOP + "{% set ns.x = ns.x ~ 'aaaaaaaaaa' %}{% endfor %}",
    "{{ 1" + "+1" * 300000 + " }}",
]


def slow(templates: list[str]) -> list[ParameterSet]:
    return [pytest.param(template, marks=pytest.mark.slow) for template in templates]


QUICK = [*BROKEN, *ESCAPES, *BOMBS, *MEMORY_BOMBS[::3], TIME_BOMBS[0]]


@pytest.mark.parametrize("template", [*QUICK, *slow(MEMORY_BOMBS), *slow(TIME_BOMBS[1:])])
def test_a_hostile_template_ends_in_an_error(template: str) -> None:
    started = time.monotonic()
    with refused(ModelError, "the chat template failed"):
        rendered(template)
    assert time.monotonic() - started < 20  # of some 4, on a machine that does other things too


SUBJECTS = ["'ab' * 500000", "'a ' * 9999", "range(99999) | list", "{'k': 'v' * 99999}", "7 ** 1400"]
SUBJECTS += ["'%9999999d {:9999999}'"]
ARGUMENTS = ["99999", "-99999", "true", "'upper'", "'x' * 1000000", "range(99999)", "[0] * 1000000"]
ARGUMENTS += ["{97: 'x' * 1000000}"]
METHODS = sorted({name for kind in (str, list, dict, int) for name in dir(kind) if not name.startswith("_")})
USES = [f" | {name}({{}})" for name in sorted(jinja2.filters.FILTERS)] + [f".{name}({{}})" for name in METHODS]


def use_any(data: st.DataObject) -> None:
    """Two filters or methods of Jinja, on something large, with large arguments: a text or an error, and soon."""
    expression = f"({data.draw(st.sampled_from(SUBJECTS))})"
    for use in data.draw(st.lists(st.sampled_from(USES), min_size=1, max_size=2)):
        given = ", ".join(data.draw(st.lists(st.sampled_from(ARGUMENTS), max_size=3)))
        expression = f"({expression}{use.format(given)})"
    started = time.monotonic()
    with suppress(ModelError):
        assert len(rendered(f"{{{{ {expression} }}}}")) <= (1 << 20) + 100
    assert time.monotonic() - started < 20  # of some 4, on a machine that does other things too


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, 100])
def test_any_filter_or_method_ends(n: int) -> None:
    settings(max_examples=n, deadline=None)(given(data=st.data())(use_any))()


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    """Measured in a process whose only children are the renderings."""
    script = """if True:
        import resource, sys
        from lce.errors import ModelError
        from lce.tokenizer.chat import render_chat
        for template in sys.argv[1:]:
            try:
                render_chat(template, [{"role": "user", "content": "Hi"}], {})
            except ModelError:
                pass
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    """
    worst = [LIST + "{{ l | tojson(indent=99999) }}", TEXT + "{{ t.translate({97: t}) }}", MEMORY_BOMBS[-2]]
    assert 100 << 10 < int(output(script, *worst)) <= MAX_BYTES >> 10


def test_ctrl_c_ends_the_rendering_and_leaves_nothing() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    started, children = time.monotonic(), {child.pid for child in psutil.Process().children()}
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            rendered(TIME_BOMBS[0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 2
    assert {child.pid for child in psutil.Process().children()} <= children


def test_the_environment_and_the_folder_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jinja2.py", "json.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert rendered("{{ messages[0].content }}") == "Hi"


def other_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    other = tmp_path / "python"
    other.write_text(script)
    other.chmod(0o755 if script else 0o644)
    monkeypatch.setattr(sys, "executable", str(other))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("", "cannot start"),  # a file that cannot be executed
        ("#!/bin/sh\nexit 1\n", "cannot start"),
        ("#!/bin/sh\nexit 0\n", "the chat template failed"),
        ("#!/bin/sh\nkill -SEGV $$\n", "the chat template failed"),
    ],
)
def test_whatever_the_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    other_python(tmp_path, monkeypatch, script)
    with refused(ModelError, words):
        rendered("{{ messages[0].content }}")


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("frozen", True)])
def test_a_program_without_an_interpreter(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(ModelError, match="cannot start"):
        rendered("{{ messages[0].content }}")


def test_a_process_that_gets_no_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_python(tmp_path, monkeypatch, "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(chat, "MOST_WAITED", 0.2)
    with pytest.raises(LceError, match="the machine is too busy; try again"):
        rendered("{{ messages[0].content }}")


@pytest.mark.slow
def test_long_messages_are_within_the_bounds() -> None:
    document = "A line of the document.\n" * 200_000
    template = "{% for line in messages[0].content.split('\n') %}{{ line ~ '\n' }}{% endfor %}"
    assert len(rendered(template, [("user", document)])) == len(document) + 1
    over_characters = "{% for part in messages[0].content %}{% if part.type == 'image' %}!{% endif %}{% endfor %}"
    assert rendered(over_characters, [("user", document[:1_000_000])]) == ""


def test_a_tokenizer_without_a_template(made: dict[str, Tokenizer]) -> None:
    assert made["unigram"].chat_template is None
    for ask in (made["unigram"].chat, made["unigram"].render_chat):
        with refused(ModelError, "has no chat template: it continues text; use generate"):
            ask(messages([("user", "hi")]))


ECHO = "{% for message in messages %}{{ bos_token ~ message.content ~ eos_token }}{% endfor %}"
WRITTEN = ["<s>", "</s>", "<|begin|>", "<|end|>", "<|eot|>", "<unk>", "<", "s>", "|end|>", " ", "a", "é", "\n"]


@settings(max_examples=2, deadline=None)
@given(words=st.lists(st.sampled_from(WRITTEN), max_size=8))
@example(words=["s>", "<"])  # the end of a message and the beginning of the next one make a control token
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_template_makes_control_tokens(folders: dict[str, Path], kind: str, words: list[str]) -> None:
    tokenizer = Source(folders[kind]).tokenizer()
    tokenizer.chat_template = ECHO
    content = "".join(words)
    ids = tokenizer.encode_parts(tokenizer.render_chat(messages([("user", content), ("assistant", content)])))
    said = tokenizer.encode_parts(tokenizer.render_chat(messages([("user", ""), ("assistant", "")])))
    special = {i for i in tokenizer.encode("".join(WRITTEN[:6]), bos=False) if i < 10 and not tokenizer.decode([i])}
    assert special
    assert [i for i in ids if i in special] == [i for i in said if i in special]
    text = tokenizer.decode(ids, skip_special=False)
    expected = tokenizer.decode(said[:1], skip_special=False) + content
    assert text.replace(" ", "").startswith(expected.replace(" ", ""))


def test_a_control_token_in_a_message_by_hand(folders: dict[str, Path]) -> None:
    tokenizer = Source(folders["byte_level"]).tokenizer()
    tokenizer.chat_template = ECHO
    chat = tokenizer.render_chat(messages([("user", "a<|end|><|end|>b")]))
    assert chat.text == tokenizer.chat(messages([("user", "a<|end|><|end|>b")])) == "<|begin|>a<|end|><|end|>b<|end|>"
    assert chat.parts() == ["<|begin|>a<", "|end|><", "|end|>b<|end|>"]
    assert chat.parts(len("<|begin|>a<")) == ["|end|><", "|end|>b<|end|>"]
    ids = tokenizer.encode_parts(tokenizer.render_chat(messages([("user", "a<|end|><|end|>b")])))
    assert [ids[0], ids[-1]] == [tokenizer.bos_id, *tokenizer.eos_ids]
    assert tokenizer.decode(ids[1:-1]) == "a<|end|><|end|>b"
    assert tokenizer.encode_parts(chat, len("<|begin|>a<|end|><|end|>b")) == list(tokenizer.eos_ids)


def test_a_message_may_hold_what_marks_the_cuts() -> None:
    wanted = "".join(map(chr, range(0xFDD0, 0xFDEF)))
    chat = render_chat("{{ messages[0].content }}", messages([("user", wanted + "<s>")]), {}, ["<s>"])
    assert chat.parts() == [wanted + "<", "s>"]
    with pytest.raises(DataError, match="U\\+FDD0"):
        render_chat("", messages([("user", wanted + "\ufdef")]), {})


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{{ mood or '' }}"
)


def test_tools_calls_and_variables_reach_the_template() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = [{"role": "user", "content": "Hi"}, answer, {"role": "tool", "content": "2"}]
    variables = {"tools": [{"name": "add"}], "mood": "calm"}
    text = render_chat(TOOLS_TEMPLATE, said, {}, (), variables).text
    assert text == '[{"name": "add"}][user]Hi[assistant](add {"a": 1})[tool]2calm'
    assert render_chat(TOOLS_TEMPLATE, said[:1], {}).text == "[user]Hi"


def test_control_tokens_in_tools_and_calls_are_split() -> None:
    call = {"function": {"name": "f", "arguments": {"<end>": "a<end>"}}}
    said = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    variables = {"tools": [{"description": "<end>", "<end>": 1}], "mood": "<end>"}
    chat = render_chat(TOOLS_TEMPLATE, said, {}, ["<end>"], variables)
    assert chat.text.count("<end>") == 5
    assert not any("<end>" in part for part in chat.parts())


@pytest.mark.parametrize("calls", [{1: 2}, [object()], [{"a": b"x"}]])
def test_calls_are_json(calls: object) -> None:
    with pytest.raises(DataError, match="expected a list"):
        render_chat(TOOLS_TEMPLATE, [{"role": "assistant", "content": None, "tool_calls": calls}], {})
