"""How convolutions and poolings change the size of an image or audio input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SizeStep:
    """The effect of one convolution or pooling on one spatial dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    transposed: bool = False
    output_padding: int = 0
    ceil_mode: bool = False

    def __call__(self, size: int) -> int:
        """The output size along this dimension, by torch's rule."""
        reach = self.dilation * (self.kernel - 1)
        if self.transposed:
            return (size - 1) * self.stride - 2 * self.padding + reach + self.output_padding + 1
        free = size + 2 * self.padding - reach - 1
        if not self.ceil_mode:
            return free // self.stride + 1
        steps = -(-free // self.stride)
        if steps * self.stride >= size + self.padding:  # a window may not start in the right padding
            steps -= 1
        return steps + 1
