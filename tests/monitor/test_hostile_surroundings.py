"""Whatever surrounds a training (stderr, handlers of warnings, odd arguments, two threads), it trains on."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from truemfu import TrainingMonitor, count_flops
from truemfu.errors import UsageError

PEAK = 10e12
CONFIG = {"monitoring": {"peak_tflops": PEAK / 1e12}}
STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return self.one(x).sum()


def rows_in(path: Path) -> list[dict[str, Any]]:
    return json.loads((path / "training_log.json").read_text())


def flops_of(row: dict[str, Any]) -> int | None:
    return None if "perf/mfu" not in row else round(row["perf/mfu"] * row["perf/step_time"] * PEAK)


class Exits(BaseException):
    """Not an Exception."""


class Failing(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no such terminal")

    def isatty(self) -> bool:
        raise OSError("no such terminal")


class Ascii(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", errors="strict")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def raising(kind: type[BaseException]) -> Callable[..., None]:
    def show(*args: Any, **kwargs: Any) -> None:
        raise kind("from a handler of warnings")

    return show


@pytest.fixture(params=["closed", "failing", "ascii", "none", "handler", "handler, not an Exception"])
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        streams = {"closed": closed, "failing": Failing, "ascii": Ascii, "none": lambda: None}
        if request.param in streams:
            monkeypatch.setattr(warnings, "showwarning", _to_stderr)
            monkeypatch.setattr(sys, "stderr", streams[request.param]())
        else:
            kind = Exits if "not" in request.param else ValueError
            monkeypatch.setattr(warnings, "showwarning", raising(kind))
        yield


def _to_stderr(message: Any, *args: Any, **kwargs: Any) -> None:
    sys.stderr.write(f"{message} …\n")


def test_nothing_leaves_a_step_where_warnings_cannot_be_shown(surroundings: None, tmp_path: Path) -> None:
    model = Net()
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    for step in range(1, STEPS + 1):
        model(torch.randn(2, 8), extra=object() if step == 2 else None).backward()
        monitor.log_step(step, "no number", torch.tensor(float("nan")), object(), 1.0)  # type: ignore[arg-type]
    monitor.close()
    assert [row["global_step"] for row in rows_in(tmp_path)] == list(range(1, STEPS + 1))
    assert any("grad_norm is not logged" in text for text in monitor.summary()["warnings"])
    assert monitor.summary()["lost"] == []


class NoDict:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no attributes here")


class NoHash:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")


class NoLength(dict[str, Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no keys")

    def items(self) -> Any:
        raise RuntimeError("no items")

    def values(self) -> Any:
        raise RuntimeError("no values")


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
@pytest.mark.parametrize("make", [NoDict, NoHash, NoLength, itself])
def test_an_odd_argument_costs_its_own_step_the_mfu_at_most(make: Callable[[], Any], tmp_path: Path) -> None:
    model = Net()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        for step in range(1, STEPS + 1):
            model(torch.randn(2, 8), **({"extra": make()} if step == 3 else {})).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    wanted = count_flops(model, (torch.randn(2, 8),)).model_flops
    rows = rows_in(tmp_path)
    assert [row["global_step"] for row in rows] == list(range(1, STEPS + 1))
    assert {flops_of(row) for row in rows if row["global_step"] != 3} == {wanted}
    assert flops_of(rows[2]) in (None, wanted)


class NoInt:
    def __int__(self) -> int:
        raise LookupError("not a number")


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
@pytest.mark.parametrize("step", [NoInt(), 10**400, -(10**400), float("inf"), "three", None])
def test_a_step_that_is_no_number_is_counted_instead(step: Any, tmp_path: Path) -> None:
    model = Net()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        for number in range(1, STEPS + 1):
            model(torch.randn(2, 8)).backward()
            monitor.log_step(step if number == 3 else number, 0, 1.0, 1.0, 1.0)
    assert [row["global_step"] for row in rows_in(tmp_path)] == list(range(1, STEPS + 1))
    assert any("step cannot be read" in text for text in monitor.summary()["warnings"])


@pytest.mark.parametrize("names", [{"output_dir": "a\0b"}, {"output_dir": "a", "log_file": "b\0.json"}])
def test_a_name_no_file_can_have_is_refused(names: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="NUL"):
        TrainingMonitor(**names)  # type: ignore[arg-type]


def test_first_forward_passes_of_two_threads_lose_nothing(tmp_path: Path) -> None:
    for attempt in range(5):
        model, folder = Net(), tmp_path / str(attempt)
        with TrainingMonitor(folder, CONFIG, model=model) as monitor:
            start = threading.Barrier(2)

            def forward(model: nn.Module = model, start: threading.Barrier = start) -> None:
                start.wait()
                model(torch.randn(2, 8)).backward()

            threads = [threading.Thread(target=forward) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for step in range(1, STEPS + 1):
                model(torch.randn(2, 8)).backward()
                monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        assert len(rows_in(folder)) == STEPS
        assert monitor.summary()["lost"] == []


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
@pytest.mark.parametrize("kind", [SystemExit, Exits, ValueError])
def test_what_ends_the_work_on_a_row_is_counted_and_the_next_row_is_written(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    model(torch.randn(2, 8)).backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    monitor.save_logs()
    amounts = monitor._live._rows.reader._counted
    calls: list[int] = []

    def failing_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise kind("in the row's own turn")
        return amounts(*args, **kwargs)

    monkeypatch.setattr(monitor._live._rows.reader, "_counted", failing_once)
    for step in range(2, STEPS + 1):
        model(torch.randn(2, 8)).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert len(rows_in(tmp_path)) == STEPS - 1
    assert monitor.summary()["lost"] == ["1 steps: their metrics could not be computed"]


def test_a_fifo_or_a_link_beside_the_run_file_is_not_written_to(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    os.mkfifo(folder / "training_run.tmp")
    (folder / f"training_run.json.{os.getpid()}.tmp").symlink_to(foreign)
    model = Net()
    with TrainingMonitor(folder, CONFIG, model=model) as monitor:
        model(torch.randn(2, 8)).backward()
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    assert foreign.read_text() == "mine"
    assert json.loads((folder / "training_run.json").read_text())["summary"]["steps"] == 1


@pytest.mark.parametrize("name", ["training_run.tmp", "training_run.json.tmp", "closed_forms.json.tmp"])
def test_a_log_named_like_a_temporary_file_is_kept(name: str, tmp_path: Path) -> None:
    model = Net()
    with TrainingMonitor(tmp_path, CONFIG, log_file=name, model=model) as monitor:
        for step in range(1, STEPS + 1):
            model(torch.randn(2, 8)).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    assert len(json.loads((tmp_path / name).read_text())) == STEPS
    assert json.loads((tmp_path / "training_run.json").read_text())["summary"]["lost"] == []


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
def test_a_log_that_another_program_empties_loads_and_its_rows_are_counted(tmp_path: Path) -> None:
    model = Net()
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    for step in range(1, 2 * STEPS + 1):
        model(torch.randn(2, 8)).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        if step == STEPS:
            monitor.save_logs()
            os.truncate(tmp_path / "training_log.json", 0)
    monitor.close()
    assert [row["global_step"] for row in rows_in(tmp_path)] == list(range(STEPS + 1, 2 * STEPS + 1))
    summary = json.loads((tmp_path / "training_run.json").read_text())["summary"]
    assert summary["lost"] == [
        f"{STEPS} rows that were in training_log.json: it was truncated or overwritten"
    ]
    assert [text for text in summary["warnings"] if f"0 of {STEPS} rows are left in it" in text]
