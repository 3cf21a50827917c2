"""Values of fake tensors: they let a model run on shapes alone and still take the same path as a real run.

Fake tensors have no values, so a model that reads one (whether a mask is all ones, the size of an image, the
tokens of an expert) fails on them. Here integers keep their values: a tensor computed from known ones is
known too, evaluated on the CPU only when it is read. Only values that depend on weights are unknown. Where a
model reads one of these, a plausible value is assumed and its origin recorded: the choice of experts is
spread evenly, a comparison is false. A count that depends on an assumption has a note about it.

    batch, arange, shapes ──► known, lazily ──► item(), nonzero(), x[mask] as in a real run
    weights, activations  ──► unknown       ──► assumed when read, and reported in a note
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...torch_private.dispatch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    arguments_by_name,
    disable_modes,
)
from ...torch_private.trees import tree_flatten, tree_map_only, tree_unflatten
from ..host_copy import on_host

aten = torch.ops.aten

MAX_ELEMENTS = 1 << 27
"""Values with more elements than this are not computed."""

_MAX_NEW_FLOATS = 1 << 20
_ON_CPU = {"device": torch.device("cpu"), "pin_memory": False}
_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Value:
    """The real values of a fake tensor, computed on first use.

    `assumed` describes what was assumed, if anything. Views share their base's `root`, so that writing an
    unknown value through one of them makes all of them unknown.
    """

    __slots__ = (
        "__weakref__",
        "_compute",
        "_tensor",
        "assumed",
        "is_fill",
        "is_rate",
        "root",
        "unknown",
    )

    def __init__(
        self, compute: Callable[[], torch.Tensor], assumed: str | None = None, view_of: Value | None = None
    ) -> None:
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._tensor: torch.Tensor | None = None
        self.assumed = assumed
        self.root: Value = self if view_of is None else view_of.root
        self.unknown = False
        self.is_fill = False
        """Whether this is a newly filled tensor, such as kernels are given to write their results to."""
        self.is_rate = False
        """Whether it was drawn between 0 and 1, as for a comparison with a dropout rate."""

    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            assert self._compute is not None
            with disable_modes(), torch.no_grad():
                self._tensor = self._compute()
            self._compute = None
        return self._tensor


def value_of(tensor: Any) -> Value | None:
    """The value of a fake tensor, if it is known or assumed."""
    value: Value | None = getattr(tensor, "_truemfu_value", None)
    return None if value is None or value.root.unknown else value


def _value(tensor: torch.Tensor) -> Value | None:
    """The same for any tensor: a real one, such as a literal in the model's code, is always known."""
    return value_of(tensor) if isinstance(tensor, FakeTensor) else Value(lambda: on_host(tensor))


def attach(tensor: torch.Tensor, value: Value) -> None:
    """Attach a value to a fake tensor."""
    tensor._truemfu_value = value  # type: ignore[attr-defined]


_NEW = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.empty_like.default,
    aten.new_empty.default,
}
"""Operators whose result does not depend on the values of the tensor that they are given."""
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
}
"""Their results may have any values: taken to be zeros."""
_FILLS = _NEW | _EMPTY | {aten.zeros.default, aten.ones.default, aten.full.default}
_RANKING = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim}
_CHOICE = {aten.argmax.default, aten.argmin.default, aten.multinomial.default, aten.argsort.default}
_WINNER = {aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim}
_DYNAMIC = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_COMPARISONS = {aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar}
_TRUTH = {aten.equal.default, aten.is_nonzero.default, aten.allclose.default}
_READS_VALUES = {aten._local_scalar_dense.default} | _TRUTH | _DYNAMIC
_CHECKED = {aten.index.Tensor, aten.embedding.default}


@functools.cache
def _traits(func: Any) -> tuple[bool, bool, bool]:
    """For an operator: whether it needs special handling here, whether it writes into an argument, and
    whether its results are unknown as soon as one of its inputs is."""
    mutable = func._schema.is_mutable
    needs_all = not mutable and func not in _RANKING and func not in _CHOICE and func not in _NEW
    return func in _READS_VALUES or func in _CHECKED, mutable, needs_all


def _has_unknown(arguments: Iterable[Any]) -> bool:
    """Whether a fake tensor among these, or in a list among them, has no value."""
    for argument in arguments:
        cls = type(argument)
        if cls is FakeTensor:
            value = argument.__dict__.get("_truemfu_value")
            if value is None or value.root.unknown:
                return True
        elif (cls is list or cls is tuple) and _has_unknown(argument):
            return True
    return False


def _check_rows(weight: torch.Tensor, ids: torch.Tensor) -> None:
    """Raise for ids that an embedding refuses in a real run; fake tensors do not refuse all of them.

    Ids outside the vocabulary are an IndexError, ids that are not integers a TypeError (torch 2.11 accepts
    those on fake tensors).
    """
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"indices of an embedding must be integers, got {ids.dtype}")
    value = value_of(ids)
    if value is None or value.assumed or ids.device.type != "cpu" or not ids.numel():
        return
    with disable_modes():
        lowest, highest = value.tensor().aminmax()
        if int(lowest) < 0 or int(highest) >= weight.shape[0]:
            raise IndexError(
                f"ids from {int(lowest)} to {int(highest)} for an embedding of {weight.shape[0]} rows: "
                "the batch holds ids outside the vocabulary"
            )


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """Has a tensor's shape and dtype, for an operator that reads nothing else; the tensor is not held."""
    with disable_modes():
        return torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A random tensor, the same every time, from a generator of its own."""
    own = {"device": torch.device("cpu"), "pin_memory": False, "generator": torch.Generator().manual_seed(0)}
    drawn: torch.Tensor = func.overloadpacket(*args, **{**kwargs, **own})
    return drawn


def _histogram(source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`histc`, which accepts integers only on a GPU: as float64 they fall into the same bins."""
    exact = source if source.is_floating_point() else source.double()
    return torch.histc(exact, *args, **kwargs).to(source.dtype)


def mark_unknown(tensors: Iterable[torch.Tensor]) -> None:
    """Mark these as unknown: an unknown value was written into them."""
    for tensor in tensors:
        if (value := value_of(tensor)) is not None:
            value.root.unknown = True


def written_tensors(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    arguments = [
        kwargs.get(argument.name, args[i] if i < len(args) else None)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, torch.Tensor)]


class _Call:
    """A call of an operator, which can run again on other tensors, on the CPU."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self._flat, self._spec = tree_flatten((args, kwargs))
        self._positions = [i for i, a in enumerate(self._flat) if isinstance(a, torch.Tensor)]
        self.tensors = [self._flat[i] for i in self._positions]

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result with these tensors in place of the call's own."""
        real = list(self._flat)
        for position, tensor in zip(self._positions, tensors, strict=True):
            real[position] = tensor
        args, kwargs = tree_unflatten(real, self._spec)
        kwargs |= {name: value for name, value in _ON_CPU.items() if name in kwargs}
        on_cpu = _histogram if self.func is aten.histc.default else self.func
        out = on_cpu(*args, **kwargs)
        return out.zero_() if self.func in _EMPTY else out


class Following(TorchDispatchMode):
    """Runs operators on fake tensors and follows the values of those that are known.

    `CountingMode` calls `run`; as a mode of its own it does the same without counting.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self.assumptions: dict[str, None] = {}
        self._pending: weakref.WeakSet[Value] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; returns what the model gets."""
        special, mutable, needs_all = _traits(func)
        if special:
            if func in _READS_VALUES:
                return self._run_on_values(func, args, kwargs)
            if func is aten.index.Tensor:
                args = self._integer_indices(args)
            else:
                _check_rows(args[0], args[1])
        if mutable and args and type(args[0]) is torch.Tensor and "out" not in kwargs:
            return args[0]  # a real tensor from outside the model must not be written to
        out = func(*args, **kwargs)
        if func is aten.lift_fresh.default and isinstance(out, FakeTensor):
            # Its value is followed here, on the CPU: torch would run operators on only such tensors for real,
            # on the device that the model requests.
            out.constant = None
        if not (needs_all and (_has_unknown(args) or _has_unknown(kwargs.values()))):
            self._follow(func, args, kwargs, out)
        return out

    def record_launch(self, arguments: Iterable[Any]) -> None:
        """Record a kernel that was skipped: its newly filled arguments are taken to be its results."""
        values = [value for argument in arguments if (value := value_of(argument)) is not None]
        for value in values:
            if value.root.is_fill:
                value.root.unknown = True

    def _run_on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose result, or the shape of it, depends on values."""
        if func in _DYNAMIC:
            return self._dynamic(func, args, kwargs)
        if func in _TRUTH:
            real_args, real_kwargs = self._real((args, kwargs))
            with disable_modes():
                return func(*real_args, **real_kwargs)
        with disable_modes():
            return self._read_value(args[0]).item()

    def _read_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor that the model reads: known, or assumed and recorded."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = value_of(tensor)
        if value is None:
            fill = 1.0 if tensor.dtype in _NUMBERS else 0
            shape, dtype = tuple(tensor.shape), tensor.dtype
            value = Value(lambda: torch.full(shape, fill, dtype=dtype), assumed="a value of the activations")
            attach(tensor, value)
        if value.assumed:
            self.assumptions[value.assumed] = None
        return value.tensor()

    def _real(self, tree: Any) -> Any:
        return tree_map_only(torch.Tensor, self._read_value, tree)

    def _fake(self, real: torch.Tensor, device: torch.device, assumed: str | None) -> torch.Tensor:
        with self.fake_mode:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        attach(fake, Value(lambda: real, assumed))
        return fake

    def _dynamic(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose result's shape depends on values, on known or assumed values."""
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        device = tensors[0].device
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            mask = self._read_value(args[1])
            with disable_modes():
                indices = mask.expand(shape).nonzero().unbind(1)
            fake_indices = [self._fake(index, device, None) for index in indices]
            source = self.run(aten.expand.default, (args[0], shape), {})
            return self.run(aten.index.Tensor, (source, fake_indices), {})
        real_args, real_kwargs = self._real(args), self._real(kwargs)
        assumed = next((v.assumed for t in tensors if (v := value_of(t)) and v.assumed), None)
        with disable_modes(), torch.no_grad():
            out = func(*real_args, **real_kwargs)
        return tree_map_only(torch.Tensor, lambda t: self._fake(t, device, assumed), out)

    def _integer_indices(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace boolean indices, whose result shape depends on values, by equivalent integer ones."""
        tensor, indices = args[0], args[1]
        if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return args
        flat: list[Any] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                flat.extend(self._dynamic(aten.nonzero.default, (index,), {}).unbind(1))
            else:
                flat.append(index)
        return (tensor, flat, *args[2:])

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        schema = func._schema if isinstance(func, OpOverload) else None
        is_write = schema is not None and schema.is_mutable  # which may return nothing
        if not is_write and not isinstance(out, (torch.Tensor, tuple, list)):
            return
        is_new = func in _NEW and _value(args[0]) is None
        call = _Call(func, (_placeholder(args[0]), *args[1:]) if is_new else args, kwargs)
        values = [_value(tensor) for tensor in call.tensors]
        is_new |= not values
        if is_write:
            self._follow_write(call, written_tensors(func, args, kwargs), values)
            return
        if func in _RANKING or func in _CHOICE:
            if any(v is None for v in values) or torch.Tag.nondeterministic_seeded in func.tags:
                self._assume_ranking(func, args, kwargs, out)
                return
        elif torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            if not values and isinstance(out, FakeTensor) and out.numel() <= _MAX_NEW_FLOATS:
                drawn = Value(lambda: _draw(func, args, kwargs), "a random draw")
                drawn.is_rate = func.overloadpacket is aten.rand
                attach(out, drawn)
            return
        if any(v is None for v in values):
            return
        known = [v for v in values if v is not None]
        assumed = next((v.assumed for v in known if v.assumed), None)
        if func in _COMPARISONS and known[0].is_rate and not 0 < args[1] < 1:
            assumed = None  # every draw gives the same result: a layer dropped at rate 0, for example
        aliases = schema is not None and any(r.alias_info is not None for r in schema.returns)

        @functools.cache
        def compute() -> list[Any]:
            return tree_flatten(call.run([value.tensor() for value in known]))[0]

        for i, tensor in enumerate(tree_flatten(out)[0]):
            if not isinstance(tensor, FakeTensor):
                continue
            limit = _MAX_NEW_FLOATS if is_new and tensor.dtype in _NUMBERS else MAX_ELEMENTS
            if tensor.numel() <= limit:
                value = Value(lambda i=i: compute()[i], assumed, known[0] if aliases else None)  # type: ignore[misc]
                value.is_fill = func in _FILLS
                if not is_new:
                    self._pending.add(value)
                attach(tensor, value)

    def _follow_write(
        self, call: _Call, written: Sequence[torch.Tensor], values: Sequence[Value | None]
    ) -> None:
        """For an operator that writes into an argument: update the known value, or mark it unknown."""
        seeded = torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ())
        if seeded or any(v is None for v in values):
            mark_unknown(written)
            return
        known = [value for value in values if value is not None]
        for pending in list(self._pending):  # values derived from the old content must be computed first
            pending.tensor()
        self._pending.clear()
        try:
            with disable_modes(), torch.no_grad():
                call.run([value.tensor() for value in known])
        except NotImplementedError:  # it has no CPU kernel
            mark_unknown(written)

    def _assume_ranking(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Spread the choices of a ranking evenly: row r takes (r·k + j) mod n for its j-th choice."""
        indices = out[1] if func in _RANKING else out
        if not isinstance(indices, FakeTensor) or indices.numel() > MAX_ELEMENTS:
            return
        source, given = args[0], arguments_by_name(func, args, kwargs).get("dim")
        dim = -1 if given is None else given
        choices = source.shape[dim] if source.dim() else 1
        shape = tuple(indices.shape)

        def spread() -> torch.Tensor:
            if func in _WINNER or not shape:
                return torch.arange(max(indices.numel(), 1)).remainder(max(choices, 1)).reshape(shape)
            moved = torch.empty(shape).movedim(dim, -1).shape
            return torch.arange(indices.numel()).remainder(max(choices, 1)).reshape(moved).movedim(-1, dim)

        attach(indices, Value(spread, assumed="the choice of experts (spread evenly)"))
