"""Figures that others logged: of public issues, of real runs of other tools, and in the format of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from benchmarks.check_cases import CASES, LOGS, Case, called

from truemfu.check import conventions
from truemfu.flops import Target

_STATUSES = ("agrees", "unexplained")
_SLOW = ("mixtral-8x7b", "qwen2.5-7b", "llama-3-8b")


@pytest.fixture(scope="module", autouse=True)
def counted_once() -> Iterator[None]:
    """A model that several cases share is counted once; the count itself is the real one."""
    count = conventions.work_of
    known: dict[tuple[str, int | None], conventions.Work] = {}

    def work_of(target: Target) -> conventions.Work:
        key = (target.name, target.length)
        if key not in known:
            known[key] = count(target)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conventions, "work_of", work_of)
        yield


def marked(case: Case) -> object:
    is_slow = any(model in case.call for model in _SLOW)
    return pytest.param(case, id=case.name, marks=[pytest.mark.long] if is_slow else [])


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_what_is_wrong_with_a_logged_figure_is_named(case: Case) -> None:
    code, printed = called(case, "--json")
    opinion = json.loads(printed)
    decided = [verdict for verdict in opinion["verdicts"] if verdict["status"] != "unknown"]
    assert decided
    if case.expected in _STATUSES:
        assert {verdict["status"] for verdict in decided} == {case.expected}
        assert not any(verdict["explanations"] for verdict in decided)
    else:
        explained = next(verdict for verdict in decided if verdict["status"] == "explained")
        assert case.expected.split("+") in [found["keys"] for found in explained["explanations"]]
        for found in explained["explanations"]:
            assert found["gives"] == pytest.approx(explained["logged"], rel=0.007)
    assert code == (0 if case.expected == "agrees" else 1)


def test_at_least_twelve_logged_figures_have_a_fault_that_is_named() -> None:
    assert sum(case.expected not in _STATUSES for case in CASES) >= 12


def test_every_recorded_log_is_checked() -> None:
    calls = " ".join(case.call for case in CASES)
    assert [path.name for path in LOGS.iterdir() if path.name not in calls and path.suffix != ".md"] == []
    readme = (LOGS / "README.md").read_text(encoding="utf-8")
    assert [name for name in calls.split() if name.endswith((".log", ".csv")) and name not in readme] == []


def test_the_printed_cases_are_those_of_the_script() -> None:
    printed = (LOGS.parents[2] / "benchmarks" / "results" / "check_cases.txt").read_text(encoding="utf-8")
    assert list(json.loads(printed.splitlines()[-1])["exit_codes"]) == [case.name for case in CASES]
