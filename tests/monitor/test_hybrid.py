"""`hybrid` in a training loop: counters recorded on an H200 are read while a small model trains here."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.waiting import FOREVER_S, wait_until
from torch import nn

from truemfu import TrainingMonitor, count_flops
from truemfu.errors import CounterError, TruemfuWarning
from truemfu.flops.count.step_work import StepWork
from truemfu.hardware.counters import sampler
from truemfu.hardware.counters.executed import executed_flops_per_s
from truemfu.hardware.counters.samples import CounterSample, GpuInfo, GpuProcess
from truemfu.hardware.counters.trace import Replay
from truemfu.hardware.detect import find_spec
from truemfu.hardware.nsight.audited import read_audit
from truemfu.monitor import live_run
from truemfu.monitor.hybrid import hardware_watch
from truemfu.monitor.hybrid.hardware_watch import Cut, HardwareWatch
from truemfu.monitor.hybrid.hardware_windows import HardwareWindows
from truemfu.monitor.hybrid.step_detail import detail_of
from truemfu.monitor.summary import lines_of
from truemfu.records import RunHardware, RunSummary, WaterfallPart, WaterfallRecord
from truemfu.sweep.worker.models import build_reference_model

TRACE = Path(__file__).parent.parent / "hardware" / "traces" / "h200_training.jsonl"
AUDIT = Path(__file__).parent / "audit.json"
CLOCK_HZ = 1716e6
H200 = find_spec("NVIDIA H200", None)
STEP_S = 0.01


class Driven:
    """A watch whose time passes when the test says so, and with it the reads of its counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, period_s: float, source: Any = None) -> None:
        self._now_s, self._period_s, self._read_s = 1000.0, period_s, 0.0
        for module in (hardware_watch, sampler):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock))
        monkeypatch.setattr(sampler.Sampler, "start", lambda _: None)
        self.source = (source or Live)(clock=self.clock)
        stamps: Any = Stamps(self.clock)
        self.watch = HardwareWatch(self.source, 0, stamps, sm_count=132)

    def clock(self) -> float:
        return self._now_s

    def pass_s(self, seconds: float) -> None:
        """The sampler's thread reads in every period, and when it was asked to."""
        ends_s, asked = self._now_s + seconds, self.watch._sampler
        while self._now_s < ends_s:
            self._now_s += 0.01
            is_asked = asked._extra_s is not None and asked._extra_s <= self._now_s
            if is_asked:
                asked._extra_s = None
            if is_asked or self._now_s >= self._read_s + self._period_s:
                asked.poll()
                self._read_s = self._now_s


class Live:
    """The fresh samples of a trace over and over, as if they were read now; energy goes on at 500 W."""

    def __init__(
        self,
        change: Callable[[CounterSample], CounterSample] = lambda sample: sample,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, replay = clock, Replay(TRACE)
        self._gpus = replay.gpus()
        samples = []
        while True:
            try:
                samples.append(replay.read(0))
            except CounterError:
                break
        self._samples = itertools.cycle([s for s in samples if s.fresh and s.hmma_active])
        self._change = change
        self.is_closed = False
        self.fault: str | None = None

    def gpus(self) -> Sequence[GpuInfo]:
        return self._gpus

    def read(self, index: int) -> CounterSample:
        if self.fault is not None:
            raise CounterError(self.fault)
        now_s = self._clock()
        return self._change(
            msgspec.structs.replace(next(self._samples), at_s=now_s, energy_j=500 * now_s, processes=None)
        )

    def close(self) -> None:
        self.is_closed = True


class Stamps:
    """Cycle stamps of a chip that runs at `CLOCK_HZ`, on a timer of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def take(self) -> Any:
        now_s = self._clock() + 1000.0
        reading = (int(now_s * CLOCK_HZ), int(now_s * 1e9))
        return SimpleNamespace(by_sm=lambda: {0: reading}, time_s=lambda: now_s)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return build_reference_model("tiny", dtype=torch.bfloat16)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Live]:
    """Puts counters under the monitors that are made from now on."""
    monkeypatch.setattr(hardware_watch, "WINDOW_S", 0.3)
    monkeypatch.setattr(hardware_watch, "SETTLE_S", 0.0)
    monkeypatch.setattr(live_run, "spec_of", lambda device: H200)

    def put(source: Live | None = None, stamps: Any = None) -> Live:
        source = source or Live()

        def opened(device: torch.device, notice: Callable[[str], None]) -> HardwareWatch:
            return HardwareWatch(source, 0, stamps or Stamps(), sm_count=132, period_s=0.02)

        monkeypatch.setattr(live_run, "open_watch", opened)
        return source

    return put


def settings(**monitoring: Any) -> dict[str, Any]:
    """Without a recorded step, which tests/monitor/test_census_step.py is about: these count steps."""
    own = {"mfu_calculation_mode": "hybrid", "detailed_log_freq": 1, "census": False}
    return {"monitoring": {**own, **monitoring}}


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(64).reshape(2, 32)
    return {"input_ids": tokens, "labels": tokens}


def step(monitor: TrainingMonitor, model: nn.Module, number: int) -> None:
    loss = model(**batch()).loss
    loss.backward()
    time.sleep(STEP_S)
    monitor.log_step(number, 0, loss.detach(), 1.0, 1e-3)


def train(monitor: TrainingMonitor, model: nn.Module, until: Callable[[], bool], first: int = 0) -> int:
    """Steps until something has come about, however busy the machine is; the number of the next."""
    ends_s = time.monotonic() + FOREVER_S
    for number in itertools.count(first):
        step(monitor, model, number)
        monitor.save_logs()
        if until():
            return number + 1
        assert time.monotonic() < ends_s, monitor.summary()
    raise AssertionError


def has_windows(monitor: TrainingMonitor, number: int = 2) -> Callable[[], bool]:
    """Whether there are this many windows by now, with a row after the last."""

    def enough() -> bool:
        hardware = monitor.summary()["hardware"]
        return hardware is not None and hardware["windows"] >= number

    return enough


def warned(monitor: TrainingMonitor) -> list[str]:
    warnings: list[str] = monitor.summary()["warnings"]
    return warnings


def rows_in(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text())
    return rows


def quietly(work: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)
        return work()


def run_to_the_end(monitor: TrainingMonitor, model: nn.Module) -> None:
    """Two windows and the closing words; what the monitor warns of is in its summary."""
    quietly(lambda: train(monitor, model, has_windows(monitor)))
    quietly(monitor.close)


def test_a_run_tells_what_the_silicon_executed(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    counters()
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    run_to_the_end(monitor, model)
    hardware = monitor.summary()["hardware"]
    assert hardware["windows"] >= 2
    assert hardware["clock_hz"] == pytest.approx(CLOCK_HZ, rel=1e-6)
    assert hardware["clock_source"] == "cycle counters"
    assert hardware["reported_clock_hz"] > hardware["clock_hz"]
    assert hardware["power_w"] == pytest.approx(500, rel=0.02)
    steps_s = [row["perf/step_time"] for row in rows_in(tmp_path)]
    assert min(steps_s) < hardware["energy_j_per_step"] / hardware["power_w"] < max(steps_s)
    assert hardware["energy_j_per_million_tokens"] == pytest.approx(
        hardware["energy_j_per_step"] / 64 * 1e6, rel=1e-6
    )
    assert hardware["executed_flops_per_s"] == pytest.approx(
        hardware["tensor_active"] * 132 * 4096 * CLOCK_HZ, rel=0.01
    )
    assert hardware["executed_hfu"] == pytest.approx(hardware["executed_flops_per_s"] / 900e12)
    assert sum(part["share"] for part in hardware["waterfall"]["parts"]) == pytest.approx(1)
    rows = rows_in(tmp_path)
    told = [row for row in rows if "perf/executed_tflops_per_gpu" in row]
    assert told
    assert {"perf/loss/useful", "perf/power_w", "perf/executed_over_counted"} <= set(told[-1])
    assert told[-1]["perf/hfu_method"] == "hardware counters (upper bound: no audit)"
    assert "perf/hfu_method" not in rows[0]


def test_mfu_stays_the_count_and_hfu_follows_the_counters(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    counters()
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    run_to_the_end(monitor, model)
    count = count_flops(model, batch())
    for row in rows_in(tmp_path):
        assert row["perf/mfu"] * 900e12 * row["perf/step_time"] == pytest.approx(count.model_flops)
        executed = row["perf/hfu"] * 900e12 * row["perf/step_time"]
        ratio = row.get("perf/executed_over_counted", 1.0)
        assert executed == pytest.approx(count.hardware_flops * ratio)


def test_the_waterfall_starts_at_the_datasheet_and_names_a_power_limit(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    from truemfu.monitor.step_flops import source

    monkeypatch.setattr(source, "ideal_flops_per_s", lambda *_: (989.4e12, "datasheet: NVIDIA H200"))
    counters(Live(lambda sample: msgspec.structs.replace(sample, throttle_reasons=("power_limit",))))
    monitor = TrainingMonitor(tmp_path, settings(), model=model)
    run_to_the_end(monitor, model)
    fall = monitor.summary()["hardware"]["waterfall"]
    shares = {part["key"]: part["share"] for part in fall["parts"]}
    assert shares["clock"] == pytest.approx(1 - CLOCK_HZ / 1830e6, abs=0.001)
    assert fall["throttle_reasons"] == ("power_limit",)
    assert {"idle", "no_tensor", "useful"} <= set(shares)
    assert {"perf/loss/clock", "perf/loss/idle"} <= set(rows_in(tmp_path)[-1])


def test_without_cycle_counters_the_clock_is_the_drivers_and_says_so(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    counters(stamps=SimpleNamespace(take=lambda: None))
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    run_to_the_end(monitor, model)
    hardware = monitor.summary()["hardware"]
    assert hardware["clock_source"] == "driver"
    assert hardware["clock_hz"] == hardware["reported_clock_hz"]


def test_a_pause_ends_no_window(model: nn.Module, tmp_path: Path, counters: Callable[..., Live]) -> None:
    counters()
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    for number in range(12):
        step(monitor, model, number)
        with monitor.pause():
            time.sleep(0.03)
    quietly(monitor.close)
    assert monitor.summary()["hardware"] is None


def test_counters_that_fail_in_the_middle_leave_the_count(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    source = counters()
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    number = quietly(lambda: train(monitor, model, has_windows(monitor, 1)))
    source.fault = "GPU is lost"
    quietly(lambda: train(monitor, model, lambda: any("any more" in t for t in warned(monitor)), number))
    quietly(monitor.close)
    (said,) = [text for text in warned(monitor) if "any more" in text]
    assert (
        said == "the hardware counters cannot be read any more, so HFU no longer comes from them: GPU is lost"
    )
    assert monitor.summary()["hardware"]["windows"] >= 1
    rows = rows_in(tmp_path)
    assert "perf/hfu_method" not in rows[-1]
    assert len(rows) == monitor.summary()["steps"]


def test_a_disagreement_is_said_once_with_a_likely_cause(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    own = GpuProcess(pid=os.getpid())
    both = (own, GpuProcess(pid=1, name="other"))
    counters(Live(lambda sample: msgspec.structs.replace(sample, processes=both)))
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    quietly(lambda: train(monitor, model, has_windows(monitor, 4)))
    quietly(monitor.close)
    (said,) = [text for text in warned(monitor) if "times what the count expects" in text]
    assert said.startswith("hybrid mode: the GPU executed at most ")
    assert "another process uses this GPU (process 1)" in said


@pytest.mark.parametrize(
    ("hybrid", "left"),
    [
        ({}, 1.0),
        ({"audit": AUDIT}, 0.75),
    ],
)
def test_an_audit_corrects_what_activity_reads(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], hybrid: dict[str, Any], left: float
) -> None:
    counters()
    given = {"performance_monitoring": {"hybrid_mode": hybrid}}
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900, **given), model=model)
    run_to_the_end(monitor, model)
    hardware = monitor.summary()["hardware"]
    assert hardware["executed_flops_per_s"] == pytest.approx(
        left * hardware["tensor_active"] * 132 * 4096 * CLOCK_HZ, rel=0.01
    )
    assert hardware["executed_over_activity"] == (left if hybrid else None)
    method = "corrected by an audit" if hybrid else "upper bound: no audit"
    assert monitor.summary()["hfu_method"] == f"hardware counters ({method})"
    rows = [row for row in rows_in(tmp_path) if "perf/executed_hfu" in row]
    assert rows
    assert {row.get("perf/executed_over_activity") for row in rows} == {left if hybrid else None}
    assert rows[-1]["perf/hfu_method"] == f"hardware counters ({method})"
    words = dict(lines_of(monitor.summary()))["executed, by counters"]
    assert ("(upper bound: no audit)" in words) is not bool(hybrid)
    notes = " ".join(hardware["waterfall"]["notes"])
    assert ("executed FLOPs are an upper bound without an audit" in notes) is not bool(hybrid)
    assert ("`truemfu audit --json -- python train.py > audit.json`" in notes) is not bool(hybrid)


def test_an_audit_in_other_dtypes_sets_the_rate(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    """The audit's ratio is over the rate of what was executed: tf32 does half of bf16 in a cycle."""
    audit = tmp_path / "audit.json"
    executed = {"bf16": 1, "tf32": 1}  # two of three cycles are tf32: 2/3 of the rate of bf16
    audit.write_text(json.dumps({**json.loads(AUDIT.read_text()), "executed_by_dtype": executed}))
    counters()
    given = {"performance_monitoring": {"hybrid_mode": {"audit": audit}}}
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900, **given), model=model)
    run_to_the_end(monitor, model)
    hardware = monitor.summary()["hardware"]
    assert hardware["executed_flops_per_s"] == pytest.approx(
        0.75 * 2 / 3 * hardware["tensor_active"] * 132 * 4096 * CLOCK_HZ, rel=0.01
    )


def test_audited_tiles_come_before_the_models(model: nn.Module) -> None:
    sizes = {("bf16", (64, 1000, 64)): 8_192_000, ("bf16", (128, 128, 64)): 2_097_152}
    work = StepWork(products=sizes, attention=0, attention_blocked=0, other=0)
    count = count_flops(model, batch())
    tiles = read_audit(AUDIT).tile_factors()
    with_audit, without = (detail_of(count, work, (9, 0), 132, known).tile_factor for known in (tiles, {}))
    assert with_audit == pytest.approx((9_830_400 + 2_097_152) / (8_192_000 + 2_097_152))
    assert without == pytest.approx((8_192_000 * 1.024 + 2_097_152) / (8_192_000 + 2_097_152))


def test_the_closing_words_say_where_the_peak_went(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], capsys: pytest.CaptureFixture[str]
) -> None:
    counters()
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    run_to_the_end(monitor, model)
    words = capsys.readouterr().err
    assert "executed, by counters" in words
    assert "clock 1,716 MHz by cycle counters" in words
    assert "500 W" in words
    lines = re.findall(r"where the peak went +(.*)", words)
    assert re.match(
        r"the parts are means over what the counters measured \(\d+ windows?, \d+ steps", lines[0]
    )
    assert "MFU is the median of all steps" in lines[0]
    assert sum(float(line.split(" %")[0]) for line in lines[1:]) == pytest.approx(100, abs=0.05 * len(lines))


@pytest.mark.parametrize(("small", "shown"), [((-0.004, 0.002), "-0.2"), ((0.002, -0.002), None)])
def test_parts_too_small_for_a_line_are_one_line(small: tuple[float, float], shown: str | None) -> None:
    shares = [0.5, *small]
    parts = [WaterfallPart(key=str(share), name="part", share=share) for share in shares]
    useful = WaterfallPart(key="useful", name="the model's FLOPs", share=1 - sum(shares))
    fall = WaterfallRecord(parts=[*parts, useful])
    summary = RunSummary(hardware=RunHardware(waterfall=fall))
    lines = [
        text.split(" %")
        for label, text in lines_of(msgspec.to_builtins(summary))
        if label.startswith("where")
    ]
    assert [name.strip() for _, name in lines] == [
        "part",
        *(["smaller parts together"] if shown else []),
        useful.name,
    ]
    assert sum(float(share) for share, _ in lines) == pytest.approx(100, abs=0.05 * len(lines))
    if shown:
        assert lines[1][0].strip() == shown


def test_switched_off_counters_are_not_opened(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(device: torch.device, notice: Callable[[str], None]) -> HardwareWatch:
        raise AssertionError("opened")

    monkeypatch.setattr(live_run, "open_watch", opened)
    off = {"performance_monitoring": {"hybrid_mode": {"hardware_counters_enabled": False}}}
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900, **off), model=model)
    for number in range(6):
        step(monitor, model, number)
    monitor.close()
    assert monitor.summary()["hardware"] is None
    assert rows_in(tmp_path)[-1]["perf/hfu_method"] == "profiler"


def test_on_a_cpu_the_profiler_takes_over_and_it_is_said(model: nn.Module, tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    with pytest.warns(TruemfuWarning, match=r"no hardware counters \(.*on cpu\).*torch.profiler"):
        for number in range(6):
            step(monitor, model, number)
    monitor.close()
    assert rows_in(tmp_path)[-1]["perf/hfu_method"] == "profiler"


@pytest.mark.parametrize("has_counters", [True, False])
def test_the_mode_auto_is_hybrid_where_there_are_counters(
    has_counters: bool, counters: Callable[..., Live], model: nn.Module, tmp_path: Path
) -> None:
    """The default of `truemfu run`; without counters nothing is said of them on a CPU."""
    if has_counters:
        counters()
    monitor = TrainingMonitor(tmp_path, settings(mfu_calculation_mode="auto", peak_tflops=900), model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(monitor, model, lambda: monitor.summary()["hardware"] is not None or not has_counters)
    monitor.close()
    assert monitor.summary()["mode"] == ("hybrid" if has_counters else "smart")
    assert (monitor.summary()["hardware"] is not None) == has_counters
    assert not any("counters" in note for note in monitor.summary()["notes"])


def test_the_mode_auto_is_smart_on_a_chip_without_a_rate(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    counters()
    monkeypatch.setattr(live_run, "spec_of", lambda device: None)
    monitor = TrainingMonitor(tmp_path, settings(mfu_calculation_mode="auto", peak_tflops=900), model=model)
    for number in range(4):
        step(monitor, model, number)
    monitor.close()
    assert (monitor.summary()["mode"], monitor.summary()["hardware"]) == ("smart", None)


def test_mfu_of_the_measured_peak_stands_beside(model: nn.Module, tmp_path: Path) -> None:
    given = {"monitoring": {"peak_tflops": 900, "measured_peak_tflops": 600}}
    monitor = TrainingMonitor(tmp_path, given, model=model)
    for number in range(6):
        step(monitor, model, number)
    monitor.close()
    for row in rows_in(tmp_path):
        assert row["perf/mfu_of_measured_peak"] == pytest.approx(1.5 * row["perf/mfu"])


def test_a_window_is_of_the_time_between_its_cuts(
    counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(monkeypatch, period_s=0.02)
    watch = driven.watch
    driven.pass_s(0.5)
    begin = watch.cut(0.0)
    driven.pass_s(0.5)
    assert watch.cut(0.1) is None
    end = watch.cut(0.5)
    assert begin is not None
    assert end is not None
    assert not begin.ends_window
    assert end.ends_window
    measured = watch.measured(begin, end)
    watch.close()
    assert driven.source.is_closed
    assert measured is not None
    # but for the last read, which is up to a period old, and for the lag that is taken off
    assert 0.4 < measured.window.seconds <= end.at_s - begin.at_s
    assert executed_flops_per_s(measured.window, H200, clock_hz=measured.clock_hz) is not None


def test_a_window_begins_when_steps_have_followed_each_other_for_a_while() -> None:
    """A read a moment after a pause tells of the pause as well, which would make the window look idle."""
    stamps: Any = Stamps()
    watch = HardwareWatch(Live(), 0, stamps, sm_count=132, period_s=0.02)
    settle_s, window_s = hardware_watch.SETTLE_S, hardware_watch.WINDOW_S
    assert settle_s > 1.0  # more than a read apart
    assert watch.cut(100.0) is None
    assert watch.cut(100.0 + 0.9 * settle_s) is None
    begin = watch.cut(100.0 + settle_s)
    assert begin is not None
    assert not begin.ends_window
    watch.restart()
    assert watch.cut(200.0) is None
    begin, end = watch.cut(200.0 + settle_s), watch.cut(200.0 + settle_s + window_s)
    watch.close()
    assert begin is not None
    assert end is not None
    assert [begin.ends_window, end.ends_window] == [False, True]


def test_a_pause_and_an_observed_step_are_followed_by_the_wait_for_a_window(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the monitor itself, with seconds that the test deals out."""
    counters()
    monkeypatch.setattr(hardware_watch, "SETTLE_S", 2.0)
    monkeypatch.setattr(hardware_watch, "WINDOW_S", 10.0)
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900, flops_profile_freq=0), model=model)
    step(monitor, model, 0)
    monitor.save_logs()
    monitor._live._rows.reader._hardware = None  # a window that ends would have the step counted by shape
    watch: Any = monitor._live.steps._instruments.counters
    asked_at_s, cuts = 0.0, []
    real_cut = watch.cut

    def cut(now_s: float) -> Any:
        cuts.append(found := real_cut(asked_at_s))
        return found

    watch.cut = cut

    def at(seconds: float) -> str:
        nonlocal asked_at_s
        asked_at_s, before = seconds, len(cuts)
        step(monitor, model, round(seconds) + 1)
        if len(cuts) == before:
            return "not asked"
        return "no" if cuts[-1] is None else "end" if cuts[-1].ends_window else "begin"

    assert [at(s) for s in (0, 1)] == ["not asked"] * 2  # warm-up
    assert [at(s) for s in (2, 3, 4, 13, 14, 24)] == ["no", "no", "begin", "no", "end", "end"]
    with monitor.pause():
        pass
    assert [at(s) for s in (25, 26, 27)] == ["no", "no", "begin"]
    monitor._live.steps.watch.plan.ask("the step after this one is observed")
    assert at(40) == "end"
    monitor._live.steps.watch.plan._reason = None  # and no other
    assert [at(s) for s in (41, 42, 43, 44, 54)] == ["not asked", "no", "no", "begin", "end"]
    quietly(monitor.close)


def test_counters_that_cannot_be_opened_leave_the_profiler(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(device: torch.device, notice: Callable[[str], None]) -> HardwareWatch:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(live_run, "open_watch", opened)
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    quietly(lambda: [step(monitor, model, number) for number in range(6)])
    monitor.close()
    assert any("no hardware counters (RuntimeError: no such thing)" in text for text in warned(monitor))
    assert rows_in(tmp_path)[-1]["perf/hfu_method"] == "profiler"


def test_counters_that_do_not_close_lose_no_row(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = counters()

    def close() -> None:
        raise OSError("driver gone")

    monkeypatch.setattr(source, "close", close)
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    quietly(lambda: [step(monitor, model, number) for number in range(6)])
    quietly(monitor.close)
    assert len(rows_in(tmp_path)) == 6
    assert any("could not be closed: OSError: driver gone" in text for text in warned(monitor))


def test_a_chip_without_a_rate_has_energy_and_the_profiler(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    counters()
    monkeypatch.setattr(live_run, "spec_of", lambda device: None)
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    run_to_the_end(monitor, model)
    hardware = monitor.summary()["hardware"]
    assert hardware["executed_flops_per_s"] is None
    assert hardware["energy_j_per_step"] is not None
    assert any("the FLOP per cycle of " in text for text in warned(monitor))
    assert rows_in(tmp_path)[-1]["perf/hfu_method"] == "profiler"


def test_the_median_hfu_is_of_one_method(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    counters()
    monitor = TrainingMonitor(tmp_path, settings(peak_tflops=900), model=model)
    run_to_the_end(monitor, model)
    summary = monitor.summary()
    assert summary["hfu_method"] == "hardware counters (upper bound: no audit)"
    by_counters = [row["perf/hfu"] for row in rows_in(tmp_path) if "perf/hfu_method" in row]
    assert min(by_counters) <= summary["median_hfu"] <= max(by_counters)


def test_a_window_is_told_when_it_was_read_to_its_end(
    counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(monkeypatch, period_s=0.3)
    watch = driven.watch
    driven.pass_s(0.7)
    begin = watch.cut(0.0)
    driven.pass_s(0.4)
    end = watch.cut(10.0)
    assert begin is not None
    assert end is not None
    assert not watch.has_read_past(end)  # one will come in a moment
    driven.pass_s(0.3)
    assert watch.has_read_past(end)
    measured = watch.measured(begin, end)
    assert measured is not None
    assert measured.window.seconds == pytest.approx(end.at_s - begin.at_s, abs=0.02)
    driven.source.fault = "GPU is lost"
    driven.pass_s(0.7)
    end = watch.cut(20.0)
    assert end is not None
    assert watch.has_read_past(end)  # no read will come
    watch.close()


class Uneven(Live):
    """A GPU whose tensor pipe is active as much of the time as `active` says from now on."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self._since_s = self._read_s = clock()
        self._active_s, self._active = 0.0, 0.9

    def become(self, active: float) -> None:
        self._take_in(self._clock())
        self._active = active

    def read(self, index: int) -> CounterSample:
        sample = super().read(index)
        self._take_in(sample.at_s)
        share = self._active_s / (sample.at_s - self._read_s)
        self._read_s, self._active_s = sample.at_s, 0.0
        return msgspec.structs.replace(sample, hmma_active=share)

    def _take_in(self, now_s: float) -> None:
        self._active_s += self._active * (now_s - self._since_s)
        self._since_s = now_s


def test_a_window_of_an_uneven_run_is_its_own(
    counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads once a minute would share it out by time; one at each cut tells what was before and after."""
    driven = Driven(monkeypatch, period_s=60, source=Uneven)
    watch, source = driven.watch, driven.source
    driven.pass_s(0.5)
    begin = watch.cut(0.0)
    source.become(0.1)
    driven.pass_s(1.0)
    end = watch.cut(10.0)
    source.become(0.9)
    driven.pass_s(0.3)
    assert begin is not None
    assert end is not None
    assert watch.has_read_past(end)
    measured = watch.measured(begin, end)
    watch.close()
    assert measured is not None
    assert measured.window.seconds == pytest.approx(end.at_s - begin.at_s, abs=0.05)
    assert measured.window.hmma_active == pytest.approx(0.1, abs=0.1)


@pytest.fixture
def last_read(counters: Callable[..., Live]) -> Iterator[tuple[HardwareWatch, float]]:
    """A watch that reads no more, and when it last did."""
    stamps: Any = Stamps()
    watch = HardwareWatch(Live(), 0, stamps, sm_count=132, period_s=0.02)
    wait_until(lambda: watch._sampler.intervals(0))
    watch._sampler.stop()
    yield watch, watch._sampler.intervals(0)[-1].end_s
    watch.close()


def test_a_read_tells_of_a_moment_before_it(last_read: tuple[HardwareWatch, float]) -> None:
    watch, read_s = last_read
    assert watch.has_read_past(Cut(read_s - 0.06, None, True))
    assert not watch.has_read_past(Cut(read_s - 0.04, None, True))


def test_a_cut_that_waited_in_the_queue_is_read_past_later(last_read: tuple[HardwareWatch, float]) -> None:
    watch, read_s = last_read

    def cut(at_s: float, gpu_s: float) -> Cut:
        stamp: Any = SimpleNamespace(time_s=lambda: 1000.0 + gpu_s)
        return Cut(at_s, stamp, True)

    prompt, late = cut(read_s - 5.0, read_s - 5.0), cut(read_s - 1.0, read_s + 0.5)
    assert watch.has_read_past(prompt)
    assert not watch.has_read_past(late)


def test_a_read_that_does_not_come_is_not_waited_for_long(
    last_read: tuple[HardwareWatch, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, read_s = last_read
    hour_ahead: Any = SimpleNamespace(time_s=lambda: read_s + 4600.0)  # a timer of the GPU that was set
    watch.has_read_past(Cut(read_s, SimpleNamespace(time_s=lambda: read_s + 1000.0), True))  # type: ignore[arg-type]
    cut = Cut(read_s + 1.0, hour_ahead, True)
    assert not watch.has_read_past(cut)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 3.1)
    assert watch.has_read_past(cut)


def train_until(monitor: TrainingMonitor, model: nn.Module, has_come: Callable[[], object]) -> None:
    """Train until something has come about, with a row thread that is always awake."""
    deadline_s = time.monotonic() + FOREVER_S
    while not has_come():
        step(monitor, model, 0 if monitor._live is None else monitor._live.steps.logged)
        monitor._live._row_thread._wake.set()
        assert time.monotonic() < deadline_s


def test_rows_wait_for_the_end_of_their_window_and_whoever_asks_does_not(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Cut] = []
    monkeypatch.setattr(HardwareWindows, "can_take", lambda self, cut: asked.append(cut))
    counters()
    with TrainingMonitor(tmp_path, settings(), model=model) as monitor:
        train_until(monitor, model, lambda: asked)
        assert monitor._live._rows.queue.oldest() is not None  # the oldest step, which waits
        monitor.save_logs()
        assert monitor._live._rows.queue.oldest() is None


def test_counters_that_break_while_rows_wait_are_left_out_and_rows_come(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Cut] = []

    def broken(self: HardwareWatch, cut: Cut) -> bool:
        asked.append(cut)
        raise RuntimeError("no such place")

    monkeypatch.setattr(HardwareWatch, "has_read_past", broken)
    counters()
    with (
        pytest.warns(TruemfuWarning, match="ignored from now on: RuntimeError: no such place"),
        TrainingMonitor(tmp_path, settings(), model=model) as monitor,
    ):
        train_until(monitor, model, lambda: asked)
        before = monitor._live._rows.queue.finished
        train_until(monitor, model, lambda: monitor._live._rows.queue.finished > before + 20)
    assert len(asked) == 1


def test_a_clock_that_fails_once_ends_nothing(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live]
) -> None:
    monitor = TrainingMonitor(tmp_path, {}, model=model)
    step(monitor, model, 0)
    monitor.save_logs()
    clock, failures = monitor._live.steps._clock.clock, iter([RuntimeError("capture")])

    def has_passed(mark: float) -> bool:
        for failure in failures:
            raise failure
        return True

    clock.has_passed = has_passed  # type: ignore[method-assign,assignment]
    with pytest.warns(TruemfuWarning, match="steps cannot be processed: RuntimeError: capture"):
        step(monitor, model, 1)
        monitor.save_logs()
    assert len(rows_in(tmp_path)) == 2
    monitor.close()


def test_a_clock_that_fails_for_good_holds_nobody_up(
    model: nn.Module, tmp_path: Path, counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (
        "_SAVE_TIMEOUT_S",
        "_CLOSE_TIMEOUT_S",
    ):  # who waits until then, waits too long for this test
        monkeypatch.setattr(f"truemfu.monitor.monitor.{limit}", 10_000.0)
    monitor = TrainingMonitor(tmp_path, {}, model=model)
    step(monitor, model, 0)
    monitor.save_logs()

    def has_passed(mark: float) -> bool:
        raise RuntimeError("CUDA error")

    monitor._live.steps._clock.clock.has_passed = has_passed  # type: ignore[method-assign,assignment]
    with pytest.warns(TruemfuWarning) as caught:
        step(monitor, model, 1)
        monitor.save_logs()
        monitor.close()
    assert [str(warning.message) for warning in caught] == [
        "steps cannot be processed: RuntimeError: CUDA error",
        "some steps were not processed in time and are not saved yet",
        "the last steps were not processed in time and are lost",
    ]


def test_too_little_of_a_window_is_none(
    counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(monkeypatch, period_s=0.02)
    begin = driven.watch.cut(0.0)
    driven.pass_s(0.2)
    driven.source.fault = "GPU is lost"
    driven.pass_s(0.4)
    end = driven.watch.cut(10.0)
    assert begin is not None
    assert end is not None
    assert driven.watch.measured(begin, end) is None
    driven.watch.close()


def test_the_least_lag_holds_for_both_ends_of_the_first_window(
    counters: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stamp waited two seconds in the queue, the second none: the window began when it ran."""
    asked: list[tuple[float, float]] = []

    def between(parts: Any, begin_s: float, end_s: float) -> None:
        asked.append((begin_s, end_s))

    monkeypatch.setattr(hardware_watch, "between", between)
    stamps: Any = Stamps()
    watch = HardwareWatch(Live(), 0, stamps, sm_count=132, period_s=0.02)
    late, prompt = (
        Cut(at_s, SimpleNamespace(time_s=lambda gpu_s=gpu_s: gpu_s), True)  # type: ignore[arg-type,misc]
        for at_s, gpu_s in ((10.0, 112.0), (20.0, 120.0))
    )
    assert watch.measured(late, prompt) is None
    watch.close()
    assert asked == [(12.0, 20.0)]
