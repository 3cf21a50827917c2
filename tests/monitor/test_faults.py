"""What a run can do to its monitor: odd batches, odd values, a process that ends, a disk that fails."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_notes import wait_until_learned
from tests.monitor.training_clock import TrainingClock
from tests.waiting import rows_so_far, wait_until
from torch import nn
from torch.utils.checkpoint import checkpoint

import truemfu.monitor.monitor as monitor_module
import truemfu.monitor.values.sending as sending
from truemfu import TrainingMonitor
from truemfu.errors import TruemfuWarning, UsageError
from truemfu.flops.observe.observation import OBSERVED
from truemfu.monitor.rows import row_thread
from truemfu.monitor.step_flops.known import FORM
from truemfu.trackers.lane import Lane

PEAK = {"monitoring": {"peak_tflops": 10.0}}
WIDTH = 16


class Tokens(nn.Module):
    """One layer over tokens: 3 × 2 × tokens × 16² FLOPs a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor, num_items: int = 1) -> torch.Tensor:
        total: torch.Tensor = self.mix(self.embed(input_ids)).sum()
        return total / num_items


class Whole(Tokens):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch["input_ids"])


def ids(samples: int = 2, length: int = 8) -> torch.Tensor:
    return torch.zeros(samples, length, dtype=torch.long)


def flops(tokens: int) -> int:
    return 3 * 2 * tokens * WIDTH * WIDTH


def rows_in(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    return found


def flops_of(row: dict[str, float]) -> int:
    return round(row["perf/tflops_per_gpu"] * row["perf/step_time"] * 1e12)


def trained(
    folder: Path, model: nn.Module, losses: Sequence[Callable[[], torch.Tensor]], **settings: Any
) -> list[dict[str, Any]]:
    """The log of a run in which step n is the n-th of these."""
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 10.0, **settings}}, model=model)
    for step, loss in enumerate(losses, start=1):
        wait_until_learned(monitor)
        loss().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.save_logs()  # closing gives a count five seconds, which a busy machine may exceed
    monitor.close()
    return rows_in(folder)


def test_a_batch_inside_a_dict_has_its_own_flops(tmp_path: Path) -> None:
    model = Whole()
    lengths = (8, 16, 32)
    rows = trained(tmp_path, model, [partial(model, {"input_ids": ids(2, n)}) for n in lengths])
    assert [flops_of(row) for row in rows] == [flops(2 * n) for n in lengths]


def test_the_graph_behind_a_nested_argument_is_freed(tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(8, 8)

        def forward(self, x: torch.Tensor, state: Any = None) -> Any:
            return self.cell(x, state)

    model = Recurrent()
    monitor = TrainingMonitor(tmp_path, PEAK, model=model)
    first = model(torch.ones(4, 8))
    second = model(torch.ones(4, 8), first)
    second[0].sum().backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    kept = weakref.ref(first[0])
    del first, second
    monitor.save_logs()
    gc.collect()
    try:
        assert kept() is None
    finally:
        monitor.close()


def test_the_graph_behind_a_loss_is_freed(tmp_path: Path) -> None:
    model = Tokens()
    monitor = TrainingMonitor(tmp_path, PEAK, model=model)
    loss = model(ids()) * 2
    loss.backward()
    monitor.log_step(1, 0, loss, loss, 1.0)
    kept = weakref.ref(loss)
    del loss
    gc.collect()
    assert kept() is None
    monitor.close()


@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        True,
    ],
    ids=["non-reentrant", "reentrant"],
)
def test_a_model_that_is_checkpointed_as_a_whole_is_one_micro_batch(tmp_path: Path, reentrant: bool) -> None:
    model, one = Tokens(), torch.ones(1, requires_grad=True)

    def loss() -> torch.Tensor:
        out: torch.Tensor = checkpoint(lambda x, y: model(x) * y, ids(), one, use_reentrant=reentrant)
        return out

    rows = trained(tmp_path, model, [loss] * 6)
    assert [flops_of(row) for row in rows] == [flops(16)] * 6


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="a forward pass that raised is a micro-batch like any other"
)
def test_a_forward_pass_that_failed_is_no_micro_batch(tmp_path: Path) -> None:
    class Small(Tokens):
        full = True

        def forward(self, input_ids: torch.Tensor, num_items: int = 1) -> torch.Tensor:
            if self.full and self.training and input_ids.shape[0] > 2:
                raise RuntimeError("out of memory")
            return super().forward(input_ids, num_items)

    model = Small()

    def loss() -> torch.Tensor:
        try:
            out: torch.Tensor = model(ids(4))
        except RuntimeError:
            out = model(ids(2))
        return out

    rows = trained(tmp_path, model, [lambda: model(ids(2)), loss])
    assert rows[1]["perf/samples_per_second"] * rows[1]["perf/step_time"] == pytest.approx(2)


def test_keywords_beside_any_number_of_arguments_leave_steps_that_were_not_observed_without_mfu(
    tmp_path: Path,
) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, *inputs: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            out = torch.stack([self.mix(x).sum() for x in inputs]).sum()
            return out if scale is None else out * scale.sum()

    model = Many()
    rows = trained(tmp_path, model, [lambda: model(torch.ones(2, 4), scale=torch.ones(2, 4))] * 3)
    assert flops_of(rows[1]) == 2 * 2 * 2 * 4 * 4
    names = ("perf/mfu", "perf/mfu_estimate", "perf/tflops_per_gpu")
    # step 3 is observed if the row thread has reported step 1 as unknown before it begins
    for row in (row for row in rows[::2] if not row.get("perf/observed")):
        assert not any(name in row for name in names)
        assert "positional with keyword arguments" in row["perf/mfu_unknown"]
    assert not rows[0].get("perf/observed")


def test_a_number_that_changes_at_each_step_keeps_no_batch(tmp_path: Path) -> None:
    model = Tokens()
    monitor = TrainingMonitor(tmp_path, PEAK, model=model)
    for step in range(1, 301):
        model(ids(1, 16_384), num_items=step).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.save_logs()
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu"]
    kept = sum(t.nbytes for t in tensors if t.shape == (1, 16_384))
    monitor.close()
    assert kept < 50 * 16_384 * 8


def test_a_number_that_changes_at_each_step_and_not_the_work_is_a_size_like_others(tmp_path: Path) -> None:
    model = Tokens()
    numbers = [100, *(7 * step % 100 for step in range(1, 100))]
    rows = trained(tmp_path, model, [partial(model, ids(), num_items=number) for number in numbers])
    assert {flops_of(row) for row in rows if "perf/tflops_per_gpu" in row} == {flops(16)}
    unknown = [row["global_step"] for row in rows if "perf/tflops_per_gpu" not in row]
    assert len(unknown) < 10, unknown
    run = json.loads((tmp_path / "training_run.json").read_text())
    assert run["summary"]["methods"].keys() == {OBSERVED, FORM}


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("held", [Holder, lambda x: UserDict(x=x), lambda x: [Holder(x)]])
def test_tensors_inside_objects_are_no_count_of_the_first_batch(tmp_path: Path, held: Any) -> None:
    class OfHolder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH)

        def forward(self, data: Any) -> torch.Tensor:
            data = data[0] if isinstance(data, list) else data
            x = data["x"] if isinstance(data, UserDict) else data.x
            return self.mix(x).sum()  # type: ignore[no-any-return]

    model = OfHolder()
    batches = [torch.randn(rows, WIDTH) for rows in (4, 9, 400)]
    kept = weakref.ref(batches[0])
    rows = trained(tmp_path, model, [partial(model, held(batch)) for batch in batches])
    assert not any("perf/samples_per_second" in row for row in rows)
    assert flops_of(rows[1]) == 2 * 2 * 9 * WIDTH * WIDTH  # it was observed
    assert "perf/tflops_per_gpu" not in rows[0]
    if "perf/tflops_per_gpu" in rows[2]:  # observed too, since the first ones were cheap
        assert flops_of(rows[2]) == 2 * 2 * 400 * WIDTH * WIDTH
    for row in rows:
        is_known = "perf/tflops_per_gpu" in row
        assert is_known or "objects that contain tensors" in row["perf/mfu_unknown"]
    del batches
    gc.collect()
    assert kept() is None


def test_a_step_of_too_many_micro_batches_tells_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truemfu.monitor.watching.batch_notes._MAX_NOTES", 3)
    model = Tokens()
    monitor = TrainingMonitor(tmp_path, PEAK, model=model)
    for step in range(1, 4):
        for _ in range(5):
            model(ids()).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    rows = rows_in(tmp_path)
    assert not any("samples" in name or "tokens" in name for row in rows for name in row)
    assert flops_of(rows[1]) == 5 * flops(16)  # it was observed as a whole
    for row in (rows[0], rows[2]):
        assert "perf/mfu" not in row
        assert row["perf/mfu_unknown"].startswith("the step has too many micro-batches")


def test_a_lazy_model_is_counted_from_its_first_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(100, WIDTH), nn.LazyLinear(WIDTH))
    rows = trained(tmp_path, model, [lambda: model(ids()).sum()] * 3)
    assert [flops_of(row) for row in rows] == [flops(16)] * 3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("to_jit", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, WIDTH))])
def test_a_model_that_takes_no_hooks_trains_on(tmp_path: Path, to_jit: Any) -> None:
    model = to_jit(nn.Linear(WIDTH, WIDTH))
    monitor = TrainingMonitor(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)
        monitor.attach(model)
        for step in (1, 2):
            model(torch.ones(2, WIDTH)).sum().backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        monitor.close()
    assert [row["training/loss"] for row in rows_in(tmp_path)] == [1.0, 1.0]


def test_closing_does_not_wait_for_a_training_thread_that_is_stuck_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_BUSY_TIMEOUT_S", 0.2)
    inside, goes_on = threading.Event(), threading.Event()

    class Stuck:
        def __index__(self) -> int:
            inside.set()
            goes_on.wait(60)
            return 4

    model = nn.Linear(WIDTH, WIDTH)
    monitor = TrainingMonitor(tmp_path, model=model)

    def train() -> None:
        for step in (1, 2, 3, Stuck()):
            model(torch.ones(2, WIDTH)).sum().backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)

    training = threading.Thread(target=train)
    training.start()
    closing = threading.Thread(target=monitor.close)
    try:
        assert inside.wait(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruemfuWarning)
            closing.start()
            closing.join(40)
        assert not closing.is_alive()
        assert [row["global_step"] for row in rows_in(tmp_path)] == [1, 2, 3]
        (warning,) = monitor.summary()["warnings"]
        assert "the training thread has not returned from a call of the monitor for 0.2 s" in warning
    finally:
        goes_on.set()
        training.join(60)
    assert not training.is_alive()


def test_a_peak_in_the_environment_that_is_no_number_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "989,4")
    with pytest.raises(UsageError, match="TRUEMFU_PEAK_TFLOPS must be a positive number"):
        TrainingMonitor(tmp_path)


def test_flops_that_cannot_be_worked_out_cost_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("truemfu.monitor.step_flops.source.FlopsSource.of", fails)
    model = Tokens()
    rows = trained(tmp_path, model, [lambda: model(ids())] * 3)
    assert [row["training/loss"] for row in rows] == [1.0] * 3
    reason = "the step's FLOPs could not be computed: RuntimeError: no such luck"
    assert [row["perf/mfu_unknown"] for row in rows] == [reason] * 3


def test_a_log_with_the_name_of_the_runs_own_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"log_file must not be training_run\.json, which holds the"):
        TrainingMonitor(tmp_path, log_file="training_run.json")


def test_a_run_that_changes_its_folder_goes_on_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monitor = TrainingMonitor("out")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert len(rows_in(tmp_path / "out")) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_monitor_made_before_a_fork_logs_where_it_is_used(tmp_path: Path) -> None:
    script = """
        import os, sys
        from truemfu import TrainingMonitor
        for when in ("before", "after"):
            monitor = TrainingMonitor(sys.argv[1] + "/" + when)
            if when == "after":
                print("after", file=sys.stderr, flush=True)
                monitor.log_step(0, 0, 1.0, 1.0, 1.0)
            child = os.fork()
            if not child:
                for step in range(1, 4):
                    monitor.log_step(step, 0, 1.0, 1.0, 1.0)
                monitor.close()
                os._exit(0)
            os.waitpid(child, 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    assert [row["global_step"] for row in rows_in(tmp_path / "before")] == [1, 2, 3]
    assert [row["global_step"] for row in rows_in(tmp_path / "after")] == [0]
    before, _, after = said.partition("after\n")
    assert "forked" not in before
    assert "forked from the monitored one: its steps are not logged" in after


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": torch.ones((), dtype=torch.complex64)},
        {"loss": torch.ones((), device="meta")},
        {"attention_mask": torch.ones(2, 8).to_sparse()},
        {"attention_mask": torch.ones(2, 8, device="meta")},
        {"skip_wandb": torch.ones(3)},
    ],
)
def test_an_odd_value_costs_its_own_figure_alone(tmp_path: Path, arguments: dict[str, Any]) -> None:
    monitor = TrainingMonitor(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)
        for step in range(1, 4):
            given = arguments if step == 2 else {}
            monitor.log_step(
                step, **{"epoch": 0, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, **given}
            )
        monitor.close()
    assert [row["global_step"] for row in rows_in(tmp_path)] == [1, 2, 3]
    assert not monitor._guard.is_broken


def test_steps_that_never_increase_are_one_warning(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    with pytest.warns(TruemfuWarning, match="steps should increase") as caught:
        for step in range(100, 0, -1):
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert len(caught) == 1


def test_a_batch_observed_after_its_forward_pass_counts_once(tmp_path: Path) -> None:
    model = Tokens()
    monitor = TrainingMonitor(tmp_path, PEAK, model=model)
    for step in range(1, 7):
        wait_until_learned(monitor)
        loss = model(ids())
        monitor.observe({"input_ids": ids()})
        loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert [flops_of(row) for row in rows_in(tmp_path)] == [flops(16)] * 6


def test_data_read_in_a_pause_is_not_waited_for(tmp_path: Path, clock: TrainingClock) -> None:
    def slow() -> Iterator[int]:
        clock.sleep(0.2)
        yield 0

    monitor = TrainingMonitor(tmp_path)
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    with monitor.pause():
        list(monitor.data(slow()))
    monitor.log_step(2, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert rows_in(tmp_path)[1].get("perf/data_wait", 0.0) < 0.1


def test_an_evaluation_in_a_profiled_step_is_not_executed_work_of_the_step(tmp_path: Path) -> None:
    model = Tokens()
    monitor = TrainingMonitor(
        tmp_path, {"monitoring": {"peak_tflops": 10.0, "mfu_calculation_mode": "profiler"}}, model=model
    )
    for step in (1, 2, 3, 4):  # the first is profiled, the next ones are observed
        model(ids()).backward()
        with monitor.pause(), torch.no_grad():
            for _ in range(10):
                model(ids())
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    row = rows_in(tmp_path)[-1]
    assert row["perf/hfu"] == pytest.approx(row["perf/mfu"])


def test_a_model_without_products_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "10")

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    model = Scale()
    monitor = TrainingMonitor(tmp_path, model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)
        model(torch.ones(2, 4)).backward()
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
        monitor.close()
    assert [row["training/loss"] for row in rows_in(tmp_path)] == [1.0]


@pytest.mark.parametrize("bad", [{"step": None}, {"step": float("nan")}, {"loss": 10**400}])
def test_one_bad_value_does_not_end_the_log(tmp_path: Path, bad: dict[str, Any]) -> None:
    monitor = TrainingMonitor(tmp_path)
    usual: dict[str, Any] = {"epoch": 0, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0}
    with pytest.warns(TruemfuWarning):
        monitor.log_step(**{"step": 1, **usual, **bad})
    monitor.log_step(step=2, **usual)
    monitor.close()
    assert 2 in [row["global_step"] for row in rows_in(tmp_path)]


@pytest.mark.parametrize(
    "call", [lambda m: m.observe(None), lambda m: m.set_phase("mian")], ids=["observe", "set_phase"]
)
def test_a_wrong_argument_costs_a_warning_and_no_training(
    tmp_path: Path, call: Callable[[TrainingMonitor], None]
) -> None:
    with TrainingMonitor(tmp_path) as monitor, pytest.warns(TruemfuWarning, match="observe|phase") as caught:
        call(monitor)
    assert len(caught) == 1


def test_a_mask_that_is_never_right_is_one_warning(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    with pytest.warns(TruemfuWarning, match="attention_mask is not used") as caught:
        for step in range(1, 5):
            monitor.log_step(step, 0, 1.0, 1.0, 1.0, attention_mask=torch.ones(2, 1, step, step))
    monitor.close()
    assert len(caught) == 1


def test_a_mask_of_another_size_than_the_batch_is_one_warning_and_no_padding(tmp_path: Path) -> None:
    model = Tokens()
    monitor = TrainingMonitor(tmp_path, model=model)
    for step in range(1, 5):
        batch = ids()
        model(batch).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0, attention_mask=torch.ones(2, 100 + step))
    monitor.close()
    summary = monitor.summary()
    (said,) = summary["warnings"]
    assert said == (
        "attention_mask is not used where it does not fit, first at step 1: "
        f"it has 202 positions and the step's micro-batches {batch.numel()} tokens"
    )
    assert summary["padding_lost"] is None


def test_a_run_that_logs_every_tenth_step_sees_its_mfu_in_a_tracker(tmp_path: Path) -> None:
    class Kept:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def start(self, run: Any) -> None: ...
        def log(self, step: int, metrics: Any) -> None:
            self.rows.append(metrics)

        def flush(self) -> None: ...
        def finish(self, summary: Any) -> None: ...

    model, kept = Tokens(), Kept()
    monitor = TrainingMonitor(tmp_path, PEAK, model=model, trackers=[kept])
    for step in range(1, 1001, 10):
        model(ids()).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert sum("perf/mfu" in row for row in kept.rows) >= 2


def test_what_the_count_warns_of_is_in_the_summary(tmp_path: Path) -> None:
    @torch.library.custom_op("truemfu_faults::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    product.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    product.register_autograd(lambda ctx, gradient: (gradient, None))

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = product(self.mix(x), self.weight.detach())
            return out.sum()

    model = Custom()
    monitor = TrainingMonitor(tmp_path, PEAK, model=model)
    with pytest.warns(TruemfuWarning, match="have no formula"):
        model(torch.ones(2, 4)).backward()
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
        monitor.close()
    assert any("have no formula" in text for text in monitor.summary()["warnings"])


def log_steps(monitor: TrainingMonitor, first: int, last: int) -> None:
    for step in range(first, last + 1):
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)


def test_two_monitors_of_one_process_do_not_tear_one_log(tmp_path: Path) -> None:
    first, second = TrainingMonitor(tmp_path), TrainingMonitor(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)
        for step in range(1, 20, 2):
            log_steps(first, step, step + 1)
            first.save_logs()
            log_steps(second, 1000 + step, 1000 + step)
            second.save_logs()
        first.close()
        second.close()
    assert (tmp_path / "training_log.json").read_text().endswith("]\n")
    assert [r["global_step"] for r in rows_in(tmp_path) if r["global_step"] < 1000] == list(range(1, 21))


def test_a_log_that_was_deleted_is_said(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    log_steps(monitor, 1, 3)
    monitor.save_logs()
    (tmp_path / "training_log.json").unlink()
    log_steps(monitor, 4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)
        monitor.close()
    assert (tmp_path / "training_log.json").exists() or monitor.summary()["lost"]


def test_a_full_disk_leaves_a_log_that_loads_and_says_what_was_lost(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"save_freq": 10}})
    log_steps(monitor, 1, 20)
    monitor.save_logs()
    size = (tmp_path / "training_log.json").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        log_steps(monitor, 21, 50)
        with pytest.warns(TruemfuWarning, match="tracker file failed: OSError"):
            monitor.save_logs()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monitor.close()
    assert [row["global_step"] for row in rows_in(tmp_path)] == list(range(1, 21))
    (lost,) = monitor.summary()["lost"]
    assert lost.startswith("30 rows of tracker file: OSError")


@pytest.mark.parametrize("name", ["a/b/log.json", "absolute"])
def test_a_log_may_lie_elsewhere(tmp_path: Path, name: str) -> None:
    wanted = tmp_path / "elsewhere" / "log.json" if name == "absolute" else tmp_path / "out" / name
    monitor = TrainingMonitor(tmp_path / "out", log_file=str(wanted) if name == "absolute" else name)
    log_steps(monitor, 1, 3)
    monitor.close()
    assert len(json.loads(wanted.read_text())) == 3


class Hanging:
    """A tracker that does not come back from one of its methods, until it is let go."""

    def __init__(self, where: str) -> None:
        self.where, self.go, self.rows = where, threading.Event(), 0

    def _in(self, method: str) -> None:
        if method == self.where:
            self.go.wait()

    def start(self, run: Any) -> None:
        self._in("start")

    def log(self, step: int, metrics: Any) -> None:
        self._in("log")
        self.rows += 1

    def flush(self) -> None:
        self._in("flush")

    def finish(self, summary: Any) -> None:
        self._in("finish")


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_trackers_that_hang_cost_nobody_else_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(monitor_module, "_CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(row_thread, "_WAKE_EVERY_S", 0.02)
    hanging, well = Hanging(where), Hanging("nowhere")
    monitor = TrainingMonitor(tmp_path, trackers=[hanging, well])
    log_steps(monitor, 1, 60)
    # a busy machine may need more time than the trackers have at the end
    wait_until(lambda: well.rows == 60 and len(rows_so_far(tmp_path / "training_log.json")) == 60)
    with pytest.warns(TruemfuWarning) as caught:
        monitor.close()
    hanging.go.set()
    assert any("tracker Hanging failed: it did not finish" in str(w.message) for w in caught)
    assert well.rows == len(rows_in(tmp_path)) == 60
    assert any("tracker Hanging" in text for text in monitor.summary()["lost"])


def test_several_trackers_that_hang_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "_CLOSE_TIMEOUT_S", 0.2)
    close, given_s = Lane.close, []

    def noted(lane: Lane, summary: Any, timeout_s: float) -> None:
        given_s.extend([timeout_s] if lane.name == "Hanging" else [])
        close(lane, summary, timeout_s)

    monkeypatch.setattr(Lane, "close", noted)
    hanging = [Hanging("log") for _ in range(4)]
    monitor = TrainingMonitor(tmp_path, trackers=hanging)
    log_steps(monitor, 1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)
        monitor.close()
    for tracker in hanging:
        tracker.go.set()
    assert given_s[0] <= 0.2
    assert given_s[1:] == [0, 0, 0]


def test_monitors_leave_no_thread_hook_or_file_behind(tmp_path: Path) -> None:
    model = Tokens()
    trained(tmp_path / "first", model, [lambda: model(ids())])
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(20):
        trained(tmp_path / str(number), model, [lambda: model(ids())])
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_fork_writes_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    log_steps(monitor, 1, 5)
    with warnings.catch_warnings():  # Python says that a process with threads is forked
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        log_steps(monitor, 100, 105)
        monitor.save_logs()
        monitor.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log_steps(monitor, 6, 8)
    monitor.close()
    assert [row["global_step"] for row in rows_in(tmp_path)] == list(range(1, 9))


LOOP = """
    import os, signal, sys, time
    import torch
    from torch import nn
    from truemfu import TrainingMonitor
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range({layers})])
    monitor = TrainingMonitor({folder!r}, {{"monitoring": {{"peak_tflops": 1, "save_freq": 5}}}}, model=model)
    for step in range(1, 8):
        model(torch.ones(2, 4, 8)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    print("trained", flush=True)
    {end}
"""


def process(folder: Path, end: str, layers: int = 1) -> subprocess.Popen[str]:
    code = textwrap.dedent(LOOP).format(folder=str(folder), end=end, layers=layers)
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    if started.stdout.readline() != "trained\n":
        raise RuntimeError(started.communicate()[1])
    return started


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('of the user')", 1, "ValueError: of the user"),
        ("monitor.save_logs(); raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=["exit 3", "error", "interrupted after saving", "interrupted"],
)
def test_a_process_ends_as_it_would_have_and_its_log_is_whole(
    tmp_path: Path, end: str, code: int, said: str
) -> None:
    ended = process(tmp_path, end)
    errors = ended.communicate(timeout=120)[1]
    assert said in errors
    assert len(rows_in(tmp_path)) == 7
    assert ended.returncode == code


def test_a_killed_process_leaves_a_log_that_loads(tmp_path: Path) -> None:
    ended = process(tmp_path, "monitor.save_logs(); print('saved', flush=True); time.sleep(60)")
    assert ended.stdout is not None
    assert ended.stdout.readline() == "saved\n"
    ended.kill()
    ended.communicate(timeout=60)
    assert [row["global_step"] for row in rows_in(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_process_killed_after_it_counted_has_lost_no_more_than_was_unsaved(tmp_path: Path) -> None:
    ended = process(tmp_path, "time.sleep(600)", layers=80)
    wait_until(lambda: len(rows_so_far(tmp_path / "training_log.json")) >= 5)
    ended.kill()
    ended.communicate(timeout=60)
    assert len(rows_in(tmp_path)) >= 5


def test_a_run_that_ends_while_it_counts_ends_well(tmp_path: Path) -> None:
    """It waits a few seconds for the count, then goes without."""
    ended = process(tmp_path, "pass", layers=80)
    ended.communicate(timeout=200)
    assert ended.returncode == 0
    assert len(rows_in(tmp_path)) == 7


def test_an_impatient_second_interrupt_does_not_abort(tmp_path: Path) -> None:
    ended = process(tmp_path, "raise KeyboardInterrupt", layers=300)
    time.sleep(2)
    ended.send_signal(signal.SIGINT)
    errors = ended.communicate(timeout=200)[1]
    assert "terminate called" not in errors
    assert ended.returncode != -signal.SIGABRT


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
def test_rows_that_are_queued_are_not_lost_where_writing_them_at_once_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, failed = Lane.flush, []

    def fail_once(lane: Lane) -> None:
        if threading.current_thread().name == "truemfu-rows" and lane.name == "file" and not failed:
            failed.append(lane)
            raise SystemExit("from a thread of ours")
        flush(lane)

    monkeypatch.setattr(Lane, "flush", fail_once)
    model = Tokens()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"save_freq": 1}}, model=model)
    for step in range(1, 6):
        loss = model(ids())
        loss.backward()
        monitor.log_step(step, 0, loss, 1.0, 1.0)
    monitor.close()
    assert failed
    rows = json.loads((tmp_path / "training_log.json").read_text())
    assert [row["global_step"] for row in rows] == [1, 2, 3, 4, 5]
    assert monitor.summary()["lost"] == []


def test_no_file_of_the_run_is_touched_on_the_training_thread(tmp_path: Path) -> None:
    touched: list[str] = []
    is_watching = False

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if not is_watching or event not in ("open", "os.rename", "os.remove", "socket.connect"):
            return  # a hook stays for as long as the process
        is_of_the_run = str(tmp_path) in str(args[0]) or event == "socket.connect"
        if is_of_the_run and threading.current_thread() is threading.main_thread():
            touched.append(f"{event} {args}")

    sys.addaudithook(watch)
    model = Tokens()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 10.0, "save_freq": 2}}, model=model)
    for step in range(1, 101):
        is_watching = True
        loss = model(ids())
        is_watching = False
        loss.backward()
        is_watching = True
        monitor.log_step(step, 0, loss, 1.0, 1.0)
        is_watching = False
    monitor.close()
    assert touched == []
    is_watching = True
    (tmp_path / "training_log.json").read_bytes()
    is_watching = False
    assert len(touched) == 1
