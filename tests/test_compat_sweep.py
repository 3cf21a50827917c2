"""The original command lines work as they stand, from any folder, and leave the repository clean."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from truemfu.sweep.config import SweepConfig, load_config

ROOT = Path(__file__).parent.parent
DOORS = ROOT / "compat" / "torch_profile"


def call(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The folder of the doors, elsewhere, so that what they write does not stay."""
    return shutil.copytree(DOORS, tmp_path / "torch_profile")


def test_the_configuration_holds_the_default_matrix() -> None:
    assert load_config(DOORS / "profiling_config.json") == SweepConfig()


def test_run_profiling_takes_the_arrays_at_its_top(copy: Path) -> None:
    script = copy / "run_profiling.sh"
    edited = {
        "BATCH_SIZES=(4 8)": "BATCH_SIZES=(2 3 5)",
        "SEQ_LENGTHS=(512 1024)": "SEQ_LENGTHS=(16)",
        "MODEL_SIZE=1b": "MODEL_SIZE=tiny",
        "DPSGDTrainer DPGhostClippingTrainer DPFastGradientClippingTrainer)": "DPSGDTrainer)",
    }
    text = script.read_text()
    for before, after in edited.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    script.write_text(text)
    done = call(copy, "./run_profiling.sh", "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    cases = json.loads(done.stdout)
    assert set(cases) == {
        f"{trainer}_bs{batch}_seq16" for trainer in ("StandardTrainer", "DPSGDTrainer") for batch in (2, 3, 5)
    }
    assert {case["model"] for case in cases.values()} == {"tiny"}


def test_the_matrix_of_run_profiling_is_the_default_one(copy: Path) -> None:
    done = call(copy, "./run_profiling.sh", "--dry-run", "--json")
    plain = call(copy.parent, sys.executable, "-m", "truemfu", "sweep", "--dry-run", "--json")
    assert json.loads(done.stdout) == json.loads(plain.stdout)


def test_the_single_command_line_runs_that_one_experiment(copy: Path) -> None:
    flags = "--mode=single --trainer=StandardTrainer --batch-size=4 --seq-len=512 --model-size=1b"
    done = call(copy, sys.executable, "profiling_script.py", *flags.split(), "--dry-run", "--json")
    ((name, case),) = json.loads(done.stdout).items()
    assert (name, case["model"]) == ("StandardTrainer_bs4_seq512", "1b")


def test_the_scripts_write_where_they_are_called_and_the_summary_reads_it(copy: Path) -> None:
    script = [sys.executable, "profiling_script.py", "--mode=single", "--trainer=StandardTrainer"]
    swept = call(copy, *script, "--batch-size=2", "--seq-len=16", "--model-size=tiny")
    assert swept.returncode == 0, swept.stderr
    name = "StandardTrainer_bs2_seq16"
    assert (copy / "logs" / f"{name}.log").is_file()
    assert (copy / "results" / f"{name}.json").is_file()
    assert (copy / "runs" / name).is_dir()
    done = call(copy, sys.executable, "summarize_results.py", "--logs-dir=logs", "--output=results.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 of 1 experiments succeeded" in done.stdout
    assert json.loads((copy / "results.json").read_text())["totals"]["succeeded"] == 1


def test_the_test_run_leaves_the_folder_free_for_the_matrix(copy: Path) -> None:
    done = call(copy, "./test_run.sh", "--trainers=StandardTrainer")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 experiments succeeded" in done.stdout
    assert (copy / "test_run" / "logs" / "StandardTrainer_bs2_seq32.log").is_file()
    assert not (copy / "sweep.json").exists()


def test_a_wrong_flag_is_exit_code_2_through_the_door(copy: Path) -> None:
    done = call(copy, "./test_run.sh", "--trainer=StandartTrainer")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "did you mean 'StandardTrainer'?" in done.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_what_the_doors_write_is_ignored_by_git() -> None:
    written = ["logs/x.log", "runs/x/y", "results/x.json", "running/lock", "test_run/x", "sweep.json"]
    written += ["results.json", "report.html"]
    paths = [str((DOORS / name).relative_to(ROOT)) for name in written]
    done = subprocess.run(
        ["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == paths
