"""Collects the evidence in an unchanged process, by what torch offers for it.

a forward pass, once ──► a mode that sees each function of torch: dtypes of products, convolutions, attention
checkpoint           ──► whether it is called
DataLoader.__iter__  ──► which loaders are used, and their settings
an optimizer's step  ──► its flags
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset

from ..torch_private.compiler import has_compiled
from .at_first_pass import Training, repeated_blocks
from .facts import Evidence, SeenLoader, SeenOptimizer

_PRODUCTS = {
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "bilinear",
}
_CONVOLUTIONS = {f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)}
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_NODES_BEHIND = 4
"""How far behind a result the node of its attention kernel may be: views and casts come after it."""


class _Functions(TorchFunctionMode):
    """What one forward pass calls."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()
        self.convolutions = self.convolutions_2d = self.channels_last = self.attention = 0
        self.kernels: set[str] = set()
        self.vocabulary: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS or name in _CONVOLUTIONS:
            self._product(name, args, result)
        elif name in _ATTENTION:
            self.attention += 1
            first = result[0] if isinstance(result, tuple) else result
            self.kernels |= _attention_nodes(getattr(first, "grad_fn", None))
        elif name == "embedding":
            rows = [t.shape[0] for t in args[:2] if isinstance(t, torch.Tensor) and t.is_floating_point()]
            self.vocabulary = max([*rows, self.vocabulary or 0])
        return result

    def _product(self, name: str, args: Any, result: Any) -> None:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return
        self.products[str(result.dtype).removeprefix("torch.")] += 1
        self.convolutions += name in _CONVOLUTIONS
        if name == "conv2d":
            self.convolutions_2d += 1
            self.channels_last += (
                result.is_contiguous(memory_format=torch.channels_last) and not result.is_contiguous()
            )


def _attention_nodes(node: Any) -> set[str]:
    """The names of attention kernels in the nodes behind a result."""
    nodes = [node]
    for _ in range(_NODES_BEHIND):
        found = {n.name() for n in nodes if n is not None and "DotProduct" in n.name()}
        if found:
            return found
        nodes = [after for n in nodes if n is not None for after, _ in n.next_functions]
    return set()


class Collector:
    """One for an unchanged process."""

    def __init__(self) -> None:
        self._functions: _Functions | None = None
        self._checkpoints = False
        self._loaders: dict[int, SeenLoader] = {}
        self._training: Training | None = None

    def install(self) -> None:
        """Torch has just been imported."""
        torch.utils.checkpoint.checkpoint = self._noting_checkpoint(torch.utils.checkpoint.checkpoint)
        DataLoader.__iter__ = self._noting_loader(DataLoader.__iter__)  # type: ignore[method-assign]

    def _noting_checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(checkpoint)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._checkpoints = True
            return checkpoint(*args, **kwargs)

        return call

    def _noting_loader(self, iterate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:
            self._loaders[id(loader)] = SeenLoader(
                workers=loader.num_workers,
                pins_memory=loader.pin_memory,
                is_stream=isinstance(loader.dataset, IterableDataset),
            )
            return iterate(loader)

        return __iter__

    def first_step_ended(self, training: Training) -> None:
        """What a step uses is known: see the functions of the next forward pass, unless code is compiled."""
        self._training = training
        if not has_compiled():
            self._functions = functions = _Functions()
            for module in training.modules:
                _in_one_pass(module, functions)

    def evidence(self) -> Evidence:
        """All that is known now."""
        training, functions = self._training, self._functions
        assert training is not None
        modules, on_cuda = training.modules, training.device.type == "cuda"
        properties = torch.cuda.get_device_properties(training.device) if on_cuda else None
        parameters = {id(p): p for module in modules for p in module.parameters()}.values()
        dtypes: Counter[str] = Counter()
        for parameter in parameters:
            dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        saw = functions is not None and bool(functions.products)
        return Evidence(
            device=training.device.type,
            device_name=None if properties is None else properties.name,
            capability=None if properties is None else [properties.major, properties.minor],
            device_memory_bytes=None if properties is None else properties.total_memory,
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            torch=str(torch.__version__),
            models=[type(module).__name__ for module in modules],
            parameter_dtypes=dict(dtypes),
            is_compiled=has_compiled(),
            products=dict(functions.products) if saw and functions else None,
            convolutions=functions.convolutions if saw and functions else None,
            convolutions_2d=functions.convolutions_2d if saw and functions else None,
            are_channels_last=functions.channels_last == functions.convolutions_2d
            if saw and functions and functions.convolutions_2d
            else None,
            attention_calls=functions.attention if saw and functions else None,
            attention_kernels=sorted(functions.kernels) if functions else [],
            attention_implementation=_attention_implementation(modules),
            vocabulary=None if functions is None else functions.vocabulary,
            matmul_precision=torch.get_float32_matmul_precision(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            checkpoints=self._checkpoints,
            repeated_blocks={
                name: len(list(container.children()))
                for module in modules
                for name, container in repeated_blocks(module)
            },
            is_transformers_model=any(hasattr(module, "set_attn_implementation") for module in modules),
            has_liger=importlib.util.find_spec("liger_kernel") is not None,
            optimizers=[_seen(optimizer) for optimizer in training.optimizers],
            loaders=list(self._loaders.values()),
        )


def _in_one_pass(module: nn.Module, mode: Any) -> None:
    """Enter the mode for the next forward pass of this module alone."""
    hooks: list[Any] = []

    def begin(owner: nn.Module, args: Any) -> None:
        hooks.pop(0).remove()
        mode.__enter__()

    def end(owner: nn.Module, args: Any, result: Any) -> None:
        hooks.pop().remove()
        mode.__exit__(None, None, None)

    hooks.append(module.register_forward_pre_hook(begin))
    hooks.append(module.register_forward_hook(end, always_call=True))


def _attention_implementation(modules: Sequence[nn.Module]) -> str | None:
    """Of the first part of a model that has one in its configuration."""
    for module in modules:
        for part in module.modules():
            found = getattr(getattr(part, "config", None), "_attn_implementation", None)
            if isinstance(found, str):
                return found
    return None


def _seen(optimizer: torch.optim.Optimizer) -> SeenOptimizer:
    arguments = inspect.signature(type(optimizer).__init__).parameters
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    return SeenOptimizer(
        name=type(optimizer).__name__,
        is_fused=bool(group.get("fused")),
        foreach=group.get("foreach"),
        takes_fused="fused" in arguments,
        takes_foreach="foreach" in arguments,
    )


class SteppedOptimizers:
    """The optimizers that have stepped in this process."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._is_taken = False
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_taken:
            self._seen.setdefault(id(optimizer), weakref.ref(optimizer))

    def take(self) -> list[torch.optim.Optimizer]:
        """Those seen so far; no more are noted."""
        self._is_taken = True  # the hook stays: this may run in another one, while torch goes through them
        return [found for reference in self._seen.values() if (found := reference()) is not None]
