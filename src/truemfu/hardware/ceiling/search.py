"""The fastest shape of a product: in a burst, and sustained under the power limit.

    search: each shape, a few short runs with a rest before each      ─► shapes, the best burst first
    hold:   the better ones, a trial each, in a row on a loaded chip  ─► the best of them, held

The two differ. A burst has power to spare, and the shape that fills the tensor pipe best wins. In a sustained
run the power limit sets the clock, and the shape with the most FLOP per joule wins. A training has products
of many shapes, so its ceiling is the best sustained one.

The device idles before every short run, because the power limit takes effect within 0.1 s of load: otherwise
the last shapes and dtypes would be measured on a slower chip than the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..tiles import Shape
from .clock_watch import Run, Watch
from .products import Product, flops_of, fp32_precision, product_of, timed

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]

# Squares of three sizes, and the best of thousands of shapes on an A100 and on an H100
# (S. Bekman's ml-engineering). All fit in 8 GB, in fp64 too. The small ones stay in a large L2 cache.
_ACCELERATOR_SHAPES: tuple[Shape, ...] = (
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (6912, 16384, 2048),
    (8192, 8192, 4096),
    (6144, 17920, 2816),
    (8192, 8192, 8192),
)
_CPU_SHAPES: tuple[Shape, ...] = ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 1024))
_TILE = (256, 128)

_SHORT_RUNS = 3
_SHORT_RUN_S = 0.01
_CPU_SHORT_RUN_S = 0.02
_REST_S = 0.05
_LONGEST_PRODUCT_S = 0.2

# An H200's clock oscillates for 1 s after load begins, and takes 0.1 s to follow a change of shape.
_HEAT_S, _TRIAL_S = 1.0, 0.2
_NEAR_BEST = 0.8
_CHUNKS_PER_RUN = 20


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A shape and its runs; `loaded_s` is how long the device had been under load at their end."""

    shape: Shape
    runs: tuple[Run, ...]
    loaded_s: float

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def flops_per_s(self) -> float:
        return flops_of(self.shape) * sum(run.products for run in self.runs) / self.seconds


def shapes_for(device: torch.device) -> tuple[Shape, ...]:
    """The shapes to try, the smallest first."""
    import torch

    if device.type == "cpu":
        return _CPU_SHAPES
    fitted: tuple[Shape, ...] = ()
    if device.type == "cuda":
        fitted = whole_waves(torch.cuda.get_device_properties(device).multi_processor_count)
    return tuple(sorted(dict.fromkeys((*_ACCELERATOR_SHAPES, *fitted)), key=flops_of))


def whole_waves(sm_count: int) -> tuple[Shape, ...]:
    """A small and a large shape whose tiles are a whole number for every SM, so that none is idle at the end.

    A product is cut into tiles of 256×128 or a part of that; the SMs work through them in waves, and the
    last wave leaves some idle unless the tiles are a multiple of the SMs: 132 of them as 11 × 12 here, 82 as
    2 × 41.
    """
    down = next(side for side in range(math.isqrt(sm_count), 0, -1) if sm_count % side == 0)
    m, n = _TILE[0] * down, _TILE[1] * sm_count // down
    return tuple(
        (m * max(1, round(side / m)), n * max(1, round(side / n)), k)
        for side, k in ((2816, 2048), (8192, 4096))
    )


def search(device: torch.device, dtype: str, watch: Watch, progress: Progress) -> list[Tried] | str:
    """The burst of every shape, the best first; or the reason why there is none.

    A shape with a very long product is left out: smaller ones saturate slow chips and dtypes.
    """
    import torch

    tried: list[Tried] = []
    trouble = "no shape fits in memory"
    with fp32_precision(dtype):
        for shape in shapes_for(device):
            if tried and flops_of(shape) > _LONGEST_PRODUCT_S * max(one.flops_per_s for one in tried):
                continue
            progress(f"{dtype}: burst, {named(shape)}")
            try:
                run = _burst(product_of(device, dtype, shape), device, watch)
            except torch.OutOfMemoryError:
                continue
            except (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError) as error:
                trouble = _first_line(error)
                continue
            tried.append(Tried(shape=shape, runs=(run,), loaded_s=run.seconds))
    return sorted(tried, key=lambda one: -one.flops_per_s) or trouble


def hold(
    device: torch.device,
    dtype: str,
    bursts: Sequence[Tried],
    watch: Watch,
    seconds: float,
    progress: Progress,
    *,
    rested: bool,
) -> Tried:
    """The second half of a run of `seconds` at the best sustained shape among those with a good burst.

    An idle chip is loaded first; then each shape has a short trial, one right after the other.
    """
    best = bursts[0]
    near = [one for one in bursts if one.flops_per_s >= _NEAR_BEST * best.flops_per_s]
    loaded_s = 0.0

    def load(one: Tried, load_s: float, eye: Watch) -> Tried:
        nonlocal loaded_s
        product, expected_s = product_of(device, dtype, one.shape), flops_of(one.shape) / one.flops_per_s
        runs = _loaded(product, device, load_s, expected_s, eye)
        loaded_s += sum(run.seconds for run in runs)
        return Tried(shape=one.shape, runs=_second_half(runs), loaded_s=loaded_s)

    with fp32_precision(dtype):
        if len(near) > 1:
            unwatched = Watch()
            if rested:
                progress(f"{dtype}: loading the device, {named(best.shape)}")
                load(best, min(_HEAT_S, seconds / 2), unwatched)
            trials: list[Tried] = []
            for one in near:
                progress(f"{dtype}: trying under load, {named(one.shape)}")
                trials.append(load(one, min(_TRIAL_S, seconds / 8), unwatched))
            best = max(trials, key=lambda one: one.flops_per_s)
        progress(f"{dtype}: sustained for {seconds:g} s, {named(best.shape)}")
        return load(best, seconds, watch)


def named(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _burst(product: Product, device: torch.device, watch: Watch) -> Run:
    """The best of a few short runs."""
    short_s, rest_s = (_CPU_SHORT_RUN_S, 0.0) if device.type == "cpu" else (_SHORT_RUN_S, _REST_S)
    unwatched = Watch()
    timed(product, device, 1, unwatched)  # the first one also loads its kernel
    once_s = timed(product, device, 1, unwatched).seconds
    products = max(1, round(short_s / max(once_s, 1e-6)))
    runs: list[Run] = []
    for _ in range(_SHORT_RUNS):
        time.sleep(rest_s)
        runs.append(timed(product, device, products, watch))
    return min(runs, key=lambda run: run.seconds)


def _loaded(
    product: Product, device: torch.device, seconds: float, expected_s: float, watch: Watch
) -> list[Run]:
    """Consecutive runs, for about `seconds` in all.

    Split into runs so that the clock ends it, not an estimate made before the chip slowed down.
    """
    products = max(1, round(seconds / _CHUNKS_PER_RUN / expected_s))
    runs: list[Run] = []
    while sum(run.seconds for run in runs) < seconds:
        runs.append(timed(product, device, products, watch))
    return runs


def _second_half(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The last runs, which together last half of the whole or more."""
    half_s = sum(run.seconds for run in runs) / 2
    first, left_s = len(runs), 0.0
    while left_s < half_s:
        first -= 1
        left_s += runs[first].seconds
    return tuple(runs[first:])


def _first_line(error: Exception) -> str:
    """Torch appends long hints to some errors."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
