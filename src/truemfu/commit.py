"""The commit of the current folder: from git, or where a training runs in this process, from git's files.

A repository's own configuration can name programs: a file system monitor, hooks, filters, transports. A
training may be started in an untrusted folder, and only the commit is needed: none of them runs.
No git is started in the process of a training. A program that waits for any child would get it, and where one
closes all descriptors, the end of git would close files that the program opened since. `truemfu run` asks git
before it starts the command.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from . import plain_files

KNOWN_COMMIT = "TRUEMFU_GIT_COMMIT"
"""The environment variable that has the commit of this process's folder; empty: there is none."""
_TIMEOUT_S = 10.0
_OVERRIDES = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never")
_OF_REPOSITORY = ("local", "worktree")
_NO_MATCH = 1
_COMMIT = re.compile("[0-9a-f]{40,64}")


def commit_in_files() -> str | None:
    """The commit, with "-unchecked" appended since only git tells whether files differ; None outside git.

    As `git_commit` where the process that started this one has asked git.
    """
    if (known := os.environ.get(KNOWN_COMMIT)) is not None:
        return known or None
    try:
        here = Path.cwd()
        found = (folder / ".git" for folder in (here, *here.parents) if (folder / ".git").exists())
        commit = _commit_of(next(found))
    except (OSError, ValueError, StopIteration):  # a null byte in a path is a ValueError
        return None
    return f"{commit}-unchecked" if _COMMIT.fullmatch(commit) else None


def _commit_of(folder: Path) -> str:
    if folder.is_file():  # of a linked worktree or a submodule: "gitdir: <path>"
        folder = folder.parent / _text(folder).removeprefix("gitdir: ")
    head = _text(folder / "HEAD")
    if not head.startswith("ref: "):
        return head
    branch = head.removeprefix("ref: ")
    shared = folder / _text(folder / "commondir") if (folder / "commondir").exists() else folder
    if (shared / branch).exists():
        return _text(shared / branch)
    packed = _text(shared / "packed-refs").splitlines()
    return next((line.split(" ")[0] for line in packed if line.endswith(f" {branch}")), "")


def _text(path: Path) -> str:
    return plain_files.read(path).decode(errors="replace").strip()


def git_commit() -> str | None:
    """The commit, with "-dirty" appended if files differ; None outside git, or if git fails."""
    if (known := os.environ.get(KNOWN_COMMIT)) is not None:
        return known or None
    try:
        commit = _git("rev-parse", "--verify", "HEAD")
        filters = _git("config", "-z", "--show-scope", "--name-only", "--get-regexp", r"^filter\.")
        if commit.returncode or filters.returncode not in (0, _NO_MATCH):
            return None
        changes = _git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--ignore-submodules=dirty",  # reading one would apply its own configuration
            overrides=_without_filters(filters.stdout),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if changes.returncode:
        return None
    return commit.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


def _without_filters(listing: str) -> list[str]:
    """Settings that disable the filters of the repository itself; the user's own stay."""
    parts = listing.split("\0")
    names = {name for scope, name in zip(parts[::2], parts[1::2], strict=False) if scope in _OF_REPOSITORY}
    return [f"{name}={'false' if name.endswith('.required') else ''}" for name in sorted(names)]


def _git(*arguments: str, overrides: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    settings = [*_OVERRIDES, *(overrides or [])]
    if any(setting.count("=") > 1 for setting in settings):
        raise OSError("git does not accept a setting whose name contains =")
    # By its path: to search for a name, Python changes the warning filters of the process for a moment, after
    # which each warning that is shown once is shown again.
    git = shutil.which("git")
    if git is None:
        raise FileNotFoundError("git")
    return subprocess.run(
        [git, *(part for setting in settings for part in ("-c", setting)), *arguments],
        capture_output=True,
        text=True,
        errors="surrogateescape",  # names are passed back unchanged
        stdin=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"},
    )
