"""The matmul ceiling: what this very device reaches now, when it does nothing but large matrix products.

A datasheet's peak holds at a clock that the power limit may not allow, so a run is best read beside two
measured figures: `burst` (the best short run: the silicon before it heats up) and `sustained` (the mean over
the second half of a longer run: what a training job can hope for). Both use random numbers: zeros draw less
power and run faster than any real data.

    each dtype: best of short runs, shape by shape ─► then each dtype: a long run at its best shape

All bursts come first, so that no dtype is measured on a chip that another one has heated.

Nothing outside changes: own random generator, torch's TF32 setting put back, operands freed after each dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from .detect import dtype_name, spec_of

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int, int]
"""m, n, k of a product of m×k by k×n: 2·m·n·k FLOP."""

_ACCELERATOR_DTYPES = ("bf16", "fp16", "tf32", "fp8")
_CPU_DTYPES = ("fp32", "bf16")

# Large enough to fill any chip of the table, small enough for 24 GB; uneven because tiles fit some better.
_ACCELERATOR_SHAPES: tuple[Shape, ...] = (
    (4096, 4096, 4096),
    (8192, 8192, 4096),
    (8192, 8192, 8192),
    (6144, 17920, 2816),
    (16384, 8192, 4096),
)
_CPU_SHAPES: tuple[Shape, ...] = ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 1024))

_ACCELERATOR_SECONDS = 2.0
_CPU_SECONDS = 0.5

_WARM_UP_S = 0.02
_SHORT_RUNS = 3
_CHUNKS_PER_LONG_RUN = 20


@dataclass(frozen=True, kw_only=True)
class MatmulCeiling:
    """What one dtype reached. Where the device cannot run it, the figures are None and `skipped` says why."""

    dtype: str
    device_name: str
    shape: Shape | None
    burst_flops_per_s: float | None
    sustained_flops_per_s: float | None
    datasheet_flops_per_s: float | None
    skipped: str | None = None


def measure_ceiling(
    device: torch.device | str | int | None = None,
    dtypes: Sequence[torch.dtype | str] | None = None,
    seconds: float | None = None,
) -> tuple[MatmulCeiling, ...]:
    """Time large matrix products on `device` (None: the current accelerator, else the CPU), dtype by dtype.

    `dtypes` defaults to bf16, fp16, tf32 and fp8 on an accelerator, fp32 and bf16 on a CPU; `seconds` is the
    length of each sustained run, 2 s on an accelerator and 0.5 s on a CPU. The whole takes about that long
    per dtype, plus a fraction of a second.
    """
    import torch

    target = _as_device(device)
    on_cpu = target.type == "cpu"
    if dtypes is None:
        dtypes = _CPU_DTYPES if on_cpu else _ACCELERATOR_DTYPES
    if seconds is None:
        seconds = _CPU_SECONDS if on_cpu else _ACCELERATOR_SECONDS
    if not seconds > 0:
        raise UsageError(f"seconds must be a positive number; got {seconds!r}")
    names = tuple(dtype_name(dtype) for dtype in dtypes)
    shapes = _CPU_SHAPES if on_cpu else _ACCELERATOR_SHAPES
    where: AbstractContextManager[object] = (
        torch.cuda.device(target) if target.type == "cuda" else nullcontext()
    )
    with where, torch.no_grad():
        bursts = [_best_burst(target, name, shapes, seconds) for name in names]
        return tuple(
            _ceiling(target, name, burst, seconds) for name, burst in zip(names, bursts, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class _Burst:
    """The best shape of one dtype and what it reached; or why there is none."""

    shape: Shape | None = None
    flops_per_s: float | None = None
    skipped: str | None = None


def _best_burst(device: torch.device, dtype: str, shapes: Sequence[Shape], patience_s: float) -> _Burst:
    """Try the shapes in turn; a product that takes longer than `patience_s` ends the search."""
    import torch

    best = _Burst(skipped="no shape fits in memory")
    with _fp32_precision(dtype):
        for shape in shapes:
            try:
                burst_s = _burst_s(_product(device, dtype, shape), device)
            except torch.OutOfMemoryError:
                continue
            except (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError) as error:
                return _Burst(skipped=_first_line(error))
            flops_per_s = _flops(shape) / burst_s
            if best.flops_per_s is None or flops_per_s > best.flops_per_s:
                best = _Burst(shape=shape, flops_per_s=flops_per_s)
            if burst_s > patience_s:
                break
    return best


def _ceiling(device: torch.device, dtype: str, burst: _Burst, seconds: float) -> MatmulCeiling:
    """The burst of one dtype together with a run of `seconds` at its best shape."""
    spec = spec_of(device)
    sustained_flops_per_s: float | None = None
    if burst.shape is not None and burst.flops_per_s is not None:
        flops = _flops(burst.shape)
        with _fp32_precision(dtype):
            product = _product(device, dtype, burst.shape)
            sustained_flops_per_s = flops / _sustained_s(product, device, seconds, flops / burst.flops_per_s)
    return MatmulCeiling(
        dtype=dtype,
        device_name=_name_of(device),
        shape=burst.shape,
        burst_flops_per_s=burst.flops_per_s,
        sustained_flops_per_s=sustained_flops_per_s,
        datasheet_flops_per_s=None if spec is None else spec.peak(dtype),
        skipped=burst.skipped,
    )


def _burst_s(product: Callable[[], object], device: torch.device) -> float:
    """Seconds of one product in the best of a few short runs."""
    once_s = _run_s(product, device, 1)
    repeats = max(1, round(_WARM_UP_S / max(once_s, 1e-6)))
    _run_s(product, device, repeats)
    return min(_run_s(product, device, repeats) / repeats for _ in range(_SHORT_RUNS))


def _sustained_s(
    product: Callable[[], object], device: torch.device, seconds: float, expected_s: float
) -> float:
    """Mean seconds of one product over the second half of a run of about `seconds`.

    The run is cut into chunks, so that it ends by the clock and not by an estimate made before the chip
    slowed.
    """
    repeats = max(1, round(seconds / _CHUNKS_PER_LONG_RUN / expected_s))
    chunks_s: list[float] = []
    while sum(chunks_s) < seconds:
        chunks_s.append(_run_s(product, device, repeats))
    second_half = chunks_s[len(chunks_s) // 2 :]
    return sum(second_half) / (len(second_half) * repeats)


def _run_s(product: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds the device spends on `repeats` products: by its own events on CUDA, else by the wall clock."""
    import torch

    if device.type == "cuda":
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            product()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    _synchronize(device)
    begin_s = time.perf_counter()
    for _ in range(repeats):
        product()
    _synchronize(device)
    return time.perf_counter() - begin_s


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _product(device: torch.device, dtype: str, shape: Shape) -> Callable[[], object]:
    """A function that multiplies two random matrices of this dtype once, into the same output each time."""
    import torch

    if device.type == "cpu" and dtype in ("tf32", "fp8", "int8"):
        raise NotImplementedError(f"torch has no fast {dtype} product on a CPU")
    if dtype == "fp4":
        raise NotImplementedError("torch has no plain fp4 product")
    m, n, k = shape
    generator = torch.Generator(device=device).manual_seed(0)
    a = torch.randn(m, k, device=device, generator=generator)
    b = torch.randn(n, k, device=device, generator=generator)
    if dtype == "fp8":
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(
            a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if dtype == "int8":
        ai, bi = (x.mul(40).clamp(-127, 127).to(torch.int8) for x in (a, b))
        return lambda: torch._int_mm(ai, bi.t())
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


@contextmanager
def _fp32_precision(dtype: str) -> Iterator[None]:
    """fp32 products on CUDA round to TF32 exactly when `dtype` is tf32; the user's setting comes back."""
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


def _as_device(device: torch.device | str | int | None) -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return accelerator or torch.device("cpu")
    if isinstance(device, int):
        if accelerator is None:
            raise UsageError(f"there is no accelerator here, so no device {device}; use device='cpu'")
        return torch.device(accelerator.type, device)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device must be one torch can open, such as 'cuda:0'; got {device!r}") from None
    if found.type != "cpu" and (accelerator is None or accelerator.type != found.type):
        raise UsageError(f"there is no {found.type} device here; use device='cpu'")
    return found


def _name_of(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    return str(device)


def _flops(shape: Shape) -> int:
    m, n, k = shape
    return 2 * m * n * k


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
