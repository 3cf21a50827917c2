"""Counter values: what intervals add up to, what is nonsense, what a trace gives back, what NVML is asked."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from truemfu.errors import CounterError, RecordError, ReplayEnded, TruemfuWarning
from truemfu.hardware import nvml as nvml_module
from truemfu.hardware.counter_trace import Recorder, Replay
from truemfu.hardware.counter_windows import combine, executed_flops_per_s, interval_of, within
from truemfu.hardware.counters import (
    ACTIVITIES,
    CounterSample,
    CounterWindow,
    Cycles,
    GpuInfo,
    GpuProcess,
    find_gpu,
)
from truemfu.hardware.nvml import NvmlSource
from truemfu.hardware.specs import DEVICES

TRACES = Path(__file__).parent / "traces"
GPU = GpuInfo(index=0, name="NVIDIA H200", uuid="GPU-1234-AB", max_sm_clock_hz=1980e6)
H200 = next(spec for spec in DEVICES if spec.key == "h200")


def sample(at_s: float = 1.0, **values: Any) -> CounterSample:
    return CounterSample(index=0, at_s=at_s, **values)


def part(begin_s: float, seconds: float, **values: Any) -> CounterWindow:
    return CounterWindow(index=0, begin_s=begin_s, end_s=begin_s + seconds, seconds=seconds, **values)


# Intervals


def test_an_interval_is_what_lies_between_two_samples() -> None:
    before = sample(10.0, sm_clock_hz=1000e6, power_w=100.0, energy_j=500.0, throttle_reasons=())
    after = sample(
        12.0,
        tensor_active=0.5,
        sm_clock_hz=2000e6,
        power_w=300.0,
        energy_j=900.0,
        throttle_reasons=("power_limit",),
        gpu_utilisation=1.0,
        memory_used_bytes=7,
    )
    interval = interval_of(before, after, GPU)
    assert (interval.begin_s, interval.end_s, interval.seconds) == (10.0, 12.0, 2.0)
    assert interval.tensor_active == 0.5
    assert interval.sm_clock_hz == 1500e6
    assert interval.max_sm_clock_hz == 1980e6
    assert (interval.power_w, interval.energy_j) == (200.0, 400.0)
    assert interval.throttle == {"power_limit": 0.5}
    assert interval.memory_used_bytes == 7


def test_what_is_not_known_stays_none() -> None:
    interval = interval_of(sample(1.0), sample(2.0), GPU)
    known = {name for name in interval.__struct_fields__ if getattr(interval, name) is not None}
    assert known == {"index", "begin_s", "end_s", "seconds", "intervals", "max_sm_clock_hz"}


@pytest.mark.parametrize("name", [*ACTIVITIES, "gpu_utilisation"])
@pytest.mark.parametrize("value", [math.nan, 1.01, -0.01, math.inf])
def test_a_share_that_is_none_is_nonsense(name: str, value: float) -> None:
    with pytest.raises(CounterError, match=f"nonsense: {name}"):
        interval_of(sample(1.0), sample(2.0, **{name: value}), GPU)


@pytest.mark.parametrize("name", ["power_w", "energy_j", "sm_clock_hz"])
@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
def test_impossible_amounts_are_nonsense(name: str, value: float) -> None:
    for before, after in (
        (sample(1.0), sample(2.0, **{name: value})),
        (sample(1.0, **{name: value}), sample(2.0)),
    ):
        with pytest.raises(CounterError, match="nonsense"):
            interval_of(before, after, GPU)


def test_a_bad_share_spoils_its_own_interval_alone() -> None:
    assert (
        interval_of(sample(1.0, tensor_active=9.0), sample(2.0, tensor_active=0.1), GPU).tensor_active == 0.1
    )


@pytest.mark.parametrize("later_s", [1.0, 0.5, math.nan])
def test_time_must_go_on(later_s: float) -> None:
    with pytest.raises(CounterError, match="time"):
        interval_of(sample(1.0), sample(later_s), GPU)


def test_an_energy_counter_that_starts_again_is_no_gain() -> None:
    with pytest.raises(CounterError, match="energy counter went backwards by 90 J"):
        interval_of(sample(1.0, energy_j=100.0), sample(2.0, energy_j=10.0), GPU)


# Windows


def test_no_intervals_are_no_window() -> None:
    assert combine([]) is None


def test_activities_are_weighted_with_cycles_so_that_the_work_adds_up() -> None:
    slow = part(0.0, 1.0, hmma_active=0.9, sm_clock_hz=1000e6)
    fast = part(1.0, 3.0, hmma_active=0.1, sm_clock_hz=2000e6)
    both = combine([slow, fast])
    assert both is not None
    assert both.sm_clock_hz == (1000e6 + 3 * 2000e6) / 4
    assert both.hmma_active == pytest.approx((0.9 * 1 + 0.1 * 6) / 7)
    work = [executed_flops_per_s(window, H200) or math.nan for window in (slow, fast, both)]
    assert work[2] * 4 == pytest.approx(work[0] * 1 + work[1] * 3)


def test_memory_activity_and_unknown_clocks_are_weighted_with_time() -> None:
    clocks = combine(
        [part(0.0, 1.0, dram_active=0.8, sm_clock_hz=1e9), part(1.0, 3.0, dram_active=0.4, sm_clock_hz=2e9)]
    )
    assert clocks is not None
    assert clocks.dram_active == pytest.approx(0.5)
    unknown = combine([part(0.0, 1.0, hmma_active=0.8, sm_clock_hz=1e9), part(1.0, 3.0, hmma_active=0.4)])
    assert unknown is not None
    assert unknown.hmma_active == pytest.approx(0.5)


def test_windows_sum_energy_and_keep_the_last_known_of_what_is_a_state() -> None:
    process = GpuProcess(pid=1, name="python", memory_bytes=5)
    both = combine(
        [
            part(0.0, 1.0, energy_j=10.0, throttle={"power_limit": 1.0}, processes=(process,), power_w=100.0),
            part(
                1.0, 3.0, energy_j=20.0, throttle={}, memory_used_bytes=5, power_w=200.0, gpu_utilisation=1.0
            ),
        ]
    )
    assert both is not None
    assert both.energy_j == 30.0
    assert both.throttle == {"power_limit": 0.25}
    assert both.processes == (process,)
    assert both.memory_used_bytes == 5
    assert both.power_w == 175.0
    assert both.gpu_utilisation == 1.0
    assert both.intervals == 2


def test_energy_with_a_hole_is_unknown_and_a_dropped_interval_shortens_the_seconds() -> None:
    hole = combine([part(0.0, 1.0, energy_j=10.0), part(1.0, 1.0)])
    assert hole is not None
    assert hole.energy_j is None
    gap = combine([part(0.0, 1.0, energy_j=10.0), part(2.0, 1.0, energy_j=5.0)])
    assert gap is not None
    assert (gap.end_s - gap.begin_s, gap.seconds, gap.energy_j) == (3.0, 2.0, 15.0)


def test_windows_leave_out_what_leaks_in_from_before() -> None:
    parts = [part(tenth / 10, 0.1, hmma_active=float(tenth >= 11)) for tenth in range(30)]
    trimmed = within(parts, 1.0, 2.5)
    assert trimmed is not None
    assert trimmed.begin_s == pytest.approx(1.1)
    assert trimmed.end_s == pytest.approx(2.5)
    assert trimmed.hmma_active == pytest.approx(1.0)
    untrimmed = within(parts, 1.0, 2.5, lag_s=0.0)
    assert untrimmed is not None
    assert untrimmed.intervals == 15
    assert within(parts, 1.0, 1.15) is None


# Executed FLOP/s


def test_executed_is_activity_times_sms_times_rate_times_clock() -> None:
    window = part(0.0, 1.0, hmma_active=0.93, tensor_active=0.94, sm_clock_hz=1335e6)
    assert executed_flops_per_s(window, H200) == pytest.approx(0.93 * 132 * 4096 * 1335e6)


@pytest.mark.parametrize(("dtype", "factor"), [("bf16", 1.0), ("fp16", 1.0), ("fp8", 2.0), ("tf32", 0.5)])
def test_the_rate_in_a_cycle_follows_the_dtype(dtype: str, factor: float) -> None:
    window = part(0.0, 1.0, hmma_active=0.5, sm_clock_hz=1e9)
    assert executed_flops_per_s(window, H200, dtype) == pytest.approx(
        factor * 0.5 * 132 * 4096 * 1e9, rel=1e-4
    )


def test_any_tensor_activity_stands_for_a_pipe_that_is_not_known() -> None:
    window = part(0.0, 1.0, tensor_active=0.5, sm_clock_hz=1e9)
    assert executed_flops_per_s(window, H200) == 0.5 * 132 * 4096 * 1e9


@pytest.mark.parametrize(
    ("values", "spec", "dtype"),
    [
        ({"sm_clock_hz": 1e9}, H200, None),
        ({"hmma_active": 0.5}, H200, None),
        ({"hmma_active": 0.5, "sm_clock_hz": 1e9}, None, None),
        ({"hmma_active": 0.5, "sm_clock_hz": 1e9}, H200, "fp32"),
        ({"hmma_active": 0.5, "sm_clock_hz": 1e9}, replace(H200, tensor_flops_per_cycle_per_sm=None), None),
    ],
)
def test_executed_is_none_where_a_part_is_unknown(
    values: dict[str, float], spec: Any, dtype: str | None
) -> None:
    assert executed_flops_per_s(part(0.0, 1.0, **values), spec, dtype) is None


@pytest.mark.parametrize("summed_over", [1, 132])
def test_raw_cycles_need_no_clock_whichever_way_they_are_summed(summed_over: int) -> None:
    cycles = Cycles(elapsed=1.1e9 * summed_over, hmma=0.55e9 * summed_over)
    window = part(0.0, 1.0, hmma_active=0.5, sm_clock_hz=1e9, cycles=cycles)
    assert executed_flops_per_s(window, H200) == pytest.approx(0.55e9 * 132 * 4096)


@pytest.mark.parametrize(
    "cycles", [Cycles(elapsed=1e9, hmma=0.9e9), Cycles(elapsed=9e9, hmma=4.5e9), Cycles(elapsed=1e9)]
)
def test_raw_cycles_that_disagree_are_left_alone(cycles: Cycles) -> None:
    window = part(0.0, 1.0, hmma_active=0.5, sm_clock_hz=1e9, cycles=cycles)
    assert executed_flops_per_s(window, H200) == 0.5 * 132 * 4096 * 1e9


def test_raw_cycles_are_counted_between_samples_and_added_in_windows() -> None:
    counts = [Cycles(elapsed=100.0 * n, hmma=30.0 * n) for n in (1, 2, 3)]
    samples = [sample(float(n), cycles=count) for n, count in enumerate(counts)]
    parts = [interval_of(a, b, GPU) for a, b in pairwise(samples)]
    assert parts[0].cycles == Cycles(elapsed=100.0, hmma=30.0)
    both = combine(parts)
    assert both is not None
    assert both.cycles == Cycles(elapsed=200.0, hmma=60.0)


def test_raw_cycles_that_do_not_grow_are_not_taken() -> None:
    back = interval_of(sample(1.0, cycles=Cycles(elapsed=9.0)), sample(2.0, cycles=Cycles(elapsed=1.0)), GPU)
    assert back.cycles is None


def test_a_gpu_is_found_by_the_uuid_torch_prints() -> None:
    assert find_gpu([GPU], "1234-ab") is GPU
    assert find_gpu([GPU], "GPU-1234-ab") is GPU
    assert find_gpu([GPU], "other") is None


# Traces


def test_a_trace_gives_back_what_was_read(tmp_path: Path) -> None:
    original = Replay(TRACES / "trouble_made_up.jsonl")
    recorder = Recorder(original, tmp_path / "copy.jsonl")
    first = read_all(recorder)
    recorder.close()
    copy = Replay(tmp_path / "copy.jsonl")
    assert copy.gpus() == original.gpus()
    assert read_all(copy) == first
    assert sum(isinstance(entry, str) for entry in first) == 2


def read_all(source: Recorder | Replay) -> list[CounterSample | str]:
    entries: list[CounterSample | str] = []
    while True:
        try:
            entries.append(source.read(0))
        except ReplayEnded:
            return entries
        except CounterError as problem:
            entries.append(str(problem))


def test_the_recorded_gpus_are_read_independently() -> None:
    replay = Replay(TRACES / "h200_made_up.jsonl")
    assert [gpu.index for gpu in replay.gpus()] == [0, 1]
    ones = [replay.read(1) for _ in range(8)]
    assert {entry.index for entry in ones} == {1}
    assert replay.read(0).at_s == 1000.0
    with pytest.raises(ReplayEnded, match="no more samples of GPU 1"):
        replay.read(1)


def test_a_trace_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    text = (TRACES / "a100_no_gpm_made_up.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(text[:-40])
    assert len(read_all(Replay(tmp_path / "cut.jsonl"))) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the trace"),
        ("", "got no header"),
        ("no json\n", "line 1: no counter trace"),
        ('{"kind":"gpus","version":9,"gpus":[]}\n', "got version 9"),
        ('{"kind":"sample","index":0,"at_s":1.0}\n', "got no header"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecordError, match=message) as caught:
        Replay(path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_ends_the_recording_and_not_the_reading(tmp_path: Path) -> None:
    recorder = Recorder(Replay(TRACES / "h200_made_up.jsonl"), tmp_path / "trace.jsonl")

    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    recorder._file = Full()
    with pytest.warns(TruemfuWarning, match="ends here: No space left"):
        assert recorder.read(0).at_s == 1000.0
    assert recorder.read(0).at_s == 1001.0


def test_a_trace_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(CounterError, match="cannot write the trace"):
        Recorder(Replay(TRACES / "h200_made_up.jsonl"), tmp_path / "no" / "trace.jsonl")


# NVML


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INVALID_ARGUMENT, GPU_IS_LOST = 3, 4, 6, 2, 15


class FakeNvml:
    """What stands for the module `pynvml`: one H200. `errors` maps a call to the error it raises."""

    NVMLError = FakeNvmlError
    NVML_CLOCK_SM = 1
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, **errors: int) -> None:
        self.errors = errors
        self.calls: list[str] = []
        self.ticks = 0
        self.freed = 0
        self.cycles = False
        self.mig = 0
        self.gpm = 1

    def _answer(self, name: str, value: Any) -> Any:
        self.calls.append(name)
        if name in self.errors:
            raise FakeNvmlError(self.errors[name])
        return value

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetClockInfo": 1335,
            "nvmlDeviceGetPowerUsage": 688_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=1000, used=300),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=100),
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=200)],
            "nvmlSystemGetProcessName": "/usr/bin/python3 train.py",
            "nvmlDeviceGetMigMode": [self.mig, self.mig],
            "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=self.gpm),
            "nvmlGpmSampleAlloc": SimpleNamespace(tick=0),
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, answers[name])

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(300)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmSampleGet(self, handle: Any, into: Any) -> None:
        self._answer("nvmlGpmSampleGet", None)
        self.ticks += 1
        into.tick = self.ticks

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        assert request.sample2.tick == request.sample1.tick + 1, "the samples are compared in their order"
        raw = request.metrics[0].metricId == 248
        self._answer("raw" if raw else "nvmlGpmMetricsGet", None)
        for place in range(request.numMetrics):
            metric = request.metrics[place]
            metric.value = 1e9 * self.ticks if raw else float(metric.metricId)
            metric.nvmlReturn = INVALID_ARGUMENT if raw and not self.cycles else 0

    def nvmlGpmSampleFree(self, handle: Any) -> None:
        self.freed += 1


def source_of(nvml: FakeNvml) -> NvmlSource:
    ticks = iter(range(100))
    return NvmlSource(nvml=nvml, clock=lambda: float(next(ticks)))


def test_nvml_tells_everything_in_base_units() -> None:
    source = source_of(FakeNvml())
    assert list(source.gpus()) == [
        GpuInfo(
            index=0,
            name="NVIDIA H200",
            uuid="GPU-1",
            memory_total_bytes=1000,
            max_sm_clock_hz=1980e6,
            driver="580.1",
        )
    ]
    first, second = source.read(0), source.read(0)
    assert all(getattr(first, name) is None for name in ACTIVITIES)
    assert second == CounterSample(
        index=0,
        at_s=1.0,
        sm_clock_hz=1335e6,
        power_w=688.0,
        power_limit_w=700.0,
        energy_j=5000.0,
        memory_used_bytes=300,
        gpu_utilisation=1.0,
        throttle_reasons=("power_limit",),
        processes=(GpuProcess(pid=7, name="python3", memory_bytes=200),),
        graphics_active=0.01,
        sm_active=0.02,
        sm_occupancy=0.03,
        integer_active=0.04,
        tensor_active=0.05,
        dfma_active=0.06,
        hmma_active=0.07,
        dmma_active=0.08,
        imma_active=0.09,
        dram_active=0.1,
        fp64_active=0.11,
        fp32_active=0.12,
        fp16_active=0.13,
    )


def test_raw_cycles_are_asked_for_once_where_the_driver_has_none() -> None:
    nvml = FakeNvml()
    source = source_of(nvml)
    assert [source.read(0).cycles for _ in range(4)] == [None] * 4
    assert nvml.calls.count("raw") == 1
    refusing = FakeNvml(raw=INVALID_ARGUMENT)
    source = source_of(refusing)
    assert [source.read(0).cycles for _ in range(4)] == [None] * 4
    assert refusing.calls.count("raw") == 1


def test_raw_cycles_are_read_where_the_driver_has_them() -> None:
    nvml = FakeNvml()
    nvml.cycles = True
    source = source_of(nvml)
    source.read(0)
    cycles = source.read(0).cycles
    assert cycles is not None
    assert (cycles.elapsed, cycles.hmma) == (2e9, 2e9)


def test_a_lost_gpu_fails_the_read_and_no_interval_spans_it() -> None:
    nvml = FakeNvml()
    source = source_of(nvml)
    source.read(0)
    nvml.errors["nvmlGpmSampleGet"] = GPU_IS_LOST
    with pytest.raises(CounterError, match=r"GPU 0 \(NVIDIA H200\): the activity counters: NVML error 15"):
        source.read(0)
    del nvml.errors["nvmlGpmSampleGet"]
    assert source.read(0).tensor_active is None
    assert source.read(0).tensor_active == 0.05


def test_trouble_after_the_counters_starts_them_anew_too() -> None:
    nvml = FakeNvml()
    source = source_of(nvml)
    source.read(0)
    nvml.errors["nvmlDeviceGetClockInfo"] = GPU_IS_LOST
    with pytest.raises(CounterError, match="clock: NVML error 15"):
        source.read(0)
    nvml.errors.clear()
    assert source.read(0).tensor_active is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpm": 0}, "this GPU has no GPM"),
        ({"mig": 1}, "MIG is on"),
        ({"errors": {"nvmlGpmQueryDeviceSupport": 13}}, "GPM of driver 580.1: NVML error 13"),
        ({"errors": {"nvmlGpmSampleAlloc": NO_PERMISSION}}, "may not read GPM counters"),
    ],
)
def test_without_gpm_the_rest_is_still_there_and_the_reason_is_one_line(change: Any, reason: str) -> None:
    nvml = FakeNvml()
    for name, value in change.items():
        setattr(nvml, name, value)
    source = source_of(nvml)
    said = source.gpus()[0].no_gpm_reason
    assert said is not None
    assert reason in said
    assert "\n" not in said
    source.read(0)
    second = source.read(0)
    assert second.tensor_active is None
    assert (second.power_w, second.gpu_utilisation, second.sm_clock_hz) == (688.0, 1.0, 1335e6)


def test_permission_lost_later_ends_the_activity_alone() -> None:
    nvml = FakeNvml()
    source = source_of(nvml)
    source.read(0)
    nvml.errors["nvmlGpmSampleGet"] = NO_PERMISSION
    assert source.read(0).power_w == 688.0
    assert "may not read" in (source.gpus()[0].no_gpm_reason or "")
    assert source.read(0).tensor_active is None


def test_samples_that_cannot_be_compared_fail_one_read() -> None:
    nvml = FakeNvml()
    source = source_of(nvml)
    assert [source.read(0).tensor_active for _ in range(2)] == [None, 0.05]
    nvml.errors["nvmlGpmMetricsGet"] = INVALID_ARGUMENT
    with pytest.raises(CounterError, match="the activity counters"):
        source.read(0)
    nvml.errors.clear()
    assert [source.read(0).tensor_active for _ in range(2)] == [None, 0.05]
    never = source_of(FakeNvml(nvmlGpmMetricsGet=INVALID_ARGUMENT))
    assert [never.read(0).power_w for _ in range(3)] == [688.0] * 3
    assert never.gpus()[0].no_gpm_reason is not None


def test_closing_frees_and_ends_the_reading() -> None:
    nvml = FakeNvml()
    source = source_of(nvml)
    source.read(0)
    source.close()
    source.close()
    assert nvml.freed == 2
    assert nvml.calls.count("nvmlShutdown") == 1
    with pytest.raises(CounterError, match="closed"):
        source.read(0)


def test_a_driver_that_will_not_close_is_a_warning() -> None:
    source = source_of(FakeNvml(nvmlShutdown=GPU_IS_LOST))
    with pytest.warns(TruemfuWarning, match="NVML did not close: NVML error 15"):
        source.close()


def test_closing_does_not_wait_for_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_module, "_CLOSE_S", 0.01)
    nvml = FakeNvml()
    source = source_of(nvml)
    with source._reading:
        source.close()
    assert (nvml.freed, nvml.calls.count("nvmlShutdown")) == (0, 0)


def test_what_is_not_supported_is_none_and_asked_for_once() -> None:
    nvml = FakeNvml(
        nvmlDeviceGetTotalEnergyConsumption=NOT_SUPPORTED, nvmlDeviceGetUtilizationRates=NOT_SUPPORTED
    )
    source = source_of(nvml)
    reads = [source.read(0) for _ in range(3)]
    assert [read.energy_j for read in reads] == [None] * 3
    assert [read.gpu_utilisation for read in reads] == [None] * 3
    assert nvml.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 1


def test_older_drivers_call_the_throttle_reasons_otherwise() -> None:
    nvml = FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=13)
    assert source_of(nvml).read(0).throttle_reasons == ("thermal_limit",)


def test_a_process_whose_name_is_hidden_is_known_by_its_number() -> None:
    source = source_of(FakeNvml(nvmlSystemGetProcessName=NOT_FOUND))
    assert source.read(0).processes == (GpuProcess(pid=7, name=None, memory_bytes=200),)


def test_slow_values_are_not_asked_for_at_every_read() -> None:
    nvml = FakeNvml()
    ticks = iter(n / 10 for n in range(100))
    source = NvmlSource(nvml=nvml, clock=lambda: next(ticks))
    reads = [source.read(0) for _ in range(20)]
    assert nvml.calls.count("nvmlDeviceGetComputeRunningProcesses") == 3
    assert nvml.calls.count("nvmlSystemGetProcessName") == 1
    assert {read.memory_used_bytes for read in reads} == {300}


def test_a_gpu_that_cannot_be_opened_leaves_the_others() -> None:
    nvml = FakeNvml(nvmlDeviceGetHandleByIndex=GPU_IS_LOST)
    source = source_of(nvml)
    with pytest.raises(CounterError, match="GPU 0 cannot be opened"):
        source.read(0)


def test_no_driver_and_no_module_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CounterError, match="NVML cannot be opened"):
        NvmlSource(nvml=FakeNvml(nvmlInit=12))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(CounterError, match=r"pip install 'truemfu\[nvidia\]'"):
        NvmlSource()


def test_the_real_module_has_every_name_we_call() -> None:
    pynvml = pytest.importorskip("pynvml")
    text = Path(nvml_module.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r"nvml\.((?:nvml|NVML|c_nvml)\w+)", text))
    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []
    metric = pynvml.c_nvmlGpmMetricsGet_t().metrics[0]
    assert {"metricId", "nvmlReturn", "value"} <= {field[0] for field in metric._fields_}


def test_samples_survive_their_own_json() -> None:
    one = Replay(TRACES / "h200_made_up.jsonl").read(0)
    assert msgspec.json.decode(msgspec.json.encode(one), type=CounterSample) == one
