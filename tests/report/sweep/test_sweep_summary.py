"""What a sweep says: rates with every experiment in them, means over equal points, ratios at equal points."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from truemfu.records import CaseResult, Status
from truemfu.report.drawing.documents import json_text
from truemfu.report.sweep.figures import SweepSummary
from truemfu.report.sweep.load import LoadedSweep, SweepEntry, entry_of, load_sweep
from truemfu.report.sweep.summary import summarize
from truemfu.report.sweep.texts import (
    context_lines,
    csv_text,
    failure_texts,
    headline,
    markdown,
    tables_of,
)
from truemfu.text import duration, printable, size

GIB = 2**30
STANDARD, DPSGD, GHOST, FAST = (
    "StandardTrainer",
    "DPSGDTrainer",
    "DPGhostClippingTrainer",
    "DPFastGradientClippingTrainer",
)


def summary_of(results: list[CaseResult], *missing: SweepEntry) -> SweepSummary:
    entries = [entry_of(result) for result in results]
    return summarize(LoadedSweep(source=Path("x"), record=None, entries=(*entries, *missing)))


def lost(trainer: str, end: str = "lost") -> SweepEntry:
    return SweepEntry(
        name=f"{trainer}_bs16_seq512",
        trainer=trainer,
        batch_size=16,
        seq_len=512,
        end=end,
        reason="its log is empty",
        log_tail=("step 3",),
    )


def test_every_experiment_is_in_the_denominator(matrix) -> None:
    summary = summary_of(matrix, lost(DPSGD), lost(STANDARD, "not run"))
    assert summary.totals.experiments == 10
    assert summary.totals.succeeded == 7
    assert summary.totals.success_rate == 0.7
    assert summary.totals.ends == {"ok": 7, "cuda_oom": 1, "lost": 1, "not run": 1}
    rates = {row.trainer: (row.succeeded, row.experiments, row.success_rate) for row in summary.trainers}
    assert rates == {
        STANDARD: (2, 3, 2 / 3),
        DPSGD: (1, 3, 1 / 3),
        GHOST: (2, 2, 1.0),
        FAST: (2, 2, 1.0),
    }


def test_mean_memory_is_given_over_the_points_all_finished_and_over_ones_own(matrix) -> None:
    rows = {row.trainer: row for row in summary_of(matrix).trainers}
    common = {name: row.mean_peak_memory_common_bytes for name, row in rows.items()}
    assert common == {STANDARD: 6 * GIB, DPSGD: 18 * GIB, GHOST: 9 * GIB, FAST: 9 * GIB}
    assert {row.common_points for row in rows.values()} == {1}
    overall = {name: (row.mean_peak_memory_bytes, row.finished_points) for name, row in rows.items()}
    assert overall == {
        STANDARD: (8 * GIB, 2),
        DPSGD: (18 * GIB, 1),
        GHOST: (10.5 * GIB, 2),
        FAST: (11.5 * GIB, 2),
    }


def test_a_trainer_that_finished_nothing_does_not_take_the_comparison_from_the_others(
    matrix, make_result
) -> None:
    unsupported = make_result("mine:Odd", end=Status.UNSUPPORTED)
    summary = summary_of([*matrix, unsupported])
    rows = {row.trainer: row for row in summary.trainers}
    assert rows[STANDARD].mean_peak_memory_common_bytes == 6 * GIB
    assert rows["mine:Odd"].mean_peak_memory_common_bytes is None
    assert any("finished no experiment" in note and "mine:Odd" in note for note in summary.notes)


def test_ratios_are_taken_at_equal_points(matrix) -> None:
    rows = {row.trainer: row for row in summary_of(matrix).against_baseline}
    assert set(rows) == {DPSGD, GHOST, FAST}
    dpsgd, ghost = rows[DPSGD], rows[GHOST]
    assert dpsgd.step_time is not None
    assert ghost.step_time is not None
    assert (dpsgd.step_time.points, dpsgd.step_time.geometric_mean) == (1, pytest.approx(4.0))
    assert ghost.step_time.geometric_mean == pytest.approx(math.sqrt(4.5 * 2.5))
    assert (ghost.step_time.lowest, ghost.step_time.highest) == (pytest.approx(2.5), pytest.approx(4.5))
    assert ghost.peak_memory is not None
    assert ghost.peak_memory.geometric_mean == pytest.approx(math.sqrt(1.5 * 1.2))
    assert ghost.hardware_flops is not None
    assert ghost.hardware_flops.geometric_mean == pytest.approx(2.0)


def test_experiments_on_another_device_are_not_compared(make_result) -> None:
    summary = summary_of([make_result(), make_result(DPSGD, device_name="NVIDIA A100-SXM4-80GB")])
    assert summary.against_baseline == []
    assert {row.common_points for row in summary.trainers} == {0}
    assert summary.devices == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]


def test_memory_of_gpu_and_host_is_never_mixed(make_result) -> None:
    on_gpu = make_result(memory_gib=6.0)
    on_cpu = make_result(batch_size=8, device="cpu", memory_gib=100.0, device_name="cpu")
    both = summary_of([on_gpu, on_cpu])
    assert both.memory_kind == "GPU allocated"
    assert both.trainers[0].mean_peak_memory_bytes == 6 * GIB
    assert [row.memory_kind for row in both.experiments] == ["GPU allocated", "process resident"]
    assert any("left out of mean peak memory" in note for note in both.notes)
    host = summary_of([on_cpu])
    assert (host.memory_kind, host.trainers[0].mean_peak_memory_bytes) == ("process resident", 100 * GIB)
    assert host.notes == []


def test_mfu_and_hfu_part_where_more_is_executed(matrix) -> None:
    rows = {row.name: row for row in summary_of(matrix).experiments}
    ghost = rows[f"{GHOST}_bs4_seq512"]
    assert ghost.mfu is not None
    assert ghost.hfu == pytest.approx(2 * ghost.mfu)
    oom = rows[f"{DPSGD}_bs8_seq512"]
    assert (oom.mfu, oom.step_time_s, oom.peak_memory_bytes) == (None, None, 139 * GIB)


def test_the_largest_batch_says_what_finished_what_did_not_and_what_fits(matrix) -> None:
    rows = {row.trainer: row for row in summary_of(matrix).largest_batches}
    dpsgd = rows[DPSGD]
    assert (dpsgd.largest_finished, dpsgd.smallest_out_of_memory) == (4, 8)
    assert dpsgd.fits == "batch 6 fits (measured: 118.2 GiB of 139.8 GiB); batch 8 does not"
    assert (rows[STANDARD].largest_finished, rows[STANDARD].smallest_out_of_memory) == (8, None)


def test_failures_are_grouped_by_cause_with_message_phase_and_log(matrix, make_result) -> None:
    killed = make_result(batch_size=16, end=Status.SIGNAL, signal="SIGSEGV", exit_code=None)
    results = [killed, *matrix, make_result(GHOST, 16, end=Status.CUDA_OOM)]
    summary = summary_of(results, lost(FAST))
    assert [failure.end for failure in summary.failures] == ["cuda_oom", "cuda_oom", "signal", "lost"]
    texts = dict(failure_texts(summary))
    oom = next(line for line in texts if line.startswith(f"{DPSGD}_bs8_seq512"))
    assert "cuda_oom in phase warm_up (exit code 1): CUDA out of memory: tried to allocate" in oom
    assert oom.endswith(
        "; peak memory 139.00 GiB; batch 6 fits (measured: 118.2 GiB of 139.8 GiB); batch 8 does not"
    )
    assert texts[oom] == ["building the model", "torch.OutOfMemoryError: CUDA out of memory"]
    assert any("signal in phase warm_up (SIGSEGV)" in line for line in texts)
    assert texts[f"{FAST}_bs16_seq512: lost: its log is empty"] == ["step 3"]


def test_a_sweep_in_which_nothing_finished_has_rates_and_no_means(make_result) -> None:
    summary = summary_of(
        [make_result(end=Status.ERROR, memory=None), make_result(DPSGD, end=Status.TIMEOUT, memory=None)]
    )
    assert (summary.totals.success_rate, summary.memory_kind, summary.against_baseline) == (0.0, None, [])
    assert {row.mean_peak_memory_bytes for row in summary.trainers} == {None}
    assert headline(summary) == "0 of 2 experiments succeeded (0.0 %): 1 error, 1 timeout"
    assert "not measured" in markdown(summary)


def test_different_versions_are_said(make_result) -> None:
    summary = summary_of([make_result(), make_result(DPSGD, torch_version="2.13.0")])
    assert summary.notes == ["experiments ran under different versions of torch: 2.11.0, 2.13.0"]


def test_what_experiments_noted_is_said_once(make_result) -> None:
    no_events = "no TensorBoard events: tensorboard is not installed"
    results = [
        make_result(notes=[no_events]),
        make_result(DPSGD, notes=[no_events, "ended by SIGTERM after its result was written"]),
    ]
    assert summary_of(results).notes == [
        f"2 experiments: {no_events}",
        "DPSGDTrainer_bs4_seq512: ended by SIGTERM after its result was written",
    ]


def test_json_is_the_summary_and_loads_back(matrix) -> None:
    data = json.loads(json_text(summary_of(matrix)))
    assert set(data) == {
        "sweep_id",
        "created_at_s",
        "devices",
        "hosts",
        "versions",
        "memory_kind",
        "baseline",
        "totals",
        "trainers",
        "against_baseline",
        "largest_batches",
        "scaling",
        "experiments",
        "failures",
        "notes",
    }
    assert data["totals"] == {
        "experiments": 8,
        "succeeded": 7,
        "success_rate": 0.875,
        "ends": {"ok": 7, "cuda_oom": 1},
    }


def test_csv_has_a_row_per_experiment_with_raw_values(matrix) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(summary_of(matrix)))))
    assert [row["name"] for row in rows] == [result.name for result in matrix]
    assert float(rows[0]["step_time_s"]) == 0.036
    assert int(rows[0]["peak_memory_bytes"]) == 6 * GIB
    assert rows[3]["end"] == "cuda_oom"
    assert rows[3]["step_time_s"] == ""


def test_markdown_tables_have_as_many_cells_in_every_row(matrix, make_result) -> None:
    odd = make_result("mine:Odd", 64, end=Status.CUDA_OOM, fits="batch 2 | 3 fits")
    text = markdown(summary_of([*matrix, odd]))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1
    assert "| DPSGDTrainer_bs8_seq512 | cuda_oom | - |" in text
    assert "      torch.OutOfMemoryError: CUDA out of memory" in text


def test_the_label_of_a_mean_tells_its_points_and_its_memory(matrix) -> None:
    experiments, trainers, *_ = tables_of(summary_of(matrix))
    assert "Peak memory: GPU allocated." in (experiments.sentence or "")
    assert trainers.labels[4:] == ["mean peak, common points", "n", "mean peak, all its points", "n"]
    assert trainers.texts[0][4:] == ["6.00 GiB", "1", "8.00 GiB", "2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(0.0364), "36.40 ms"),
        (duration(1.5), "1.500 s"),
        (duration(None), "-"),
        (size(18.02 * GIB), "18.02 GiB"),
        (size(300 * 2**20), "300.0 MiB"),
        (size(None), "-"),
    ],
)
def test_figures_carry_their_unit(text: str, expected: str) -> None:
    assert text == expected


def test_reading_a_sweep_needs_no_torch(matrix, write_sweep) -> None:
    code = (
        "import sys\n"
        "from truemfu.report.sweep.load import load_sweep\n"
        "from truemfu.report.sweep.summary import summarize\n"
        "from truemfu.report.sweep.texts import markdown\n"
        "from truemfu.report.sweep import page\n"
        "print(len(markdown(summarize(load_sweep(sys.argv[1])))) > 100, 'torch' in sys.modules)"
    )
    folder = write_sweep(matrix)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_summary_of_files_knows_which_sweep_it_is(matrix, write_sweep) -> None:
    summary = summarize(load_sweep(write_sweep(matrix)))
    assert (summary.sweep_id, summary.created_at_s) == ("sweep-1", 1_790_000_000.0)


def test_markdown_shows_what_an_exception_says_as_it_is(make_result) -> None:
    text = markdown(
        summary_of([make_result(end=Status.ERROR, message="<b> *in* __init__ of bs4_seq512\nat 1|2")])
    )
    assert r"\<b> \*in\* \_\_init\_\_ of bs4_seq512 at 1\|2" in text


def test_the_true_size_of_every_model_is_said(make_result) -> None:
    assert "1b: 1,339,674,624 parameters." in context_lines(summary_of([make_result()]))


def test_step_times_that_are_hardly_known_are_named(make_result) -> None:
    sure, unsure = make_result(), make_result("DPSGDTrainer")
    steps = msgspec.structs.replace(unsure.measured.steps, relative_error=0.4)
    unsure = msgspec.structs.replace(unsure, measured=msgspec.structs.replace(unsure.measured, steps=steps))
    assert summary_of([sure, unsure]).notes == [
        "step times with an error above 5 % (was the machine busy?): DPSGDTrainer_bs4_seq512"
    ]


ACTIVE = [
    "![x](https://example.org/a.png)",
    "[x](javascript:alert(1))",
    "![x]",
    "<img src=x onerror=alert(1)>",
    "<https://example.org>",
    "https://example.org/?a=b",
    "www.example.org",
    "&lt;script&gt;",
    "a\n\n![x](y.png)\n<script>alert(1)</script>",
    "a\r\r<script>alert(1)</script>",
    "`x` ![a](b) `",
    "\\![x](https://example.org/a.png)",
    "# heading",
    "| a | ![x](y) |",
    "\x1b]52;c;aGk=\x07\x9b2J\u202e",
]


@pytest.mark.parametrize("text", ACTIVE)
def test_nothing_in_markdown_is_active_whatever_a_file_holds(text: str, make_result) -> None:
    from markdown_it import MarkdownIt

    ok = make_result(device_name=text)  # a name that is no file name is refused by the record
    ok = msgspec.structs.replace(ok, case=msgspec.structs.replace(ok.case, model=text, trainer=text))
    failed = make_result("t:T", end=Status.ERROR, message=text)
    summary = summary_of([ok, failed])
    failure = msgspec.structs.replace(summary.failures[0], log_tail=[text.replace("\n", " ")])
    summary = msgspec.structs.replace(
        summary, failures=[failure], notes=[text], memory_kind=text, baseline=text
    )
    written = markdown(summary)
    assert printable(written) == written
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = [inner for token in parser.parse(written) for inner in (token, *(token.children or ()))]
    kinds = {token.type for token in tokens}
    assert not kinds & {"image", "link_open", "html_inline", "html_block", "code_inline"}
    outside_logs = "\n".join(line for line in written.splitlines() if not line.startswith("      "))
    assert not re.search(r"(?<!\\)://|www\.", outside_logs)  # GitHub makes links of plain addresses
    headings = [token for token in tokens if token.type == "heading_open"]
    assert len(headings) == 2 + len(tables_of(summary))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+1", "'+1+1"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("  =1+1", "'  =1+1"),
        ("\t=1", "'\t=1"),
        ("\r=1", "\\u000d=1"),
        ("-5", "-5"),
        ("+1e-3", "+1e-3"),
        ("plain - text", "plain - text"),
        ("\x1b]0;t\x07", "\\u001b]0;t\\u0007"),
    ],
)
def test_no_cell_of_the_csv_is_a_formula(text: str, cell: str, make_result) -> None:
    rows = list(
        csv.DictReader(io.StringIO(csv_text(summary_of([make_result(end=Status.ERROR, message=text)]))))
    )
    assert rows[0]["message"] == cell


def test_the_json_holds_what_the_files_held_and_no_control_character(make_result) -> None:
    text = 'a\x1b[2J\x7f\x9b\u202e\U000e0041"\\ü'
    written = json_text(summary_of([make_result(end=Status.ERROR, message=text)]))
    assert printable(written) == written
    assert json.loads(written)["experiments"][0]["message"] == text
    assert "ü" in written
