"""`truemfu compare` of runs: what it finds, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import RECORD, noisy, row, write_log, write_run
from tests.command_line import Run, caller

from truemfu.report.compare.compare import RUN_TO_RUN, RUN_TO_RUN_ON_CPU

STEPS = 300


@pytest.fixture
def truemfu(capsys: pytest.CaptureFixture[str]) -> Run:
    return caller(capsys)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_run(tmp_path / "base", noisy(STEPS))


def test_equal_runs_show_no_difference(truemfu: Run, base: Path, tmp_path: Path) -> None:
    again = write_run(tmp_path / "again", noisy(STEPS, seed=1))
    code, out, err = truemfu("compare", str(base), str(again), "--max-regression", "5")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "No difference shown" in text
    assert "No slow-down beyond the limit of 5 %." in text
    assert "One run on each side does not show how much equal runs differ" in text


def test_noisy_runs_say_what_they_could_have_shown(truemfu: Run, tmp_path: Path) -> None:
    """A slow-down by 10 % that the noise hides is no pass: a gate can ask for exit code 3."""
    base = write_run(tmp_path / "base", noisy(60, spread=0.5))
    slow = write_run(tmp_path / "slow", noisy(60, 0.11, spread=0.5, seed=1))
    gate = ("compare", str(base), str(slow), "--max-regression", "5")
    code, out, _ = truemfu(*gate)
    text = " ".join(out.split())
    assert code == 0
    assert "Cannot tell whether B is slower by more than the limit of 5 %." in text
    found = json.loads(truemfu(*gate, "--json").out)["pairs"][0]
    assert found["is_unsure"]
    assert f"could show is {100 * found['smallest_shown']:.3g} %." in text
    assert truemfu(*gate, "--fail-if-unsure").code == 3
    figure = found["figures"][0]
    shown = write_run(tmp_path / "shown", noisy(60, 0.1 * (1.1 + found["smallest_shown"]), spread=0.5))
    assert figure["low"] < 1 < figure["high"]
    assert truemfu("compare", str(base), str(shown), *gate[3:], "--fail-if-unsure").code == 1


def test_fail_if_unsure_needs_a_limit(truemfu: Run, base: Path) -> None:
    code, _, err = truemfu("compare", str(base), str(base), "--fail-if-unsure")
    assert code == 2
    assert "needs --max-regression" in err
    assert truemfu("compare", str(base), str(base), "--max-regression", "5", "--fail-if-unsure").code == 0


def test_a_slow_down_beyond_the_limit_fails(truemfu: Run, base: Path, tmp_path: Path) -> None:
    slow = write_run(tmp_path / "slow", noisy(STEPS, 0.108, seed=1))
    code, out, _ = truemfu("compare", str(base), str(slow), "--max-regression", "5")
    assert code == 1
    assert re.search(r"B is slower: step time \+[78]\.\d % \(95 %: \+[45]\.\d % to \+1\d\.\d %\)", out)
    assert "This is beyond the limit of 5 %" in " ".join(out.split())


@pytest.mark.parametrize("limit", [[], ["--max-regression", "10"]])
def test_a_slow_down_within_the_limit_is_reported(
    truemfu: Run, base: Path, tmp_path: Path, limit: list[str]
) -> None:
    slow = write_run(tmp_path / "slow", noisy(STEPS, 0.108, seed=1))
    code, out, _ = truemfu("compare", str(base), str(slow), *limit)
    assert code == 0
    assert "B is slower" in out


def test_a_small_difference_of_one_run_each_is_not_reported(truemfu: Run, base: Path, tmp_path: Path) -> None:
    """However many steps there are: equal runs differ by that much."""
    slow = write_run(tmp_path / "slow", noisy(STEPS, 0.1015, spread=0.001, seed=1))
    assert "No difference shown" in truemfu("compare", str(base), str(slow)).out
    assert "B is slower" in truemfu("compare", str(base), str(slow), "--run-to-run", "0").out


def test_runs_on_a_cpu_are_assumed_to_differ_by_more(truemfu: Run, tmp_path: Path) -> None:
    folders = {}
    for device in ("cpu", "NVIDIA H200"):
        for seed, seconds in ((0, 0.1), (1, 0.104)):
            folder = write_run(tmp_path / device / str(seed), noisy(STEPS, seconds, spread=0.001, seed=seed))
            record = json.loads((folder / "training_run.json").read_text())
            (folder / "training_run.json").write_text(json.dumps({**record, "device": device}))
        compared = truemfu("compare", *(str(tmp_path / device / seed) for seed in "01"), "--json").out
        folders[device] = json.loads(compared)
    assert {device: found["run_to_run"] for device, found in folders.items()} == {
        "cpu": 0.015,
        "NVIDIA H200": 0.01,
    }
    assert [found["pairs"][0]["verdict"] for found in folders.values()] == ["no difference shown", "slower"]


def test_the_help_states_what_is_assumed(truemfu: Run) -> None:
    assert f"default: ({100 * RUN_TO_RUN:g}, on a CPU {100 * RUN_TO_RUN_ON_CPU:g})" in " ".join(
        truemfu("compare", "--help").out.split()
    )


def test_one_side_that_is_known_to_be_on_a_cpu_decides(truemfu: Run, tmp_path: Path) -> None:
    known, unknown = (write_run(tmp_path / name, noisy(STEPS)) for name in ("known", "unknown"))
    record = json.loads((known / "training_run.json").read_text())
    (known / "training_run.json").write_text(json.dumps({**record, "device": "cpu"}))
    (unknown / "training_run.json").unlink()
    for sides in ((known, unknown), (unknown, known)):
        assert json.loads(truemfu("compare", *map(str, sides), "--json").out)["run_to_run"] == 0.015


def test_repeated_runs_measure_what_they_differ_by(truemfu: Run, tmp_path: Path) -> None:
    for number in range(4):
        write_run(tmp_path / "a" / str(number), noisy(50, 0.1 * (1 + 0.001 * number), seed=number))
        write_run(tmp_path / "b" / str(number), noisy(50, 0.102 * (1 + 0.001 * number), seed=9 + number))
    found = json.loads(truemfu("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json").out)
    (pair,) = found["pairs"]
    assert (pair["runs_a"], pair["runs_b"], pair["steps_a"]) == (4, 4, 200)
    assert found["run_to_run"] is None
    assert pair["verdict"] == "slower"


def test_repeated_runs_must_agree_with_one_another(truemfu: Run, base: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "b" / "1", noisy(50))
    write_run(tmp_path / "b" / "2", noisy(50), lambda record: record.update(device="NVIDIA A100"))
    code, _, err = truemfu("compare", str(base), str(tmp_path / "b"))
    assert code == 2
    assert "device is NVIDIA H200" in err
    assert "NVIDIA A100" in err


def test_a_mean_that_is_slower_than_the_median_shows_is_noted(
    truemfu: Run, base: Path, tmp_path: Path
) -> None:
    times = [s * (3 if number % 10 == 0 else 1) for number, s in enumerate(noisy(STEPS, seed=1))]
    out = truemfu("compare", str(base), str(write_run(tmp_path / "stalls", times))).out
    assert "some steps take much longer" in " ".join(out.split())


def test_figures_of_the_json(truemfu: Run, base: Path, tmp_path: Path) -> None:
    slow = write_run(tmp_path / "slow", noisy(STEPS, 0.11))  # the same noise: ratios are exact
    found = json.loads(truemfu("compare", str(base), str(slow), "--json").out)
    figures = {figure["name"]: figure for figure in found["pairs"][0]["figures"]}
    assert {name: figure["ratio"] for name, figure in figures.items()} == pytest.approx(
        {
            "step_time_median_s": 1.1,
            "step_time_mean_s": 1.1,
            "tokens_per_s": 1 / 1.1,
            "mfu": 1 / 1.1,
            "peak_memory_bytes": 1.0,
        }
    )
    assert figures["peak_memory_bytes"]["low"] is None
    step = figures["step_time_median_s"]
    assert step["low"] < step["ratio"] < step["high"]
    assert (found["kind"], found["confidence"], found["run_to_run"]) == ("run", 0.95, 0.01)


def _set(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(values)


def _model(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["model"].update(values)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set(device="NVIDIA A100"), "device is NVIDIA H200 in {a} and NVIDIA A100 in {b}"),
        (_set(convention={"attention": "causal"}), "attention convention is full in {a} and causal in {b}"),
        (_set(world_size=8), "number of ranks is 1 in {a} and 8 in {b}"),
        (_model(dtypes=["float32"]), "dtype of the parameters is bfloat16 in {a} and float32 in {b}"),
        (_model(parameters=2000), "number of parameters is 1,000 in {a} and 2,000 in {b}"),
        (_set(batch_shapes=[{"input_ids": [8, 256]}]), "batch is input_ids 8×512 in {a} and input_ids 8×256"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_both_values(
    truemfu: Run, base: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    other = write_run(tmp_path / "other", noisy(STEPS), change)
    code, out, err = truemfu("compare", str(base), str(other))
    assert (code, out) == (2, "")
    assert f"error: cannot compare: {expected.format(a=base, b=other)}" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({"perf/tokens_per_second": 2.0}, "tokens in a step is 4,096 in"),
        ({"perf/samples_per_second": 2.0}, "samples in a step is 8 in"),
        ({"perf/mfu": 0.5}, "peak of the dtypes used is 989.4 TFLOP/s in"),
    ],
)
def test_another_batch_or_peak_is_seen_in_the_rows(
    truemfu: Run, base: Path, tmp_path: Path, factors: dict[str, float], expected: str
) -> None:
    other = write_run(tmp_path / "other", [])
    rows = [row(step, seconds) for step, seconds in enumerate(noisy(STEPS))]
    write_log(other, [one | {name: factor * one[name] for name, factor in factors.items()} for one in rows])
    code, _, err = truemfu("compare", str(base), str(other))
    assert code == 2
    assert expected in err


@pytest.mark.parametrize("source", ["override", "monitoring.peak_tflops"])
def test_a_peak_of_the_users_own_leaves_mfu_out(truemfu: Run, tmp_path: Path, source: str) -> None:
    own = _set(summary={"peak_source": source})
    one = write_run(tmp_path / "one", noisy(STEPS), own)
    other = write_run(tmp_path / "other", [], own)
    rows = [row(step, seconds) for step, seconds in enumerate(noisy(STEPS))]
    write_log(other, [each | {"perf/mfu": each["perf/mfu"] / 2} for each in rows])
    code, out, _ = truemfu("compare", str(one), str(other))
    assert code == 0
    assert "MFU is not compared: the two sides have different peaks" in out
    assert "MFU, median" not in out


def test_rows_of_different_numbers_of_steps_are_refused(truemfu: Run, base: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [])
    write_log(other, [row(10 * step, seconds) for step, seconds in enumerate(noisy(STEPS))])
    code, _, err = truemfu("compare", str(base), str(other))
    assert code == 2
    assert "steps for each row of the log is 1 in" in err


def test_batches_of_varying_length_are_compared(truemfu: Run, tmp_path: Path) -> None:
    folders = []
    for name, turn in (("one", 0), ("other", 3)):
        folder = write_run(tmp_path / name, [], _set(batch_shapes=[]))
        rows = [row(step, seconds) for step, seconds in enumerate(noisy(STEPS))]
        for step, one in enumerate(rows):
            one["perf/tokens_per_second"] *= 1 + (step + turn) % 7
        write_log(folder, rows)
        folders.append(str(folder))
    assert truemfu("compare", *folders).code == 0


@pytest.mark.parametrize("steps", [0, 19])
def test_too_few_steps_are_refused_with_both_numbers(
    truemfu: Run, base: Path, tmp_path: Path, steps: int
) -> None:
    short = write_run(tmp_path / "short", noisy(steps))
    code, _, err = truemfu("compare", str(base), str(short))
    assert code == 2
    assert f"{short} has {steps} steps with a time after warm-up, and at least 20 are needed" in err


def test_a_folder_that_is_missing_or_empty(truemfu: Run, base: Path, tmp_path: Path) -> None:
    code, _, err = truemfu("compare", str(base), str(tmp_path / "nowhere"))
    assert (code, "nowhere does not exist" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    code, _, err = truemfu("compare", str(tmp_path / "empty"), str(base))
    assert (code, "contains neither a run" in err) == (2, True)


def test_without_a_run_file_facts_are_not_checked_and_that_is_noted(
    truemfu: Run, base: Path, tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", noisy(STEPS))
    (other / "training_run.json").unlink()
    code, out, _ = truemfu("compare", str(base), str(other))
    assert code == 0
    assert "known on one side only, not checked: device" in " ".join(out.split())


def test_versions_that_differ_are_noted(truemfu: Run, base: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", noisy(STEPS), _set(versions={"torch": "2.13.0"}))
    out = truemfu("compare", str(base), str(other)).out
    assert "versions differ: torch 2.11.0 in A, 2.13.0 in B" in " ".join(out.split())


@pytest.mark.parametrize(
    ("methods", "mark"), [({"estimate": 9}, "estimated"), ({"estimate": 5, "counted": 4}, "partly estimated")]
)
def test_an_estimated_mfu_is_marked(
    truemfu: Run, base: Path, tmp_path: Path, methods: dict[str, int], mark: str
) -> None:
    summary = RECORD["summary"] | {"methods": methods}
    other = write_run(tmp_path / "other", noisy(STEPS), _set(summary=summary))
    out = " ".join(truemfu("compare", str(base), str(other)).out.split())
    assert f"{other}: its MFU is {mark}, not counted" in out
    assert f"{base}: its MFU" not in out
    cells = re.search(r"MFU, median +\S+ % +(\S+ % \(.*?\))", out)
    assert cells is not None
    assert cells[1].endswith(f" % ({mark})")
    page = tmp_path / "comparison.html"
    truemfu("compare", str(base), str(other), "-o", str(page))
    assert re.search(rf"<td>[0-9.]+ %</td><td>[0-9.]+ % \({mark}\)</td>", page.read_text("utf-8"))


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "much"])
def test_a_limit_must_be_a_number(truemfu: Run, base: Path, value: str) -> None:
    code, _, err = truemfu("compare", str(base), str(base), "--max-regression", value)
    assert code == 2
    assert "--max-regression" in err


def test_the_tables_fit_80_columns(truemfu: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = truemfu("compare", str(base), str(base), "--max-regression", "5").out
    folder_lines = {f"A: {base}", f"B: {base}"}
    assert max(len(line.rstrip()) for line in out.splitlines() if line not in folder_lines) <= 80


def test_files_by_suffix(truemfu: Run, base: Path, tmp_path: Path) -> None:
    for suffix, begins in ((".html", "<!doctype html>"), (".md", "# Comparison"), (".json", "{")):
        path = tmp_path / "made" / f"comparison{suffix}"
        assert truemfu("compare", str(base), str(base), "-o", str(path)).code == 0
        assert path.read_text().startswith(begins)
    code, _, err = truemfu("compare", str(base), str(base), "-o", str(tmp_path / "comparison.pdf"))
    assert code == 2
    assert "--output must end in .html, .md, .json" in err


def test_an_input_is_never_overwritten(truemfu: Run, base: Path, tmp_path: Path) -> None:
    before = (base / "training_log.json").read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(base / "training_log.json")
    for path in (base / "training_log.json", link):
        code, _, err = truemfu("compare", str(base), str(base), "-o", str(path))
        assert code == 2
        assert "is an input file of this comparison" in err
    assert (base / "training_log.json").read_bytes() == before
