"""A supervised count ends at its limits, with all state restored before anything else happens."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from truemfu import FlopModel, count_flops
from truemfu.flops.interruption import (
    Fetched,
    SignalArrived,
    Supervision,
    TimeIsUp,
    ValuesPending,
    deliver,
    supervision,
)

X = torch.ones(4, 8)


class Net(nn.Module):
    def __init__(self, inside: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inside = inside
        self.layers_run = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.one, x, use_reentrant=False)
        self.inside()
        REACHED.append("after")
        return self.two(x)


class Record(list[Any]):
    """A list that a count leaves alone: what it adds to a plain global list is taken out again."""


REACHED = Record()
HANDLED: list[int] = []


def picture() -> dict[str, Any]:
    return {
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random state": torch.get_rng_state().tolist(),
        "generator": torch.random.default_generator,
        "supervision": supervision(),
        "handlers": [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)],
    }


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def handle(number: int, frame: Any) -> None:
        HANDLED.append(number)
        raise TimeoutError("from a handler")

    REACHED.clear()
    HANDLED.clear()
    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_count_ends_when_its_time_is_up() -> None:
    model = Net()
    before = picture()
    with pytest.raises(TimeIsUp), Supervision(limit_s=0):
        FlopModel.fit(model, (X,))
    assert picture() == before
    with Supervision(limit_s=600) as watched:
        assert count_flops(Net(), (X,)).forward == 1024
        assert 0 < watched.left_s < 600


def test_what_would_take_too_long_on_real_copies_is_not_begun() -> None:
    class NeedsMemory(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.data_ptr()
            REACHED.append("real")
            return self.one(x)

    wide = nn.Linear(8192, 8192)
    model = NeedsMemory()
    model.one = wide
    with pytest.raises(TimeIsUp), Supervision(limit_s=0.3):
        count_flops(model, (torch.ones(8192, 8192),))  # 3.3 TFLOP, in less than 4 GiB
    assert REACHED == []
    with Supervision(limit_s=600):
        assert count_flops(NeedsMemory(), (X,)).method == "count on real CPU copies"


def test_a_signal_ends_a_count_and_is_handled_after_it() -> None:
    model = Net(lambda: signal.raise_signal(signal.SIGUSR1))
    before = picture()
    with pytest.raises(SignalArrived), Supervision() as watched:
        count_flops(model, (X,))
    assert REACHED == ["after"]  # the handler did not run in the middle
    assert picture() == before
    assert watched.signals == [signal.SIGUSR1]
    assert HANDLED == []
    assert not watched.is_interrupted
    with pytest.raises(TimeoutError, match="from a handler"):
        deliver(watched.signals)
    assert HANDLED == [signal.SIGUSR1]
    assert watched.signals == []


def test_ctrl_c_ends_a_count_and_interrupts_after_it() -> None:
    with pytest.raises(SignalArrived), Supervision() as watched:
        count_flops(Net(lambda: signal.raise_signal(signal.SIGINT)), (X,))
    with pytest.raises(KeyboardInterrupt):
        deliver(watched.signals)


def test_a_signal_that_comes_again_is_handled_at_once() -> None:
    def insist() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)

    model = Net(insist)
    before = picture()
    with pytest.raises(TimeoutError, match="from a handler"), Supervision() as watched:
        count_flops(model, (X,))
    assert watched.is_interrupted
    assert HANDLED == [signal.SIGUSR1]
    assert picture() == before


def test_signals_without_a_handler_of_python_stay_as_they_are() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Supervision() as watched:
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            signal.raise_signal(signal.SIGUSR2)
            assert count_flops(Net(), (X,)).forward == 1024
        assert watched.signals == []
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


class Late:
    """A copy that arrives when it is told to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.is_there = tensor.clone(), False
        LATE.append(self)

    def ready(self) -> bool:
        return self.is_there

    def get(self) -> torch.Tensor:
        assert self.is_there
        return self.tensor


LATE: list[Late] = []


def test_values_on_a_device_are_fetched_once_and_end_the_count_until_they_are_there() -> None:
    LATE.clear()
    fetched = Fetched(Late)
    weight, other = nn.Parameter(torch.ones(3)), torch.arange(4)
    for _ in range(2):
        with pytest.raises(ValuesPending) as pending:
            fetched.get(weight)
        assert pending.value.is_weight
    assert len(LATE) == 1
    fetched.start([weight, other])
    assert len(LATE) == 2
    assert not fetched.ready()
    for late in LATE:
        late.is_there = True
    assert fetched.ready()
    assert fetched.get(other).tolist() == [0, 1, 2, 3]
