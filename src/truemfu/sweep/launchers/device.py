"""Which device a sweep's experiments run on: known here for this machine, requested from a cluster."""

from __future__ import annotations

from ...errors import UsageError
from ..config import SweepConfig
from ..gpus import device_name, resolve_device

_CHOOSING = ("--gres", "--gpus", "-C", "--constraint", "-w", "--nodelist")
"""Options of sbatch that choose among kinds of nodes."""


def device_of(config: SweepConfig) -> str:
    """cuda or cpu. `auto` on a cluster is cuda, unless its experiments request no GPU."""
    if config.launcher == "local" or _is_this_machine(config):
        return resolve_device(config.device, config.gpus)
    if config.gpus is not None:
        raise UsageError(
            f"gpus are numbers of GPUs in this machine; with launcher {config.launcher} the engine chooses: "
            "leave it out, and set cluster.gpus to the GPUs of an experiment"
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
