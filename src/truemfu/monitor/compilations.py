"""How many graphs torch.compile has made in this process: a step that adds one is no measure of speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..torch_private.watching import graph_counters as private_counters

_graph_counters: Mapping[str, Mapping[str, int]] | None = None


def graph_counters() -> Any:
    """torch's own counters, where it has them by now: a mapping of mappings."""
    global _graph_counters
    if _graph_counters is None:
        _graph_counters = private_counters()
    return _graph_counters


def compilations() -> int:
    """Graphs made so far."""
    counters = graph_counters()
    return 0 if counters is None else graphs_in(counters)


def graphs_in(counters: Any) -> int:
    """Graphs made so far by torch's counters."""
    stats = counters.get("stats")
    return 0 if stats is None else stats.get("unique_graphs", 0)
