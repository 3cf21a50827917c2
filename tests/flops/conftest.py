"""Skips for the oldest torch, no time limit for a property's examples, and a fixture that forbids counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from tests.versions import TORCH

from truemfu.flops.count.counted_step import CountedStep

settings.register_profile("truemfu", deadline=None)  # a busy machine is no failure
settings.load_profile("truemfu")

OLD_TORCH = TORCH < (2, 8)
NOT_IN_OLD_TORCH = {
    "float token ids": "fake embeddings take indices of any dtype before torch 2.8",
    "test_one_rank_counts_alone_and_then_both_train": "FSDP2 cannot train on a CPU before torch 2.7",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not OLD_TORCH:
        return
    for item in items:
        for fragment, reason in NOT_IN_OLD_TORCH.items():
            if fragment in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def no_counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a count by a FlopModel is an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was counted")

    return lambda: monkeypatch.setattr(CountedStep, "run", refuse)
