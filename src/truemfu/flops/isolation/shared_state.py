"""Restores values that a model's code shares with the training outside the model: globals, class attributes,
caches.

A count runs a shadow of the model, but with the model's own code. A cache of masks, a list of auxiliary
losses or a counter on a class would keep what the count stored there: fake tensors, or tensors whose graph is
freed. So the locations that the code can reach are saved before a count and restored after it.

    lru_cache and cache            cleared if the count added entries other than plain values
    global and closed-over names   bound to the same objects again
    attributes of classes          the same
    containers and plain objects   the old content restored in the same object

Entries are compared by identity; no code of the model runs. New functions, classes and modules are kept: they
come from imports inside a forward, which happen only once. If another thread is running, a change may be its
own: a location is then restored only if it holds tensors of a count or if only the model's code writes to it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...torch_private.dispatch import FakeTensor
from ..identity.code_names import cells_of, globals_in, names_in, stored_attributes_in, stored_globals_in
from ..identity.code_packages import is_read
from ..identity.model_code import ModelCode, is_read_class
from ..shadow.shadow import CACHE, is_plain_object
from ..wrappers import module_of
from .random_states import is_alone

MAX_ENTRIES = 10_000
"""The most entries saved of a container, including nested ones."""

_CONTAINERS = frozenset(
    (
        dict,
        list,
        set,
        collections.deque,
        collections.OrderedDict,
        collections.defaultdict,
        collections.Counter,
    )
)
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
    functools.partial, CACHE, staticmethod, classmethod, property,
)  # fmt: skip
_VALUES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)
_OF_CACHES = frozenset({"object", "_lru_list_elem"})
"""Types of an lru_cache's internal objects."""
_MISSING = object()


@contextlib.contextmanager
def untouched_globals(model: nn.Module, *also: Any) -> Iterator[None]:
    """Restore afterwards the values that the code of the model and of `also` shares with the training."""
    saved = _Saved(_locations_of(model, *also))
    try:
        yield
    finally:
        saved.restore()


class _Locations:
    """The locations that a model's code can write to; holds no strong reference to the model."""

    def __init__(self, code: ModelCode) -> None:
        self.functions = [weakref.ref(function) for function in code.functions]
        self.classes = [weakref.ref(cls) for cls in code.classes if is_read_class(cls)]
        self.caches = [
            weakref.ref(cache)
            for cache in code.seen
            if isinstance(cache, CACHE) and is_read(cache.__module__)
        ]
        self.names: list[tuple[weakref.ref[Any], str]] = []
        """Global names to save: with a function that has them among its globals, or with their module."""
        self.written: set[tuple[int, str]] = set()
        """Those of them that the code rebinds, by the id of the namespace."""
        self.stored: set[str] = set()
        """Attributes that the code writes, on any object."""
        seen: set[tuple[int, str]] = set()
        for function in code.functions:
            self._add_names_of(function, code, seen)

    def _add_names_of(
        self, function: types.FunctionType, code: ModelCode, seen: set[tuple[int, str]]
    ) -> None:
        known = function.__globals__
        bound = stored_globals_in(function.__code__)
        stored = stored_attributes_in(function.__code__)
        self.stored.update(stored)
        self.written.update((id(known), name) for name in bound)
        found: list[tuple[Any, dict[str, Any], str]] = [(function, known, name) for name in bound]
        found += [(function, known, name) for name in globals_in(function.__code__) if _is_data(known, name)]
        for _, module in code.references[id(function)]:
            if isinstance(module, types.ModuleType) and is_read(module.__name__):
                own = vars(module)
                self.written.update((id(own), name) for name in stored if name in own)
                names = names_in(function.__code__)
                found += [(module, own, name) for name in names if _is_data(own, name)]
        for home, namespace, name in found:
            if (id(namespace), name) not in seen:
                seen.add((id(namespace), name))
                self.names.append((weakref.ref(home), name))


def _is_data(namespace: dict[str, Any], name: str) -> bool:
    """Whether the value of a global name can be modified or replaced."""
    return name in namespace and not isinstance(namespace[name], _CODE)


_last: tuple[tuple[Callable[[], Any], ...], _Locations] | None = None
"""Cached because one calibration counts the same model several times, and the walk takes longest."""


def _locations_of(*roots: Any) -> _Locations:
    global _last
    known = _last
    if known is not None and _refers_to(known[0], roots):
        return known[1]
    locations = _Locations(ModelCode(*roots))
    _last = tuple(map(_weakly, roots)), locations
    return locations


def _refers_to(references: tuple[Callable[[], Any], ...], roots: tuple[Any, ...]) -> bool:
    return len(references) == len(roots) and all(
        r() is root for r, root in zip(references, roots, strict=True)
    )


def _weakly(value: Any) -> Callable[[], Any]:
    """A weak reference; for an object that does not support them, a function that never returns it."""
    if value is None:
        return _nothing
    try:
        return weakref.ref(value)
    except TypeError:
        return object


def _nothing() -> None:
    return None


class _Saved:
    """The saved content of a model's shared locations, as it was before a count."""

    def __init__(self, locations: _Locations) -> None:
        self._locations = locations
        self._is_plain: dict[type, bool] = {}
        self._contents: dict[int, tuple[Any, list[Any]]] = {}
        self._modules = set(sys.modules)
        self._misses = [(c, c.cache_info().misses) for c in _alive(locations.caches)]
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._attributes = [(cls, dict(vars(cls))) for cls in _alive(locations.classes)]
        roots: list[Any] = []
        for home, name in locations.names:
            owner = home()
            if owner is not None:
                namespace = owner.__globals__ if isinstance(owner, types.FunctionType) else vars(owner)
                self._globals.append((namespace, name, namespace.get(name, _MISSING)))
                roots.append(self._globals[-1][2])
        for function in _alive(locations.functions):
            roots += (function.__dict__, function.__defaults__, function.__kwdefaults__)
            if function.__closure__:
                self._cells += zip(function.__closure__, map(_content_of, function.__closure__), strict=True)
                roots += (value for _, value in cells_of(function))
        for _, attributes in self._attributes:
            roots += (value for name, value in attributes.items() if not _is_special(name))
        for root in roots:
            self._save(root)

    def _save(self, root: Any) -> None:
        """Save the content of a container or plain object, and of those in it."""
        waiting, room = [root], MAX_ENTRIES
        while waiting:
            value = waiting.pop()
            container = value if type(value) in _CONTAINERS else self._attributes_of(value)
            if container is not None:
                room -= len(container)
                if room < 0:
                    return
                if id(container) not in self._contents:
                    entries = _entries(container)
                    self._contents[id(container)] = container, entries
                    waiting += (_value(container, entry) for entry in entries)
            elif type(value) is tuple and len(value) < room:
                room -= len(value)
                waiting += value

    def _attributes_of(self, value: Any) -> dict[str, Any] | None:
        kind = type(value)
        if kind not in self._is_plain:
            self._is_plain[kind] = not issubclass(kind, (*_VALUES, *_CODE, tuple, torch.Tensor)) and (
                is_plain_object(kind) and is_read(module_of(kind))
            )
        return getattr(value, "__dict__", None) if self._is_plain[kind] else None

    def restore(self) -> None:
        """Restore what the count changed."""
        alone = is_alone()
        imported = any(map(is_read, sys.modules.keys() - self._modules))
        is_ours = alone and not imported
        for cache, misses in self._misses:
            if cache.cache_info().misses != misses and not _holds_plain_values(cache):
                cache.cache_clear()
        for namespace, name, old in self._globals:
            now = namespace.get(name, _MISSING)
            written = (id(namespace), name) in self._locations.written
            if _is_changed(old, now) and (written or is_ours or _is_of_a_count(now)):
                _restore_name(namespace.__setitem__, namespace.__delitem__, name, old)
        for cell, old in self._cells:
            now = _content_of(cell)
            if _is_changed(old, now) and (is_ours or _is_of_a_count(now)):
                cell.cell_contents = old
        for cls, before in self._attributes:
            for name in [*before, *(vars(cls).keys() - before.keys())]:
                old, now = before.get(name, _MISSING), vars(cls).get(name, _MISSING)
                if not _is_changed(old, now) or _is_special(name):
                    continue
                if name in self._locations.stored or is_ours or _is_of_a_count(now):
                    put = functools.partial(type.__setattr__, cls)
                    _restore_name(put, functools.partial(type.__delattr__, cls), name, old)
        for container, old_entries in self._contents.values():
            added = _added(container, old_entries)
            if added is None or (added and all(isinstance(value, _CODE) for value in added)):
                continue
            if is_ours or any(map(_is_of_a_count, added)):
                _fill(container, old_entries)


def _alive(references: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    return (value for value in (reference() for reference in references) if value is not None)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _is_changed(old: Any, now: Any) -> bool:
    """Whether a name was rebound, other than to code from an import."""
    return old is not now and not isinstance(now, _CODE) and not (old is _MISSING and now is _MISSING)


def _restore_name(put: Callable[[str, Any], Any], delete: Callable[[str], Any], name: str, old: Any) -> None:
    if old is _MISSING:
        delete(name)
    else:
        put(name, old)


def _entries(container: Any) -> list[Any]:
    return list(dict.items(container)) if isinstance(container, dict) else list(container)


def _value(container: Any, entry: Any) -> Any:
    return entry[1] if isinstance(container, dict) else entry


def _key(container: Any, entry: Any) -> Any:
    return (id(entry[0]), id(entry[1])) if isinstance(container, dict) else id(entry)


def _added(container: Any, old_entries: list[Any]) -> list[Any] | None:
    """Values that a container has now and did not have before; None if its content is the same."""
    entries = _entries(container)
    keys = [_key(container, entry) for entry in entries]
    old_keys = [_key(container, entry) for entry in old_entries]
    if keys == old_keys or (isinstance(container, set) and set(keys) == set(old_keys)):
        return None
    known = set(old_keys)
    return [_value(container, e) for e, key in zip(entries, keys, strict=True) if key not in known]


def _fill(container: Any, entries: list[Any]) -> None:
    if isinstance(container, list):
        container[:] = entries
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in entries:
            dict.__setitem__(container, key, value)
    elif isinstance(container, set):
        container.update(entries)
    else:
        container.extend(entries)


def _is_of_a_count(root: Any) -> bool:
    """Whether a value is or contains something only a count makes: a fake tensor, or one with a graph."""
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_ENTRIES:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (*_VALUES, *_CODE)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) or value.grad_fn is not None:
                return True
        elif isinstance(value, nn.Module):
            waiting += (*value.parameters(), *value.buffers())
        elif isinstance(value, dict):
            waiting += dict.values(value)
        elif isinstance(value, (list, tuple, set, collections.deque)):
            waiting += value
        elif is_plain_object(type(value)):
            waiting += getattr(value, "__dict__", {}).values()
    return False


def _holds_plain_values(cache: Any) -> bool:
    """Whether everything in a cache is the same in a count and in training: numbers, names, code."""
    own = {id(cache.__wrapped__), id(cache.__dict__), id(type(cache))}
    waiting = [value for value in gc.get_referents(cache) if id(value) not in own]
    seen = 0
    while waiting and seen < MAX_ENTRIES:
        value = waiting.pop()
        seen += 1
        if isinstance(value, (tuple, frozenset)) or type(value) is list:
            waiting += value
        elif type(value) is dict:  # the cache's own; in a bounded cache it holds links, which are listed too
            waiting += value.values()
        elif not isinstance(value, (*_VALUES, *_CODE)) and type(value).__name__ not in _OF_CACHES:
            return False
    return not waiting
