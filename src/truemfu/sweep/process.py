"""A worker's process and all its descendants: started, watched, and ended completely.

    start ─► own session and process group, own token in its environment
      │
    end ─► TERM to the group ─► grace ─► KILL to the group
             ─► every process with the token in its environment

A child that daemonises leaves the group and the session, but not its environment: the token is found in
/proc/*/environ. Without /proc (macOS) only the group is ended. A daemon with an empty environment escapes
both.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_START = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from {module} import start
start()
"""


def start_command(module: str) -> tuple[str, ...]:
    """Starts a process with `start` of a module.

    Unlike `python -m`, it does not put the current folder before the installed packages: a torch.py there
    must not shadow torch. A trainer in the current folder is still found, after them.
    """
    return sys.executable, "-c", _START.format(module=module)


TOKEN_NAME = "TRUEMFU_SWEEP_TOKEN"
ANSWER_NAME = "TRUEMFU_SWEEP_ANSWER"
"""The worker's descriptor of an unnamed file: what it writes there becomes `WorkerProcess.answer`."""
GRACE_S = 5.0

_KILL_POLL_INTERVAL_S = 0.01
_HURRY_POLL_INTERVAL_S = 0.1
_KILL_TIMEOUT_S = 10.0
_PROC = Path("/proc")


class WorkerProcess:
    """One worker process and all its descendants."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: int | None = None
    ) -> None:
        """`output` is a descriptor for what it prints, the caller's; None: kept as `first_output`."""
        self.token = uuid.uuid4().hex
        self.answer = b""
        """The worker's result, known once it has ended; a full disk or a removed folder does not lose it."""
        self.first_output = b""
        """What it printed until it had its order and wrote to a log of its own; known once it has ended."""
        self.peak_bytes: int | None = None
        """The peak of its host memory, updated by each `wait`."""
        self._answer_file, self._output_file = _unnamed_file(), _unnamed_file() if output is None else None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output if self._output_file is None else self._output_file,
                stderr=subprocess.STDOUT,
                env={
                    **environment,
                    TOKEN_NAME: self.token,
                    ANSWER_NAME: str(self._answer_file),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=[self._answer_file],
                start_new_session=True,
            )
        except BaseException:
            os.close(self._answer_file)
            if self._output_file is not None:
                os.close(self._output_file)
            raise
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and if a signal ended it."""
        code = self._process.returncode
        return None if code is None or code < 0 else code

    @property
    def signal_name(self) -> str | None:
        """The signal that ended it, for instance SIGSEGV."""
        code = self._process.returncode
        if code is None or code >= 0:
            return None
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def send(self, line: bytes) -> None:
        """Send it its order; `wait` detects a worker that has already ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for it at most this long; whether it has ended."""
        found = memory_of(self.pid).get("VmHWM")
        if found is not None:
            self.peak_bytes = max(found, self.peak_bytes or 0)
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace_s: float = 0.0, *, hurry: Callable[[], bool] = lambda: False) -> list[int]:
        """End it and all its descendants; the ids of processes that could not be killed, normally none.

        With a grace period it gets SIGTERM first, and is killed when that is over or `hurry` returns True.
        Must be called exactly once, also for a worker that has ended by itself: its descendants are
        ended, and its exit code becomes known.
        """
        if grace_s > 0 and not self.wait(0):
            self._signal(signal.SIGTERM)
            until = time.monotonic() + grace_s
            while not self.wait(min(_HURRY_POLL_INTERVAL_S, until - time.monotonic())):
                if time.monotonic() >= until or hurry():
                    break
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it had not read what was sent
                self._process.stdin.close()
        left = kill_leftovers(self.token)
        self.answer = _content(self._answer_file)
        if self._output_file is not None:
            self.first_output = _content(self._output_file)
        return left

    def _signal(self, number: signal.Signals) -> None:
        # The group may be empty; macOS raises EPERM if only a zombie is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _unnamed_file() -> int:
    """In memory where the system supports it (Linux), else a temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("truemfu-answer")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _content(file: int) -> bytes:
    """All of an unnamed file, which is then closed."""
    with open(file, "rb") as opened:
        opened.seek(0)
        return opened.read()


def memory_of(pid: int) -> dict[str, int]:
    """The amounts of memory in /proc/<pid>/status in bytes; none if it has ended or there is no /proc.

    `VmHWM` is the peak of its resident memory.
    """
    try:
        status = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}


def kill_leftovers(token: str) -> list[int]:
    """Kill every process with this token; the ids of those that still exist after ten seconds."""
    until = time.monotonic() + _KILL_TIMEOUT_S
    while found := _processes_with_token(token):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return found
        time.sleep(_KILL_POLL_INTERVAL_S)
    return []


def kernel_oom_kills() -> int | None:
    """How many processes the kernel's OOM killer has killed: in this cgroup, or else on the machine."""
    for path in _oom_counters():
        try:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            # This counter does not exist here.
            continue
    return None


def _oom_counters() -> Iterator[Path]:
    groups = Path("/sys/fs/cgroup")
    try:
        memberships = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        memberships = []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if controllers == "":
            yield groups / inside / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / inside / "memory.oom_control"
    yield _PROC / "vmstat"


def _processes_with_token(token: str) -> list[int]:
    """None without /proc. A process that has ended, or belongs to another user, is not a descendant."""
    found = []
    entries = os.listdir(_PROC) if _PROC.is_dir() else []
    for entry in filter(str.isdigit, entries):
        with contextlib.suppress(OSError):
            environment = (_PROC / entry / "environ").read_bytes()
            if f"{TOKEN_NAME}={token}".encode() in environment.split(b"\0"):
                found.append(int(entry))
    return found
