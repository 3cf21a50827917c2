"""One matrix product of any dtype on any device, and the timing of several in a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..counters.cycle_stamps import mean_clock_hz
from ..tiles import Shape
from .clock_watch import Run, Watch

if TYPE_CHECKING:
    import torch

Product = Callable[[], object]


def flops_of(shape: Shape) -> int:
    m, n, k = shape
    return 2 * m * n * k


def product_of(device: torch.device, dtype: str, shape: Shape) -> Product:
    """A function that multiplies two random matrices of this dtype once; only it references them.

    Random numbers, because zeros draw less power and run faster than any real data; from a separate
    generator, to leave the caller's random state alone.
    """
    import torch

    from ...torch_private import table

    if device.type == "cpu" and dtype in ("tf32", "fp8", "int8"):
        raise NotImplementedError(f"torch has no fast {dtype} matrix product on a CPU")
    if dtype == "fp4":
        raise NotImplementedError("torch has no plain fp4 matrix product")
    m, n, k = shape
    generator = torch.Generator(device=device).manual_seed(0)
    a = torch.randn(m, k, device=device, generator=generator)
    b = torch.randn(n, k, device=device, generator=generator)
    if dtype == "fp8":
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        scaled_mm = _product(table.SCALED_MM)
        return lambda: scaled_mm(
            a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if dtype == "int8":
        ai, bi = (x.mul(40).clamp(-127, 127).to(torch.int8) for x in (a, b))
        int_mm = _product(table.INT_MM)
        return lambda: int_mm(ai, bi.t())
    kind = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }[dtype]
    left, right = a.to(kind), b.to(kind).t()
    out = torch.empty(m, n, device=device, dtype=kind)
    return lambda: torch.mm(left, right, out=out)


def _product(path: str) -> Callable[..., object]:
    """A product under a private name of torch."""
    from ...torch_private import table
    from ...torch_private.find import ABSENT

    found = table.get(path)
    if found is ABSENT:
        raise NotImplementedError(table.reason(path))
    return found  # type: ignore[no-any-return]


@contextmanager
def fp32_precision(dtype: str) -> Iterator[None]:
    """fp32 products on CUDA round to TF32 exactly if `dtype` is tf32; the user's setting is restored."""
    import torch

    matmul = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    before = getattr(matmul, name)
    wanted = {"fp32_precision": ("ieee", "tf32"), "allow_tf32": (False, True)}[name][dtype == "tf32"]
    setattr(matmul, name, wanted)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def timed(product: Product, device: torch.device, products: int, watch: Watch) -> Run:
    """Seconds the device spends on some products: by its own events on CUDA, else by the wall clock.

    The stamps are outside the timed interval, right before and after it; the driver is queried while the
    device runs the queued work.
    """
    import torch

    before = watch.stamp()
    if device.type == "cuda":
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(products):
            product()
        end.record()
        after, sample = watch.stamp(), watch.read_driver()
        synchronize(device)
        seconds = start.elapsed_time(end) / 1e3
    else:
        synchronize(device)
        begin_s = time.perf_counter()
        for _ in range(products):
            product()
        synchronize(device)
        seconds = time.perf_counter() - begin_s
        after, sample = watch.stamp(), watch.read_driver()
    clock_hz = None if before is None or after is None else mean_clock_hz(before, after)
    return Run(products=products, seconds=seconds, clock_hz=clock_hz, sample=sample)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queue; a CPU has none."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)
