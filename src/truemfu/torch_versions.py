"""The torch versions that the tests ran with, and a warning on a newer one.

A new version of torch may bring operators that have no formula here, or change the arguments of known ones.
The README and the constraints of `make test-oldest` and `make test-newest` state the same two versions.
"""

from __future__ import annotations

import re

from .errors import warn_once

OLDEST_TESTED = (2, 6)
NEWEST_TESTED = (2, 15)


def warn_if_untested() -> None:
    """Warn once if the installed torch is of a newer minor version than the newest tested one.

    Development versions count as the version they lead to. A version without a number, as in custom builds,
    is ignored.
    """
    import torch  # here, so that the versions are known without torch

    version = str(torch.__version__)
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and (int(number[1]), int(number[2])) > NEWEST_TESTED:
        oldest, newest = (".".join(map(str, tested)) for tested in (OLDEST_TESTED, NEWEST_TESTED))
        warn_once(
            f"truemfu was tested with torch {oldest} to {newest}, and this is torch {version}: "
            "its counts are untested there"
        )
