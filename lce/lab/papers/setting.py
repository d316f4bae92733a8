"""The setting of a reproduction: the model, the data, and what the user changed."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import lce
from lce.errors import UsageError, nearest

if TYPE_CHECKING:
    from lce.lab.eval.record import Lines
    from lce.lab.papers.entry import Arm, Entry

Progress = Callable[[int, int], None]
T = TypeVar("T")
L = TypeVar("L", bound="Lines[Any]")


@dataclass
class Setting:
    """What is measured on. `knobs` are the user's, `METHOD.KEY` or `KEY`; `loading` are options of `lce.load`."""

    model: str = "demo"
    window: int = 0  # 0: the model's
    lengths: Sequence[int] = ()
    samples: int = 20  # of a task made here, a row and a length; windows, runs
    limit: int | None = None  # of the samples of a task of the paper's data
    seed: int = 0
    data: Sequence[str] = ()
    record: str | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)
    bar: Callable[[str], AbstractContextManager[Progress]] | None = None  # shows the progress of what it is called
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # of the rooms above: see `tool`

    def __post_init__(self) -> None:
        found = lce.info(self.model)
        if not isinstance(found, lce.ModelInfo):
            raise UsageError(f"--model {self.model} is a context file; expected the folder of a model, or demo")
        self.window = self.loading.get("window") or self.window or found.window
        self._made: dict[Any, Any] = {}
        self._engine: tuple[Any, lce.Engine] | None = None

    def advancing(self, what: str) -> AbstractContextManager[Progress]:
        """Shows the progress of a part of the work, called with what is done and in all."""
        return self.bar(what) if self.bar else nullcontext(lambda done, total: None)

    def tool(self, name: str) -> Callable[..., Any]:
        """`explain`, `bench` or `read_text`, of rooms that this one must not import. Raises `UsageError` without it."""
        if name not in self.tools:
            raise UsageError(f"this table or figure needs {name}: give tools={{{name!r}: ...}}")
        return self.tools[name]

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` makes, the first time that something is called `key`."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def method(self, arm: Arm) -> lce.Method:
        """The row's method; the user's knobs count where the row has none of its own."""
        fields = {each.name for each in dataclasses.fields(lce.methods.find(arm.method))}
        own = {key: value for key, value in self.knobs.items() if key in fields}
        for key, value in self.knobs.items():
            name, dot, knob = key.partition(".")
            if dot and name == arm.method:
                own[knob] = value
        return lce.methods.make(arm.method, {**own, **arm.sized(self.window)})

    def check(self, entry: Entry) -> None:
        """Raise `UsageError` for knobs that no row has, for rows that this window does not allow, and for idle data."""
        if self.data and not entry.reads_data:
            raise UsageError(f"{entry.id} reads no data; leave --data {self.data[0]} out")
        if self.lengths and not entry.multiples:
            raise UsageError(f"{entry.id} has no lengths; leave --lengths out")
        names = {arm.method for arm in entry.arms}
        known = {name: {field.name for field in dataclasses.fields(lce.methods.find(name))} for name in names}
        for key in self.knobs:
            name, dot, knob = key.partition(".")
            if dot and name not in names:
                raise UsageError(f"-o {key}: {entry.id} does not run {name!r}; {nearest(name, names)}")
            if not any((knob if dot else key) in known[each] for each in ([name] if dot else names)):
                valid = sorted(set().union(*known.values()))
                raise UsageError(f"-o {key}: no row of {entry.id} has this knob; {nearest(knob or key, valid)}")
        for arm in entry.arms:
            self.method(arm)

    def scaling(self, arm: Arm, length: int) -> dict[str, Any]:
        """The row's RoPE scaling for a text of this length, as options of `lce.load`."""
        if arm.rope is None or length <= self.window:
            return {}
        return {"rope": arm.rope, "rope_factor": length / self.window}

    def engine(self, arm: Arm, length: int) -> lce.Engine:
        """An engine for the row; the weights are loaded once."""
        method, scaling = self.method(arm), self.scaling(arm, length)
        key = (method, tuple(scaling.items()))
        if self._engine is None or self._engine[0] != key:
            sharing = None if self._engine is None else self._engine[1]
            self._engine = key, lce.load(self.model, method, **{**self.loading, **scaling}, sharing=sharing)
        return self._engine[1]

    def options(self, arm: Arm, length: int) -> str:
        """The model, the row's method, knobs and scaling as options of a command."""
        words = ["--model", shlex.quote(self.model), "--method", arm.method]
        method = self.method(arm)
        default = type(method)()
        for each in dataclasses.fields(method):
            value = getattr(method, each.name)
            if value != getattr(default, each.name):
                words += ["-o", f"{each.name}={str(value).lower() if isinstance(value, bool) else value}"]
        for name, value in {**self.loading, **self.scaling(arm, length)}.items():
            if value not in (None, "auto") and name != "threads":
                words += [f"--{name.replace('_', '-')}", shlex.quote(str(value))]
        return " ".join(words)

    def kept(self, lines: type[L], kind: str = "") -> L | None:
        """The file that results of a kind are kept in, None for none. Raises `DataError` where it cannot be used."""
        if self.record is None:
            return None
        found = lines(self.record + kind)
        found.prepare()
        return found

    def recorded(self, kind: str = "") -> list[str]:
        """The option of a command that keeps its results where these are kept; `kind` ends the file's name."""
        return [] if self.record is None else [f"--record {shlex.quote(self.record + kind)}"]
