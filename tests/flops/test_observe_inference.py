"""Observed steps under `inference_mode`: their results are the same to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from truemfu import Convention
from truemfu.flops.observe.observer import StepObserver


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(16, 16), nn.Conv1d(16, 16, 3, padding=1)
        self.rnn, self.heads = nn.LSTM(16, 16, 2, dropout=0.5), nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(self.conv(self.linear(x).mT).mT)[0]
        h = functional.scaled_dot_product_attention(h, h, h, dropout_p=0.25)
        return torch.einsum("bqd,bkd->bqk", self.heads(h, h, h)[0].to(h.dtype), h)


def results(*, observed: bool, autocast: bool, wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    teacher, student, x = wrap(Net()), Net(), torch.randn(4, 8, 16)
    observer = StepObserver(Convention()) if observed else None
    if observer is not None:
        observer.enter()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with torch.inference_mode():
                y = teacher(x)
            (student(x).float() - y.clone()).square().sum().backward()
    finally:
        if observer is not None:
            seen = observer.leave()
            assert seen.problem is None
            assert seen.without_gradients()[0].total() > 0
    return [y, *[p.grad for p in student.parameters() if p.grad is not None]]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_results_are_the_same_to_the_bit(autocast: bool, is_compiled: bool) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(model, backend="eager") if is_compiled else model  # type: ignore[return-value]

    expected, found = (results(observed=o, autocast=autocast, wrap=wrap) for o in (False, True))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(map(torch.equal, found, expected))
