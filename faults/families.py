"""THE table: every family of attacks."""

from __future__ import annotations

from . import exporter, kills, monitor, names, observed, raising, sweep_folder, terminal
from .attack import Family

FAMILIES = (
    Family("monitor", "a run in hostile surroundings", monitor.attacks, short=60),
    Family("raising", "every call out of our code raises", raising.attacks, short=40),
    Family(
        "sweep-folder", "every path of a sweep folder, damaged or replaced", sweep_folder.attacks, short=60
    ),
    Family("names", "hostile names in files and arguments", names.attacks, short=60),
    Family("terminal", "escape sequences in every field of every command", terminal.attacks, short=2),
    Family("kills", "signals to a training and to a supervisor", kills.attacks, short=10),
    Family("exporter", "addresses, connections and requests", exporter.attacks, short=10),
    Family("observed", "programs that notice a step that runs twice", observed.attacks, short=2),
)
