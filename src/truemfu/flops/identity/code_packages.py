"""Which package code comes from, whether its code is read, and which version of it is installed.

Code of torch, the standard library, numpy and training frameworks is not read: their version represents it.
All other code is read, down to the helpers of a model.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

FRAMEWORKS = frozenset(
    {
        "PIL", "accelerate", "datasets", "deepspeed", "filelock", "fsspec", "httpx", "huggingface_hub",
        "jinja2", "lightning", "lightning_fabric", "lightning_utilities", "mlflow", "msgspec", "numpy",
        "packaging", "psutil", "pybind11_builtins", "pytorch_lightning", "ray", "regex", "requests", "rich",
        "safetensors", "tensorboard", "tokenizers", "torch", "torchgen", "tqdm", "triton", "truemfu",
        "urllib3", "wandb", "yaml",
    }
)  # fmt: skip
"""Packages whose objects and code are represented by their version."""


def package_of(module_name: str | None) -> str:
    """The top-level package of a dotted module name."""
    return (module_name or "").partition(".")[0]


def home_of(function: types.FunctionType) -> str:
    """The module a function was written in; `functools.wraps` changes `__module__` but not this."""
    return str(function.__globals__.get("__name__") or "")


def is_read(module_name: str | None) -> bool:
    """Whether code of a module is read, rather than represented by the version of its package."""
    package = package_of(module_name)
    return package not in FRAMEWORKS and not is_standard(package)


@functools.lru_cache(maxsize=4096)
def is_standard(package: str) -> bool:
    """Whether a top-level package belongs to the standard library and is not a user's file of that name."""
    if package not in sys.stdlib_module_names or package == "__main__":
        return False
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return True
    path = Path(file).resolve()
    roots = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")}
    site = {"site-packages", "dist-packages"} & set(path.parts)
    return not site and any(root in path.parents for root in roots)


@functools.lru_cache(maxsize=4096)
def version_of(package: str) -> str | None:
    """The version of a top-level package; None if it has none."""
    own = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(own, str):
        return str(own)
    for name in (package, package.replace("_", "-")):
        try:
            return metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return None


def source_path(module_name: str) -> Path | None:
    """The file of a module that is not imported yet, found without importing anything."""
    path: Any = None
    spec = None
    parts = module_name.split(".")
    for depth in range(len(parts)):
        try:
            spec = PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin else None
