"""The clock from the SMs' own counters: the arithmetic here, the counters on a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from truemfu.hardware.counters import cycle_stamps
from truemfu.hardware.counters.cycle_stamps import CycleStamps, Stamp, mean_clock_hz


def stamp(**by_sm: tuple[int, int]) -> Any:
    """A stamp with these readings: sm0=(cycles, nanoseconds)."""
    return SimpleNamespace(by_sm=lambda: {int(name[2:]): value for name, value in by_sm.items()})


def test_cycles_over_time_is_the_clock() -> None:
    before = stamp(sm0=(1_000, 5_000), sm1=(9_000, 5_000))
    after = stamp(sm0=(1_000 + 2_000_000, 1_005_000), sm1=(9_000 + 1_000_000, 1_005_000))
    assert mean_clock_hz(before, after) == pytest.approx(1.5e9)


def test_an_sm_that_was_reached_once_tells_nothing() -> None:
    assert mean_clock_hz(stamp(sm0=(0, 1)), stamp(sm0=(1_800, 1_001), sm1=(5, 1_001))) == pytest.approx(1.8e9)
    assert mean_clock_hz(stamp(sm0=(0, 1)), stamp(sm1=(5, 1_001))) is None


@pytest.mark.parametrize("after", [(500, 2_000), (2_000, 1_000), (10**9, 1_100)])
def test_counters_that_started_anew_are_no_clock(after: tuple[int, int]) -> None:
    assert mean_clock_hz(stamp(sm0=(1_000, 1_000)), stamp(sm0=after)) is None


class FakeDriver:
    """Stands for libcuda: a launch writes the same readings for every SM."""

    def __init__(self, places: torch.Tensor) -> None:
        self._places, self.launches = places, 0
        self.fails = False

    def cuLaunchKernel(self, *arguments: Any) -> int:
        if self.fails:
            return 1
        self._places[self.launches % len(self._places)] = torch.tensor(
            [2_000 * self.launches, 1_000 * self.launches + 1]
        )
        self.launches += 1
        return 0


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> tuple[CycleStamps, FakeDriver]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    places = torch.zeros(cycle_stamps._SLOTS, 3, 2, dtype=torch.int64)
    driver = FakeDriver(places)
    return CycleStamps(torch.device("cpu"), driver, None, places), driver


def taken(stamps: CycleStamps) -> Stamp:
    found = stamps.take()
    assert found is not None
    return found


def test_places_are_used_in_turn_and_an_old_stamp_is_empty(faked: tuple[CycleStamps, FakeDriver]) -> None:
    stamps, _ = faked
    first, second = taken(stamps), taken(stamps)
    assert mean_clock_hz(first, second) == pytest.approx(2e9)
    assert second.time_s() == pytest.approx(1.001e-6)
    for _ in range(cycle_stamps._SLOTS - 1):
        last = taken(stamps)
    assert first.by_sm() == {}
    assert first.time_s() is None
    assert mean_clock_hz(second, last) == pytest.approx(2e9)


def test_a_launch_that_fails_is_no_stamp(faked: tuple[CycleStamps, FakeDriver]) -> None:
    stamps, driver = faked
    driver.fails = True
    assert stamps.take() is None


def test_nothing_is_put_into_a_graph(
    faked: tuple[CycleStamps, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps, driver = faked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert stamps.take() is None
    assert driver.launches == 0


def test_where_there_is_no_nvidia_gpu_it_says_so() -> None:
    assert "NVIDIA" in str(CycleStamps.open(torch.device("cpu")))


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.mark.gpu
def test_the_clock_is_that_of_a_kernel_which_counts_cycles_itself(cuda: torch.device) -> None:
    stamps = CycleStamps.open(cuda)
    assert isinstance(stamps, CycleStamps), stamps
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 1_000_000_000
    torch.cuda.set_sync_debug_mode("error")
    before = stamps.take()
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    after = stamps.take()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert before is not None
    assert after is not None
    assert len(after.by_sm()) >= torch.cuda.get_device_properties(cuda).multi_processor_count * 0.9
    assert mean_clock_hz(before, after) == pytest.approx(cycles / begin.elapsed_time(end) * 1e3, rel=0.01)


@pytest.mark.gpu
def test_cycles_are_counted_while_nothing_runs(cuda: torch.device) -> None:
    stamps = CycleStamps.open(cuda)
    assert isinstance(stamps, CycleStamps), stamps
    before = stamps.take()
    torch.cuda.synchronize()
    import time

    time.sleep(0.5)
    after = stamps.take()
    torch.cuda.synchronize()
    assert before is not None
    assert after is not None
    clock_hz = mean_clock_hz(before, after)
    assert clock_hz is not None
    assert clock_hz > 3e8
