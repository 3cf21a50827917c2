"""The modules that a training step calls, found at their calls.

    root(x), which calls its parts inside      ──► the root is watched
    root.model(x)                              ──► model is, whatever forward the root has
    root(x), then root.head(y) outside of it   ──► both are: their forward passes are not nested

For a module whose training code is a method of its own, such as a LightningModule. The outermost calls are
noted, each with its own batch; a call inside another one belongs to that one. Every module is watched until
the first step has ended. Those that were called inside others are left alone from then on.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

from torch import nn

from ...flops import is_compiled_wrapper
from ...torch_private.watching import backward_number, compiled_call
from .attachment import Attachment
from .batch_notes import Batch
from .watched import Watched, WatchedModels, has_forward, named_models

Seen = Callable[[Watched, Batch | None], bool]


class CalledModels(WatchedModels):
    """`roots` and the modules in them that are called; in the order of their first calls.

    `are_separate`: the parts of one root are models of their own, which are frozen separately, such as a
    generator and its critic. The root is not watched then, and each part has an MFU under its name in the
    root. A call of the root is not noted where `is_other_call`: something else than its forward runs.
    """

    def __init__(
        self,
        *roots: nn.Module,
        are_separate: bool = False,
        is_other_call: Callable[[nn.Module], bool] = lambda root: False,
    ) -> None:
        named = named_models(list(roots))
        self._roots = tuple(map(weakref.ref, named.values()))
        self._names = list(named)
        self.modules: list[Watched] = []
        self.is_one = False
        self._are_separate, self._is_other_call = are_separate, is_other_call
        self._attachments: dict[str, Attachment] = {}
        self._found: set[str] = set()
        self._nested: set[str] = set()
        self._current: str | None = None
        """The module whose forward pass runs."""

    def watch_calls(self, seen: Seen, evaluated: Callable[[], bool], ended: Callable[[], None]) -> None:
        """Add hooks to every module that may be called."""
        for root_name, reference in zip(self._names, self._roots, strict=True):
            root = reference()
            for name, module in () if root is None else _callable_modules(root):
                if module is root and self._are_separate:
                    continue
                own_name = name if self._are_separate else root_name if len(self._roots) > 1 else None
                watched = Watched(weakref.ref(module), own_name)
                key = f"{root_name}.{name}"
                begun = functools.partial(self._begun, key, watched, seen, evaluated)
                with contextlib.suppress(Exception):  # a scripted module takes no hooks; what calls it may
                    self._attachments[key] = Attachment(
                        module,
                        begun,
                        functools.partial(begun, None, is_training=False),
                        functools.partial(self._ended, key, ended),
                        ends_always=True,
                    )

    def leave_calls(self) -> None:
        """Remove all hooks."""
        for attachment in self._attachments.values():
            attachment.remove()
        self._attachments.clear()

    def settle(self) -> bool:
        """After a step: remove the hooks on modules called inside others; whether there are more to find."""
        self._current = None
        for name in self._nested & self._attachments.keys():
            self._attachments.pop(name).remove()
        self._nested.clear()
        return len(self._attachments) > len(self._found)

    @property
    def attachments(self) -> list[Attachment]:
        """The hooks that there are."""
        return list(self._attachments.values())

    def _begun(
        self,
        name: str,
        watched: Watched,
        seen: Seen,
        evaluated: Callable[[], bool],
        batch: Batch | None,
        *,
        is_training: bool = True,
    ) -> bool:
        root = self.first
        if root is None or (watched.module is root and self._is_other_call(root)):
            return False
        if self._current is not None:
            if name not in self._found:
                self._nested.add(name)
            return False
        if is_training and name not in self._found:
            if backward_number() != -1:  # a layer is recomputed; the module that it belongs to has been seen
                self._nested.add(name)
                return False
            self._found.add(name)
            self.modules.append(watched)
            self.is_one = len(self._roots) == len(self.modules) == 1 and watched.module is root
        self._current = name
        return seen(watched, batch) if is_training else evaluated()

    def _ended(self, name: str, ended: Callable[[], None]) -> None:
        if self._current == name:
            self._current = None
            ended()


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
