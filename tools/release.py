"""`make release`: build and check everything that a release needs; nothing is uploaded.

    version, CHANGELOG ─► sdist and wheel ─► metadata ─► the wheel, installed and run ─► notes

`make release RELEASE=--draft` is a rehearsal: the notes are those of [Unreleased], and uncommitted changes
are allowed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED_IN_SDIST = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "src/truemfu/__init__.py",
    "src/truemfu/py.typed",
)


class NotReady(Exception):
    """What keeps a release from being made, in one line."""


def version_of(init: str) -> str:
    """The version in the text of the package's __init__.py."""
    found = re.search(r'^__version__ = "([^"]+)"$', init, re.MULTILINE)
    if found is None:
        raise NotReady("src/truemfu/__init__.py has no __version__")
    return found[1]


def notes_of(changelog: str, version: str) -> str:
    """The text of a version's section in CHANGELOG.md; `Unreleased` is one too."""
    headings = re.findall(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    if version not in headings:
        raise NotReady(
            f"CHANGELOG.md has no section [{version}] (it has {', '.join(headings) or 'none'}): name it "
            f"'## [{version}] - YYYY-MM-DD', or change __version__"
        )
    section = re.search(
        rf"^## \[{re.escape(version)}\](?P<date>[^\n]*)\n(?P<text>.*?)(?=^## \[|\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    assert section is not None
    if version != "Unreleased" and not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", section["date"]):
        raise NotReady(f"the section [{version}] of CHANGELOG.md has no date: '## [{version}] - YYYY-MM-DD'")
    text = section["text"].strip()
    if not text:
        raise NotReady(f"the section [{version}] of CHANGELOG.md is empty")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", action="store_true", help="a rehearsal, with the notes of [Unreleased]")
    draft = parser.parse_args().draft
    try:
        _release(draft)
    except NotReady as reason:
        sys.exit(f"no release: {reason}")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"no release: {' '.join(map(str, failed.cmd))} failed with code {failed.returncode}")


def _release(draft: bool) -> None:
    version = version_of((ROOT / "src/truemfu/__init__.py").read_text(encoding="utf-8"))
    notes = notes_of((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "Unreleased" if draft else version)
    if not draft and _run("git", "status", "--porcelain", capture=True):
        raise NotReady("there are uncommitted changes: commit them, or rehearse with RELEASE=--draft")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    # The wheel is built from the sdist, so a file that the sdist lacks is missing in both.
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT)
    sdist, wheel = dist / f"truemfu-{version}.tar.gz", dist / f"truemfu-{version}-py3-none-any.whl"
    _check_files(dist, sdist, wheel)
    if importlib.util.find_spec("twine") is not None:
        _run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        metadata = "checked by twine"
    else:
        metadata = "not checked by twine, which is not installed here (pip install twine)"
    os.environ["TRUEMFU_WHEEL"] = str(wheel)
    _run(sys.executable, "-m", "pytest", "--quiet", ROOT / "tests" / "test_wheel.py")
    notes_file = ROOT / "out" / f"release-notes-{version}.md"
    notes_file.parent.mkdir(exist_ok=True)
    notes_file.write_text(notes + "\n", encoding="utf-8")
    print(f"\ntruemfu {version}{', a draft' if draft else ''}: built and checked, nothing was uploaded.")
    for label, text in (
        ("sdist", f"{sdist.relative_to(ROOT)}, {sdist.stat().st_size / 1e3:,.0f} kB"),
        ("wheel", f"{wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e3:,.0f} kB; installed and run"),
        ("metadata", metadata),
        ("notes", str(notes_file.relative_to(ROOT))),
    ):
        print(f"  {label:10}{text}")
    if draft:
        print(f"For the release: name the section of CHANGELOG.md [{version}] with its date, and commit.")
    else:
        print(f"To publish: tag the commit v{version}, and in dist/ twine upload {sdist.name} {wheel.name}.")


def _check_files(dist: Path, sdist: Path, wheel: Path) -> None:
    found = {path.name for path in dist.iterdir()}
    if found != {sdist.name, wheel.name}:
        raise NotReady(f"dist/ has {', '.join(sorted(found))}; expected {sdist.name} and {wheel.name}")
    with tarfile.open(sdist) as archive:
        names = set(archive.getnames())
    root = sdist.name.removesuffix(".tar.gz")
    missing = [name for name in NEEDED_IN_SDIST if f"{root}/{name}" not in names]
    if missing:
        raise NotReady(f"the sdist has no {', '.join(missing)}")


def _run(*command: object, capture: bool = False) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    return done.stdout.strip() if capture else ""


if __name__ == "__main__":
    main()
