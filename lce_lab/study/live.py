"""Runs the prompts that the page of `lce inspect --live` sends, one at a time; `live_server` is the HTTP side."""

from __future__ import annotations

import secrets
import threading
import typing
from pathlib import Path
from typing import Any, Literal

import lce.methods
from lce.errors import LceError, UsageError, shown
from lce.methods import Method, available, find, make
from lce_lab.study.recording import Recorder, Recording, RecordingRequest, check_heads, facts, prompt_ids
from lce_lab.study.web_page import script, split

MOST_NEW = 256  # The most tokens that a request may generate.
LIVE_BYTES = 512 << 20  # The most bytes that a run may take to record which chunks or tokens were chosen.
STOP_S = 5.0  # The most seconds that a closing server waits for the current run to end.


class Busy(LceError):
    """The error for a request that comes while another run is under way."""


class Cancelled(Exception):
    """The exception that ends a cancelled run."""


def requested(body: Any) -> tuple[RecordingRequest, Method]:
    """Parse the JSON of a page's request into a recording request and a method. Raises `UsageError` if it is invalid.

    Does not check what needs the model: the prompt's length, and whether marked texts and heads exist.
    """
    if not isinstance(body, dict):
        raise UsageError(f"the request is {shown(body)}; expected an object")
    prompt, marks, off = body.get("prompt"), body.get("marks") or [], body.get("off") or []
    n, knobs = body.get("max_tokens", 16), body.get("knobs") or {}
    name: Any = body.get("method")

    def is_pair(pair: Any) -> bool:
        return isinstance(pair, list) and len(pair) == 2 and all(type(x) is int and x >= 0 for x in pair)

    if not isinstance(prompt, str) or not prompt:
        raise UsageError("the prompt is missing or empty; expected some text")
    for what, value, is_valid, expected in (
        ("max_tokens", n, type(n) is int and 0 <= n <= MOST_NEW, f"a whole number from 0 to {MOST_NEW:,}"),
        ("marks", marks, isinstance(marks, list) and all(isinstance(mark, str) for mark in marks), "texts"),
        ("off", off, isinstance(off, list) and all(map(is_pair, off)), "pairs of a layer and a head"),
        ("method", name, isinstance(name, str), "the name of a method"),
        ("knobs", knobs, isinstance(knobs, dict), "an object of knobs"),
    ):
        if not is_valid:
            raise UsageError(f"{what} is {shown(value)}; expected {expected}")
    settable, known = ({knob["name"] for knob in knobs_of(find(name))}, lce.methods.knobs_of(find(name)))
    if hidden := next((knob.name for knob in known if knob.name in knobs and knob.name not in settable), None):
        raise UsageError(f"{hidden} of {name} cannot be set from a page; leave it out")
    heads = sorted({(layer, head) for layer, head in off})
    return RecordingRequest(prompt, n, list(filter(None, marks)), heads), make(name, knobs)


def knobs_of(cls: type[Method]) -> list[dict[str, Any]]:
    """Return a method's knobs that a page can set: name, default, help, choices and words of each.

    If the choices are None, the knob takes any number, or one of the words. Knobs of free text are left out.
    """
    found = []
    for knob in lce.methods.knobs_of(cls):
        kinds = [knob.type, *typing.get_args(knob.type)]
        words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
        is_number = int in kinds or float in kinds
        if not (is_number or words or bool in kinds):
            continue
        choices = None if is_number else words or ["true", "false"]
        is_told = isinstance(knob.default, bool | int | float | str) and not knob.of
        default = knob.default if is_told else None  # a knob of other kinds must not be sent with the usual kind
        help_text = ": ".join(filter(None, (knob.beside, knob.field.metadata.get("meaning", ""))))
        more = {"choices": choices, "words": words if is_number else []}
        found.append({"name": knob.name, "default": default, "help": help_text, **more})
    return found


class Live:
    """A loaded model that runs a page's requests of up to `most_prompt` tokens, one at a time; thread-safe."""

    def __init__(self, model: str | Path, most_prompt: int = 64 << 10, **loading: Any) -> None:
        self.most_prompt = most_prompt
        self._recorder = Recorder(model, most_bytes=LIVE_BYTES, **loading)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._state: dict[str, Any] = {"state": "idle", "id": 0}
        # The last finished run: its number, a random key that is part of the URLs of its data, and its recording.
        self._done: tuple[int, str, Recording] = 0, "", {}

    def about(self) -> dict[str, Any]:
        """Return what a page can ask for: the model, the methods with their knobs, and the largest `max_tokens`."""
        methods = []
        for name in available():
            try:
                cls = find(name)
            except LceError:
                continue  # a package's broken method must not hide the other methods
            about = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
            methods.append({"name": name, "about": about, "knobs": knobs_of(cls)})
        model = facts(self._recorder.engine, str(self._recorder.model))
        return {"model": model, "methods": methods, "max_tokens": MOST_NEW}

    def start(self, body: Any) -> int:
        """Start a run of the request `body`; return its number. Raises `UsageError` if invalid, `Busy` during a run."""
        request, method = requested(body)
        n_tokens = len(prompt_ids(self._recorder.engine, request.prompt))
        if n_tokens > self.most_prompt:
            raise UsageError(f"the prompt has {n_tokens:,} tokens; expected {self.most_prompt:,} or fewer")
        check_heads(request.off, self._recorder.engine)
        self._recorder.engine_of(method)  # raises for knobs that the model or the window refuses
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
        """Tell the current run, if any, to end. Return the number of the last run that was started."""
        self._stop.set()
        return int(self._state["id"])

    def state(self, known: int | None = None) -> dict[str, Any]:
        """Return the state of the last run, with the recording if the run is done and its number is not `known`."""
        state, (number, key, recording) = self._state, self._done
        if state["state"] == "done" and number == state["id"] != known:
            return {**state, "recording": split(recording, f"data/{key}")}
        return state

    def script(self, key: str, run: int, segment: int) -> str | None:
        """Return the script with one segment of the last recording's data; None for an unknown key, run or segment."""
        _, right, recording = self._done
        runs = recording.get("runs", [])
        if key != right or run >= len(runs) or segment >= len(runs[run]["segments"]):
            return None
        return script(run, segment, runs[run]["segments"][segment])

    def close(self) -> None:
        """End the current run, and wait up to `STOP_S` seconds for its thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
