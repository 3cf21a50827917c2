"""The interface of a trainer, and the built-in trainers.

    load_trainer("DPSGDTrainer") ─► the class ─► class(model, settings) ─► step(batch) ─► loss

A trainer is any class with the two methods of `Trainer` and the attribute `private`; a custom one is named
`package.module:Class`. It must train the given model in place: the gradient check (`gradient_check.py`)
compares that model's parameters before and after a step. A new trainer here is one class and one line in
`TRAINERS`.

Nothing here imports torch, so that a supervisor can read the names and start at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ...errors import TruemfuError, UsageError, brief, text_of
from ...records import TrainerSettings as TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

OPTIMIZERS = ("sgd", "adamw")


class Unsupported(TruemfuError):
    """This trainer cannot train this model (or not in this way); the message states why."""


class Trainer(Protocol):
    """Trains a model, one step at a time."""

    private: bool
    """Whether it clips the gradient of each sample."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None: ...

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One whole optimizer step; the mean loss, on the device, without synchronising."""


TRAINERS: Mapping[str, str] = MappingProxyType(
    {
        "StandardTrainer": "truemfu.sweep.trainers.standard:StandardTrainer",
        "DPSGDTrainer": "truemfu.sweep.trainers.private:DPSGDTrainer",
        "DPGhostClippingTrainer": "truemfu.sweep.trainers.private:DPGhostClippingTrainer",
        "DPFastGradientClippingTrainer": "truemfu.sweep.trainers.private:DPFastGradientClippingTrainer",
        "DPBookKeepingTrainer": "truemfu.sweep.trainers.book_keeping:DPBookKeepingTrainer",
    }
)

DEFAULT_TRAINERS = (
    "StandardTrainer",
    "DPSGDTrainer",
    "DPGhostClippingTrainer",
    "DPFastGradientClippingTrainer",
)
"""Those of a sweep that names none."""

NEEDS_OPACUS = frozenset(name for name, home in TRAINERS.items() if ".private:" in home)

PRIVATE = NEEDS_OPACUS | {"DPBookKeepingTrainer"}
"""Built-in trainers that clip the gradient of each sample."""


def load_trainer(name: str) -> type[Trainer]:
    """The trainer of this name, or the class at `package.module:Class`; `config.py` has checked the form."""
    home = TRAINERS.get(name, name)
    module_name, _, class_name = home.partition(":")
    try:
        found = attrgetter(class_name)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "opacus":
            raise UsageError(f'{name} needs Opacus: pip install "truemfu[dp]"') from error
        raise UsageError(f"cannot import {brief(home)}: {text_of(error)}") from error
    if not isinstance(found, type) or not callable(getattr(found, "step", None)):
        raise UsageError(f"{name!r} is not a trainer: expected a class with step(batch)")
    if not isinstance(getattr(found, "private", None), bool):
        raise UsageError(
            f"{name!r} is not a trainer: expected a class attribute `private`, True if it clips the "
            "gradient of each sample"
        )
    return found
