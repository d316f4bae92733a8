"""Runs the requests of a page: one prompt at a time, checked, bounded, in its own thread, cancellable at any time.

`lce.lab.study.live_server` is the HTTP side. No content of a request is trusted.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lce.errors import LceError, UsageError, nearest, shown
from lce.lab.study.recording import Recorder, Recording, RecordingRequest, check_heads, facts, prompt_ids
from lce.lab.study.web_page import script, split
from lce.methods import Method, available, find, make

MOST_METHODS = 2
MOST_MARKED = 32  # texts whose places are marked
MOST_KNOB = 100  # letters of a knob's value
LIVE_BYTES = 512 << 20  # of the choices of a run
STOP_S = 5.0

Fields = Mapping[str, Any]
_NAMES = ("prompt", "method", "knobs", "methods", "max_tokens", "off", "window", "marks")


class Busy(LceError):
    """Another run is under way."""


class Cancelled(Exception):
    """Ends a run that was cancelled."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a request: tokens of a prompt, and tokens to generate."""

    prompt_tokens: int = 64 << 10
    max_tokens: int = 256


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """A page's request, checked as far as possible without the model's tokenizer."""

    prompt: str
    methods: tuple[Method, ...]
    max_tokens: int
    off: tuple[tuple[int, int], ...]
    window: int | None
    marks: tuple[str, ...]

    @classmethod
    def of(cls, body: Any, limits: Limits) -> RunRequest:
        """Return the request in a JSON value. Raises `UsageError` for an invalid one."""
        if not isinstance(body, dict):
            raise UsageError(f"the request is {shown(body)}; expected an object")
        for name in body:
            if name not in _NAMES:
                raise UsageError(f"the request has {shown(name)}; {nearest(name, _NAMES)}")
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise UsageError("the prompt is missing or empty; expected some text")
        named = body.get("methods")
        if named is None:
            named = [{key: body[key] for key in ("method", "knobs") if key in body}]
        if not isinstance(named, list) or not 0 < len(named) <= MOST_METHODS:
            raise UsageError(f"methods is {shown(named)}; expected a list of one or {MOST_METHODS}")
        marks = body.get("marks") or []
        if not (isinstance(marks, list) and len(marks) <= MOST_MARKED and all(isinstance(x, str) for x in marks)):
            raise UsageError(f"marks is {shown(marks)}; expected up to {MOST_MARKED} texts")
        window = body.get("window")
        return cls(
            prompt=prompt,
            methods=tuple(_method(each) for each in named),
            max_tokens=_between("max_tokens", body.get("max_tokens", 16), 0, limits.max_tokens),
            off=_heads(body.get("off") or []),
            window=None if window is None else _between("window", window, 2, 1 << 24),
            marks=tuple(x for x in marks if x),
        )


def _between(what: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{what} is {shown(value)}; expected a whole number from {least} to {most:,}")
    return value


def _method(given: Any) -> Method:
    """Return a method of a request. A page cannot set knobs of free text, such as file names."""
    if not isinstance(given, dict) or not given.keys() <= {"method", "knobs"}:
        raise UsageError(f"a method is {shown(given)}; expected an object with method and knobs")
    name, knobs = given.get("method"), given.get("knobs") or {}
    if not isinstance(name, str) or not isinstance(knobs, dict):
        raise UsageError(f"a method is {shown(given)}; expected the name of a method and an object of knobs")
    kinds = {knob["name"]: knob for knob in knobs_of(find(name))}
    for key, value in knobs.items():
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > MOST_KNOB:
            raise UsageError(f"{shown(key)} is {shown(value)}; expected a number, a word, true, false or null")
        if key in kinds and kinds[key]["type"] == "text":
            raise UsageError(f"{key} of {name} cannot be set from a page; leave it out")
    return make(name, {key: value for key, value in knobs.items() if key != "preset"})


def _heads(given: Any) -> tuple[tuple[int, int], ...]:
    def is_pair(pair: Any) -> bool:
        return isinstance(pair, list) and len(pair) == 2 and all(type(x) is int and x >= 0 for x in pair)

    if not isinstance(given, list) or len(given) > 1 << 16 or not all(map(is_pair, given)):
        raise UsageError(f"off is {shown(given)}; expected pairs of a layer and a head")
    return tuple(sorted({(layer, head) for layer, head in given}))


def knobs_of(cls: type[Method]) -> list[dict[str, Any]]:
    """Return a method's knobs for a page: name, default, help, type, choices, and whether none is allowed."""
    hints, found = typing.get_type_hints(cls), []
    helps = {name: text for base in reversed(cls.__mro__) for name, text in vars(base).get("knob_help", {}).items()}
    for field in dataclasses.fields(cls):
        arms = typing.get_args(hints[field.name]) or (hints[field.name],)
        is_choice = typing.get_origin(hints[field.name]) is Literal
        kinds = {int: "int", float: "float", bool: "bool"}
        kind = "choice" if is_choice else next((kinds[arm] for arm in arms if arm in kinds), "text")
        default = field.default
        knob = {
            "name": field.name, "type": kind, "help": helps.get(field.name, ""), "none": type(None) in arms,
            "default": default if isinstance(default, bool | int | float | str) else None,
        }  # fmt: skip
        found.append(knob | ({"choices": list(arms)} if is_choice else {}))
    return found


class Live:
    """One model and a page's runs, one at a time. Any thread may call any method."""

    def __init__(self, model: str | Path, limits: Limits | None = None, **loading: Any) -> None:
        self.limits = limits or Limits()
        self._recorder = Recorder(model, most_bytes=LIVE_BYTES, **loading)
        self._engine = self._recorder.first()
        self._name = str(model)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._state: dict[str, Any] = {"state": "idle", "id": 0}
        self._done: tuple[int, str, Recording] = 0, "", {}  # number, key and recording of the last finished run

    def about(self) -> dict[str, Any]:
        """Return the options of a page: the model, the methods with their knobs, and the limits."""
        methods = []
        for name in available():
            try:
                cls = find(name)
            except LceError:
                continue  # one package's broken method
            about = next(iter((cls.__doc__ or "").strip().splitlines()), "")
            methods.append({"name": name, "about": about, "knobs": [x for x in knobs_of(cls) if x["type"] != "text"]})
        return {
            "model": facts(self._engine, self._name), "methods": methods, "limits": dataclasses.asdict(self.limits),
        }  # fmt: skip

    def start(self, body: Any) -> int:
        """Start the run of a request and return its number. Raises `Busy`, or `UsageError` for an invalid request."""
        asked = RunRequest.of(body, self.limits)
        with self._lock:
            if self._state["state"] == "running":
                raise Busy("a run is under way; wait for it, or cancel it")
            before, number = self._state, int(self._state["id"]) + 1
            self._state = {"state": "running", "id": number, "stage": "start", "done": 0, "total": 0}
            self._stop.clear()
        try:
            n_tokens = len(prompt_ids(self._engine, asked.prompt))
            if n_tokens > self.limits.prompt_tokens:
                most = self.limits.prompt_tokens
                raise UsageError(f"the prompt has {n_tokens:,} tokens; expected {most:,} or fewer")
            check_heads(asked.off, self._engine)
            self._thread = threading.Thread(target=self._run, args=(asked, number), daemon=True)
            self._thread.start()
        except BaseException:
            self._state = before
            raise
        return number

    def _run(self, asked: RunRequest, number: int) -> None:
        """Make the recording of a request; success, failure or cancellation becomes the state."""

        def tell(stage: str, done: int, total: int) -> None:
            self._state = {"state": "running", "id": number, "stage": stage, "done": done, "total": total}

        def check() -> None:
            if self._stop.is_set():
                raise Cancelled

        end: dict[str, Any] = {"state": "failed", "id": number}
        try:
            what = RecordingRequest(asked.prompt, max_tokens=asked.max_tokens, marks=asked.marks, off=asked.off)
            recording = self._recorder.record(what, asked.methods, window=asked.window, progress=tell, check=check)
            check()
            self._done = number, secrets.token_hex(8), recording
            end["state"] = "done"
        except Cancelled:
            end["state"] = "cancelled"
        except LceError as error:
            end["error"] = " ".join(str(error).split())
        except MemoryError:
            end["error"] = "not enough memory; give a shorter text"
        except Exception as error:
            end["error"] = f"internal error: {type(error).__name__}: {str(error)[:200]}"
        finally:
            self._state = end

    def cancel(self) -> int:
        """End the current run, if any, and return its number."""
        self._stop.set()
        number: int = self._state["id"]
        return number

    def state(self, known: int | None = None) -> dict[str, Any]:
        """Return the state, with the recording of a finished run, unless `known` is that run."""
        state, (number, key, recording) = self._state, self._done
        if state["state"] == "done" and number == state["id"] != known:
            return {**state, "recording": split(recording, f"data/{key}")}
        return state

    def script(self, key: str, run: int, segment: int) -> str | None:
        """Return the script of a segment of the last recording; None for an unknown segment."""
        _, right, recording = self._done
        if not recording or not secrets.compare_digest(key.encode(), right.encode()):
            return None
        runs = recording["runs"]
        if run >= len(runs) or segment >= len(runs[run]["segments"]):
            return None
        return script(run, segment, runs[run]["segments"][segment])

    def close(self) -> None:
        """End the current run."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
