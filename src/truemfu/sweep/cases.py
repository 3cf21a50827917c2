"""The cases of a matrix: one named case for each combination, in the order they run.

Names are `<Trainer>_bs<B>_seq<S>`, followed by `_<model>` and `_<dtype>` where the matrix has several, and by
`_ddpx2` or `_fsdp2x2` for an experiment on two GPUs. Batches run in ascending order, so that a small one
predicts whether a larger one fits; those on fewer GPUs come first.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..records import CaseSettings, SweepCase
from .config import SweepConfig
from .content_hash import is_path

_LONGEST_PART = 60
"""Longest part of a file name for a trainer or a model; a whole file name has at most 255 bytes."""


def resolved(config: SweepConfig, device: str) -> SweepConfig:
    """`config` with every `auto` resolved for this device, cuda or cpu."""
    default = "bf16" if device == "cuda" else "fp32"
    dtypes = list(dict.fromkeys(default if dtype == "auto" else dtype for dtype in config.dtypes))
    return msgspec.structs.replace(config, device=device, dtypes=dtypes)


def cases_of(config: SweepConfig, device: str) -> dict[str, SweepCase]:
    """Every case of the matrix by name, in order, on cuda or cpu."""
    config = resolved(config, device)
    settings = {name: getattr(config, name) for name in CaseSettings.__struct_fields__}
    trainers = short_names(config.trainers)
    models = short_names(config.models)
    cases: dict[str, SweepCase] = {}
    matrix = itertools.product(
        sorted(config.gpus_per_experiment),
        config.models,
        config.dtypes,
        config.trainers,
        sorted(config.batch_sizes),
        config.seq_lengths,
    )
    for gpus, model, dtype, trainer, batch_size, seq_len in matrix:
        parallel = config.parallel if gpus > 1 else None
        name = f"{trainers[trainer]}_bs{batch_size}_seq{seq_len}"
        name += f"_{models[model]}" if len(config.models) > 1 else ""
        name += f"_{dtype}" if len(config.dtypes) > 1 else ""
        name += f"_{parallel}x{gpus}" if gpus > 1 else ""
        cases[name] = SweepCase(
            trainer=trainer,
            model=model,
            batch_size=batch_size,
            seq_len=seq_len,
            dtype=dtype,
            device=device,
            gpus=gpus,
            parallel=parallel,
            **settings,
        )
    return cases


def short_names(full: Sequence[str]) -> dict[str, str]:
    """A short name for each, valid in a file name; a second `Mine` of another module becomes `Mine-2`."""
    short: dict[str, str] = {}
    for name in full:
        base = _slug(name)
        taken = set(short.values())
        candidates = [base, *(f"{base}-{number}" for number in range(2, len(full) + 1))]
        short[name] = next(candidate for candidate in candidates if candidate not in taken)
    return short


def _slug(name: str) -> str:
    path = Path(name)
    if is_path(name):
        path = path.resolve()
        name = path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name
    elif ":" in name:
        name = name.partition(":")[2]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "model"
    if len(slug) <= _LONGEST_PART:
        return slug
    return f"{slug[: _LONGEST_PART - 9].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
