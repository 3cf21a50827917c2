"""CUDA graphs in an observed step: a replay runs no operators, so the capture is counted instead.

    capture_begin ──► operators are seen, none is executed ──► capture_end ──► kept with the graph, weakly
    replay        ──► the observed step gets what the capture was counted as

`torch.cuda.graph`, `make_graphed_callables` and trainers with graphs of their own all use the methods of one
class, which are replaced while anybody holds the captures: a monitor for its lifetime, an observer for its
step. A capture holds no values (a copy to the host would become part of the graph), so what depends on values
is unknown there. Graphs that torch.compile captures belong to compiled regions and are counted with them.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from ...convention import Convention
from ...torch_private.replacing import replace
from ..count.tally import Entry
from .region_graph import RegionError

CAPTURED_BEFORE = "the step replays a CUDA graph that was captured before it could be observed"


class GraphReplay:
    """One replay of a graph in an observed step; `capture` is the observation of its capture, or None."""

    def __init__(self, capture: Any, *, position: int) -> None:
        self._capture, self.position = capture, position
        self.entries: list[Entry] = []
        self.uncounted: Counter[str] = Counter()

    def count(self, convention: Convention) -> None:
        """Take over the entries of the capture; RegionError with the reason if they are unknown."""
        if self._capture is None:
            raise RegionError(CAPTURED_BEFORE)
        self._capture.resolve()
        if self._capture.problem is not None:
            raise RegionError(f"a CUDA graph of the step could not be counted: {self._capture.problem}")
        self.entries, self.uncounted = self._capture.entries, self._capture.uncounted


class Captures:
    """Observes the captures of a graph class, and reports replays to the observers of steps.

    `observe()` begins to observe a capture on this thread and returns what ends it, which returns the tally.
    """

    def __init__(self, kind: Any, observe: Callable[[], Callable[[], Any]]) -> None:
        self._kind, self._observe = kind, observe
        self._lock = threading.Lock()
        self._holders = 0
        self._restore: list[Callable[[], None]] = []
        self._tallies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._ends: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
        self._observers: list[Any] = []

    def hold(self) -> None:
        """Observe captures from now on, until as many calls of `release`."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                by_name = {"capture_begin": self._begin, "capture_end": self._end, "replay": self._replay}
                self._restore = [replace(self._kind, name, ours) for name, ours in by_name.items()]

    def release(self) -> None:
        """End one `hold`."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                for restore in self._restore:
                    restore()

    def begin_step(self, observer: Any) -> None:
        """Report replays and captures to this observer, which has `replayed` and `captures`."""
        self.hold()
        self._observers.append(observer)

    def end_step(self, observer: Any) -> None:
        """Stop reporting to this observer."""
        self._observers.remove(observer)
        self.release()

    def _begin(self, original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        for observer in self._observers:
            observer.captures(is_capturing=True)
        self._tallies.pop(graph, None)
        self._ends[graph] = self._observe()
        return result

    def _end(self, original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        end = self._ends.pop(graph, None)
        if end is not None:
            self._tallies[graph] = end()
        for observer in self._observers:
            observer.captures(is_capturing=False)
        return original(graph, *args, **kwargs)

    def _replay(self, original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        for observer in self._observers:
            observer.replayed(self._tallies.get(graph))
        return original(graph, *args, **kwargs)
