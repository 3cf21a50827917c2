"""Ray: a driver process of our own submits the experiments of a batch and waits for them.

    supervisor ─► driver (`ray_driver.py`, a session of its own) ─► Ray task ─► node agent ─► worker

Tasks end with the driver that submitted them, so that is not the supervisor: the supervisor may be closed, or
killed, and find the driver again. The supervisor does not import Ray. A driver holds a lock as long as it
lives and ends with its last experiment; a local Ray started for the sweep ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ... import plain_files
from ...errors import UsageError
from ...text import on_one_line, shortened
from ..content_hash import find_module
from ..gpus import visible_gpus
from ..process import start_command
from .engine import last_line_of, submit_environment
from .jobs import Batch, JobsFolder, JobState
from .settings import ClusterSettings, Request

_DRIVER = start_command("truemfu.sweep.launchers.ray_driver")
_CHECK_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 30.0
_RESOURCES = {"GPU": "GPUs", "CPU": "CPUs", "memory": "bytes of memory"}


class Ray:
    """A Ray cluster by its address, or a local one for the sweep."""

    name = "Ray"

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings

    @property
    def runs_batches_in_turn(self) -> bool:
        """A local Ray is started for each batch, and has all devices of this machine."""
        return self._settings.ray_address is None

    def check(self, request: Request) -> None:
        if find_module("ray") is None:
            raise UsageError("launcher ray needs Ray, which is not installed: pip install 'truemfu[ray]'")
        address = self._settings.ray_address
        if address is None:
            shortage = shortage_of([_resources_here()], request, "a local Ray on this machine")
            if shortage is not None:
                raise UsageError(shortage)
            return
        _check_answers(address)
        try:
            done = subprocess.run(
                [*_DRIVER, "--check", address, msgspec.json.encode(request).decode()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_CHECK_TIMEOUT_S,
                env=driver_environment(address),
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"Ray at {address} does not answer: check that Ray is running there") from None
        if done.returncode != 0:
            said = [line for line in done.stdout.splitlines() if line.strip()][-1:] or [
                "Ray's driver failed without a message"
            ]
            raise UsageError(shortened(on_one_line(said[0])))

    def submit(self, batch: Batch, jobs: JobsFolder, numbers: Sequence[int], after: Batch | None) -> str:
        before = (
            [] if after is None else [str(jobs.root.with_name(jobs.root.name.replace(batch.id, after.id)))]
        )
        log = plain_files.open_plain(_log(jobs), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        try:
            driver = subprocess.Popen(
                [*_DRIVER, str(jobs.root), *before],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=batch.working_folder,
                env=driver_environment(batch.settings.ray_address),
                start_new_session=True,
            )
        finally:
            os.close(log)
        until = time.monotonic() + _START_TIMEOUT_S
        while driver_pid(jobs) is None and time.monotonic() < until:
            if driver.poll() is not None:
                raise UsageError(f"Ray's driver exited at once: {last_line_of(_log(jobs)) or 'no message'}")
            time.sleep(0.05)
        return f"{socket.gethostname()}:{driver.pid}"

    def find(self, batch: Batch, jobs: JobsFolder) -> str | None:
        return batch.engine_job if driver_pid(jobs) is not None else None

    def job_states(
        self, batch: Batch, jobs: JobsFolder, claimed: Mapping[int, str | None]
    ) -> dict[int, JobState]:
        told = jobs.listing()[".engine"]
        found = {number: jobs.read(number, JobState) for number in told & set(claimed)}
        states = {number: state for number, state in found.items() if state is not None}
        if driver_pid(jobs) is None:
            last = last_line_of(_log(jobs))
            ended = JobState(
                over=True, reason=f"the driver of the Ray tasks has ended{f': {last}' if last else ''}"
            )
            states = {**dict.fromkeys(claimed, ended), **states}
        return states

    def cancel(self, batch: Batch, jobs: JobsFolder) -> None:
        pid = driver_pid(jobs)
        if pid is None:
            return
        host = (batch.engine_job or "").partition(":")[0]
        if host and host != socket.gethostname():
            raise UsageError(f"the driver of these Ray tasks runs on {host}: cancel them there")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def driver_environment(address: str | None) -> dict[str, str]:
    """Ray reports no usage, and leaves CUDA_VISIBLE_DEVICES alone in a task without a GPU.

    A local Ray hands out the GPUs that are visible here.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if address is None else None
    return {
        **submit_environment(),
        **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PYTHONUNBUFFERED": "1",
    }


def driver_pid(jobs: JobsFolder) -> int | None:
    """The driver of a batch, None once it has ended: it holds its lock as long as it lives."""
    try:
        file = plain_files.open_plain(lock_path(jobs), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        written = os.pread(file, 32, 0)
        return int(written) if written.isdigit() else None
    finally:
        os.close(file)


def lock_path(jobs: JobsFolder) -> Path:
    """Locked by the driver as long as it lives."""
    return jobs.root / "keeper.lock"


def _log(jobs: JobsFolder) -> Path:
    return jobs.root / "keeper.log"


def _check_answers(address: str) -> None:
    """Ray itself waits for minutes for an address where nobody listens."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not colon or not port.isdecimal():
        raise UsageError(f"ray_address must be host:port or auto; got {address!r}")
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"Ray at {address} does not answer ({error}): check that Ray is running there"
        ) from None


def _resources_here() -> dict[str, float]:
    """A local Ray has what this machine has."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"GPU": len(visible_gpus()), "CPU": os.cpu_count() or 1, "memory": memory_bytes}


def shortage_of(nodes: Sequence[Mapping[str, float]], request: Request, place: str = "a node") -> str | None:
    """Why no node can satisfy a request, by the resources of each as Ray names them; None if one can."""
    wanted = {"GPU": request.gpus, "CPU": request.cpus or 1, "memory": request.memory_bytes or 0}
    if any(all(node.get(what, 0) >= much for what, much in wanted.items()) for node in nodes):
        return None
    most = {what: max((node.get(what, 0) for node in nodes), default=0) for what in wanted}
    # Where each is somewhere, it is all of them together that no node has.
    short = [what for what in wanted if most[what] < wanted[what]] or [
        what for what in wanted if wanted[what]
    ]
    asked, there = (
        ", ".join(f"{much[what]:,.15g} {_RESOURCES[what]}" for what in short) for much in (wanted, most)
    )
    return f"no node can satisfy the request: an experiment requests {asked}; the most {place} has is {there}"
