"""The phase of a recorded operator: forward, backward, or recomputation by a checkpoint.

The recording shows two things that determine it: operators below the evaluation of an autograd node belong to
its gradient, and an operator that ran with gradients enabled has a sequence number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NODE = "autograd::engine::evaluate_function: "
"""The name prefix of the evaluation of an autograd node."""

COMPILING = "(dynamo_timed)"
"""Part of the names of the compiler's events."""

_FUNCTION = "FUNCTION"
"""The scope of an operator, by its name."""


@dataclass(frozen=True, kw_only=True)
class EventContext:
    """Where in the step an event is.

    `phase` is the phase of operators there, `enabled` that of operators that run with gradients enabled.
    `stopped` is the operator at which a checkpoint stopped recomputing, `node` the event of the autograd
    node, `head_dims` the head sizes that SDPA was called with.
    """

    phase: str = "forward"
    enabled: str = "forward"
    stopped: int | None = None
    node: Any = None
    head_dims: tuple[int, int] | None = None


def is_call(event: Any) -> bool:
    """Whether an event is an operator or a custom Function, not a label or an autograd node."""
    scope = getattr(event.extra_fields, "scope", None)
    return getattr(scope, "name", None) == _FUNCTION


def is_function(event: Any) -> bool:
    """Whether an autograd node is a Function written in Python, neither compiled nor a checkpoint: torch
    numbers its own nodes, as in `MmBackward0`."""
    name: str = event.name
    return name.endswith("Backward") and not any(word in name for word in ("CompiledFunction", "Checkpoint"))


def context_of_node(event: Any) -> EventContext:
    """The context of the operators that an autograd node runs.

    A backward formula runs without gradients, so operators with gradients enabled are a region of the forward
    pass that a checkpoint recomputes; unless all are, since then the pass itself is to be differentiated.
    """
    calls = list(_outermost_calls(event))
    enabled = [call for call in calls if call.extra_fields.sequence_number >= 0]
    reentrant = "Checkpoint" in event.name
    if not enabled or not (reentrant or len(enabled) < len(calls)):
        return EventContext(phase="backward", enabled="backward", node=event)
    stopped = None if reentrant else _stopped_at(enabled[-1])
    return EventContext(phase="backward", enabled="recompute", stopped=stopped, node=event)


def _outermost_calls(event: Any) -> Iterator[Any]:
    """The calls of an autograd node, without those of backward passes inside it."""
    for child in event.children:
        if child.name.startswith(NODE) or COMPILING in child.name:
            continue
        if is_call(child) and ("::" in child.name or child.extra_fields.sequence_number >= 0):
            yield child
        else:
            yield from _outermost_calls(child)


def _stopped_at(call: Any) -> int | None:
    """The operator at which a checkpoint stopped, if `call` is the last one that it recomputed.

    A checkpoint stops when the last tensor it needs is saved. A product saves its operands before it runs, so
    the last one is recorded but does not run: below it there is only the saving.
    """
    last = call
    while True:
        within = [c for c in last.children if is_call(c) and c.extra_fields.sequence_number >= 0]
        if not within:
            break
        last = within[-1]
    idle = all(child.name == "aten::detach" for child in last.children)
    return int(last.correlation_id) if idle else None
