"""How convolutions and poolings change the size of an image or audio input, for closed forms.

The FLOPs of a convolution network are sums over its layers of (output height × output width), and each size
follows from the previous one by a rounded division. From the steps recorded in one run, another input's sizes
can be computed without running anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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


def _spread(value: Any, dims: int, default: int) -> list[int]:
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    if not numbers or numbers[0] is None:
        return [default] * dims
    return [int(n) for n in (numbers * dims if len(numbers) == 1 else numbers)][:dims]


def size_steps(name: str, args: Sequence[Any], out: Any) -> list[tuple[int, int, SizeStep]]:
    """(size in, size out, step) for each spatial dimension of a convolution or pooling call."""
    operator = name.removeprefix("aten::")
    if operator == "convolution":
        x, weight, _, stride, padding, dilation, transposed, output_padding = args[:8]
        dims = weight.dim() - 2
        strides, paddings = _spread(stride, dims, 1), _spread(padding, dims, 0)
        dilations, extras = _spread(dilation, dims, 1), _spread(output_padding, dims, 0)
        steps = [
            SizeStep(k, strides[i], paddings[i], dilations[i], bool(transposed), extras[i])
            for i, k in enumerate(weight.shape[2:])
        ]
        result = out
    elif operator.startswith(("max_pool", "avg_pool")) and not operator.endswith("backward"):
        x = args[0]
        dims = int(operator[operator.index("pool") + 4])
        result = out[0] if isinstance(out, (tuple, list)) else out
        kernels = _spread(args[1], dims, 1)
        strides = _spread(args[2] if len(args) > 2 else None, dims, 0)
        paddings = _spread(args[3] if len(args) > 3 else None, dims, 0)
        is_max = operator.startswith("max")
        dilations = _spread(args[4] if is_max and len(args) > 4 else None, dims, 1)
        position = 5 if is_max else 4
        ceil = bool(args[position]) if len(args) > position else False
        steps = [
            SizeStep(kernels[i], strides[i] or kernels[i], paddings[i], dilations[i], ceil_mode=ceil)
            for i in range(dims)
        ]
    else:
        return []
    return list(zip(x.shape[-dims:], result.shape[-dims:], steps, strict=True))
