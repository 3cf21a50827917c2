"""The commit of a folder is read without running anything its repository names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from truemfu.commit import git_commit


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "--quiet")
    (folder / "file").write_text("first\n")
    (folder / ".gitattributes").write_text("file filter=own\n")
    git("add", ".")
    git("-c", "user.name=A", "-c", "user.email=a@b", "commit", "--quiet", "--message", "first")
    return folder


def git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def test_a_commit_and_whether_files_differ(repository: Path) -> None:
    commit = git("rev-parse", "HEAD")
    assert git_commit() == commit
    (repository / "untracked").touch()
    assert git_commit() == commit
    (repository / "file").write_text("second\n")
    assert git_commit() == f"{commit}-dirty"


def test_outside_git_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert git_commit() is None


@pytest.mark.parametrize("key", ["core.fsmonitor", "filter.own.clean", "filter.own.process"])
@pytest.mark.parametrize("changed", [True, False])
def test_no_program_that_the_repository_names_is_run(
    repository: Path, tmp_path: Path, key: str, changed: bool
) -> None:
    expected = git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was_run\ncat\n")
    program.chmod(0o755)
    git("config", key, str(program))
    git("config", "filter.own.required", "true")
    # The same size, written at another time: git has to look at the content.
    (repository / "file").write_text("other\n" if changed else "first\n")
    assert git_commit() == expected
    assert not (tmp_path / "was_run").exists()
    subprocess.run(["git", "status", "--porcelain"], capture_output=True)
    assert (tmp_path / "was_run").exists(), "the program is one that git would run"


def test_a_known_commit_is_taken_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TRUEMFU_GIT_COMMIT", "abc-dirty")
    assert git_commit() == "abc-dirty"
    monkeypatch.setenv("TRUEMFU_GIT_COMMIT", "")
    assert git_commit() is None
