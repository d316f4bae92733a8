"""lce as a model of EleutherAI's lm-evaluation-harness: `--model lce --model_args pretrained=PATH,method=longheads`.

The harness makes prompts and scores answers; `lce_lab.eval.requests` generates the answers. The harness finds `LceLM`
by the name `lce`, an entry point of the group `lm_eval.models`, which releases of lm_eval up to 0.4.13 ignore: with
these, `lce eval harness` or an import of this module registers the class. `pip install 'lce[harness]'`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
from tqdm import tqdm

import lce
from lce.errors import DataError, UsageError
from lce_lab.eval.requests import generating, generations, likelihoods, longest, model_arguments, text_likelihood

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise UsageError(f"lm-evaluation-harness is needed: pip install 'lce[harness]' ({error})") from error

NAME = "lce"
# Marks the end of a chat's last message: a character that no text has, and a space, which some chat templates strip.
_MARK = "\ue000 "
_log = logging.getLogger(__name__)


class LceLM(TemplateLM):
    """An `lce.Engine` as a model of lm-evaluation-harness.

    `pretrained` is the folder of a checkpoint, "demo", or an `lce.Engine`. The other arguments are those of
    `lce_lab.eval.requests.model_arguments`. Requests are answered one after the other, so `batch_size` is ignored.
    Raises `UsageError` for arguments that cannot be used, and whatever `lce.load` raises.
    """

    def __init__(
        self, pretrained: Any = None, batch_size: object = 1, max_batch_size: object = None, **arguments: Any
    ) -> None:
        super().__init__()
        loading, self.arguments = model_arguments({"pretrained": pretrained, **arguments})
        self.engine = lce.load(**loading) if loading else pretrained
        self.tokenizer = self.engine.tokenizer
        limit = longest(self.engine)
        self.max_length = self.arguments.max_length or limit
        self.max_gen_toks = self.arguments.max_gen_toks
        self.batch_size = 1
        self._device = self.engine.setup.device
        if limit is not None and self.max_length is not None and self.max_length > limit:
            _log.warning(self.engine.setup.beyond(self.max_length))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> LceLM:
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> LceLM:
        """Return a model with the arguments `arg_dict`, which override `additional_config`, options of the harness."""
        own = {name: value for name, value in (additional_config or {}).items() if value is not None}
        # By default the harness asks for a GPU, even on a machine without one.
        if str(own.get("device", "")).startswith("cuda") and not torch.cuda.is_available():
            own["device"] = "auto"
        return cls(**{**own, **arg_dict})

    @property
    def tokenizer_name(self) -> str:
        """The key of the tokenizer in the harness's cache of requests."""
        return str(self.engine.setup.fingerprint)

    @property
    def eot_token_id(self) -> int | None:
        return next(iter(self.tokenizer.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that is put before a text without context."""
        for token_id in (self.arguments.prefix_token_id, self.tokenizer.bos_id, self.eot_token_id):
            if token_id is not None:
                return int(token_id)
        raise UsageError("the tokenizer has neither BOS nor EOS; add prefix_token_id=ID to the model arguments")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        bos = self.arguments.add_bos_token if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, bos=bos and self.tokenizer.bos_id is not None)

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(tokens, skip_special=skip_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        self._note_cut([len(context) + len(continuation) - 1 for context, continuation in pairs])
        found = likelihoods(self.engine, pairs, self.max_length)
        return self._answers("loglikelihood", [texts for texts, _, _ in requests], found, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text in `requests`, scored in windows of at most `max_length` tokens."""

        def windows(text: str) -> list[tuple[list[int], list[int]]]:
            ids, prefix = self.tok_encode(text), self.prefix_token_id
            found = utils.get_rolling_token_windows(ids, prefix, self.max_length or max(1, len(ids)), 1)
            return [utils.make_disjoint_window(each) for each in found]

        texts = [request.args for request in requests]
        found = ((number, text_likelihood(self.engine, windows(text))) for number, (text,) in enumerate(texts))
        return self._answers("loglikelihood_rolling", texts, found, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        asked = []
        for prompt, options in (each.args for each in requests):
            how = normalize_gen_kwargs(options, self.max_gen_toks)
            if how["do_sample"] and how.get("seed") is None:  # the seed is drawn by torch, which the harness seeds
                how["seed"] = int(torch.randint(1 << 62, ()))
            asked.append((self.tok_encode(prompt) or [self.prefix_token_id], generating(how)))
        self._note_cut([len(prompt) + how.max_tokens for prompt, how in asked])
        found = generations(self.engine, asked, self.max_length)
        return self._answers("generate_until", [request.args for request in requests], found, disable_tqdm)

    def _answers(self, kind: str, asked: Sequence[Any], found: Iterator[tuple[int, Any]], quiet: bool) -> list[Any]:
        """Return answers in the order of the requests. Cache each (request number, answer) that `found` yields."""
        answers: dict[int, Any] = {}
        with tqdm(total=len(asked), desc=f"lce: {kind}", disable=quiet) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore", lce.WindowWarning)  # this warning was shown when the model was loaded
            for number, answer in found:
                answers[number] = answer
                self.cache_hook.add_partial(kind, asked[number], answer)
                bar.update()
        return [answers[number] for number in range(len(asked))]

    def _note_cut(self, lengths: Sequence[int]) -> None:
        longer = [length for length in lengths if self.max_length is not None and length > self.max_length]
        if longer:
            lost = f"{len(longer)} of {len(lengths)} requests lose their beginning"
            sizes = f"the longest has {max(longer):,} tokens, and max_length is {self.max_length:,}"
            _log.warning(f"{lost}; {sizes}; give max_length=, or a method that reads on")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat. Without a generation prompt, the last message is left open to be continued.

        Where a template takes no system message, its text stands in the first user's message; `HFLM` leaves it out.
        """
        if add_generation_prompt:
            return self.tokenizer.chat(chat_history)
        *before, last = chat_history
        text = self.tokenizer.chat([*before, {**last, "content": last["content"] + _MARK}], False)
        begun, found, rest = text.rpartition(_MARK.strip())
        if not found:
            raise DataError("the chat template leaves out the last message; give no system prompt to be continued")
        return begun if rest.startswith(" ") else begun.rstrip()

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts about the model that the harness writes into its results."""
        engine, setup = self.engine, self.engine.setup
        found = {"lce_version": lce.__version__, "lce_engine": repr(engine), "lce_rope": repr(setup.rope)}
        return {**found, "model_dtype": str(setup.dtype), "model_sha": setup.fingerprint}


if NAME not in model_registry:  # lm_eval after 0.4.13 has read the entry point and registered the class
    register_model(NAME)(LceLM)


def main(arguments: Sequence[str]) -> None:
    """Run the harness's command `lm_eval` with `arguments`, which may name the model `lce`."""
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    try:
        sys.argv = ["lm_eval", *arguments]
        cli_evaluate()
    except ValueError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith("lm_eval."):
            raise
        raise UsageError(f"lm-evaluation-harness: {' '.join(str(error).split())}") from error
    finally:
        sys.argv = before
