"""One hash of everything that affects a result: a result with the same hash is not measured again.

    the case ─┐
    versions of Python, torch, Opacus, transformers, truemfu ─┤
    the device's name, the memory limit, environment variables ─┼─► SHA-256
    truemfu's own sources ─┤
    the user's own trainer, factory or configuration file ─┘

Nothing is imported: versions come from the metadata of installed packages, modules are only located.
Modules that the user's trainer imports are not included; use `rerun` after changing those.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..hardware.detect import PEAK_VARIABLE
from ..provenance import installed_version
from ..records import SweepCase

_PACKAGES = ("torch", "opacus", "transformers")


def find_module(name: str) -> ModuleSpec | None:
    """Where a worker finds a module, the current folder last, without importing it or its packages."""
    top, *below = name.split(".")
    if sys.modules.get(top, sys) is None:
        return None  # Python's mark for a module that must not be imported
    here = os.getcwd()
    # `python -m` and `python -c` put the current folder first; a worker does not.
    path = sys.path[1:] if sys.path[:1] in ([""], [here]) else sys.path
    spec = PathFinder.find_spec(top, [*path, here]) or find_spec(top)
    reached = top
    for part in below:
        if spec is None:
            return None
        reached = f"{reached}.{part}"
        spec = PathFinder.find_spec(reached, list(spec.submodule_search_locations or []))
    return spec


def is_path(model: str) -> bool:
    """Whether a case's model is a Hugging Face configuration on disk rather than `module:factory`."""
    return os.path.exists(model)  # False for a name that is too long for a path


_VARIABLES = (
    PEAK_VARIABLE,
    "CUDA_LAUNCH_BLOCKING",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that a worker inherits and that affect its figures."""


def hashed_environment(device_name: str, memory_limit_bytes: int | None) -> dict[str, Any]:
    """What all experiments of a sweep share and what affects their results, now."""
    found = {package: installed_version(package) for package in _PACKAGES}
    versions = {package: version for package, version in found.items() if version is not None}
    return {
        "device_name": device_name,
        "memory_limit_bytes": memory_limit_bytes,
        "python": platform.python_version(),
        "versions": {"truemfu": __version__, **versions},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "sources": _digest(sorted(Path(__file__).parents[1].rglob("*.py"))),
    }


def content_hash(case: SweepCase, environment: Mapping[str, Any]) -> str:
    """The hash of one experiment."""
    files = [*_files_of(case.trainer), *_files_of(case.model)]
    content = msgspec.json.encode([case, environment, _digest(files)])
    return hashlib.sha256(content).hexdigest()


def _files_of(name: str) -> list[Path]:
    """The file of `module:attribute` or of a configuration's path; none for built-in names."""
    if is_path(name):
        path = Path(name)
        return [path / "config.json" if path.is_dir() else path]
    module, colon, _ = name.partition(":")
    spec = find_module(module) if colon else None
    return [Path(spec.origin)] if spec is not None and spec.origin else []


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest())
    return total.hexdigest()
