"""What is seen of one training step while it runs, and its FLOPs once the values they depend on have arrived.

A tally like that of a count, but it reads no value and holds no tensor: values on the device are copied
without waiting, and what depends on them is resolved after the step. Phases besides those of a count: what
runs without gradients, outside of a training pass and of Functions, is work of a reference model, an
evaluation or the optimizer, and is kept apart.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch

from ...convention import Convention
from ...errors import one_line
from ...torch_private.compiler import is_compiled_node
from ...torch_private.dispatch import (
    FakeTensor,
    current_autograd_node,
    current_graph_task_id,
    next_sequence_nr,
)
from ...torch_private.watching import detects_overwrites, version_of
from ..attention.eager import EagerAttention
from ..attention.masks import MASK_NOT_READ
from ..count.data_flow import APART, is_custom
from ..count.padding import PAD
from ..count.step_work import StepWork, work_of
from ..count.tally import Entry, Tally, operator_name
from ..flop_count import FlopCount
from ..operators.matrix_work import matters
from ..shadow.values import Value
from .calls import FunctionCalls
from .compiled import RegionRun
from .copies import Copies, Uncopied
from .graphs import GraphReplay
from .region_graph import RegionError

OBSERVED = "count of observed steps"
_LOCK_LIMIT_S = 1.0

Documents = Sequence[Sequence[int]]
"""The lengths of the documents in each row of a batch."""

_MOST_OPERATORS = 1_000_000
"""A step of many micro-batches has some hundred thousand; a million take some hundred megabytes."""
TOO_LONG = f"the step ran more than {_MOST_OPERATORS:,} operators: is log_step called after each step?"

UNSEEN = "part of the step's forward pass ran on another thread or before the observation began"
OTHER_BACKEND = "torch.compile ran the step's backward pass with a backend other than inductor"


class Observation(Tally):
    """One observed step; `problem` is the reason why its FLOPs are unknown, or None."""

    def __init__(self, convention: Convention, *, is_capture: bool = False) -> None:
        super().__init__(convention)
        self._is_capture = is_capture
        self.problem: str | None = None
        self.copies = Copies()
        self.training_passes = 0
        self.generation_pass = 0
        """Which pass of `generate` runs, from 1; 0 outside of it."""
        self.runs: list[RegionRun | GraphReplay] = []
        """Calls of compiled code, and replays: what they multiply follows `entries` once it is resolved."""
        self._counted_runs = 0
        self._is_work: dict[int, bool] = {}
        self._functions = FunctionCalls()
        self._pending: list[tuple[int, Callable[[], None]]] = []
        """What depends on values, and the number of micro-batches that had begun."""
        self._batches = 0
        self._first_batch_at = 0
        """How many entries there were when the first micro-batch began."""
        self._lock = threading.RLock()
        self._nodes: dict[int, dict[int, Any]] = {}
        """By thread, then by number: the operator that ran first after this node was made, its own. The
        first number is the last one that was not seen."""

    def fail(self, reason: str) -> None:
        """Record why the FLOPs of this step are unknown; the first reason stays."""
        self.problem = self.problem or reason

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that has run."""
        if self.problem is not None:
            return
        self.operators += 1
        if self.operators > _MOST_OPERATORS:
            self._give_up()
            return
        nodes = self._nodes.get(get_ident())
        if nodes is None:
            nodes = self.mark_start()
        if torch.is_grad_enabled():
            nodes.setdefault(next_sequence_nr() - 1, func)
        is_work = self._is_work.get(id(func))  # hashing an operator takes longer than all of this
        if is_work is None:
            is_work = self._may_be_work(operator_name(func), func)
            self._is_work[id(func)] = is_work
        if is_work or self._flow.is_active():
            self._record_locked(func, args, kwargs, out)

    def _give_up(self) -> None:
        """The step does not end: training is over, and what runs now may run for days."""
        self.fail(TOO_LONG)
        self.entries.clear()
        self.runs.clear()
        self._pending.clear()
        self._nodes.clear()

    def _record_locked(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator; autograd may run several threads, one for each device."""
        if not self._lock.acquire(timeout=_LOCK_LIMIT_S):
            self.fail("autograd's threads waited too long for each other")
            return
        try:
            if not _is_without_data(out):
                self.record(operator_name(func), func, args, kwargs, out)
        finally:
            self._lock.release()

    def saw_region(self, region: Any, inputs: Any) -> None:
        """Record that a region of compiled code is about to run; it is counted after the step."""
        node = current_autograd_node()
        run = RegionRun(region, inputs, self._phase_of_step(node), position=len(self.entries))
        if run.is_backward and node is not None and not self._is_seen(node):
            self.fail(UNSEEN)
        self.add_later(run)

    def add_later(self, run: RegionRun | GraphReplay) -> None:
        """Record work that is counted when the step is resolved."""
        self.runs.append(run)

    def mark_start(self) -> dict[int, Any]:
        """Record that nodes which this thread makes from now on are seen."""
        nodes: dict[int, Any] = {next_sequence_nr() - 1: None}
        self._nodes[get_ident()] = nodes
        return nodes

    def _is_seen(self, node: Any) -> bool:
        """Whether the forward of a node ran while this step was observed; a graph may be a backward pass.

        Numbers of nodes are those of the thread that made them, so a number may be that of another node: one
        of another kind if the node is a product's. A Function's node may be made with no operator after it.
        """
        if self._is_capture or hasattr(node, "variable"):  # the latter: a parameter's hook, without a forward
            return True
        number = node._sequence_nr()
        threads = list(self._nodes.values())
        if is_custom(node):
            return any(next(iter(nodes)) < number <= next(reversed(nodes)) + 1 for nodes in threads)
        made_by = [func for nodes in threads if (func := nodes.get(number)) is not None]
        return any(_may_have_made(func, node) for func in made_by)

    def _phase(self, node: Any) -> str:
        if current_graph_task_id() != -1 and is_compiled_node(node):
            self.fail(OTHER_BACKEND)
        return self._phase_of_step(node)

    def _phase_of_step(self, node: Any) -> str:
        """The phase of an operator or a compiled region; without gradients it may train nothing."""
        if current_graph_task_id() != -1:
            return super()._phase(node)
        if torch.is_grad_enabled() or self.training_passes:
            return "forward"
        generated = f"{APART} {self.generation_pass}" if self.generation_pass else APART
        return self._functions.phase() or generated

    def _count(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Entry | None:
        try:
            return super()._count(name, func, args, kwargs, out)
        except Uncopied as reason:
            self.fail(str(reason))
            return None

    def record_launch(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a Triton kernel that is about to be launched; an error here must not stop it."""
        try:
            with self._lock:
                super().record_launch(name, args, kwargs)
        except Exception as error:
            self.fail(f"counting {name} failed: {one_line(error)}")

    def _set_flops(self, entry: Entry, work: Any, times: int, node: Any) -> None:
        super()._set_flops(entry, work, times, node)
        if node is not None and self.problem is None and not self._is_seen(node):
            self.fail(UNSEEN)

    def _when_known(self, resolve: Callable[[], None]) -> None:
        self._pending.append((self._batches, resolve))

    def batch_begins(self, *, may_be_packed: bool) -> None:
        """Record that a micro-batch begins; if documents may be packed in its rows, masks matter."""
        self._batches += 1
        if self._batches == 1:
            self._first_batch_at = len(self.entries)
        if may_be_packed and self._eager is None:
            self.pairs.masks_matter = True
            self._eager = EagerAttention(self)
            self._is_work.clear()

    def resolve(self, documents: Sequence[Documents | None] = ()) -> None:
        """Compute what depends on values, which must be ready; `documents` are those of each micro-batch."""
        self._flow.finish()
        pending, self._pending = self._pending, []
        for batch, resolve in pending:
            self.pairs.documents = documents[batch - 1] if 0 < batch <= len(documents) else None
            try:
                resolve()
            except Exception as error:
                self.fail(f"counting attention failed: {one_line(error)}")
        runs, self._counted_runs = self.runs[self._counted_runs :], len(self.runs)
        for run in runs:
            try:
                run.count(self.convention)
            except RegionError as reason:
                self.fail(str(reason))
                break
            self.entries.extend(run.entries)
            self.uncounted.update(run.uncounted)
        if MASK_NOT_READ in self.pairs.notes:
            self.fail("an attention mask could not be read")

    @property
    def unseen_forward(self) -> bool:
        """Whether its backward pass went through nodes whose forward pass was not seen."""
        return self.problem == UNSEEN

    def ready(self) -> bool:
        """Whether the device values that formulas need have arrived on the host; never waits."""
        return self.copies.ready()

    def count(self, documents: Sequence[Documents | None] = ()) -> FlopCount:
        """FLOPs of the step, without those of `without_gradients`; on any thread, once it is ready.

        `documents` are those of each micro-batch that began, where its rows are packed.
        """
        self.resolve(documents)
        return self.result(method=OBSERVED)

    def without_gradients(self) -> dict[int, Counter[str]]:
        """Model FLOPs of work that trains nothing, by dtype: of passes of `generate`, at 0 of the rest."""
        self.resolve()
        found: dict[int, Counter[str]] = {0: Counter()}
        for entry in self.entries:
            if entry.phase.startswith(APART):
                number = int(entry.phase.removeprefix(APART) or 0)
                found.setdefault(number, Counter())[entry.dtype] += entry.needed
        return found

    @property
    def before_first_batch(self) -> int:
        """Model FLOPs seen before the first micro-batch began; 0 if none began."""
        self.resolve()
        first = self._first_batch_at
        entries = self.entries[:first]
        entries += [entry for run in self.runs if run.position < first for entry in run.entries]
        return sum(entry.needed for entry in entries if entry.phase in ("forward", "backward"))

    def work(self) -> StepWork:
        """What the step executed, by shape, without the work of `without_gradients`."""
        self.resolve()
        return work_of(self)

    def training_entries(self) -> Sequence[Entry]:
        return [entry for entry in self.entries if not entry.phase.startswith(APART)]

    def _may_be_work(self, name: str, func: Any) -> bool:
        packet = getattr(func, "overloadpacket", None)
        return matters(name) or name == PAD or (self._eager is not None and self._eager.concerns(packet))

    def value(self, tensor: torch.Tensor) -> Value | None:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return None
        return self.copies.value(tensor)

    def value_later(self, tensor: torch.Tensor, scores: torch.Tensor) -> Callable[[], Value | None]:
        """A mask is smaller than the scores: it is copied now. What has their size may be anything, such as a
        residual: it is copied if it is still the same when they enter a softmax."""
        is_small = tensor.dim() > 1 and tensor.numel() < scores.numel()
        if is_small or not detects_overwrites:
            value = self.value(tensor)
            return lambda: value
        reference, version = weakref.ref(tensor), version_of(tensor)

        def copied() -> Value | None:
            mask = reference()
            return None if mask is None or version_of(mask) != version else self.value(mask)

        return copied

    def _evaluated(self, function: Callable[..., Any], shape: Sequence[int], device: Any) -> Value | None:
        raise Uncopied("the pairs that a flex-attention mask function allows are unknown in a training run")


_NAMED_BY_OPERATOR = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "mv"))


def _may_have_made(func: Any, node: Any) -> bool:
    """Whether a node may be that of this operator, by its name: `AddmmBackward0` of `aten::addmm`."""
    operator = operator_name(func).partition("::")[2]
    return operator not in _NAMED_BY_OPERATOR or node.name().partition("Backward")[0].lower() == operator


def _is_without_data(out: Any) -> bool:
    """Whether an operator's result is a fake tensor, or one of the meta device."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return isinstance(first, torch.Tensor) and (first.is_meta or isinstance(first, FakeTensor))
