"""How many graphs torch.compile has made in this process: a step that adds one is no measure of speed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_graph_counters: Mapping[str, Mapping[str, int]] | None = None


def graph_counters() -> Any:
    """torch's own counters, where it has them by now: a mapping of mappings."""
    global _graph_counters
    if _graph_counters is None:
        _graph_counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return _graph_counters


def compilations() -> int:
    """Graphs made so far."""
    counters = graph_counters()
    return 0 if counters is None else graphs_in(counters)


def graphs_in(counters: Any) -> int:
    """Graphs made so far by torch's counters."""
    stats = counters.get("stats")
    return 0 if stats is None else stats.get("unique_graphs", 0)
