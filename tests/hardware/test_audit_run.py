"""A command under ncu is ended when its step is counted: it alone, asked first, and ncu finishes its table.

Real processes; only ncu is a stand-in.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_ncu import STEP, STEP_FILE, install_fake_ncu

from truemfu.hardware.nsight.command import COUNT_VARIABLE, ncu_command
from truemfu.hardware.nsight.csv_output import parse_ncu_csv
from truemfu.hardware.nsight.run import AuditedRun, printed_by, run_audited

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")

_PATIENCE_S = 60.0

COUNT = """
import json, os, signal, subprocess, sys, time
def count(process_id=None):
    path = os.environ["TRUEMFU_AUDIT"]
    with open(path + ".tmp", "w") as file:
        json.dump({"model_flops": 3, "hardware_flops": 4, "process_id": process_id or os.getpid()}, file)
    os.rename(path + ".tmp", path)
"""
HANG = "time.sleep(600)\n"


class Place:
    """Where a run's files are."""

    def __init__(self, folder: Path) -> None:
        self.count_file, self.log_file = folder / "count.json", folder / "ncu.log"
        self.report = folder / "step.ncu-rep"
        self.ncu, self.pid_file = install_fake_ncu(folder), folder / "pid"
        self.said: list[str] = []
        self.said_file = folder / "said"

    def run(self, code: str, *command: str, **options: Any) -> AuditedRun:
        environment = {
            **os.environ,
            COUNT_VARIABLE: str(self.count_file),
            "FAKE_NCU_PRINTS": str(STEP_FILE),
            "PID_FILE": str(self.pid_file),
        }
        call = ncu_command(
            str(self.ncu),
            command or (sys.executable, "-c", COUNT + code),
            report=self.report,
            log_file=self.log_file,
        )
        options = {"grace_s": 2.0, **options}
        return run_audited(call, environment=environment, count_file=self.count_file, say=self.say, **options)

    def say(self, text: str) -> None:
        self.said.append(text)
        self.said_file.touch()

    def printed(self) -> str:
        return printed_by(str(self.ncu), log_file=self.log_file, report=self.report)


@pytest.fixture
def workspace(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_run_that_ends_by_itself_is_left_alone(workspace: Place) -> None:
    assert workspace.run("sys.exit(7)") == AuditedRun(7, was_ended=False)
    assert workspace.said == []


def test_a_run_is_ended_when_its_step_is_counted_and_the_table_is_whole(workspace: Place) -> None:
    end = workspace.run("count()\n" + HANG)
    assert end == AuditedRun(signal.SIGTERM, was_ended=True)
    assert workspace.printed() == STEP
    assert len(parse_ncu_csv(STEP)) == 194
    assert workspace.said == ["the marked step is counted: ending the run (--keep-running lets it go on)"]


def test_a_process_may_take_its_leave(workspace: Place) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(3)))\ncount()\n" + HANG
    assert workspace.run(code, grace_s=30.0) == AuditedRun(3, was_ended=True)


def test_a_process_that_will_not_go_is_killed(workspace: Place) -> None:
    end = workspace.run("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ncount()\n" + HANG, grace_s=0.2)
    assert end == AuditedRun(signal.SIGKILL, was_ended=True)
    assert workspace.printed() == STEP


def test_the_process_that_counted_is_ended_though_others_stand_between(workspace: Place) -> None:
    inner = COUNT + "count()\n" + HANG
    code = f"sys.exit(40 + (subprocess.run([sys.executable, '-c', {inner!r}]).returncode != 0))"
    assert workspace.run(code) == AuditedRun(41, was_ended=True)


def test_a_run_may_go_on(workspace: Place) -> None:
    assert workspace.run("count()\ntime.sleep(0.3)\nsys.exit(5)", keep_running=True) == AuditedRun(
        5, was_ended=False
    )


def test_a_number_of_somebody_elses_process_is_not_signalled(workspace: Place) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            heard = f"os.path.exists({str(workspace.said_file)!r})"
            end = workspace.run(f"count({stranger.pid})\nwhile not {heard}: time.sleep(0.01)")
            assert end == AuditedRun(0, was_ended=False)
            assert stranger.poll() is None
            (said,) = workspace.said
            assert f"process {stranger.pid} was not found here, so the run continues" in said
        finally:
            stranger.kill()


def test_a_count_that_cannot_be_read_ends_nothing(workspace: Place) -> None:
    code = "open(os.environ['TRUEMFU_AUDIT'], 'w').write('{')\ntime.sleep(0.3)\nsys.exit(6)"
    assert workspace.run(code) == AuditedRun(6, was_ended=False)


def test_an_interrupt_takes_all_processes_down(workspace: Place, tmp_path: Path) -> None:
    code = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "open(os.environ['PID_FILE'], 'w').write(str(os.getpid()))\n" + HANG
    )
    arguments = {
        "call": ncu_command(
            str(workspace.ncu),
            [sys.executable, "-c", COUNT + code],
            report=tmp_path / "step.ncu-rep",
            log_file=tmp_path / "ncu.log",
        ),
        "environment": {
            **os.environ,
            "FAKE_NCU_PRINTS": str(STEP_FILE),
            "PID_FILE": str(workspace.pid_file),
        },
        "grace_s": 0.5,
    }
    program = (
        "import json, sys; from pathlib import Path\n"
        "from truemfu.hardware.nsight.run import run_audited\n"
        f"run_audited(**json.loads({json.dumps(arguments)!r}), "
        f"count_file=Path({str(workspace.count_file)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as audit:
        until_s = time.monotonic() + _PATIENCE_S
        while (
            not (workspace.pid_file.exists() and workspace.pid_file.read_text())
            and time.monotonic() < until_s
        ):
            time.sleep(0.05)
        audit.send_signal(signal.SIGINT)
        _, said = audit.communicate(timeout=_PATIENCE_S)
    assert "KeyboardInterrupt" in said
    pid = int(workspace.pid_file.read_text())
    while is_alive(pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
