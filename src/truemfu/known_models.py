"""Configurations of well-known open models, so that `truemfu count gpt2` works without a network.

`known_models.json` has one line a model: the numbers of its `config.json` on huggingface.co that matter here
and are not the defaults of transformers, and its published number of parameters, by which the tests check the
line. The numbers were compared on 2026-11-18 with the table of litgpt (`litgpt/config.py`, commit 0006c97);
those of models that it does not have are checked by the number of parameters alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARED = "they were compared with litgpt's table on 2026-11-18, or checked by the number of parameters"


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model by its short name, its name on the hub, and others that people use for it."""

    name: str
    hub: str
    also: list[str]
    parameters: int
    config: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that is understood."""
        return (self.name, self.hub, self.hub.partition("/")[2], *self.also)


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """All of them, in the order of the file."""
    text = Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
    return tuple(KnownModel(**line) for line in json.loads(text))


def known_model(text: str) -> KnownModel | None:
    """The model with this name; case, dots, hyphens and underscores do not matter."""
    return _by_plain_name().get(_plain(text))


@functools.cache
def _by_plain_name() -> dict[str, KnownModel]:
    return {_plain(name): model for model in known_models() for name in model.names}


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name).lower()
