"""The two values of a walk over a model: what flows from layer to layer, and the work of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .streams import Quantity, Stream


@dataclass(frozen=True)
class Flow:
    """What flows from layer to layer: its rows, its features, and whether any layer before it is trained."""

    stream: Stream
    width: int | None = None
    needs: bool = False
    """Whether backward needs its gradient."""
    attended: bool = False
    """Whether it has passed an attention layer, so that its positions are a sequence, not an image."""

    def trained(self, trained: bool) -> Flow:
        """The flow after a layer that is trained or not."""
        return replace(self, needs=self.needs or trained)


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of one product, for each unit of `counted` (what the model needs) and of `executed`."""

    module: str
    kind: str
    dtype: str
    counted: Quantity
    executed: Quantity
    forward: int
    backward: int
    executed_backward: int
    again: int = 0
    """Forward FLOPs run a second time by activation checkpointing."""

    def times(self, times: int) -> Work:
        """The same product, repeated `times` times."""
        return replace(
            self,
            forward=self.forward * times,
            backward=self.backward * times,
            executed_backward=self.executed_backward * times,
            again=self.again * times,
        )
