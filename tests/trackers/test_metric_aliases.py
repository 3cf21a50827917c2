"""Rows under the names and in the units of other tools."""

from __future__ import annotations

from math import isnan, nan

import pytest

from truemfu.trackers.metric_aliases import PRESETS, rename

ROW = {
    "global_step": 7,
    "training/loss": 2.5,
    "training/lr": 0.001,
    "training/grad_norm": 1.5,
    "perf/step_time": 0.25,
    "perf/steps_per_second": 4.0,
    "perf/tokens_per_second": 8000.0,
    "perf/tokens_per_second_per_gpu": 1000.0,
    "perf/samples_per_second": 16.0,
    "perf/mfu": 0.5,
    "perf/mfu_percent": 50.0,
    "perf/hfu": 0.6,
    "perf/tflops_per_gpu": 400.0,
    "perf/data_wait": 0.01,
    "perf/memory_peak_bytes": 3 * 2**30,
    "perf/warmup": False,
    "dataset/code/loss": 1.25,
}


def test_our_own_names_stay_as_they_are_in_a_new_dictionary() -> None:
    renamed = rename(ROW, "truemfu")
    assert renamed == ROW
    assert renamed is not ROW


def test_composer_names() -> None:
    assert rename(ROW, "composer") == {
        "global_step": 7,
        "loss/train/total": 2.5,
        "training/lr": 0.001,
        "l2_norm/grad/global": 1.5,
        "perf/step_time": 0.25,
        "throughput/batches_per_sec": 4.0,
        "throughput/tokens_per_sec": 8000.0,
        "throughput/device/tokens_per_sec": 1000.0,
        "throughput/samples_per_sec": 16.0,
        "throughput/device/mfu": 0.5,
        "perf/mfu_percent": 50.0,
        "perf/hfu": 0.6,
        "throughput/device/flops_per_sec": 400e12,
        "perf/data_wait": 0.01,
        "memory/peak_allocated_mem": pytest.approx(3.221225472),
        "perf/warmup": False,
        "dataset/code/loss": 1.25,
    }


def test_torchtitan_names() -> None:
    assert rename(ROW, "torchtitan") == {
        "global_step": 7,
        "loss_metrics/global_avg_loss": 2.5,
        "lr": 0.001,
        "grad_norm": 1.5,
        "time_metrics/end_to_end(s)": 0.25,
        "perf/steps_per_second": 4.0,
        "perf/tokens_per_second": 8000.0,
        "throughput(tps)": 1000.0,
        "perf/samples_per_second": 16.0,
        "perf/mfu": 0.5,
        "mfu(%)": 50.0,
        "perf/hfu": 0.6,
        "tflops": 400.0,
        "time_metrics/data_loading(s)": 0.01,
        "memory/max_active(GiB)": 3.0,
        "perf/warmup": False,
        "dataset/code/loss": 1.25,
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_no_two_of_our_keys_become_one(preset: str) -> None:
    names = [name for name, _ in PRESETS[preset].values()]
    assert len(set(names)) == len(names)


def test_an_unknown_value_stays_unknown_and_nan_stays_nan() -> None:
    renamed = rename({"perf/memory_peak_bytes": None, "perf/tflops_per_gpu": nan}, "composer")
    assert renamed["memory/peak_allocated_mem"] is None
    assert isnan(renamed["throughput/device/flops_per_sec"])
