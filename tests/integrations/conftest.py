"""A clean slate for each test: nothing said yet, no peak from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
