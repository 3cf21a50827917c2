"""The commit of a folder is read without running anything its repository names, in a training without git."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from truemfu.commit import commit_in_files, git_commit


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
    assert commit_in_files() is None


@pytest.mark.parametrize("place", ["branch", "packed", "detached", "folder", "worktree"])
def test_the_commit_is_read_from_the_files_of_git(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    commit = git("rev-parse", "HEAD")
    if place == "packed":
        git("pack-refs", "--all")
    elif place == "detached":
        git("checkout", "--quiet", "--detach")
    elif place == "folder":
        (repository / "a" / "b").mkdir(parents=True)
        monkeypatch.chdir(repository / "a" / "b")
    elif place == "worktree":
        git("worktree", "add", "--quiet", "-b", "other", str(tmp_path / "linked"))
        monkeypatch.chdir(tmp_path / "linked")
    monkeypatch.setenv("PATH", "")
    assert commit_in_files() == f"{commit}-unchecked"


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none", "ref: ../file", "ref: a\0b", "planted"])
def test_other_contents_are_no_commit(repository: Path, head: str) -> None:
    (repository / ".git" / "HEAD").write_text(head)
    assert commit_in_files() is None


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
    assert git_commit() == commit_in_files() == "abc-dirty"
    monkeypatch.setenv("TRUEMFU_GIT_COMMIT", "")
    assert git_commit() is None
    assert commit_in_files() is None


MONITORED = """
import sys
import torch
from torch import nn
from truemfu import TrainingMonitor

started = []
sys.addaudithook(lambda event, args: started.append(event) if event in {
    "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"
} else None)
model = nn.Linear(8, 8)
with TrainingMonitor(sys.argv[1], model=model) as monitor:
    for step in range(1, 61):
        model(torch.ones(2, 8)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
print(started)
"""


def test_a_monitor_starts_no_process(repository: Path, tmp_path: Path) -> None:
    """A program that waits for any child of its own would get it."""
    run = [sys.executable, "-W", "ignore", "-c", MONITORED, str(tmp_path / "run")]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "[]\n"
    record = json.loads((tmp_path / "run" / "training_run.json").read_text())
    assert record["git_commit"] == git("rev-parse", "HEAD") + "-unchecked"
