"""Whole sweeps with real workers: every way to fail, resume, Ctrl-C, a killed supervisor, a full disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from supervised import (
    HERE,
    UNTIL_WATCHED,
    Recorder,
    Watching,
    alive,
    last_line,
    processes_of_sweeps,
    small,
    until,
)

from truemfu.errors import UsageError
from truemfu.records import CaseResult, Memory, Phase, Status, read_record, write_record
from truemfu.sweep.order import Progress, append_progress
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.supervisor.resume import reusable
from truemfu.sweep.supervisor.runner import SweepOutcome, run_sweep

FAULTS = {
    "Raises": (Status.ERROR, 1, None, "RuntimeError: the loss has exploded"),
    "OutOfGpuMemory": (Status.CUDA_OOM, 1, None, "CUDA out of memory. Tried to allocate 20.00 GiB"),
    "EatsMemory": (Status.HOST_OOM, 1, None, "MemoryError"),
    "KillsItself": (Status.SIGNAL, None, "SIGKILL", "ended by SIGKILL in phase warm_up"),
    "Segfaults": (Status.SIGNAL, None, "SIGSEGV", "ended by SIGSEGV in phase warm_up"),
    "Exits": (Status.ERROR, 3, None, "exited with code 3 in phase warm_up without a result: about to leave"),
}
BATCH = 4
LEAVE = (sys.executable, "-c", "raise SystemExit(7)")
"""A worker that leaves at once, where only the choice of what to run is looked at."""


def name_of(trainer: str, batch: int = BATCH) -> str:
    return f"{trainer}_bs{batch}_seq16"


@dataclass(frozen=True, kw_only=True)
class Ran:
    folder: SweepFolder
    outcome: SweepOutcome
    heard: Recorder

    def result(self, trainer: str) -> CaseResult:
        return read_record(self.folder.result(name_of(trainer)), CaseResult)


@pytest.fixture(scope="module")
def here() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield patch


@pytest.fixture(scope="module")
def with_faults(here: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Every fault once, a trainer that leaves a daemon, and in the end one that simply trains."""
    root = tmp_path_factory.mktemp("with_faults")
    here.setenv("TRUEMFU_TEST_FOLDER", str(root))
    trainers = [f"failing_trainers:{name}" for name in (*FAULTS, "Daemonises")]
    config = small(
        trainers=[*trainers, "StandardTrainer"], batch_sizes=[BATCH], memory_limit_gib=3.0, find_fit=False
    )
    heard = Recorder()
    outcome = run_sweep(config, root, listener=heard)
    return Ran(folder=SweepFolder(root), outcome=outcome, heard=heard)


@pytest.fixture(scope="module")
def alone(here: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    root = tmp_path_factory.mktemp("alone")
    config = small(trainers=["StandardTrainer"], batch_sizes=[BATCH], memory_limit_gib=3.0)
    heard = Recorder()
    return Ran(folder=SweepFolder(root), outcome=run_sweep(config, root, listener=heard), heard=heard)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_own_end(with_faults: Ran, fault: str) -> None:
    end, exit_code, signal_name, message = FAULTS[fault]
    result = with_faults.result(fault)
    assert (result.end, result.exit_code, result.signal) == (end, exit_code, signal_name)
    assert result.phase is Phase.WARM_UP
    assert result.message is not None
    assert message in result.message
    assert result.memory is not None
    assert (result.memory.process_bytes or 0) > 100 << 20
    assert result.wall_s is not None


@pytest.mark.parametrize("fault", [*FAULTS, "Daemonises", "StandardTrainer"])
def test_every_log_ends_with_its_result(with_faults: Ran, fault: str) -> None:
    stored = json.loads(with_faults.folder.result(name_of(fault)).read_text())
    assert last_line(with_faults.folder.log(name_of(fault))) == stored


def test_the_log_of_an_exception_is_quoted(with_faults: Ran) -> None:
    assert any("the loss has exploded" in line for line in with_faults.result("Raises").log_tail)


def test_a_daemon_is_ended_and_does_not_fail_its_experiment(with_faults: Ran) -> None:
    assert with_faults.result("Daemonises").end is Status.OK
    assert not alive(int((with_faults.folder.root / "daemon.pid").read_text()))


def test_no_process_is_left(with_faults: Ran) -> None:
    assert processes_of_sweeps(str(with_faults.folder.root)) == []
    assert [path.name for path in with_faults.folder.running.iterdir()] == ["lock"]


def test_the_listener_hears_everything_in_order(with_faults: Ran) -> None:
    names = [name_of(trainer) for trainer in (*FAULTS, "Daemonises", "StandardTrainer")]
    assert with_faults.heard.names == names
    assert [result.name for result in with_faults.heard.results] == names
    assert [result.name for result in with_faults.outcome.results] == names
    seen = with_faults.heard.phases[name_of("StandardTrainer")]
    assert seen == sorted(seen, key=list(Phase).index)


def test_failures_of_others_change_nothing_of_a_result(with_faults: Ran, alone: Ran) -> None:
    beside, by_itself = with_faults.result("StandardTrainer"), alone.result("StandardTrainer")
    assert (beside.end, by_itself.end) == (Status.OK, Status.OK)
    assert beside.measured is not None
    assert by_itself.measured is not None
    assert beside.content_hash == by_itself.content_hash
    for field in ("parameters", "gate", "case", "environment"):
        assert getattr(beside, field) == getattr(by_itself, field)
    assert beside.measured.flops == by_itself.measured.flops
    assert beside.measured.final_loss == by_itself.measured.final_loss


def test_what_is_there_is_not_run_again(alone: Ran) -> None:
    config = small(trainers=["StandardTrainer"], batch_sizes=[BATCH], memory_limit_gib=3.0)
    heard = Recorder()
    outcome = run_sweep(config, alone.folder.root, listener=heard)
    assert heard.reused == [name_of("StandardTrainer")]
    assert outcome.results == alone.outcome.results


def test_what_is_there_is_run_again_where_something_that_decides_it_has_changed(
    alone: Ran, tmp_path: Path
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(alone.folder.root, root)
    config = small(trainers=["StandardTrainer"], batch_sizes=[BATCH], memory_limit_gib=4.0)
    heard = Recorder()
    (again,) = run_sweep(config, root, listener=heard, command=LEAVE).results
    assert heard.reused == []
    assert again.exit_code == 7
    assert again.content_hash != alone.outcome.results[0].content_hash


@pytest.mark.parametrize(
    ("had_s", "limit_s", "reused"), [(10.0, 5.0, ["case"]), (10.0, 50.0, []), (None, 5.0, [])]
)
def test_a_timeout_is_tried_again_once_the_limit_is_longer(
    alone: Ran, tmp_path: Path, had_s: float | None, limit_s: float, reused: list[str]
) -> None:
    folder = SweepFolder(tmp_path)
    folder.results.mkdir()
    (result,) = alone.outcome.results
    late = msgspec.structs.replace(result, end=Status.TIMEOUT, wall_s=had_s, content_hash="hash", name="case")
    write_record(folder.result("case"), late)
    held = reusable(folder, {"case": "hash"}, rerun="none", timeout_s=limit_s, report=print)
    assert list(held) == reused


@pytest.mark.parametrize(
    ("rerun", "again"), [("failed", ["KillsItself", "Exits"]), ("signal", ["KillsItself"]), ("timeout", [])]
)
def test_rerun_chooses_by_end(with_faults: Ran, tmp_path: Path, rerun: str, again: list[str]) -> None:
    root = tmp_path / "copy"
    shutil.copytree(with_faults.folder.root, root)
    trainers = [f"failing_trainers:{name}" for name in ("KillsItself", "Exits", "Daemonises")]
    config = small(trainers=trainers, batch_sizes=[BATCH], memory_limit_gib=3.0, find_fit=False)
    heard = Recorder()
    run_sweep(config, root, rerun=rerun, listener=heard, command=LEAVE)
    assert [result.name for result in heard.results] == [name_of(trainer) for trainer in again]
    assert {result.exit_code for result in heard.results} <= {7}


def test_an_unknown_rerun_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rerun must be .*got 'failures' \(did you mean 'failed'\?\)"):
        run_sweep(small(), tmp_path / "out", rerun="failures", listener=Recorder())
    assert not (tmp_path / "out").exists()


def test_after_an_out_of_memory_larger_batches_are_pruned_and_what_fits_is_found(
    here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainers = ["failing_trainers:OutOfGpuMemory"]
    heard = Recorder()
    outcome = run_sweep(small(trainers=trainers, batch_sizes=[8, 2, 4], prune=True), tmp_path, listener=heard)
    ends = {result.case.batch_size: result.end for result in outcome.results}
    assert ends == {2: Status.OK, 4: Status.CUDA_OOM, 8: Status.PRUNED}
    out_of_memory, pruned = outcome.results[1:]
    assert pruned.message == "not run: OutOfGpuMemory_bs4_seq16 already ran out of memory"
    assert out_of_memory.fits is not None
    assert out_of_memory.fits.startswith("batch 3 fits (measured: ")
    assert out_of_memory.fits.endswith("; batch 4 does not")
    assert any(out_of_memory.fits in line for line in heard.lines)
    folder = SweepFolder(tmp_path)
    for result in outcome.results:
        assert read_record(folder.result(result.name), CaseResult) == result
        assert last_line(folder.log(result.name))["fits"] == result.fits
    assert [path.name for path in folder.running.iterdir()] == ["lock"]


SWEEP = """
import signal
import sys
from pathlib import Path
from supervised import Recorder, small
from truemfu.sweep.supervisor.runner import run_sweep

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup themselves
config = small(trainers=["StandardTrainer", "failing_trainers:WaitsForLeave"], batch_sizes=[2])
outcome = run_sweep(config, Path(sys.argv[1]), listener=Recorder())
sys.exit(130 if outcome.interrupted else 0)
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_terminal_or_a_job_is_like_ctrl_c(
    here: pytest.MonkeyPatch, tmp_path: Path, ending: signal.Signals
) -> None:
    here.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    waits = "import os, time; open(os.environ['TRUEMFU_TEST_FOLDER'] + '/started', 'w'); time.sleep(600)"
    call = "listener=Recorder()"
    code = SWEEP.replace(call, f"{call}, command=[sys.executable, '-c', {waits!r}]")
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")])
    until((tmp_path / "started").exists)
    supervisor.send_signal(ending)
    assert supervisor.wait() == 130
    assert processes_of_sweeps(str(tmp_path)) == []
    assert list((tmp_path / "out" / "results").iterdir()) == []


def test_ctrl_c_and_a_killed_supervisor_lose_nothing_and_leave_nothing(
    here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    root, daemon_file = tmp_path / "out", tmp_path / "daemon.pid"
    folder = SweepFolder(root)
    first, second = name_of("StandardTrainer", 2), name_of("WaitsForLeave", 2)

    # Ctrl-C while the second experiment runs.
    supervisor = subprocess.Popen([sys.executable, "-c", SWEEP, str(root)])
    until(daemon_file.exists)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait() == 130
    finished = read_record(folder.result(first), CaseResult)
    assert finished.end is Status.OK
    assert not folder.result(second).exists()
    assert folder.log(second).read_text().endswith("interrupted before it finished\n")
    assert processes_of_sweeps(str(tmp_path)) == []
    assert [path.name for path in folder.running.iterdir()] == ["lock"]

    # The same call goes on with the second one; now its supervisor is killed.
    daemon_file.unlink()
    supervisor = subprocess.Popen([sys.executable, "-c", SWEEP, str(root)])
    until(daemon_file.exists)
    daemon = int(daemon_file.read_text())
    workers = [pid for pid in processes_of_sweeps(str(tmp_path)) if pid != daemon]
    assert workers
    supervisor.kill()
    supervisor.wait()
    until(lambda: not any(map(alive, workers)))
    assert alive(daemon)
    assert folder.marker(second).exists()

    # Whoever comes next ends what was left, keeps what was finished and runs the rest.
    (tmp_path / "go").touch()
    heard = Recorder()
    config = small(trainers=["StandardTrainer", "failing_trainers:WaitsForLeave"], batch_sizes=[2])
    outcome = run_sweep(config, root, listener=heard)
    assert not alive(daemon)
    assert heard.reused == [first]
    assert f"{second} was left unfinished by a sweep that was killed" in heard.lines
    assert [result.end for result in outcome.results] == [Status.OK, Status.OK]
    assert outcome.results[0] == finished
    assert processes_of_sweeps(str(tmp_path)) == []


def test_an_experiment_left_by_a_killed_supervisor_and_not_run_again_is_lost(
    here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leave = [sys.executable, "-c", "raise SystemExit(7)"]
    run_sweep(
        small(trainers=["StandardTrainer"], batch_sizes=[2, 4]), tmp_path, listener=Recorder(), command=leave
    )
    folder = SweepFolder(tmp_path)
    left = name_of("StandardTrainer", 4)
    stored = read_record(folder.result(left), CaseResult)
    folder.result(left).unlink()
    mark = {"pid": 1, "token": "0" * 32, "began_at_s": 1.0, "content_hash": stored.content_hash}
    folder.marker(left).write_text(
        json.dumps({**mark, "case": json.loads(folder.log(left).read_text())["case"]})
    )
    append_progress(
        folder.progress(left), Progress(phase=Phase.TIMED, at_s=2.0, memory=Memory(process_bytes=1 << 30))
    )
    folder.log(left).write_text("its last line\n")
    run_sweep(
        small(trainers=["StandardTrainer"], batch_sizes=[2]), tmp_path, listener=Recorder(), command=leave
    )
    lost = read_record(folder.result(left), CaseResult)
    assert (lost.end, lost.message) == (Status.LOST, "the sweep ended before the experiment finished")
    assert (lost.phase, lost.memory) == (Phase.TIMED, Memory(process_bytes=1 << 30))
    assert lost.log_tail == ["its last line"]
    assert last_line(folder.log(left))["end"] == "lost"

    # A sweep that is started over with other settings has never had that experiment.
    folder.result(left).unlink()
    folder.marker(left).write_text(json.dumps({**mark, "case": msgspec.to_builtins(stored.case)}))
    other = small(trainers=["StandardTrainer"], batch_sizes=[2], optimizer="adamw")
    run_sweep(other, tmp_path, rerun="all", listener=Recorder(), command=leave)
    assert [path.name for path in folder.results.iterdir()] == [f"{name_of('StandardTrainer', 2)}.json"]


ON_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size=24m tmpfs "$TRUEMFU_TEST_FOLDER"
exec "$0" -c "$1"
"""

FULL_DISK = """
import json, os
from pathlib import Path
from supervised import Recorder, small
from truemfu.sweep.supervisor.runner import run_sweep

folder = Path(os.environ["TRUEMFU_TEST_FOLDER"])

class FreesTheDisk(Recorder):
    def ended(self, result):
        super().ended(result)
        (folder / "filler").unlink(missing_ok=True)

config = small(trainers=["failing_trainers:FillsDisk", "StandardTrainer"], batch_sizes=[2])
heard = FreesTheDisk()
outcome = run_sweep(config, folder / "out", listener=heard)
stored = [json.loads(path.read_text())["end"] for path in sorted((folder / "out" / "results").iterdir())]
print(json.dumps({
    "ends": [result.end for result in outcome.results],
    "messages": [result.message for result in outcome.results],
    "notes": [result.notes for result in heard.results],
    "stored": stored,
}))
"""


def on_a_small_disk(here: pytest.MonkeyPatch, tmp_path: Path, code: str) -> dict[str, Any]:
    """Run this with a disk of 24 MiB mounted at `tmp_path`; what it printed last."""
    unshare = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    mount = [*unshare, "sh", "-c", f'mount -t tmpfs tmpfs "{tmp_path}"']
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small disk of our own can be mounted here")
    here.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    ran = subprocess.run(
        [*unshare, "sh", "-c", ON_A_SMALL_DISK, sys.executable, code], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_a_full_disk_costs_one_experiment_and_not_its_result(
    here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = on_a_small_disk(here, tmp_path, FULL_DISK)
    assert found["ends"] == ["error", "ok"]
    assert "No space left on device" in found["messages"][0]
    full, fine = found["notes"]
    assert any("could not be written: No space left on device" in note for note in full)
    assert fine == []
    # There was room again before the sweep was over, so nothing is missing in the end.
    assert found["stored"] == ["error", "ok"]


STILL_FULL = """
import json, os, subprocess
from pathlib import Path
from supervised import Recorder, small
from truemfu.sweep.supervisor.runner import run_sweep

folder = Path(os.environ["TRUEMFU_TEST_FOLDER"]) / "out"
results = folder / "results"
results.mkdir(parents=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(results)], check=True)
os.environ["TRUEMFU_TEST_FOLDER"] = str(results)
config = small(trainers=["failing_trainers:TrainsOnAFullDisk"], batch_sizes=[2])

def sweep():
    heard = Recorder()
    (result,) = run_sweep(config, folder, listener=heard).results
    return {"end": result.end, "measured": result.measured is not None, "notes": result.notes,
            "reused": heard.reused, "stored": [path.name for path in results.glob("*.json")],
            "said": heard.lines}

full = sweep()
(results / "filler").unlink()
print(json.dumps({"full": full, "again": sweep()}))
"""


def test_a_measurement_survives_a_disk_that_stays_full_and_is_made_again_by_the_next_call(
    here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = on_a_small_disk(here, tmp_path, STILL_FULL)
    full, again = found["full"], found["again"]
    assert (full["end"], full["measured"], full["stored"]) == ("ok", True, [])
    problem = "results/TrainsOnAFullDisk_bs2_seq16.json could not be written: No space left on device"
    assert full["notes"] == [problem]
    assert f"TrainsOnAFullDisk_bs2_seq16: {problem}" in full["said"]
    assert (again["reused"], again["measured"]) == ([], True)


@pytest.mark.parametrize(
    ("message", "held"),
    [
        ("exited with code 1 in phase done without a result: note: No space left on device", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("ValueError: no space", True),
    ],
)
def test_an_experiment_that_failed_for_a_full_disk_is_run_again(
    alone: Ran, tmp_path: Path, message: str, held: bool
) -> None:
    folder = SweepFolder(tmp_path)
    folder.make()
    (result,) = alone.outcome.results
    write_record(
        folder.result(result.name), msgspec.structs.replace(result, end=Status.ERROR, message=message)
    )
    hashes = {result.name: result.content_hash}
    assert bool(reusable(folder, hashes, rerun="none", timeout_s=1.0, report=print)) is held


STAND_IN = """
import json, os, sys, time
from pathlib import Path

order = json.loads(sys.stdin.readline())
here = Path(order["folder"])
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
(here / f"saw-{gpu}").touch()
while not all((here / f"saw-{other}").exists() for other in ("5", "7")):
    time.sleep(0.01)
result = {key: order[key] for key in ("name", "sweep_id", "content_hash", "case")}
result |= {"end": "ok", "phase": "done", "notes": [gpu]}
os.write(int(os.environ["TRUEMFU_SWEEP_ANSWER"]), json.dumps(result).encode())
"""


def test_several_gpus_work_side_by_side_each_on_one_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker leaves before both GPUs have been seen; the driver's tool and the worker are stand-ins."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    config = small(device="cuda", trainers=["StandardTrainer"], batch_sizes=[1, 2, 3, 4])
    outcome = run_sweep(
        config,
        tmp_path / "out",
        listener=Recorder(),
        command=[sys.executable, "-c", textwrap.dedent(STAND_IN)],
    )
    assert [result.end for result in outcome.results] == [Status.OK] * 4
    assert {note for result in outcome.results for note in result.notes} == {"5", "7"}


READY_AHEAD = """
import json, os, sys, time
from pathlib import Path

here = Path(os.environ["TRUEMFU_TEST_FOLDER"])
(here / f"{os.getpid()}.started").touch()
order = json.loads(sys.stdin.readline())
first = order["case"]["batch_size"] == 1

def others():
    return [int(path.stem) for path in here.glob("*.started") if path.stem != str(os.getpid())]

def phase(name, until):
    with open(order["progress_path"], "a") as progress_lines:
        progress_lines.write(json.dumps({"phase": name, "at_s": time.time()}) + "\\n")
    while not until():
        time.sleep(0.01)

UNTIL_WATCHED
notes = []
if first:
    phase("timed", lambda: True)
    until_watched()
    until_watched()
    notes.append(f"{len(others())} beside the timed steps")
    phase("count", others)
result = {key: order[key] for key in ("name", "sweep_id", "content_hash", "case")}
result |= {"end": "ok", "phase": "done", "notes": notes}
os.write(int(os.environ["TRUEMFU_SWEEP_ANSWER"]), json.dumps(result).encode())
"""


def test_the_next_worker_starts_ahead_but_never_beside_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in ends only if its successor starts in phase count."""
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    config = small(trainers=["StandardTrainer"], batch_sizes=[1, 2])
    command = [sys.executable, "-c", READY_AHEAD.replace("UNTIL_WATCHED", UNTIL_WATCHED)]
    outcome = run_sweep(config, tmp_path / "out", listener=Watching(tmp_path), command=command)
    assert [result.end for result in outcome.results] == [Status.OK, Status.OK]
    assert outcome.results[0].notes == ["0 beside the timed steps"]


def test_a_listener_that_fails_ends_the_sweep_and_leaves_no_process(
    here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))

    class Broken(Recorder):
        def changed(self, name: str, state: object) -> None:
            raise BrokenPipeError("nobody is listening")

    with pytest.raises(BrokenPipeError, match="nobody is listening"):
        run_sweep(small(batch_sizes=[2]), tmp_path / "out", listener=Broken())
    assert processes_of_sweeps(str(tmp_path)) == []
