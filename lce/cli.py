"""The command `lce`: one function per subcommand, each of which makes a few calls of the public API.

Heavy modules are imported inside the functions, so that `--help` answers at once.
"""

from pathlib import Path
from typing import Any, NoReturn

import click
from click import argument

import lce
from lce.errors import CapacityError, UsageError
from lce.files import named
from lce.kernels.runtime import levels
from lce.plugins import TREE
from lce.sizes import size_text
from lce.terminal import figures, options
from lce.terminal.chat import ChatLoop, chat_prompt_options, chat_sampling
from lce.terminal.exits import INTERRUPTED, Root, keep_interrupts, leave, prepare_streams, report_failure
from lce.terminal.options import flag
from lce.terminal.output import Output, generation_line, note, plain, prefill_line, unasked
from lce.terminal.reading import Opening, ends, n_tokens_of, read_text, text_of

_LEVELS = f"{', '.join(levels.NAMES)}, or all that a wheel has; repeatable.  [default: this processor's]"
QUESTIONS = 1024  # tokens that a prefilled text may get behind it, where --method auto chooses by the length


def main() -> NoReturn:
    """Run the command line and exit. This is the entry point of the console script `lce`."""
    try:
        prepare_streams()
        keep_interrupts()
        cli.main(prog_name="lce")
    except KeyboardInterrupt as error:  # Ctrl-C before or after the command itself
        report_failure(error)
        leave()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave()
        raise


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group("lce", cls=Root, context_settings=_SETTINGS)
@click.version_option(lce.__version__, message="%(prog)s %(version)s")
@options.debug_option
def cli() -> None:
    """Run language models on texts far longer than they were trained for."""


@cli.command()
@options.model_option
@chat_prompt_options
@options.context_option
@options.target_options("save", "Keep text and answer as a context, to continue with --context.", required=False)
@flag("--max-tokens -n TOKENS", "Write at most this many tokens.", type=options.COUNT, default=256)
@options.method_or_context_options
@options.sampling_options
@options.divided_loading_options
@options.output_options
@options.opened
def generate(opening: Opening, prompt: str | list[Any], save: options.NewFile, output: Output, **how: Any) -> None:
    """Continue a prompt, or answer it with --chat.

    A chat's sampling is that of `lce chat`; other text takes the likeliest token unless options say otherwise.

    The text alone goes to stdout, as it is written; progress and figures go to stderr.

    The prompt is TEXT, or --prompt. With a --prompt-file too, the file's text comes first and the prompt on a line of
    its own after it. With neither, stdin is read. The line break that ends a file or stdin is not part of the prompt.

    With --context, the method, its knobs, the window, RoPE scaling and dtype are those of the file.
    """
    given = how.pop("sampling")
    sampling = lce.Sampling(**given)  # raises an error for a wrong option before the model is loaded
    if isinstance(prompt, str):
        how["sampling"] = options.seeded(sampling)
    engine, context = opening.load(prompt, how["max_tokens"])
    if hint := unasked(prompt, engine.tokenizer):
        output.figures(hint)
    with output.noting(), output.bar("prefill", " tok") as bar:
        asked: lce.Context | lce.Conversation
        if isinstance(prompt, str):
            ids = engine.tokenizer.encode(prompt, bos=None if context is None else False)
            asked = engine.new_context(len(ids) + how["max_tokens"]) if context is None else context
            stream, n_tokens = engine.stream(ids, context=asked, progress=bar, **how), len(asked) + len(ids)
        else:
            asked = engine.conversation(context=context)
            stream, n_tokens = asked.stream(prompt, progress=bar, **how, **given), asked.tokens_read
            n_tokens += len(asked.context or ())
            chat_sampling(engine, given, output)  # says what it is, now that the messages are checked
        if save.path is not None:
            engine.setup.files.check_space(Path(save.path), n_tokens + how["max_tokens"])
        output.generation(stream, asked.thinking if isinstance(asked, lce.Conversation) else None)
    if save.path is not None:
        asked.save(save.path, force=save.force)
    if output.json:
        output.object({**figures.generation_object(stream.result, engine.method), "context": save.path})
    if not stream.result.text.strip():
        output.figures("lce: the answer is empty")
    output.figures(generation_line(stream.result.stats))


@cli.command()
@argument("text", nargs=-1)
@options.loaded_model_option
@flag("--system TEXT", "The system message.")
@options.context_option
@flag("--max-tokens -n TOKENS", "Tokens of one answer at most.", type=options.COUNT, default=1024)
@options.method_or_context_options
@options.sampling_options
@options.loading_options
@options.output_options
@options.opened
def chat(opening: Opening, text: tuple[str, ...], system: str | None, output: Output, **answering: Any) -> None:
    """Talk with a model that has a chat template. TEXT is the first message.

    A line of stdin is a message; /help lists the commands. Each turn reads only what is new. The answers alone go to
    stdout. Ctrl-C stops an answer, Ctrl-D ends the chat.

    Options of sampling that are left out are as the model's makers recommend, in generation_config.json or the GGUF
    file. If they recommend nothing, a frequency_penalty of 0.5 is all. --temperature 0 is greedy.
    """
    first, sampling = " ".join(text), answering["sampling"]
    if text and not first.strip():
        raise UsageError("the first message is empty; give some text, or leave it out")
    lce.Sampling(**sampling)  # raises an error for a wrong option before the model is loaded
    engine, context = opening.load()
    with output.noting():
        conversation = engine.conversation(system, context=context)
        answering["sampling"] = chat_sampling(engine, sampling, output)
        ChatLoop(conversation, output, answering, opening.is_chosen_later).run(first)


@cli.command()
@options.model_option
@options.prompt_options
@options.context_option
@options.target_options("out", "Where the context goes, for example document.lce.")
@flag("--checkpoint-every TOKENS", "Save now and then, to resume from.", type=options.COUNT)
@flag("--keep SHARE", "Keep this share of keys and values, chosen by repeating the text (KVzip).", type=float)
@flag("--length TOKENS", "Final length of the context; for --rope and --method auto.", type=options.COUNT)
@options.method_or_context_options
@options.divided_loading_options
@options.output_options
@options.opened
def prefill(opening: Opening, prompt: str, out: options.NewFile, output: Output, **how: Any) -> None:
    """Prefill a text once, into a file that can be asked many times: `lce generate --context FILE`.

    The file fits only this model, method and its knobs, RoPE scaling and dtype. With --checkpoint-every, an interrupted
    prefill resumes when the same command is run again. With --context, the new file is that context and the text behind
    it. --method auto chooses for the text and 1,024 tokens of questions and answers, or for --length, if given.

    --keep 0.5 makes a file of half the size: the model repeats the text, and each head keeps what it attends most.
    """
    if opening.context_file is not None and how["checkpoint_every"] is not None:
        raise UsageError("--checkpoint-every is for a text that is read from its beginning; leave it or --context out")
    room = {"more": QUESTIONS} if how["length"] is None else {"least": how["length"]}
    engine, context = opening.load(prompt, **room)
    with output.noting() as notes, output.bar("prefill", " tok") as bar:
        stats = engine.prefill_file(prompt, str(out.path), context=context, force=out.force, progress=bar, **how)
    output.object({"context": out.path, "stats": figures.stats_object(stats), "warning": next(iter(notes), None)})
    if not output.json:
        output.figures(prefill_line(stats, f"{named(str(out.path))} {size_text(Path(str(out.path)).stat().st_size)}"))


@cli.command()
@argument("file", metavar="FILE|MODEL")
@flag("--model -m PATH|ID|demo", "The model for a text, or of a context file, to show how its text begins and ends.")
@flag("--check", "Read all weights of a MODEL, and compare them with what `lce quantize` wrote.", is_flag=True)
@options.json_options
def info(file: str, model: str | None, check: bool, output: Output) -> None:
    """Show what a context FILE or a MODEL holds; or, with --model, how long a text is and which methods read it whole.

    Of a context only the header is read, of a model config.json, the tokenizer and the headers of the weights; of a
    model on the hub no weights are downloaded. --check reads all weights. Only folders of `lce quantize` have
    checksums; of others it says whether they can be read.
    """
    if model is not None and not check and (text := text_of(file)) is not None:
        from lce.engine.sizing import Planning, planned

        n_tokens = n_tokens_of(model, text)
        made = planned(Planning(model, tokens=n_tokens + QUESTIONS))
        about = figures.text_object(file, n_tokens, n_tokens + QUESTIONS, made)
        output.object(about)
        return output.text(*figures.text_lines(about))
    with output.bar("check", "B") as bar:
        found = lce.info(file, check, progress=bar)
    if isinstance(found, lce.ModelInfo):
        if model is not None:
            raise UsageError("--model is for a context file, and FILE|MODEL is a model already; leave one of them out")
        output.object(figures.model_object(found))
        output.text(*figures.model_lines(found))
    else:
        if model is not None and found.method_file is not None:
            note(f"the text is not shown, because it was read with code, {found.method_file}, which is not run here")
            model = None
        shown = None if model is None or not found.complete else ends(model, found)
        output.object({"kind": "context", **plain(found), "text": shown})
        output.text(*figures.context_lines(found, shown))


@cli.command()
@options.model_option
@options.planned_methods_options
@flag("--tokens N", "Prompt and answer; 2k is 2048.", type=options.COUNT)
@flag("--prompt-file -f FILE", "Instead of --tokens: a text, and 1,024 tokens of questions and answers; - is stdin.")
@flag("--operations", "Also count operations and bytes read, by phase.", dest="counts_operations", is_flag=True)
@options.planning_options
@options.json_options
def plan(model: str, methods: dict[str, Any], counts_operations: bool, output: Output, **how: Any) -> None:
    """Print the memory and disk that a text of some length takes, and the longest text that fits.

    Only config.json of the model is read, or the header of its GGUF file; --dtype auto is the dtype that it names, or
    float32. Exits with 4 if the text does not fit. Says so if the method cannot read so long a text. Activations are
    those of the model: what choosing keys takes is not counted. --operations counts multiply-adds and bytes read of the
    prefill and of the last decode step, by what they are for, beside plain causal attention.
    """
    tokens, prompt_file, planning = (how[name] for name in ("tokens", "prompt_file", "planning"))
    if (tokens is None) == (prompt_file is None):
        raise UsageError("the length is missing or given twice; give --tokens N or --prompt-file FILE, for example 32k")
    tokens = tokens or n_tokens_of(model, read_text(prompt_file)) + QUESTIONS
    planned = lce.plan(model, tokens=tokens, **methods, **planning)
    counted = lce.operations(model, tokens=tokens, **methods, **planning) if counts_operations else None
    more = {"operations": figures.operations_object(counted)} if counted else {}
    output.object(figures.plan_object(planned) | more)
    output.text(*figures.plan_lines(planned), *(["", *figures.operations_lines(counted)] if counted else []))
    if planned.refusal is not None:
        raise CapacityError(planned.refusal)


@cli.command()
@options.model_option
@flag("--weights int8|int4", "Bits of a weight.", default="int4")
@flag("--out DIR", "A new folder, or an empty one.", required=True)
@options.output_options
def quantize(model: str, weights: str, out: str, output: Output) -> None:
    """Write a checkpoint with its matrices in 8 or 4 bits, to load without rounding them each time.

    `--model DIR` then computes what `--model MODEL --weights int4` does, and opens the same contexts.
    """
    with output.bar("quantize", "B") as bar:
        lce.quantize(model, out, weights, progress=bar)
    found = lce.info(out)
    assert isinstance(found, lce.ModelInfo)
    output.object(figures.model_object(found))
    size = found.weight_bytes or 0
    output.figures(f"lce: {named(found.folder)}: {size_text(size)}, {8 * size / found.parameters:.2f} bits a weight")


@cli.command()
@flag("--level LEVEL", _LEVELS, type=click.Choice([*levels.NAMES, "all"]), multiple=True)
@flag("--model -m MODEL", "Compile a GPU's kernels for this model and method instead.")
@options.planned_methods_options
@options.planning_options
@options.output_options
def warm(level: tuple[str, ...], model: str | None, output: Output, **how: dict[str, Any]) -> None:
    """Compile the CPU kernels that are missing, ahead of their first use: in a container's image, for example.

    It says how long this takes and where it writes: beside the installed package if this user may write there; else,
    and from a clone, in the user's cache. Installing lce compiles those of its processor; --level is for images that
    run elsewhere. With --model, Triton compiles what loading this model on this GPU would compile; no weights are read.
    """
    from lce.kernels.runtime.building import build

    if model is not None:
        from lce.attention import Attention
        from lce.engine import sizing, warming
        from lce.weights.source import source_of

        made = sizing.planned(sizing.Planning(model, tokens=1, **how["methods"], **how["planning"]))
        if made.layout.on_cpu:
            raise UsageError("--model is for kernels of a GPU, and none is here or named; leave --model out")
        source = source_of(model, metadata_only=True)
        with warming.warmed(made, Attention.choose(), source.checkpoint if source.types_in_headers else None):
            return
    names = [each for name in level for each in (levels.LEVELS if name == "all" else [name])]
    asked = [levels.find(name) for name in dict.fromkeys(names)] or [levels.asked()]
    found = []
    for each in asked:
        with output.bar(f"kernels for {each.name}", " kernels") as bar:
            found.append(build(each, bar, beside=not (TREE / "setup.cfg").exists()))
        output.figures(f"lce: {found[-1].line}")
    output.object(found)


@cli.command()
@argument("name", required=False, metavar="[NAME|FILE.py]", callback=options.parse_name)
@options.json_options
def methods(name: str | None, output: Output) -> None:
    """List the methods, or show the one called NAME: its knobs, their defaults, and what they mean."""
    listed = []
    for each in lce.methods.available() if name is None else [name]:
        try:
            listed.append(figures.method_object(each, lce.methods.find(each)))
        except UsageError as error:  # a package's broken method must not hide the other methods
            if name is not None:
                raise
            click.echo(f"lce: warning: {error}", err=True)
    output.object(listed if name is None else listed[0])
    for method in listed:
        output.text(*figures.method_lines(method), "")
    output.text("A knob that is none is derived from the model's window.")
