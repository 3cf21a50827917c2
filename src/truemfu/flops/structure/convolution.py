"""Convolutions and poolings: which image or audio input they take, and its size after them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from torch import nn

from ..operators.conv_sizes import SizeStep
from . import module_types
from .source import FunctionalPool, names_in
from .streams import FEATURES, FRAMES, PIXELS, TARGET, TOKENS, FixedSize, Padded, Rows, Stream, Strided
from .work import Flow

if TYPE_CHECKING:
    from .walk import Walk

WIDTHS_NOTE = "layers do not fit one another in the order they are registered: sizes may be far off"
_JOINS = {"cat", "concat", "concatenate"}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_PADS = (
    *(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
)
RESIZERS = (*_PADS, *_POOLS, *_ADAPTIVE)


def convolve(walk: Walk, module: Any, path: str, flow: Flow) -> Flow:
    """Each output is a sum over the kernel and its group's channels (transposed: each input)."""
    trained = module_types.is_trained(module)
    taken = _taken(walk, module, flow)
    if taken is None:
        walk.uncounted[f"{type(module).__name__} in {path or 'the model'}"] += 1
        return replace(flow.trained(trained), width=module.out_channels)
    stream = taken.stream
    if stream.source == PIXELS:
        walk.pixel_channels = walk.pixel_channels or module.in_channels
    if module.padding == "same":  # a padding module before it is for other strides and does not run
        stream = replace(
            stream, steps=tuple(s[:-1] if s and isinstance(s[-1], Padded) else s for s in stream.steps)
        )
    steps = _steps(module, _is_padded_by_function(walk, module))
    out = replace(stream, steps=tuple((*old, *new) for old, new in zip(stream.steps, steps, strict=True)))
    seen = Rows(stream if isinstance(module, _TRANSPOSED) else out)
    unit = 2 * module.out_channels * (module.in_channels // module.groups) * prod(module.kernel_size)
    weights = [p for name, p in module.named_parameters() if not name.endswith("bias")]
    factor = any(p.requires_grad for p in weights) + taken.needs
    walk.add(path, "convolution", walk.dtype(module, weights[0], conv=True), seen, unit, unit * factor)
    if all(s and _is_cut(s[0], stream.source) for s in steps):
        out = stream
    after = replace(taken.trained(trained), stream=out, width=module.out_channels)
    walk.recent.append(after)
    return after


def _taken(walk: Walk, module: Any, flow: Flow) -> Flow | None:
    """The flow that a convolution takes: this one, an earlier one of its width, or a new image or audio.

    None if its size is unknown: an image built from plain features.
    """
    dims, stream = len(module.kernel_size), flow.stream
    fresh = Flow(Stream(FRAMES if dims == 1 else PIXELS, steps=((),) * dims))
    if stream.source == FEATURES and flow.width is None:
        return fresh
    if stream.source in (TOKENS, TARGET, FEATURES):
        if dims == 1 and (module.groups > 1 or module.in_channels == flow.width):
            return flow
        return None if stream.source == FEATURES else fresh
    if flow.width in (module.in_channels, None) and len(stream.steps) == dims:
        return flow
    if module.in_channels == walk.pixel_channels or len(stream.steps) != dims:
        return fresh
    wider = module.in_channels > (flow.width or 0)
    if wider and any(_JOINS & names_in(type(around).forward) for around in walk.around):
        return flow
    for earlier in reversed(walk.recent):
        if earlier.width == module.in_channels and len(earlier.stream.steps) == dims:
            if earlier.stream != stream:
                walk.notes[WIDTHS_NOTE] = None
            return earlier.trained(flow.needs)
    walk.notes[WIDTHS_NOTE] = None
    return flow


def _is_padded_by_function(walk: Walk, module: Any) -> bool:
    """Whether the forward that calls an unpadded convolution pads its input."""
    if len(walk.around) < 2 or max(module.kernel_size) == 1 or tuple(module.stride) == module.kernel_size:
        return False
    words = {word for name in names_in(type(walk.around[-2]).forward) for word in name.split("_")}
    return module.padding != "same" and not any(module.padding) and bool({"pad", "padding"} & words)


def _steps(module: Any, padded: bool) -> list[tuple[Any, ...]]:
    """The size step of a convolution in each dimension; empty if it keeps the size."""
    if module.padding == "same":
        return [()] * len(module.kernel_size)
    if padded:
        return [(Strided(n),) if n > 1 else () for n in module.stride]
    padding = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    transposed = isinstance(module, _TRANSPOSED)
    steps: list[tuple[Any, ...]] = []
    for i, kernel in enumerate(module.kernel_size):
        extra = module.output_padding[i] if transposed else 0
        step = SizeStep(kernel, module.stride[i], padding[i], module.dilation[i], transposed, extra)
        keeps_size = step.stride == 1 and not transposed and 2 * step.padding == step.dilation * (kernel - 1)
        steps.append(() if keeps_size else (step,))
    return steps


def _is_cut(step: Any, source: str) -> bool:
    """Whether a convolution has more padding than it needs, and its output is cut to the sequence length."""
    if not isinstance(step, SizeStep):
        return False
    reach = step.dilation * (step.kernel - 1)
    causal = step.padding == reach and source in (TOKENS, TARGET, FEATURES)
    return step.stride == 1 and reach > 0 and (causal or 2 * step.padding == reach + 1)


def resize(module: Any, flow: Flow) -> Flow:
    """A pooling or a padding that is a module."""
    stream = flow.stream
    if isinstance(module, _PADS) and flow.width is None and stream.source == FEATURES:
        dims = len(module.padding) // 2
        stream = Stream(FRAMES if dims == 1 else PIXELS, steps=((),) * dims)
    if stream.source not in (PIXELS, FRAMES):
        return flow
    dims = len(stream.steps)
    if isinstance(module, _PADS):  # the padding of the last dimension comes first
        ends = [sum(module.padding[2 * i : 2 * i + 2]) for i in range(len(module.padding) // 2)][::-1]
        return replace(flow, stream=_stepped(stream, [Padded(n) for n in ends]))
    if isinstance(module, _ADAPTIVE):
        sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,) * dims
        return replace(flow, stream=_stepped(stream, [None if n is None else FixedSize(n) for n in sizes]))
    kernel, stride, padding = (
        value if isinstance(value, tuple) else (value,) * dims
        for value in (module.kernel_size, module.stride or module.kernel_size, module.padding)
    )
    steps = [SizeStep(kernel[i], stride[i], padding[i], ceil_mode=module.ceil_mode) for i in range(dims)]
    return replace(flow, stream=_stepped(stream, steps))


def pool_by_function(call: FunctionalPool, flow: Flow) -> Flow:
    """A pooling that a forward calls as a function."""
    if call.dims != len(flow.stream.steps) or flow.stream.source not in (PIXELS, FRAMES):
        return flow
    return replace(flow, stream=_stepped(flow.stream, [call.step] * call.dims))


def _stepped(stream: Stream, steps: list[Any]) -> Stream:
    """A stream with one more step in each dimension; None leaves a dimension unchanged."""
    grown = tuple(old if new is None else (*old, new) for old, new in zip(stream.steps, steps, strict=True))
    return replace(stream, steps=grown)


def is_gate(before: Flow, after: Flow) -> bool:
    """Whether a module only weights channels by their pooled values, so that its output is not pooled."""
    squeezed = all(steps and steps[-1] == FixedSize(1) for steps in after.stream.steps)
    same = before.width is not None and before.width == after.width
    return squeezed and same and before.stream.source == PIXELS and before.stream != after.stream
