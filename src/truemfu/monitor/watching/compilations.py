"""How many graphs torch.compile has made in this process: a step that adds one is not representative."""

from __future__ import annotations

from collections.abc import Mapping

from ...torch_private.watching import graph_counters

_counters: Mapping[str, Mapping[str, int]] | None = None
"""torch's own counters, once it has them."""


def compilations() -> int:
    """Graphs made so far."""
    global _counters
    if _counters is None:
        _counters = graph_counters()
        if _counters is None:
            return 0
    stats = _counters.get("stats")
    return 0 if stats is None else stats.get("unique_graphs", 0)


class NewGraphs:
    """Whether graphs were made since the last time it was asked."""

    def __init__(self) -> None:
        self._known = compilations()

    def appeared(self) -> bool:
        """Whether there are new ones."""
        last, self._known = self._known, compilations()
        return self._known != last
