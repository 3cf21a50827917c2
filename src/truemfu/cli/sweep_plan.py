"""What `truemfu sweep --dry-run` shows: the matrix, the request of each experiment, the hours it may take."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

import msgspec

from ..records import SweepCase
from ..sweep.cases import cases_of
from ..sweep.config import SweepConfig
from ..sweep.gpus import device_of
from ..sweep.launchers.settings import Request, request_of
from ..sweep.paths import SweepFolder
from ..sweep.supervisor.stored import stored_result
from .console import WIDEST_TABLE, output, print_json, table


def show_plan(config: SweepConfig, folder: Path, as_json: bool) -> None:
    """Print the experiments; on a cluster also what each requests, and the hours from earlier results."""

    device = device_of(config)
    cases = cases_of(config, device)
    requests: dict[str, Request] = {}
    if config.launcher != "local":
        requests = {
            name: request_of(config.cluster, device, config.timeout_s, case.gpus)
            for name, case in cases.items()
        }
    took_s = _expected_s(folder, cases)
    if as_json:
        _print_json(cases, requests, took_s)
        return
    console = output(WIDEST_TABLE)
    columns = ("experiment", "trainer", "model", "batch", "sequence", "dtype", "device")
    drawn = table(*columns, *(["GPUs", "CPUs", "memory", "time limit"] if requests else []))
    for name, case in cases.items():
        shape = (str(case.batch_size), str(case.seq_len))
        device = case.device if case.gpus == 1 else f"{case.gpus} × {case.device}, {case.parallel}"
        wanted = _words(requests[name]) if requests else []
        drawn.add_row(name, case.trainer, case.model, *shape, case.dtype, device, *wanted)
    console.print(drawn)
    console.print(f"experiments: {len(cases)}; none was started")
    if requests:
        console.print(_hours(took_s, requests, config))


def _words(request: Request) -> list[str]:
    memory = "default" if request.memory_bytes is None else f"{request.memory_bytes / 2**30:g} GiB"
    cpus = "default" if request.cpus is None else str(request.cpus)
    return [str(request.gpus), cpus, memory, f"{math.ceil(request.time_s / 60)} min"]


def _print_json(
    cases: dict[str, SweepCase], requests: dict[str, Request], took_s: dict[str, float] | None
) -> None:

    listed = msgspec.to_builtins(cases)
    if requests:
        listed = {
            "experiments": listed,
            "requests": msgspec.to_builtins(requests),
            "estimated_s": None if took_s is None else sum(took_s.values()),
        }
    print_json(listed)


def _expected_s(folder: Path, cases: dict[str, SweepCase]) -> dict[str, float] | None:
    """Seconds of each experiment; None if the folder has no earlier result.

    An experiment takes as long as it did, one without a result the median of the others.
    """

    files = SweepFolder(folder)
    took_s: dict[str, float] = {}
    for name in files.result_names():
        found = stored_result(name, files.result(name), files.log(name)).result
        if found is not None and found.wall_s is not None:
            took_s[name] = found.wall_s
    if not took_s:
        return None
    usual_s = median(took_s.values())
    return {name: took_s.get(name, usual_s) for name in cases}


def _hours(took_s: dict[str, float] | None, requests: dict[str, Request], config: SweepConfig) -> str:
    if took_s is None:
        return "hours: unknown, because the output folder has no earlier results"
    hours = sum(took_s.values()) / 3600
    gpu_s = sum(seconds * requests[name].gpus for name, seconds in took_s.items())
    parallel = config.cluster.max_jobs
    wall = "" if parallel is None else f", at least {hours / parallel:.2g} h with {parallel} at a time"
    gpu_hours = f" ({gpu_s / 3600:.2g} GPU hours)" if gpu_s else ""
    return f"hours: about {hours:.2g} h of experiments{gpu_hours}, from earlier results{wall}"
