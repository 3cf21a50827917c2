"""Counter values: what intervals add up to, what is nonsense, what a trace gives back, what an H200 said."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hardware.fake_nvml import FakeNvml
from tests.hardware.recorded import (
    EVERY_50_MS,
    MATMUL,
    NO_GPM,
    PIPES,
    TRACES,
    TRAINING,
    TROUBLE,
    played,
    rows_of,
    says_nothing,
    together,
    window_of,
)

from truemfu.errors import CounterError, RecordError, ReplayEnded, TruemfuWarning
from truemfu.hardware.counters.executed import executed_flops_per_s
from truemfu.hardware.counters.nvml import NvmlSource
from truemfu.hardware.counters.sampler import Sampler
from truemfu.hardware.counters.samples import (
    ACTIVITIES,
    CounterSample,
    CounterWindow,
    Cycles,
    GpuInfo,
    GpuProcess,
    find_gpu,
)
from truemfu.hardware.counters.trace import Recorder, Replay
from truemfu.hardware.counters.windows import (
    GPM_LAG_S,
    between,
    combine,
    interval_of,
    with_energy,
)
from truemfu.hardware.specs import DEVICES

GPU = GpuInfo(index=0, name="NVIDIA H200", uuid="GPU-1234-AB", max_sm_clock_hz=1980e6)
H200 = next(spec for spec in DEVICES if spec.key == "h200")


def sample(at_s: float = 1.0, **values: Any) -> CounterSample:
    return CounterSample(index=0, at_s=at_s, **values)


def part(begin_s: float, seconds: float, **values: Any) -> CounterWindow:
    return CounterWindow(index=0, begin_s=begin_s, end_s=begin_s + seconds, seconds=seconds, **values)


# Intervals


def test_an_interval_is_what_lies_between_two_samples() -> None:
    before = sample(10.0, sm_clock_hz=1000e6, power_w=100.0, throttle_reasons=())
    after = sample(
        12.0,
        tensor_active=0.5,
        sm_clock_hz=2000e6,
        power_w=300.0,
        throttle_reasons=("power_limit",),
        gpu_utilisation=1.0,
        memory_used_bytes=7,
    )
    interval = interval_of(before, after, GPU)
    assert (interval.begin_s, interval.end_s, interval.seconds) == (10.0, 12.0, 2.0)
    assert interval.tensor_active == 0.5
    assert interval.sm_clock_hz == 1500e6
    assert interval.max_sm_clock_hz == 1980e6
    assert interval.power_w == 200.0
    assert interval.throttle == {"power_limit": 0.5}
    assert interval.memory_used_bytes == 7


def test_what_is_not_known_stays_none() -> None:
    interval = interval_of(sample(1.0), sample(2.0), GPU)
    known = {name for name in interval.__struct_fields__ if getattr(interval, name) is not None}
    assert known == {"index", "begin_s", "end_s", "seconds", "intervals", "max_sm_clock_hz"}


@pytest.mark.parametrize("name", [*ACTIVITIES, "gpu_utilisation"])
@pytest.mark.parametrize("value", [math.nan, 1.01, -0.01, math.inf])
def test_a_share_that_is_none_is_nonsense(name: str, value: float) -> None:
    with pytest.raises(CounterError, match=f"impossible value: {name}"):
        interval_of(sample(1.0), sample(2.0, **{name: value}), GPU)


@pytest.mark.parametrize("name", ["power_w", "energy_j", "sm_clock_hz"])
@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
def test_impossible_amounts_are_nonsense(name: str, value: float) -> None:
    for before, after in (
        (sample(1.0), sample(2.0, **{name: value})),
        (sample(1.0, **{name: value}), sample(2.0)),
    ):
        with pytest.raises(CounterError, match="impossible value"):
            interval_of(before, after, GPU)


def test_a_bad_share_spoils_its_own_interval_alone() -> None:
    assert (
        interval_of(sample(1.0, tensor_active=9.0), sample(2.0, tensor_active=0.1), GPU).tensor_active == 0.1
    )


@pytest.mark.parametrize("later_s", [1.0, 0.5, math.nan])
def test_time_must_go_on(later_s: float) -> None:
    with pytest.raises(CounterError, match="time"):
        interval_of(sample(1.0), sample(later_s), GPU)


def test_a_read_without_news_is_no_end_of_an_interval() -> None:
    for before, after in ((sample(1.0), sample(2.0, fresh=False)), (sample(1.0, fresh=False), sample(2.0))):
        with pytest.raises(AssertionError, match="stale read"):
            interval_of(before, after, GPU)


# Energy


def test_energy_between_two_readings_is_spread_by_time() -> None:
    parts = [part(1.0, 0.5), part(1.5, 1.5)]
    filled = with_energy(parts, sample(1.0, energy_j=100.0), sample(3.0, energy_j=300.0))
    assert [each.energy_j for each in filled] == [50.0, 150.0]
    assert [each.begin_s for each in filled] == [1.0, 1.5]


def test_of_a_longer_time_an_interval_gets_its_own_part() -> None:
    (last,) = with_energy([part(2.5, 0.5)], sample(1.0, energy_j=0.0), sample(3.0, energy_j=200.0))
    assert last.energy_j == 50.0


def test_an_energy_counter_that_starts_again_is_no_gain() -> None:
    with pytest.raises(CounterError, match="energy counter went backwards by 90 J"):
        with_energy([part(1.0, 1.0)], sample(1.0, energy_j=100.0), sample(2.0, energy_j=10.0))


def test_what_was_used_since_the_last_reading_is_as_much_as_before() -> None:
    known, unknown = part(0.0, 3.0, energy_j=30.0), part(3.0, 1.0)
    both = combine([known, unknown])
    assert both is not None
    assert (both.seconds, both.energy_j) == (4.0, 40.0)


def test_energy_known_for_less_than_half_of_the_time_is_unknown() -> None:
    half, less = (combine([part(0.0, known_s, energy_j=10.0), part(9.0, 1.0)]) for known_s in (1.0, 0.9))
    assert half is not None
    assert half.energy_j == 20.0
    assert less is not None
    assert less.energy_j is None


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


def test_a_dropped_interval_shortens_the_seconds() -> None:
    gap = combine([part(0.0, 1.0, energy_j=10.0), part(2.0, 1.0, energy_j=5.0)])
    assert gap is not None
    assert (gap.end_s - gap.begin_s, gap.seconds, gap.energy_j) == (3.0, 2.0, 15.0)


def test_the_ends_of_a_window_are_cut_out_of_their_intervals() -> None:
    shares = (0.2, 0.4, 0.8)
    parts = [part(float(n), 1.0, hmma_active=share, energy_j=100.0) for n, share in enumerate(shares)]
    cut = between(parts, 0.75, 2.5, lag_s=0.0)
    assert cut is not None
    assert (cut.begin_s, cut.end_s) == (0.75, 2.5)
    assert cut.seconds == pytest.approx(1.75)
    assert cut.hmma_active == pytest.approx((0.25 * 0.2 + 0.4 + 0.5 * 0.8) / 1.75)
    assert cut.energy_j == pytest.approx(175.0)
    assert between(parts, 3.0, 4.0, lag_s=0.0) is None
    whole = between(parts, 0.0, 3.0, lag_s=0.0)
    assert whole == combine(parts)


def test_a_window_is_moved_by_half_the_lag() -> None:
    parts = [part(float(n), 1.0, hmma_active=share) for n, share in enumerate((0.0, 1.0))]
    cut = between(parts, 0.0, 1.0, lag_s=0.1)
    assert cut is not None
    assert cut.hmma_active == pytest.approx(0.05)


def test_raw_cycles_of_a_piece_are_its_share() -> None:
    whole = part(0.0, 1.0, sm_clock_hz=1e9, cycles=Cycles(elapsed=1e9))
    piece = between([whole], 0.25, 0.75, lag_s=0.0)
    assert piece is not None
    assert piece.cycles == Cycles(elapsed=5e8)


def test_raw_cycles_are_counted_between_samples_and_added_in_windows() -> None:
    counts = [Cycles(elapsed=100.0 * n) for n in (1, 2, 3)]
    samples = [sample(float(n), cycles=count) for n, count in enumerate(counts)]
    parts = [interval_of(a, b, GPU) for a, b in pairwise(samples)]
    assert parts[0].cycles == Cycles(elapsed=100.0)
    both = combine(parts)
    assert both is not None
    assert both.cycles == Cycles(elapsed=200.0)


def test_raw_cycles_that_do_not_grow_are_not_taken() -> None:
    back = interval_of(sample(1.0, cycles=Cycles(elapsed=9.0)), sample(2.0, cycles=Cycles(elapsed=1.0)), GPU)
    assert back.cycles is None


def test_a_gpu_is_found_by_the_uuid_torch_prints() -> None:
    assert find_gpu([GPU], "1234-ab") is GPU
    assert find_gpu([GPU], "GPU-1234-ab") is GPU
    assert find_gpu([GPU], "other") is None


# Traces


def test_a_trace_gives_back_what_was_read(tmp_path: Path) -> None:
    original = Replay(TROUBLE)
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


def test_a_read_without_news_is_written_down_as_one(tmp_path: Path) -> None:
    nvml = FakeNvml(rows=rows_of(EVERY_50_MS))
    recorder = Recorder(NvmlSource(nvml=nvml, clock=nvml.clock), tmp_path / "trace.jsonl")
    live = Sampler(recorder)
    for _ in nvml.rows:
        live.poll()
    recorder.close()
    assert sum(not row.fresh for row in rows_of(tmp_path / "trace.jsonl")) == 35
    assert played(tmp_path / "trace.jsonl").intervals(0) == live.intervals(0)


def test_the_recorded_gpus_are_read_independently(tmp_path: Path) -> None:
    replay = Replay(together(tmp_path / "two.jsonl", MATMUL, TRAINING, rounds=8))
    assert [gpu.index for gpu in replay.gpus()] == [0, 1]
    ones = [replay.read(1) for _ in range(8)]
    assert {entry.index for entry in ones} == {1}
    assert replay.read(0).at_s == rows_of(MATMUL)[0].at_s
    with pytest.raises(ReplayEnded, match="no more samples of GPU 1"):
        replay.read(1)


def test_a_trace_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    text = NO_GPM.read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(text[:-40])
    assert len(read_all(Replay(tmp_path / "cut.jsonl"))) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the trace"),
        ("", "got no header"),
        ("no json\n", "line 1: not a counter trace"),
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
    recorder = Recorder(Replay(MATMUL), tmp_path / "trace.jsonl")

    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    recorder._file = Full()
    with pytest.warns(TruemfuWarning, match="is incomplete from here on: No space left"):
        assert recorder.read(0) == rows_of(MATMUL)[0]
    assert recorder.read(0) == rows_of(MATMUL)[1]


def test_a_trace_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(CounterError, match="cannot write the trace"):
        Recorder(Replay(MATMUL), tmp_path / "no" / "trace.jsonl")


def test_samples_survive_their_own_json() -> None:
    one = Replay(MATMUL).read(0)
    assert msgspec.json.decode(msgspec.json.encode(one), type=CounterSample) == one


# What an H200 said


@pytest.mark.parametrize("path", sorted(TRACES.glob("h200_*.jsonl")), ids=lambda path: path.stem)
def test_a_recorded_trace_is_small_and_says_where_it_is_from(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 60_000
    header = json.loads(text.splitlines()[0])
    assert "recorded 2026-11-15" in header["note"]
    assert header["gpus"][0]["driver"] == "580.159.04"
    assert ("left out" in header["note"]) is not any(map(says_nothing, rows_of(path)))


# Times of a phase from its trace's note, after a second in which the driver's mean of the power settles.
STEADY_PHASES = {
    "products": (MATMUL, 49.4, 52.4, {"hmma_active": 0.87, "sm_active": 0.91, "dram_active": 0.17}),
    "fp64 products": (PIPES, 80.0, 81.05, {"hmma_active": 0.0, "tensor_active": 0.94, "dfma_active": 0.94}),
    "elementwise sums": (PIPES, 84.2, 85.1, {"hmma_active": 0.0, "sm_active": 0.98, "dram_active": 0.90}),
    "silu": (PIPES, 85.6, 87.1, {"hmma_active": 0.064, "sm_active": 0.98, "fp16_active": 0.0}),
    "steps of 4 x 512": (TRAINING, 121.9, 125.8, {"hmma_active": 0.31, "sm_active": 0.69}),
    "steps of 8 x 1024": (TRAINING, 127.5, 130.7, {"hmma_active": 0.45, "sm_active": 0.82}),
}


@pytest.mark.parametrize("phase", STEADY_PHASES)
def test_a_recorded_phase_is_what_it_was(phase: str) -> None:
    path, begin_s, end_s, shares = STEADY_PHASES[phase]
    window = window_of(played(path), begin_s, end_s)
    assert window is not None
    for name, share in shares.items():
        assert getattr(window, name) == pytest.approx(share, abs=0.01), name
    assert window.gpu_utilisation == pytest.approx(1.0, abs=0.1), "the driver's figure is the same for all"
    assert window.energy_j is not None
    # the energy counter steps every tenth of a second, which at both ends may fall inside or outside
    assert window.energy_j / window.seconds == pytest.approx(window.power_w, rel=0.1 / window.seconds)


def test_the_lag_covers_the_oldest_news() -> None:
    """How long after a fresh read one still found nothing new."""
    rows = rows_of(EVERY_50_MS)
    fresh_at_s, ages = rows[0].at_s, []
    for row in rows:
        if says_nothing(row):
            ages.append(row.at_s - fresh_at_s)
        else:
            fresh_at_s = row.at_s
    assert max(ages) == pytest.approx(GPM_LAG_S, abs=0.001)
