"""Options that several commands share.

A decorator such as `loading_options` declares a group of options and packs their values into one argument of the
command: the flags of sampling arrive as one `lce.Sampling`, `--method` and its knobs as one `lce.Method`. Packing
happens when the command runs, so that `--help` imports nothing heavy.
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import click
from click import argument, option

from lce.engine.arguments import Sampling
from lce.engine.options import Counted, LoadOptions, Record, SizeOptions, options_of
from lce.errors import LceError, UsageError, shown
from lce.files import check_folder, check_new, named
from lce.sizes import count
from lce.system import default_threads
from lce.terminal.output import Output, note
from lce.terminal.reading import Opening, method_name, named_methods, read_prompt

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class Count(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click
    """The type of a count, such as `4096` or `4k`. With `several`, of a list of counts: `512,2k` is [512, 2048]."""

    name = "count"

    def __init__(self, least: int = 1, *, several: bool = False) -> None:
        self.least, self.several = least, several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        what = max(param.opts, key=len) if param else "the number"
        try:
            found = [count(text, what, self.least) for text in (str(value).split(",") if self.several else [value])]
        except LceError as error:
            raise click.UsageError(str(error), ctx) from None
        return found if self.several else found[0]


class Text(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click
    """The type of a text, read as UTF-8 in every locale: in some, Python gives bytes above 127 as surrogates."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return str(value).encode(errors="surrogateescape").decode()
        except UnicodeError as error:
            self.fail(f"{shown(value)} is not UTF-8 text ({error}); convert it to UTF-8", param, ctx)


COUNT, INDEX, COUNTS, TEXT = Count(), Count(least=0), Count(several=True), Text()


def packed(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Declare options whose values reach the command as one argument, `name=make(**values)`, in --help's order."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**values: Any) -> Any:
            group = {key: values.pop(key) for key in names if key in values}
            return command(**values, **{name: make(**group)})

        for declare in reversed(options):
            declare(run)
        names = [param.name for param in vars(run)["__click_params__"][-len(options) :]]
        return run

    return decorate


def opened(command: Command) -> Command:
    """Pack the options that say what a command opens into one argument, `opening`; declare the options above this."""

    @wraps(command)
    def run(model: str, context_file: str | None, method: Any, loading: Any, **values: Any) -> Any:
        return command(opening=Opening(model, context_file, loading, **method), **values)

    return run


def parse_knobs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Parse key=value texts into a mapping: the callback of `-o`."""
    knobs = {}
    for value in values:
        key, _, text = value.partition("=")
        if not key or not text:
            raise click.BadParameter(f"{value!r} is not key=value, for example chunk_size=128")
        knobs[key] = text
    return knobs


def parse_name(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Return a method's name: the callback of an option or argument that takes one name, or one file."""
    return None if value is None else method_name(value)


class NewFile(NamedTuple):
    """A file that a command will write, or None, and whether `--force` allows to replace a file."""

    path: str | None
    force: bool


def new_file(path: str | None, force: bool) -> NewFile:
    """Check the path of a file that a command will write, if any, before any work."""
    if path == "":
        raise UsageError("the file to write has no name; give one, for example document.lce")
    if path is not None:
        own = click.get_current_context().params.get("context_file")  # `Context.save` finds out whether it changed
        check_new(path, force, lambda path: own is not None and os.path.realpath(own) == os.path.realpath(path))
        if os.path.exists(path):
            note(f"{named(path)} exists and will be replaced")
        check_folder(path)
    return NewFile(path, force)


def _note_loading(ctx: click.Context, _param: click.Parameter, model: str) -> str:
    """Say on a terminal which model is loading, before slow imports: the callback of --model in `lce chat`."""
    if sys.stderr.isatty() and not ctx.params.get("quiet"):
        click.echo(f"lce: loading {named(model)}", err=True)
    return model


def seeded(sampling: Sampling) -> Sampling:
    """Return `sampling`. Print a note if it has a seed that changes nothing."""
    if sampling.seed is not None and sampling.temperature == 0:
        note("--seed changes nothing at temperature 0, which takes the likeliest token; give --temperature too")
    return sampling


def flag(usage: str, help: str, default: Any = None, *, dest: str | None = None, **how: Any) -> Decorator:
    """Declare an option as help shows it, such as `"--max-tokens -n TOKENS"`; `how` is passed on to `click.option`."""
    words, how = usage.split(), how if default is None else how | {"default": default}
    flags = [word for word in words if word.startswith("-")]
    metavar = " ".join(words[len(flags) :]) or None
    if metavar in ("TEXT", "TEXT|-"):
        how["type"] = TEXT
    return option(*flags, *([dest] if dest else []), metavar=metavar, help=help, **how)


def flags_of(record: type[Record], *, defaults: bool = True, **more: dict[str, Any]) -> dict[str, Decorator]:
    """Return flags for a record's options, by name. `more` has arguments of `click.option`; no `defaults`: None."""
    found = {}
    for name, each in options_of(record).items():
        if help := each.metadata.get("help"):
            parse, how = each.metadata["parse"], each.metadata["how"] | more.get(name, {})
            kind = how.pop("type", parse if isinstance(parse, Counted) else getattr(parse, "type", None))
            how |= {"type": Count(kind.least) if isinstance(kind, Counted) else kind}
            usage = f"--{name.replace('_', '-')} {each.metadata['metavar']}"
            found[name] = flag(usage, help, each.default if defaults else None, **how)
    return found


def _join(_ctx: click.Context, _param: click.Parameter, value: bool) -> str | None:
    """Join the other ranks, and return the option `ranks` of `lce.load`: the callback of --ranks."""
    if value:
        from lce.engine.dividing import ranks_of

        ranks_of("all")
    return "all" if value else None


def _loading(threads: int | None, **values: Any) -> dict[str, Any]:
    return {**values, "threads": threads or default_threads()}


def _debug(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        logging.getLogger("lce").setLevel(logging.DEBUG)


_MODEL = "--model -m PATH|ID|smollm2|demo", "A folder, a .gguf file, or a hub id ORG/NAME[@REVISION][:FILE.gguf]."
model_option = flag(*_MODEL, required=True)
loaded_model_option = flag(*_MODEL, required=True, callback=_note_loading)
_CONTINUED = "Continue this file of `lce prefill`; it does not change."
context_option = flag("--context -c FILE", _CONTINUED, dest="context_file")
_NAMED = "One of `lce methods`, FILE.py, or auto, by the text's length."
_METHOD_OR_AUTO = flag("--method NAME", _NAMED, "full", callback=parse_name)
_METHOD_OR_CONTEXT = flag("--method NAME", f"{_NAMED}  [default: that of --context, else full]", callback=parse_name)
_READ_BY = "Read prompts by this method, such as full, and generate by --method."
_ITS_KNOBS = "-o prefill_method.KEY=VALUE is a knob of it."
_PREFILL_METHOD = flag("--prefill-method NAME", f"{_READ_BY} {_ITS_KNOBS}", callback=parse_name)
KNOBS: dict[str, Any] = {"multiple": True, "callback": parse_knobs}
knobs_option = flag("-o KEY=VALUE", "A knob of the method; repeatable.", dest="knobs", **KNOBS)
PROMPT = (
    argument("text", required=False, type=TEXT),
    flag("--prompt -p TEXT|-", "The text to read, as TEXT is; - is stdin."),
    flag("--prompt-file -f FILE", "A UTF-8 file with the text; - is stdin."),
)
_JSON = flag("--json", "Print JSON on stdout, and nothing else there.", is_flag=True)
_QUIET = "No progress and no figures on stderr; notes and errors remain."
quiet_option = flag("--quiet", _QUIET, is_flag=True, is_eager=True)  # eager: callbacks of other options read it
FORCE = flag("--force", "Replace a file that exists.", is_flag=True)
debug_option = flag(
    "--debug",
    "Show an error's traceback, and why decode steps are not recorded, if so.",
    is_flag=True,
    expose_value=False,
    callback=_debug,
)

prompt_options = packed("prompt", read_prompt, *PROMPT)
given_prompt_options = packed("prompt", dict, *PROMPT)
planned_methods_options = packed("methods", named_methods, _METHOD_OR_AUTO, knobs_option, _PREFILL_METHOD)
method_or_context_options = packed("method", dict, _METHOD_OR_CONTEXT, knobs_option, _PREFILL_METHOD)
sampling_options = packed(  # the options that the command line names, checked by `Sampling(**sampling)`
    "sampling",
    lambda **own: {name: value for name, value in own.items() if value not in (None, ())},
    *flags_of(Sampling, defaults=False).values(),
)
_LOADING = flags_of(LoadOptions, ranks={"callback": _join})
loading_options = packed("loading", _loading, *(each for name, each in _LOADING.items() if name != "ranks"))
divided_loading_options = packed("loading", _loading, *_LOADING.values())
planning_options = packed("planning", dict, *flags_of(SizeOptions).values())
output_options = packed("output", Output, _JSON, quiet_option, debug_option)
quiet_options = packed("output", Output, quiet_option, debug_option)
json_options = packed("output", Output, _JSON, debug_option)


def target_options(name: str, help: str, *, required: bool = True) -> Decorator:
    """Declare `--NAME FILE`, a file to write, and `--force`. The command gets one argument: a checked `NewFile`."""
    return packed(name, new_file, flag(f"--{name} FILE", help, dest="path", required=required), FORCE)
