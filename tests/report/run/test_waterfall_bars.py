"""Bars start where the one above ended; the table has every part, and adds up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from truemfu.records import RunHardware
from truemfu.report.run.waterfall_bars import WaterfallView, points, view_of
from truemfu.waterfall import WaterfallInputs, waterfall

PEAK = 1000e12


def hardware(**given: Any) -> RunHardware:
    """Through JSON, as it comes from disk."""
    fall = waterfall(WaterfallInputs(peak_flops_per_s=PEAK, **given))
    assert fall is not None
    block = {"waterfall": fall.as_dict(), "limiter": fall.limiter, "advice": fall.advice()}
    return msgspec.json.decode(msgspec.json.encode(block), type=RunHardware)


def view(**given: Any) -> WaterfallView:
    found = view_of(hardware(**given))
    assert found is not None
    return found


KNOWN: dict[str, Any] = {
    "model_flops_per_s": 0.40 * PEAK,
    "hardware_flops_per_s": 0.45 * PEAK,
    "executed_flops_per_s": 0.46 * PEAK,
    "datasheet_clock_hz": 2e9,
    "mean_clock_hz": 1.8e9,
    "gpu_busy_share": 0.8,
    "sm_active_share": 0.75,
    "tensor_active_share": 0.65,
    "data_wait_share": 0.15,
    "tile_factor": 1.01,
    "padding_efficiency": 0.9,
}


def test_every_bar_starts_where_the_one_above_ended() -> None:
    bars = view(**KNOWN).bars
    assert [bar.kind for bar in bars] == ["peak", "loss", "largest", *["loss"] * 6, "useful"]
    assert (bars[0].left_percent, bars[0].width_percent) == (0, 100)
    level = 100.0
    for bar in bars[1:]:
        assert bar.left_percent + bar.width_percent == pytest.approx(level, abs=0.02)
        level = bar.left_percent
    assert level == 0
    assert bars[-1].width_percent == pytest.approx(36, abs=0.01)


def test_a_gain_goes_up_and_makes_room() -> None:
    found = view(**KNOWN | {"mean_clock_hz": 2.5e9})
    gain = found.bars[1]
    assert (gain.kind, gain.points) == ("gain", "−25.0")
    assert found.bars[0].width_percent == pytest.approx(80)
    assert gain.left_percent == pytest.approx(80)
    assert gain.left_percent + gain.width_percent == pytest.approx(100)
    assert found.sentences == ["A negative part is a gain: it adds to what is left."]


def test_the_table_has_the_parts_of_parts_and_their_sum() -> None:
    table = view(**KNOWN).table
    kinds = {name.text: name.kind for name, *_ in table.rows}
    assert (kinds["GPU idle"], kinds["waiting for data"]) == ("biggest", "inner")
    assert list(kinds.values()).count("biggest") == 1
    assert ["waiting for data", "13.5", "135.0"] in table.texts
    assert ["GPU idle", "18.0", "180.0"] in table.texts
    assert table.texts[-1] == ["together", "100.0", "1,000.0"]


def test_what_melted_together_says_what_was_missing() -> None:
    first, *_ = view(model_flops_per_s=0.4 * PEAK, hardware_flops_per_s=0.4 * PEAK).table.texts
    assert "(not separated; unknown or left out: the SM clock" in first[0]


def test_a_share_that_is_not_known_is_no_bar_and_breaks_the_sum() -> None:
    block = {
        "parts": [{"key": "idle", "name": "GPU idle", "share": None}, {"key": "useful", "name": "useful"}]
    }
    found = view_of(msgspec.convert({"waterfall": block}, RunHardware))
    assert found is not None
    assert (found.bars[1].points, found.bars[1].width_percent) == ("unknown", 0)
    assert found.table.texts[0][2] == "unknown"
    assert found.sentences == ["The parts add up to 0.0 points, not to 100: one is unknown or wrong."]


@pytest.mark.parametrize("without", [None, RunHardware(), msgspec.convert({"waterfall": {}}, RunHardware)])
def test_a_run_without_a_waterfall_has_no_view(without: RunHardware | None) -> None:
    assert view_of(without) is None


def test_a_hair_below_zero_is_zero() -> None:
    assert (points(-1e-9), points(-0.012), points(0.5)) == ("0.0", "−1.2", "50.0")
