"""Calls of `generate` of transformers on the training thread: their forward passes, the cache, and marks.

    generate ──► prefill ──► decode, a pass for each token ──► returned
      mark                  mark                              mark

`GenerationMixin.generate` is replaced while a run lasts, and the model has a hook while it generates. Only
sizes are noted, and no tensor is kept. Where `generate` compiles the model its passes are not seen.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import one_line
from ...torch_private.dispatch import hidden_from_modes
from ...torch_private.replacing import Listeners
from ..timing.between_steps import BetweenSteps
from ..timing.clock import StepClock
from ..watching.generation import CacheLayer, Generation, Pass, Weights
from .watch import StepWatch

_HOME, _OWNER = "transformers.generation.utils", "GenerationMixin"


class GenerationWatch:
    """Lives on the training thread; calls of other threads are ignored, and those inside another call."""

    def __init__(
        self, watch: StepWatch, clock: StepClock, between: BetweenSteps, notice: Callable[..., None]
    ) -> None:
        self._watch, self._clock, self._between, self._notice = watch, clock, between, notice
        self._current: Generation | None = None
        self._cache: Any = None
        self._number = 0
        self._models: weakref.WeakKeyDictionary[nn.Module, tuple[int, Weights]] = weakref.WeakKeyDictionary()
        owner = getattr(sys.modules.get(_HOME), _OWNER, None)
        self.leave = (lambda: None) if owner is None else _listeners.add(self, owner, "generate")

    def begins(self, model: Any) -> Callable[[Any], None] | None:
        """A call begins: what is to be called with its result, or None after an error; None to ignore it."""
        if threading.get_ident() != self._between.thread or torch.compiler.is_compiling():
            return None
        if self._current is not None:
            self._assistant_begins(self._current)
            return None
        if model not in self._models:
            self._number += 1
            self._models[model] = self._number, _weights(model)
        number, weights = self._models[model]
        with hidden_from_modes():
            mark = self._clock.moment()
        handle = model.register_forward_pre_hook(self._pass_begins, with_kwargs=True)
        current = self._current = Generation(number, mark, weights, self._between.is_paused)
        self._watch.signals.is_generating = True

        def ended(result: Any) -> None:
            handle.remove()
            cache, self._cache, self._current = self._cache, None, None
            self._watch.signals.is_generating = False
            if self._watch.observer is not None:
                self._watch.observer.generation_ends()
            with hidden_from_modes():
                current.end = self._clock.moment()
            sequences = getattr(result, "sequences", result)
            if isinstance(sequences, torch.Tensor) and current.prompt is not None:
                current.tokens = sequences.shape[0] * (sequences.shape[1] - current.prompt)
            current.cache = _layers(cache)
            self._watch.signals.generations.append(current)

        return ended

    def failed(self, error: Exception) -> None:
        """A part of this raised, which is not for the training: the call has no figures, or some unknown."""
        self._notice(f"a call of generate could not be followed: {one_line(error)}", about="generate")

    def _assistant_begins(self, outer: Generation) -> None:
        """A call begins inside another one: what it runs belongs to no pass of that."""
        outer.has_assistant = True
        if self._watch.observer is not None:
            self._watch.observer.generation_ends()

    def _pass_begins(self, model: Any, args: Any, kwargs: Any) -> None:
        current = self._current
        if current is None or torch.compiler.is_compiling():
            return
        try:
            ids = kwargs.get("input_ids")
            rows, queries = (kwargs["inputs_embeds"] if ids is None else ids).shape[:2]
            self._cache = kwargs.get("past_key_values")
            cached = 0
            if self._cache is not None:
                last = current.passes[-1] if current.passes else None
                cached = _cached(self._cache) if last is None else last.end
            if current.decode is None and queries == 1 and current.passes:
                with hidden_from_modes():
                    current.decode = self._clock.moment()
            if not current.passes:
                current.prompt = 0 if ids is None else cached + queries
            observer = None if current.is_paused else self._watch.observer
            number = 0 if observer is None else observer.generation_pass_begins()
            found = Pass(number, rows, queries, cached)
            merged = current.passes[-1].followed_by(found) if len(current.passes) > 1 else None
            current.passes[-1:] = [merged] if merged is not None else [*current.passes[-1:], found]
        except Exception as error:
            current.prompt = None  # it was not seen as a whole
            self.failed(error)


def _tell(
    listeners: Iterable[GenerationWatch], original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    ends: list[tuple[GenerationWatch, Callable[[Any], None]]] = []
    for listener in listeners:
        try:
            if (ended := listener.begins(model)) is not None:
                ends.append((listener, ended))
        except Exception as error:
            listener.failed(error)
    result = None
    try:
        result = original(model, *args, **kwargs)
    finally:
        for listener, ended in ends:
            try:
                ended(result)
            except Exception as error:
                listener.failed(error)
    return result


_listeners: Listeners[GenerationWatch] = Listeners(_tell)


def _weights(model: nn.Module) -> Weights:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {
        id(p) for m in model.modules() if not isinstance(m, nn.Embedding) for p in m._parameters.values()
    }
    read = [p for p in model.parameters() if id(p) not in tables]
    return Weights(
        sum(p.numel() * p.element_size() for p in read), sum(p.numel() for p in read if p.dim() > 1)
    )


def _cached(cache: Any) -> int:
    """The positions in a cache that `generate` was given; 0 in a new one."""
    layers = getattr(cache, "layers", ())
    keys = getattr(layers[0], "keys", None) if layers else None
    return 0 if keys is None or not keys.numel() else int(keys.shape[-2])


def _layers(cache: Any) -> Mapping[CacheLayer, int] | None:
    """How many layers of each kind a cache has; None if they are not of the usual kind."""
    found: Counter[CacheLayer] = Counter()
    for layer in getattr(cache, "layers", ()):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or keys.dim() != 4:
            return None
        positions = keys.shape[-2]
        if not positions:
            return None
        found[CacheLayer(positions, (keys.nbytes + values.nbytes) // positions)] += 1
    return found or None
