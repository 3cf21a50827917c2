"""The origin of a record: versions of libraries and the command; never a secret.

    sys.argv ──► redacted ──► command          sys.modules ──► library_versions

The commit is in `commit.py`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_LIBRARIES = (
    "torch",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "trl",
    "peft",
    "opacus",
    "deepspeed",
    "datasets",
    "flash_attn",
    "mamba_ssm",
    "triton",
    "numpy",
)
HIDDEN = "[hidden]"
_MAX_ARGUMENTS, _MAX_CHARACTERS = 200, 2000

_SECRET = (
    r"(?:api[_-]?key|access[_-]?key|secret|password|passwd|passphrase|credentials?|private[_-]?key|"
    r"(?:token|auth)(?![a-z])|(?<![a-z])(?:key|pwd|pw|pass|bearer|sig|signature|session)(?![a-z]))"
)
_NAMES_SECRET = re.compile(_SECRET, re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""(["']?[\w.+/-]*{_SECRET}[\w.-]*["']?\s*[=:]\s*)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\[[^\]]*\]|[^\s,;&}}\]]+)""",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(\w://)[^/\s]+@")
_BARE_KEY = re.compile(r"[0-9a-f]{40}")
"""Keys of W&B; a commit has the same form, so this is only used for arguments."""
_KNOWN_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_|sk-|sk_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA|AIza|eyJ|wandb_v1_)"
    r"[\w.-]{8,}"
)
_HARMLESS = re.compile(r"""["']?(?:-?\d{1,6}(?:\.\d*)?|true|false|none|null|<[\w|]+>)["']?""", re.IGNORECASE)
_ALWAYS = re.compile(r"secret|passw|passphrase|pwd|credential|(?:api|access|private)[_-]?key", re.IGNORECASE)
"""Names whose values are hidden even if they are plain numbers."""
_MIN_SECRET = 6
_NAME = re.compile(r"-{0,2}[\w.+-]+")


def library_versions(installed: Iterable[str] = ()) -> dict[str, str]:
    """Versions of the libraries this process has imported, and of the named ones, if installed."""
    versions = {}
    for name in dict.fromkeys((*_LIBRARIES, *installed)):
        if name not in sys.modules and name not in installed:
            continue
        version = getattr(sys.modules.get(name), "__version__", None) or installed_version(name)
        if version is not None:
            versions[name] = str(version)
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        versions["cuda"] = str(torch.version.cuda)
        if torch.cuda.is_initialized() and (cudnn := torch.backends.cudnn.version()) is not None:
            versions["cudnn"] = str(cudnn)
    return versions


def installed_version(name: str) -> str | None:
    """The version of an installed package, which is not imported; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def command() -> list[str]:
    """How this process was started, without the values of likely secrets."""
    arguments = [str(argument)[:_MAX_CHARACTERS] for argument in sys.argv[:_MAX_ARGUMENTS]]
    return redacted_arguments(arguments)


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command line without secrets: also those after a name such as --api-key."""
    shown: list[str] = []
    before = ""
    for argument in arguments:
        shown.append(_redacted_argument(argument, before))
        before = argument if argument.startswith("-") or argument.isupper() else ""
    return shown


def _redacted_argument(argument: str, before: str) -> str:
    """One argument; if the one before it names a secret, this is its value."""
    name, is_assigned, value = argument.partition("=")
    is_named = bool(is_assigned and _NAME.fullmatch(name) and _NAMES_SECRET.search(name))
    if is_named and _is_hidden(name, value):
        return f"{name}={HIDDEN}"
    if "=" not in before and _NAMES_SECRET.search(before):
        is_option = argument.startswith("-") and not _ALWAYS.search(before)
        if not is_option and _is_hidden(before, argument):
            return HIDDEN
    return HIDDEN if _BARE_KEY.fullmatch(argument) else redacted(argument)


def redacted(text: str) -> str:
    """A text without keys, tokens and passwords: by name, by form, or by value from the environment."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, HIDDEN)
    text = _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", text)
    text = _ASSIGNED.sub(_without_value, text)
    return _KNOWN_KEY.sub(HIDDEN, text)


def redacted_data(data: Any) -> Any:
    """Plain data with every text in it redacted."""
    if isinstance(data, str):
        return redacted(data)
    if isinstance(data, Mapping):
        return {key: redacted_data(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redacted_data(value) for value in data]
    return data


def _without_value(found: re.Match[str]) -> str:
    name, value = found.groups()
    return f"{name}{HIDDEN}" if _is_hidden(name, value) else found[0]


def _is_hidden(name: str, value: str) -> bool:
    """Whether a value with the name of a possible secret is one: the id of a token is not."""
    return bool(_ALWAYS.search(name)) or not _HARMLESS.fullmatch(value)


def _secrets_of_environment() -> list[str]:
    """Values of variables whose names are those of secrets, the longest first."""
    named = [value for name, value in os.environ.items() if _NAMES_SECRET.search(name.replace("_", "-"))]
    long = {value for value in named if len(value) >= _MIN_SECRET and not _HARMLESS.fullmatch(value)}
    return sorted(long, key=len, reverse=True)
