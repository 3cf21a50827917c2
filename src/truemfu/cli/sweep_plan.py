"""What `truemfu sweep --dry-run` shows: the matrix, the request of each experiment, the hours it may take."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from .console import WIDEST_TABLE, output, print_json, table

if TYPE_CHECKING:
    from ..records import SweepCase
    from ..sweep.config import SweepConfig
    from ..sweep.launchers.settings import Request


def show_plan(config: SweepConfig, folder: Path, as_json: bool) -> None:
    """Print the experiments; on a cluster also what each requests, and the hours from earlier results."""
    from ..sweep.cases import cases_of
    from ..sweep.launchers.device import device_of
    from ..sweep.launchers.settings import request_of

    device = device_of(config)
    cases = cases_of(config, device)
    request = None
    if config.launcher != "local":
        request = request_of(config.cluster, device, config.timeout_s)
    if as_json:
        _print_json(cases, request, _estimate_s(folder, cases))
        return
    console = output(WIDEST_TABLE)
    columns = ("experiment", "trainer", "model", "batch", "sequence", "dtype", "device")
    wanted = [] if request is None else _words(request)
    drawn = table(*columns, *(["GPUs", "CPUs", "memory", "time limit"] if wanted else []))
    for name, case in cases.items():
        shape = (str(case.batch_size), str(case.seq_len))
        drawn.add_row(name, case.trainer, case.model, *shape, case.dtype, case.device, *wanted)
    console.print(drawn)
    console.print(f"experiments: {len(cases)}; none was started")
    if request is not None:
        console.print(_hours(_estimate_s(folder, cases), request.gpus, config))


def _words(request: Request) -> list[str]:
    memory = "default" if request.memory_bytes is None else f"{request.memory_bytes / 2**30:g} GiB"
    cpus = "default" if request.cpus is None else str(request.cpus)
    return [str(request.gpus), cpus, memory, f"{request.time_s / 60:.0f} min"]


def _print_json(cases: dict[str, SweepCase], request: Request | None, estimate_s: float | None) -> None:
    import msgspec

    listed = msgspec.to_builtins(cases)
    if request is not None:
        listed = {
            "experiments": listed,
            "request": msgspec.to_builtins(request),
            "estimated_s": estimate_s,
        }
    print_json(listed)


def _estimate_s(folder: Path, cases: dict[str, SweepCase]) -> float | None:
    """Seconds of all experiments one after another; None if the folder has no earlier result.

    An experiment takes as long as it did, one without a result the median of the others.
    """
    from ..sweep.paths import SweepFolder
    from ..sweep.supervisor.stored import stored_result

    files = SweepFolder(folder)
    took_s = {}
    for name in files.result_names():
        found = stored_result(name, files.result(name), files.log(name)).result
        if found is not None and found.wall_s is not None:
            took_s[name] = found.wall_s
    if not took_s:
        return None
    usual_s = median(took_s.values())
    return sum(took_s.get(name, usual_s) for name in cases)


def _hours(estimate_s: float | None, gpus: int, config: SweepConfig) -> str:
    if estimate_s is None:
        return "hours: unknown, because the output folder has no earlier results"
    hours = estimate_s / 3600
    parallel = config.cluster.max_jobs
    wall = "" if parallel is None else f", at least {hours / parallel:.2g} h with {parallel} at a time"
    gpu_hours = f" ({hours * gpus:.2g} GPU hours)" if gpus else ""
    return f"hours: about {hours:.2g} h of experiments{gpu_hours}, from earlier results{wall}"
