"""Goodput and job MFU of runs that were started several times, against the same sums by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truemfu.records import RunStart
from truemfu.report.run.job import COUNTED, REPEATED, Job, job_of, positions_of
from truemfu.report.run.job_view import job_json, job_lines, job_view
from truemfu.report.run.load import load_run
from truemfu.report.run.log_rows import LogRow, LogRows

PEAK_TFLOPS = 2.0
TIME_LIMIT_S = 200


def rows(steps: range, step_s: float = 0.5, **values: Any) -> LogRows:
    known = {"step_time_s": step_s, "tflops_per_gpu": 1.0, "mfu": 1.0 / PEAK_TFLOPS, **values}
    return LogRows([LogRow(global_step=step, **known) for step in steps])


def start(began: float, ended: float | None = None, **values: Any) -> RunStart:
    return RunStart(process_began_at_s=began, began_at_s=began + 1, ended_at_s=ended, **values)


def made(starts: list[RunStart], found: list[LogRows], written_at_s: float | None = None) -> Job:
    job = job_of(starts, found, written_at_s)
    assert job is not None
    return job


def test_a_run_of_one_start() -> None:
    job = made([start(100.0, 120.0)], [rows(range(1, 21), evaluation_s=0.1)])
    assert dict(job.parts) == pytest.approx(
        {
            COUNTED: 10.0,
            "start-up, up to the first batch": 1.0,
            "pauses: evaluation": 2.0,
            "rest: before the first step and after the last, steps not on disk": 7.0,
        }
    )
    assert job.held.goodput == pytest.approx(0.5)
    assert job.held.job_mfu == pytest.approx(0.25)
    assert (job.step_mfu, job.with_gaps) == (pytest.approx(0.5), None)


def test_steps_that_a_later_start_did_again_or_fell_behind_do_not_count() -> None:
    starts = [start(100.0, last_write_at_s=120.0), start(130.0, 140.0)]
    job = made(starts, [rows(range(1, 31)), rows(range(11, 21))])  # from a checkpoint after step 10
    assert [(one.steps, one.counted, one.ended) for one in job.starts] == [
        (30, 10, "killed"),
        (10, 10, "finished"),
    ]
    assert dict(job.parts)[REPEATED] == pytest.approx(10.0)
    assert job.held.seconds == pytest.approx(30.0)
    assert job.held.goodput == pytest.approx(10 / 30)
    assert job.with_gaps is not None
    assert job.with_gaps.goodput == pytest.approx(10 / 40)
    assert "if the 10.000 s between starts were held too" in job_lines(job)[0][1]


def test_the_time_between_starts_of_one_allocation_was_held() -> None:
    slurm = {"allocation": "Slurm job 7", "allocation_began_at_s": 90.0}
    job = made(
        [start(100.0, 110.0, **slurm), start(120.0, 130.0, **slurm)], [rows(range(1, 9)), rows(range(9, 17))]
    )
    assert job.with_gaps is None
    assert job.held.seconds == pytest.approx(40.0)  # from the begin of the allocation
    assert dict(job.parts)["from the allocation to the first process"] == pytest.approx(10.0)
    other = made([start(100.0, 110.0, **slurm), start(120.0, 130.0)], [rows(range(1, 9)), rows(range(9, 17))])
    assert other.with_gaps is not None


def test_starts_on_more_devices_weigh_more() -> None:
    starts = [start(100.0, 110.0, devices=2), start(110.0, 120.0, devices=6)]
    job = made(starts, [rows(range(1, 11)), rows(range(11, 13))])
    assert job.held.goodput == pytest.approx((2 * 5 + 6 * 1) / (2 * 10 + 6 * 10))
    assert job.held.job_mfu == pytest.approx(job.held.goodput * 0.5)


@pytest.mark.parametrize(
    ("values", "how"),
    [
        ({"ended_at_s": 120.0, "ended_by": "ValueError: x"}, "ValueError: x"),
        (
            {"ended_at_s": 120.0, "ended_by": "OutOfMemoryError: CUDA"},
            "out of memory: OutOfMemoryError: CUDA",
        ),
        ({"signal_at_s": 119.0}, "SIGTERM or SIGHUP"),
        ({"signal_at_s": 105.0}, "running, or killed"),  # it wrote for long after the signal
        ({"signal_at_s": 105.0, "ended_at_s": 120.0}, "finished, after SIGTERM or SIGHUP"),
    ],
)
def test_how_a_start_ended(values: dict[str, Any], how: str) -> None:
    begun = RunStart(process_began_at_s=100.0, began_at_s=101.0, **values)
    assert made([begun], [rows(range(1, 5))], written_at_s=120.0).starts[0].ended == how


def test_a_row_may_stand_for_several_steps() -> None:
    every = made([start(100.0, 140.0)], [rows(range(1, 62))])
    tenth = made([start(100.0, 140.0)], [rows(range(1, 62, 10))])
    assert tenth.starts[0].counted == every.starts[0].counted == 61
    assert tenth.held.goodput == pytest.approx(every.held.goodput)
    assert tenth.held.job_mfu == pytest.approx(every.held.job_mfu)


def test_a_killed_start_took_at_least_as_long_as_its_steps() -> None:
    job = made([start(100.0), start(200.0, 210.0)], [rows(range(1, 101)), rows(range(101, 111))])
    assert job.starts[0].seconds == pytest.approx(51.0)
    assert job.held.goodput is not None
    assert job.held.goodput < 1


def test_two_runs_of_one_process_do_not_hold_the_time_twice() -> None:
    starts = [
        RunStart(process_began_at_s=100.0, began_at_s=110.0, ended_at_s=120.0),
        RunStart(process_began_at_s=100.0, began_at_s=121.0, ended_at_s=130.0),
    ]
    job = made(starts, [rows(range(1, 9)), rows(range(9, 17))])
    assert (job.with_gaps or job.held).seconds == pytest.approx(30.0)


def test_a_job_that_was_queued_again_did_not_hold_its_devices_meanwhile() -> None:
    first = start(100.0, 110.0, allocation="Slurm job 7", allocation_began_at_s=95.0)
    again = start(5000.0, 5010.0, allocation="Slurm job 7", allocation_began_at_s=4990.0)
    job = made([first, again], [rows(range(1, 9)), rows(range(9, 17))])
    assert job.held.seconds == pytest.approx(15.0 + 20.0)
    assert job.with_gaps is not None
    assert dict(job.parts)["from the allocation to the first process"] == pytest.approx(5.0 + 10.0)


def test_each_start_has_the_mfu_of_its_own_devices() -> None:
    job = made(
        [start(100.0, 110.0), start(110.0, 120.0)],
        [rows(range(1, 9), tflops_per_gpu=1.0, mfu=0.5), rows(range(9, 17), tflops_per_gpu=4.0, mfu=0.3)],
    )
    assert job.step_mfu == pytest.approx(0.4)


def test_estimated_flops_are_marked() -> None:
    parts = [rows(range(1, 5), method="estimate"), rows(range(5, 9), method="count of observed steps")]
    job = made([start(100.0, 110.0), start(110.0, 120.0)], parts)
    assert job_lines(job)[1][1].endswith("; FLOPs estimated in 4 steps")
    assert job_json(job)["job"]["estimated_steps"] == 4


def test_unknown_figures_are_none_with_their_reason() -> None:
    job = made([start(100.0, 110.0)], [rows(range(1, 5), tflops_per_gpu=None, mfu=None)])
    assert (job.held.job_mfu, job.step_mfu) == (None, None)
    assert job_lines(job)[1] == ("job MFU", "unknown (the FLOPs of 4 of 4 steps are unknown)")
    assert job_json(job)["goodput"] == pytest.approx(0.2)
    no_peak = made([start(100.0, 110.0)], [rows(range(1, 5), mfu=None)])
    assert no_peak.unknown == "no peak is known"
    no_times = made([start(100.0, 110.0)], [rows(range(1, 5), step_time_s=None)])
    assert (no_times.held.goodput, no_times.held.job_mfu, no_times.step_mfu) == (None, None, None)
    assert job_lines(no_times)[0] == ("goodput", "unknown (the times of 4 of 4 steps are unknown)")
    begun = made([start(100.0)], [LogRows()])
    assert (begun.held.goodput, begun.held.job_mfu) == (None, None)
    assert job_lines(begun)[1] == ("job MFU", "unknown (no step is on disk)")
    assert job_of([], [], None) is None
    assert job_json(None) == {"goodput": None, "job_mfu": None, "job": None}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 25), st.integers(0, 12), st.floats(0.01, 3.0), st.floats(0.0, 20.0)),
        min_size=1,
        max_size=7,
    )
)
def test_any_sequence_of_restarts(job_starts: list[tuple[int, int, float, float]]) -> None:
    """By hand: a start from step n takes back all steps from n on."""
    starts, found, now = [], [], 1000.0
    useful: dict[int, float] = {}
    spent = 0.0
    for back, steps, step_s, idle_s in job_starts:
        first = max(1, max(useful, default=0) + 1 - back)
        if steps:
            useful = {step: seconds for step, seconds in useful.items() if step < first}
            useful |= dict.fromkeys(range(first, first + steps), step_s)
        ends = now + 1 + steps * step_s
        starts.append(start(now, ends))
        found.append(rows(range(first, first + steps), step_s))
        spent += steps * step_s
        now = ends + idle_s
    job = made(starts, found)
    parts = dict(job.parts)
    assert parts.get(COUNTED, 0.0) == pytest.approx(sum(useful.values()))
    assert parts.get(REPEATED, 0.0) == pytest.approx(spent - sum(useful.values()), abs=1e-6)
    assert sum(parts.values()) == pytest.approx((job.with_gaps or job.held).seconds)
    assert sum(one.counted for one in job.starts) == len(useful)
    shown = [bar for bar in job_view(job).bars if bar.kind != "peak"]
    assert sum(float(bar.points) for bar in shown) == pytest.approx(100, abs=0.1 * len(shown))


def test_a_start_without_rows_begins_where_the_next_one_does() -> None:
    starts = [start(1.0, log_begins_at=1), start(2.0), start(3.0, log_begins_at=50), start(4.0)]
    assert positions_of(starts)[:3] == [1, 50, 50]
    assert positions_of(starts)[3] > 1 << 40


SCRIPT = """
    import json, os, signal, sys, time
    import torch
    from torch import nn
    from truemfu import TrainingMonitor

    def stamp(what, **more):
        print(json.dumps({"what": what, "at": time.time(), **more}), file=own)

    folder, last, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    own = open(os.path.join(os.path.dirname(folder), "own.jsonl"), "a", buffering=1)
    stamp("began")
    checkpoint = os.path.join(os.path.dirname(folder), "checkpoint")
    first = int(open(checkpoint).read()) + 1 if os.path.exists(checkpoint) else 1
    model = nn.Linear(64, 64)
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 1e-6}}, model=model)
    batch = torch.ones(32, 64)
    for step in range(first, last + 1):
        stamp("before forward", step=step)
        loss = model(batch).sum()
        stamp("after forward", step=step)
        loss.backward()
        time.sleep(0.03)
        stamp("before log", step=step)
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        stamp("after log", step=step)
        if step % 10 == 0 and step < last:
            stamp("before pause", step=step)
            with monitor.pause("checkpoint"):
                stamp("pause begins", step=step)
                time.sleep(0.05)
                open(checkpoint, "w").write(str(step))
                stamp("pause ends", step=step)
            stamp("after pause", step=step)
    if how == "exception":
        raise ValueError("a bad batch")
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    if how in ("SIGKILL", "SIGTERM"):
        stamp(how)
        signal.pause()
    stamp("ends")
"""
ATTEMPTS = ((24, "SIGKILL"), (37, "SIGTERM"), (45, "exception"), (58, "memory"), (70, "finished"))
TICK_S = 0.02
"""How far the begin of a process is off, which the system keeps in ticks."""


def bounds_of_steps(stamps: list[dict[str, Any]]) -> tuple[float, float]:
    """The least and the longest time of the steps that counted: a step ends inside of `log_step`, and begins
    there or in its first forward pass; a pause is somewhere between the stamps around it."""
    spans: dict[int, tuple[float, float]] = {}
    begins: tuple[float, float] | None = None
    paused = (0.0, 0.0)
    at: dict[str, float] = {}
    for stamp in stamps:
        what, step = stamp["what"], stamp.get("step")
        at[what] = stamp["at"]
        if what == "began":
            begins = None
        elif what == "after forward" and begins is None:
            begins = at["before forward"], at["after forward"]
        elif what == "after log":
            assert begins is not None
            assert step is not None
            least = at["before log"] - begins[1] - paused[1]
            spans[step] = max(least, 0.0), at["after log"] - begins[0] - paused[0]
            begins, paused = (at["before log"], at["after log"]), (0.0, 0.0)
        elif what == "after pause":
            paused = at["pause ends"] - at["pause begins"], at["after pause"] - at["before pause"]
    return sum(least for least, _ in spans.values()), sum(longest for _, longest in spans.values())


@pytest.mark.long
def test_a_job_that_is_killed_and_restarted_has_the_figures_of_its_own_clock(tmp_path: Path) -> None:
    script, folder, own = tmp_path / "train.py", tmp_path / "run", tmp_path / "own.jsonl"
    script.write_text(textwrap.dedent(SCRIPT))
    began_s = time.time()
    for last, how in ATTEMPTS:
        process = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(last), how],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        if how.startswith("SIG"):
            wait_until(process, lambda: f'"{how}"' in (own.read_text() if own.exists() else ""))  # noqa: B023
            if how == "SIGKILL":  # which leaves no time to write them
                wait_until(process, lambda: on_disk(folder) == last)  # noqa: B023
            process.send_signal(getattr(signal, how))
        errors = process.communicate(timeout=TIME_LIMIT_S)[1].decode()
        assert (process.returncode == 0) == (how == "finished"), errors
    ended_s = time.time()
    job = load_run(folder).job
    assert job is not None
    assert [one.ended.split(":")[0] for one in job.starts] == [
        *("killed", "SIGTERM or SIGHUP", "ValueError", "out of memory", "finished")
    ]
    assert [(one.first_step, one.last_step) for one in job.starts] == [
        *((1, 24), (21, 37), (31, 45), (41, 58), (51, 70))
    ]
    stamps = [json.loads(line) for line in own.read_text().splitlines()]
    least_s, longest_s = bounds_of_steps(stamps)
    parts = dict(job.parts)
    assert least_s <= parts[COUNTED] <= longest_s
    pauses = {
        what: sum(stamp["at"] for stamp in stamps if stamp["what"] == what)
        for what in ("before pause", "pause begins", "pause ends", "after pause")
    }
    assert pauses["pause ends"] - pauses["pause begins"] <= parts["pauses: checkpoint"]
    assert parts["pauses: checkpoint"] <= pauses["after pause"] - pauses["before pause"]
    # Its first process began before the first stamp, and its last one ended after the last.
    shortest_s, whole_s = stamps[-1]["at"] - stamps[0]["at"], ended_s - began_s + TICK_S
    assert job.with_gaps is not None
    assert job.with_gaps.goodput is not None
    assert least_s / whole_s <= job.with_gaps.goodput <= longest_s / shortest_s
    flops = 70 * 2 * (2 * 32 * 64 * 64)  # forward, and the weight's gradient: the input needs none
    assert job.with_gaps.job_mfu is not None
    assert flops / 1e6 / whole_s <= job.with_gaps.job_mfu <= flops / 1e6 / shortest_s
    shown = subprocess.run(
        [sys.executable, "-m", "truemfu", "status", str(folder), "--json"], capture_output=True, text=True
    )
    assert json.loads(shown.stdout)["goodput"] == pytest.approx(job.held.goodput)


def on_disk(folder: Path) -> int:
    """The last step in the log."""
    log = folder / "training_log.json"
    return (
        int(json.loads(log.read_text())[-1]["global_step"]) if log.exists() and log.stat().st_size > 9 else 0
    )


def wait_until(process: subprocess.Popen[bytes], is_true: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + TIME_LIMIT_S
    while not is_true():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < ends_s
        time.sleep(0.02)
