"""What is counted: one frozen value, recorded with every number.

A FLOP is one multiply or one add, so a product of M×K by K×N is 2·M·K·N. Matrix products,
convolutions, recurrent cells and attention products count, in any kernel; elementwise work, normalisation,
softmax, the optimizer and input embeddings do not. The user chooses one thing: how the pairs of an attention
mask are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import UsageError, closest

Attention = Literal["full", "causal"]


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How query-key pairs are counted.

    `attention="full"` counts all S² pairs of a sequence, document by document when sequences are packed.
    `attention="causal"` counts only the pairs that a causal or sliding-window mask allows. Padding is
    counted under both, because the hardware does that work.
    """

    attention: Attention = "full"

    def __post_init__(self) -> None:
        known = get_args(Attention)
        if self.attention not in known:
            raise UsageError(
                f"attention convention must be one of {', '.join(known)}; got {self.attention!r}"
                f"{closest(str(self.attention), known)}"
            )
