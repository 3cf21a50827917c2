"""The page of a run says what its files say, unknown where they do not, and needs nothing else."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markup import bare
from watched_training import PADDING_LOST, RUN_STEPS, hardware_block

from truemfu.report.drawing.html import LONGEST_TEXT
from truemfu.report.run.load import load_run
from truemfu.report.run.page import write_run_page
from truemfu.report.run.side_by_side import write_runs_page

Change = Callable[[Callable[[dict[str, Any]], object]], dict[str, Any]]


def page_of(folder: Path) -> str:
    return bare(whole_page_of(folder))


def whole_page_of(folder: Path) -> str:
    return write_run_page(folder / "page.html", load_run(folder)).read_text(encoding="utf-8")


def side_by_side_of(*folders: Path) -> str:
    path = folders[0] / "runs.html"
    return bare(write_runs_page(path, list(map(load_run, folders))).read_text(encoding="utf-8"))


def tile(page: str, label: str) -> tuple[str, str]:
    """A figure's value and its remark."""
    found = re.search(rf"<span>{re.escape(label)}</span><b>(.*?)</b><small>(.*?)</small>", page)
    assert found, f"there is no figure {label}"
    return found[1], found[2]


def fact(page: str, label: str) -> str:
    found = re.search(rf"<dt>{re.escape(label)}</dt><dd>(.*?)</dd>", page)
    assert found, f"there is no {label}"
    return found[1]


def test_figures_are_those_of_the_summary(run_folder: Path, change_run: Change) -> None:
    # A busy machine lets time pass between steps, which is noted.
    summary = change_run(lambda run: run["summary"].update(notes=[]))["summary"]
    page = page_of(run_folder)
    assert tile(page, "MFU, median")[0] in (f"{100 * summary['median_mfu']:.{n}f} %" for n in range(1, 6))
    assert tile(page, "tokens/s") == (f"{summary['median_tokens_per_second']:,.0f}", "one device")
    assert tile(page, "padding") == (f"{100 * PADDING_LOST} %", "of all tokens")
    assert tile(page, "step, median")[1] == "steps after warm-up"
    assert "µs on the training thread" in tile(page, "monitor&#39;s own cost")[1]
    assert fact(page, "device") == "cpu"
    assert fact(page, "peak") == "50 GFLOP/s (monitoring.peak_tflops)"
    assert (
        fact(page, "FLOPs by")
        == "count of observed steps; a multiply-add is 2 FLOPs; attention counts all pairs"
    )
    assert fact(page, "steps").startswith(f"{RUN_STEPS} logged; 4 of them warm-up")
    assert "<title>Training run run</title>" in page
    assert "Nothing was lost, and there were no warnings." in page
    assert 'class="alert"' not in page


def test_there_is_a_chart_for_loss_utilization_and_step_time(run_folder: Path) -> None:
    page = page_of(run_folder)
    titles = re.findall(r'aria-label="([^";]*?) over steps;', page)
    assert titles == ["Loss", "MFU and HFU", "Step time", "Phases of a step"]
    strokes = re.findall(r'class="stroke" d="([^"]*)"', page.partition("Phases of a step, ")[0])
    # Nothing is recomputed here, so that MFU and HFU are one line.
    assert [stroke.count("L") + 1 for stroke in strokes] == [RUN_STEPS] * 3
    assert "MFU, equal to HFU" in page


def test_recomputation_is_a_second_line(run_folder: Path) -> None:
    path = run_folder / "training_log.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([row | {"perf/hfu": 1.3 * row["perf/mfu"]} for row in rows]))
    page = page_of(run_folder)
    assert len(re.findall(r'class="stroke"', page.partition("Phases of a step, ")[0])) == 4
    assert "MFU, equal to HFU" not in page


def test_without_a_peak_the_page_says_why_there_is_no_mfu(run_folder: Path, change_run: Change) -> None:
    change_run(lambda run: run["summary"].update(median_mfu=None, median_hfu=None, peak_source=None))
    path = run_folder / "training_log.json"
    rows = json.loads(path.read_text())
    for row in rows:
        for name in ("mfu", "hfu", "mfu_median"):
            row.pop(f"perf/{name}", None)
    path.write_text(json.dumps(rows))
    page = page_of(run_folder)
    value, remark = tile(page, "MFU, median")
    no_peak = "no peak is known for this device: set TRUEMFU_PEAK_TFLOPS to its TFLOP/s"
    assert (value, remark) == ("unknown", no_peak)
    assert tile(page, "model FLOP/s, median")[0].endswith("GFLOP/s")
    assert fact(page, "peak") == "unknown"
    assert "MFU and HFU over steps" not in page


@pytest.mark.parametrize("page", [page_of, lambda run: side_by_side_of(run, run)], ids=["alone", "two"])
def test_a_run_without_counters_says_in_a_line_how_to_get_a_waterfall(
    run_folder: Path, change_run: Change, page: Callable[[Path], str]
) -> None:
    shown = page(run_folder)
    assert "no GPU counters were read (mode smart)." in shown
    assert "<code>truemfu run</code> reads them" in shown
    assert "What the hardware did" not in shown
    change_run(lambda run: run.update(mode="hybrid"))
    assert "no GPU counters were read; they need an NVIDIA GPU" in page(run_folder)
    change_run(lambda run: run.pop("summary"))
    assert "no GPU counters have been read so far; they need an NVIDIA GPU" in page(run_folder)


def window_metrics(**of_window: Any) -> dict[str, Any]:
    """What a monitor in hybrid mode adds to a row; the parts are those of `hardware_block`."""
    block = hardware_block()
    flat = [part for outer in block["waterfall"]["parts"] for part in (outer, *outer["of"])]
    metrics = {
        "executed_tflops_per_gpu": block["executed_flops_per_s"] / 1e12,
        "sm_clock_mhz": block["clock_hz"] / 1e6,
        "clock_source": block["clock_source"],
        **{name: block[name] for name in ROW_METRICS},
        **{f"loss/{part['key']}": part["share"] for part in flat},
    }
    return {f"perf/{name}": value for name, value in (metrics | of_window).items()}


ROW_METRICS = (
    "executed_hfu executed_over_counted executed_over_expected power_w energy_j_per_step "
    "energy_j_per_million_tokens tensor_active sm_active dram_active".split()
)


def without_summary(folder: Path, change_run: Change, windows: dict[int, dict[str, Any]]) -> None:
    """Make of the run one in hybrid mode that has not ended, with these windows in its rows."""
    change_run(lambda run: (run.pop("summary"), run.update(mode="hybrid")))
    path = folder / "training_log.json"
    rows = [row | windows.get(row["global_step"], {}) for row in json.loads(path.read_text())]
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


@pytest.mark.parametrize("bytes_lost", [0, 300])
def test_a_hybrid_run_still_going_shows_its_last_window(
    run_folder: Path, change_run: Change, bytes_lost: int
) -> None:
    without_summary(run_folder, change_run, {5: window_metrics(power_w=111.0), 15: window_metrics()})
    path = run_folder / "training_log.json"
    path.write_bytes(path.read_bytes()[: -bytes_lost or None])
    page = page_of(run_folder)
    assert page.count("this only covers the last window of counters, as logged at step 15.") == 2
    assert "What to do" not in page
    assert "<tr><td>power</td><td>689 W</td>" in page
    assert "<td>1,716 MHz</td><td>by cycle counters</td>" in page
    assert "<tr><td>executed</td><td>430 TFLOP/s</td>" in page
    assert "<tr><td>energy of a step</td><td>100.2 J</td>" in page
    block = hardware_block()
    fall, _ = page.split("<h2>The whole job</h2>")
    shown = re.findall(r'<span class="name">(.*?)</span>.*?<span class="points">(.*?)</span>', fall)
    # Why the clock was held back is not in a row.
    names = [re.sub(r" \(the .*\)", "", part["name"]) for part in block["waterfall"]["parts"]]
    assert [html.unescape(name) for name, _ in shown] == ["the peak", *names]
    shares = [f"{100 * part['share']:.1f}" for part in block["waterfall"]["parts"]]
    assert [text.replace("−", "-") for _, text in shown[1:]] == shares
    assert "not to 100" not in page
    assert "<tr><td>waiting for data</td><td>2.8</td>" in page
    assert "<td>gaps between launches or other</td>" in page
    assert '<div class="step largest"><span class="name">busy without tensor work</span>' in page
    assert fact(page, "peak").startswith("984 TFLOP/s")  # 430 TFLOP/s over 43.7 %


def test_melted_parts_and_a_driver_clock_in_a_row_have_their_names(
    run_folder: Path, change_run: Change
) -> None:
    shares = {"clock": -0.1, "idle_or_no_tensor": 0.5, "brand_new": 0.1, "useful": 0.5}
    losses = {f"perf/loss/{key}": share for key, share in shares.items()}
    clock = {"perf/sm_clock_mhz": 1980.0, "perf/clock_source": "driver"}
    without_summary(run_folder, change_run, {9: losses | clock})
    page = page_of(run_folder)
    for name in (
        "gain from a clock above the datasheet&#39;s",
        "GPU idle or busy without tensor work",
        "brand new",
        "the model&#39;s FLOPs, padding tokens included",
    ):
        assert f'<span class="name">{name}</span>' in page
    assert "in steady tensor work on an H200 the actual clock is 4 to 11 % lower" in page
    assert "<tr><td>power</td><td>unknown</td>" in page


def test_a_window_without_a_waterfall_has_its_figures_and_a_reason(
    run_folder: Path, change_run: Change
) -> None:
    without_summary(run_folder, change_run, {9: {"perf/power_w": 500.0}})
    page = page_of(run_folder)
    assert "<tr><td>power</td><td>500 W</td>" in page
    assert "counters were read, but the device&#39;s peak or the model&#39;s FLOPs are unknown" in page


def test_the_first_losses_are_not_cut_off(run_folder: Path) -> None:
    path = run_folder / "training_log.json"
    rows = json.loads(path.read_text())
    for row in rows:
        row["training/loss"] = 11.0 if row["global_step"] == 1 else 1.0 + 0.01 * row["global_step"]
        row["perf/step_time"] = 0.01
    path.write_text(json.dumps(rows))
    assert "above the chart" not in page_of(run_folder).partition("MFU and HFU over steps")[0]


def test_the_waterfall_is_there_with_its_parts_and_its_advice(run_folder: Path, change_run: Change) -> None:
    block = hardware_block()
    change_run(lambda run: run["summary"].update(hardware=block))
    page = page_of(run_folder)
    parts = block["waterfall"]["parts"]
    fall, _ = page.split("<h2>The whole job</h2>")
    assert len(re.findall(r'<div class="step ', fall)) == len(parts) + 1
    for part in parts:
        assert part["name"].replace("'", "&#39;") in page
        assert f"{100 * part['share']:.1f}".replace("-", "−") in page
    assert "<tr><td>waiting for data</td><td>2.8</td><td>27.8</td></tr>" in page
    assert '<div class="step largest"><span class="name">busy without tensor work</span>' in page
    assert "<code>truemfu peak</code> shows what this chip can reach." in page
    assert fact(page, "peak").startswith("989.4 TFLOP/s")


HARDWARE_ROWS = {
    "executed": ("430 TFLOP/s", "upper bound: no audit; over 12 windows, 120 s"),
    "HFU by the counters": ("43.7 %", "upper bound: no audit; by the count 46.0 %"),
    "executed over counted": ("0.950", "upper bound: no audit"),
    "SM clock": ("1,716 MHz", "by cycle counters; the driver reports 1,828 MHz"),
    "power": ("689 W", "mean of this GPU"),
    "energy of a step": ("100.2 J", "one device"),
    "energy of a million tokens": ("12 kJ", "one device"),
}


def test_the_hardware_is_shown_beside_the_count_and_the_driver(run_folder: Path, change_run: Change) -> None:
    change_run(lambda run: run["summary"].update(hardware=hardware_block()))
    page = page_of(run_folder)
    for label, (value, remark) in HARDWARE_ROWS.items():
        assert f"<tr><td>{label}</td><td>{value}</td><td>{remark}</td></tr>" in page


def test_what_an_audit_corrected_is_no_upper_bound(run_folder: Path, change_run: Change) -> None:
    change_run(lambda run: run["summary"].update(hardware=hardware_block(executed_over_activity=0.9396)))
    page = page_of(run_folder)
    assert "<td>430 TFLOP/s</td><td>corrected by an audit: 0.9396; over 12 windows, 120 s</td>" in page
    assert "upper bound" not in page


@pytest.mark.parametrize("corrected", [True, False])
def test_rows_alone_tell_an_upper_bound_too(run_folder: Path, change_run: Change, corrected: bool) -> None:
    audit = {"executed_over_activity": 0.9396} if corrected else {}
    without_summary(run_folder, change_run, {5: window_metrics(**audit)})
    page = page_of(run_folder)
    assert ("<td>upper bound: no audit</td>" in page) is not corrected
    assert ("<td>corrected by an audit: 0.9396</td>" in page) is corrected


def test_counters_of_which_nothing_is_known_are_unknown_with_a_reason(
    run_folder: Path, change_run: Change
) -> None:
    nothing = dict.fromkeys(hardware_block()) | {"advice": []}
    change_run(lambda run: run["summary"].update(hardware=nothing))
    page = page_of(run_folder)
    hardware = page.split("<h2>What the hardware did</h2>")[1].split("<h2>")[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>unknown</td><td>(.*?)</td></tr>", hardware)
    assert len(rows) == 11
    assert all(remark for _, remark in rows)
    assert "counters were read, but the device&#39;s peak or the model&#39;s FLOPs are unknown" in page


def test_a_clock_by_the_driver_is_not_sold_as_the_true_one(run_folder: Path, change_run: Change) -> None:
    block = hardware_block(clock_hz=1.828e9, clock_source="driver")
    change_run(lambda run: run["summary"].update(hardware=block))
    page = page_of(run_folder)
    assert (
        "<td>the driver reports the clock it requested; in steady tensor work on an H200 the actual" in page
    )
    assert "tenth" not in page


def test_warnings_losses_and_notes_are_listed_and_cannot_break_the_page(
    run_folder: Path, change_run: Change
) -> None:
    said = {
        "warnings": ["<script>alert(1)</script>"],
        "lost": ["3 rows of tracker wandb"],
        "notes": ["a note"],
    }
    change_run(lambda run: run["summary"].update(said))
    page = page_of(run_folder)
    assert "<script" not in page
    for text in ("<li>&lt;script&gt;alert(1)", "<li>3 rows of tracker wandb</li>", "<li>A note.</li>"):
        assert text in page


def test_a_loss_that_is_no_number_is_said(run_folder: Path) -> None:
    path = run_folder / "training_log.json"
    rows = json.loads(path.read_text())
    for row in rows[7:9]:
        row |= {"training/loss": None, "non_finite": {"training/loss": "nan"}}
    path.write_text(json.dumps(rows))
    assert "The loss was not finite at 2 steps, first at step 8 (nan)." in page_of(run_folder)


def test_an_unfinished_run_has_a_page_that_says_so(run_folder: Path, change_run: Change) -> None:
    change_run(lambda run: run.pop("summary"))
    page = page_of(run_folder)
    assert "<p>The run has no summary yet" in page
    assert tile(page, "monitor&#39;s own cost") == (
        "unknown",
        "known only when a run has ended and written its summary",
    )
    assert tile(page, "padding")[0] == f"{100 * PADDING_LOST} %"
    assert tile(page, "MFU, median")[0].endswith(" %")
    assert fact(page, "device") == "cpu"


def test_without_rows_the_page_invents_no_reasons(run_folder: Path, change_run: Change) -> None:
    change_run(lambda run: run.pop("summary"))
    (run_folder / "training_log.json").write_bytes(b"")
    page = page_of(run_folder)
    assert "The log training_log.json is cut off: 0 rows were read" in page
    assert "There are no charts: the log has no rows." in page
    tiles = re.findall(r'<div class="figure.*?<b>(.*?)</b><small>(.*?)</small>', page)
    assert tiles == [("unknown", "the log has no rows")] * 11
    assert fact(page, "FLOPs by") == "unknown: the log has no rows"
    assert fact(page, "device") == "cpu"


@pytest.mark.parametrize("with_hardware", [False, True])
def test_nothing_is_loaded_from_elsewhere(run_folder: Path, change_run: Change, with_hardware: bool) -> None:
    if with_hardware:
        change_run(lambda run: run["summary"].update(hardware=hardware_block()))
    page = whole_page_of(run_folder)
    assert not any(sign in page for sign in ("http:", "https:", "src=", "<link", "@import", "url("))
    assert page.count("<script") == 1


def test_a_long_log_makes_no_long_page(run_folder: Path) -> None:
    rows = [
        {"global_step": step, "training/loss": 3.0, "perf/step_time": 0.1, "perf/mfu": 0.4, "perf/hfu": 0.5}
        for step in range(100_000)
    ]
    (run_folder / "training_log.json").write_text(json.dumps(rows))
    page = page_of(run_folder)
    assert "100,000 rows in groups of 400" in page
    assert len(page) < 150_000


def test_very_long_texts_are_cut_and_charts_are_not(run_folder: Path, change_run: Change) -> None:
    whole = page_of(run_folder)
    long = "x" * 50_000
    change_run(lambda run: (run.update(device=long), run["summary"].update(warnings=[long], notes=[long])))
    page = page_of(run_folder)
    assert len(re.findall(r"\(50,\d{3} characters\)", page)) == 4  # the device stands twice
    assert len(page) < len(whole) + 5 * LONGEST_TEXT
    paths = [found for found in re.findall(r' d="([^"]*)"', page) if found]
    assert paths == [found for found in re.findall(r' d="([^"]*)"', whole) if found]
