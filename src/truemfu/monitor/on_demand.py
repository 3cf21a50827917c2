"""MFU on demand: from a model, the size of its batch, the seconds of a step, and a mode for the FLOPs.

    model, sizes ──► generated batch ──► FLOPs by the mode ──► ÷ (step time × peak)

    smart      a closed form, fitted at the first call and cached until the model changes
    profiler   a forward and backward pass recorded by torch.profiler, at each call
    estimate   the model's structure; nothing is run
    hybrid     smart where the GPU has counters (they measure executed FLOPs, and MFU is about the FLOPs the
               model needs), profiler elsewhere

A mode that fails is replaced by the next (profiler, smart, estimate), with one warning that gives the reason.
These functions are called in training loops, so they raise only for an unknown mode: without a result they
return None.
"""

from __future__ import annotations

import functools
import math
import numbers
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ModelError, TruemfuError, UsageError, closest, one_line, warn_once
from ..flops import (
    AutocastState,
    BatchRequest,
    FlopCount,
    FlopModel,
    StepProfiler,
    autocast_state,
    check_call,
    estimate_flops,
    example_batch,
    has_values,
    shadow_step,
    unwrap,
    warn_uncounted,
)
from ..hardware.detect import get_gpu_peak_flops, known_spec, override_flops_per_s
from ..torch_private.dispatch import check_counts
from ..utilization import Utilization, calculate_mfu
from .config import MODES
from .hybrid.hardware_watch import counters_of
from .step_flops.source import dominant_dtype
from .watching.fingerprint import Fingerprint, fingerprint

Batch = dict[str, Any]


def calculate_mfu_with_profiler(
    model: nn.Module, batch_size: int, seq_length: int, step_time: float
) -> float | None:
    """MFU of a training step of `step_time` seconds, its FLOPs measured with torch.profiler.

    Like `calculate_precise_mfu` with the mode "profiler".
    """
    return calculate_precise_mfu(model, batch_size, seq_length, step_time, "profiler")


def calculate_precise_mfu(
    model: nn.Module,
    batch_size: int,
    seq_length: int,
    step_time: float,
    measurement_mode: str = "smart",
    actual_flops: float | None = None,
) -> float | None:
    """MFU of a training step of `step_time` seconds on `batch_size` samples of `seq_length` tokens.

    The step is that of one device. Its batch is generated from the model's signature and configuration; a
    vision model gets one image per sample. The peak is that of the model's device for the dtypes of the
    products, or `TRUEMFU_PEAK_TFLOPS`.

    `actual_flops`, if given, is used as the numerator, and the batch's sizes do not matter. The peak is then
    that of autocast's dtype, or else of the dtype most parameters have.

    Returns None, with one warning that gives the reason, where MFU is unknown; for a CPU, which has no known
    peak, without a warning.
    """
    if measurement_mode not in MODES:
        raise UsageError(
            f"measurement_mode must be one of {', '.join(MODES)}; got {measurement_mode!r}"
            f"{closest(str(measurement_mode), MODES)}"
        )
    wrong = _wrong_argument(model, batch_size, seq_length, step_time, actual_flops)
    if wrong is not None:
        warn_once(f"no MFU: {wrong}")
        return None
    try:
        return _mfu(model, batch_size, seq_length, float(step_time), measurement_mode, actual_flops)
    except TruemfuError as error:
        warn_once(f"no MFU: {error}")
    except Exception as error:  # a training run must not stop because a metric is missing
        warn_once(f"no MFU: {one_line(error)}")
    return None


def _mfu(
    model: nn.Module,
    samples: int,
    length: int,
    step_time_s: float,
    mode: str,
    actual_flops: float | None,
) -> float | None:
    device = _device_of(model)
    if actual_flops is not None:
        peak_flops_per_s = get_gpu_peak_flops(device, dominant_dtype(model, device))
        return calculate_mfu(float(actual_flops), step_time_s, peak_flops_per_s)
    if override_flops_per_s() is None and known_spec(device) is None:
        return None  # without a peak the FLOPs are not needed
    count = _count(model, _generated_batch(model, int(samples), int(length)), mode)
    return None if count is None else Utilization.of(count, step_time_s, device=device).mfu


def _wrong_argument(
    model: Any, batch_size: Any, seq_length: Any, step_time: Any, actual_flops: Any
) -> str | None:
    """What is wrong with the arguments, in the same words at every step; None if nothing is."""
    if not isinstance(model, nn.Module):
        return f"model must be a torch.nn.Module; got {type(model).__name__}"
    if not _is_positive(step_time):
        return f"step_time must be a positive number of seconds; got {_describe(step_time)}"
    if actual_flops is not None:
        if not _is_positive(actual_flops):
            return f"actual_flops must be a positive number; got {_describe(actual_flops)}"
        return None
    for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
        if not (_is_positive(value) and isinstance(value, numbers.Integral)):
            return f"{name} must be a positive integer; got {_describe(value)}"
    return None


def _is_positive(value: Any) -> bool:
    is_number: bool = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and bool(value > 0)


def _describe(value: Any) -> str:
    """A wrong value without its digits, so that different ones cause one warning."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return type(value).__name__
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return "a fraction" if number > 0 else "zero" if number == 0 else "a negative number"


def _generated_batch(model: nn.Module, samples: int, length: int) -> Batch:
    check_call(model, ())
    inner = unwrap(model)
    try:
        with torch.inference_mode(False):  # tensors created inside it cannot be trained on
            return example_batch(inner, BatchRequest(samples=samples, length=length))
    except UsageError:
        raise ModelError(
            f"no batch can be generated for {type(inner).__name__}: "
            "pass actual_flops=truemfu.count_flops(model, batch).model_flops"
        ) from None


def _count(model: nn.Module, batch: Batch, mode: str) -> FlopCount | None:
    """The FLOPs by the first mode that works, beginning with the requested one."""
    if mode == "hybrid":
        mode = _hybrid_substitute(_device_of(model))
    ways = list(_WAYS)[list(_WAYS).index(mode) :]
    name = type(unwrap(model)).__name__
    for way, following in zip(ways, (*ways[1:], None), strict=True):
        try:
            count = _WAYS[way](model, batch)
            if not count.model_flops:
                raise ModelError("no matrix product was found")
        except Exception as error:  # a training run must not stop because a metric is missing
            instead = "so there is no MFU" if following is None else f"so mode {following!r} is used"
            warn_once(f"mode {way!r} cannot find the FLOPs of {name} ({one_line(error)}), {instead}")
        else:
            return count
    return None


@functools.cache
def _hybrid_substitute(device: torch.device | None) -> str:
    found = counters_of(device or torch.device("cpu"))
    if not isinstance(found, str):
        found[0].close()
        return "smart"
    warn_once(f"measurement_mode='hybrid' has no hardware counters ({found}): torch.profiler is used instead")
    return "profiler"


_cached_forms: weakref.WeakKeyDictionary[nn.Module, tuple[Fingerprint, AutocastState, FlopModel]] = (
    weakref.WeakKeyDictionary()
)
"""A model's counts and closed forms, after what they hold for; they do not keep the model alive."""


def _smart(model: nn.Module, batch: Batch) -> FlopCount:
    inner = unwrap(model)
    mark, autocast = fingerprint([inner]), autocast_state()
    cached = _cached_forms.get(inner)
    if cached is None or cached[:2] != (mark, autocast):
        cached = _cached_forms[inner] = mark, autocast, FlopModel.fit(weakref.ref(inner), batch)
    return cached[2](batch)


def _profiled(model: nn.Module, batch: Batch) -> FlopCount:
    """A recorded forward and backward pass of a twin that shares the model's weights and nothing else."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        raise ModelError("in a job of several ranks, a pass on one rank could wait for the others")
    check_counts()
    if not has_values(unwrap(model)):
        raise ModelError("a model with meta, fake or sharded tensors cannot run here")
    device = _device_of(model)
    profiler = StepProfiler()
    with (
        shadow_step(model, (), batch, None, _shared_weight, device=device) as step,
        torch.compiler.set_stance("force_eager"),
    ):
        profiler.start()
        try:
            step()
        finally:
            profile = profiler.stop()
    count = profile.count()
    warn_uncounted(count)
    return count


def _shared_weight(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Another tensor on a weight's memory, with its own gradient; a copy of anything else."""
    own = tensor.detach()
    made = own if isinstance(tensor, nn.Parameter) else own.to(device or own.device, copy=True)
    return made.requires_grad_(tensor.requires_grad)


_WAYS: dict[str, Callable[[nn.Module, Batch], FlopCount]] = {
    "profiler": _profiled,
    "smart": _smart,
    "estimate": estimate_flops,
}


def _device_of(model: nn.Module) -> torch.device | None:
    """The model's device; None, the current accelerator, if it has no parameters with data."""
    first = next((p for p in model.parameters() if not p.is_meta), None)
    return None if first is None else first.device
