"""Requests of a cluster, and the files that decide who runs an experiment; without an engine."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clusters import WORKER
from supervised import HERE, small
from tests.command_line import caller

from truemfu.errors import UsageError
from truemfu.records import CaseResult, Phase, Status, SweepRecord, read_record, write_record
from truemfu.sweep.cases import cases_of
from truemfu.sweep.config import override
from truemfu.sweep.launchers.jobs import Batch, Claim, JobsFolder, JobState
from truemfu.sweep.launchers.ray_engine import shortage_of
from truemfu.sweep.launchers.settings import TIME_MARGIN_S, ClusterSettings, Request, request_of
from truemfu.sweep.launchers.slurm import Slurm, _parse
from truemfu.sweep.order import WorkerOrder
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.supervisor.on_node import main as on_node
from truemfu.sweep.supervisor.stored import save

WRONG = {
    "an unknown key": ({"gpu": 1}, r"unknown key 'cluster.gpu' \(did you mean 'gpus'\?\)"),
    "a negative number": ({"gpus": -1}, "cluster.gpus must be a whole number >= 0.*; got -1"),
    "no memory": ({"memory_gib": 0}, "cluster.memory_gib must be a number > 0.*; got 0"),
    "endless memory": ({"memory_gib": float("inf")}, "cluster.memory_gib must be a finite number"),
    "no partition": ({"partition": " "}, "cluster.partition must be a name"),
    "no option": ({"sbatch_options": ["h200"]}, "sbatch_options must be options such as"),
    "an option of ours": (
        {"sbatch_options": ["--time=5"]},
        "must not contain --time, which",
    ),
    "a short option of ours": (
        {"sbatch_options": ["-Jmine"]},
        "must not contain -J, which",
    ),
    "text": ("main", "cluster must be an object; got 'main'"),
}


@pytest.mark.parametrize(("cluster", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_named(cluster: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        override(small(), cluster=cluster)


def test_an_unknown_launcher_is_named() -> None:
    with pytest.raises(UsageError, match=r"launcher must be one of local, slurm, ray; got 'slrum' \(did you"):
        override(small(), launcher="slrum")


def test_an_experiment_requests_its_gpus_and_more_time_than_its_limit() -> None:
    settings = ClusterSettings(cpus=4, memory_gib=1.5)
    request = request_of(settings, "cuda", 600.0)
    assert (request.gpus, request.cpus, request.memory_bytes) == (1, 4, 3 << 29)
    assert request.time_s == 600.0 + TIME_MARGIN_S
    assert request_of(settings, "cuda", 600.0, gpus=4).gpus == 4
    assert request_of(settings, "cpu", 600.0).gpus == 0
    assert request_of(ClusterSettings(gpus=2), "cpu", 600.0).gpus == 2


def test_what_slurm_says() -> None:
    said = _parse(
        "7_0|RUNNING|None\n7_1|CANCELLED by 0|None\n7_2|OUT_OF_MEMORY|OutOfMemory\n7_3|PENDING|BeginTime\n"
    )
    assert [state.over for state in said.values()] == [False, True, True, False]
    assert [state.waits for state in said.values()] == [False, False, False, True]
    assert said["7_1"].reason == "CANCELLED by 0"
    assert (said["7_2"].reason, said["7_2"].status) == ("OUT_OF_MEMORY (OutOfMemory)", Status.HOST_OOM)


@pytest.mark.parametrize(
    ("squeue", "sacct", "over"),
    [
        ("echo '7_0|RUNNING|None'", "exit 1", {0: False, 1: True}),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "exit 1", {0: True, 1: True}),
        ("exit 0", "echo '7_1|COMPLETED|None'", {0: True, 1: True}),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "exit 1", {}),
        ("exit 1", "echo '7_1|TIMEOUT|None'", {1: True}),
    ],
)
def test_a_job_is_over_if_slurm_answers_and_does_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, sacct: str, over: dict[int, bool]
) -> None:
    for name, script in (("squeue", squeue), ("sacct", sacct)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    batch = msgspec.structs.replace(batch_of(tmp_path, ClusterSettings()), engine_job="7")
    states = Slurm(ClusterSettings()).job_states(batch, JobsFolder(tmp_path), {0: None, 1: None})
    assert {number: state.over for number, state in states.items()} == over


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobsFolder]:
    """The agent, called in this process, has signal handlers of its own."""
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    folder = SweepFolder(tmp_path / "sweep")
    folder.make()
    folder.jobs("1").mkdir()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield JobsFolder(folder.jobs("1"))
    for number, handler in before.items():
        signal.signal(number, handler)


def batch_of(folder: Path, settings: ClusterSettings) -> Batch:
    return Batch(
        id="1",
        launcher="slurm",
        names=["one"],
        request=request_of(settings, "cpu", 600.0),
        settings=settings,
        working_folder=str(folder),
        created_at_s=0.0,
        time_limit_s=100.0,
        command=list(WORKER),
    )


def write_order(jobs: JobsFolder, what: str = "Nothing") -> None:
    jobs.write_batch(batch_of(jobs.root, ClusterSettings()))
    folder = SweepFolder(jobs.root.parent.parent)
    case = next(iter(cases_of(small(trainers=[f"light_worker:{what}"]), "cpu").values()))
    order = WorkerOrder(
        case=case,
        name="case",
        sweep_id="sweep",
        content_hash="hash",
        folder=str(folder.root),
        progress_path=str(folder.progress("case")),
        log_path=str(folder.log("case")),
    )
    jobs.write(0, order)


def test_of_many_that_claim_an_experiment_one_succeeds(jobs: JobsFolder) -> None:
    won: list[bool] = []
    threads = [threading.Thread(target=lambda: won.append(jobs.try_claim(0))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 19 + [True]
    assert jobs.read_claim(0).at_s > 0


def test_an_agent_runs_an_experiment_once(jobs: JobsFolder, tmp_path: Path) -> None:
    write_order(jobs)
    assert on_node([str(jobs.root), "0"]) == 0
    folder = SweepFolder(jobs.root.parent.parent)
    ended = read_record(folder.result("case"), CaseResult)
    assert ended.end is Status.OK
    assert on_node([str(jobs.root), "0"]) == 0
    assert len((tmp_path / "ran").read_text().splitlines()) == 2
    assert read_record(folder.result("case"), CaseResult) == ended


@pytest.mark.parametrize("withdrawn", [True, False])
def test_an_agent_does_not_run_what_was_withdrawn(jobs: JobsFolder, tmp_path: Path, withdrawn: bool) -> None:
    if withdrawn:
        write_order(jobs)
        assert jobs.try_claim(0, withdraw=True)
    assert on_node([str(jobs.root), "0"]) == 0
    assert SweepFolder(jobs.root.parent.parent).result_names() == []
    assert jobs.read_claim(0).withdrawn is withdrawn
    assert not (tmp_path / "ran").exists()


def test_an_agent_that_comes_after_its_sweep_has_nothing_to_do(jobs: JobsFolder) -> None:
    jobs.remove()
    assert on_node([str(jobs.root), "0"]) == 0
    assert not jobs.root.exists()


def test_a_claim_that_is_being_written_is_an_empty_one(jobs: JobsFolder) -> None:
    (jobs.root / "0.claim").touch()
    assert jobs.read_claim(0) == Claim()
    assert not jobs.try_claim(0)


def test_files_of_an_experiment_are_forgotten_the_order_first(
    jobs: JobsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_order(jobs)
    jobs.try_claim(0)
    jobs.write(0, JobState(over=True, reason="it has ended"))
    removed: list[str] = []
    unlink = Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.suffix)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", note)
    jobs.forget(0)
    assert (removed[0], removed[-1]) == (".order", ".claim")
    assert not any(jobs.listing().values())


def test_a_dry_run_shows_requests_and_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = caller(capsys)
    arguments = [
        "sweep",
        "--mode",
        "single",
        "--model-size",
        "tiny",
        "--launcher",
        "slurm",
        "--dry-run",
        "-o",
        "out",
    ]
    arguments += ["--timeout", "480", "--job-cpus", "3", "--job-memory", "1.5", "--max-jobs", "2"]
    first = run(*arguments)
    assert (first.code, first.err) == (0, "")
    (row,) = [line for line in first.out.splitlines() if "StandardTrainer_bs4" in line]
    assert row.split()[-7:] == ["cuda", "1", "3", "1.5", "GiB", "10", "min"]
    assert "hours: unknown, because the output folder has no earlier results" in first.out

    (name, case) = next(iter(cases_of(small(trainers=["StandardTrainer"]), "cpu").items()))
    folder = SweepFolder(tmp_path / "out")
    folder.make()
    earlier = CaseResult(
        name=name, sweep_id="1", content_hash="", case=case, end=Status.OK, phase=Phase.DONE, wall_s=7200.0
    )
    save(folder, earlier)
    second = run(*arguments)
    assert (
        "hours: about 2 h of experiments (2 GPU hours), from earlier results, at least 1 h with 2"
        in second.out
    )
    listed = json.loads(run(*arguments, "--json").out)
    assert listed["estimated_s"] == 7200.0
    assert list(listed["experiments"]) == ["StandardTrainer_bs4_seq512"]
    assert {name: request["gpus"] for name, request in listed["requests"].items()} == {
        "StandardTrainer_bs4_seq512": 1
    }

    arguments[arguments.index("single")] = "profile"
    arguments += ["--trainers", "StandardTrainer", "--batch-sizes", "4", "--seq-lengths", "512"]
    several = json.loads(run(*arguments, "--gpus-per-experiment", "1,2", "--parallel", "ddp", "--json").out)
    assert sorted(request["gpus"] for request in several["requests"].values()) == [1, 2]
    few = run(*arguments, "--gpus-per-experiment", "2", "--parallel", "ddp", "--job-gpus", "1")
    assert (few.code, few.out) == (2, "")
    assert "cluster.gpus is 1, fewer than the 2 GPUs of an experiment" in few.err


ASK = """
import sys
from pathlib import Path
from truemfu.cli.sweep import _leave_or_cancel
sys.exit(_leave_or_cancel(Path(sys.argv[1]), 3, ask=True))
"""


def is_asleep(pid: int) -> bool:
    """Whether a process waits for something, by the state after its name in Linux's table."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize(
    ("answer", "said"),
    [("y\n", "cancelled: 0 experiments"), ("\n", "--cancel"), ("\x04", "--cancel"), ("\x03", "--cancel")],
)
def test_ctrl_c_on_a_terminal_asks_once_whether_to_cancel(tmp_path: Path, answer: str, said: str) -> None:
    (tmp_path / "running").mkdir()
    record = SweepRecord(sweep_id="1", created_at_s=0.0, truemfu_version="0", cases=[], config={})
    write_record(tmp_path / "sweep.json", record)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", ASK, str(tmp_path)])
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a terminal without a process with an error
        while part := os.read(terminal, 4096):
            shown += part
            if b"[y/N]" in shown and answer:
                while not is_asleep(pid):  # Python misses a signal directly before it waits for input
                    time.sleep(0.01)
                os.write(terminal, answer.encode())
                answer = ""
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    text = shown.decode()
    assert text.count("3 experiments on the cluster. Cancel? [y/N]") == 1
    assert said in text


@pytest.mark.parametrize(("number", "waits_for"), [("77", ["--dependency=afterany:77"]), (None, [])])
def test_a_batch_waits_for_the_one_before_where_that_has_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str | None, waits_for: list[str]
) -> None:
    """`sbatch` is a script here that notes its options: there is no Slurm."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/options\necho 78\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = ClusterSettings(max_jobs=1)

    batch = batch_of(tmp_path, settings)
    before = msgspec.structs.replace(batch, id="0", engine_job=number)
    assert Slurm(settings).submit(batch, JobsFolder(tmp_path / "jobs"), [0], before) == "78"
    options = (tmp_path / "options").read_text().splitlines()
    assert [option for option in options if option.startswith("--dependency")] == waits_for


@pytest.mark.parametrize(
    ("request_", "asked", "there"),
    [
        ({"gpus": 0, "memory_bytes": 25_276_510_209}, "25,276,510,209 bytes of", "25,276,510,208 bytes of"),
        ({"gpus": 3, "cpus": 4}, "3 GPUs, 4 CPUs", "1 GPUs, 2 CPUs"),
    ],
)
def test_a_refusal_by_ray_names_what_a_node_is_short_of(
    request_: dict[str, int], asked: str, there: str
) -> None:
    node = {"GPU": 1.0, "CPU": 2.0, "memory": 25_276_510_208.0}
    text = shortage_of([node], Request(time_s=60.0, **request_), "a local Ray on this machine")
    assert text is not None
    assert f"an experiment requests {asked}" in text
    assert f"the most a local Ray on this machine has is {there}" in text
    assert shortage_of([node], Request(time_s=60.0)) is None
