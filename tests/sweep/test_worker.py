"""The worker as a real process, ordered about as a supervisor does it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from truemfu.records import CaseResult, Memory, Phase, Status, SweepCase, decode
from truemfu.sweep.launchers.local import WORKER
from truemfu.sweep.order import WorkerOrder, encode_order, read_progress
from truemfu.sweep.process import ANSWER_NAME

NAME = "case"
FOREVER_S = 1800.0
"""Far longer than a worker takes beside any other work."""

TRAINERS = """
import os
import sys
import torch
from truemfu.sweep.trainers.standard import StandardTrainer
from truemfu.sweep.trainers.base import Unsupported


class Raises(StandardTrainer):
    def step(self, batch):
        raise ValueError("two\\nlines of trouble")


class RunsOutOfGpuMemory(StandardTrainer):
    def step(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Refuses(StandardTrainer):
    def step(self, batch):
        raise Unsupported("not on a Sunday")


class Exits(StandardTrainer):
    def step(self, batch):
        sys.exit("enough")


class NeverClips(StandardTrainer):
    private = True


class Interrupts(StandardTrainer):
    def step(self, batch):
        raise KeyboardInterrupt("not from a keyboard")


class CannotSpeak(StandardTrainer):
    def step(self, batch):
        raise Mute()


class Mute(RuntimeError):
    def __str__(self):
        raise ZeroDivisionError("of the message")


class SaysMuch(StandardTrainer):
    def step(self, batch):
        raise ValueError("x" * 50_000)


class _AfterTheGate(StandardTrainer):
    made = 0

    def __init__(self, model, settings):
        super().__init__(model, settings)
        type(self).made += 1
        self.in_earnest = type(self).made > 1


class OnlyPretends(_AfterTheGate):
    def step(self, batch):
        return torch.tensor(float("nan")) if self.in_earnest else super().step(batch)


class OnlyLooks(_AfterTheGate):
    def step(self, batch):
        if not self.in_earnest:
            return super().step(batch)
        with torch.no_grad():
            return self._forward(**batch).loss


class Diverges(_AfterTheGate):
    def step(self, batch):
        loss = super().step(batch)
        return loss * float("inf") if self.in_earnest else loss


class ClosesItsStreams(_AfterTheGate):
    def step(self, batch):
        if self.in_earnest:
            sys.stdout.close()
            sys.stderr.close()
        return super().step(batch)


class ClosesEveryDescriptor(_AfterTheGate):
    def step(self, batch):
        loss = super().step(batch)
        if self.in_earnest:
            os.closerange(3, 4096)
            while os.open(os.devnull, os.O_RDONLY) < 100:
                pass
            raise ValueError("all closed")
        return loss


class _FailsLate(StandardTrainer):
    made = 0
    left = 0

    def step(self, batch):
        type(self).made += 1
        if self.made > self.left:
            raise MemoryError("no more")
        return super().step(batch)


class FailsInTheCount(_FailsLate):
    left = 1 + 1 + 5  # gradient check, warm-up, timed


class FailsInTheProfile(_FailsLate):
    left = 1 + 1 + 5 + 1


def takes_little():
    return torch.nn.Linear(4, 2), {"input": torch.rand(6, 4)}


def takes_much_for_a_moment():
    torch.ones(500 << 20, dtype=torch.uint8)
    return takes_little()


class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(50_000, 210), torch.nn.Linear(210, 50_000)

    def forward(self, input_ids, labels=None):
        return self.head(self.tokens(input_ids))


def never_fits():
    return torch.nn.Linear(50_000, 50_000)
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a worker left behind."""

    folder: Path
    exit_code: int
    began_at_s: float

    @property
    def result(self) -> CaseResult:
        return decode((self.folder / "answer").read_bytes(), CaseResult, "the answer")

    @property
    def log(self) -> str:
        return (self.folder / "logs" / f"{NAME}.log").read_text()

    @property
    def phases(self) -> list[Phase]:
        return [line.phase for line in read_progress(self.folder / "running" / f"{NAME}.progress")]


def start(folder: Path, *imports: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    (folder / "elsewhere").mkdir(exist_ok=True)
    (folder / "elsewhere" / "my_trainers.py").write_text(TRAINERS)
    for part in ("logs", "running"):
        (folder / part).mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TRUEMFU_SWEEP_TOKEN": str(uuid.uuid4()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(folder / "elsewhere"), os.environ.get("PYTHONPATH")])
        ),
    }
    with (folder / "spare.log").open("wb") as log, (folder / "answer").open("wb") as answer:
        return subprocess.Popen(
            [*WORKER, *imports],
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, ANSWER_NAME: str(answer.fileno())},
            pass_fds=[answer.fileno()],
            start_new_session=True,
        )


def order(folder: Path, trainer: str, **changes: Any) -> WorkerOrder:
    small: dict[str, Any] = {
        "trainer": trainer,
        "model": "tiny",
        "batch_size": 2,
        "seq_len": 8,
        "dtype": "fp32",
        "device": "cpu",
        "warm_up_steps": 1,
        "min_steps": 5,
        "max_steps": 5,
    }
    about = {key: changes.pop(key) for key in ("memory_limit_bytes", "purpose") if key in changes}
    return WorkerOrder(
        case=SweepCase(**{**small, **changes}),
        name=NAME,
        sweep_id="sweep",
        content_hash="hash",
        folder=str(folder),
        progress_path=str(folder / "running" / f"{NAME}.progress"),
        log_path=str(folder / "logs" / f"{NAME}.log"),
        git_commit="abc-dirty",
        **about,
    )


def run(folder: Path, trainer: str, *imports: str, cwd: Path | None = None, **changes: Any) -> Run:
    began_at_s = time.time()
    worker = start(folder, *imports, cwd=cwd)
    worker.communicate(encode_order(order(folder, trainer, **changes)), timeout=FOREVER_S)
    return Run(folder=folder, exit_code=worker.returncode, began_at_s=began_at_s)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A private trainer that is measured from beginning to end."""
    return run(tmp_path_factory.mktemp("finished"), "DPGhostClippingTrainer", "opacus", profiled_steps=2)


def test_a_finished_experiment_has_everything(finished: Run) -> None:
    result = finished.result
    assert finished.exit_code == 0
    assert (result.end, result.phase, result.message) == (Status.OK, Phase.DONE, None)
    assert (result.name, result.sweep_id, result.content_hash) == (NAME, "sweep", "hash")
    assert result.parameters == 228_096
    assert result.gate is not None
    assert result.gate.passed
    assert result.gate.clipped
    assert result.memory is not None
    assert result.memory.allocated_bytes is None
    assert (result.memory.process_bytes or 0) > 100e6
    measured = result.measured
    assert measured is not None
    assert len(measured.steps.times_s) == 5
    assert measured.tokens_per_step == 16
    assert measured.tokens_per_s == pytest.approx(16 / measured.steps.median_s)
    assert measured.samples_per_s == pytest.approx(2 / measured.steps.median_s)
    assert measured.final_loss == pytest.approx(6.9, abs=0.3)
    assert measured.data_wait_s is not None
    assert measured.flops is not None
    assert measured.flops.hardware_flops > measured.flops.model_flops > 0
    assert result.environment is not None
    assert result.environment.git_commit == "abc-dirty"
    assert {"torch", "opacus", "truemfu"} <= set(result.environment.versions)
    assert result.notes == []


def test_phases_come_in_order_with_their_times_and_leave_a_trail(finished: Run) -> None:
    result = finished.result
    assert [time.phase for time in result.phases] == list(Phase) == finished.phases
    times = [time.began_at_s for time in result.phases]
    assert times == sorted(times)
    assert finished.began_at_s <= times[0] <= (result.began_at_s or 0) <= times[1]


def test_the_log_has_every_phase_and_nothing_from_before_the_order(finished: Run) -> None:
    lines = finished.log.splitlines()
    assert lines[0] == "[gate]"
    assert [line for line in lines if line.startswith("[")] == [
        f"[{phase.value}]" for phase in list(Phase)[1:]
    ]
    assert "Warning" not in finished.log


def test_the_trace_opens(finished: Run) -> None:
    assert finished.result.measured is not None
    assert finished.result.measured.trace == f"runs/{NAME}/{NAME}.pt.trace.json.gz"
    with gzip.open(finished.folder / finished.result.measured.trace) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("ProfilerStep#0") == names.count("ProfilerStep#1") == 1
    assert any(str(name).startswith("aten::") for name in names)


def test_tensorboard_reads_one_row_per_timed_step(finished: Run) -> None:
    events = EventAccumulator(str(finished.folder / "runs" / NAME / "tensorboard"))
    events.Reload()
    assert finished.result.measured is not None
    times = [(event.step, event.value) for event in events.Scalars("perf/step_time")]
    assert times == [
        (step, pytest.approx(seconds, rel=1e-6))
        for step, seconds in enumerate(finished.result.measured.steps.times_s, start=1)
    ]
    assert events.Scalars("training/loss")[-1].value == pytest.approx(finished.result.measured.final_loss)


@pytest.mark.parametrize(
    ("trainer", "end", "message"),
    [
        ("my_trainers:Raises", Status.ERROR, "ValueError: two lines of trouble"),
        (
            "my_trainers:RunsOutOfGpuMemory",
            Status.CUDA_OOM,
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        ("my_trainers:Refuses", Status.UNSUPPORTED, "not on a Sunday"),
        ("my_trainers:Exits", Status.ERROR, "SystemExit: enough"),
        ("my_trainers:Interrupts", Status.ERROR, "KeyboardInterrupt: not from a keyboard"),
        (
            "my_trainers:CannotSpeak",
            Status.ERROR,
            "Mute: (its own message cannot be read: ZeroDivisionError)",
        ),
        ("my_trainers:SaysMuch", Status.ERROR, "ValueError: xxx"),
        ("my_trainers:NeverClips", Status.INCORRECT, "differs from the mean clipped per-sample gradient by"),
    ],
)
def test_a_failure_has_its_own_end(tmp_path: Path, trainer: str, end: Status, message: str) -> None:
    failed = run(tmp_path, trainer)
    result = failed.result
    assert failed.exit_code == 1
    assert (result.end, result.phase) == (end, Phase.GRADIENT_CHECK)
    assert message in (result.message or "")
    assert "\n" not in (result.message or "")
    assert len(result.message or "") <= 300
    assert result.measured is None
    assert result.memory is not None
    assert result.environment is not None
    assert failed.phases[-1] is Phase.GRADIENT_CHECK
    assert ("Traceback" in failed.log) is (end is not Status.INCORRECT)
    if end is Status.INCORRECT:
        assert result.gate is not None
        assert not result.gate.passed


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        (
            "OnlyPretends",
            "the loss is nan in all 5 timed steps; a step executes 0 FLOPs, but forward and backward of the "
            "model need ",
        ),
        ("OnlyLooks", "a step executes "),
        ("Diverges", "the loss is inf in all 5 timed steps"),
    ],
)
def test_steps_that_do_not_train_are_not_a_measurement(tmp_path: Path, trainer: str, reason: str) -> None:
    result = run(tmp_path, f"my_trainers:{trainer}", profiled_steps=0).result
    assert (result.end, result.phase, result.measured) == (Status.INCORRECT, Phase.COUNT, None)
    assert (result.message or "").startswith(f"the steps of my_trainers:{trainer} do not train: {reason}")
    assert result.gate is not None
    assert result.gate.passed


def test_a_trainer_that_closes_its_streams_keeps_its_measurement(tmp_path: Path) -> None:
    done = run(tmp_path, "my_trainers:ClosesItsStreams", profiled_steps=0)
    assert (done.exit_code, done.result.end) == (0, Status.OK)
    assert done.log.splitlines()[-1] == "[done]"


def test_a_result_that_cannot_be_sent_is_written_to_no_other_file(tmp_path: Path) -> None:
    done = run(tmp_path, "my_trainers:ClosesEveryDescriptor", profiled_steps=0)
    assert done.exit_code == 1
    assert (tmp_path / "answer").read_text() == ""
    assert done.log.splitlines()[-2:] == [
        "ValueError: all closed",
        "the result cannot be sent: the trainer has closed every file descriptor",
    ]


def test_a_real_sigint_is_a_signal(tmp_path: Path) -> None:
    worker = start(tmp_path)
    while "torch" not in Path(f"/proc/{worker.pid}/maps").read_text():
        time.sleep(0.05)
    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=FOREVER_S)
    assert worker.returncode == -signal.SIGINT


def test_a_module_in_the_current_folder_is_found_behind_installed_packages(tmp_path: Path) -> None:
    """A torch.py there is not torch; a trainer there is found."""
    for name in ("torch", "msgspec", "json", "opacus"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'a').write(__name__)")
    (tmp_path / "mine.py").write_text(
        "from truemfu.sweep.trainers.standard import StandardTrainer\nclass Mine(StandardTrainer): pass\n"
    )
    done = run(tmp_path, "mine:Mine", "opacus", profiled_steps=0, cwd=tmp_path)
    assert done.exit_code == 0
    assert done.result.end is Status.OK
    assert not (tmp_path / "imported").exists()


def test_too_little_host_memory_is_a_result_with_the_peak(tmp_path: Path) -> None:
    limit = 600 << 20
    failed = run(tmp_path, "StandardTrainer", batch_size=512, seq_len=512, memory_limit_bytes=limit)
    result = failed.result
    assert failed.exit_code == 1
    assert (result.end, result.phase) == (Status.HOST_OOM, Phase.WARM_UP)
    assert "you tried to allocate" in (result.message or "")
    assert result.parameters == 228_096
    assert result.memory is not None
    assert (result.memory.process_bytes or 0) > limit / 2


def test_a_factory_that_runs_out_of_memory_is_out_of_memory(tmp_path: Path) -> None:
    failed = run(tmp_path, "StandardTrainer", model="my_trainers:never_fits", memory_limit_bytes=1 << 30)
    assert failed.result.end is Status.HOST_OOM
    assert "the factory 'my_trainers:never_fits' raised" in (failed.result.message or "")
    assert failed.result.memory is not None


def test_a_private_trainer_that_was_checked_on_another_model_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "DPGhostClippingTrainer", "opacus", model="my_trainers:Bigram", profiled_steps=0)
    name = "reference model, 2 layers (my_trainers:Bigram has 21,050,000 parameters)"
    assert done.result.end is Status.OK
    assert done.result.notes == [f"per-sample gradients were checked on a different model: {name}"]
    assert done.result.gate is not None
    assert done.result.gate.model == name


def test_what_the_gate_and_building_held_for_a_moment_is_not_in_the_peak(tmp_path: Path) -> None:
    peaks = []
    for name in ("takes_little", "takes_much_for_a_moment"):
        done = run(tmp_path, "StandardTrainer", model=f"my_trainers:{name}", profiled_steps=0)
        assert done.exit_code == 0
        assert done.result.memory is not None
        peaks.append(done.result.memory.process_bytes or 0)
    assert peaks[0] > 100 << 20
    assert peaks[1] - peaks[0] < 250 << 20


@pytest.mark.parametrize("trainer", ["FailsInTheCount", "FailsInTheProfile"])
def test_what_fails_behind_the_timed_steps_costs_its_own_figures_alone(tmp_path: Path, trainer: str) -> None:
    done = run(tmp_path, f"my_trainers:{trainer}", profiled_steps=1)
    measured = done.result.measured
    assert (done.exit_code, done.result.end) == (0, Status.OK)
    assert measured is not None
    assert len(measured.steps.times_s) == 5
    assert (measured.trace, measured.trace_note) == (None, "no trace: MemoryError: no more")
    in_count = trainer == "FailsInTheCount"
    assert (measured.flops is None) is in_count
    assert done.result.notes == (["no FLOPs: MemoryError: no more"] if in_count else [])


def test_a_probe_says_whether_it_fits(tmp_path: Path) -> None:
    small = run(tmp_path, "StandardTrainer", purpose="probe")
    answer = small.result
    assert (answer.end, answer.phase, answer.measured) == (Status.OK, Phase.DONE, None)
    assert (answer.memory or Memory()).process_bytes is not None
    assert Phase.GRADIENT_CHECK not in small.phases
    limits: dict[str, Any] = {"batch_size": 512, "seq_len": 512, "memory_limit_bytes": 600 << 20}
    large = run(tmp_path, "StandardTrainer", purpose="probe", **limits)
    assert large.result.end is Status.HOST_OOM


def test_without_an_order_a_worker_leaves_quietly(tmp_path: Path) -> None:
    worker = start(tmp_path)
    worker.communicate(b"", timeout=FOREVER_S)
    assert worker.returncode == 0
    assert (tmp_path / "spare.log").read_text() == ""
    assert (tmp_path / "answer").read_text() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_worker_dies_with_its_supervisor(tmp_path: Path) -> None:
    """A supervisor that keeps the worker's standard input open elsewhere, and is killed."""
    code = (
        "import os, subprocess, sys, time\n"
        "reader, writer = os.pipe()\n"
        "os.set_inheritable(writer, True)\n"
        "command = [sys.executable, '-m', 'truemfu.sweep.worker']\n"
        f"os.environ['{ANSWER_NAME}'] = str(writer)\n"
        "worker = subprocess.Popen(command, stdin=reader, start_new_session=True, close_fds=False)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        worker = int(supervisor.stdout.readline())
        while "torch" not in Path(f"/proc/{worker}/maps").read_text():
            time.sleep(0.05)
        supervisor.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + FOREVER_S
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(worker)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
