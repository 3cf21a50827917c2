"""`truemfu compare` of sweeps: experiments by name, and hostile names in every format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_runs import noisy
from tests.command_line import Run, caller

from truemfu.records import (
    CaseResult,
    Environment,
    Flops,
    Measured,
    Memory,
    Phase,
    Status,
    StepTimes,
    SweepCase,
    SweepRecord,
    write_record,
)
from truemfu.report.compare.load import load_side
from truemfu.report.compare.step_series import StepSize

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e=cmd()|`x`![i](http://h)"


@pytest.fixture
def truemfu(capsys: pytest.CaptureFixture[str]) -> Run:
    return caller(capsys)


def experiment(
    name: str,
    times: list[float] | None = None,
    *,
    device_name: str = "NVIDIA H200",
    message: str | None = None,
    **case: Any,
) -> CaseResult:
    """An experiment with these step times, or one that ran out of memory."""
    fields = {"trainer": "StandardTrainer", "model": "1b", "batch_size": 4, "seq_len": 512} | case
    measured = None
    if times is not None:
        steps = StepTimes(
            times_s=times,
            median_s=0.1,
            mean_s=0.1,
            p10_s=0.1,
            p90_s=0.1,
            relative_error=0.01,
            source="CUDA events",
            stable=True,
        )
        flops = Flops(
            model_flops=10**13,
            hardware_flops=10**13,
            model_method="count",
            hardware_method="count",
            attention="full",
            peak_flops_per_s=989.4e12,
            peak_source="datasheet: NVIDIA H200",
            mfu=0.4,
            hfu=0.4,
        )
        measured = Measured(
            steps=steps,
            tokens_per_step=2048,
            tokens_per_s=20480.0,
            samples_per_s=40.0,
            flops=flops,
            data_wait_s=0.0,
            final_loss=1.0,
            trace=None,
        )
    return CaseResult(
        name=name,
        sweep_id="s",
        content_hash="0",
        case=SweepCase(**fields),
        end=Status.CUDA_OOM if times is None else Status.OK,
        phase=Phase.DONE,
        message=message,
        parameters=1000,
        measured=measured,
        memory=Memory(allocated_bytes=1 << 30),
        environment=Environment(
            device_name=device_name, python="3.12", versions={"torch": "2.11.0"}, host="h", git_commit=None
        ),
    )


def sweep(folder: Path, results: Iterable[CaseResult]) -> str:
    """The folder of a sweep with these results."""
    results = list(results)
    (folder / "results").mkdir(parents=True)
    for result in results:
        write_record(folder / "results" / f"{result.name}.json", result)
    record = SweepRecord(
        sweep_id="s",
        created_at_s=0.0,
        truemfu_version="0.1",
        cases=[result.name for result in results],
        config={},
    )
    write_record(folder / "sweep.json", record)
    return str(folder)


def test_experiments_are_matched_by_name(truemfu: Run, tmp_path: Path) -> None:
    a = sweep(
        tmp_path / "a",
        [experiment("same", noisy(60)), experiment("slow", noisy(60)), experiment("old", noisy(60))],
    )
    b = sweep(
        tmp_path / "b",
        [
            experiment("slow", noisy(60, 0.12, seed=1)),
            experiment("new", noisy(60)),
            experiment("same", noisy(60, seed=1)),
        ],
    )
    code, out, _ = truemfu("compare", a, b, "--max-regression", "5", "--json")
    found = json.loads(out)
    assert code == 1
    assert {pair["name"]: (pair["verdict"], pair["is_beyond_limit"]) for pair in found["pairs"]} == {
        "same": ("no difference shown", False),
        "slow": ("slower", True),
    }
    assert found["unmatched"] == [
        {"name": "old", "a": "ok", "b": "not in this sweep", "is_failure": False},
        {"name": "new", "a": "not in this sweep", "b": "ok", "is_failure": False},
    ]
    text = truemfu("compare", a, b, "--max-regression", "5").out
    assert "Slower by more than the limit: slow." in " ".join(text.split())


@pytest.mark.parametrize(("device", "assumed"), [("cpu", 0.015), ("cuda", 0.01)])
def test_experiments_on_a_cpu_are_assumed_to_differ_by_more(
    truemfu: Run, tmp_path: Path, device: str, assumed: float
) -> None:
    sides = [sweep(tmp_path / side, [experiment("one", noisy(60), device=device)]) for side in "ab"]
    assert json.loads(truemfu("compare", *sides, "--json").out)["run_to_run"] == assumed


def test_many_experiments_have_wider_intervals_each(truemfu: Run, tmp_path: Path) -> None:
    """Of 40 equal experiments at 95 % each, one would be reported by chance."""
    widths = []
    for count in (1, 40):
        made = [experiment(f"e{number}", noisy(60, seed=number)) for number in range(count)]
        folders = [sweep(tmp_path / f"{side}{count}", made) for side in "ab"]
        found = json.loads(truemfu("compare", *folders, "--json").out)
        step = found["pairs"][0]["figures"][0]
        widths.append(step["high"] / step["low"])
    assert widths[1] > widths[0]


def test_an_experiment_that_fails_in_b_is_beyond_any_limit(truemfu: Run, tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", [experiment("one", noisy(60)), experiment("two", noisy(60))])
    b = sweep(tmp_path / "b", [experiment("one", noisy(60)), experiment("two", message="out of memory")])
    assert truemfu("compare", a, b).code == 0
    code, out, _ = truemfu("compare", a, b, "--max-regression", "5")
    assert code == 1
    assert "Succeeded in A and failed in B: two." in " ".join(out.split())
    assert "cuda_oom: out of memory" in " ".join(out.split())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "fp32"}, "dtype is bf16 in {a}, one and fp32 in {b}, one"),
        ({"attention": "causal"}, "attention convention is full in {a}, one and causal in {b}, one"),
        ({"model": "tiny"}, "model is 1b in {a}, one and tiny in {b}, one"),
        ({"batch_size": 8}, "batch size of each rank is 4 in {a}, one and 8 in {b}, one"),
        ({"gpus": 2, "parallel": "ddp"}, "number of ranks is 1 in {a}, one and 2 in {b}, one"),
        ({"device_name": "NVIDIA A100"}, "device is NVIDIA H200 in {a}, one and NVIDIA A100 in {b}, one"),
    ],
)
def test_a_name_that_stands_for_another_case_is_refused(
    truemfu: Run, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    a = sweep(tmp_path / "a", [experiment("one", noisy(60))])
    b = sweep(tmp_path / "b", [experiment("one", noisy(60), **change)])
    code, _, err = truemfu("compare", a, b)
    assert code == 2
    assert expected.format(a=a, b=b) in err


def test_samples_of_a_job_are_those_of_all_its_ranks(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "a", [experiment("one", [0.1, 0.2], gpus=8, parallel="ddp")])
    found = load_side(Path(folder)).experiments["one"]
    assert not isinstance(found, str)
    assert found.series.samples_per_s == pytest.approx([8 * 4 / 0.1, 8 * 4 / 0.2])
    assert found.series.samples == StepSize(median=32.0, low=32.0, high=32.0)
    assert found.series.mfu == pytest.approx([1e13 / 0.1 / 989.4e12, 1e13 / 0.2 / 989.4e12])


def test_nothing_in_common_is_refused(truemfu: Run, tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", [experiment("one", noisy(60))])
    b = sweep(tmp_path / "b", [experiment("two", noisy(60))])
    code, _, err = truemfu("compare", a, b)
    assert code == 2
    assert "no experiment succeeded in both" in err


def test_hostile_text_is_inert_in_every_format(
    truemfu: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is printable, since it names a file; the reason of a failure may be anything."""
    monkeypatch.setenv("COLUMNS", "400")
    name = "<script>alert(1)<script>=cmd()|`x`![i](http:h)"
    sides = []
    for side in "ab":
        made = [
            experiment(name, noisy(60), trainer=HOSTILE, model=HOSTILE),
            experiment("failed", message=HOSTILE + "y" * 1_000_000),
        ]
        sides.append(sweep(tmp_path / f"{side}\x1b[31m\u202e", made))
    page = tmp_path / "page.html"
    text = truemfu("compare", *sides, "-o", str(page)).out
    markdown = truemfu("compare", *sides, "--format", "markdown").out
    html = page.read_text(encoding="utf-8")
    for made_text in (text, markdown, html):
        assert all(character.isprintable() or character == "\n" for character in made_text)
        assert "\\u001b" in made_text.replace("\\\\", "\\")
        assert len(made_text) < 100_000
    assert "<script>alert" not in html
    assert "&lt;script&gt;" in html
    outside_escapes = re.sub(r"\\.", "", markdown)
    for active in ("<script", "`x`", "![i]", "://"):
        assert active not in outside_escapes
    found = msgspec.json.decode(truemfu("compare", *sides, "--json").out)
    assert [pair["name"] for pair in found["pairs"]] == [name]


def test_a_hostile_refusal_is_one_printable_line(truemfu: Run, tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", [experiment("one", noisy(60), model=HOSTILE + "\n" + "z" * 100_000)])
    b = sweep(tmp_path / "b", [experiment("one", noisy(60))])
    code, _, err = truemfu("compare", a, b)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert len(err) < 1000
    assert err.strip().isprintable()


def test_an_experiment_with_too_few_steps_is_listed_and_the_others_are_compared(
    truemfu: Run, tmp_path: Path
) -> None:
    a = sweep(tmp_path / "a", [experiment("long", noisy(60)), experiment("short", noisy(60))])
    b = sweep(tmp_path / "b", [experiment("long", noisy(60)), experiment("short", noisy(5))])
    found = msgspec.json.decode(truemfu("compare", a, b, "--max-regression", "5", "--json").out)
    assert [pair["name"] for pair in found["pairs"]] == ["long"]
    (unmatched,) = found["unmatched"]
    assert (unmatched["a"], unmatched["is_failure"]) == ("ok", False)
    assert unmatched["b"].startswith("5 steps with a time after warm-up, and at least 20 are needed")
