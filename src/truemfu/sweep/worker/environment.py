"""Where an experiment runs: device, driver, versions, host; and its peak memory."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import sys
from pathlib import Path

import torch

from ... import __version__
from ...provenance import library_versions
from ...records import Environment, Memory
from ..gpus import cpu_name
from ..process import memory_of

_PACKAGES = ("opacus", "transformers")


def environment(device: torch.device, git_commit: str | None) -> Environment:
    """The environment of this process."""
    versions = {"truemfu": __version__, **library_versions(_PACKAGES)}
    on_gpu = device.type == "cuda"
    return Environment(
        device_name=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        python=platform.python_version(),
        versions=versions,
        host=socket.gethostname(),
        git_commit=git_commit,
        driver=_driver() if on_gpu else None,
    )


def memory(device: torch.device) -> Memory:
    """The peaks so far."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return Memory(process_bytes=process_peak_bytes())
    return Memory(
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        process_bytes=process_peak_bytes(),
        device_total_bytes=torch.cuda.get_device_properties(device).total_memory,
    )


def reset_peaks(device: torch.device) -> None:
    """Start new memory peaks; for the host only where the system allows it (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM, nothing else


def process_peak_bytes() -> int:
    """Peak resident memory of this process."""
    found = memory_of(os.getpid()).get("VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return None
