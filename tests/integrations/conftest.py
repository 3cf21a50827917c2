"""A clean slate for each test, as for the monitor's own."""

from __future__ import annotations

from tests.monitor.conftest import no_peak, nothing_said

__all__ = ["no_peak", "nothing_said"]
