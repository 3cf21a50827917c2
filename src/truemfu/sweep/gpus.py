"""Which device experiments run on, and the GPUs of this machine, without torch and without a CUDA context.

The supervisor must start fast and must never hold GPU memory, so it asks the driver's tool, `nvidia-smi`, or
without it looks at the device files. An existing CUDA_VISIBLE_DEVICES is respected: its entries, as written,
are the visible GPUs.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from ..errors import UsageError
from .config import SweepConfig

_ASK_TIMEOUT_S = 30.0
_CHOOSING = ("--gres", "--gpus", "-C", "--constraint", "-w", "--nodelist")
"""Options of sbatch that choose among kinds of nodes."""


def device_of(config: SweepConfig) -> str:
    """cuda or cpu. `auto` on a cluster is cuda, unless its experiments request no GPU."""
    if config.launcher == "local" or _is_this_machine(config):
        return resolve_device(config.device, config.gpus)
    if config.gpus is not None:
        raise UsageError(
            f"gpus selects GPUs of this machine by number, but {config.launcher} chooses the GPUs itself: "
            "leave gpus out, and set cluster.gpus to the number of GPUs per experiment"
        )
    if config.device == "auto":
        return "cpu" if config.cluster.gpus == 0 else "cuda"
    return config.device


def device_name_of(config: SweepConfig, device: str) -> str:
    """The name of the device; of a cluster, which of its nodes may be chosen."""
    if config.launcher == "local" or _is_this_machine(config):
        return device_name(device)
    options = [option for option in config.cluster.sbatch_options if option.startswith(_CHOOSING)]
    return ", ".join([f"{device} on {config.launcher}", *filter(None, [config.cluster.partition]), *options])


def _is_this_machine(config: SweepConfig) -> bool:
    """A Ray that is started for the sweep has this machine alone."""
    return config.launcher == "ray" and config.cluster.ray_address is None


def visible_gpus() -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES for each GPU: an index, or the user's own entry."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _names()
    if allowed is None:
        return [str(index) for index in range(len(present))]
    entries = [entry.strip() for entry in allowed.split(",") if entry.strip()]
    # CUDA itself stops reading at the first entry it does not know; -1 usually means "none".
    return entries[: entries.index("-1")] if "-1" in entries else entries if present else []


def resolve_device(device: str, gpus: list[int] | None = None) -> str:
    """`auto` → cuda where a GPU is visible, else cpu; `cuda`, or a GPU by number, without one is an error."""
    if device == "cpu":
        return "cpu"
    found = visible_gpus()
    if not found and (device == "cuda" or gpus is not None):
        requested = "device is cuda" if gpus is None else f"gpus is {', '.join(map(str, gpus))}"
        raise UsageError(f"{requested}, but no NVIDIA GPU is visible: use --device cpu, or check nvidia-smi")
    return "cuda" if found else "cpu"


def chosen_gpus(requested: list[int] | None) -> dict[int, str]:
    """The visible GPUs by number, or those that were requested; each once."""
    found = visible_gpus()
    if requested is None:
        return dict(enumerate(found))
    wrong = [number for number in requested if number >= len(found)]
    if wrong:
        raise UsageError(
            f"gpus must be numbers from 0 to {len(found) - 1} (visible here: {len(found)}); got {wrong[0]}"
        )
    return {number: found[number] for number in requested}


def device_name(device: str) -> str:
    """The name of the device the experiments run on; several GPU models are all named."""
    if device == "cuda":
        return " + ".join(sorted(set(_names()))) or "unknown GPU"
    return cpu_name()


def _names() -> list[str]:
    """The name of each GPU in this machine, in the order of the PCI bus."""
    names = _names_by_tool()
    if names is None:
        names = ["NVIDIA GPU" for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    return names


def _names_by_tool() -> list[str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def cpu_name() -> str:
    """The name of the processor."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # no /proc: not Linux
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"
