"""Gaussian noise for a clipped sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError

_SECURE_DRAWS = 4


def add_noise(total: Tensor, std: float, generator: torch.Generator | None, *, secure: bool) -> None:
    """Add Gaussian noise in place.

    The secure one is the sum of four draws over two, after one draw that is thrown away (arXiv 2107.10138,
    section 5.1, as in Opacus): the lowest bits of a single draw may tell the sum below it.
    """
    if std == 0:
        return
    if not secure:
        total.add_(torch.normal(0.0, std, total.shape, generator=generator, **_like(total)))
        return
    torch.normal(0.0, std, (1,), generator=generator, **_like(total))
    for _ in range(_SECURE_DRAWS):
        total.add_(torch.normal(0.0, std, total.shape, generator=generator, **_like(total)), alpha=0.5)


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


def _like(total: Tensor) -> dict[str, Any]:
    return {"dtype": total.dtype, "device": total.device}
