"""docs/architecture.md is true: its rooms, the order in which they stand, and the names on the page."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## The floors")[2].partition("\n## ")[0], re.MULTILINE)
BESIDE = ("lce_serve", "lce_lab")  # packages that import what an embedder imports, and these modules of each other
BETWEEN = {
    ("lce_serve", "lce_lab.study.recording"),
    ("lce_serve", "lce_lab.study.web_page"),
    ("lce_lab", "lce_serve.ray"),
}
PUBLIC = {f"lce.{name}" for name in "errors sizes progress files system".split()}
PUBLIC |= {"lce", "lce.methods", "lce.methods.lowdim", "lce.methods.map_file"}
PUBLIC |= {f"lce.methods.{name}" for name in "auto choices measured".split()}  # advice, and what `lce recommend` keeps
PUBLIC |= {
    f"lce.methods.{name}" for name in "attending full joint selection selective selectors turned_keys".split()
}  # parts
PUBLIC |= {"lce.engine.options", "lce.engine.sizing"}  # options, and the method and sizes of a model that is not loaded
PUBLIC |= {"lce.engine.grammar"}  # what a text must match
PUBLIC |= {f"lce.terminal.{name}" for name in "exits options output reading".split()}  # for whoever adds a command
DOORS = {"lce.attention"}  # packages whose modules nobody else imports


def imported(file: Path, package: Path) -> Iterator[str]:
    """The package's modules that a file imports anywhere, for types too, by their dotted names.

    A string that is a module's name counts too: `import_module` takes those.
    """

    def is_module(name: str) -> bool:
        path = package.parent.joinpath(*name.split("."))
        return path.with_suffix(".py").is_file() or path.is_dir()

    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file}: a relative import; expected the full name"
            names = [node.module]
            if node.module in {"lce", "lce.terminal", *BESIDE, *DOORS}:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if is_module(name) else node.module for name in inner]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"lce\w*(\.\w+)+", str(node.value)):
            names = [node.value] if is_module(node.value) else []
        yield from (name for name in names if name.split(".")[0] in (package.name, "lce", *BESIDE))


def violations(package: Path, rooms: list[str]) -> list[str]:
    """The imports that break the order, `rooms` from the ground up. While there are none, there is no circle either."""
    found = []
    for file in sorted(package.rglob("*.py")):
        room = file.relative_to(package).with_suffix("").parts[0]
        for name in imported(file, package):
            other = name.split(".")[1] if "." in name else "__init__"
            if name.split(".")[0] in BESIDE:
                found.append(f"{room}: {name} is another package")
            elif room == other:
                continue
            elif rooms.index(other) > rooms.index(room):
                found.append(f"{room}: {name} stands above it")
            elif any(name.startswith(f"{door}.") for door in DOORS):
                found.append(f"{room}: {name} is behind the door")
    return found


def intrusions(package: Path) -> list[str]:
    """The imports of a package beside `lce` that no embedder could make."""
    names = {(file, name) for file in sorted(package.rglob("*.py")) for name in imported(file, package)}
    return [
        f"{file.name}: {name} is not public"
        for file, name in sorted(names)
        if name.split(".")[0] != package.name and name not in PUBLIC and (package.name, name) not in BETWEEN
    ]


def circles(package: Path) -> list[list[str]]:
    """The files of one room that import each other, in groups; imports for types alone count, too."""
    files = {".".join(file.relative_to(package.parent).with_suffix("").parts): file for file in package.rglob("*.py")}
    rooms = {name: name.split(".")[1] for name in files if name.count(".")}
    reached = {
        name: {other for other in imported(files[name], package) if other in rooms and rooms[other] == rooms[name]}
        for name in rooms
    }
    for _ in reached:  # a path is no longer than that
        before = {name: len(others) for name, others in reached.items()}
        reached = {name: others.union(*(reached[other] for other in others)) for name, others in reached.items()}
        if before == {name: len(others) for name, others in reached.items()}:
            break
    groups = {tuple(sorted(other for other in others if name in reached[other])) for name, others in reached.items()}
    return sorted(list(group) for group in groups if len(group) > 1)


def test_every_room_has_one_line_on_the_page() -> None:
    package = ROOT / "lce"
    files, folders = package.glob("*.py"), package.glob("*/__init__.py")
    assert sorted(ROOMS) == sorted([*(file.stem for file in files), *(file.parent.name for file in folders)])


def test_a_room_imports_only_what_stands_below_it() -> None:
    assert violations(ROOT / "lce", ROOMS) == []


@pytest.mark.parametrize("name", BESIDE)
def test_server_and_laboratory_import_what_an_embedder_imports(name: str) -> None:
    assert intrusions(ROOT / name) == []


@pytest.mark.parametrize("name", ["lce", *BESIDE])
def test_no_room_has_a_circle(name: str) -> None:
    assert circles(ROOT / name) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from lce.engine.engine import Engine", ["a.py: lce.engine.engine is not public"]),
        ("from lce.terminal import chat", ["a.py: lce.terminal.chat is not public"]),
        ("from lce_serve import app", ["a.py: lce_serve.app is not public"]),
        ("import lce\nfrom lce.terminal import options\nfrom lce.methods import run\nimport lce_lab.b", []),
    ],
)
def test_an_intrusion_is_found(tmp_path: Path, line: str, found: list[str]) -> None:
    files = "lce/engine/engine.py lce/terminal/chat.py lce/terminal/options.py lce_serve/app.py lce_lab/b.py".split()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "lce_lab" / "a.py").write_text(line)
    assert intrusions(tmp_path / "lce_lab") == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from lce.engine.one import f", True),
        ("def f():\n    from lce.engine.one import f", True),
        ("import_module('lce.engine.one')", True),
        ("if TYPE_CHECKING:\n    from lce.engine.one import f", True),
        ("from lce.cache.kv import f", False),
    ],
)
def test_a_circle_is_found(tmp_path: Path, line: str, found: bool) -> None:
    package = tmp_path / "lce"
    lines = {
        "engine/one.py": "import lce.engine.two",
        "engine/two.py": "from lce.engine.three import f",
        "cache/kv.py": "",
    }
    for name, text in (lines | {"engine/three.py": line}).items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert circles(package) == ([["lce.engine.one", "lce.engine.three", "lce.engine.two"]] if found else [])


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("cache/kv.py", "from lce.engine.engine import Engine", ["cache: lce.engine.engine stands above it"]),
        ("cache/kv.py", "import lce.engine.engine as engine", ["cache: lce.engine.engine stands above it"]),
        ("cache/kv.py", "from lce import Engine", ["cache: lce stands above it"]),
        ("cache/kv.py", "if TYPE_CHECKING:\n    from lce import engine", ["cache: lce.engine stands above it"]),
        (
            "cache/kv.py",
            "def f():\n    from lce.engine.engine import Engine",
            ["cache: lce.engine.engine stands above it"],
        ),
        ("cache/kv.py", "import_module('lce.engine.engine')", ["cache: lce.engine.engine stands above it"]),
        ("cache/kv.py", "from lce.attention.tiles import Tiles", ["cache: lce.attention.tiles is behind the door"]),
        ("cache/kv.py", "from lce.attention import tiles", ["cache: lce.attention.tiles is behind the door"]),
        ("cache/kv.py", "from lce_lab.passkey import f", ["cache: lce_lab.passkey is another package"]),
        ("cache/kv.py", "from lce.attention import Tiles", []),
        ("cache/kv.py", "from lce.cache.tiers import Tier", []),
        ("attention/__init__.py", "from lce.attention.tiles import Tiles", []),
        ("cli.py", "import lce\nimport torch", []),
    ],
)
def test_the_order_can_be_broken(tmp_path: Path, file: str, line: str, expected: list[str]) -> None:
    package = tmp_path / "lce"
    for name in ("attention/tiles.py", "cache/kv.py", "engine/engine.py", "../lce_lab/passkey.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / file).write_text(line)
    assert violations(package, ["attention", "cache", "methods", "engine", "__init__", "cli"]) == expected


@pytest.mark.parametrize("name", sorted({*re.findall(r"`((?:\w+/)+[\w.]*)`", PAGE)}))
def test_every_file_on_the_page_exists(name: str) -> None:
    assert (ROOT / name).exists()


def test_every_name_on_the_page_is_in_the_code() -> None:
    code = "\n".join(
        file.read_text(encoding="utf-8") for room in ("lce", *BESIDE) for file in sorted((ROOT / room).rglob("*.py"))
    )
    words = set(re.findall(r"\w+", code))
    named = {word for span in re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", PAGE) for word in span.split(".")}
    assert named - words == set()
