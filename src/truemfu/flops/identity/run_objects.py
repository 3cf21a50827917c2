"""Objects of the standard library and of frameworks that do not affect a forward, or that a text represents.

Objects of other classes are read attribute by attribute. One that is neither read nor listed here has hidden
state, and a model that holds it has no identity.
"""

from __future__ import annotations

import datetime
import inspect
import io
import logging
import random
import re
import threading
import types
import typing
import uuid
import weakref
from pathlib import PurePath
from typing import Any

import torch

from ..wrappers import module_of

_HARMLESS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Semaphore,
    threading.Thread,
    logging.Filterer,  # loggers and handlers
    logging.LoggerAdapter,
    logging.Formatter,
    io.IOBase,
    random.Random,
    torch.Generator,
    *(getattr(torch, name) for name in ("Stream", "Event") if hasattr(torch, name)),
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    weakref.finalize,
)
_HARMLESS_EXACT = frozenset({object, type(NotImplemented)})
_HARMLESS_NAMES = frozenset(
    {
        "builtins.PyCapsule", "_abc._abc_data", "dataclasses._MISSING_TYPE",
        "dataclasses._HAS_DEFAULT_FACTORY_CLASS", "dataclasses._KW_ONLY_TYPE",
    }
)  # fmt: skip
_HARMLESS_HOMES = (
    "numpy.random", "torch._C._distributed", "torch._C._profiler", "torch._dynamo", "torch._functorch",
    "torch._inductor", "torch.cuda", "torch.distributed", "torch.fx", "torch.jit", "torch.library",
    "torch.optim", "torch.profiler", "torch.utils.data", "torch.utils.hooks", "torch.utils.tensorboard",
)  # fmt: skip
_HARMLESS_PACKAGES = frozenset(
    {
        "accelerate", "datasets", "deepspeed", "filelock", "fsspec", "httpx", "huggingface_hub", "jinja2",
        "lightning", "lightning_fabric", "lightning_utilities", "mlflow", "psutil", "pybind11_builtins",
        "pytorch_lightning", "ray", "requests", "rich", "safetensors", "tensorboard", "tokenizers", "tqdm",
        "truemfu", "urllib3", "wandb",
    }
)  # fmt: skip
"""Trainers, trackers, progress bars and files: a model may hold them, but they do not affect its forward."""
_BY_TEXT = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    inspect.Parameter,
    inspect.Signature,
    PurePath,
    torch.fx.Graph,
    types.GenericAlias,
    types.UnionType,
    typing.TypeVar,
    typing.ParamSpec,
    uuid.UUID,
    torch.layout,
    torch.memory_format,
    torch.finfo,
    torch.iinfo,
    torch.qscheme,
)


def text_of(value: Any) -> str | None:
    """A text that fully represents a value; None for values without one."""
    if isinstance(value, _BY_TEXT):
        return str(value)
    home = module_of(type(value))
    if isinstance(value, re.Pattern) or (home.startswith("regex.") or home == "_regex"):
        return f"{value.pattern!r} {value.flags}"
    if home == "typing" or home.startswith(("numpy.dtypes", "packaging.", "torch._ops")):
        return str(value)
    return None


def has_no_effect(value: Any) -> bool:
    """Whether an object's contents cannot affect a forward, so that its class represents it."""
    cls = type(value)
    home = module_of(cls)
    return (
        cls in _HARMLESS_EXACT
        or isinstance(value, _HARMLESS)
        or f"{home}.{cls.__qualname__}" in _HARMLESS_NAMES
        or home.partition(".")[0] in _HARMLESS_PACKAGES
        or home.startswith(_HARMLESS_HOMES)
    )
