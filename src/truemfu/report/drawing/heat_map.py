"""A heat map: a table whose cells are coloured by their value, the larger the stronger.

Where small values are the good ones, as in step times, the scale is reversed: the strongest cell is always
the best. It is logarithmic for values that differ by an order of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .tables import Cell

_STRONGEST = 60
_WIDE = 8.0


def heated(rows: Sequence[Sequence[Cell]], *, is_less_better: bool = False) -> list[list[Cell]]:
    """The cells with their colour; one without a value has none."""
    known = [cell.value for row in rows for cell in row if cell.value is not None and cell.value > 0]
    low, high = min(known, default=0.0), max(known, default=0.0)
    is_log = low > 0 and high / low > _WIDE

    def heat(value: float) -> int:
        if high <= low:
            return _STRONGEST // 2
        part = math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)
        return round(_STRONGEST * (1 - part if is_less_better else part))

    return [[replace(cell, heat=heat(cell.value)) if cell.value else cell for cell in row] for row in rows]
