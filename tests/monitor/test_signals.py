"""A process that is asked to end, or killed: its rows are on disk, and it ends as it would have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.waiting import FOREVER_S, wait_until
from torch import nn

from truemfu import TrainingMonitor
from truemfu.monitor import signals
from truemfu.monitor.rows import output, row_thread
from truemfu.monitor.values import sending

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
RUN = """
    import os, signal, sys, threading, time
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    import torch
    from torch import nn
    from truemfu import TrainingMonitor
    torch.set_num_threads(1)
    model = nn.Linear(8, 8)
    {before}
    monitor = TrainingMonitor({folder!r}, {settings}, model=model)
    def train(steps):
        for step in steps:
            model(torch.ones(2, 8)).sum().backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    {train}
    print("trained", flush=True)
    {end}
"""
FOREVER = "while True: time.sleep(0.01)"


def started(
    folder: Path,
    *,
    before: str = "pass",
    train: str = "train(range(1, 61))",
    end: str = FOREVER,
    settings: dict[str, Any] | None = None,
) -> subprocess.Popen[str]:
    """A run that has logged 60 steps, with default settings where none are given."""
    code = textwrap.dedent(RUN).format(
        folder=str(folder), before=before, train=train, end=end, settings=settings
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    if run.stdout.readline() != "trained\n":
        raise RuntimeError(run.communicate()[1])
    return run


def ended(run: subprocess.Popen[str], number: int, *, within_s: float = FOREVER_S) -> tuple[int, str]:
    """Status and output of a run that was sent a signal."""
    run.send_signal(number)
    try:
        printed, errors = run.communicate(timeout=within_s)
    finally:
        run.kill()
    print(errors)
    return run.returncode, printed


def steps_in(folder: Path) -> list[int]:
    path = folder / "training_log.json"
    return [row["global_step"] for row in json.loads(path.read_text())] if path.exists() else []


@BOTH
def test_rows_are_written_and_the_process_dies_by_the_signal(tmp_path: Path, number: int) -> None:
    run = started(tmp_path)
    assert ended(run, number)[0] == -number
    assert steps_in(tmp_path) == list(range(1, 61))


def test_also_where_the_main_thread_never_runs_python_again(tmp_path: Path) -> None:
    """As in a collective whose other ranks are gone: no handler of Python's is called there."""
    stuck = "import ctypes; ctypes.CDLL(None).pthread_mutex_lock.restype = None; " + (
        "m = ctypes.create_string_buffer(64); ctypes.CDLL(None).pthread_mutex_lock(m); "
        "ctypes.CDLL(None).pthread_mutex_lock(m)"
    )
    assert ended(started(tmp_path, end=stuck), signal.SIGTERM)[0] == -signal.SIGTERM
    assert steps_in(tmp_path) == list(range(1, 61))


def test_a_handler_set_before_is_called_and_a_run_that_goes_on_is_logged_on(tmp_path: Path) -> None:
    before = "asked = []; signal.signal(15, lambda number, frame: asked.append(number))"
    end = "\n".join(
        ("while not asked: time.sleep(0.01)", "train(range(61, 71))", "print(asked)", "sys.exit(5)")
    )
    status, printed = ended(started(tmp_path, before=before, end=end), signal.SIGTERM)
    assert (status, printed) == (5, "[15]\n")
    assert steps_in(tmp_path) == list(range(1, 71))


def test_rows_are_on_disk_before_a_handler_of_the_users_runs(tmp_path: Path) -> None:
    path = tmp_path / "training_log.json"
    before = f"signal.signal(15, lambda *_: os._exit(len(open({str(path)!r}).read().splitlines())))"
    assert ended(started(tmp_path, before=before), signal.SIGTERM)[0] == 62
    assert steps_in(tmp_path) == list(range(1, 61))


def test_a_handler_that_raises_ends_the_run_as_it_would_have(tmp_path: Path) -> None:
    run = started(tmp_path, before="signal.signal(15, lambda *_: sys.exit(7))")
    assert ended(run, signal.SIGTERM)[0] == 7
    assert steps_in(tmp_path) == list(range(1, 61))
    assert "summary" in json.loads((tmp_path / "training_run.json").read_text())


def test_a_handler_set_after_ours_replaces_it(tmp_path: Path) -> None:
    train = "train(range(1, 61)); signal.signal(15, lambda *_: os._exit(9))"
    assert ended(started(tmp_path, train=train), signal.SIGTERM)[0] == 9


def test_a_handler_that_calls_the_one_before_it_is_not_ended_by_ours(tmp_path: Path) -> None:
    """As Lightning does where it finds a handler: without a monitor it would find none."""
    train = "\n".join(
        (
            "train(range(1, 61))",
            "ours = signal.getsignal(15)",
            "asked = []",
            "signal.signal(15, lambda *a: (ours(*a), asked.append(1)))",
        )
    )
    end = "while not asked: time.sleep(0.01)\nos._exit(4)"
    assert ended(started(tmp_path, train=train, end=end), signal.SIGTERM)[0] == 4
    assert steps_in(tmp_path) == list(range(1, 61))


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    run = started(tmp_path, before=before, end="time.sleep(1); sys.exit(signal.getsignal(1) == 1)")
    assert ended(run, signal.SIGHUP)[0] == 1


def test_a_run_in_another_thread_ends_as_without_a_monitor(tmp_path: Path) -> None:
    train = "t = threading.Thread(target=train, args=(range(1, 61),)); t.start(); t.join()"
    run = started(tmp_path, train=train)
    assert ended(run, signal.SIGTERM)[0] == -signal.SIGTERM


def test_a_killed_process_has_lost_at_most_ten_seconds(tmp_path: Path) -> None:
    """No new step comes: the rows are written all the same, once all waits on their way are over."""
    waits_s = sending._MAX_HOLD_S, row_thread._WAKE_EVERY_S, row_thread._ARRIVES_S, output._LOCAL_FLUSH_S
    assert sum(waits_s) < 10
    run = started(tmp_path)
    wait_until(lambda: steps_in(tmp_path) == list(range(1, 61)))
    assert ended(run, signal.SIGKILL)[0] == -signal.SIGKILL
    assert steps_in(tmp_path) == list(range(1, 61))


def test_steps_are_on_disk_while_others_follow(tmp_path: Path) -> None:
    """However small `save_freq` is: a row is worked out first."""
    end = "for step in range(61, 1_000_000): train([step]); time.sleep(0.002)"
    run = started(tmp_path, end=end, settings={"monitoring": {"save_freq": 10}})
    wait_until(lambda: len(steps_in(tmp_path)) > 100)
    on_disk = len(steps_in(tmp_path))
    assert ended(run, signal.SIGKILL)[0] == -signal.SIGKILL
    found = steps_in(tmp_path)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= on_disk


IN_A_STEP = (
    """
with monitor._guard.lock:  # as in the middle of log_step
    signal.raise_signal(signal.SIGTERM)
"""
    + FOREVER
)


def test_a_signal_in_a_step_is_not_lost_where_the_program_has_closed_our_descriptors(tmp_path: Path) -> None:
    end = "print('closing', flush=True); os.closerange(3, 4096)" + IN_A_STEP
    assert ended(started(tmp_path, end=end), 0)[0] == -signal.SIGTERM


REOPENED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.closerange(3, 4096)
files = [open(f"{folder}/{{number}}.txt", "w+b", buffering=0) for number in range(1100)]
assert files[-1].fileno() > 1010, "some of them have the numbers of the pipe"
"""


def check_reopened(folder: Path, run: subprocess.Popen[str]) -> None:
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    files = [folder / f"{number}.txt" for number in range(1100)]
    assert [file.name for file in files if file.read_bytes()] == []
    assert [row["global_step"] for row in json.loads((folder / "training_log.json").read_text())] == [
        *range(1, 64)
    ]


@pytest.mark.parametrize("closed", ["monitor.close()", "pass"], ids=["closed", "at exit"])
def test_nothing_is_written_to_a_file_that_has_the_number_of_a_closed_descriptor(
    tmp_path: Path, closed: str
) -> None:
    """As after daemonising: the program closes all descriptors, then opens files of its own."""
    end = REOPENED.format(folder=tmp_path) + f"train(range(61, 64)); {closed}; os.fstat(files[-1].fileno())\n"
    check_reopened(tmp_path, started(tmp_path, end=end + "for file in files: file.write(b'')"))


def test_a_signal_after_that_ends_the_program_and_writes_to_none_of_its_files(tmp_path: Path) -> None:
    end = REOPENED.format(folder=tmp_path) + "print('open', flush=True)\n" + FOREVER
    run = started(tmp_path, end=end)
    assert run.stdout is not None
    assert run.stdout.readline() == "open\n"
    assert ended(run, signal.SIGTERM)[0] == -signal.SIGTERM
    low = [tmp_path / f"{number}.txt" for number in range(900)]
    assert [file.name for file in low if file.read_bytes()] == []


def test_a_signal_in_a_step_is_held_up_by_a_log_that_hangs_for_two_seconds_at_most(tmp_path: Path) -> None:
    before = "from truemfu.trackers.file import JsonArrayFile as F; F.flush = lambda self: time.sleep(600)"
    assert signals._FOR_WRITING_S + signals._TO_HANDLE_S < 2
    run = started(tmp_path, before=before, end=IN_A_STEP)
    assert ended(run, 0, within_s=20)[0] == -signal.SIGTERM  # with room for a busy machine


@pytest.mark.parametrize("work", ["x = x + 0", "pass"], ids=["operators", "no operator"])
def test_a_signal_in_an_observed_step_ends_the_process_and_rows_are_written(
    tmp_path: Path, work: str
) -> None:
    before = "\n".join(
        (
            "class Slow(nn.Linear):",
            "    calls = 0",
            "    def forward(self, x):",
            "        Slow.calls += 1",
            "        if Slow.calls > 1:",
            "            os.write(1, b'observed\\n')",
            "            while True:",
            f"                {work}; time.sleep(0.01)",
            "        return super().forward(x)",
            "model = Slow(8, 8)",
        )
    )
    code = textwrap.dedent(RUN).format(
        folder=str(tmp_path), before=before, train="train([1, 2])", end=FOREVER, settings={}
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "observed\n"
    assert ended(run, signal.SIGTERM)[0] == -signal.SIGTERM
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("start", ["fork", "a worker of a loader"])
def test_a_child_ends_by_itself_and_the_run_goes_on(tmp_path: Path, start: str) -> None:
    ends = {
        "fork": (
            "child = os.fork()",
            "if not child: time.sleep(60)",
            "time.sleep(0.3)",
            "os.kill(child, 15)",
            "sys.stdout.write(str(os.waitpid(child, 0)[1]))",
        ),
        "a worker of a loader": (
            "loader = iter(torch.utils.data.DataLoader(list(range(9)), num_workers=1, timeout=30))",
            "next(loader)",
            "worker = loader._workers[0]",
            "worker.terminate()",
            "worker.join(10)",
            "sys.stdout.write('15' if worker.exitcode in (0, -15) else 'it lives')",  # by torch's handler
        ),
    }
    after = (
        "sys.stdout.flush()",
        "time.sleep(0.5)",
        "train(range(61, 63))",
        "monitor.close()",
        "os._exit(0)",
    )
    run = started(tmp_path, end="\n".join((*ends[start], *after)))
    printed, errors = run.communicate(timeout=60)
    assert (run.returncode, printed) == (0, "15"), errors
    assert steps_in(tmp_path) == list(range(1, 63))


RANKS = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    from truemfu import TrainingMonitor
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    monitor = TrainingMonitor({folder!r}, model=model)
    for step in range(1, 100):
        if rank == 1 and step == 9:
            os._exit(1)
        model(torch.ones(2, 8)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        if rank == 0 and step == 8:
            time.sleep(60)
"""


def test_where_another_rank_dies_under_torchrun_the_rows_of_rank_0_are_on_disk(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(RANKS).format(folder=str(tmp_path / "out")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    job = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert job.returncode != 0
    assert steps_in(tmp_path / "out") == list(range(1, 9))


def train(monitor: TrainingMonitor, model: nn.Module, steps: range) -> None:
    for step in steps:
        model(torch.ones(2, 8)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """A handler of the user's, and the signals that it got."""
    got: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: got.append(number)) for n in (15, 1)}
    yield got
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_are_as_before_after_close(tmp_path: Path, noted: list[int]) -> None:
    before = [signal.getsignal(number) for number in (15, 1)]
    threads = threading.active_count()
    model = nn.Linear(8, 8)
    first, second = (TrainingMonitor(tmp_path / name, model=model) for name in "ab")
    for monitor in (first, second):
        train(monitor, model, range(1, 4))
    assert [signal.getsignal(number) for number in (15, 1)] != before
    signal.raise_signal(signal.SIGTERM)
    assert noted == [15]
    assert [steps_in(tmp_path / name) for name in "ab"] == [[1, 2, 3]] * 2
    first.close()
    signal.raise_signal(signal.SIGHUP)
    assert noted == [15, 1]
    second.close()
    assert [signal.getsignal(number) for number in (15, 1)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_the_wakeup_descriptor_of_an_event_loop_is_left_alone(tmp_path: Path, noted: list[int]) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        model = nn.Linear(8, 8)
        with TrainingMonitor(tmp_path, model=model) as monitor:
            train(monitor, model, range(1, 4))
            signal.raise_signal(signal.SIGTERM)
            # A child of this process may end meanwhile, which is a signal too where it has a handler.
            assert os.read(read, 8).count(b"\x0f") == 1
            assert steps_in(tmp_path) == [1, 2, 3]
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)


def test_a_tracker_that_hangs_holds_a_signal_up_by_no_more_than_two_seconds(
    tmp_path: Path, noted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, slept_s = threading.Event(), [0.0]

    def hang(*args: Any) -> None:
        is_over.wait(FOREVER_S)

    def sleep(seconds: float) -> None:
        slept_s[0] += seconds
        time.sleep(1e-4)

    model = nn.Linear(8, 8)
    with TrainingMonitor(tmp_path, model=model) as monitor:
        train(monitor, model, range(1, 4))
        with monkeypatch.context() as patched:
            patched.setattr("os.pwrite", hang)
            patched.setattr(signals, "time", SimpleNamespace(monotonic=lambda: slept_s[0], sleep=sleep))
            signal.raise_signal(signal.SIGTERM)
            assert 0 < slept_s[0] < 2.1
            is_over.set()
    assert noted == [15]
