"""The page of a sweep shows its experiments, its comparisons and its failures, and needs nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from markup import bare

from truemfu.records import CaseResult, Status
from truemfu.report.sweep.load import load_sweep
from truemfu.report.sweep.page import write_sweep_page
from truemfu.report.sweep.summary import summarize


@pytest.fixture
def page(matrix: list[CaseResult], write_sweep, tmp_path: Path) -> str:
    summary = summarize(load_sweep(write_sweep(matrix)))
    return bare(write_sweep_page(tmp_path / "report.html", summary).read_text(encoding="utf-8"))


def test_every_experiment_and_every_figure_is_there(page: str, matrix: list[CaseResult]) -> None:
    for result in matrix:
        assert f"<td>{result.name}</td>" in page
    assert "7 of 8 experiments succeeded (87.5 %)" in page
    assert "NVIDIA H200; torch 2.11.0, opacus 1.6.0." in page
    assert "2026-09-21" in page
    for heading in ("Experiments", "Trainers", "Against StandardTrainer", "Largest batch"):
        assert f"<h2>{heading}</h2>" in page
    assert "To see where the peak went in a training, start it with <code>truemfu run</code>" in page


def test_a_failure_has_its_reason_and_its_log(page: str) -> None:
    assert "<td>DPSGDTrainer_bs8_seq512</td><td>cuda_oom</td><td>" in page
    assert "batch 6 fits (measured: 118.2 GiB of 139.8 GiB)" in page
    assert "torch.OutOfMemoryError: CUDA out of memory\n</pre>" in page


def test_a_message_cannot_break_the_page(make_result, write_sweep, tmp_path: Path) -> None:
    result = make_result(end=Status.ERROR, message="<script>alert(1)</script>")
    summary = summarize(load_sweep(write_sweep([result])))
    text = bare(write_sweep_page(tmp_path / "report.html", summary).read_text(encoding="utf-8"))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
