"""Sweeps on a real Slurm of one node with fake GPUs (tools/one_node_slurm.sh); skipped without one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import (
    ENDS,
    WORKER,
    check_ends,
    check_gpus_were_not_shared,
    check_nothing_is_left,
    check_ran_once,
    check_two_at_once_have_different_gpus,
    is_collected,
    name_of,
    ran,
    results,
    submitter,
    sweep_of,
)
from supervised import HERE, Recorder, small, until

from truemfu.errors import UsageError
from truemfu.records import CaseResult, Status, read_record
from truemfu.sweep.launchers.jobs import JobsFolder
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.supervisor.cluster_batches import cancel_all
from truemfu.sweep.supervisor.runner import run_sweep


def slurm_is_up() -> bool:
    if shutil.which("sinfo") is None:
        return False
    answer = subprocess.run(["sinfo", "-h", "-o", "%G %T"], capture_output=True, text=True)
    return answer.returncode == 0 and "gpu:2" in answer.stdout and "down" not in answer.stdout


needs_slurm = pytest.mark.skipif(
    not slurm_is_up(), reason="no Slurm with two fake GPUs: `tools/one_node_slurm.sh up` as root starts one"
)
ONE_GPU = {"gpus": 1, "cpus": 1, "memory_gib": 2.0}


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    return tmp_path


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def job_of(root: Path) -> str:
    """The number of the array that was submitted last."""
    (path,) = SweepFolder(root).all_jobs()
    engine_job = JobsFolder(path).read_batch().engine_job
    assert engine_job is not None
    return engine_job


def has_jobs(root: Path) -> bool:
    return bool(SweepFolder(root).all_jobs())


@needs_slurm
def test_every_end_is_the_same_as_on_one_machine(tmp_path: Path) -> None:
    what = list(ENDS)
    root = tmp_path / "out"
    found, heard = results(root, sweep_of(what, launcher="slurm", cluster=ONE_GPU))
    check_ends(found, what)
    check_ran_once(tmp_path, what)
    check_gpus_were_not_shared(tmp_path)
    check_nothing_is_left(root, tmp_path)
    assert any("submitted to Slurm: job" in line for line in heard.lines)
    for result in found.values():
        assert read_record(SweepFolder(root).result(result.name), CaseResult) == result

    _, heard = results(root, sweep_of(what, launcher="slurm", cluster=ONE_GPU))
    assert len(heard.reused) == len(what)
    check_ran_once(tmp_path, what)


@needs_slurm
def test_two_at_once_have_different_gpus(tmp_path: Path) -> None:
    settings = {"launcher": "slurm", "cluster": ONE_GPU}
    check_two_at_once_have_different_gpus(tmp_path / "out", tmp_path, settings)


def test_every_end_on_one_machine(tmp_path: Path) -> None:
    what = list(ENDS)
    found, _ = results(tmp_path / "out", sweep_of(what, launcher="local", cluster={}))
    check_ends(found, what)
    check_ran_once(tmp_path, what)
    check_nothing_is_left(tmp_path / "out", tmp_path)


@needs_slurm
def test_a_killed_submitter_is_called_again(tmp_path: Path) -> None:
    what, root = ["Nothing", "Waits", "Daemonises"], tmp_path / "out"
    first = submitter(root, what=what, launcher="slurm", cluster={**ONE_GPU, "max_jobs": 1})
    until(lambda: any(line["name"] == name_of("Waits") for line in ran(tmp_path)))
    until(lambda: is_collected(root, 0))
    job = job_of(root)
    first.kill()
    first.wait()
    assert slurm("squeue", "-h", "-r", "-j", job).count("\n") == 2

    (tmp_path / "go").touch()
    found, heard = results(root, sweep_of(what, launcher="slurm", cluster=ONE_GPU))
    assert [result.end for result in found.values()] == [Status.OK] * 3
    assert heard.reused == [name_of("Nothing")]
    assert f"already submitted to Slurm: job {job}" in heard.lines[0]
    check_ran_once(tmp_path, what)
    check_nothing_is_left(root, tmp_path)


@needs_slurm
def test_a_submitter_killed_before_it_knew_its_job_finds_it(tmp_path: Path) -> None:
    root = tmp_path / "out"
    first = submitter(root, what=["Waits"], launcher="slurm", cluster=ONE_GPU)
    until(lambda: bool(ran(tmp_path)))
    first.kill()
    first.wait()
    job = job_of(root)
    (path,) = SweepFolder(root).all_jobs()
    batch = (path / "batch.json").read_text()
    (path / "batch.json").write_text(batch.replace(f'"engine_job":"{job}"', '"engine_job":null'))
    (tmp_path / "go").touch()
    found, heard = results(root, sweep_of(["Waits"], launcher="slurm", cluster=ONE_GPU))
    assert found["Waits"].end is Status.OK
    assert f"job {job}" in heard.lines[0]
    check_ran_once(tmp_path, ["Waits"])
    check_nothing_is_left(root, tmp_path)


@needs_slurm
def test_a_job_that_slurm_starts_again_does_not_run_twice(tmp_path: Path) -> None:
    root = tmp_path / "out"
    first = submitter(root, what=["Waits"], launcher="slurm", cluster=ONE_GPU)
    until(lambda: bool(ran(tmp_path)))
    job = job_of(root)
    slurm("scontrol", "update", f"jobid={job}_0", "requeue=1")
    slurm("scontrol", "requeue", f"{job}_0")
    assert first.wait() == 0
    lost = read_record(SweepFolder(root).result(name_of("Waits")), CaseResult)
    assert lost.end is Status.LOST
    check_ran_once(tmp_path, ["Waits"])
    check_nothing_is_left(root, tmp_path)


@needs_slurm
def test_scancel_from_outside_is_lost_and_runs_again_when_called_again(tmp_path: Path) -> None:
    what, root = ["Waits", "Nothing"], tmp_path / "out"
    first = submitter(root, what=what, launcher="slurm", cluster={**ONE_GPU, "max_jobs": 1})
    until(lambda: bool(ran(tmp_path)))
    slurm("scancel", job_of(root))
    assert first.wait() == 0
    folder = SweepFolder(root)
    running, waiting = (read_record(folder.result(name_of(name)), CaseResult) for name in what)
    assert (running.end, waiting.end) == (Status.LOST, Status.LOST)
    assert "Slurm: CANCELLED" in (running.message or "")
    assert "its job ended before it started; Slurm: CANCELLED" in (waiting.message or "")
    check_nothing_is_left(root, tmp_path)

    (tmp_path / "go").touch()
    found, _ = results(root, sweep_of(what, launcher="slurm", cluster=ONE_GPU))
    assert [result.end for result in found.values()] == [Status.OK, Status.OK]
    assert [line["name"] for line in ran(tmp_path) if line["event"] == "began"].count(name_of("Nothing")) == 1


@needs_slurm
def test_a_preempted_job_is_lost_with_that_reason(tmp_path: Path) -> None:
    root = tmp_path / "out"
    # All CPUs, so that the urgent job needs this one's.
    cluster = {"cpus": os.cpu_count(), "gpus": 0, "memory_gib": 1.0}
    first = submitter(root, what=["Waits"], launcher="slurm", cluster=cluster)
    until(lambda: bool(ran(tmp_path)))
    urgent = slurm("sbatch", "--parsable", "-p", "urgent", "--mem=100M", "-o", "/dev/null", "--wrap", "true")
    assert first.wait() == 0
    lost = read_record(SweepFolder(root).result(name_of("Waits")), CaseResult)
    slurm("scancel", urgent.strip())
    assert lost.end is Status.LOST
    assert "Slurm: PREEMPTED" in (lost.message or "")
    check_nothing_is_left(root, tmp_path)


@needs_slurm
def test_more_memory_than_requested_is_out_of_host_memory(tmp_path: Path) -> None:
    cluster = {**ONE_GPU, "memory_gib": 0.5}
    config = sweep_of(["EatsMemory", "Nothing"], launcher="slurm", cluster=cluster, memory_limit_gib=None)
    found, _ = results(tmp_path / "out", config)
    assert found["EatsMemory"].end is Status.HOST_OOM
    assert found["Nothing"].end is Status.OK


@needs_slurm
def test_a_node_agent_that_slurm_ends_at_its_time_limit_is_a_timeout(tmp_path: Path) -> None:
    root = tmp_path / "out"
    first = submitter(root, what=["Waits"], launcher="slurm", cluster=ONE_GPU, timeout_s=1000.0)
    until(lambda: bool(ran(tmp_path)))
    # Refused within the second in which the job started.
    end_it = ["scontrol", "update", f"jobid={job_of(root)}_0", "EndTime=now"]
    until(lambda: subprocess.run(end_it, stderr=subprocess.DEVNULL).returncode == 0)
    assert first.wait() == 0
    result = read_record(SweepFolder(root).result(name_of("Waits")), CaseResult)
    assert result.end is Status.TIMEOUT
    assert "Slurm: TIMEOUT" in (result.message or "")


@needs_slurm
def test_after_an_out_of_memory_larger_batches_are_withdrawn(tmp_path: Path) -> None:
    config = sweep_of(
        ["OutOfGpuMemory"],
        launcher="slurm",
        cluster={**ONE_GPU, "max_jobs": 1},
        batch_sizes=[2, 4, 8],
        prune=True,
    )
    outcome = run_sweep(config, tmp_path / "out", listener=Recorder(), command=WORKER)
    ends = [result.end for result in outcome.results]
    assert ends[0] is Status.CUDA_OOM
    assert ends[-1] is Status.PRUNED
    check_nothing_is_left(tmp_path / "out", tmp_path)


def cli(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "truemfu", "sweep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]


@needs_slurm
def test_ctrl_c_without_a_terminal_leaves_the_jobs_and_cancel_ends_them(tmp_path: Path) -> None:
    root = tmp_path / "out"
    arguments = ["--launcher", "slurm", "--job-gpus", "1", "--device", "cpu", "--mode", "single"]
    arguments += ["--model-size", "tiny", "--trainer", "failing_trainers:Hangs", "--output", str(root)]
    first = subprocess.Popen(
        [sys.executable, "-m", "truemfu", "sweep", *arguments], stderr=subprocess.PIPE, text=True
    )
    until((tmp_path / "hangs").exists)
    first.send_signal(signal.SIGINT)
    said = first.communicate()[1]
    assert first.returncode == 130
    assert f"to wait for them: truemfu sweep --output {root}" in said
    assert f"cancel them: truemfu sweep --output {root} --cancel" in said
    job = job_of(root)
    assert slurm("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"

    other = cli("--launcher", "local", "--output", str(root), "--device", "cpu")
    assert (other.returncode, other.stderr.count("\n")) == (2, 1)
    assert "are still on slurm: wait for them" in other.stderr

    done = cli("--output", str(root), "--cancel")
    assert (done.returncode, done.stderr) == (0, "cancelled: 1 experiment\n")
    assert slurm("squeue", "-h", "-j", job, "-o", "%T").strip() in ("", "COMPLETING")
    assert not has_jobs(root)
    check_nothing_is_left(root, tmp_path)
    assert cancel_all(root) == 0


@needs_slurm
@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"partition": "nowhere"}, "invalid partition specified: nowhere"),
        ({"gpus": 3}, "Requested node configuration is not available"),
        ({"sbatch_options": ["--no-such-option"]}, "no-such-option"),
    ],
)
def test_what_slurm_refuses_is_one_line_and_submits_nothing(
    tmp_path: Path, cluster: dict[str, object], words: str
) -> None:
    # Other tests submit jobs meanwhile; those of this one would carry its comment.
    options = [f"--comment={tmp_path}", *cluster.pop("sbatch_options", [])]
    settings = {"gpus": 0, **cluster, "sbatch_options": options}
    with pytest.raises(UsageError, match="Slurm rejects a test job with these options") as refused:
        results(tmp_path / "out", sweep_of(["Nothing"], launcher="slurm", cluster=settings))
    assert words in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert str(tmp_path) not in slurm("squeue", "-h", "--states=all", "-o", "%k")


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no Slurm on this machine \(no sbatch\)"):
        results(tmp_path / "out", sweep_of(["Nothing"], launcher="slurm", cluster={}))
    assert not (tmp_path / "out").exists()


@needs_slurm
def test_two_ranks_of_one_experiment_are_one_job(tmp_path: Path) -> None:
    """With real workers: torchrun inside the job, beside the same experiment on one process."""
    config = small(
        trainers=["StandardTrainer"],
        gpus_per_experiment=[1, 2],
        parallel="ddp",
        launcher="slurm",
        cluster={"cpus": 2, "memory_gib": 4.0, "stale_view_s": 1.0},
    )
    heard = Recorder()
    outcome = run_sweep(config, tmp_path / "out", listener=heard)
    one, two = outcome.results
    assert [result.end for result in (one, two)] == [Status.OK, Status.OK]
    assert one.measured is not None
    assert two.measured is not None
    assert one.measured.flops is not None
    assert two.measured.flops is not None
    assert two.measured.flops.model_flops == 2 * one.measured.flops.model_flops
    assert len(two.measured.ranks) == 2
    assert sum("submitted to Slurm" in line for line in heard.lines) == 2
