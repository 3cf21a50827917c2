"""Resolves the MODEL argument of `truemfu count` to a module and a batch for one training step.

    1b                          a name known to the caller (the reference models)
    gpt2, llama-3.1-8b, 8b      a well-known open model, by the configuration that comes with this package
    path/config.json, path/     a Hugging Face configuration: built on the meta device, without weights
    org/name                    the same, from the local Hugging Face cache
    package.module:factory      a callable that returns a module, or (module, batch)

No network is used and no code of a repository is run: a configuration is plain data.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...convention import Convention
from ...errors import BatchError, ModelError, TruemfuError, UsageError, closest, one_line
from ...known_models import known_model, known_models
from ...torch_private.trees import tree_map_only
from ..closed_form.copies import named_tensors
from ..closed_form.position_loops import count_by_short_sequences
from ..count.count import count_flops
from ..flop_count import FlopCount
from .example_batch import example_batch
from .hf_config import BuildOptions, model_from_config, read_config
from .hub_cache import cached_config, may_be_on_the_hub, not_cached
from .lora import add_lora
from .model_view import BatchRequest, ModelView

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

# Arguments that hold tokens; those of a tuple have no name.
_TOKENS = ("input_ids", "decoder_input_ids", "labels", "")

_MAX_BYTES_WITH_VALUES = 4 << 30

NamedModels = Mapping[str, Callable[[torch.dtype], nn.Module]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to count and the batch to count it on, which a factory may have returned.

    `with_values` builds the same on the CPU with real, random weights, if that is possible.
    """

    name: str
    model: nn.Module
    batch: Any
    brought_batch: bool = False
    with_values: Callable[[], Target] | None = None

    @property
    def samples(self) -> int | None:
        """The first dimension of the first tensor."""
        first = next((tensor for _, tensor in named_tensors(self.batch) if tensor.dim() > 0), None)
        return None if first is None else first.shape[0]

    @property
    def length(self) -> int | None:
        """Tokens per sample, if the batch holds tokens."""
        for name, tensor in named_tensors(self.batch):
            if tensor.dim() == 2 and not tensor.is_floating_point() and name in _TOKENS:
                return tensor.shape[1]
        return None

    @property
    def shapes(self) -> str:
        """The tensors by name, for display: `input_ids 4×512, labels 4×512`."""
        return ", ".join(
            f"{name} {'×'.join(map(str, t.shape)) or '()'}".strip() for name, t in named_tensors(self.batch)
        )

    @property
    def tensor_shapes(self) -> dict[str, list[int]]:
        """The same as plain data; tensors of a tuple are named by their index."""
        return {name or str(i): list(t.shape) for i, (name, t) in enumerate(named_tensors(self.batch))}


def parse_dtype(name: str, *, also: tuple[str, ...] = ()) -> torch.dtype:
    """`bf16` → `torch.bfloat16`; torch's own names are understood too. The caller takes those of `also`."""
    known = getattr(torch, name.removeprefix("torch."), None)
    if name in DTYPES:
        return DTYPES[name]
    if isinstance(known, torch.dtype) and known in DTYPES.values():
        return known
    names = (*DTYPES, *also)
    raise UsageError(f"dtype must be one of {', '.join(names)}; got {name!r}{closest(name, names)}")


def resolve_target(
    text: str,
    request: BatchRequest,
    options: BuildOptions | None = None,
    *,
    named: NamedModels | None = None,
) -> Target:
    """Model and batch for the user's MODEL argument; `named` are the models with a plain name.

    These are built on the meta device, in a given dtype.
    """
    options = options or BuildOptions()
    named = named or {}
    if text in named:
        _only_for_configs(text, options)
        with torch.device("meta"):
            model = named[text](options.dtype or torch.bfloat16)
        return _target(text, model, None, request, options)
    is_file = _exists(text)
    if ":" in text and not is_file:
        _only_for_configs(text, options)
        model, batch = _from_factory(text, options.dtype)
        return _target(text, model, batch, request, options)
    path = Path(text) if is_file else cached_config(text) if may_be_on_the_hub(text) else None
    known = known_model(text)
    if path is not None:
        return _from_config(text, read_config(path), request, options)
    if known is not None:
        return _from_config(known.hub, known.config, request, options)
    if "/" in text and may_be_on_the_hub(text):
        raise not_cached(text)
    names = [*named, *(name for model in known_models() for name in (model.name, *model.also))]
    raise UsageError(
        f"no model {text!r}{closest(text, names)}: expected {', '.join(named)}{', ' if named else ''}"
        "a well-known open model such as gpt2 or llama-3.1-8b (truemfu count --list), a Hugging Face "
        "config.json or its folder, ORG/NAME in the local Hugging Face cache, or package.module:factory"
    )


def _from_config(
    name: str, config: Mapping[str, Any], request: BatchRequest, options: BuildOptions
) -> Target:
    def build(device: str) -> Target:
        return _target(name, model_from_config(config, options, device=device), None, request, options)

    return replace(build("meta"), with_values=lambda: build("cpu"))


def _exists(text: str) -> bool:
    """Whether this is a file or folder; False for an invalid path (too long, or with a NUL)."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def count_target(target: Target, *, convention: Convention, backward: bool) -> FlopCount:
    """Count a target. A model that cannot run without values is rebuilt with them if it is small enough."""
    try:
        return _counted(target, convention=convention, backward=backward)
    except (BatchError, ModelError) as error:
        limit = ModelView(target.model).max_length
        if target.brought_batch or limit is None or (target.length or 0) <= limit:
            raise
        raise BatchError(
            f"{target.length:,} tokens per sample are too many: {type(target.model).__name__} has {limit:,} "
            "positions"
        ) from error


def _counted(target: Target, *, convention: Convention, backward: bool) -> FlopCount:
    try:
        known = count_by_short_sequences(target.model, target.batch, convention=convention, backward=backward)
        if known is not None:
            return known
        return count_flops(target.model, target.batch, convention=convention, backward=backward)
    except ModelError:
        size = sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())
        if target.with_values is None or size > _MAX_BYTES_WITH_VALUES:
            raise
    real = target.with_values()
    return count_flops(real.model, real.batch, convention=convention, backward=backward)


def _target(text: str, model: nn.Module, batch: Any, request: BatchRequest, options: BuildOptions) -> Target:
    if options.checkpointing:
        _enable_checkpointing(model)
    model.train()
    brought = batch is not None
    if not brought:
        batch = _example(model, request)
    if options.lora is not None:
        add_lora(model, options.lora)
    return Target(name=text, model=model, batch=batch, brought_batch=brought)


def _example(model: nn.Module, request: BatchRequest) -> Any:
    try:
        return example_batch(model, request)
    except TruemfuError:
        raise
    except (RuntimeError, MemoryError) as error:
        raise BatchError(f"a batch of this size cannot be created: {one_line(error)}") from error


def _from_factory(text: str, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    module_name, _, attribute = text.partition(":")
    try:
        module = _import_from_here(module_name)
        factory = module
        for name in attribute.split("."):
            factory = getattr(factory, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot import {text!r}: {one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing {module_name!r} failed: {one_line(error)}") from error
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UsageError(f"{text!r} is not a factory: expected a callable that returns a module")
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise ModelError(f"the factory {text!r} raised {one_line(error)}") from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(f"the factory {text!r} returned {type(model).__name__}; expected a module")
    if dtype is not None:
        model, batch = model.to(dtype), _to_dtype(batch, dtype)
    return model, batch


def _import_from_here(name: str) -> Any:
    """Import a module as `python -m` would: the current directory comes first."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _to_dtype(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


def _enable_checkpointing(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("it has no gradient_checkpointing_enable()")
        enable()
    except ValueError as error:
        raise UsageError(f"{type(model).__name__} cannot be checkpointed: {one_line(error)}") from error


def _only_for_configs(text: str, options: BuildOptions) -> None:
    if options.attn_implementation is not None:
        raise UsageError(
            f"the attention implementation can be chosen for Hugging Face configs, not for {text!r}"
        )
