"""The commit of the current folder, from git, without running any program that its repository configures.

A repository's own configuration can name programs: a file system monitor, hooks, filters for file contents,
transports. A training may be started in an untrusted folder, and only the commit is needed.
Not for the training thread: git may take seconds. Nor in the training process, where that can be avoided: a
program that waits for any child of its own gets git, so `truemfu run` asks before it starts the command.
"""

from __future__ import annotations

import os
import shutil
import subprocess

KNOWN_COMMIT = "TRUEMFU_GIT_COMMIT"
"""The environment variable that has the commit of this process's folder; empty: there is none."""
_TIMEOUT_S = 10.0
_OVERRIDES = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never")
_OF_REPOSITORY = ("local", "worktree")
_NO_MATCH = 1


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
