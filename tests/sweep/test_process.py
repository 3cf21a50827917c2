"""Processes: started, watched, ended, with whatever they have started themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from truemfu.sweep.process import WorkerProcess, kernel_oom_kills, kill_leftovers, memory_of

Start = Callable[[str], WorkerProcess]

FOREVER_S = 600.0

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open("pid.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid.tmp", "pid")
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists("pid"):
    time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.chdir(tmp_path)

    def start_python(code: str) -> WorkerProcess:
        return WorkerProcess([sys.executable, "-c", code], environment=os.environ)

    return start_python


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int) -> bool:
    """Whether a killed process is gone, as soon as the kernel has taken it down."""
    until = time.monotonic() + FOREVER_S
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not alive(pid)


def appears(path: Path) -> None:
    until = time.monotonic() + FOREVER_S
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_exit_code_is_read_exactly(start: Start) -> None:
    worker = start("import os; os._exit(3)")
    assert worker.wait(FOREVER_S)
    assert worker.end() == []
    assert (worker.exit_code, worker.signal_name) == (3, None)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_signal_is_read_exactly(start: Start, name: str) -> None:
    worker = start(f"import os, signal; os.kill(os.getpid(), signal.{name})")
    assert worker.wait(FOREVER_S)
    worker.end()
    assert (worker.exit_code, worker.signal_name) == (None, name)


def test_a_worker_reads_its_order_and_its_output_is_kept_in_memory(start: Start) -> None:
    worker = start("import sys; print('got', sys.stdin.readline().strip(), bool(sys.stdin.read()))")
    worker.send(b"the order\n")
    assert worker.wait(FOREVER_S)
    worker.end()
    assert worker.first_output == b"got the order False\n"


def test_an_order_to_a_worker_that_is_gone_is_no_error(start: Start) -> None:
    worker = start("pass")
    assert worker.wait(FOREVER_S)
    worker.send(b"the order\n" * 10_000)
    worker.end()
    assert worker.exit_code == 0


def test_one_that_obeys_is_ended_by_term(start: Start) -> None:
    worker = start("import time; time.sleep(600)")
    assert not worker.wait(0.0)
    worker.end(grace_s=FOREVER_S)
    assert worker.signal_name == "SIGTERM"


def test_one_that_ignores_term_is_killed_after_the_grace(start: Start, tmp_path: Path) -> None:
    worker = start(
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "pathlib.Path('deaf').touch(); time.sleep(600)"
    )
    appears(tmp_path / "deaf")
    worker.end(grace_s=0.2)
    assert worker.signal_name == "SIGKILL"


def test_hurry_cuts_the_grace_short(start: Start, tmp_path: Path) -> None:
    worker = start(
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "pathlib.Path('deaf').touch(); time.sleep(600)"
    )
    appears(tmp_path / "deaf")
    worker.end(grace_s=FOREVER_S, hurry=lambda: True)
    assert worker.signal_name == "SIGKILL"


def test_children_in_the_group_end_with_it(start: Start, tmp_path: Path) -> None:
    worker = start(
        "import pathlib, subprocess; child = subprocess.Popen(['sleep', '600']); "
        "pathlib.Path('pid').write_text(str(child.pid))"
    )
    assert worker.wait(FOREVER_S)
    child = int((tmp_path / "pid").read_text())
    assert alive(child)
    assert worker.end() == []
    assert ends(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc shows the environment of a daemon")
def test_a_daemon_is_found_by_its_token(start: Start, tmp_path: Path) -> None:
    worker = start(DAEMON)
    assert worker.wait(FOREVER_S)
    daemon = int((tmp_path / "pid").read_text())
    assert alive(daemon)
    assert worker.end() == []
    assert ends(daemon)
    assert worker.exit_code == 0


def test_a_process_with_another_token_is_left_alone(start: Start) -> None:
    bystander = start("import time; time.sleep(600)")
    assert kill_leftovers("0" * 32) == []
    assert not bystander.wait(0.0)
    bystander.end()


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_the_peak_of_memory_is_seen_while_it_runs(start: Start, tmp_path: Path) -> None:
    worker = start(
        "import pathlib, sys; x = bytearray(b'x') * (200 << 20); del x; pathlib.Path('ate').touch(); "
        "sys.stdin.readline()"
    )
    appears(tmp_path / "ate")
    assert not worker.wait(0.0)
    worker.end()
    assert worker.peak_bytes is not None
    assert 200 << 20 <= worker.peak_bytes < 400 << 20


def test_a_process_that_is_gone_has_no_peak() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert memory_of(gone.pid).get("VmHWM") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counter is in /proc or /sys")
def test_the_kernels_own_kills_are_counted_and_a_plain_kill_is_not(start: Start) -> None:
    before = kernel_oom_kills()
    assert before is not None
    worker = start("import os; os.kill(os.getpid(), 9)")
    assert worker.wait(FOREVER_S)
    worker.end()
    assert kernel_oom_kills() == before
