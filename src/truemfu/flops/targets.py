"""The MODEL argument of `truemfu count`, turned into a module and a batch for one training step.

    1b                          a name the caller knows (the reference models)
    path/config.json, path/     a Hugging Face configuration: built on the meta device, without weights
    package.module:factory      a callable that returns a module, or (module, batch)

No network is used and no code of a repository is run: a configuration is plain data.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, TruemfuError, UsageError, closest
from .example_batch import example_batch
from .model_view import BatchRequest

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

# In the order in which a configuration without (known) `architectures` looks for its training head.
_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForImageClassification",
    "AutoModelForCTC",
    "AutoModelForAudioClassification",
    "AutoModel",
)

# Arguments that hold tokens; those of a tuple have no name.
_TOKENS = ("input_ids", "decoder_input_ids", "labels", "")

NamedModels = Mapping[str, Callable[[torch.dtype, int], nn.Module]]


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How to build the model. `dtype=None` is bf16, except for a factory, whose model stays as it is."""

    dtype: torch.dtype | None = None
    attn_implementation: str | None = None
    checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to count and the batch to count it on, which a factory may have brought along."""

    name: str
    model: nn.Module
    batch: Any
    brought_batch: bool = False

    @property
    def samples(self) -> int | None:
        """The first dimension of the first tensor."""
        first = next((tensor for _, tensor in self._tensors() if tensor.dim() > 0), None)
        return None if first is None else first.shape[0]

    @property
    def length(self) -> int | None:
        """Tokens per sample, where the batch holds tokens."""
        for name, tensor in self._tensors():
            if tensor.dim() == 2 and not tensor.is_floating_point() and name in _TOKENS:
                return tensor.shape[1]
        return None

    @property
    def shapes(self) -> str:
        """The tensors by name, for people: `input_ids 4×512, labels 4×512`."""
        return ", ".join(
            f"{name} {'×'.join(map(str, t.shape)) or '()'}".strip() for name, t in self._tensors()
        )

    def _tensors(self) -> list[tuple[str, Tensor]]:
        if isinstance(self.batch, Mapping):
            items = [(str(name), value) for name, value in self.batch.items()]
        else:
            items = [
                ("", value)
                for value in (self.batch if isinstance(self.batch, tuple | list) else [self.batch])
            ]
        return [(name, value) for name, value in items if isinstance(value, Tensor)]


def parse_dtype(name: str) -> torch.dtype:
    """`bf16` → `torch.bfloat16`; torch's own names are understood too."""
    known = getattr(torch, name.removeprefix("torch."), None)
    if name in DTYPES:
        return DTYPES[name]
    if isinstance(known, torch.dtype) and known in DTYPES.values():
        return known
    raise UsageError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}{closest(name, DTYPES)}")


def resolve_target(
    text: str,
    request: BatchRequest,
    options: TargetOptions | None = None,
    *,
    named: NamedModels | None = None,
) -> Target:
    """Model and batch for what the user typed; `named` are the models known by a plain name.

    Such a model is built on the meta device, for a dtype and a number of positions.
    """
    options = options or TargetOptions()
    named = named or {}
    batch: Any = None
    if text in named:
        _only_for_configs(text, options)
        with torch.device("meta"):
            model = named[text](options.dtype or torch.bfloat16, request.length or 1)
    elif ":" in text and not Path(text).exists():
        _only_for_configs(text, options)
        model, batch = _from_factory(text, options.dtype)
    elif Path(text).exists():
        model = model_from_config(read_config(Path(text)), options)
    else:
        raise UsageError(
            f"no model {text!r}{closest(text, named)}: expected {', '.join(named)}{', ' if named else ''}"
            "a Hugging Face config.json or its folder, or package.module:factory"
        )
    if options.checkpointing:
        _enable_checkpointing(model)
    model.train()
    brought = batch is not None
    return Target(
        name=text,
        model=model,
        batch=batch if brought else example_batch(model, request),
        brought_batch=brought,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The Hugging Face configuration in this file or folder, as plain data."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no config.json in {path}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file} is not a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a Hugging Face configuration: expected a JSON object")
    return content


def model_from_config(config: Mapping[str, Any] | Any, options: TargetOptions | None = None) -> nn.Module:
    """The model a configuration (plain data, or a transformers object) describes, on the meta device."""
    options = options or TargetOptions()
    transformers = _transformers()
    try:
        if isinstance(config, Mapping):
            config = _config_object(transformers, dict(config))
        model_class = _model_class(transformers, config)
        if model_class.__name__.endswith("ForSequenceClassification") and config.pad_token_id is None:
            config.pad_token_id = 0
        how: dict[str, Any] = {"dtype": options.dtype or torch.bfloat16}
        if options.attn_implementation is not None:
            how["attn_implementation"] = options.attn_implementation
        with torch.device("meta"):
            model = model_class._from_config(config, **how)
    except TruemfuError:
        raise
    except Exception as error:
        raise ModelError(f"the configuration does not build a model: {_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"the configuration builds a {type(model).__name__}, not a PyTorch module")
    # Parameters made with the legacy torch.Tensor(n) constructor ignore the device context.
    return model.to("meta")


def _config_object(transformers: Any, content: dict[str, Any]) -> Any:
    known = transformers.CONFIG_MAPPING
    model_type = content.get("model_type")
    if model_type is None:
        for architecture in content.get("architectures") or ():
            model_class = getattr(transformers, architecture, None)
            if model_class is not None:
                return model_class.config_class.from_dict(content)
        raise ModelError("the configuration names no model_type and no architecture transformers knows")
    if model_type not in known:
        raise ModelError(
            f"unknown model_type {model_type!r}{closest(str(model_type), known.keys())}: transformers "
            f"{transformers.__version__} has no such architecture"
        )
    return known[model_type].from_dict(content)


def _model_class(transformers: Any, config: Any) -> Any:
    for architecture in getattr(config, "architectures", None) or ():
        model_class = getattr(transformers, architecture, None)
        if isinstance(model_class, type) and issubclass(model_class, nn.Module):
            return model_class
    for name in _AUTO_CLASSES:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            model_class = auto._model_mapping[type(config)]
            return model_class[0] if isinstance(model_class, tuple) else model_class
    raise ModelError(f"transformers {transformers.__version__} has no model for {type(config).__name__}")


def _from_factory(text: str, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    module_name, _, attribute = text.partition(":")
    try:
        module = _import_from_here(module_name)
        factory = module
        for name in attribute.split("."):
            factory = getattr(factory, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot import {text!r}: {_one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing {module_name!r} failed: {_one_line(error)}") from error
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UsageError(f"{text!r} is not a factory: expected a callable that returns a module")
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise ModelError(f"the factory {text!r} raised {_one_line(error)}") from error
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
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


def _enable_checkpointing(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("it has no gradient_checkpointing_enable()")
        enable()
    except ValueError as error:
        raise UsageError(f"{type(model).__name__} cannot be checkpointed: {_one_line(error)}") from error


def _only_for_configs(text: str, options: TargetOptions) -> None:
    if options.attn_implementation is not None:
        raise UsageError(
            f"the attention implementation can be chosen for Hugging Face configs, not for {text!r}"
        )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError("a Hugging Face config needs transformers: pip install 'truemfu[hf]'") from error
    return transformers


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
