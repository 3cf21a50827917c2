"""The commit of the current folder, asked of git without running anything that folder's repository names.

A repository's own configuration can name programs: a file system monitor, hooks, filters for file contents,
transports. A training may be started in a folder that came from elsewhere, and only a number is wanted of it.
Not for the training thread: git is given seconds.
"""

from __future__ import annotations

import os
import subprocess

_TIMEOUT_S = 10.0
_OVERRIDES = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never")
_OF_REPOSITORY = ("local", "worktree")
_NO_MATCH = 1


def git_commit() -> str | None:
    """The commit, "-dirty" behind it where files differ; None outside git, and where git does not answer."""
    try:
        commit = _git("rev-parse", "--verify", "HEAD")
        filters = _git("config", "-z", "--show-scope", "--name-only", "--get-regexp", r"^filter\.")
        if commit.returncode or filters.returncode not in (0, _NO_MATCH):
            return None
        changes = _git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--ignore-submodules=dirty",  # a look into one would obey its own configuration
            overrides=_without_filters(filters.stdout),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if changes.returncode:
        return None
    return commit.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


def _without_filters(listing: str) -> list[str]:
    """What switches off the filters that the repository itself configures; the user's own stay."""
    parts = listing.split("\0")
    names = {name for scope, name in zip(parts[::2], parts[1::2], strict=False) if scope in _OF_REPOSITORY}
    return [f"{name}={'false' if name.endswith('.required') else ''}" for name in sorted(names)]


def _git(*arguments: str, overrides: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    settings = [*_OVERRIDES, *(overrides or [])]
    if any(setting.count("=") > 1 for setting in settings):
        raise OSError("git cannot be given a setting whose name has a = in it")
    return subprocess.run(
        ["git", *(part for setting in settings for part in ("-c", setting)), *arguments],
        capture_output=True,
        text=True,
        errors="surrogateescape",  # names are handed back as they came
        stdin=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"},
    )
