"""The small model a trainer is checked on: of the case's architecture, in fp32, without dropout.

    a reference size          two layers of the reference model
    a Hugging Face config     the same architecture, shrunk
    a factory                 its own model, if that is small

If none of these is possible, it is the reference model, and its name states that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ...errors import one_line
from ...flops import BatchRequest, BuildOptions, model_from_config, read_config
from ...private.batches import cut, samples_of
from ...private.check import dropouts_of
from ...records import SweepCase
from ..content_hash import is_path
from ..failures import is_out_of_memory
from ..sizes import SIZES, ModelSize
from ..trainers.standard import losses_by_sample
from .case_model import Batch, build_case_model, to_device, training_batch
from .models import ReferenceModel, parameter_count

_SAMPLES, _LENGTH = 3, 5
_SMALL = ModelSize(vocab=50, hidden=32, layers=2, heads=4)
_MAX_PARAMETERS = 20_000_000
_SEED = 0
_WEIGHT_STD = 0.2
_HEAD_WIDTH = 8  # small because of large vocabularies

# Names of sizes in configurations.
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "max_window_layers",
)
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_INNER_WIDTHS = (
    "intermediate_size",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "moe_intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
_PARTS = (
    "head_dim",
    "d_kv",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "qk_head_dim",
    "v_head_dim",
)


@dataclass(frozen=True, kw_only=True)
class GradientCheckModel:
    """A small model, a batch for it on the host, and its display name."""

    name: str
    model: nn.Module
    batch: Batch
    stands_in: bool = False
    """Whether it has another architecture, because the case's model cannot be made small."""

    @property
    def samples(self) -> int:
        """Samples in the batch."""
        return samples_of(self.batch)

    @property
    def length(self) -> int:
        """Tokens of a sample, or the size of its second dimension."""
        return next((v.shape[1] for v in self.batch.values() if isinstance(v, Tensor) and v.dim() > 1), 1)


def gradient_check_model(case: SweepCase, device: torch.device) -> GradientCheckModel:
    """The small model for this case, on the device."""
    torch.manual_seed(_SEED)
    if case.model in SIZES:
        return _reference(device)
    if not is_path(case.model):
        return _from_factory(case, device)
    config, reasons = _with_defaults(read_config(Path(case.model))), []
    for shrunk in _shrunk(config):
        try:
            without_weights = model_from_config(shrunk, BuildOptions(dtype=torch.float32))
            if parameter_count(without_weights) > _MAX_PARAMETERS:
                reasons.append(f"{parameter_count(without_weights):,} parameters")
                continue
            model = model_from_config(shrunk, BuildOptions(dtype=torch.float32), device=str(device))
            batch = training_batch(model, BatchRequest(samples=_SAMPLES, length=_LENGTH, images=0))
            losses_by_sample(model, to_device(batch, device))
        except Exception as error:  # a shrunk configuration may be inconsistent; the name has the reason
            if is_out_of_memory(error):
                raise
            reasons.append(one_line(error))
            continue
        return _without_dropout(
            GradientCheckModel(name=f"{case.model}, shrunk", model=model, batch=_repeated(batch))
        )
    return _reference(device, f" ({case.model} cannot be made small: {reasons[-1]})")


def _reference(device: torch.device, why: str = "") -> GradientCheckModel:
    model = ReferenceModel(_SMALL, device=device, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # larger than initial weights, so that attention affects the loss
            nn.init.normal_(parameter, std=_WEIGHT_STD)
    batch = training_batch(model, BatchRequest(samples=_SAMPLES, length=_LENGTH))
    return GradientCheckModel(
        name=f"reference model, 2 layers{why}", model=model, batch=_repeated(batch), stands_in=bool(why)
    )


def _from_factory(case: SweepCase, device: torch.device) -> GradientCheckModel:
    small = msgspec.structs.replace(case, batch_size=_SAMPLES, seq_len=_LENGTH, dtype="fp32")
    built = build_case_model(small, torch.device("cpu"))
    if parameter_count(built.model) > _MAX_PARAMETERS:
        return _reference(device, f" ({case.model} has {parameter_count(built.model):,} parameters)")
    batch = _few_samples(built.example) if built.brought_batch else _repeated(built.example)
    return _without_dropout(GradientCheckModel(name=case.model, model=built.model.to(device), batch=batch))


def _few_samples(batch: Batch) -> Batch:
    """The first three samples, or two where three would be as many as tokens."""
    lengths = {value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1}
    few = slice(_SAMPLES if _SAMPLES not in lengths else _SAMPLES - 1)
    return dict(cut(batch, samples_of(batch), few))


def _repeated(batch: Batch) -> Batch:
    """The first sample repeats one token, so that its gradient is larger than the others'."""
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2:
        return batch
    changed = ids.clone()
    changed[0] = ids[0, 0]
    labels = {"labels": changed} if batch.get("labels") is ids else {}
    return {**batch, "input_ids": changed, **labels}


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with all numbers, including the defaults of transformers.

    An architecture unknown to transformers stays as it is: building the model reports it.
    """
    if importlib.util.find_spec("transformers") is None:
        return config
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    return (
        dict(CONFIG_MAPPING[model_type].from_dict(config).to_dict())
        if model_type in CONFIG_MAPPING
        else config
    )


def _shrunk(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration with all sizes reduced, then with fewer layers only; nested ones too."""
    heads = next((config[key] for key in _HEADS if config.get(key)), 4)
    few_heads = min(int(heads), 4)
    width = _HEAD_WIDTH * few_heads
    key_heads = int(config.get("num_key_value_heads") or heads)
    small = {
        **dict.fromkeys(_LAYERS, 2),
        **dict.fromkeys(_HEADS, few_heads),
        **dict.fromkeys(_WIDTHS, width),
        **dict.fromkeys(_INNER_WIDTHS, 2 * width),
        **dict.fromkeys(_PARTS, _HEAD_WIDTH),
        "num_key_value_heads": max(1, few_heads * key_heads // int(heads)),
        "first_k_dense_replace": 1,
    }
    layers = {key: value for key, value in small.items() if "layer" in key}
    for changes in (small, layers):
        yield _replaced(config, changes)


def _replaced(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            changed[key] = _replaced(value, changes) if key.endswith("_config") else dict(value)
        elif key in changes and value is not None:
            changed[key] = changes[key]
        elif key == "layer_types" and isinstance(value, list):
            changed[key] = value[:2]
        elif "drop" in key and isinstance(value, float):
            changed[key] = 0.0
        else:
            changed[key] = value
    return changed


def _without_dropout(small: GradientCheckModel) -> GradientCheckModel:
    """The per-sample loop and the step are only comparable without randomness."""
    for module, name, _ in list(dropouts_of(small.model)):
        setattr(module, name, 0.0)
    return small
