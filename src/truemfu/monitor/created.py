"""Who is told of each new `TrainingMonitor`: `truemfu run` leaves a script alone that has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

listeners: list[Callable[[Any], None]] = []
