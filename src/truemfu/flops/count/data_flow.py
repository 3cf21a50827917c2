"""Assigns the products inside a custom `autograd.Function` to a phase, by data flow.

Autograd runs a Function as one node: what it multiplies inside, and when, is up to its author. So the phase
of each product follows from where its operands come from and where its result goes:

    in forward    reaches an output                               forward
                  reaches only a gradient that backward returns   backward, computed early
                  reaches only a gradient that is dropped         recompute
    in backward   an operand depends on the incoming gradient, and the result
                  reaches a gradient that an input needs, or a
                  tensor that outlives the call (`main_grad`)     backward
                  anything else                                   recompute

Contents are tracked per storage, so views share them and in-place writes add to them. A Triton kernel is
assumed to read and write all its arguments. After tensors have been exported in another way (NumPy,
pointers), the rest of that backward is not analysed and counts as backward.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from ...torch_private.dispatch import (
    OpOverload,
    current_autograd_node,
    current_graph_task_id,
    next_sequence_nr,
)
from ...torch_private.trees import tree_leaves
from ..operators.matrix_work import factors
from ..shadow.values import written_tensors

_BACKWARD = frozenset(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
)
"""What autograd calls to run a Function's backward: with the gradients one by one, or all in one list."""
_OVERWRITING = frozenset(("aten::copy_", "aten::fill_", "aten::zero_"))
_UNWRITTEN = frozenset(("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"))


APART, UNDECIDED = "without gradients", "undecided"
"""Phases of an observed step: of work that trains nothing, and of a product in the forward of a Function of
which is not yet known whether it was called with gradients. Its first result that is used shows that."""


class CountedProduct(Protocol):
    """A counted call; `phase` is forward, backward, recompute or one of those above."""

    phase: str


class Ran(NamedTuple):
    """An operator that has run."""

    name: str
    func: Any
    args: Any
    kwargs: Any
    out: Any = None


class _Content:
    """What a storage holds: the products it was computed from (one bit each), whether it depends on the
    incoming gradient, and whether no operator has written to it, so that unseen code must have."""

    __slots__ = ("gradient", "products", "unwritten")

    def __init__(self, products: int = 0, gradient: bool = False, unwritten: bool = False) -> None:
        self.products, self.gradient, self.unwritten = products, gradient, unwritten


class _BackwardCall:
    """One call of a Function's backward; `products` are those it has run so far."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.products = 0
        self.is_analysed = True


def is_checkpoint(node: Any) -> bool:
    """Whether an autograd node is that of torch's re-entrant checkpoint."""
    function = getattr(type(node), "_forward_cls", None)
    return isinstance(function, type) and issubclass(function, CheckpointFunction)


def is_custom(node: Any) -> bool:
    """Whether an autograd node is a Function written in Python, other than torch's checkpoint."""
    return isinstance(node, BackwardCFunction) and not is_checkpoint(node)


def in_function() -> bool:
    """Whether a Function's forward or backward is among the callers."""
    forwards = forward_codes()
    return any(frame.f_code in _BACKWARD or frame.f_code in forwards for frame in calling_frames())


def forward_codes() -> frozenset[Any]:
    """The code of each Function's forward."""
    return frozenset(getattr(cls.forward, "__code__", None) for cls in _subclasses(torch.autograd.Function))


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


class DataFlow:
    """Tracks what Functions compute, and sets the phase of their products as soon as it is known."""

    def __init__(self) -> None:
        self._contents: weakref.WeakKeyDictionary[Any, _Content] = weakref.WeakKeyDictionary()
        self._products: list[CountedProduct] = []
        self._unused = 0
        """Products run without gradients that no later operator of the forward pass has used."""
        self._runs: list[_BackwardCall] = []
        self._undecided: dict[int, int] = {}
        """Undecided products, by the number of the node of their Function."""

    def is_active(self) -> bool:
        """Whether an operator that is no product needs to be recorded now."""
        if self._unused or self._runs or self._undecided:
            return True
        return current_graph_task_id() != -1 and is_custom(current_autograd_node())

    def record(self, ran: Ran, product: CountedProduct | None) -> None:
        """Record an operator; `product` is its call, if it was counted."""
        if current_graph_task_id() == -1:
            self._record_forward(ran, product)
            return
        node = current_autograd_node()
        if is_custom(node):
            if self._undecided and (products := self._undecided.pop(node._sequence_nr(), 0)):
                self._set_phase(products, "forward")
            run = self._run_of(node)
            if run is not None:
                self._record_backward(run, ran, product)
        elif self._runs:  # a backward pass inside a Function's own: what it computes are gradients
            made = self._made_from(ran)
            made.gradient = True
            self._write(ran, made)

    def record_launch(self, arguments: Sequence[Any], product: CountedProduct | None) -> None:
        """Record a kernel launched outside the dispatcher: it may read and write any of these arguments."""
        run = self._current_run()
        if current_graph_task_id() == -1 and torch.is_grad_enabled():
            self._use(arguments)
        elif run is not None or product is not None or self._unused:
            made = self._made_from(Ran("", None, arguments, {}))
            self._add(run, product, made, made.gradient)
            for storage in filter(None, map(_storage, arguments)):
                self._contents[storage] = _Content(made.products, made.gradient)

    def record_export(self) -> None:
        """Record that a tensor was exported from torch: what is computed from it is unknown."""
        run = self._current_run()
        if run is not None:
            run.is_analysed = False

    def _record_forward(self, ran: Ran, product: CountedProduct | None) -> None:
        if self._undecided:
            self._decide((ran.args, ran.kwargs))
        if torch.is_grad_enabled():
            self._use((ran.args, ran.kwargs))
        elif product is not None or self._unused:
            made = self._made_from(ran)
            self._add(None, product, made, False)
            self._write(ran, made)

    def _decide(self, tree: Any) -> None:
        """Set the phase of undecided products in these tensors, if they are results of their Function."""
        for leaf in tree_leaves(tree):
            storage = _storage(leaf)
            content = None if storage is None else self._contents.get(storage)
            if content is None or not (leaf.requires_grad or torch.is_grad_enabled()):
                continue
            phase = "forward" if leaf.requires_grad else APART
            for number, products in list(self._undecided.items()):
                if products & content.products:
                    self._set_phase(self._undecided.pop(number), phase)

    def finish(self) -> None:
        """Products whose result nothing has used are without gradients."""
        for products in self._undecided.values():
            self._set_phase(products, APART)
        self._undecided.clear()

    def _use(self, tree: Any) -> None:
        """Record that the forward pass uses these: the products in them have reached an output."""
        if self._unused:
            for content in self._read(tree):
                self._unused &= ~content.products

    def _record_backward(self, run: _BackwardCall, ran: Ran, product: CountedProduct | None) -> None:
        made = self._made_from(ran)
        operands = self._read(factors(ran.name, ran.args)) if product is not None else ()
        is_gradient = any(content.gradient or content.unwritten for content in operands)
        self._add(run, product, made, is_gradient)
        made.unwritten = ran.name in _UNWRITTEN
        self._write(ran, made)

    def _current_run(self) -> _BackwardCall | None:
        """The Function's backward that is running now, if any."""
        node = current_autograd_node() if current_graph_task_id() != -1 else None
        return self._run_of(node) if is_custom(node) else None

    def _run_of(self, node: Any) -> _BackwardCall | None:
        """The run of this node; None while torch computes something outside the Function's own code."""
        for run in reversed(self._runs):
            if run.node is node:
                return run
        frame = next((frame for frame in calling_frames() if frame.f_code in _BACKWARD), None)
        if frame is None or frame.f_locals["self"] is not node:
            return None
        for incoming in tree_leaves(frame.f_locals["args"]):
            if (storage := _storage(incoming)) is not None:
                self._content(storage).gradient = True
        run = _BackwardCall(node)
        self._runs.append(run)

        def close(returned: Any, _: Any) -> None:
            handle.remove()
            self._close(run, returned)

        handle = node.register_hook(close)
        return run

    def _close(self, run: _BackwardCall, returned: Iterable[Any]) -> None:
        """Set the phase of products that are not in the gradients returned by a Function's backward."""
        while self._runs and self._runs.pop() is not run:
            pass  # an inner one that ended in an exception
        needed = dropped = 0
        for gradient, (edge, _) in zip(returned, run.node.next_functions, strict=True):
            for content in self._read(gradient):
                if edge is None:
                    dropped |= content.products
                else:
                    needed |= content.products
        self._set_phase(needed & self._unused & ~run.products, "backward")
        self._set_phase(dropped & self._unused & ~run.products & ~needed, "recompute")
        if run.is_analysed:
            alive = self._alive() & ~dropped
            self._set_phase(run.products & ~needed & ~alive, "recompute")

    def _alive(self) -> int:
        """The products in tensors that still exist: a gradient may be added to one and not returned."""
        products = 0
        for content in list(self._contents.values()):
            products |= content.products
        return products

    def _set_phase(self, bits: int, phase: str) -> None:
        while bits:
            number = bits.bit_length() - 1
            self._products[number].phase = phase
            bits &= ~(1 << number)

    def _add(
        self, run: _BackwardCall | None, product: CountedProduct | None, made: _Content, is_gradient: bool
    ) -> None:
        """Record a product, run in this call of a Function's backward or in a forward pass without gradients,
        as part of `made`. `is_gradient`: one of its operands depends on the incoming gradient."""
        if product is None or product.phase not in (("forward", UNDECIDED) if run is None else ("backward",)):
            return
        bit = 1 << len(self._products)
        self._products.append(product)
        made.products |= bit
        if product.phase == UNDECIDED:
            number = next_sequence_nr() - 1
            self._undecided[number] = self._undecided.get(number, 0) | bit
        if run is None:
            self._unused |= bit
        else:
            run.products |= bit
            if run.is_analysed and not is_gradient:
                product.phase = "recompute"

    def _read(self, tree: Any) -> Iterator[_Content]:
        for leaf in tree_leaves(tree):
            storage = _storage(leaf)
            content = None if storage is None else self._contents.get(storage)
            if content is not None:
                yield content

    def _made_from(self, ran: Ran) -> _Content:
        """The content of an operator's result: that of everything it reads."""
        targets = _targets(ran.func)
        given = [value for key, value in ran.kwargs.items() if key not in targets]
        made = _Content()
        for content in self._read((ran.args[1:] if ran.name in _OVERWRITING else ran.args, given)):
            made.products |= content.products
            made.gradient |= content.gradient or content.unwritten
        return made

    def _content(self, storage: Any) -> _Content:
        return self._contents.setdefault(storage, _Content())

    def _write(self, ran: Ran, made: _Content) -> None:
        """Set the content of an operator's results, or of the tensors it has written to."""
        name, func, args, kwargs, out = ran
        is_empty = not (made.products or made.gradient or made.unwritten)
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            is_replaced = name in _OVERWRITING or bool(_targets(func))
            for tensor in written_tensors(func, args, kwargs):
                if (storage := _storage(tensor)) is None:
                    continue
                if is_replaced and tensor.numel() * tensor.element_size() >= storage.nbytes():
                    self._contents[storage] = _Content(made.products, made.gradient)
                elif not is_empty or storage in self._contents:
                    content = self._content(storage)
                    content.products |= made.products
                    content.gradient |= made.gradient
                    content.unwritten = False
            return
        if is_empty:
            return
        read = [_storage(leaf) for leaf in tree_leaves((args, kwargs))]
        for result in tree_leaves(out):
            storage = _storage(result)
            if storage is not None and not any(storage is other for other in read):  # else it is a view
                self._contents[storage] = _Content(made.products, made.gradient, made.unwritten)


def calling_frames(innermost: FrameType | None = None) -> Iterator[FrameType]:
    """The frames of the callers, from the innermost on."""
    frame: FrameType | None = innermost or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _storage(thing: Any) -> Any:
    """A tensor's storage, which its views share; None for anything without one."""
    if not isinstance(thing, torch.Tensor):
        return None
    try:
        return thing.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested
        return None


@functools.cache
def _targets(func: Any) -> frozenset[str]:
    """The arguments that receive results (`out=`), whose previous content is not read."""
    arguments = func._schema.arguments if isinstance(func, OpOverload) else ()
    return frozenset(a.name for a in arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write)
