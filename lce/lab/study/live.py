"""Runs the requests of a page: one prompt at a time, checked, bounded, in its own thread, cancellable at any time.

`lce.lab.study.live_server` is the HTTP side. No content of a request is trusted.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import typing
from pathlib import Path
from typing import Any, Literal

from lce.errors import LceError, UsageError, shown
from lce.lab.study.recording import Recorder, Recording, RecordingRequest, check_heads, facts, prompt_ids
from lce.lab.study.web_page import script, split
from lce.methods import Method, available, find, make

MOST_MARKED, MOST_OFF = 32, 1 << 16  # texts whose places are marked, and heads that are switched off
MOST_KNOB = 100  # letters of a knob's value
LIVE_BYTES = 512 << 20  # bytes of a run's choices
STOP_S = 5.0


class Busy(LceError):
    """Another run is under way."""


class Cancelled(Exception):
    """Ends a run that was cancelled."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a request: tokens of a prompt, and tokens to generate."""

    prompt_tokens: int = 64 << 10
    max_tokens: int = 256


def requested(body: Any, limits: Limits) -> tuple[RecordingRequest, Method]:
    """Return what a page's JSON asks for: the prompt with what is recorded, and the method.

    Raises `UsageError` for an invalid request. What needs the model's tokenizer is not checked.
    """
    if not isinstance(body, dict):
        raise UsageError(f"the request is {shown(body)}; expected an object")
    prompt, marks, off = body.get("prompt"), body.get("marks") or [], body.get("off") or []
    n, most = body.get("max_tokens", 16), limits.max_tokens
    if not isinstance(prompt, str) or not prompt:
        raise UsageError("the prompt is missing or empty; expected some text")
    if type(n) is not int or not 0 <= n <= most:
        raise UsageError(f"max_tokens is {shown(n)}; expected a whole number from 0 to {most:,}")
    if not (isinstance(marks, list) and len(marks) <= MOST_MARKED and all(isinstance(x, str) for x in marks)):
        raise UsageError(f"marks is {shown(marks)}; expected up to {MOST_MARKED} texts")
    if not (isinstance(off, list) and len(off) <= MOST_OFF and all(map(_is_pair, off))):
        raise UsageError(f"off is {shown(off)}; expected pairs of a layer and a head")
    heads = sorted({(layer, head) for layer, head in off})
    return RecordingRequest(prompt, n, list(filter(None, marks)), heads), _method(body.get("method"), body.get("knobs"))


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(x) is int and x >= 0 for x in pair)


def _method(name: Any, knobs: Any) -> Method:
    """Return a method of a request. A page cannot set knobs of free text, such as file names."""
    knobs = {} if knobs is None else knobs
    if not isinstance(name, str) or not isinstance(knobs, dict):
        raise UsageError(f"a method is {shown((name, knobs))}; expected the name of a method and an object of knobs")
    texts = {knob["name"] for knob in knobs_of(find(name)) if knob["type"] == "text"}
    for key, value in knobs.items():
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > MOST_KNOB:
            raise UsageError(f"{shown(key)} is {shown(value)}; expected a number, a word, true, false or null")
        if key in texts:
            raise UsageError(f"{key} of {name} cannot be set from a page; leave it out")
    return make(name, {key: value for key, value in knobs.items() if key != "preset"})


def knobs_of(cls: type[Method]) -> list[dict[str, Any]]:
    """Return a method's knobs for a page: name, default, help, type, choices, and whether none is allowed."""
    hints, found = typing.get_type_hints(cls), []
    helps = {name: text for base in reversed(cls.__mro__) for name, text in vars(base).get("knob_help", {}).items()}
    for field in dataclasses.fields(cls):
        arms = typing.get_args(hints[field.name]) or (hints[field.name],)
        is_choice = typing.get_origin(hints[field.name]) is Literal
        kinds = {int: "int", float: "float", bool: "bool"}
        kind = "choice" if is_choice else next((kinds[arm] for arm in arms if arm in kinds), "text")
        default = field.default if isinstance(field.default, bool | int | float | str) else None
        knob = {"name": field.name, "type": kind, "help": helps.get(field.name, ""), "none": type(None) in arms}
        found.append(knob | {"default": default} | ({"choices": list(arms)} if is_choice else {}))
    return found


class Live:
    """One model and a page's runs, one at a time. Any thread may call any method."""

    def __init__(self, model: str | Path, limits: Limits | None = None, **loading: Any) -> None:
        self.limits = limits or Limits()
        self._recorder = Recorder(model, most_bytes=LIVE_BYTES, **loading)
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
        model = facts(self._recorder.engine, str(self._recorder.model))
        return {"model": model, "methods": methods, "limits": dataclasses.asdict(self.limits)}

    def start(self, body: Any) -> int:
        """Start the run of a request and return its number. Raises `Busy`, or `UsageError` for an invalid request."""
        request, method = requested(body, self.limits)
        n_tokens, most = len(prompt_ids(self._recorder.engine, request.prompt)), self.limits.prompt_tokens
        if n_tokens > most:
            raise UsageError(f"the prompt has {n_tokens:,} tokens; expected {most:,} or fewer")
        check_heads(request.off, self._recorder.engine)
        with self._lock:
            if self._state["state"] == "running":
                raise Busy("a run is under way; wait for it, or cancel it")
            number = int(self._state["id"]) + 1
            self._state = {"state": "running", "id": number, "stage": "start", "done": 0, "total": 0}
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(request, method, number), daemon=True)
            self._thread.start()
        return number

    def _run(self, request: RecordingRequest, method: Method, number: int) -> None:
        """Make the recording of a request; success, failure or cancellation becomes the state."""

        def tell(stage: str, done: int, total: int) -> None:
            self._state = {"state": "running", "id": number, "stage": stage, "done": done, "total": total}

        def check() -> None:
            if self._stop.is_set():
                raise Cancelled

        end: dict[str, Any] = {"state": "failed", "id": number}
        try:
            recording = self._recorder.record(request, [method], progress=tell, check=check)
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
        return int(self._state["id"])

    def state(self, known: int | None = None) -> dict[str, Any]:
        """Return the state, with the recording of a finished run, unless `known` is that run."""
        state, (number, key, recording) = self._state, self._done
        if state["state"] == "done" and number == state["id"] != known:
            return {**state, "recording": split(recording, f"data/{key}")}
        return state

    def script(self, key: str, run: int, segment: int) -> str | None:
        """Return the script of a segment of the last recording; None for an unknown segment."""
        _, right, recording = self._done
        runs = recording.get("runs", [])
        if key != right or run >= len(runs) or segment >= len(runs[run]["segments"]):
            return None
        return script(run, segment, runs[run]["segments"][segment])

    def close(self) -> None:
        """End the current run."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
