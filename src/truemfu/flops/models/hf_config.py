"""Models from Hugging Face configurations: plain data in, a module out, without weights or network.

A configuration is read as JSON, and no code of a repository is run; a model that transformers does not know
gives one clear error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import ModelError, TruemfuError, UsageError, closest, one_line
from ...plain_files import read_given
from .lora import LoraOptions

# In the order in which a training head is chosen for a configuration without (known) `architectures`.
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


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to build the model. `dtype=None` is bf16, except for a factory, whose model is left unchanged."""

    dtype: torch.dtype | None = None
    attn_implementation: str | None = None
    checkpointing: bool = False
    lora: LoraOptions | None = None


def read_config(path: Path) -> dict[str, Any]:
    """The Hugging Face configuration in this file or folder, as plain data."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(read_given(file).decode(), object_hook=_special_float)
    except FileNotFoundError:
        raise UsageError(f"no config.json in {path}") from None
    except (OSError, ValueError) as error:  # ValueError also for an integer of thousands of digits
        raise ModelError(f"{file} is not a readable JSON file: {error}") from error
    except RecursionError:
        raise ModelError(f"{file} is not a readable JSON file: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a Hugging Face configuration: expected a JSON object")
    return content


def _special_float(found: dict[str, Any]) -> Any:
    """transformers writes {"__float__": "Infinity"} for numbers that JSON cannot hold."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def model_from_config(
    config: Mapping[str, Any] | Any, options: BuildOptions | None = None, *, device: str = "meta"
) -> nn.Module:
    """The model that a configuration (plain data, or a transformers object) describes, in training mode."""
    options = options or BuildOptions()
    transformers = _transformers()
    try:
        if isinstance(config, Mapping):
            config = _config_object(transformers, dict(config))
        model_class = _model_class(transformers, config)
        _fill_in(config, model_class)
        how: dict[str, Any] = {"dtype": options.dtype or torch.bfloat16}
        if options.attn_implementation is not None:
            how["attn_implementation"] = options.attn_implementation
        with torch.device(device):
            model = model_class._from_config(config, **how)
    except TruemfuError:
        raise
    except Exception as error:
        raise ModelError(f"the configuration does not build a model: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"the configuration builds a {type(model).__name__}, not a PyTorch module")
    # Parameters created with the legacy torch.Tensor(n) constructor ignore the device context.
    return model.to(device).train()


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


def _fill_in(config: Any, model_class: Any) -> None:
    """Set token ids that a training step needs and a configuration may omit; FLOPs do not depend on them."""
    names = ["pad_token_id", "decoder_start_token_id"] if getattr(config, "is_encoder_decoder", False) else []
    if model_class.__name__.endswith("ForSequenceClassification"):
        names.append("pad_token_id")
    for name in names:
        if getattr(config, name, None) is None:
            setattr(config, name, 0)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError("a Hugging Face config needs transformers: pip install 'truemfu[hf]'") from error
    return transformers
