"""Real trials of small scripts: gains of planted faults, and what goes wrong in a process."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tests.trial.trials import RUN_SCRIPTS, command, environment, script, trial_of, tried, written


def test_a_slow_loader_gains_by_workers(tmp_path: Path) -> None:
    done = trial_of(tmp_path, "--only", "loader_workers,fused_optimizer", item="time.sleep(0.02)")
    assert done.code == 0, done.stderr
    case = done.case("loader_workers")
    assert case["verdict"] == "gains"
    assert case["gain"] > 0.25
    assert case["gain_s"] <= case["at_most_s"]
    assert case["losses"]["are_identical"]
    assert case["lines"] == ["DataLoader(…, num_workers=2, persistent_workers=True)"]
    assert "loader_workers" in done.trial["recommended"]
    assert "Recommended: " in done.stdout
    assert "num_workers=2" in done.stdout


def test_a_remedy_that_should_change_nothing_and_does_is_warned_about(tmp_path: Path) -> None:
    """Workers draw random numbers of their own."""
    item = "time.sleep(0.01); index += torch.rand(1).item()"
    done = trial_of(tmp_path, "--only", "loader_workers", "--rounds", "1", item=item)
    assert done.code == 0, done.stderr
    case = done.case("loader_workers")
    assert case["losses"]["unchanged_difference"] == 0
    assert "although it should change nothing" in case["warning"]
    assert f"loader_workers: {case['warning']}." in " ".join(done.stdout.split())


def test_needless_checkpointing_gains_without_it_and_stays_the_same_training(tmp_path: Path) -> None:
    done = trial_of(
        tmp_path,
        "--only",
        "no_checkpointing",
        forward="time.sleep(0.02)",
        call="checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)",
    )
    assert done.code == 0, done.stderr
    case = done.case("no_checkpointing")
    assert case["verdict"] == "gains"
    assert 0.35 < case["gain"] < 0.65
    assert case["losses"] == {
        "steps": 23,
        "are_identical": True,
        "largest_difference": 0,
        "unchanged_difference": 0,
    }
    assert done.trial["recommended"] == ["no_checkpointing"]
    assert done.trial["together_reason"] == "only one remedy gained"


def test_all_that_gained_is_measured_together(tmp_path: Path) -> None:
    done = trial_of(
        tmp_path,
        "--only",
        "no_checkpointing,loader_workers",
        item="time.sleep(0.02)",
        forward="time.sleep(0.03)",
        call="checkpoint(block, x, use_reentrant=False)",
    )
    assert done.code == 0, done.stderr
    trial = done.trial
    together = trial["together"]
    assert together["verdict"] == "gains"
    assert together["remedies"] == trial["recommended"] == ["loader_workers", "no_checkpointing"]
    assert together["lines"] == trial["lines"]
    assert together["gain"] > max(done.case(name)["gain"] for name in trial["recommended"])
    assert len(done.runs("together")) == 2


def test_the_unchanged_process_trains_as_without_a_trial(tmp_path: Path) -> None:
    save = (
        "if step == 20: torch.save({'w': model.state_dict(), 'x': loss.detach()}, "
        "os.environ.get('TRUEMFU_TRY_FOLDER', '.') + '/at_20.pt')"
    )
    stop = f"{save}\n        if step == 20 and TRY is None: sys.exit()"
    done = trial_of(tmp_path, "--only", "pin_memory", after=stop)
    assert done.code == 0, done.stderr
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment(), check=True)
    (tried_file,) = (tmp_path / "trial").glob("processes/01-unchanged/scratch/at_20.pt")
    alone, under_trial = torch.load(tmp_path / "at_20.pt"), torch.load(tried_file)
    assert all(torch.equal(value, under_trial["w"][name]) for name, value in alone["w"].items())
    assert torch.equal(alone["x"], under_trial["x"])
    assert done.runs("unchanged")[0]["losses"][19] == float(alone["x"])


FAULTS = {
    "raises": ("raise ValueError('no such thing')", "ValueError: no such thing"),
    "out_of_memory": ("raise torch.OutOfMemoryError('64 GiB')", "out of memory: OutOfMemoryError: 64 GiB"),
    "is_killed": ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
    "exits": ("os._exit(7)", "exit code 7"),
    "hangs": ("time.sleep(1000)", "no result within 30 s"),
    "ends_early": ("sys.exit() if step == 15 else None", "too few steps: 12 of at least 20"),
}


def test_a_remedy_that_goes_wrong_is_a_result_with_its_cause(tmp_path: Path) -> None:
    for name, (fault, cause) in FAULTS.items():
        folder = tmp_path / name
        folder.mkdir()
        only = "if TRY == 'fused_optimizer' and step > 10: " + fault
        options = ["--only", "fused_optimizer", "--rounds", "1"]
        options += ["--timeout", "30"] if name == "hangs" else []
        done = trial_of(folder, *options, after=only)
        assert done.code == 0, done.stderr
        case = done.case("fused_optimizer")
        assert case["verdict"] == "failed", name
        assert cause in case["reason"], name
        assert case["gain"] is None
        assert cause in done.stdout
        (failed,) = done.runs("fused_optimizer")
        assert failed["failure"] == case["reason"]
        if name == "raises":
            assert failed["output_tail"][-1] == "ValueError: no such thing"


def test_a_remedy_that_loses_the_loss_is_a_failure_however_fast_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time, torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "is_remedy = os.environ['TRUEMFU_TRY'] == 'fused_optimizer'\n"
        "for step in range(100):\n"
        "    loss = model(torch.ones(4, 8)).sum() * (float('nan') if is_remedy and step > 4 else 1)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    time.sleep(0.0 if is_remedy else 0.05)\n"
    )
    done = tried(tmp_path, "--only", "fused_optimizer", "--rounds", "1", call=[sys.executable, "train.py"])
    case = done.case("fused_optimizer")
    assert case["verdict"] == "failed"
    assert case["reason"].startswith("the loss is not finite in 18 steps; in an unchanged run in 0")
    assert done.trial["recommended"] == []


def test_more_of_short_steps_are_measured_unless_their_number_is_given(tmp_path: Path) -> None:
    written(
        tmp_path,
        "import time, torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "while True:\n"
        "    model(torch.ones(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    time.sleep(0.01)\n",
    )
    call = [sys.executable, "train.py"]
    trial = tried(tmp_path, "--only", "fused_optimizer", "--rounds", "1", call=call, steps=()).trial
    first, *others = [len(run["step_times_s"]) for run in trial["runs"]]
    assert first == 40
    assert set(others) == {trial["steps"]} == {max(40, math.ceil(2 / trial["evidence"]["step_time_s"]))}


def test_an_optimizer_that_a_remedy_does_not_fit_is_a_result(tmp_path: Path) -> None:
    other = "torch.optim.Adam([torch.zeros(2)], differentiable=True)"
    done = trial_of(tmp_path, "--only", "fused_optimizer", "--rounds", "1", before=other)
    assert done.code == 0, done.stderr
    assert done.case("fused_optimizer")["verdict"] == "failed"
    assert "fused" in done.case("fused_optimizer")["reason"]


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    call = written(tmp_path, script(after="time.sleep(1000) if TRY == 'foreach_optimizer' else None"))
    options = ("--json", "--only", "fused_optimizer,foreach_optimizer", "--rounds", "1")
    process = subprocess.Popen(
        command(tmp_path, *options, call=call),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        waiting = tmp_path / "trial" / "processes" / "03-foreach_optimizer"
        until = time.monotonic() + 200
        while not waiting.exists() and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    trial = json.loads(stdout)
    assert trial["ended"] == "interrupted"
    cases = {case["name"]: case for case in trial["cases"]}
    assert cases["fused_optimizer"]["gain"] is not None
    assert cases["foreach_optimizer"]["verdict"] == "not measured"
    assert not _processes_in(tmp_path)


def _processes_in(folder: Path) -> list[str]:
    """Processes that run there."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                found.append(entry)
        except OSError:
            continue
    return found


def test_too_little_time_is_said_and_what_was_measured_counts(tmp_path: Path) -> None:
    slow = "time.sleep(0.05 if TRY == 'unchanged' else 5)"  # no remedy can be measured in time
    done = trial_of(tmp_path, "--time", "45s", forward=slow)
    assert done.code == 0, done.stderr
    assert done.trial["ended"] == "out of time"
    assert "--time is too short" in done.stderr
    assert done.trial["seconds"] < 23 * 5  # what one run of a remedy would take
    assert "out of time" in done.stdout
    assert not [case for case in done.trial["cases"] if case["verdict"] == "failed"]


def test_ranks_of_a_job_end_together_and_files_of_the_user_are_left_alone(tmp_path: Path) -> None:
    text = (RUN_SCRIPTS / "ddp.py").read_text().replace("= 2, 4, 40", "= 300, 4, 40")
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = tried(tmp_path, "--only", "pin_memory", call=[*call, *written(tmp_path, text)[1:]])
    assert done.code == 0, done.stderr
    (run,) = done.trial["runs"]
    assert (run["world_size"], len(run["step_times_s"])) == (2, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "trial"]
    assert not _processes_in(tmp_path)
