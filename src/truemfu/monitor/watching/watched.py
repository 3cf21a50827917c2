"""Which modules a monitor watches: one model, several by name, or those that a training step calls.

    attach(model)                 ─► the model
    attach([generator, critic])   ─► each, named after its class; a mapping gives the names
    a model without `forward`     ─► its outermost submodules that have a forward and parameters
    attach(CalledModels(root))    ─► the outermost modules that are called, found at their calls

Every forward pass of a watched module has a slot: the module, and whether it is trained or completely frozen
at that moment (a GAN freezes its discriminator while the generator learns). Each slot has its own model state
and counts.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ...errors import UsageError
from ...flops import is_compiled_wrapper, unwrap
from ...torch_private.watching import backward_number, compiled_call

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
        """The module, while other code references it."""
        return self.reference()


class WatchedModels:
    """The modules a monitor watches, and the slots of their forward passes."""

    def __init__(self, models: Models) -> None:
        named = named_models(models)
        self._set_roots(named)
        self.modules: list[Watched] = []
        for name, model in named.items():
            for part in _parts(model):
                self.modules.append(Watched(weakref.ref(part), name if len(named) > 1 else None))
        self.is_one = len(named) == len(self.modules) == 1 and self.modules[0].module is self.first
        """Whether one module gets every complete batch, or none is watched."""
        _refuse_overlap([found for watched in self.modules if (found := watched.module) is not None])

    def _set_roots(self, named: Mapping[str, nn.Module]) -> None:
        self._roots = tuple(map(weakref.ref, named.values()))
        self._names = list(named)

    def candidates(self) -> Iterable[Watched]:
        """The modules that need a hook."""
        return self.modules

    @property
    def roots(self) -> list[nn.Module]:
        """The given models that other code still references."""
        return [found for root in self._roots if (found := root()) is not None]

    @property
    def first(self) -> nn.Module | None:
        """The first model that was given."""
        return self._roots[0]() if self._roots else None

    def are(self, models: Models) -> bool:
        """Whether these are the watched models, under the same names."""
        named = named_models(models)
        return self._names == list(named) and [root() for root in self._roots] == list(named.values())

    def module_of(self, slot: int) -> nn.Module | None:
        """The module whose forward passes have this slot, while other code references it."""
        place = 0 if self.is_one else slot // _CONDITIONS
        return self.modules[place].module if place < len(self.modules) else None

    def slot(self, watched: Watched) -> int:
        """The slot of a forward pass of this module at this moment."""
        if self.is_one:
            return 0
        module = watched.module
        is_frozen = module is not None and not any(p.requires_grad for p in module.parameters())
        return _CONDITIONS * self.modules.index(watched) + is_frozen


class NoModels(WatchedModels):
    """Nothing is watched yet: the batches are those that are passed to `observe`."""

    def __init__(self) -> None:
        self._set_roots({})
        self.modules = []
        self.is_one = True


class CalledModels(WatchedModels):
    """`roots` and the modules in them that a training step calls, in the order of their first calls.

        root(x), which calls its parts inside      ──► the root is watched
        root.model(x)                              ──► model is, whatever forward the root has
        root(x), then root.head(y) outside of it   ──► both are: their forward passes are not nested

    For a module whose training code is a method of its own, such as a LightningModule. The outermost calls
    are noted, each with its own batch; a call inside another one belongs to that one.

    `names` are those of the roots, by default of their classes.
    `are_separate`: the parts of one root are models of their own, which are frozen separately, such as a
    generator and its critic. The root is not watched then, and each part has an MFU under its name in the
    root. A call of the root is not noted where `is_other_call`: something else than its forward runs.
    """

    def __init__(
        self,
        *roots: nn.Module,
        names: Sequence[str] = (),
        are_separate: bool = False,
        is_other_call: Callable[[nn.Module], bool] = lambda root: False,
    ) -> None:
        self._set_roots(dict(zip(names, roots, strict=True)) if names else named_models(list(roots)))
        self.modules = []
        self.is_one = False
        self._are_separate, self._is_other_call = are_separate, is_other_call
        self._nested: set[Watched] = set()
        self._current: Watched | None = None
        """The module whose forward pass runs."""

    def candidates(self) -> Iterator[Watched]:
        """Every module that may be called; those that were found before are the same objects again."""
        found = {watched.module: watched for watched in self.modules}
        for root_name, reference in zip(self._names, self._roots, strict=True):
            root = reference()
            for name, module in () if root is None else _callable_modules(root):
                if module is root and self._are_separate:
                    continue
                own_name = name if self._are_separate else root_name if len(self._roots) > 1 else None
                yield found.get(module) or Watched(weakref.ref(module), own_name)

    def begins(self, watched: Watched, *, is_training: bool) -> bool:
        """A forward pass begins; whether it is to be noted."""
        root = self.first
        if root is None or (watched.module is root and self._is_other_call(root)):
            return False
        is_found = watched in self.modules
        if self._current is not None:
            if not is_found:
                self._nested.add(watched)
            return False
        if is_training and not is_found:
            if backward_number() != -1:  # a layer is recomputed; the module that it belongs to has been seen
                self._nested.add(watched)
                return False
            self.modules.append(watched)
            self.is_one = len(self._roots) == len(self.modules) == 1 and watched.module is root
        self._current = watched
        return True

    def ends(self, watched: Watched) -> bool:
        """A forward pass ends; whether it was an outermost one."""
        is_outermost = self._current is watched
        if is_outermost:
            self._current = None
        return is_outermost

    def take_nested(self) -> set[Watched]:
        """After a step: the modules that were called inside others, which need not be watched."""
        self._current = None
        nested, self._nested = self._nested, set()
        return nested


def is_of_first_module(slot: int, slots: Iterable[int]) -> bool:
    """Whether a slot belongs to the first module, in the order given, among those of `slots`."""
    return slot // _CONDITIONS == min(slots) // _CONDITIONS


def named_models(models: Models) -> dict[str, nn.Module]:
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
            raise UsageError("the models' class names clash: give a mapping of names to models")
    else:
        raise UsageError(f"{_EXPECTED}; got {type(models).__name__}")
    wrong = [type(model).__name__ for model in found.values() if not isinstance(model, nn.Module)]
    if wrong or not found:
        raise UsageError(f"{_EXPECTED}; got {', '.join(wrong) or 'an empty one'}")
    return found


def _parts(model: nn.Module) -> list[nn.Module]:
    """The modules to watch: the model itself, or its submodules if it has no forward."""
    if has_forward(model):
        return [model]
    parts = list(dict.fromkeys(_outermost(model)))
    if not parts:
        raise UsageError(
            f"{type(model).__name__} has no forward and no submodule with a forward and parameters: "
            "attach the modules that your training step calls"
        )
    return parts


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if not has_forward(child):
            yield from _outermost(child)
        elif next(child.parameters(), None) is not None:  # a loss or a metric is not watched
            yield child


def has_forward(model: nn.Module) -> bool:
    inner = unwrap(model)
    found = inspect.getattr_static(type(inner), "forward", None)  # reading a scripted model's raises
    return "forward" in vars(inner) or found is not nn.Module.forward


def _callable_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with a forward and parameters by name, each once, outside of compiled ones."""
    done: set[nn.Module] = set()
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if module in done:
            continue
        done.add(module)
        if has_forward(module) and next(module.parameters(), None) is not None:
            yield name, module
        if not is_compiled_wrapper(module) and compiled_call(module) is None:
            waiting += [
                (f"{name}.{child}" if name else child, inner) for child, inner in module.named_children()
            ]


def _refuse_overlap(modules: Sequence[nn.Module]) -> None:
    """Raise if a module is part of another: its work would be counted twice."""
    for module in modules:
        for other in modules:
            if other is not module and any(inner is module for inner in other.modules()):
                raise UsageError(
                    f"{type(module).__name__} is part of {type(other).__name__}, which is also watched: its "
                    "work would be counted twice; attach modules that do not contain each other"
                )
    if len(set(map(id, modules))) < len(modules):
        raise UsageError("the same model was given twice: its work would be counted twice")
