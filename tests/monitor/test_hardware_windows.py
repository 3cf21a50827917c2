"""Windows made of given counters: what they come to, and what they do not claim."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from truemfu.crosscheck import KnownWork
from truemfu.hardware.counters.executed import CYCLE_COUNTERS, DRIVER, datasheet_clock_hz
from truemfu.hardware.counters.samples import CounterWindow
from truemfu.hardware.detect import find_spec
from truemfu.monitor.hybrid.hardware_figures import StepSums, figures_of
from truemfu.monitor.hybrid.hardware_watch import Cut, MeasuredWindow
from truemfu.monitor.hybrid.hardware_windows import HardwareWindows, merged
from truemfu.monitor.metrics import StepAmounts, StepTime
from truemfu.monitor.step_flops.source import StepFlops
from truemfu.monitor.step_note import StepExtras, StepNote

H200 = find_spec("NVIDIA H200", None)
PEAK = 989.4e12
STEP_S = 0.1
TIME = StepTime(steps=1, elapsed_s=STEP_S, data_wait_s=0.0)
BF16 = KnownWork(flops_by_dtype={"bf16": 1.0})


def step(
    model_flops: float | None = 40e12, peak: float = PEAK, source: str = "datasheet: H200"
) -> StepAmounts:
    flops = None
    if model_flops is not None:
        flops = StepFlops(
            model_flops=int(model_flops),
            hardware_flops=model_flops,
            peak_flops_per_s=peak,
            peak_source=source,
            method="closed form",
        )
    return StepAmounts(
        samples=8,
        tokens=8192,
        useful_tokens=8192,
        flops=flops,
        warmup=False,
    )


def measured(hmma: float | None = 0.5, source: str = CYCLE_COUNTERS, **values: Any) -> MeasuredWindow:
    shares = {"tensor_active": hmma, "sm_active": 0.8, "graphics_active": 0.9, **values}
    window = CounterWindow(
        index=0,
        begin_s=0.0,
        end_s=10.0,
        seconds=10.0,
        hmma_active=hmma,
        sm_clock_hz=1.6e9,
        power_w=600.0,
        **shares,
    )
    return MeasuredWindow(window=window, clock_hz=1.5e9, clock_source=source)


def figures(detail: KnownWork = BF16, world_size: int = 1, own_peak: bool = False, **values: Any) -> Any:
    sums = StepSums()
    for _ in range(100):
        sums.add(step(), TIME)
    return figures_of(
        sums,
        measured(**values),
        detail,
        spec=H200,
        audited=None,
        world_size=world_size,
        is_datasheet_peak=not own_peak,
    )


class Watch:
    """Answers every pair of cuts with what it is told."""

    fault = "GPU is lost"

    def __init__(self) -> None:
        self.answer: MeasuredWindow | None = measured()
        self.asked: list[Cut] = []

    def has_read_past(self, cut: Cut) -> bool:
        self.asked.append(cut)
        return False

    def measured(self, begin: Cut, end: Cut) -> MeasuredWindow | None:
        return self.answer


class Details:
    """Stands in for what an observed step tells of its composition."""

    detail = BF16
    notes: ClassVar[dict[str, None]] = {}

    def of(self, note: StepNote) -> KnownWork:
        return self.detail


def noted(cut: Cut) -> Any:
    """A step with which a window ends or begins."""
    return SimpleNamespace(extras=StepExtras(cut=cut))


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def windows(watch: Any, said: list[str]) -> HardwareWindows:
    made = HardwareWindows(
        watch,
        spec=H200,
        audited=None,
        world_size=1,
        details=Details(),
        collective_share=lambda: None,
        notice=said.append,
    )
    made.add(noted(Cut(0.0, None, False)), step(), TIME)
    return made


def window_of(windows: HardwareWindows, one: StepAmounts | None = None, detail: KnownWork = BF16) -> None:
    windows.details.detail = detail  # type: ignore[attr-defined]
    windows.add(noted(Cut(0.0, None, True)), one or step(), TIME)


def test_plain_fp32_is_not_on_the_pipe_so_nothing_is_claimed_of_it() -> None:
    """An activity of 0 is no HFU of 0, and the pipe's shares say nothing of this peak."""
    mixed = figures(KnownWork(flops_by_dtype={"bf16": 0.95, "fp32": 0.05}))
    assert mixed.executed_flops_per_s is None
    assert mixed.executed_hfu is None
    assert mixed.check is None
    assert mixed.fall is not None
    assert [part.key for part in mixed.fall.parts][-1] == "useful"
    assert "clock" not in [part.key for part in mixed.fall.parts]
    assert any("plain fp32" in text for text in mixed.fall.advice())
    assert sum(part.share for part in mixed.fall.parts) == pytest.approx(1)


def test_an_unknown_mix_of_dtypes_is_not_taken_for_bf16() -> None:
    assert figures(KnownWork()).executed_flops_per_s is None


def test_the_tiles_of_the_waterfall_are_those_of_the_cross_check() -> None:
    detail = KnownWork(
        flops_by_dtype={"bf16": 1.0}, attention_flops=0.4, attention_executed_share=1.0, tile_factor=1.05
    )
    found = figures(detail)
    shares = {part.key: part.share for part in found.fall.parts}
    needed = 40e12 / STEP_S / PEAK
    assert shares["tile_padding"] == pytest.approx(0.05 * 0.6 * needed)
    expected = found.check.expected_flops / found.check.counted_flops
    assert expected == pytest.approx(1 + 0.05 * 0.6)


def test_the_energy_of_a_job_is_not_known_from_one_gpu() -> None:
    one, eight = figures(), figures(world_size=8)
    assert one.energy_j_per_step == pytest.approx(600 * STEP_S)
    assert one.energy_j_per_million_tokens == pytest.approx(600 * STEP_S / 8192 * 1e6)
    assert eight.power_w == one.power_w
    assert eight.energy_j_per_step is eight.energy_j_per_million_tokens is None


def test_with_several_ranks_communication_may_be_in_the_busy_time() -> None:
    (text,) = [text for text in figures(world_size=8).fall.advice() if text.startswith("busy without")]
    assert "communication between ranks" in text


def test_time_in_collectives_is_that_of_each_window_and_of_the_run(watch: Any, said: list[str]) -> None:
    shares = iter([0.9, 0.7, None])
    made = HardwareWindows(
        watch,
        spec=H200,
        audited=None,
        world_size=2,
        details=Details(),
        collective_share=lambda: next(shares),
        notice=said.append,
    )
    made.add(noted(Cut(0.0, None, False)), step(), TIME)

    def communication() -> float:
        assert made.latest is not None
        return float(made.latest.metrics()["perf/loss/no_tensor_communication"])

    window_of(made)
    clock = 1.5e9 / datasheet_clock_hz(H200)
    assert communication() == pytest.approx(clock * (0.9 - 0.5))
    window_of(made)
    assert communication() == pytest.approx(clock * (0.7 - 0.5))
    assert "collectives ran 80.0 %" in str(made.as_dict()["waterfall"]["notes"])
    window_of(made)
    assert "perf/loss/no_tensor_communication" not in made.latest.metrics()
    assert "collectives were not timed" in made.latest.fall.notes[0]
    assert "collectives ran 80.0 %" in str(made.as_dict()["waterfall"]["notes"])  # where they were timed


def test_a_peak_of_ones_own_is_said_to_be_the_reason() -> None:
    (text, *_) = figures(own_peak=True).fall.advice()
    assert "the peak is not the datasheet's" in text
    assert "unknown" not in text


def test_the_clock_says_whose_it_is() -> None:
    assert figures().metrics()["perf/clock_source"] == CYCLE_COUNTERS
    both = merged(measured(source=CYCLE_COUNTERS), measured(source=DRIVER))
    assert both.clock_source == "cycle counters and driver"


def test_silent_activity_is_no_window_and_leaves_no_stale_ratio(
    windows: HardwareWindows, watch: Watch, said: list[str]
) -> None:
    window_of(windows)
    assert windows.executed_ratio is not None
    watch.answer = None
    window_of(windows)
    window_of(windows)
    assert windows.executed_ratio is None
    assert windows.latest is None
    assert said == [
        "the hardware counters cannot be read any more, so HFU no longer comes from them: GPU is lost"
    ]
    summary = windows.as_dict()
    assert summary is not None
    assert summary["windows"] == 1


def test_a_run_without_a_window_says_why(windows: HardwareWindows, watch: Watch, said: list[str]) -> None:
    assert windows._why_nothing() == (
        "hybrid mode: the counters measured nothing: they need 12 seconds of steps without a pause, a "
        "compilation or an observed step"
    )
    watch.answer = None
    window_of(windows)
    assert windows._why_nothing() == "hybrid mode: the only window of the run was not read: GPU is lost"
    window_of(windows)
    assert said == ["the hardware counters cannot be read: GPU is lost"]
    assert windows._why_nothing() is None


def test_the_watch_hears_of_every_cut_and_only_ends_wait(windows: HardwareWindows, watch: Watch) -> None:
    begin, end = Cut(0.0, None, False), Cut(10.0, None, True)
    assert windows.can_take(begin)
    assert not windows.can_take(end)
    assert watch.asked == [begin, end]  # when the device got to each is known from all of them


def test_what_is_left_out_tells_of_nothing_any_more(
    windows: HardwareWindows, watch: Watch, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    window_of(windows)
    assert windows.latest is not None
    assert windows.executed_ratio is not None
    monkeypatch.setattr(watch, "measured", lambda begin, end: 1 / 0)
    window_of(windows)
    assert said == ["the hardware counters are ignored from now on: ZeroDivisionError: division by zero"]
    assert windows.latest is None
    assert windows.executed_ratio is None
    assert windows._why_nothing() is None


def test_a_run_with_a_window_has_nothing_to_explain(windows: HardwareWindows) -> None:
    window_of(windows)
    assert windows._why_nothing() is None


def test_a_window_without_executed_flops_clears_the_ratio(windows: HardwareWindows) -> None:
    window_of(windows)
    window_of(windows, detail=KnownWork())
    assert windows.executed_ratio is None


def test_one_step_without_flops_does_not_blank_the_run(windows: HardwareWindows) -> None:
    window_of(windows)
    window_of(windows, step(None))
    window_of(windows)
    summary = windows.as_dict()
    assert summary is not None
    assert (summary["windows"], summary["windows_left_out"]) == (2, 1)
    assert summary["executed_hfu"] is not None
    assert summary["waterfall"] is not None


def test_a_difference_is_said_once_for_each_set_of_causes(
    windows: HardwareWindows, watch: Watch, said: list[str]
) -> None:
    for _ in range(20):
        watch.answer = measured(hmma=0.9)
        window_of(windows)
        window_of(windows)
        watch.answer = measured(hmma=0.494)
        window_of(windows)
    assert len(said) == 1
