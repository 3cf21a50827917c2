"""MFU when asked for: a model, the size of its batch, the seconds of a step, and the way to find the FLOPs.

    model, sizes ──► made-up batch ──► FLOPs by the mode ──► ÷ (step time × peak)

    smart      a closed form, fitted at the first call and kept as long as the model stays what it was
    profiler   a forward and backward pass recorded by torch.profiler, at each call
    estimate   the model's structure; nothing is run
    hybrid     counters tell what was executed and MFU is about what the model needs, so: smart where there
               are counters, the profiler where there are none

A way that fails is replaced by the next (profiler, smart, estimate), and one warning says why. These
functions are called in training loops, so apart from an unknown mode nothing they are given makes them raise:
without a number they return None.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..errors import ModelError, TruemfuError, UsageError, closest, one_line, warn_once
from ..flops import (
    AutocastState,
    BatchRequest,
    FlopCount,
    FlopModel,
    Shadow,
    StepProfiler,
    autocast_state,
    check_call,
    count_flops,
    estimate_flops,
    example_batch,
    has_values,
    loss_of,
    own_random_draws,
    snapshot,
    uncompiled,
    untouched_casts,
    untouched_globals,
    unwrap,
    warn_uncounted,
)
from ..hardware.detect import get_gpu_peak_flops, known_spec, override_flops_per_s
from ..torch_private.dispatch import check_counts, disable_modes
from ..torch_private.trees import tree_map_only
from ..utilization import Utilization, calculate_mfu
from .config import MODES
from .row_side.given_flops import dominant_dtype
from .training_side.fingerprint import fingerprint
from .training_side.hardware_watch import counters_of

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

    The step is that of one device. Its batch is made up from the model's signature and configuration; a model
    of images gets one per sample. The peak is that of the model's device for the dtypes of the products, or
    `TRUEMFU_PEAK_TFLOPS`.

    `actual_flops`, where given, is the numerator as it is, and the batch's sizes do not matter. The peak then
    is that of the dtype autocast has set, else of the one most parameters have.

    None, with one warning that says why, where there is no number; a CPU has no peak, without a warning.
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
    except Exception as error:  # a training run must not stop for want of a number
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
        return None  # without a peak there is nothing to measure for
    count = _count(model, _made_up(model, int(samples), int(length)), mode)
    return None if count is None else Utilization.of(count, step_time_s, device=device).mfu


def _wrong_argument(
    model: Any, batch_size: Any, seq_length: Any, step_time: Any, actual_flops: Any
) -> str | None:
    """What is wrong with the arguments, in words that stay the same from step to step; None if nothing is."""
    if not isinstance(model, nn.Module):
        return f"model must be a torch.nn.Module; got {type(model).__name__}"
    if not _is_positive(step_time):
        return f"step_time must be a positive number of seconds; got {_in_words(step_time)}"
    if actual_flops is not None:
        if not _is_positive(actual_flops):
            return f"actual_flops must be a positive number; got {_in_words(actual_flops)}"
        return None
    for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
        if not (_is_positive(value) and isinstance(value, numbers.Integral)):
            return f"{name} must be a positive integer; got {_in_words(value)}"
    return None


def _is_positive(value: Any) -> bool:
    is_number: bool = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and bool(value > 0)


def _in_words(value: Any) -> str:
    """A wrong value without its digits, so that a thousand different ones make one warning."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return type(value).__name__
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return "a fraction" if number > 0 else "zero" if number == 0 else "a negative number"


def _made_up(model: nn.Module, samples: int, length: int) -> Batch:
    check_call(model, ())
    inner = unwrap(model)
    try:
        with torch.inference_mode(False):  # tensors made inside it could not be trained on
            return example_batch(inner, BatchRequest(samples=samples, length=length))
    except UsageError:
        raise ModelError(
            f"no batch can be made up for {type(inner).__name__}: "
            "pass actual_flops=truemfu.count_flops(model, batch).model_flops"
        ) from None


def _count(model: nn.Module, batch: Batch, mode: str) -> FlopCount | None:
    """The FLOPs by the first way that works, from the one asked for downwards."""
    if mode == "hybrid":
        mode = _instead_of_hybrid(_device_of(model))
    ways = list(_WAYS)[list(_WAYS).index(mode) :]
    name = type(unwrap(model)).__name__
    for way, following in zip(ways, (*ways[1:], None), strict=True):
        try:
            count = _WAYS[way](model, batch)
            if not count.model_flops:
                raise ModelError("no matrix product was found")
        except Exception as error:  # a training run must not stop for want of a number
            instead = "so there is no MFU" if following is None else f"so mode {following!r} takes over"
            warn_once(f"mode {way!r} has no FLOPs for {name} ({one_line(error)}), {instead}")
        else:
            return count
    return None


@functools.cache
def _instead_of_hybrid(device: torch.device | None) -> str:
    found = counters_of(device or torch.device("cpu"))
    if not isinstance(found, str):
        found[0].close()
        return "smart"
    warn_once(
        f"measurement_mode='hybrid' has no hardware counters ({found}): torch.profiler measures instead"
    )
    return "profiler"


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A closed form and what it was fitted for."""

    fingerprint: tuple[int, int]
    autocast: AutocastState
    form: FlopModel


_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def _smart(model: nn.Module, batch: Batch) -> FlopCount:
    inner = unwrap(model)
    mark, autocast = fingerprint(inner), autocast_state()
    kept = _kept.get(inner)
    if kept is None or (kept.fingerprint, kept.autocast) != (mark, autocast):
        try:
            # a form holds on to its model, so it is fitted to a snapshot: nothing must keep the model alive
            form = FlopModel.fit(snapshot(inner), batch)
        except TruemfuError:  # a model that has to be run with its values, which a snapshot has not
            return count_flops(inner, batch)
        kept = _kept[inner] = _Kept(fingerprint=mark, autocast=autocast, form=form)
    return kept.form(batch)


def _profiled(model: nn.Module, batch: Batch) -> FlopCount:
    """A recorded forward and backward pass of a twin that shares the model's weights and nothing else."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        raise ModelError("in a job of several ranks, a pass on one could wait for the others")
    check_counts()
    if not has_values(unwrap(model)):
        raise ModelError("a model without values cannot run")
    device = _device_of(model)
    profiler = StepProfiler()
    with (
        disable_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        untouched_globals(model),
        own_random_draws(model) as drawn,
        untouched_casts(),
        uncompiled(),
    ):
        drawn |= {"torch", "cuda"}
        twin = Shadow(_shared_weight).model(model)
        arguments = tree_map_only(torch.Tensor, lambda t: t.to(device), batch)
        profiler.start()
        try:
            loss_of(twin(**arguments), None).backward()
        finally:
            profile = profiler.stop()
    count = profile.count()
    warn_uncounted(count)
    return count


def _shared_weight(tensor: torch.Tensor, dtype: torch.dtype, place: torch.device | None) -> torch.Tensor:
    """A weight's memory under another tensor, for gradients of its own; a copy of anything else."""
    made = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
    return made.requires_grad_(tensor.requires_grad)


_WAYS: dict[str, Callable[[nn.Module, Batch], FlopCount]] = {
    "profiler": _profiled,
    "smart": _smart,
    "estimate": estimate_flops,
}


def _device_of(model: nn.Module) -> torch.device | None:
    """Where the model is; None, the current accelerator, for one that is nowhere."""
    first = next((p for p in model.parameters() if not p.is_meta), None)
    return None if first is None else first.device
