"""The door to the driver: what it asks NVML for, what it makes of the answers, what it survives."""

from __future__ import annotations

import ast
import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hardware.fake_nvml import (
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    STEADY,
    UNKNOWN_ERROR,
    FakeNvml,
)
from tests.hardware.recorded import EVERY_50_MS, MATMUL, played, rows_of, says_nothing, window_of

import truemfu
from truemfu.errors import CounterError, TruemfuWarning
from truemfu.hardware.counters import gpm as gpm_module
from truemfu.hardware.counters import nvml as nvml_module
from truemfu.hardware.counters.nvml import NvmlSource
from truemfu.hardware.counters.sampler import Sampler
from truemfu.hardware.counters.samples import ACTIVITIES, CounterSample, GpuInfo, GpuProcess


def source_of(nvml: FakeNvml, every_s: float = 1.0) -> NvmlSource:
    ticks = iter(range(1000))
    return NvmlSource(nvml=nvml, clock=lambda: next(ticks) * every_s)


def playing(path: Path, **options: Any) -> tuple[FakeNvml, Sampler]:
    """A driver that does what a trace says, read to the end through the door."""
    nvml = FakeNvml(rows=rows_of(path))
    sampler = Sampler(NvmlSource(nvml=nvml, clock=nvml.clock, **options), keep=1000)
    for _ in nvml.rows:
        assert sampler.poll()
    return nvml, sampler


def test_nvml_tells_everything_in_base_units() -> None:
    source = source_of(FakeNvml())
    assert list(source.gpus()) == [
        GpuInfo(
            index=0,
            name="NVIDIA H200",
            uuid="GPU-0",
            memory_total_bytes=150754820096,
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


def test_names_are_texts_where_an_older_module_has_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda handle: b"NVIDIA H200", raising=False)
    assert [gpu.name for gpu in source_of(nvml).gpus()] == ["NVIDIA H200"]


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
    assert cycles.elapsed == 2e9


# Reads that find nothing new


def test_a_read_within_one_renewal_says_so_and_nothing_else() -> None:
    nvml = FakeNvml()
    source = source_of(nvml, every_s=0.05)
    assert [source.read(0).fresh for _ in range(2)] == [True, True]
    nvml.stands_still = True
    assert source.read(0) == CounterSample(index=0, at_s=0.1, fresh=False)
    nvml.stands_still = False
    assert source.read(0).tensor_active == 0.05, "compared with the last sample that was new"


def test_the_recorded_reads_between_renewals_cost_nothing() -> None:
    nvml, sampler = playing(EVERY_50_MS)
    fresh = [row for row in nvml.rows if not says_nothing(row)]
    assert (len(nvml.rows), len(fresh)) == (73, 38)
    intervals = sampler.intervals(0)
    assert [(part.begin_s, part.end_s) for part in intervals] == [
        (before.at_s, after.at_s) for before, after in pairwise(fresh)
    ]
    for part, row in zip(intervals, fresh[1:], strict=True):
        for name in ACTIVITIES:
            assert getattr(part, name) == pytest.approx(getattr(row, name), rel=1e-12), name
    health = sampler.health(0)
    assert (health.intervals, health.dropped, health.fault) == (37, 0, None)
    assert sum(part.seconds for part in intervals) == pytest.approx(fresh[-1].at_s - fresh[0].at_s)


def test_an_idle_gpu_is_fresh() -> None:
    row = rows_of(MATMUL)[5]
    assert (row.tensor_active, row.sm_active) == (0.0, 0.0)
    assert 0 < (row.dram_active or 0) < 1e-4
    source = source_of(FakeNvml(rows=[row]))
    source.read(0)
    assert source.read(0).fresh


def test_counters_that_stand_still_are_unknown_and_the_rest_is_there() -> None:
    nvml = FakeNvml()
    source = source_of(nvml)
    source.read(0)
    nvml.stands_still = True
    second = source.read(0)
    assert (second.fresh, second.tensor_active, second.power_w) == (True, None, 688.0)
    source.read(0)
    assert source.gpus()[0].no_gpm_reason == "no activity counters: unchanged for 2.0 s"
    nvml.stands_still = False
    assert source.read(0).tensor_active == 0.05
    assert source.gpus()[0].no_gpm_reason is None


def test_nan_among_other_shares_is_nonsense_and_no_standstill() -> None:
    nvml = FakeNvml(rows=[STEADY, msgspec.structs.replace(STEADY, dram_active=math.nan)])
    sampler = Sampler(source_of(nvml))
    for _ in range(2):
        sampler.poll()
    assert (
        sampler.health(0).fault
        == "the counters returned an impossible value: dram_active is nan, which is not a share"
    )
    sampler.poll()
    assert (sampler.health(0).intervals, sampler.health(0).dropped) == (1, 1)


# Energy


def test_energy_is_read_about_once_a_second_and_adds_up_exactly() -> None:
    nvml, sampler = playing(MATMUL)
    assert nvml.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 6
    again = FakeNvml(rows=nvml.rows)
    source = NvmlSource(nvml=again, clock=again.clock)
    readings = [read for read in (source.read(0) for _ in nvml.rows) if read.energy_j is not None]
    assert len(readings) == 6
    known = [part for part in sampler.intervals(0) if part.energy_j is not None]
    assert (known[0].begin_s, known[-1].end_s) == (readings[0].at_s, readings[-1].at_s)
    used_j = (readings[-1].energy_j or 0.0) - (readings[0].energy_j or 0.0)
    assert sum(part.energy_j or 0.0 for part in known) == pytest.approx(used_j, rel=1e-12)


@pytest.mark.parametrize("end_s", [51.4, 51.7, 52.0, 52.3])
def test_a_window_has_the_energy_of_its_own_time_wherever_the_readings_fall(end_s: float) -> None:
    _, sampler = playing(MATMUL)
    sparse, dense = (window_of(each, 49.2, end_s) for each in (sampler, played(MATMUL)))
    assert sparse is not None
    assert dense is not None
    assert sparse.energy_j == pytest.approx(dense.energy_j, rel=0.01)
    assert (sparse.energy_j or 0.0) / sparse.seconds == pytest.approx(sparse.power_w, rel=0.03)


def test_energy_is_not_read_for_whoever_does_not_want_it() -> None:
    nvml, sampler = playing(MATMUL, energy=False)
    assert nvml.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 0
    assert {part.energy_j for part in sampler.intervals(0)} == {None}
    assert sampler.intervals(0)[-1].memory_used_bytes == nvml.rows[-1].memory_used_bytes


def test_after_trouble_the_energy_is_read_at_once() -> None:
    nvml = FakeNvml()
    source = source_of(nvml, every_s=0.3)
    assert [source.read(0).energy_j for _ in range(2)] == [5000.0, None]
    nvml.errors["nvmlDeviceGetPowerUsage"] = GPU_IS_LOST
    with pytest.raises(CounterError):
        source.read(0)
    nvml.errors.clear()
    assert source.read(0).energy_j == 5000.0


# Trouble


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("nvmlGpmSampleGet", "the activity counters"),
        ("nvmlGpmMetricsGet", "the activity counters"),
        ("nvmlDeviceGetClockInfo", "clock"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy"),
        ("nvmlDeviceGetComputeRunningProcesses", "processes"),
    ],
)
@pytest.mark.parametrize("error", [GPU_IS_LOST, UNKNOWN_ERROR])
def test_a_driver_error_costs_two_intervals_wherever_it_comes(call: str, what: str, error: int) -> None:
    nvml = FakeNvml()
    sampler = Sampler(source_of(nvml))
    for _ in range(3):
        sampler.poll()
    nvml.errors[call] = error
    sampler.poll()
    health = sampler.health(0)
    assert health.fault == f"GPU 0 (NVIDIA H200): {what}: NVML error {error}"
    assert sampler.latest(0) is None
    del nvml.errors[call]
    for _ in range(3):
        sampler.poll()
    assert [(part.begin_s, part.end_s) for part in sampler.intervals(0)] == [(0, 1), (1, 2), (4, 5), (5, 6)]
    assert (sampler.health(0).dropped, sampler.health(0).fault) == (1, None)


def test_one_gpu_off_the_bus_leaves_the_others() -> None:
    nvml = FakeNvml(gpus=3)
    sampler = Sampler(NvmlSource(nvml=nvml))
    sampler.poll()

    def lose_the_second(reads: int) -> None:
        nvml.errors = {"nvmlGpmSampleGet": GPU_IS_LOST} if reads % 3 == 1 else {}

    nvml.before_read = lose_the_second
    sampler.poll()
    assert [sampler.latest(index) is not None for index in range(3)] == [True, False, True]
    assert "NVML error 15" in (sampler.health(1).fault or "")


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
        ({"errors": {"nvmlGpmSampleAlloc": NO_PERMISSION}}, "no permission to read GPM counters"),
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
    assert "no permission" in (source.gpus()[0].no_gpm_reason or "")
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


def test_a_name_that_is_cut_in_the_middle_of_a_letter_costs_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()

    def cut_name(pid: int) -> str:
        return "/usr/bin/é".encode()[:-1].decode()

    monkeypatch.setattr(nvml, "nvmlSystemGetProcessName", cut_name, raising=False)
    assert source_of(nvml).read(0).processes == (GpuProcess(pid=7, name=None, memory_bytes=200),)


def test_slow_values_are_not_asked_for_at_every_read() -> None:
    nvml = FakeNvml()
    source = source_of(nvml, every_s=0.1)
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


def test_no_other_module_opens_nvml() -> None:
    package = Path(truemfu.__file__).parent
    imported = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if (isinstance(node, ast.alias) and node.name == "pynvml")
        or (isinstance(node, ast.ImportFrom) and node.module == "pynvml")
        or (isinstance(node, ast.Constant) and node.value == "pynvml")
    }
    assert imported == {"hardware/counters/nvml.py"}


def test_the_real_module_has_every_name_we_call() -> None:
    pynvml = pytest.importorskip("pynvml")
    modules = (nvml_module.__file__, gpm_module.__file__)
    text = "".join(Path(module).read_text(encoding="utf-8") for module in modules)
    names = set(re.findall(r'(?:nvml\.|")((?:nvml|NVML|c_nvml)\w+)', text))
    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []
    metric = pynvml.c_nvmlGpmMetricsGet_t().metrics[0]
    assert {"metricId", "nvmlReturn", "value"} <= {field[0] for field in metric._fields_}
