"""What is read while products run: from a trace of an H200, and from cycle counters that are made up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from truemfu.errors import CounterError, ReplayEnded
from truemfu.hardware.ceiling import ceiling
from truemfu.hardware.ceiling import clock_watch as ceiling_watch
from truemfu.hardware.ceiling import search as ceiling_search
from truemfu.hardware.ceiling.ceiling import measure_ceiling
from truemfu.hardware.ceiling.clock_watch import Conditions, Run, Watch, conditions_of
from truemfu.hardware.ceiling.products import timed
from truemfu.hardware.counters.cycle_stamps import CycleStamps, Stamp
from truemfu.hardware.counters.samples import CounterSample, GpuInfo
from truemfu.hardware.counters.trace import Replay
from truemfu.hardware.detect import find_spec

MATMUL = Path(__file__).parent / "traces" / "h200_matmul.jsonl"
UUID = "00000000-0000-0000-0000-000000000000"
CPU = torch.device("cpu")


class FakeStamps(CycleStamps):
    """Two SMs at `clock_hz`, whose every stamp is 10 ms after the one before."""

    def __init__(self, clock_hz: float) -> None:
        self.clock_hz, self.taken = clock_hz, 0

    def take(self) -> Stamp:
        self.taken += 1
        return Stamp(self, self.taken)

    def values_of(self, number: int) -> list[tuple[int, int]]:
        time_ns = number * 10_000_000
        return [(sm * 7 + round(time_ns / 1e9 * self.clock_hz), time_ns) for sm in range(2)]


class Answers:
    """A source whose reads are given; an exception among them is raised."""

    def __init__(self, *answers: CounterSample | Exception) -> None:
        self.answers = iter(answers)
        self.closed = False

    def gpus(self) -> list[GpuInfo]:
        return [GpuInfo(index=0, name="NVIDIA H200", uuid=f"GPU-{UUID}")]

    def read(self, index: int) -> CounterSample:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


def sample(at_s: float, **values: Any) -> CounterSample:
    return CounterSample(index=0, at_s=at_s, **values)


def recorded() -> list[CounterSample]:
    """All of the trace: idle first, then a product that is at the power limit at once."""
    source, samples = Replay(MATMUL), list[CounterSample]()
    with contextlib.suppress(ReplayEnded):
        while True:
            samples.append(source.read(0))
    return samples


def runs_of(samples: list[CounterSample]) -> list[Run]:
    watch = Watch(source=Answers(*samples))
    return [Run(products=1, seconds=0.1, sample=watch.read_driver()) for _ in samples]


def test_a_trace_of_the_power_limit_is_read_as_one() -> None:
    samples = recorded()
    held = conditions_of(runs_of(samples[-30:]), loaded_s=3.0)
    assert held.reported_clock_hz == pytest.approx(1525e6, rel=0.02)
    assert held.power_w == pytest.approx(691, abs=5)
    assert held.power_limit_w == 700.0
    assert held.throttle == {"power_limit": 1.0}
    idle = conditions_of(runs_of(samples[:5]), loaded_s=0.0)
    assert idle == Conditions(reported_clock_hz=1980e6, power_limit_w=700.0, throttle={})


def test_power_is_unknown_until_it_is_about_the_load() -> None:
    """0.3 s into the load the driver, who tells the mean of a second, said 328 W of the true 700."""
    samples = recorded()
    begin = next(place for place, read in enumerate(samples) if read.throttle_reasons)
    early = samples[begin : begin + 3]
    assert early[-1].power_w is not None
    assert early[-1].power_w < 350
    assert conditions_of(runs_of(early), loaded_s=0.3).power_w is None
    assert conditions_of(runs_of(samples[begin:]), loaded_s=4.0).power_w == samples[-1].power_w


def test_the_clock_is_the_mean_over_time() -> None:
    runs = [Run(products=1, seconds=3.0, clock_hz=1e9), Run(products=1, seconds=1.0, clock_hz=2e9)]
    assert conditions_of(runs, loaded_s=4.0) == Conditions(clock_hz=1.25e9)


def test_a_run_has_the_clock_between_its_stamps() -> None:
    stamps = FakeStamps(1375e6)
    run = timed(lambda: None, CPU, 5, Watch(stamps=stamps))
    assert run.clock_hz == pytest.approx(1375e6)
    assert (run.products, run.sample, stamps.taken) == (5, None, 2)


def test_a_reading_that_fails_or_makes_no_sense_is_none() -> None:
    source = Answers(
        sample(1.0, sm_clock_hz=1e9),
        CounterError("GPU is lost"),
        sample(1.2, sm_clock_hz=math.nan),
        sample(1.3, sm_clock_hz=2e9, dram_active=math.nan),
    )
    watch = Watch(source=source)
    clocks = [None if (read := watch.read_driver()) is None else read.sm_clock_hz for _ in range(4)]
    assert clocks == [1e9, None, None, 2e9]
    watch.close()
    assert source.closed


def test_the_last_word_of_the_driver_holds_until_it_renews_it() -> None:
    stale = [sample(at_s, fresh=False) for at_s in (1.05, 1.15, 1.4)]
    watch = Watch(source=Answers(stale[0], sample(1.0, sm_clock_hz=1e9), *stale))
    found = [None if (read := watch.read_driver()) is None else read.sm_clock_hz for _ in range(5)]
    assert found == [None, 1e9, 1e9, 1e9, None]


def test_no_watch_sees_nothing() -> None:
    watch = Watch()
    assert watch.stamp() is watch.read_driver() is None
    watch.close()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watch]:
    """Open a watch where torch believes in a GPU of this UUID, with NVML and cycle counters as given."""

    def install(uuid: str, source: Callable[[], object], stamps: CycleStamps | str) -> Watch:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(uuid=uuid)
        )
        monkeypatch.setattr(ceiling_watch, "NvmlSource", lambda energy: source())
        monkeypatch.setattr(ceiling_watch.CycleStamps, "open", lambda device: stamps)
        return Watch.open(torch.device("cuda"))

    return install


def test_the_gpu_is_found_by_its_uuid(fake_gpu: Callable[..., Watch]) -> None:
    watch = fake_gpu(UUID.upper(), lambda: Replay(MATMUL), FakeStamps(1e9))
    assert watch.notes == ()
    assert watch.stamp() is not None
    found = watch.read_driver()
    assert found is not None
    assert found.power_limit_w == 700.0


def test_a_gpu_that_nvml_does_not_list_has_no_power(fake_gpu: Callable[..., Watch]) -> None:
    source = Answers()
    watch = fake_gpu("11111111", lambda: source, "libcuda.so.1 cannot be loaded")
    assert watch.read_driver() is watch.stamp() is None
    assert source.closed
    assert watch.notes == (
        "the actual clock is not known: libcuda.so.1 cannot be loaded",
        "power and throttle reasons are not known: NVML lists no GPU with the UUID 11111111"
        " (MIG slices are not listed there)",
    )


def test_without_a_driver_there_is_a_note_and_no_warning(fake_gpu: Callable[..., Watch]) -> None:
    def fail() -> None:
        raise CounterError("NVML cannot be opened")

    (note,) = fake_gpu(UUID, fail, FakeStamps(1e9)).notes
    assert note == "power and throttle reasons are not known: NVML cannot be opened"


def test_the_gap_to_the_datasheet_splits_into_clock_and_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way with an H200's row, clock and trace; the products are this CPU's, real and timed."""
    watch = Watch(stamps=FakeStamps(1375e6), source=Answers(*recorded()[-30:] * 100))
    monkeypatch.setattr(ceiling_search, "_CPU_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr(ceiling_search, "_CPU_SHORT_RUN_S", 0.001)
    monkeypatch.setattr(ceiling_watch, "POWER_MEAN_S", 0.4)
    monkeypatch.setattr(ceiling.Watch, "open", lambda device: watch)
    monkeypatch.setattr(ceiling, "spec_of", lambda device: find_spec("NVIDIA H200"))
    (found,) = measure_ceiling("cpu", dtypes=["bf16"], seconds=0.6)
    assert found.datasheet_flops_per_s == 989.4e12
    assert found.datasheet_clock_hz == pytest.approx(1830e6, rel=1e-3)
    assert found.burst is not None
    assert found.sustained is not None
    for run in (found.burst, found.sustained):
        assert run.clock_hz == pytest.approx(1375e6)
        assert run.clock_of_datasheet == pytest.approx(1375 / 1830, rel=1e-3)
        assert run.of_datasheet == run.flops_per_s / 989.4e12
        assert run.pipe_of_clock is not None
        assert run.clock_of_datasheet * run.pipe_of_clock == pytest.approx(run.of_datasheet)
        assert run.limited_by == "pipe"
        assert run.throttle == {"power_limit": 1.0}
    assert found.burst.power_w is None
    assert found.sustained.power_w == pytest.approx(691, abs=5)
    assert found.sustained.power_limit_w == 700.0
