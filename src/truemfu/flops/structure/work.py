"""What goes from layer to layer, and what a layer does: the two values a walk over a model is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .streams import Quantity, Stream


@dataclass(frozen=True)
class Flow:
    """What goes from layer to layer: its rows, its features, and whether anything before it is trained."""

    stream: Stream
    width: int | None = None
    needs: bool = False
    """Whether backward needs the gradient of it."""
    attended: bool = False
    """Whether it has been through attention: its positions are a sequence, not a picture's."""

    def trained(self, trained: bool) -> Flow:
        """The same behind a layer with something trained in it, or not."""
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
        """The same product, so many times."""
        return replace(
            self,
            forward=self.forward * times,
            backward=self.backward * times,
            executed_backward=self.executed_backward * times,
            again=self.again * times,
        )
