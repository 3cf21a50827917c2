"""One experiment, supervised: a result in any case, and never somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import HERE, alive, last_line, small

from truemfu.records import CaseResult, Phase, Status, SweepCase, read_record
from truemfu.sweep.cases import cases_of
from truemfu.sweep.launchers.local import WORKER
from truemfu.sweep.order import WorkerOrder
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.process import WorkerProcess
from truemfu.sweep.supervisor.stored import save
from truemfu.sweep.supervisor.supervise import Stop, run_case

NAME = "case"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = SweepFolder(tmp_path)
    for path in (folder.logs, folder.results, folder.runs, folder.running):
        path.mkdir()
    return folder


def case(trainer: str = "StandardTrainer") -> SweepCase:
    return next(iter(cases_of(small(trainers=[trainer]), "cpu").values()))


def order(folder: SweepFolder, trainer: str = "StandardTrainer") -> WorkerOrder:
    return WorkerOrder(
        case=case(trainer),
        name=NAME,
        sweep_id="sweep",
        content_hash="hash",
        folder=str(folder.root),
        progress_path=str(folder.progress(NAME)),
        log_path=str(folder.log(NAME)),
    )


def worker(code: str | None = None) -> WorkerProcess:
    """A real worker, or Python with this code in its place."""
    command = WORKER if code is None else (sys.executable, "-c", textwrap.dedent(code))
    return WorkerProcess(command, environment=os.environ)


def result_of(started: WorkerProcess, folder: SweepFolder) -> CaseResult:
    """What becomes of an experiment when nobody interrupts it."""
    result = run_case(lambda: started, order(folder), folder, time_limit_s=600.0, stop=Stop())
    assert result is not None
    return result


def earlier_result(folder: SweepFolder) -> CaseResult:
    """A result of the same experiment in the same sweep, from a run before."""
    earlier = CaseResult(
        name=NAME,
        sweep_id="sweep",
        content_hash="hash",
        case=case(),
        end=Status.OK,
        phase=Phase.DONE,
        message="the earlier one",
    )
    return save(folder, earlier)


def test_a_hang_is_ended_at_its_time_limit_even_if_it_ignores_term(folder: SweepFolder) -> None:
    hanging = worker()
    result = run_case(
        lambda: hanging,
        order(folder, "failing_trainers:Hangs"),
        folder,
        time_limit_s=15.0,
        stop=Stop(),
        clock=lambda: 16.0 if (folder.root / "hangs").exists() else 0.0,
    )
    assert result is not None
    assert (result.end, result.signal, result.exit_code) == (Status.TIMEOUT, "SIGKILL", None)
    assert result.phase is Phase.WARM_UP
    assert result.message is not None
    assert "did not finish within its time limit" in result.message
    assert result.wall_s == 16.0
    assert result.memory is not None
    assert result.memory.process_bytes is not None
    assert not alive(hanging.pid)
    assert last_line(folder.log(NAME))["end"] == "timeout"
    assert list(folder.running.glob(f"{NAME}*")) == []


def test_an_earlier_result_is_not_mistaken_for_this_runs(folder: SweepFolder) -> None:
    earlier_result(folder)
    result = result_of(worker("import os; os._exit(3)"), folder)
    assert (result.end, result.exit_code, result.phase) == (Status.ERROR, 3, Phase.START)
    assert read_record(folder.result(NAME), CaseResult) == result
    assert last_line(folder.log(NAME))["message"] == result.message


def test_an_interruption_leaves_the_earlier_result_where_it_was(folder: SweepFolder) -> None:
    earlier = earlier_result(folder)
    stop = Stop()
    stop.request()
    busy = worker()
    assert run_case(lambda: busy, order(folder), folder, time_limit_s=600.0, stop=stop) is None
    assert not alive(busy.pid)
    assert read_record(folder.result(NAME), CaseResult) == earlier
    assert last_line(folder.log(NAME))["message"] == "the earlier one"
    assert list(folder.running.glob(f"{NAME}*")) == []


def test_an_interruption_without_an_earlier_result_writes_none(folder: SweepFolder) -> None:
    stop = Stop()
    stop.request()
    assert run_case(worker, order(folder), folder, time_limit_s=600.0, stop=stop) is None
    assert not folder.result(NAME).exists()


def test_a_worker_that_cannot_start_says_why(folder: SweepFolder) -> None:
    broken = worker("raise ImportError('libtorch.so: cannot open shared object file')")
    result = result_of(broken, folder)
    assert (result.end, result.exit_code) == (Status.ERROR, 1)
    assert result.message == (
        "exited with code 1 in phase start without a result: ImportError: libtorch.so: cannot open shared "
        "object file"
    )


def test_a_native_library_out_of_memory_is_a_host_oom(folder: SweepFolder) -> None:
    native = worker(
        """
        import os, sys
        print("terminate called after throwing an instance of 'std::bad_alloc'", flush=True)
        os.abort()
        """,
    )
    result = result_of(native, folder)
    assert (result.end, result.signal) == (Status.HOST_OOM, "SIGABRT")


ANSWER_THEN = """
import json, sys
order = json.loads(sys.stdin.readline())
result = {key: order[key] for key in ("name", "sweep_id", "content_hash", "case")}
result |= {"end": "ok", "phase": "done", "message": MESSAGE}
"""


def test_a_crash_after_the_result_does_not_undo_it(folder: SweepFolder) -> None:
    code = ANSWER_THEN.replace("MESSAGE", "None") + (
        "import os; os.write(int(os.environ['TRUEMFU_SWEEP_ANSWER']), json.dumps(result).encode())\n"
        "os.kill(os.getpid(), 11)"
    )
    result = result_of(worker(code), folder)
    assert (result.end, result.signal) == (Status.OK, "SIGSEGV")
    assert result.notes == ["ended by SIGSEGV after its result was written"]


def test_a_result_of_another_sweep_does_not_count(folder: SweepFolder) -> None:
    code = ANSWER_THEN.replace("MESSAGE", "None") + (
        "result['sweep_id'] = 'another'\n"
        "import os; os.write(int(os.environ['TRUEMFU_SWEEP_ANSWER']), json.dumps(result).encode())"
    )
    result = result_of(worker(code), folder)
    assert (result.end, result.exit_code) == (Status.ERROR, 0)


def test_the_log_of_a_failure_is_quoted_without_its_result(folder: SweepFolder) -> None:
    code = """
    import sys
    order = sys.stdin.readline()
    sys.stdout = open(LOG, "a")
    print(*(f"line {n}" for n in range(100)), "", "no newline at the end", sep="\\n", end="")
    raise SystemExit(1)
    """
    failing = worker(code.replace("LOG", repr(str(folder.log(NAME)))))
    result = result_of(failing, folder)
    assert len(result.log_tail) == 20
    assert result.log_tail[-2:] == ["line 99", "no newline at the end"]
    save(folder, result)
    lines = folder.log(NAME).read_text().splitlines()
    assert lines[-2] == "no newline at the end"
    assert sum(line.startswith("{") for line in lines) == 1


def test_a_result_that_cannot_be_written_is_kept_and_says_so(folder: SweepFolder) -> None:
    root = repr(str(folder.root))
    harm = f"shutil.rmtree({root}); open({root}, 'w')"
    code = f"import os, shutil, sys; sys.stdin.readline(); {harm}; os._exit(3)"
    result = result_of(worker(code), folder)
    assert result.notes == [
        "results/case.json could not be written: Not a directory",
        "logs/case.log could not be written: Not a directory",
    ]
    assert result.exit_code == 3


IN_A_SMALL_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from truemfu.records import SweepCase, encode
from truemfu.sweep.order import WorkerOrder
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.process import WorkerProcess
from truemfu.sweep.supervisor.supervise import run_case
from truemfu.sweep.supervisor.supervise import Stop

folder = SweepFolder(Path(sys.argv[2]))
case = SweepCase(trainer="StandardTrainer", model="tiny", batch_size=2, seq_len=16)
paths = dict(progress_path=str(folder.progress("case")), log_path=str(folder.log("case")))
order = WorkerOrder(case=case, name="case", sweep_id="s", content_hash="h", folder=sys.argv[2], **paths)
eat = "import sys; sys.stdin.readline(); eaten = [bytearray(b'x') * (16 << 20) for _ in range(64)]"
worker = WorkerProcess([sys.executable, "-c", eat], environment=os.environ)
print(encode(run_case(lambda: worker, order, folder, time_limit_s=600.0, stop=Stop())).decode())
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 256 MiB of our own, where we may make one."""
    made = Path("/sys/fs/cgroup/memory") / f"truemfu-test-{os.getpid()}"
    limit = made / "memory.limit_in_bytes"
    if not made.parent.is_dir():
        made = Path("/sys/fs/cgroup") / made.name
        limit = made / "memory.max"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    try:
        if not limit.exists():
            pytest.skip("no memory controller in a cgroup of our own")
        limit.write_text(str(256 << 20))
        yield made
    finally:
        made.rmdir()


def test_a_kill_by_the_kernel_for_want_of_memory_is_told_from_a_plain_one(
    folder: SweepFolder, small_group: Path
) -> None:
    script = subprocess.run(
        [sys.executable, "-c", IN_A_SMALL_GROUP, str(small_group), str(folder.root)],
        capture_output=True,
        text=True,
    )
    assert script.returncode == 0, script.stderr
    result = read_record(folder.result(NAME), CaseResult)
    assert (result.end, result.signal) == (Status.HOST_OOM, "SIGKILL")
    assert result.message is not None
    assert "killed by the kernel because memory ran out" in result.message


def test_half_an_answer_is_not_believed(folder: SweepFolder) -> None:
    code = "import os, sys; sys.stdin.readline(); os.write(int(os.environ['TRUEMFU_SWEEP_ANSWER']), b'{')"
    result = result_of(worker(code), folder)
    assert (result.end, result.exit_code) == (Status.ERROR, 0)


def test_a_worker_that_cannot_be_started_is_a_result(folder: SweepFolder) -> None:
    def start() -> WorkerProcess:
        return WorkerProcess([str(folder.root / "nothing")], environment=os.environ)

    result = run_case(start, order(folder), folder, time_limit_s=600.0, stop=Stop())
    assert result is not None
    assert (result.end, result.phase) == (Status.ERROR, Phase.START)
    assert (result.message or "").startswith("its process could not be started: FileNotFoundError")
    assert read_record(folder.result(NAME), CaseResult) == result
