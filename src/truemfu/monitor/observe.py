"""What each forward pass was given, noted on the training thread in microseconds.

A note keeps no tensor of the batch alive. Batches of one shape share a `Template`: names, shapes and dtypes
as tensors without data, and the integers of the first such batch, which a count may look at (placeholders of
images, special tokens). What decides the work of a batch beyond its shape (packed documents, image grids) is
copied to the host for each batch, asynchronously.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..flops.batch import CUMULATIVE, GRIDS
from ..flops.host_copy import HostCopy, start_host_copy
from ..flops.shadow import unwrap
from ..flops.surroundings import AutocastState, autocast_state
from .host_values import HostValues, Slot

_MAX_TEMPLATES = 1024
_MAX_VALUE_BYTES = 64 << 20
_MAX_NOTES = 4096
_VALUE_KEYS = frozenset({*CUMULATIVE, *GRIDS, "position_ids"})
Batch = Mapping[Any, Any]
"""A batch by name, or by place for a forward that takes any number of positional arguments."""
_PLAIN = (int, float, str, bool, type(None))


@dataclass(eq=False)
class Template:
    """Everything batches of one shape have in common."""

    batch: dict[str | int, Any]
    """Names (or places) to tensors without data, to host copies of the first batch, or to plain values."""
    value_keys: tuple[str, ...]
    mask_key: str | None
    samples: int | None
    tokens: int | None
    autocast: AutocastState
    values_ready: bool = field(default=False)

    def example(self, values: Mapping[str, HostCopy]) -> Any:
        """A batch to count, with these values, as the model takes it; None while a copy is under way."""
        if not self.values_ready:
            copies = {k: v for k, v in self.batch.items() if isinstance(v, HostCopy)}
            if not all(copy.ready() for copy in copies.values()):
                return None
            self.batch.update({k: copy.get() for k, copy in copies.items()})
            self.values_ready = True
        if 0 in self.batch:
            return tuple(self.batch.values())
        if not values:
            return self.batch
        if not all(copy.ready() for copy in values.values()):
            return None
        return {**self.batch, **{k: copy.get() for k, copy in values.items()}}


class BatchNote(NamedTuple):
    """One micro-batch: its template, the values that decide its work, and how many tokens are no padding."""

    template: Template
    values: Mapping[str, HostCopy]
    useful_tokens: float | Slot | None


_NO_VALUES: Mapping[str, HostCopy] = {}


class BatchNotes:
    """Turns batches into notes; lives on the training thread."""

    def __init__(self, values: HostValues) -> None:
        self._values = values
        self._templates: OrderedDict[Any, Template] = OrderedDict()
        self.noted: list[BatchNote] = []
        self.too_many = False

    def note(self, batch: Batch) -> None:
        """Note one micro-batch of the step under way."""
        if len(self.noted) >= _MAX_NOTES:
            self.too_many = True
            return
        key = (
            _autocast_key(),
            *[
                (k, v.shape, v.dtype)
                if isinstance(v, torch.Tensor)
                else (k, v if isinstance(v, _PLAIN) else type(v))
                for k, v in batch.items()
            ],
        )
        template = self._templates.get(key)
        values = _NO_VALUES
        if template is None:
            template = self._template(batch, autocast_state())
            self._templates[key] = template
            if len(self._templates) > _MAX_TEMPLATES:
                self._templates.popitem(last=False)
        if template.value_keys:
            values = {k: start_host_copy(batch[k]) for k in template.value_keys}
        mask = template.mask_key
        useful = None if mask is None else self._values.tokens_in(batch[mask])
        self.noted.append(BatchNote(template, values, useful))

    def take(self) -> list[BatchNote]:
        """The notes of the step that ends now."""
        taken, self.noted, self.too_many = self.noted, [], False
        return taken

    def _template(self, batch: Batch, autocast: AutocastState) -> Template:
        example: dict[str | int, Any] = {}
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor):
                example[key] = value
            elif value.is_floating_point() or value.is_complex() or value.nbytes > _MAX_VALUE_BYTES:
                example[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            else:
                example[key] = start_host_copy(value)
        samples, tokens = _extent(batch)
        mask = batch.get("attention_mask")
        has_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.numel() == tokens
        return Template(
            batch=example,
            value_keys=tuple(k for k in batch if k in _VALUE_KEYS and isinstance(example[k], HostCopy)),
            mask_key="attention_mask" if has_mask else None,
            samples=samples,
            tokens=tokens,
            autocast=autocast,
        )


def _autocast_key() -> tuple[Any, ...]:
    """What autocast does on this thread now: as much of it as tells states apart, in a microsecond."""
    on_cuda, on_cpu = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return (
        torch.get_autocast_dtype("cuda") if on_cuda else None,
        torch.get_autocast_dtype("cpu") if on_cpu else None,
    )


def _extent(batch: Batch) -> tuple[int | None, int | None]:
    """Samples and tokens of a batch; a picture has no tokens, and what has no tensor has neither."""
    for key, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        tensor = batch.get(key)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == dims:
            return int(tensor.shape[0]), int(tensor.shape[0] * tensor.shape[1])
    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
    if not tensors:
        return None, None
    first = tensors[0]
    is_tokens = first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[0]), int(first.numel()) if is_tokens else None


class _Hook:
    """Calls the monitor around a forward pass.

    Copies of the model (an averaged one, a saved one) carry a hook that does nothing. So does compiled code,
    where a hook would become part of the graph.
    """

    _truemfu_skip = True

    def __init__(self, seen: Callable[..., None]) -> None:
        self._seen = seen

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._seen(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> Any:
        return (_nothing, ())


def _do_nothing(module: nn.Module, *args: Any) -> None:
    return None


_do_nothing._truemfu_skip = True  # type: ignore[attr-defined]


def _nothing() -> Callable[..., None]:
    return _do_nothing


class Attachment:
    """Hooks on a model: `seen` gets each training batch, `ended` is told when a forward pass is over.

    Only a count that runs in the background asks when a forward pass ends, so that hook is there on demand.
    """

    def __init__(self, model: nn.Module, seen: Callable[[Batch], None], ended: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._names = _positional_names(unwrap(model))
        self._seen, self._ended = seen, ended
        self._end_hook: Any = None
        compiled = model.__dict__.get("_compiled_call_impl")
        if compiled is None:
            self._undo = model.register_forward_pre_hook(_Hook(self._on_forward), with_kwargs=True).remove
        else:  # model.compile(): its hooks are compiled with it, so watch the call from outside

            @functools.wraps(compiled)
            def watched(*args: Any, **kwargs: Any) -> Any:
                self._on_forward(args, kwargs)
                try:
                    return compiled(*args, **kwargs)
                finally:
                    self._ended()

            model.__dict__["_compiled_call_impl"] = watched
            self._undo = functools.partial(model.__dict__.__setitem__, "_compiled_call_impl", compiled)

    def tell_ends(self, wanted: bool) -> None:
        """Say, from now on or no more, when a forward pass ends."""
        if wanted and self._end_hook is None:
            model = self._model()
            if model is not None and "_compiled_call_impl" not in model.__dict__:
                hook = _Hook(lambda *_: self._ended())
                self._end_hook = model.register_forward_hook(hook, always_call=True)
        elif not wanted and self._end_hook is not None:
            self._end_hook.remove()
            self._end_hook = None

    def remove(self) -> None:
        """Leave the model as it was."""
        self.tell_ends(False)
        self._undo()

    def _on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation, not a training step
        if not args:
            self._seen(kwargs)
        elif self._names is not None and len(args) <= len(self._names):
            self._seen({**dict(zip(self._names, args, strict=False)), **kwargs})
        else:
            self._seen({**dict(enumerate(args)), **kwargs})


def _positional_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of a forward's positional arguments; None where it takes any number of them."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
