"""Every test starts with nothing said, no override in the environment and torch's own TF32 setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from truemfu import errors


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(errors, "_already_warned", set())
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch believe that every CUDA device has this name, SM count and memory."""

    def install(name: str, sm_count: int, memory_bytes: int = 0) -> None:
        properties = SimpleNamespace(name=name, multi_processor_count=sm_count, total_memory=memory_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))

    return install
