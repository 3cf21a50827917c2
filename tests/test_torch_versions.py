"""One pair of versions of torch is tested, everywhere the same, and a newer torch warns once."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from truemfu import errors
from truemfu.errors import TruemfuWarning
from truemfu.torch_versions import NEWEST_TESTED, OLDEST_TESTED, warn_if_untested

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_already_warned", set())


def found(pattern: str, file: str) -> tuple[str, ...]:
    """The groups of the one place in a file of the repository that a pattern matches."""
    (match,) = re.finditer(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return match.groups()


def text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@pytest.mark.parametrize(
    "version",
    [
        "2.6.0",
        "2.13.0+cpu",
        "2.15.0",
        "2.15.1+cu130",
        "2.15.0a0+git1234",
        "1.13.1",
        "git1234",
        "1234567",
        "unknown",
        "",
    ],
)
def test_a_tested_version_and_one_without_a_number_do_not_warn(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()


def test_the_torch_of_these_tests_does_not_warn() -> None:
    warn_if_untested()


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev2026", "2.16.0a0+git1234", "2.100.0", "3.0"])
def test_a_newer_version_warns_once(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    words = f"tested with torch 2.6 to 2.15, and this is torch {version}: its counts are untested there"
    with pytest.warns(TruemfuWarning, match=f"^truemfu was {re.escape(words)}$"):
        warn_if_untested()
    warn_if_untested()


def test_a_version_of_a_type_of_its_own_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.16.0"))
    with pytest.warns(TruemfuWarning, match=r"this is torch 2\.16\.0:"):
        warn_if_untested()


def test_the_tested_versions_are_those_that_make_installs() -> None:
    assert found(r"^torch==(\d+\.\d+)\.\d+$", "constraints-oldest.txt") == (text(OLDEST_TESTED),)
    assert found(r"^torch==(\d+\.\d+)\.\d+$", "constraints-newest.txt") == (text(NEWEST_TESTED),)
    (developed,) = found(r"^torch==(\d+\.\d+)\.\d+$", "constraints-dev.txt")
    assert OLDEST_TESTED <= tuple(map(int, developed.split("."))) <= NEWEST_TESTED


def test_the_readme_states_the_requirements_and_the_tested_versions() -> None:
    (python,) = found(r'^requires-python = ">=([\d.]+)"', "pyproject.toml")
    (torch_,) = found(r'^dependencies = \["torch>=([\d.]+)"', "pyproject.toml")
    assert torch_ == text(OLDEST_TESTED)
    requirements = r"Python ([\d.]+) or newer and torch ([\d.]+) or newer; tested with torch (.+) to (.+)\.$"
    assert found(requirements, "README.md") == (python, torch_, text(OLDEST_TESTED), text(NEWEST_TESTED))
