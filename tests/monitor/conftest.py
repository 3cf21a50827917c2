"""A clean slate for each test: nothing said yet, no peak from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import truemfu.errors


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    before = set(truemfu.errors._said)
    truemfu.errors._said.clear()
    yield
    truemfu.errors._said.clear()
    truemfu.errors._said.update(before)


@pytest.fixture(autouse=True)
def no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)
