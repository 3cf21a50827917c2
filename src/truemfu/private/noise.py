"""Gaussian noise for a clipped sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError

_SECURE_DRAWS = 4


def noise_like(
    total: Tensor, dtype: torch.dtype, std: float, generator: torch.Generator | None, *, secure: bool
) -> Tensor:
    """Gaussian noise of this dtype, in the shape of `total`.

    The secure one is the sum of four draws over two, after one draw that is thrown away (arXiv 2107.10138,
    section 5.1, as in Opacus): the lowest bits of a single draw may tell the sum below it.
    """

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.normal(0.0, std, shape, generator=generator, dtype=dtype, device=total.device)

    if not secure:
        return draw(total.shape)
    draw((1,))
    noise = draw(total.shape).div_(2)
    for _ in range(_SECURE_DRAWS - 1):
        noise.add_(draw(total.shape), alpha=0.5)
    return noise


def secure_generator() -> torch.Generator:
    """Cryptographically safe random numbers of the system, by the package that Opacus uses."""
    try:
        import torchcsprng
    except ImportError as error:
        raise UsageError(
            "secure_mode needs the package torchcsprng, as in Opacus: github.com/pytorch/csprng has its "
            "installation"
        ) from error
    generator: torch.Generator = torchcsprng.create_random_device_generator("/dev/urandom")
    return generator
