"""The driver of a batch's Ray tasks: submits them, waits, notes what Ray says, and ends with the last one.

    python -c … <jobs folder> [after]     keep this batch, once the batch in the folder `after` has ended
    python -c … --check <address> <JSON>  whether a node of a cluster can satisfy a request

A task is thin: it starts the node agent as a fresh process and waits for it. Its code is stored in the task,
so Ray's own interpreter needs nothing of this package. Ray's retries are off. SIGTERM cancels every task.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ... import plain_files
from ...errors import one_line
from ...records import Status
from ..order import WorkerOrder
from .engine import ENGINE_JOB_VARIABLE, NODE_AGENT, submit_environment
from .jobs import JobsFolder, JobState
from .ray_engine import driver_pid, lock_path, shortage_of
from .settings import Request

_WAIT_S = 1.0
_END_S = 30.0
_NAMESPACE = "truemfu"


def main(arguments: Sequence[str]) -> int:
    if arguments[0] == "--check":
        return _check(arguments[1], msgspec.json.decode(arguments[2], type=Request))
    jobs = JobsFolder(Path(arguments[0]))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock = plain_files.open_plain(lock_path(jobs), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.truncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    for before in arguments[1:]:
        while driver_pid(JobsFolder(Path(before))) is not None and not stop.wait(_WAIT_S):
            pass
    return _keep(jobs, stop)


def _keep(jobs: JobsFolder, stop: threading.Event) -> int:
    batch = jobs.read_batch()
    assert batch is not None, "a driver is started for a batch that is described"
    environment = submit_environment()
    ray = _connected(batch.settings.ray_address)
    present = jobs.listing()
    waiting = [n for n in range(len(batch.names)) if n in present[".order"] and n not in present[".claim"]]
    shortage = shortage_of(_resources(ray), batch.request)
    if shortage is not None:  # Ray would keep the tasks waiting for ever
        for number in waiting:
            jobs.write(number, JobState(over=True, reason=shortage))
        ray.shutdown()
        return 0
    limit = batch.settings.max_jobs or len(waiting)
    task = _task(ray, batch.request)
    command = [*NODE_AGENT, str(jobs.root)]
    running: dict[Any, int] = {}
    try:
        while (waiting or running) and not stop.is_set():
            while waiting and len(running) < limit:
                number = waiting.pop(0)
                running[task.remote([*command, str(number)], environment, batch.working_folder)] = number
            done, _ = ray.wait(list(running), num_returns=1, timeout=_WAIT_S)
            for reference in done:
                _note(ray, jobs, running.pop(reference), reference)
        if running:
            _cancel(ray, list(running))
    finally:
        ray.shutdown()
    return 0


def _connected(address: str | None) -> Any:
    """Ray, after `ray.init`."""
    if "RAY_AUTH_MODE" not in os.environ:  # read when Ray is imported
        if address is None:
            # Ray would leave a token in the user's home, which later clusters would then ask for.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        elif _has_token():
            # `ray start` asks for the token where there is one; `ray.init` does not send it by itself.
            os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        # A local cluster of this process's own, whatever RAY_ADDRESS or an earlier `ray start` says.
        ray.init(address="local", include_dashboard=False, namespace=_NAMESPACE, **quiet)
    else:
        ray.init(address=address, namespace=_NAMESPACE, **quiet)
    return ray


def _has_token() -> bool:
    given = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(name in os.environ for name in given) or (Path.home() / ".ray" / "auth_token").is_file()


def _task(ray: Any, request: Request) -> Any:
    """The remote function: its code refers to nothing of this module, so it is stored by value."""

    job_variable = ENGINE_JOB_VARIABLE

    def run_agent(command: list[str], environment: dict[str, str], folder: str) -> int:
        import os
        import signal
        import subprocess

        import ray

        own = {name: value for name, value in os.environ.items() if name.endswith("VISIBLE_DEVICES")}
        own[job_variable] = ray.get_runtime_context().get_task_id() or ""
        agent = subprocess.Popen(command, env={**environment, **own}, cwd=folder, stdin=subprocess.DEVNULL)
        try:
            return agent.wait()
        except BaseException:
            # Cancelled: the agent ends its worker in order.
            agent.send_signal(signal.SIGTERM)
            agent.wait(timeout=30)
            raise

    function: Callable[..., Any] = ray.remote(
        num_gpus=request.gpus,
        num_cpus=request.cpus or 1,
        memory=request.memory_bytes,
        max_retries=0,
        retry_exceptions=False,
    )(run_agent)
    return function


def _note(ray: Any, jobs: JobsFolder, number: int, reference: Any) -> None:
    """Write down what Ray says of a task, unless its experiment has been collected."""
    status = Status.LOST
    try:
        code = ray.get(reference)
        reason = f"its Ray task has ended, and its node agent exited with code {code}"
    except Exception as error:
        reason = one_line(error)
        if isinstance(error, ray.exceptions.OutOfMemoryError):
            status = Status.HOST_OOM
    if jobs.read(number, WorkerOrder) is not None:
        jobs.write(number, JobState(over=True, reason=reason, status=status))


def _cancel(ray: Any, left: list[Any]) -> None:
    """Ask every task to end; Ray's shutdown then kills what has not."""
    for reference in left:
        ray.cancel(reference, force=False)
    until = time.monotonic() + _END_S
    while left and time.monotonic() < until:
        _, left = ray.wait(left, num_returns=len(left), timeout=_WAIT_S)


def _check(address: str, request: Request) -> int:
    """0 if some node has that much; else the reason is the last line of standard output."""
    try:
        ray = _connected(address)
        shortage = shortage_of(_resources(ray), request)
        ray.shutdown()
    except Exception as error:
        print(f"Ray at {address} does not answer: {one_line(error)}")
        return 2
    if shortage is not None:
        print(shortage)
    return 0 if shortage is None else 2


def _resources(ray: Any) -> list[dict[str, float]]:
    """What each node of the cluster has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def start() -> NoReturn:
    """Run as the driver's process, then exit."""
    sys.exit(main(sys.argv[1:]))
