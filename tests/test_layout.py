"""The layout the design draws: imports go one way, and the README's tree shows every file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "truemfu"

# A module imports from its own folder and from stations before its own.
STATIONS = (
    ("text",),
    ("errors",),
    ("torch_versions",),
    ("convention",),
    ("torch_private",),
    ("plain_files",),
    ("records", "provenance", "commit"),
    ("hardware", "flops"),
    ("utilization", "waterfall", "crosscheck"),
    ("trackers",),
    ("monitor",),
    ("integrations",),
    ("sweep",),
    ("report",),
    ("testing",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(STATIONS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def station(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_stations(path: Path) -> set[str]:
    """The stations a module imports from, inside functions too; imports for type checkers alone are free."""
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
    return {name[1] for name in names if name[0] == "truemfu" and len(name) > 1 and name[1] in RANK}


def readme_tree() -> set[str]:
    """The paths in the README's tree of the source, put together from its indentation."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^( *)src/truemfu/.*\n((?:\1  .*\n|\n)+)", readme, re.MULTILINE)
    assert found, "the README has no tree of src/truemfu/"
    paths: set[str] = set()
    folders: list[str] = []
    for line in found[2].splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip()) - len(found[1])) // 2 - 1
        name = line.split()[0]
        assert len(line.split()) > 1, f"{name} has no comment in the README's tree"
        if name.endswith("/"):
            folders[depth:] = [name]
        else:
            paths.add("".join(folders[:depth]) + name)
    return paths


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = station(path)
    assert own in RANK, f"{own} is no station of the design"
    backwards = {name for name in imported_stations(path) if name != own and RANK[name] >= RANK[own]}
    assert not backwards, f"{own} must not import from {sorted(backwards)}"


def test_the_test_sees_imports_that_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_layout.PACKAGE", tmp_path)
    (tmp_path / "flops").mkdir()
    module = tmp_path / "flops" / "x.py"
    module.write_text(
        "def f():\n    from ..sweep.models import SIZES\n    import truemfu.cli\n    from .. import report\n"
    )
    assert imported_stations(module) == {"sweep", "cli", "report"}


def test_every_source_file_is_in_the_tree_of_the_readme() -> None:
    files = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if path.name != "__init__.py" or path.stat().st_size > 0
    }
    assert readme_tree() == files
