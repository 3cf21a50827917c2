"""`truemfu check` as people call it: exit codes, JSON as documented, errors in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.command_line import Run, caller

ROOT = Path(__file__).parents[2]
TINY = ("--parameters", "1e9", "--seq", "512", "--tokens-per-second", "10000", "--device", "h100-sxm")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)
    return caller(capsys)


def test_the_exit_code_is_the_verdict(run: Run) -> None:
    assert run("check", "--mfu", "6.06", *TINY).code == 0
    assert run("check", "--mfu", "19.23", *TINY).code == 1  # the peak of an A100
    assert run("check", "--mfu", "7.77", *TINY).code == 1  # unexplained
    assert run("check", "--mfu", "41.2").code == 3
    assert run("check", "--mfu", "104").code == 1  # nothing else is known, and it cannot be


def test_the_text_says_what_was_logged_what_is_right_and_why(run: Run) -> None:
    said = run("check", "--mfu", "19.23", *TINY).out
    assert re.search(r"^MFU +19\.2 % +6\.1 % +differs, explained", said, re.MULTILINE)
    assert "the peak of another chip (312 TFLOP/s: NVIDIA A100" in said
    assert "unexplained" in run("check", "--mfu", "7.77", *TINY).out
    assert "add --model; --tokens-per-second" in run("check", "--mfu", "41.2").out


def test_json_has_the_documented_keys(run: Run) -> None:
    found = json.loads(run("check", "--mfu", "19.23", *TINY, "--json").out)
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8").partition("## JSON")[2]
    documented = set(re.findall(r"`(\w+)`", page))
    assert {
        "tflops",
        "mfu",
        "flops_per_token",
        "implied_peak_tflops",
        "agrees",
        "verdicts",
    } <= found.keys() & documented
    verdict = found["verdicts"][0]
    assert {"logged", "expected", "status", "explanations", "missing"} <= verdict.keys() & documented
    assert (verdict["status"], verdict["explanations"][0]["keys"]) == ("explained", ["peak_of_another_chip"])
    assert found["agrees"] is False
    assert json.loads(run("check", "--mfu", "41.2", "--json").out)["agrees"] is None


def test_every_key_of_a_fault_is_on_the_page() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    source = "".join(
        (ROOT / "src/truemfu/check" / name).read_text(encoding="utf-8")
        for name in ("choices.py", "conventions.py")
    )
    keys = set(re.findall(r'key="(\w+)"', source)) | set(
        re.findall(r'^        \("(\w+)",', source, re.MULTILINE)
    )
    assert len(keys) >= 15
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_an_option_wins_over_the_log(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step: 8, loss: 1.0, tokens_per_second: 10000, mfu: 19.23\n")
    assert run("check", "train.log", *TINY).code == 1
    assert run("check", "train.log", *TINY, "--mfu", "6.06").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to check"),
        (("--mfu", "much"), "expected a positive number"),
        (("--mfu", "-3"), "expected a positive number"),
        (("gone.log",), "cannot read 'gone.log'"),
        (("--mfu", "40", "--device", "h1000"), "no device 'h1000'"),
        (("--mfu", "40", "--device", "h100-sxm", "--dtype", "fp4"), "no fp4 peak is known"),
        (("--mfu", "40", "--dtype", "bf17"), "unknown dtype"),
        (("--mfu", "40", "--layers", "3"), "need --parameters"),
        (("--mfu", "40", "--model", "tiny", "--parameters", "7B"), "leave out --parameters"),
        (("--mfu", "40", "--model", "no-such-model", "--seq", "8"), "no model 'no-such-model'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("check", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_a_device_without_a_row_is_checked_with_a_peak_of_your_own(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "12.15")
    found = json.loads(run("check", "--mfu", "0.96", "--tflops", "3.0", "--json").out)
    assert found["verdicts"][1]["explanations"][0]["keys"] == ["peak_of_another_chip"]
