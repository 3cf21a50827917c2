"""The model of a case with real weights on its device, and the batches it is trained on.

    1b                          the reference model of this size
    path/config.json, path/     a Hugging Face configuration, random weights
    package.module:factory      a callable that returns a module, or (module, batch)

Batches come from a real (small) data loader, in this process, so that waiting for them is realistic too.
Text whose labels are its tokens is drawn from a seeded generator for every batch; others are repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...errors import BatchError, UsageError
from ...flops import (
    BatchRequest,
    BuildOptions,
    ModelView,
    Target,
    example_batch,
    model_from_config,
    parse_dtype,
    read_config,
    resolve_target,
)
from ...records import SweepCase
from ..content_hash import is_path
from ..sizes import SIZES
from .models import REFERENCE_MODELS, build_reference_model

Batch = dict[str, Any]

_TEXT = {"input_ids", "decoder_input_ids", "labels"}

_BATCHES = 16
"""Number of different batches before the loader starts over."""


@dataclass(frozen=True, kw_only=True)
class CaseModel:
    """A model on its device and one batch for it, on the host."""

    model: nn.Module
    example: Batch
    brought_batch: bool = False
    """Whether the batch came from the user's factory."""


def build_case_model(case: SweepCase, device: torch.device) -> CaseModel:
    """The model of this case, with random weights from its seed, in its dtype, on `device`."""
    torch.manual_seed(case.seed)
    dtype = parse_dtype(case.dtype)
    if case.model in SIZES:
        return with_example(build_reference_model(case.model, device=device, dtype=dtype), case)
    if is_path(case.model):
        config = read_config(Path(case.model))
        return with_example(model_from_config(config, BuildOptions(dtype=dtype), device=str(device)), case)
    target = _resolved(case)
    if not target.brought_batch:
        return with_example(target.model.to(device), case)
    if not isinstance(target.batch, Mapping):
        raise BatchError(
            f"{case.model!r} returned a {type(target.batch).__name__} as its batch: expected a mapping of "
            "the model's arguments, with labels where there are any"
        )
    return CaseModel(model=target.model.to(device).train(), example=dict(target.batch), brought_batch=True)


def with_example(model: nn.Module, case: SweepCase) -> CaseModel:
    """A model with a generated batch of the case's size."""
    _disable_kv_cache(model)
    example = training_batch(model, BatchRequest(samples=case.batch_size, length=case.seq_len))
    if example.keys() <= _TEXT:
        _check_positions(model, case)
    return CaseModel(model=model.train(), example=example)


def training_batch(model: nn.Module, request: BatchRequest) -> Batch:
    """A generated batch; a decoder gets the labels as input, because the loss is computed outside."""
    batch = example_batch(model, request)
    labels = batch.get("labels")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and labels is not None:
        return {"decoder_input_ids": labels, **batch}
    return batch


def count_target_of(case: SweepCase) -> Target:
    """The same model and batch, for counting; without values where possible."""
    target = _resolved(case)
    if not isinstance(target.batch, Mapping) or ModelView(target.model).takes("labels"):
        return target
    without_labels = {name: value for name, value in target.batch.items() if name != "labels"}
    return replace(target, batch=without_labels)  # they are for the trainer's loss


def _resolved(case: SweepCase) -> Target:
    request = BatchRequest(samples=case.batch_size, length=case.seq_len)
    options = BuildOptions(dtype=parse_dtype(case.dtype))
    return resolve_target(case.model, request, options, named=REFERENCE_MODELS)


def endless_batches(built: CaseModel, case: SweepCase, device: torch.device) -> Iterator[Batch]:
    """Endless batches on the device, through a data loader; copies to a GPU do not block."""
    on_gpu = device.type == "cuda"
    ids = built.example.get("input_ids")
    all_tokens = isinstance(ids, Tensor) and all(value is ids for value in built.example.values())
    loader: DataLoader[Any]
    if all_tokens and not built.brought_batch:
        loader = DataLoader(_texts(built, case), batch_size=case.batch_size, pin_memory=on_gpu)
    else:
        loader = DataLoader([built.example] * _BATCHES, batch_size=None, pin_memory=on_gpu)  # type: ignore[arg-type]
    while True:
        for batch in loader:
            yield to_device(batch, device)


def to_device(batch: Mapping[str, Any], device: torch.device) -> Batch:
    """The batch with its tensors on the device."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _texts(built: CaseModel, case: SweepCase) -> Any:
    """Random tokens: sample i is the same in every run with the same seed."""
    view = ModelView(built.model)
    # A configuration may define special tokens; without one all tokens are ordinary.
    known = torch.arange(view.vocab) if view.config is None else view.tokens(1 << 16).unique()
    generator = torch.Generator().manual_seed(case.seed)
    shape = (_BATCHES * case.batch_size, built.example["input_ids"].shape[1])
    ids = known[torch.randint(len(known), shape, generator=generator)]
    return [dict.fromkeys(built.example, sample) for sample in ids]


def _check_positions(model: nn.Module, case: SweepCase) -> None:
    """A missing position would be an obscure error, and on a GPU it would end the process."""
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (own == "wpe" or own.startswith(("pos", "embed_pos"))):
            limit = min(module.num_embeddings, ModelView(model).max_length or module.num_embeddings)
            if limit < case.seq_len:
                raise UsageError(
                    f"{case.model} has {limit} positions ({name}): too few for a sequence length of "
                    f"{case.seq_len}"
                )


def _disable_kv_cache(model: nn.Module) -> None:
    """The KV cache is only needed for generation; in training it would waste memory."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False
