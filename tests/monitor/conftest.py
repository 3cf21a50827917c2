"""A clean slate for each test: nothing said yet, no peak from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.monitor.training_clock import TrainingClock

import truemfu.errors


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    before = set(truemfu.errors._already_warned)
    truemfu.errors._already_warned.clear()
    yield
    truemfu.errors._already_warned.clear()
    truemfu.errors._already_warned.update(before)


@pytest.fixture(autouse=True)
def no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TrainingClock:
    """The time of the training thread, for monitors that are made after it."""
    made = TrainingClock()
    made.install(monkeypatch)
    return made
