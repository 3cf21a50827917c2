"""The unchanged command under `truemfu try`, and one remedy beside it: the trials that take seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trial.trials import script, trial_of, tried, written


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


def test_a_script_with_a_monitor_of_its_own_is_told_so(tmp_path: Path) -> None:
    own = "from truemfu import TrainingMonitor\nmonitor = TrainingMonitor('out', model=model)"
    done = trial_of(tmp_path, before=own)
    assert done.code == 1
    assert "the script has a monitor of its own" in done.stderr
