"""The layout: imports go one way, between folders and between rooms, and the drawn tree shows every file."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "truemfu"

# A module imports from its own folder and from stations before its own.
STATIONS = (
    ("text", "lazy", "environment", "known_models"),
    ("errors",),
    ("torch_versions",),
    ("convention",),
    ("torch_private",),
    ("plain_files",),
    ("records", "provenance", "commit"),
    ("hardware", "flops"),
    ("utilization", "waterfall", "crosscheck"),
    ("census",),
    ("training_plan",),
    ("check",),
    ("run_summary",),
    ("remedies",),
    ("trackers",),
    ("monitor",),
    ("private",),
    ("integrations",),
    ("sweep",),
    ("report",),
    ("trial",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(STATIONS) for name in names}

# The same inside a folder that has rooms: a room imports from rooms before it. What a folder holds itself is
# either shared by its rooms or puts them together, so it is not in the order; no circle may go through it.
ROOMS = {
    "flops": (
        ("shadow",),
        ("attention",),
        ("operators",),
        ("isolation",),
        ("structure",),
        ("count",),
        ("closed_form", "observe", "profiled"),
        ("models",),
    ),
    "hardware": (("counters",), ("ceiling", "nsight")),
    "monitor": (("ranks", "timing"), ("values",), ("watching",), ("step_flops",), ("hybrid",), ("rows",)),
    "report": (("drawing",), ("explain",), ("run", "sweep"), ("compare",)),
    "sweep": (("trainers",), ("launchers", "worker"), ("supervisor",)),
}
WITH_A_FACE = ("flops",)
"""Folders of which other folders import what the folder itself offers, and none of its modules."""
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def station(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path: Path) -> tuple[str, ...]:
    """The name of a module below the package, in parts; that of a folder for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@functools.cache
def imported(path: Path) -> set[tuple[str, ...]]:
    """The modules of the package that a module imports, inside functions too; not those for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    package = ("truemfu", *path.relative_to(PACKAGE).parent.parts)
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = (*above, *(node.module or "").split(".")) if node.module else above
            names |= {(*base, alias.name) for alias in node.names}
    return {_module(name[1:]) for name in names if name[0] == "truemfu" and len(name) > 1}


def _module(name: tuple[str, ...]) -> tuple[str, ...]:
    """The module that a dotted name is or is in."""
    while name and not (
        (PACKAGE.joinpath(*name)).is_dir() or PACKAGE.joinpath(*name).with_suffix(".py").exists()
    ):
        name = name[:-1]
    return name


def imported_stations(path: Path) -> set[str]:
    """The stations a module imports from."""
    return {name[0] for name in imported(path) if name and name[0] in RANK}


def drawn_tree() -> set[str]:
    """The paths in the tree of docs/architecture.md, put together from its indentation."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(r"^src/truemfu/.*\n((?:  .*\n|\n)+)", text, re.MULTILINE)
    assert found, "docs/architecture.md has no tree of src/truemfu/"
    paths: set[str] = set()
    folders: list[str] = []
    for line in found[1].splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        name = line.split()[0]
        assert len(line.split()) > 1, f"{name} has no comment in docs/architecture.md"
        if name.endswith("/"):
            folders[depth:] = [name]
        else:
            paths.add("".join(folders[:depth]) + name)
    return paths


def test_imports_go_one_way() -> None:
    assert {station(path) for path in MODULES} <= set(RANK)
    backwards = {
        (str(path.relative_to(PACKAGE)), name)
        for path in MODULES
        for name in imported_stations(path)
        if name != station(path) and RANK[name] >= RANK[station(path)]
    }
    assert not backwards


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_from_rooms_before_them(folder: str) -> None:
    rank = {room: place for place, rooms in enumerate(ROOMS[folder]) for room in rooms}
    found = {path.parent.name for path in (PACKAGE / folder).glob("*/*.py")}
    assert set(rank) == found
    backwards = {
        (path.parent.name, name[1])
        for path in (PACKAGE / folder).rglob("*/*.py")
        for name in imported(path)
        if name[:1] == (folder,) and len(name) > 2
        if name[1] != path.parent.name and rank[name[1]] >= rank[path.parent.name]
    }
    assert not backwards


@pytest.mark.parametrize("folder", WITH_A_FACE)
def test_other_folders_import_what_a_folder_offers(folder: str) -> None:
    past_the_face = {
        (str(path.relative_to(PACKAGE)), ".".join(name))
        for path in MODULES
        if station(path) != folder
        for name in imported(path)
        if name[:1] == (folder,) and len(name) > 1
    }
    assert not past_the_face


def test_no_imports_go_in_a_circle() -> None:
    left = {name_of(path): imported(path) - {name_of(path)} for path in MODULES}
    while leaves := {name for name, needed in left.items() if not needed & set(left)}:
        for name in leaves:
            del left[name]
    assert not left


def test_the_test_sees_imports_that_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_layout.PACKAGE", tmp_path)
    for folder in ("flops", "sweep", "report"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sweep" / "models.py").touch()
    (tmp_path / "cli.py").touch()
    module = tmp_path / "flops" / "x.py"
    module.write_text(
        "def f():\n    from ..sweep.models import SIZES\n    import truemfu.cli\n    from .. import report\n"
    )
    assert imported(module) == {("sweep", "models"), ("cli",), ("report",)}
    assert imported_stations(module) == {"sweep", "cli", "report"}


def test_every_source_file_is_in_the_tree_of_the_architecture() -> None:
    files = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if path.name != "__init__.py" or path.stat().st_size > 0
    }
    assert drawn_tree() == files


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_what_a_script_imports_from_the_package_is_there(folder: str) -> None:
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
    assert scripts
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(script)) for script in scripts):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "truemfu":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):  # a module of a package
                    importlib.import_module(f"{node.module}.{name.name}")
