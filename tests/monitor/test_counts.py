"""Counts in their own turn: the training is what it would be without them, and rows say what they rest on."""

from __future__ import annotations

import json
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from truemfu import TrainingMonitor, count_flops
from truemfu.errors import TruemfuWarning
from truemfu.flops.closed_form import flop_model as closed_form
from truemfu.monitor.live_run import LiveRun
from truemfu.monitor.row_side.flops_of_steps import Counting
from truemfu.monitor.summary import lines_of

STEPS = 6


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh()).square().mean()


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.4, self.training)) * random.random()


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: nn.functional.dropout(self.one(y), 0.3), x, use_reentrant=False)
        return checkpoint(super().forward, x, use_reentrant=True)


class Record(list[Any]):
    """A list that a count leaves alone: what it adds to a plain global list is taken out again."""


TRAINS = Record()
"""Not empty while a forward pass of the training runs."""


class WhenCounted(Net):
    """Does something where it is counted, as it never does in training."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.action = action

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not TRAINS:
            torch.manual_seed(99)
            random.seed(99)
            self.action()
        return super().forward(x)


def leave() -> None:
    raise SystemExit(3)


def fail() -> None:
    raise ZeroDivisionError("only when it is counted")


def interrupt_itself() -> None:
    raise KeyboardInterrupt


def press_ctrl_c() -> None:
    if not PRESSED:
        PRESSED.append(True)
        signal.raise_signal(signal.SIGINT)


PRESSED = Record()


def compiled() -> nn.Module:
    if torch.__version__.startswith("2.14."):
        pytest.skip("torch 2.14 cannot train this compiled model: it makes a double of Python's number")
    torch._dynamo.reset()
    return torch.compile(Dropping(), backend="aot_eager")  # type: ignore[return-value]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "dropout and draws of Python's": Dropping,
    "checkpointed": Checkpointed,
    "compiled": compiled,
    "exits when counted": lambda: WhenCounted(leave),
    "raises when counted": lambda: WhenCounted(fail),
    "raises KeyboardInterrupt when counted": lambda: WhenCounted(interrupt_itself),
    "Ctrl-C in a count": lambda: WhenCounted(press_ctrl_c),
}


def fetched_ahead(number: int) -> Iterator[torch.Tensor]:
    """Batches of a loader's thread, which draws them from the process's generators, one ahead."""
    batches: queue.Queue[torch.Tensor] = queue.Queue(maxsize=1)

    def fetch() -> None:
        for _ in range(number):
            batches.put(torch.full((4, 8), float(np.random.rand())) + random.gauss(0, 1))

    threading.Thread(target=fetch, daemon=True).start()
    for _ in range(number):
        yield batches.get()


def fresh(number: int) -> Iterator[torch.Tensor]:
    for _ in range(number):
        yield torch.randn(4, 8)


def trained(
    make: Callable[[], nn.Module], folder: Path | None, batches: Callable[[int], Iterator[torch.Tensor]]
) -> dict[str, Any]:
    """Weights, losses and random states after a few steps, with a monitor or without."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    PRESSED.clear()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = None if folder is None else TrainingMonitor(folder, model=model, trackers=[])
    losses, interrupts = [], 0
    for step, batch in enumerate(batches(STEPS), start=1):
        TRAINS.append(True)
        loss = model(batch)
        TRAINS.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        try:
            if monitor is not None:
                monitor.log_step(step, 0, loss, 1.0, 1e-2)
        except KeyboardInterrupt:
            interrupts += 1
    found = {
        "losses": losses,
        "weights": [p.detach().clone() for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "states": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
    }
    if monitor is not None:
        monitor.close()
        found["summary"], found["interrupts"] = monitor.summary(), interrupts
        rows = json.loads((folder / "training_log.json").read_text())  # type: ignore[operator]
        assert [row["global_step"] for row in rows] == list(range(1, STEPS + 1))
        found["methods"] = [row.get("perf/method") for row in rows]
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
    assert one["gradients"] == other["gradients"]
    assert one["states"] == other["states"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
def test_training_is_bit_identical(name: str, tmp_path: Path) -> None:
    alone = trained(MODELS[name], None, fresh)
    monitored = trained(MODELS[name], tmp_path, fresh)
    assert_same(monitored, alone)
    is_counted = "when counted" not in name
    assert set(monitored["methods"]) == ({"closed form"} if is_counted else {"estimate"})
    assert monitored["interrupts"] == (name == "Ctrl-C in a count")


def test_training_is_bit_identical_with_a_loader_that_fetches_ahead(tmp_path: Path) -> None:
    alone = trained(Checkpointed, None, fetched_ahead)
    monitored = trained(Checkpointed, tmp_path, fetched_ahead)
    assert_same(monitored, alone)
    assert set(monitored["methods"]) == {"closed form"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exits when counted", "SystemExit: 3"),
        ("raises when counted", "ZeroDivisionError: only when it is counted"),
        ("raises KeyboardInterrupt when counted", "KeyboardInterrupt"),
    ],
)
def test_what_a_model_raises_in_a_count_is_named(name: str, said: str, tmp_path: Path) -> None:
    with pytest.warns(TruemfuWarning, match="the model cannot be counted, its FLOPs are estimated") as warned:
        trained(MODELS[name], tmp_path, fresh)
    assert any(said in str(warning.message) for warning in warned)


def test_compiled_code_stays_compiled(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    trained(compiled, None, fresh)
    counters.clear()
    trained(compiled, None, fresh)
    alone = dict(counters["stats"])
    counters.clear()
    trained(compiled, tmp_path, fresh)
    assert dict(counters["stats"]) == alone


MODES = Record()


def alarm_once() -> None:
    if not MODES:
        signal.raise_signal(signal.SIGALRM)


def test_a_handler_of_the_users_runs_after_the_count_and_what_it_raises_passes(tmp_path: Path) -> None:
    class Alarm(Exception):
        pass

    def on_alarm(number: int, frame: Any) -> None:
        MODES.append(torch._C._len_torch_dispatch_stack())
        raise Alarm

    MODES.clear()
    before = signal.signal(signal.SIGALRM, on_alarm)
    model = WhenCounted(alarm_once)
    monitor = TrainingMonitor(tmp_path, model=model, trackers=[])
    try:
        TRAINS.append(True)
        model(torch.ones(4, 8)).backward()
        TRAINS.clear()
        with pytest.raises(Alarm):
            monitor.log_step(1, 0, 1.0, 1.0, 1.0)
        assert MODES == [0]
        assert signal.getsignal(signal.SIGALRM) is on_alarm
        for step in (2, 3):
            TRAINS.append(True)
            model(torch.ones(4, 8)).backward()
            TRAINS.clear()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    monitor.close()
    assert monitor.summary()["methods"] == {"closed form": 3}
    assert monitor.summary()["warnings"] == []


def kill_twice() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
    raise SystemExit(3)


def tick() -> None:
    signal.raise_signal(signal.SIGUSR1)


def monitored_steps(model: nn.Module, folder: Path, handler: Any, steps: int = 6) -> TrainingMonitor:
    """Steps of two shapes, with a handler for what the model sends to itself where it is counted."""
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 1}}, model=model)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handler(monitor))
    try:
        for step in range(1, steps + 1):
            for samples in (4, 5):
                TRAINS.append(True)
                model(torch.ones(samples, 8)).backward()
                TRAINS.clear()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        monitor.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return monitor


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
def test_a_harmless_handler_lets_no_error_of_the_model_out(tmp_path: Path) -> None:
    monitor = monitored_steps(WhenCounted(kill_twice), tmp_path, lambda monitor: None)
    assert monitor.summary()["methods"] == {"estimate": 6}


def test_signals_that_keep_coming_do_not_keep_a_model_from_being_counted(tmp_path: Path) -> None:
    monitor = monitored_steps(WhenCounted(tick), tmp_path, lambda monitor: None)
    assert set(monitor.summary()["methods"]) == {"closed form"}


def child_ends() -> None:
    signal.raise_signal(signal.SIGCHLD)


def test_the_end_of_a_child_ends_no_count(tmp_path: Path) -> None:
    """A loader with workers has a handler for it, and any child may end meanwhile."""
    told: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: told.append(number))
    try:
        monitor = monitored_steps(WhenCounted(child_ends), tmp_path, lambda monitor: None, steps=2)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert monitor.summary()["monitor_cost"]["counted_after_steps"] == [1]
    assert set(told) == {signal.SIGCHLD}  # when the count was over


def test_a_row_has_its_count_also_while_another_is_made(tmp_path: Path) -> None:
    """A count may begin between the moment its step was found to be known and the row."""
    model = Net()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    is_settled = Counting.is_settled

    def settled_then_held(counting: Counting, *args: Any, **kwargs: Any) -> bool:
        found = is_settled(counting, *args, **kwargs)
        if found and not counting._counts.lock.locked():
            counting._counts.lock.acquire()
            threading.Timer(0.2, counting._counts.lock.release).start()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counting, "is_settled", settled_then_held)
        for step in range(1, 4):
            log(monitor, model, step, 3 + step)
        monitor.save_logs()
        time.sleep(0.3)
    monitor.close()
    assert [row["perf/method"] for row in rows_in(tmp_path)] == ["closed form"] * 3


def test_a_handler_may_save_and_close(tmp_path: Path) -> None:
    began_s = time.monotonic()
    monitor = monitored_steps(WhenCounted(tick), tmp_path, lambda monitor: monitor.save_logs())
    assert time.monotonic() - began_s < 30
    assert monitor.summary()["steps"] == len(rows_in(tmp_path)) == 6


# Time


class Slow(Net):
    """Takes its time where it is counted."""

    pause_s = 0.15

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            time.sleep(self.pause_s)
        return super().forward(x)


def log(monitor: TrainingMonitor, model: nn.Module, step: int, samples: int = 4) -> float:
    """One step; the seconds that log_step took."""
    model(torch.ones(samples, 8)).backward()
    began_s = time.perf_counter()
    monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    return time.perf_counter() - began_s


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "training_log.json").read_text())  # type: ignore[no-any-return]


def test_what_a_count_takes_is_in_no_step_time_and_is_stated(tmp_path: Path) -> None:
    model = Slow()
    with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
        took_s = [log(monitor, model, step) for step in range(1, 8)]
    assert took_s[0] > 3 * Slow.pause_s > 10 * max(took_s[1:])
    rows = rows_in(tmp_path)
    assert all(row["perf/step_time"] < Slow.pause_s for row in rows)
    assert all(row.get("perf/between_steps", 0.0) < Slow.pause_s for row in rows)
    expected = count_flops(Net(), (torch.ones(4, 8),)).model_flops
    assert all(round(row["perf/mfu"] * row["perf/step_time"] * 1e12) == expected for row in rows)
    cost = monitor.summary()["monitor_cost"]
    assert cost["counts"] == 1
    assert cost["counted_after_steps"] == [1]
    assert took_s[0] - Slow.pause_s < cost["counting_s"] <= took_s[0]
    assert cost["training_thread_us_per_step"] < 1e6 * Slow.pause_s / 2
    text = dict(lines_of(monitor.summary()))["monitor's own cost"]
    assert f"counting took {cost['counting_s']:.1f} s, once, at step 1" in text


def test_a_count_in_save_logs_is_no_time_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Slow()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    with monkeypatch.context() as patched:
        patched.setattr(LiveRun, "_can_count", lambda self: False)
        log(monitor, model, 1)
    monitor.save_logs()
    log(monitor, model, 2)
    monitor.close()
    cost = monitor.summary()["monitor_cost"]
    assert cost["counted_after_steps"] == [1]
    assert rows_in(tmp_path)[1]["perf/between_steps"] < cost["counting_s"] / 2
    assert rows_in(tmp_path)[1]["perf/step_time"] < cost["counting_s"] / 2


def test_no_count_holds_the_training_longer_than_its_limit(tmp_path: Path) -> None:
    model = Slow()
    settings = {"monitoring": {"peak_tflops": 1, "count_time_limit_s": 0.2}}
    monitor = TrainingMonitor(tmp_path, settings, model=model)
    with pytest.warns(
        TruemfuWarning,
        match=r"longer than 0\.2 s, so the FLOPs are estimated: .*monitoring\.count_time_limit_s",
    ):
        took_s = [log(monitor, model, step) for step in range(1, 5)]
    monitor.close()
    assert took_s[0] < 0.2 + 3 * Slow.pause_s
    assert max(took_s[1:]) < Slow.pause_s
    assert {row["perf/method"] for row in rows_in(tmp_path)} == {"estimate"}


class HidesErrors(Slow):
    """Makes an error of its own of whatever is raised inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except BaseException:
            raise RuntimeError("the layer failed") from None


def test_a_count_that_ran_out_of_time_is_no_model_that_cannot_be_counted(tmp_path: Path) -> None:
    model = HidesErrors()
    settings = {"monitoring": {"peak_tflops": 1, "count_time_limit_s": 0.1}}
    with TrainingMonitor(tmp_path, settings, model=model) as monitor, pytest.warns(TruemfuWarning):
        log(monitor, model, 1)
    assert [text.partition(",")[0] for text in monitor.summary()["warnings"]] == [
        "counting takes longer than 0.1 s"
    ]


class NotEstimated(nn.Module):
    """Can be counted; its structure tells nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean()


@pytest.mark.parametrize("kind", [Net, NotEstimated])
@pytest.mark.filterwarnings("ignore:the FLOPs cannot be estimated")
def test_a_run_that_ends_before_its_count_says_so(
    kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()
    with monkeypatch.context() as patched:
        patched.setattr(LiveRun, "_can_count", lambda self: False)
        with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
            log(monitor, model, 1)
    summary = monitor.summary()
    assert [note for note in summary["notes"] if "the run ended before its batches were counted" in note]
    assert not [text for text in summary["warnings"] if "counted" in text or "either" in text]
    again = tmp_path / "again"
    with TrainingMonitor(again, {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
        log(monitor, model, 1)
    assert monitor.summary()["notes"] == []


class PerShape(Net):
    """Its work is no closed form: it depends on the number of samples in a way no term describes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            time.sleep(0.01)
        for _ in range(int(x.shape[0] ** 1.37) % 7):
            x = self.one(x)
        return self.two(x).square().mean()


@pytest.mark.filterwarnings("ignore:PerShape has no closed form")
def test_no_row_waits_for_a_count_that_is_put_off(tmp_path: Path) -> None:
    model = PerShape()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    for step in range(1, 101):
        log(monitor, model, step, 2 + step % 97)
    began_s = time.monotonic()
    monitor.save_logs()
    assert time.monotonic() - began_s < 5
    monitor.close()
    assert len(rows_in(tmp_path)) == 100
    assert monitor.summary()["lost"] == []


def test_a_model_that_takes_too_long_holds_the_training_once(tmp_path: Path) -> None:
    model = Slow()
    settings = {"monitoring": {"peak_tflops": 1, "count_time_limit_s": 0.2}}
    monitor = TrainingMonitor(tmp_path, settings, model=model)
    with pytest.warns(TruemfuWarning, match="counting takes longer than"):
        took_s = [log(monitor, model, step, samples=step) for step in range(1, 6)]
    monitor.close()
    assert max(took_s[1:]) < Slow.pause_s


@pytest.mark.filterwarnings("ignore:PerShape has no closed form")
def test_beyond_the_first_three_counts_keep_to_a_share_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    now_s = time.perf_counter
    monkeypatch.setattr("truemfu.monitor.training_side.counts._now_s", lambda: now_s() + ahead_s)
    model = PerShape()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    sizes = [2, 3, 5, 7, 7, 7]
    for step, samples in enumerate(sizes, start=1):
        log(monitor, model, step, samples)
    monitor.save_logs()
    methods = [row["perf/method"] for row in rows_in(tmp_path)]
    assert ["estimate" in method for method in methods] == [False] * 3 + [True] * 3
    ahead_s = 3600.0
    for step in range(7, 10):
        log(monitor, model, step, 7)
    monitor.close()
    rows = rows_in(tmp_path)
    assert not any("estimate" in row["perf/method"] for row in rows[6:])
    truth = count_flops(PerShape(), (torch.ones(7, 8),)).model_flops
    assert round(rows[-1]["perf/mfu"] * rows[-1]["perf/step_time"] * 1e12) == truth
    assert monitor.summary()["monitor_cost"]["counts"] == 4


# Restart


def counts_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    run_counted = closed_form.run_counted

    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(type(model).__name__)
        return run_counted(model, *args, **kwargs)

    monkeypatch.setattr(closed_form, "run_counted", counted)
    return made


def test_a_restart_in_the_same_folder_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counts_made(monkeypatch)
    flops = []
    for run in range(3):
        model = Net()
        with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
            for step in range(3 * run + 1, 3 * run + 4):
                log(monitor, model, step, 4 + run)
        row = rows_in(tmp_path)[-1]
        flops.append(round(row["perf/mfu"] * row["perf/step_time"] * 1e12))
        assert row["perf/method"] == "closed form"
        assert monitor.summary()["monitor_cost"]["counts"] == (1 if run == 0 else 0)
        if run == 0:
            assert made
            made.clear()
    assert not made
    assert flops == [count_flops(Net(), (torch.ones(4 + run, 8),)).model_flops for run in range(3)]


def test_another_model_or_convention_is_counted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counts_made(monkeypatch)
    variants: list[tuple[nn.Module, str]] = [(Net(), "full"), (Net(), "causal"), (Checkpointed(), "full")]
    frozen = Net()
    frozen.one.requires_grad_(False)
    variants.append((frozen, "full"))
    for number, (model, attention) in enumerate(variants):
        made.clear()
        settings = {"monitoring": {"attention": attention}}
        with TrainingMonitor(tmp_path, settings, model=model) as monitor:
            log(monitor, model, number + 1)
        assert made


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1, "entries": 3}', b"\xff" * 99])
def test_a_corrupt_file_of_forms_is_ignored(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed_forms.json").write_bytes(content)
    made = counts_made(monkeypatch)
    model = Net()
    with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
        log(monitor, model, 1)
    assert made
    assert rows_in(tmp_path)[0]["perf/method"] == "closed form"


class SteeredByABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("depth", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(self.depth)):
            x = self.one(x)
        return super().forward(x)


def test_a_count_that_read_the_models_own_values_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = counts_made(monkeypatch)
    for run in range(2):
        made.clear()
        model = SteeredByABuffer()
        with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
            log(monitor, model, run + 1)
        assert made


class WithCounter(Net):
    """Like a BatchNorm in training, which counts its batches in a buffer; `looks`: and reads that."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.register_buffer("batches", torch.tensor(3))
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice = self.batches * 2
        self.batches.add_(1)
        self.batches.add_(self.batches)
        if self.looks:
            assert (int(twice), int(self.batches)) == (6, 8)
        return super().forward(x)


@pytest.mark.parametrize("looks", [True, False])
def test_a_buffer_that_is_only_written_to_is_not_read(looks: bool) -> None:
    model = WithCounter(looks)
    form = closed_form.FlopModel.fit(model, (torch.ones(4, 8),))
    assert form.reads_model_values is looks
    assert int(model.batches) == 3
    assert form((torch.ones(5, 8),)).method == "closed form"


# Rows


def test_a_run_of_one_step_has_its_mfu(tmp_path: Path) -> None:
    model = Net()
    with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
        log(monitor, model, 1)
    assert monitor.summary()["methods"] == {"closed form": 1}
    assert monitor.summary()["warnings"] == []


def test_save_logs_from_another_thread_waits_for_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    monkeypatch.setattr(LiveRun, "_can_count", lambda self: False)
    log(monitor, model, 1)
    thread = threading.Thread(target=monitor.save_logs)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [row["perf/method"] for row in rows_in(tmp_path)] == ["estimate"]
    monkeypatch.undo()
    log(monitor, model, 2)
    monitor.close()
    assert [row["perf/method"] for row in rows_in(tmp_path)] == ["estimate", "closed form"]


def test_closing_in_the_middle_of_a_backward_pass_counts_nothing_there(tmp_path: Path) -> None:
    model = Net()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)

    class Closes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            log_first()
            monitor.close()
            return gradient

    def log_first() -> None:
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)

    Closes.apply(model(torch.ones(4, 8))).backward()
    assert [row["perf/method"] for row in rows_in(tmp_path)] == ["estimate"]


# On a GPU


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_sync_debug_mode("default")


class Pointed(Net):
    """Has to be counted on real copies of its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        return super().forward(x)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:operators that may do matrix work.*data_ptr")
@pytest.mark.parametrize("kind", [Net, SteeredByABuffer, Pointed, Checkpointed])
def test_values_on_the_device_are_never_waited_for(
    kind: type[Net], cuda: torch.device, tmp_path: Path
) -> None:
    model = kind().to(cuda)
    x = torch.ones(4, 8, device=cuda)
    truth = count_flops(model, (x,)).model_flops
    for _ in range(2):  # what the model itself reads, it reads before the mode is set
        model(x).backward()
    torch.cuda.synchronize()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    for step in range(1, 41):
        if kind is not SteeredByABuffer:
            torch.cuda.set_sync_debug_mode("error")
        loss = model(x)
        loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        monitor.log_step(step, 0, loss, 1.0, 1.0)
        torch.cuda.set_sync_debug_mode("default")
        time.sleep(0.01)
    monitor.close()
    rows = rows_in(tmp_path)
    assert {row["perf/method"] for row in rows} == {"closed form"}
    assert [round(row["perf/mfu"] * row["perf/step_time"] * 1e12) for row in rows[1:]] == [truth] * 39
    assert ["data_ptr" in text for text in monitor.summary()["warnings"]] == [True] * (kind is Pointed)


@pytest.mark.gpu
def test_no_count_runs_inside_a_capture(cuda: torch.device, tmp_path: Path) -> None:
    model = Net().to(cuda)
    x = torch.ones(4, 8, device=cuda)
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        model(x)
        assert not monitor._live._can_count()
    assert monitor._live._can_count()
    graph.replay()
    monitor.close()
