"""docs/architecture.md is true: its rooms, the order in which they stand, and the names on the page."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## The floors")[2].partition("\n## ")[0], re.MULTILINE)
ON_THE_FACE = {"calibrate", "lab", "server"}  # import what an embedder imports, and nothing else
BESIDE = {("server", "lce_lab.study.recording"), ("server", "lce_lab.study.web_page")}  # what they use of each other
FACE = {"lce", "lce.methods", "lce.methods.auto", "lce.methods.lowdim", "lce.methods.map_file", "lce.methods.mass"}
FACE |= {"lce.errors", "lce.sizes", "lce.progress", "lce.files", "lce.system"}
DOORS = {"lce.attention"}  # packages whose modules nobody else imports


def imported(file: Path, package: Path, *, for_types: bool = True) -> Iterator[str]:
    """The package's modules that a file imports anywhere, by their dotted names; or only those that it runs.

    A string that is a module's name counts too: `import_module` takes those.
    """

    def is_module(name: str) -> bool:
        path = package.parent.joinpath(*name.split("."))
        return path.with_suffix(".py").is_file() or path.is_dir()

    tree = ast.parse(file.read_text(encoding="utf-8"))
    guarded = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    skipped = {inner for node in guarded for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        names: list[str] = []
        if node in skipped and not for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file}: a relative import; expected the full name"
            names = [node.module]
            if node.module in {package.name, *DOORS}:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if is_module(name) else node.module for name in inner]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"lce(\.\w+)+", str(node.value)):
            names = [node.value] if is_module(node.value) else []
        yield from (name for name in names if name.split(".")[0] == package.name)


def violations(package: Path, rooms: list[str]) -> list[str]:
    """The imports that break the order, `rooms` from the ground up. While there are none, there is no circle either."""
    found = []
    for file in sorted(package.rglob("*.py")):
        room = file.relative_to(package).with_suffix("").parts[0]
        for name in imported(file, package):
            other = name.split(".")[1] if "." in name else "__init__"
            if room == other:
                continue
            if rooms.index(other) > rooms.index(room):
                found.append(f"{room}: {name} stands above it")
            elif room in ON_THE_FACE and name not in FACE and (room, name) not in BESIDE:
                found.append(f"{room}: {name} is not the public face")
            elif any(name.startswith(f"{door}.") for door in DOORS):
                found.append(f"{room}: {name} is behind the door")
    return found


def circles(package: Path) -> list[list[str]]:
    """The files of one room that import each other, in groups. Imports for types alone do not count."""
    files = {".".join(file.relative_to(package.parent).with_suffix("").parts): file for file in package.rglob("*.py")}
    rooms = {name: name.split(".")[1] for name in files if name.count(".")}
    reached = {
        name: {
            other
            for other in imported(files[name], package, for_types=False)
            if other in rooms and rooms[other] == rooms[name]
        }
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


def test_no_room_has_a_circle() -> None:
    assert circles(ROOT / "lce") == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from lce.engine.one import f", True),
        ("def f():\n    from lce.engine.one import f", True),
        ("import_module('lce.engine.one')", True),
        ("if TYPE_CHECKING:\n    from lce.engine.one import f", False),
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
        ("lab/passkey.py", "from lce.engine.engine import Engine", ["lab: lce.engine.engine is not the public face"]),
        ("cache/kv.py", "from lce.attention import Tiles", []),
        ("cache/kv.py", "from lce.cache.tiers import Tier", []),
        ("attention/__init__.py", "from lce.attention.tiles import Tiles", []),
        ("lab/passkey.py", "import lce\nfrom lce import Engine\nfrom lce.methods import run", []),
        ("cli.py", "import lce\nimport torch", []),
    ],
)
def test_the_order_can_be_broken(tmp_path: Path, file: str, line: str, expected: list[str]) -> None:
    package = tmp_path / "lce"
    for name in ("attention/tiles.py", "cache/kv.py", "engine/engine.py", "lab/passkey.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / file).write_text(line)
    assert violations(package, ["attention", "cache", "methods", "engine", "__init__", "lab", "cli"]) == expected


@pytest.mark.parametrize("name", sorted({*re.findall(r"`((?:\w+/)+[\w.]*)`", PAGE)}))
def test_every_file_on_the_page_exists(name: str) -> None:
    assert (ROOT / name).exists()


def test_every_name_on_the_page_is_in_the_code() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "lce").rglob("*.py")))
    words = set(re.findall(r"\w+", code))
    named = {word for span in re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", PAGE) for word in span.split(".")}
    assert named - words == set()
