"""Configurations in the local Hugging Face cache, by the model's name on the hub; nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import UsageError

_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)
_LONGEST_NAME = 96
_FILE = "config.json"


def may_be_on_the_hub(text: str) -> bool:
    """Whether this can be the name of a model on the hub: NAME or ORG/NAME, and not that of a JSON file."""
    return len(text) <= _LONGEST_NAME and _NAME.fullmatch(text) is not None and not text.endswith(".json")


def cached_config(name: str) -> Path | None:
    """The configuration of this model in the local cache, by huggingface_hub's own rules; None if absent."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, _FILE)
    except ValueError:  # a name that the hub does not allow
        return None
    return Path(found) if isinstance(found, str) else None


def not_cached(name: str) -> UsageError:
    """What to do where a model is not in the cache."""
    return UsageError(
        f"{name!r} is neither a file nor in the local Hugging Face cache, and nothing is downloaded here; "
        f"get its configuration with: hf download {name} {_FILE}"
    )
