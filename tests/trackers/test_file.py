"""The local log loads at every moment: after kills, torn writes, full disks and restarts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truemfu.trackers.file import JsonArrayFile
from truemfu.trackers.lane import Lane


def opened(path: Path, notices: list[str] | None = None) -> JsonArrayFile:
    log = JsonArrayFile(path, notice=pytest.fail if notices is None else notices.append)
    log.start({})
    return log


def write(path: Path, *steps: int) -> None:
    log = opened(path)
    for step in steps:
        log.log(step, {"training/loss": 0.5})
    log.finish({})


def strict(path: Path) -> Any:
    """The file as a strict reader sees it: NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def steps(path: Path) -> list[int]:
    return [row["global_step"] for row in strict(path)]


def test_the_file_loads_from_the_start_and_after_every_flush(tmp_path: Path) -> None:
    path = tmp_path / "new" / "training_log.json"
    log = opened(path)
    assert strict(path) == []
    for step in range(1, 6):
        log.log(step, {"training/loss": step / 2, "perf/mfu": None, "perf/warmup": step == 1, "note": "ü"})
        assert len(strict(path)) == step - 1
        log.flush()
        assert strict(path)[-1] == {
            "global_step": step,
            "training/loss": step / 2,
            "perf/warmup": step == 1,
            "note": "ü",
        }
    log.finish({})
    assert steps(path) == [1, 2, 3, 4, 5]


def test_one_flush_is_one_write_however_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path / "log.json")
    calls: list[int] = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: calls.append(len(args[1])) or pwrite(*args))
    for step in range(200):
        log.log(step, {"training/loss": 1.0})
    log.flush()
    log.flush()
    assert len(calls) == 1
    assert steps(tmp_path / "log.json") == list(range(200))


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    log = opened(path)
    log.log(1, {"training/loss": nan, "training/grad_norm": inf, "low": -inf, "training/lr": 0.5})
    log.finish({})
    assert strict(path) == [
        {
            "global_step": 1,
            "training/loss": None,
            "training/grad_norm": None,
            "low": None,
            "training/lr": 0.5,
            "non_finite": {"training/loss": "nan", "training/grad_norm": "inf", "low": "-inf"},
        }
    ]


def test_odd_values_cost_no_row(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    log = opened(path)
    log.log(
        1, {"flops": 10**25, "half": np.float32(0.5), "bad": np.float32("nan"), "text": "\ud800", "o": [1]}
    )
    log.finish({})
    (row,) = strict(path)
    assert row == {
        "global_step": 1, "flops": 10**25, "half": 0.5, "bad": "nan", "text": "\ud800", "o": [1],
    }  # fmt: skip


def test_a_restart_continues_and_the_last_row_of_a_step_is_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    write(path, 1, 2, 3)
    write(path)
    write(path, 3, 4)
    assert steps(path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("text", ["", "\n", "[]", "[\n]\n", "[ ]", "["])
def test_an_empty_log_is_continued(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)
    write(path, 1, 2)
    assert steps(path) == [1, 2]


def test_an_array_in_another_layout_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps([{"global_step": 1}, {"global_step": 2, "s": "]\n"}], indent=4) + " " * 5000)
    write(path, 3)
    assert steps(path) == [1, 2, 3]


def test_a_log_cut_at_any_byte_keeps_every_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    write(path, 1)
    write(path, *range(2, 6))
    whole = path.read_bytes()
    ends = [at for at in range(len(whole)) if whole[at : at + 1] == b"}"]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        write(path, 99)
        kept = sum(end < cut for end in ends)
        assert steps(path) == [*range(1, kept + 1), 99], f"cut at {cut}"
    assert os.listdir(tmp_path) == ["log.json"]


def test_a_tail_of_zeros_as_a_crashed_machine_leaves_it_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-3] + b',\n{"global_st' + b"\0" * 4096)
    write(path, 3)
    assert steps(path) == [1, 2, 3]


@pytest.mark.parametrize(
    "foreign",
    ['{"a": 1}', "[1, 2]", "step,loss\n1,2\n", '[\n{"a": 1},\n{"b" 2},\n{"c": 3}\n]\n', "[{}, NaN]"],
)
def test_a_file_that_is_no_log_is_kept_aside_and_said(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "log.json"
    for number, name in enumerate(["log.json.damaged", "log.json.damaged2"], start=1):
        path.write_text(foreign)
        notices: list[str] = []
        log = opened(path, notices)
        log.log(number, {})
        log.finish({})
        assert steps(path) == [number]
        assert (tmp_path / name).read_text() == foreign
        assert notices == [f"log.json is not a log that can be continued; it was renamed to {name}"]


WRITER = """
import sys
from truemfu.trackers.file import JsonArrayFile
log = JsonArrayFile(sys.argv[1], notice=print)
log.start({})
step = int(sys.argv[2])
while True:
    for _ in range(200):
        log.log(step, {"training/loss": step / 7, "note": "x" * 2000})
        step += 1
    log.flush()
    print(step - 1, flush=True)
"""


def test_killed_at_random_moments_it_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    path, chance = tmp_path / "log.json", random.Random(5)
    first = 1
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        flushed = [int(line) for line in child.stdout.read().splitlines() if line.isdigit()]
        child.wait()
        write(path)
        found = steps(path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= max(flushed, default=first + 199)
        first = len(found) + 1
    assert os.listdir(tmp_path) == ["log.json"]


FULL = """
import resource, sys
from truemfu.trackers.file import JsonArrayFile
from truemfu.trackers.lane import Lane
lane = Lane(JsonArrayFile(sys.argv[1]), "file", notice=print)
lane.start({})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
for step in range(1000):
    lane.put(step, {"training/loss": 0.25})
    if step % 50 == 49:
        lane.flush()
        lane.wait_until_idle(10)
lane.close({}, timeout_s=10)
print(lane.lost_rows)
"""


def test_a_full_disk_leaves_a_log_that_loads_and_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True, timeout=600
    )
    notice, lost = done.stdout.splitlines()
    assert notice.startswith("tracker file failed: OSError: [Errno 27] File too large")
    found = steps(path)
    assert found == list(range(len(found)))
    assert 0 < len(found) < 1000
    assert int(lost) == 1000 - len(found)
    assert path.stat().st_size <= 10_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_rows_that_meet_a_full_disk_are_written_when_it_has_room_again(small_disk: Path) -> None:
    path, said = small_disk / "log.json", []
    lane = Lane(JsonArrayFile(path), "file", notice=said.append)
    lane.start({})
    neighbour = small_disk / "neighbour"
    for step in range(1, 401):
        if step == 100:
            with contextlib.suppress(OSError):
                neighbour.write_bytes(bytes(1 << 20))
        if step == 300:
            neighbour.unlink()
        lane.put(step, {"training/loss": 0.25, "text": "x" * 50})
        if step % 50 == 0:
            lane.flush()
            assert lane.wait_until_idle(10)
    lane.close({}, timeout_s=10)
    assert steps(path) == list(range(1, 401))
    assert lane.lost_rows == 0
    assert len(said) == 1
    assert "cannot write now; its rows are kept for later: OSError: [Errno 28]" in said[0]


def test_rows_that_no_disk_ever_takes_are_counted(small_disk: Path) -> None:
    path, said = small_disk / "log.json", []
    lane = Lane(JsonArrayFile(path), "file", notice=said.append)
    lane.start({})
    for step in range(1, 201):
        if step == 101:
            lane.flush()
            assert lane.wait_until_idle(10)
            with contextlib.suppress(OSError):
                (small_disk / "neighbour").write_bytes(bytes(1 << 20))
        lane.put(step, {"training/loss": 0.25, "text": "x" * 500})
        if step > 101 and step % 20 == 0:
            lane.flush()
            assert lane.wait_until_idle(10)
    lane.close({}, timeout_s=10)
    found = steps(path)
    assert found == list(range(1, len(found) + 1))
    assert 100 <= len(found) < 200
    assert lane.lost_rows == 200 - len(found)


READ_ONLY = """
import os, sys
from truemfu.trackers.file import JsonArrayFile
from truemfu.trackers.lane import Lane
if os.getuid() == 0:
    os.setuid(65534)
lane = Lane(JsonArrayFile(sys.argv[1]), "file", notice=print)
lane.start({})
lane.put(1, {})
lane.close({}, timeout_s=10)
print(lane.lost_rows)
"""


def test_a_read_only_folder_is_said_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(tmp_path / "log.json")],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    notice, lost = done.stdout.splitlines()
    assert notice.startswith("tracker file failed: PermissionError: [Errno 13] Permission denied")
    assert lost == "1"


def test_two_processes_do_not_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    log = opened(path)
    log.log(1, {})
    log.flush()
    code = f"from truemfu.trackers.file import JsonArrayFile\nJsonArrayFile({str(path)!r}).start({{}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "another process is writing this log" in done.stderr
    log.log(2, {})
    log.finish({})
    assert steps(path) == [1, 2]


def test_a_forked_worker_that_outlives_the_run_does_not_hold_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    code = (
        "import os, sys, time\nfrom truemfu.trackers.file import JsonArrayFile\n"
        f"log = JsonArrayFile({str(path)!r}); log.start({{}}); log.log(1, {{}}); log.flush()\n"
        "child = os.fork()\n"
        "if child == 0: os.close(1); os.close(2); time.sleep(600); os._exit(0)\n"
        "print(child, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    try:
        write(path, 2)
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_a_device_is_no_log(path: str) -> None:
    with pytest.raises(OSError, match="the log must be a regular file"):
        JsonArrayFile(path).start({})


def test_a_lane_in_a_forked_worker_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    lane = Lane(JsonArrayFile(path), "file", notice=pytest.fail)
    lane.start({})
    lane.put(1, {})
    if (child := os.fork()) == 0:
        lane.put(2, {})
        lane.flush()
        lane.close({}, timeout_s=5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lane.close({}, timeout_s=10)
    assert steps(path) == [1]


def test_a_row_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path) -> None:
    class Odd:
        def __float__(self) -> float:
            raise RuntimeError("odd")

    log = JsonArrayFile(tmp_path / "log.json")
    log.start({})
    for step, value in enumerate([1.0, Odd(), 3.0]):
        log.log(step, {"a": value})
    with pytest.raises(RuntimeError, match="odd"):
        log.flush()
    log.finish({})
    assert [row["a"] for row in json.loads((tmp_path / "log.json").read_text())] == [1.0, 3.0]
