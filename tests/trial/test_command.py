"""The command line of `truemfu try`: wrong calls, its page, and how results read."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.command_line import Run, caller
from tests.trial.test_table import GPU

from truemfu.remedies.table import BY_NAME, REMEDIES
from truemfu.report.drawing.documents import json_text
from truemfu.trial import record
from truemfu.trial.record import LossDistance, Trial, TrialCase
from truemfu.trial.texts import conclusion, other_lines, shown_cases, tables_of
from truemfu.trial.trial import USUAL_S, USUAL_STEPS

PAGE = (Path(__file__).parents[2] / "docs" / "try.md").read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRUEMFU_DISABLED", raising=False)
    return caller(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the command to try"),
        (["--only", "fused_optimiser", "--", "python"], "did you mean 'fused_optimizer'?"),
        (["--only", "packing", "--", "python"], "packing cannot be applied from outside"),
        (["--time", "soon", "--", "python"], "'soon' is not a time such as 90s, 10m or 1h"),
        (["--steps", "5", "--", "python"], "--steps"),
        (["--", "no-such-program"], "no-such-program: command not found"),
        (["--", "missing.py"], "missing.py: no such file"),
        (["-o", "full", "--", "python"], "full is not empty"),
        (["-o", "file/x", "--", "python"], "file is not a folder"),
    ],
)
def test_a_wrong_call_starts_nothing(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    result = run("try", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "truemfu:" not in result.err


def test_nothing_is_tried_where_truemfu_is_disabled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_DISABLED", "1")
    assert run("try", "--", "python").code == 2


def test_the_help_names_how_much_is_measured(run: Run) -> None:
    assert f"{USUAL_STEPS}, and at least {USUAL_S:.0f} s of them" in " ".join(
        run("try", "--help").out.split()
    )


def keys(heading: str) -> set[str]:
    rows = PAGE.partition(f"| {heading} | meaning |\n")[2].partition("\n\n")[0].splitlines()[1:]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def test_the_page_has_every_key_of_the_json() -> None:
    assert keys("key") == set(Trial.__struct_fields__)
    assert keys("key of a case") == set(TrialCase.__struct_fields__)
    assert all(f"`{name}`" in PAGE for name in LossDistance.__struct_fields__)
    assert all(f"`{value}`" in PAGE for value in (record.GAINS, record.UNCLEAR, record.NOT_FROM_OUTSIDE))


def test_the_page_has_every_remedy_with_what_it_changes() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", PAGE, re.MULTILINE)
    assert rows == [(remedy.name, remedy.changes) for remedy in REMEDIES]


def measured(name: str, verdict: str, gain: float, **more: object) -> TrialCase:
    return TrialCase(
        name=name,
        title=name,
        verdict=verdict,
        reason="because",
        lines=[f"line of {name}"],
        step_time_s=0.07 * (1 - gain),
        gain_s=0.07 * gain,
        gain_low_s=0.07 * (gain - 0.01),
        gain_high_s=0.07 * (gain + 0.01),
        gain=gain,
        gain_low=gain - 0.01,
        gain_high=gain + 0.01,
        peak_memory_bytes=2**30,
        **more,  # type: ignore[arg-type]
    )


def trial(*cases: TrialCase, **more: object) -> Trial:
    known = {
        "command": ["python", "train.py"],
        "ended": "done",
        "confidence": 0.95,
        "rounds": 2,
        "steps": 40,
        "warm_up_steps": 10,
        "seconds": 100.0,
        "started_at": "2026-11-19T00:00:00+00:00",
        "truemfu_version": "0.1.0",
        "evidence": GPU,
        "step_time_s": 0.07,
        "peak_memory_bytes": 2**30,
        "unchanged_runs": 3,
        "unchanged_losses_difference": 0.0,
        "notes": [],
        "runs": [],
        "cases": list(cases),
        "together": None,
        "together_reason": "only one remedy gained",
        "recommended": [],
        "lines": [],
    }
    return Trial(**{**known, **more})  # type: ignore[arg-type]


def row_of(case: TrialCase) -> list[str]:
    (table,) = tables_of(trial(case))
    return table.texts[0]


def test_a_row_has_the_gain_its_interval_and_the_losses() -> None:
    losses = LossDistance(
        steps=50, are_identical=False, largest_difference=0.0012, unchanged_difference=0.0001
    )
    row = row_of(measured("compile", "gains", 0.25, losses=losses))
    assert row == [
        "compile",
        "gains",
        "52.50 ms",
        "+17.50 ms (+25.0 %)",
        "+24.0 to +26.0 %",
        "1.00 GiB",
        "0.12 % apart (unchanged: 0.01 %)",
    ]
    same = msgspec.structs.replace(losses, are_identical=True)
    assert row_of(measured("x", "gains", 0.1, losses=same))[-1] == "identical"
    assert row_of(measured("x", "gains", 0.1))[-1] == "unknown"


def test_the_conclusion_names_what_to_write_and_warns_of_precision() -> None:
    best = measured("autocast_bf16", "gains", 0.4)
    lines = conclusion(trial(best, recommended=["autocast_bf16"], lines=best.lines))
    assert lines[0] == "Recommended: autocast_bf16: 28.00 ms of a step less (40.0 %)."
    assert lines[1] == "  line of autocast_bf16"
    assert lines[2] == "autocast_bf16 changes the precision: compare a longer training."
    loses = measured("compile", "loses", -0.1)
    assert conclusion(trial(loses)) == ["No remedy was shown to gain."]
    assert conclusion(trial(loses, ended="interrupted"))[0].startswith("The trial was interrupted")
    assert conclusion(trial()) == ["Nothing was measured beside the unchanged command."]


def test_the_conclusion_warns_of_losses_that_a_remedy_should_not_change() -> None:
    workers = measured("loader_workers", "gains", 0.4, warning="its losses are 0.52 % apart")
    other = measured("compile", "gains", 0.1, warning="not recommended, so not said")
    lines = conclusion(trial(workers, other, recommended=["loader_workers"], lines=workers.lines))
    assert lines[2:] == ["loader_workers: its losses are 0.52 % apart."]


def test_cases_stand_by_their_gain_and_others_with_their_reasons() -> None:
    failed = TrialCase(name="liger", title="", verdict="failed", reason="ImportError: no\x1b[2J")
    other = TrialCase(name="tf32", title="", verdict="does not apply", reason="the device is cpu")
    shown = trial(failed, measured("a", "loses", -0.2), other, measured("b", "gains", 0.2))
    assert [case.name for case in shown_cases(shown)] == ["b", "a", "liger"]
    assert other_lines(shown)[-1] == "tf32: does not apply (the device is cpu)"
    assert "\x1b" not in json_text(shown)
    assert msgspec.json.decode(json_text(shown), type=Trial) == shown


def test_every_remedy_has_a_name_that_an_option_takes() -> None:
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in BY_NAME)
