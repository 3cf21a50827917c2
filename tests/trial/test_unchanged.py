"""The unchanged command under `truemfu try`, and one remedy beside it: the trials that take seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.trial.trials import script, trial_of, tried, written

from truemfu.records import write_record
from truemfu.remedies.facts import TrialOrder, TrialResult, result_file
from truemfu.trial.process import run_process


def test_a_remedy_is_measured_between_two_unchanged_runs(tmp_path: Path) -> None:
    options = ("--only", "no_checkpointing", "--rounds", "1")
    done = trial_of(
        tmp_path, *options, forward="time.sleep(0.02)", call="checkpoint(block, x, use_reentrant=False)"
    )
    assert done.code == 0, done.stderr
    assert [run["name"] for run in done.trial["runs"]] == ["unchanged", "no_checkpointing", "unchanged"]
    case = done.case("no_checkpointing")
    assert case["verdict"] == "gains"
    assert case["losses"]["are_identical"]


def test_a_process_ends_without_the_code_after_its_training(tmp_path: Path) -> None:
    before = "atexit.register(lambda: open('atexit.txt', 'w').close())"
    done = trial_of(tmp_path, "--only", "pin_memory", before=before, item="print('x' * 100_000)")
    assert done.code == 0, done.stderr
    assert not (tmp_path / "atexit.txt").exists()
    assert len(done.trial["runs"]) == 1
    assert done.trial["runs"][0]["seconds"] < 100
    assert "No remedy" in done.stdout or "Nothing was measured" in done.stdout


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import torch\nraise ValueError('broken script')", "ValueError: broken script"),
        ("print('nothing to see')", "no training step was seen"),
        (script(after="sys.exit() if step == 5 else None"), "too few steps: 2 of at least 20"),
    ],
)
def test_an_unchanged_command_that_fails_is_shown_and_the_exit_code_is_1(
    tmp_path: Path, text: str, cause: str
) -> None:
    done = tried(tmp_path, call=written(tmp_path, text))
    assert done.code == 1
    assert cause in done.stderr
    assert done.stdout == ""


def test_an_unchanged_command_that_hangs_is_ended_at_the_limit_of_a_process(tmp_path: Path) -> None:
    call = written(tmp_path, "import time\nprint('waiting', flush=True)\ntime.sleep(500)")
    done = tried(tmp_path, "--timeout", "8s", "--time", "5m", call=call)
    assert done.code == 1
    assert "no result within 8 s: ended: waiting" in done.stderr


def test_of_several_ranks_the_cause_is_that_of_the_first_to_fail(tmp_path: Path) -> None:
    """Others only lose their connection to it."""
    for rank, error in ((1, "ValueError: bad sample"), (0, "RuntimeError: connection closed by peer")):
        write_record(result_file(tmp_path, rank), TrialResult(rank=rank, world_size=2, error=error))
        at_s = 2000 - rank
        os.utime(result_file(tmp_path, rank), (at_s, at_s))
    code = "import sys; sys.exit(1)"
    order = TrialOrder(folder=str(tmp_path), steps=20, warm_up_steps=3)
    run, _ = run_process(
        [sys.executable, "-c", code], order, number=1, name="x", limit_s=60, waiting=lambda: None
    )
    assert run.failure == "rank 1: ValueError: bad sample"


def test_a_script_with_a_monitor_of_its_own_is_told_so(tmp_path: Path) -> None:
    own = "from truemfu import TrainingMonitor\nmonitor = TrainingMonitor('out', model=model)"
    done = trial_of(tmp_path, before=own)
    assert done.code == 1
    assert "the script has a monitor of its own" in done.stderr
