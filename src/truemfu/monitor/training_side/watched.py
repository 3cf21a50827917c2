"""Which models a monitor watches: one, several by name, or the parts of one that has no forward of its own.

    attach(model)                 ─► the model
    attach([generator, critic])   ─► each, named after its class; a mapping gives the names
    a model without `forward`     ─► its parts: the outermost modules that have one, and parameters

Every forward pass of a watched module is filed under a slot: the module, and whether any of it is trained or
all of it frozen at that moment (a GAN freezes its discriminator while the generator learns). A model's state
is taken and counted for each slot.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ...errors import UsageError
from ...flops import unwrap

_CONDITIONS = 2
"""Trained or frozen."""
_EXPECTED = "attach takes the model, a torch.nn.Module, or several as a list or a mapping of names to models"
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


@dataclass(frozen=True, eq=False)
class Watched:
    """One module whose forward passes are noted."""

    reference: weakref.ref[nn.Module]
    name: str | None
    """Of the model it belongs to; None where only one is watched."""

    @property
    def module(self) -> nn.Module | None:
        """The module, as long as somebody else holds it."""
        return self.reference()


class WatchedModels:
    """The modules a monitor watches, and the slots their forward passes are filed under."""

    def __init__(self, models: Models) -> None:
        named = _named(models)
        self._roots = tuple(map(weakref.ref, named.values()))
        self._names = list(named)
        self.modules: list[Watched] = []
        for name, model in named.items():
            for part in _parts(model):
                self.modules.append(Watched(weakref.ref(part), name if len(named) > 1 else None))
        self.is_one = len(named) == len(self.modules) == 1 and self.modules[0].module is self.first
        """Whether a single module sees every batch whole."""
        _refuse_overlap([found for watched in self.modules if (found := watched.module) is not None])

    @property
    def roots(self) -> list[nn.Module]:
        """The models that were given, as far as somebody else still holds them."""
        return [found for root in self._roots if (found := root()) is not None]

    @property
    def first(self) -> nn.Module | None:
        """The first model that was given."""
        return self._roots[0]()

    def are(self, models: Models) -> bool:
        """Whether these are the models that are watched, under these names."""
        named = _named(models)
        return self._names == list(named) and [root() for root in self._roots] == list(named.values())

    def slot(self, watched: Watched) -> int:
        """The number under which a forward pass of this module is filed now."""
        if self.is_one:
            return 0
        module = watched.module
        is_frozen = module is not None and not any(p.requires_grad for p in module.parameters())
        return _CONDITIONS * self.modules.index(watched) + is_frozen


def is_of_first_module(slot: int, slots: Iterable[int]) -> bool:
    """Whether a slot belongs to the module that comes first, as they were given, among those of `slots`."""
    return slot // _CONDITIONS == min(slots) // _CONDITIONS


def _named(models: Models) -> dict[str, nn.Module]:
    """The models by name: the caller's, or the names of their classes."""
    if isinstance(models, nn.Module):
        return {type(models).__name__: models}
    if isinstance(models, Mapping):
        found = {str(name): model for name, model in models.items()}
    elif isinstance(models, (list, tuple)):
        names = [type(unwrap(m)).__name__ if isinstance(m, nn.Module) else str(m) for m in models]
        repeated = {name for name in names if names.count(name) > 1}
        found = {
            f"{name}_{number}" if name in repeated else name: model
            for number, (name, model) in enumerate(zip(names, models, strict=True))
        }
        if len(found) < len(names):
            raise UsageError("the names of the models' classes clash: give a mapping of names to models")
    else:
        raise UsageError(f"{_EXPECTED}; got {type(models).__name__}")
    wrong = [type(model).__name__ for model in found.values() if not isinstance(model, nn.Module)]
    if wrong or not found:
        raise UsageError(f"{_EXPECTED}; got {', '.join(wrong) or 'an empty one'}")
    return found


def _parts(model: nn.Module) -> list[nn.Module]:
    """What of a model is called: itself, or the modules in it where it has no forward."""
    if _has_forward(model):
        return [model]
    parts = list(dict.fromkeys(_outermost(model)))
    if not parts:
        raise UsageError(
            f"{type(model).__name__} has no forward and holds no module with parameters that has one: "
            "attach the modules that your training step calls"
        )
    return parts


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if not _has_forward(child):
            yield from _outermost(child)
        elif next(child.parameters(), None) is not None:  # a loss or a metric is not watched
            yield child


def _has_forward(model: nn.Module) -> bool:
    inner = unwrap(model)
    found = inspect.getattr_static(type(inner), "forward", None)  # a scripted one's raises when it is read
    return "forward" in vars(inner) or found is not nn.Module.forward


def _refuse_overlap(modules: Sequence[nn.Module]) -> None:
    """Work of a module that is part of another would be counted twice."""
    for module in modules:
        for other in modules:
            if other is not module and any(inner is module for inner in other.modules()):
                raise UsageError(
                    f"{type(module).__name__} is part of {type(other).__name__}, which is watched too: its "
                    "work would be counted twice; attach modules that do not contain each other"
                )
    if len(set(map(id, modules))) < len(modules):
        raise UsageError("the same model was given twice: its work would be counted twice")
