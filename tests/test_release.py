"""What `make release` refuses, and the notes it takes from the changelog."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.release import NotReady, notes_of, version_of

import truemfu

ROOT = Path(__file__).parents[1]
CHANGELOG = """# Changelog

## [Unreleased]

### Added

- something new

## [1.2.0] - 2026-11-17

### Fixed

- a defect, in [a link](docs/x.md)

## [1.1.0]

- no date

## [1.0.0] - 2026-01-01

"""


def test_the_notes_are_the_section_of_the_version() -> None:
    assert notes_of(CHANGELOG, "1.2.0") == "### Fixed\n\n- a defect, in [a link](docs/x.md)"
    assert notes_of(CHANGELOG, "Unreleased") == "### Added\n\n- something new"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.3.0", r"has no section \[1.3.0\] \(it has Unreleased, 1.2.0, 1.1.0, 1.0.0\)"),
        ("1.1.0", "has no date"),
        ("1.0.0", "is empty"),
    ],
)
def test_a_version_without_notes_is_refused(version: str, message: str) -> None:
    with pytest.raises(NotReady, match=message):
        notes_of(CHANGELOG, version)


def test_the_version_is_read_without_an_import() -> None:
    assert version_of((ROOT / "src/truemfu/__init__.py").read_text(encoding="utf-8")) == truemfu.__version__
    with pytest.raises(NotReady, match="no __version__"):
        version_of("")


def test_this_changelog_has_notes() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "`count_flops`" in notes_of(changelog, "Unreleased") or f"[{truemfu.__version__}]" in changelog
