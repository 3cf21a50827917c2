"""Remedies that are switches of torch, set once torch is imported and before the script goes on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

_SWITCHES = "torch.backends.cuda."


def _tf32(option: str) -> None:
    torch.set_float32_matmul_precision("high")


def _cudnn_benchmark(option: str) -> None:
    torch.backends.cudnn.benchmark = True


def _no_checkpointing(option: str) -> None:
    """Every checkpointed function is called directly."""
    original = torch.utils.checkpoint.checkpoint
    own = [
        p.name
        for p in inspect.signature(original).parameters.values()
        if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
    ]
    own.append("preserve_rng_state")  # one of its **kwargs

    @functools.wraps(original)
    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in own})

    torch.utils.checkpoint.checkpoint = call


def _attention(option: str) -> None:
    """A switch of attention kernels; an implementation of transformers is set at the first pass."""
    if option.startswith(_SWITCHES):
        switch = option.removeprefix(_SWITCHES).partition("(")[0]
        getattr(torch.backends.cuda, switch)(False)


APPLY: dict[str, Callable[[str], None]] = {
    "tf32": _tf32,
    "cudnn_benchmark": _cudnn_benchmark,
    "no_checkpointing": _no_checkpointing,
    "attention": _attention,
}
