"""The parts add up to the peak whatever is known, and the largest names what held the run back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truemfu.waterfall import Waterfall, WaterfallInputs, waterfall

PEAK, CLOCK = 989.4e12, 1830e6


def fall(**values: Any) -> Waterfall:
    """A waterfall on an H200 in which whatever is not given was ideal."""
    flops_per_s = values.pop("flops_per_s", 0.4 * PEAK)
    given = {
        "peak_flops_per_s": PEAK,
        "datasheet_clock_hz": CLOCK,
        "mean_clock_hz": CLOCK,
        "gpu_busy_share": 1.0,
        "tensor_active_share": 0.45,
        "executed_flops_per_s": flops_per_s,
        "hardware_flops_per_s": flops_per_s,
        "model_flops_per_s": flops_per_s,
        "tile_factor": 1.0,
        "padding_efficiency": 1.0,
    }
    result = waterfall(WaterfallInputs(**{**given, **values}))
    assert result is not None
    return result


def shares(result: Waterfall) -> dict[str, float]:
    return {part.key: part.share for part in result.parts}


def test_every_part_by_its_equation() -> None:
    parts = shares(
        fall(
            mean_clock_hz=0.9 * CLOCK,
            gpu_busy_share=0.8,
            tensor_active_share=0.7,
            executed_flops_per_s=0.60 * PEAK,
            hardware_flops_per_s=0.5 * PEAK,
            tile_factor=1.02,
            masked_flops_per_s=0.04 * PEAK,
            model_flops_per_s=0.4 * PEAK,
            padding_efficiency=0.75,
        )
    )
    assert parts == pytest.approx(
        {
            "clock": 0.1,
            "idle": 0.9 * 0.2,
            "no_tensor": 0.9 * 0.1,
            "below_rate": 0.9 * 0.7 - 0.6,
            "other_executed": 0.6 - (1.02 * 0.5 - 0.04),
            "tile_padding": 0.02 * 0.5,
            "masked_attention": -0.04,
            "recomputation": 0.1,
            "padding_tokens": 0.4 * 0.25,
            "useful": 0.3,
        }
    )
    assert sum(parts.values()) == pytest.approx(1, abs=1e-12)


def test_a_chip_above_its_datasheet_gains() -> None:
    result = fall(mean_clock_hz=1980e6, throttle={"power_limit": 0.0})
    clock = result.parts[0]
    assert clock.share == pytest.approx(1 - 1980 / 1830)
    assert clock.name == "gain from a clock above the datasheet's"
    assert sum(shares(result).values()) == pytest.approx(1, abs=1e-12)


def test_a_power_limited_product_as_measured() -> None:
    """8192³ on an H200, sustained: 1,335 MHz at 688 of 700 W, the tensor pipe 93 % active."""
    result = fall(
        flops_per_s=662e12,
        mean_clock_hz=1335e6,
        throttle={"power_limit": 0.98, "thermal_limit": 0.02, "gpu_idle": 0.5},
        gpu_busy_share=0.995,
        tensor_active_share=0.93,
    )
    assert result.limiter == "clock"
    assert shares(result)["clock"] == pytest.approx(0.27, abs=0.001)
    assert shares(result)["below_rate"] == pytest.approx(0.01, abs=0.001)
    assert result.throttle_reasons == ("power_limit",)
    assert result.advice()[0].startswith(
        "clock below the datasheet's (the power limit): 27 points of the peak: not caused by the program"
    )


@pytest.mark.parametrize(
    ("values", "limiter", "words"),
    [
        (
            {"gpu_busy_share": 0.5, "data_wait_share": 0.45},
            "idle_data_wait",
            "45 of them waiting for data: more",
        ),
        ({"gpu_busy_share": 0.5, "data_wait_share": 0.01}, "idle_other", "launch queue runs dry"),
        (
            {"gpu_busy_share": 0.5, "between_steps_share": 0.4, "forwards_between_steps": 41},
            "idle_between_steps",
            "40 of them between steps, not waiting for data "
            "(41 forward passes without gradients: evaluation or generation)",
        ),
        ({"gpu_busy_share": 0.5}, "idle", "GPU idle: 50 points of the peak: the host is too slow"),
        ({"gpu_busy_share": 0.6, "launch_gap_share": 0.4}, "idle_launch_gaps", "CUDA graphs"),
        (
            {"tensor_active_share": 0.45},
            "no_tensor",
            "busy without tensor work: 55 points of the peak: element",
        ),
        (
            {"sm_active_share": 0.5},
            "no_tensor_unfilled",
            "50 of them SMs empty while a kernel ran: kernels too",
        ),
        ({"sm_active_share": 0.99, "dram_active_share": 0.8}, "no_tensor_other", "memory is busy 80 % of"),
        ({"tensor_active_share": 0.9, "executed_flops_per_s": 0.4 * PEAK}, "below_rate", "slower dtype"),
        (
            {"tensor_active_share": 0.95, "executed_flops_per_s": 0.94 * PEAK, "tile_factor": 1.0},
            "other_executed",
            "run `truemfu audit`",
        ),
        (
            {"tensor_active_share": 0.95, "executed_flops_per_s": 0.94 * PEAK, "tile_factor": 2.3},
            "tile_padding",
            "multiples of 128",
        ),
        (
            {
                "tensor_active_share": 0.95,
                "executed_flops_per_s": 0.94 * PEAK,
                "hardware_flops_per_s": 0.94 * PEAK,
            },
            "recomputation",
            "checkpoint fewer layers",
        ),
        (
            {"flops_per_s": 0.94 * PEAK, "tensor_active_share": 0.95, "padding_efficiency": 0.5},
            "padding_tokens",
            "padding tokens: 47 points of the peak: pack sequences",
        ),
    ],
)
def test_each_staged_case_names_its_limiter(values: dict[str, Any], limiter: str, words: str) -> None:
    values = {"gpu_busy_share": 1.0, **values}
    if values["gpu_busy_share"] < 1:
        values.setdefault("tensor_active_share", values["gpu_busy_share"] - 0.05)
    result = fall(**values)
    assert result.limiter == limiter
    assert words in result.advice()[0]
    assert sum(shares(result).values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("collectives", "sm", "communication", "unfilled"),
    [
        (0.3, 0.9, 0.0, 0.1),  # there may have been tensor work in all of these cycles
        (0.6, 0.9, 0.15, 0.0),  # at least 0.15 had none; SMs may have been empty meanwhile
        (0.6, 0.5, 0.15, 0.35),
        (1.0, 0.5, 0.55, 0.0),
    ],
)
def test_cycles_without_tensor_work_while_a_collective_ran_are_a_part(
    collectives: float, sm: float, communication: float, unfilled: float
) -> None:
    result = fall(collective_share=collectives, sm_active_share=sm, world_size=8)
    (part,) = [part for part in result.parts if part.key == "no_tensor"]
    inner = {of.key: of.share for of in part.of}
    assert inner == pytest.approx(
        {
            "no_tensor_communication": communication,
            "no_tensor_unfilled": unfilled,
            "no_tensor_other": 0.55 - communication - unfilled,
        }
    )
    assert f"collectives ran {100 * collectives:.1f} % of the time" in result.notes[0]


def test_a_collective_beside_other_work_is_not_called_the_cause() -> None:
    result = fall(collective_share=0.9, world_size=8, dram_active_share=0.9)
    assert result.limiter == "no_tensor"
    (text,) = [text for text in result.advice() if text.startswith("busy without")]
    assert "45 of them while a collective ran, at least: this includes communication between ranks" in text


def test_an_impossible_share_of_collectives_is_left_out_with_one_note() -> None:
    (note,) = fall(collective_share=1.3, world_size=8).notes
    assert note.startswith("time in collectives was given as 1.3")


def test_collectives_that_were_not_timed_are_no_part_and_a_note() -> None:
    result = fall(world_size=8)
    (part,) = [part for part in result.parts if part.key == "no_tensor"]
    assert not part.of
    assert "TORCH_NCCL_ENABLE_TIMING=1" in result.notes[0]
    assert not fall().notes


def test_waiting_that_work_covers_costs_nothing() -> None:
    result = fall(gpu_busy_share=0.9, tensor_active_share=0.8, data_wait_share=0.6, launch_gap_share=0.3)
    idle = result.parts[1]
    assert {part.key: part.share for part in idle.of} == pytest.approx(
        {"idle_data_wait": 0.1, "idle_launch_gaps": 0.0, "idle_other": 0.0}
    )
    unknown = fall(gpu_busy_share=0.9, tensor_active_share=0.8, data_wait_share=0.05).parts[1]
    assert unknown.of[-1].name == "gaps between launches or other"


@pytest.mark.parametrize(
    ("unknown", "merged", "missing"),
    [
        (["gpu_busy_share"], "idle_or_no_tensor", ("how long the GPU was busy",)),
        (["tensor_active_share"], "no_tensor_or_below_rate", ("the tensor pipe's activity",)),
        (["executed_flops_per_s"], "below_rate_or_other_executed", ("the executed FLOPs",)),
        (["tile_factor"], "other_executed_or_tile_padding", ("the tile factor",)),
        (
            ["hardware_flops_per_s"],
            "other_executed_or_tile_padding_or_recomputation",
            ("the counted executed FLOPs",),
        ),
        (["mean_clock_hz"], "unexplained", ("the SM clock or the datasheet's",)),
        (["datasheet_clock_hz"], "unexplained", ("the SM clock or the datasheet's",)),
    ],
)
def test_what_is_unknown_is_merged_into_the_next_part(
    unknown: list[str], merged: str, missing: tuple[str, ...]
) -> None:
    result = fall(**{"mean_clock_hz": 0.9 * CLOCK, **dict.fromkeys(unknown)})
    part = next(part for part in result.parts if part.key == merged)
    assert part.missing == missing
    assert sum(shares(result).values()) == pytest.approx(1, abs=1e-12)


def test_a_merged_part_says_what_is_not_known() -> None:
    result = fall(gpu_busy_share=None)
    assert result.advice() == (
        "GPU idle or busy without tensor work: 55 points of the peak, not separated; unknown: how long the "
        "GPU was busy.",
    )


def test_unknown_padding_stays_in_what_is_useful() -> None:
    useful = fall(padding_efficiency=None).parts[-1]
    assert (useful.key, useful.share) == ("useful", pytest.approx(0.4))
    assert useful.name == "the model's FLOPs, padding tokens included"
    assert useful.missing == ("the padding",)


def test_a_count_alone_explains_nothing_and_still_adds_up() -> None:
    result = waterfall(
        WaterfallInputs(peak_flops_per_s=PEAK, model_flops_per_s=0.4 * PEAK, hardware_flops_per_s=0.5 * PEAK)
    )
    assert result is not None
    assert shares(result) == pytest.approx({"unexplained": 0.5, "recomputation": 0.1, "useful": 0.4})


def test_sm_activity_stands_for_an_unknown_busy_share() -> None:
    result = fall(gpu_busy_share=None, sm_active_share=0.6)
    assert shares(result)["idle"] == pytest.approx(0.4)
    assert shares(result)["no_tensor"] == pytest.approx(0.15)


def test_causal_kernels_under_the_full_convention_are_a_negative_part() -> None:
    result = fall(executed_flops_per_s=0.35 * PEAK)
    assert shares(result)["other_executed"] == pytest.approx(-0.05)
    told = shares(fall(executed_flops_per_s=0.35 * PEAK, masked_flops_per_s=0.05 * PEAK))
    assert told["other_executed"] == pytest.approx(0, abs=1e-12)
    assert told["masked_attention"] == pytest.approx(-0.05)


@pytest.mark.parametrize("peak", [None, 0.0, -1.0, math.nan, math.inf])
def test_no_peak_no_waterfall(peak: float | None) -> None:
    assert waterfall(WaterfallInputs(peak_flops_per_s=peak, model_flops_per_s=1e12)) is None


@pytest.mark.parametrize("model", [None, -1.0, math.nan, math.inf])
def test_no_model_flops_no_waterfall(model: float | None) -> None:
    assert waterfall(WaterfallInputs(peak_flops_per_s=PEAK, model_flops_per_s=model)) is None


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"gpu_busy_share": 1.7}, "GPU busy was given as 1.7, which is above 1: ignored"),
        ({"tensor_active_share": math.nan}, "tensor activity was given as nan: ignored"),
        ({"tile_factor": 0.9}, "a tile factor of 0.9 is below 1: ignored"),
        ({"hardware_flops_per_s": 0.1 * PEAK}, "fewer executed FLOPs than model FLOPs were counted"),
        ({"gpu_busy_share": 0.2}, "tensor activity of 45.0 % is above the busy share of 20.0 %"),
        ({"executed_flops_per_s": 0.6 * PEAK}, "more was executed than the tensor pipe's activity allows"),
    ],
)
def test_a_value_that_cannot_be_right_is_noted(values: dict[str, Any], note: str) -> None:
    result = fall(**values)
    assert len(result.notes) == 1
    assert result.notes[0].startswith(note)
    assert sum(shares(result).values()) == pytest.approx(1, abs=1e-12)


def test_a_share_a_hair_above_one_is_one() -> None:
    result = fall(gpu_busy_share=1.004)
    assert shares(result)["idle"] == 0
    assert result.notes == ()


def test_the_metrics_have_every_part_under_its_key() -> None:
    metrics = fall(gpu_busy_share=0.8, data_wait_share=0.1).as_metrics()
    assert metrics["perf/loss/idle"] == pytest.approx(0.2)
    assert metrics["perf/loss/idle_data_wait"] == pytest.approx(0.1)
    assert metrics["perf/loss/idle_other"] == pytest.approx(0.1)
    assert metrics["perf/loss/useful"] == pytest.approx(0.4)
    # No name is a folder of another: trackers that write files could not hold both.
    assert all(name.count("/") == 2 for name in metrics)


def test_as_dict_is_ready_for_json() -> None:
    read = json.loads(json.dumps(fall(data_wait_share=0.1).as_dict()))
    assert read["parts"][0]["key"] == "clock"


def test_small_losses_get_no_advice() -> None:
    result = fall(flops_per_s=0.96 * PEAK, tensor_active_share=0.97)
    assert result.advice() == ()
    assert result.limiter == "no_tensor"


def test_nothing_lost_has_no_limiter() -> None:
    result = fall(flops_per_s=1.0 * PEAK, tensor_active_share=1.0)
    assert result.limiter is None


SHARE = st.none() | st.floats(0, 1)
RATE = st.none() | st.floats(0, 4e15)


@settings(max_examples=400, deadline=None)
@given(
    model=st.floats(0, 2e15),
    hardware=RATE,
    executed=RATE,
    masked=RATE,
    clock=st.none() | st.floats(1e8, 3e9),
    busy=SHARE,
    sm=SHARE,
    tensor=SHARE,
    data_wait=SHARE,
    launch_gap=SHARE,
    padding=SHARE,
    collectives=SHARE,
    tile_factor=st.none() | st.floats(1, 3),
)
def test_the_parts_add_up_to_the_peak(
    model: float,
    hardware: float | None,
    executed: float | None,
    masked: float | None,
    clock: float | None,
    busy: float | None,
    sm: float | None,
    tensor: float | None,
    data_wait: float | None,
    launch_gap: float | None,
    padding: float | None,
    collectives: float | None,
    tile_factor: float | None,
) -> None:
    result = waterfall(
        WaterfallInputs(
            peak_flops_per_s=PEAK,
            model_flops_per_s=model,
            hardware_flops_per_s=hardware,
            executed_flops_per_s=executed,
            masked_flops_per_s=masked,
            datasheet_clock_hz=CLOCK,
            mean_clock_hz=clock,
            gpu_busy_share=busy,
            sm_active_share=sm,
            tensor_active_share=tensor,
            data_wait_share=data_wait,
            collective_share=collectives,
            launch_gap_share=launch_gap,
            tile_factor=tile_factor,
            padding_efficiency=padding,
        )
    )
    assert result is not None
    assert sum(part.share for part in result.parts) == pytest.approx(1, abs=1e-9)
    assert result.parts[-1].share == pytest.approx(model / PEAK * (1 if padding is None else padding))
    assert len(result.as_metrics()) == sum(1 + len(part.of) for part in result.parts)
    for part in result.parts:
        if part.of:
            assert sum(inner.share for inner in part.of) == pytest.approx(part.share, abs=1e-9)
            assert all(inner.share >= -1e-12 for inner in part.of)
    for part in result.parts:
        if part.key in ("idle", "no_tensor", "tile_padding", "recomputation", "padding_tokens"):
            assert part.share >= -1e-9
    result.advice()
