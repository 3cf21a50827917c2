"""Several GPUs and several kinds of them in one summary: scaling, and nothing unlike is averaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from truemfu.records import CaseResult, Status
from truemfu.report.sweep.figures import SweepSummary
from truemfu.report.sweep.load import LoadedSweep, entry_of, load_sweep
from truemfu.report.sweep.summary import summarize
from truemfu.report.sweep.texts import context_lines, csv_text, markdown, tables_of

GIB = 2**30
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
STANDARD, DPSGD = "StandardTrainer", "DPSGDTrainer"


def summary_of(*results: CaseResult) -> SweepSummary:
    entries = tuple(entry_of(result) for result in results)
    return summarize(LoadedSweep(source=Path("x"), record=None, entries=entries))


def test_efficiency_is_tokens_per_second_over_those_of_as_many_single_gpus(make_result) -> None:
    one, four = make_result(step_time_s=0.1), make_result(step_time_s=0.125, gpus=4, parallel="ddp")
    (row,) = summary_of(one, four).scaling
    assert (row.name, row.gpus, row.parallel) == ("StandardTrainer_bs4_seq512_ddpx4", 4, "ddp")
    assert row.efficiency == pytest.approx(0.8)
    assert (row.on_one, row.reason) == ("StandardTrainer_bs4_seq512", None)
    assert row.tokens_per_s == pytest.approx(4 * 4 * 512 / 0.125)
    assert row.peak_memory_by_rank_bytes == [6 * GIB, 7 * GIB, 8 * GIB, 9 * GIB]
    (table,) = [table for table in tables_of(summary_of(one, four)) if table.title == "Scaling"]
    assert table.texts[0][4:] == ["80.0 %", "6.00 GiB, 7.00 GiB, 8.00 GiB, 9.00 GiB"]


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        ({"batch_size": 8}, "no such experiment on one GPU"),
        ({"end": Status.CUDA_OOM}, "StandardTrainer_bs4_seq512 did not finish: cuda_oom"),
        ({"device_name": A100}, f"StandardTrainer_bs4_seq512 ran on another device: {A100}"),
    ],
)
def test_without_the_same_experiment_on_one_gpu_the_reason_is_given(one, reason: str, make_result) -> None:
    summary = summary_of(make_result(**one), make_result(gpus=2, parallel="fsdp2"))
    (row,) = summary.scaling
    assert (row.efficiency, row.on_one, row.reason) == (None, None, reason)
    assert f"- ({reason})" in markdown(summary)


def test_means_are_never_over_unlike_devices_or_numbers_of_gpus(make_result) -> None:
    summary = summary_of(
        make_result(memory_gib=6.0),
        make_result(batch_size=8, memory_gib=10.0),
        make_result(batch_size=16, memory_gib=40.0, device_name=A100),
        make_result(memory_gib=80.0, gpus=2, parallel="ddp"),
        make_result(memory_gib=20.0, gpus=2, parallel="fsdp2"),
    )
    means = {(row.device, row.gpus, row.parallel): row.mean_peak_memory_bytes for row in summary.trainers}
    assert means == {
        (H200, 1, None): 8 * GIB,
        (A100, 1, None): 40 * GIB,
        (H200, 2, "ddp"): 80 * GIB,
        (H200, 2, "fsdp2"): 20 * GIB,
    }
    assert sum(row.experiments for row in summary.trainers) == 5
    trainers = tables_of(summary)[1]
    assert [row[1] for row in trainers.texts] == [H200, A100, f"2 × {H200}, ddp", f"2 × {H200}, fsdp2"]


def test_ratios_are_never_over_unlike_devices(make_result) -> None:
    summary = summary_of(
        make_result(step_time_s=0.1),
        make_result(DPSGD, step_time_s=0.2),
        make_result(batch_size=8, step_time_s=0.1, device_name=A100),
        make_result(DPSGD, batch_size=8, step_time_s=0.8, device_name=A100),
        make_result(batch_size=16, step_time_s=0.1, gpus=2, parallel="ddp"),
        make_result(DPSGD, batch_size=16, step_time_s=0.1),
    )
    ratios = {row.device: row.step_time for row in summary.against_baseline}
    assert {device: ratio.geometric_mean for device, ratio in ratios.items() if ratio} == {
        H200: pytest.approx(2.0),
        A100: pytest.approx(8.0),
    }
    assert {ratio.points for ratio in ratios.values() if ratio} == {1}


def test_the_largest_batch_is_that_of_one_kind_of_device(make_result) -> None:
    summary = summary_of(
        make_result(batch_size=16),
        make_result(batch_size=8, end=Status.CUDA_OOM, device_name=A100),
        make_result(batch_size=4, device_name=A100),
    )
    rows = {row.device: (row.largest_finished, row.smallest_out_of_memory) for row in summary.largest_batches}
    assert rows == {H200: (16, None), A100: (4, 8)}


def test_one_that_left_no_device_belongs_to_the_only_one_there_is(make_result) -> None:
    dead = make_result(batch_size=8, end=Status.SIGNAL, environment=None)
    assert [row.device for row in summary_of(make_result(), dead).trainers] == [H200]
    mixed = summary_of(make_result(), make_result(batch_size=16, device_name=A100), dead)
    assert [(row.device, row.experiments) for row in mixed.trainers] == [(H200, 1), (A100, 1), (None, 1)]


def test_hosts_are_told_apart(make_result) -> None:
    summary = summary_of(make_result(host="n1"), make_result(batch_size=8, host="n2"))
    assert summary.hosts == ["n1", "n2"]
    assert [row.host for row in summary.experiments] == ["n1", "n2"]
    assert summary.trainers[0].finished_points == 2  # the same device: they may share a mean
    assert any(f"{H200} on n1, n2;" in line for line in context_lines(summary))
    assert [row[2] for row in tables_of(summary)[0].texts] == ["n1", "n2"]
    assert "host" not in tables_of(summary_of(make_result()))[0].labels


def test_an_experiment_without_a_result_has_its_gpus_in_its_name(make_result, write_sweep) -> None:
    folder = write_sweep([make_result()], cases=["Mine_bs4_seq512_tiny_fsdp2x8"])
    (missing,) = [entry for entry in load_sweep(folder).entries if entry.result is None]
    assert (missing.trainer, missing.gpus, missing.parallel) == ("Mine", 8, "fsdp2")


def test_csv_has_the_memory_of_each_rank(make_result) -> None:
    text = csv_text(summary_of(make_result(gpus=2, parallel="ddp")))
    assert f"[{6 * GIB}, {7 * GIB}]" in text
