"""A supervised count ends at its limits, with all state restored before anything else happens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from truemfu import FlopModel, count_flops
from truemfu.flops.interruption import (
    Fetched,
    OtherCountRuns,
    SignalArrived,
    Supervision,
    TimeIsUp,
    ValuesPending,
    deliver,
    supervision,
)

pytestmark = pytest.mark.filterwarnings("ignore:operators that may do matrix work.*data_ptr")

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
        REACHED.set()
        return self.two(x)


REACHED = threading.Event()
"""Set behind what a test does inside of a forward pass; a list would be put back as it was."""
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
            REACHED.set()
            return self.one(x)

    wide = nn.Linear(8192, 8192)
    model = NeedsMemory()
    model.one = wide
    with pytest.raises(TimeIsUp), Supervision(limit_s=0.3):
        count_flops(model, (torch.ones(8192, 8192),))  # 3.3 TFLOP, in less than 4 GiB
    assert not REACHED.is_set()
    with Supervision(limit_s=600):
        assert count_flops(NeedsMemory(), (X,)).method == "count on real CPU copies"


def test_a_signal_ends_a_count_and_is_handled_after_it() -> None:
    model = Net(lambda: signal.raise_signal(signal.SIGUSR1))
    before = picture()
    with pytest.raises(SignalArrived), Supervision() as watched:
        count_flops(model, (X,))
    assert REACHED.is_set()  # the handler did not run in the middle
    assert picture() == before
    assert watched.signals == [signal.SIGUSR1]
    assert HANDLED == []
    assert watched.raised is None
    with pytest.raises(TimeoutError, match="from a handler"):
        deliver(watched.signals)
    assert HANDLED == [signal.SIGUSR1]
    assert watched.signals == []


def test_ctrl_c_ends_a_count_and_interrupts_after_it() -> None:
    with pytest.raises(SignalArrived), Supervision() as watched:
        count_flops(Net(lambda: signal.raise_signal(signal.SIGINT)), (X,))
    with pytest.raises(KeyboardInterrupt):
        deliver(watched.signals)


def test_ctrl_c_that_comes_again_interrupts_at_once() -> None:
    def insist() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    model = Net(insist)
    before = picture()
    with pytest.raises(KeyboardInterrupt), Supervision() as watched:
        count_flops(model, (X,))
    assert isinstance(watched.raised, KeyboardInterrupt)
    assert not REACHED.is_set()
    assert picture() == before


def test_signals_may_wait_for_the_end_of_a_count() -> None:
    def insist() -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)

    with Supervision(end_at_signals=False) as watched:
        assert count_flops(Net(insist), (X,)).forward == 1024
    assert watched.signals == [signal.SIGUSR1]
    assert HANDLED == []


def test_handlers_are_put_back_where_one_raises_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]
    set_handler, calls = signal.signal, []

    def interrupted(number: int, handler: Any) -> Any:
        found = set_handler(number, handler)
        calls.append(number)
        if len(calls) in (1, 4):
            raise TimeoutError("a handler ran in between")
        return found

    for enters in (True, False):
        calls.clear()
        if not enters:
            calls.append(0)
        with monkeypatch.context() as patched:
            patched.setattr(signal, "signal", interrupted)
            with pytest.raises(TimeoutError), Supervision():
                pass
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)] == before
        assert supervision() is None


def test_two_threads_count_one_after_the_other() -> None:
    """What a count sets and restores belongs to the process."""
    is_inside, may_go = threading.Event(), threading.Event()
    generator = torch.random.default_generator
    ended: list[str] = []

    def wait() -> None:
        is_inside.set()
        may_go.wait(20)

    def first() -> None:
        count_flops(Net(wait), (X,))
        ended.append("first")

    def second() -> None:
        count_flops(Net(), (X,))
        ended.append("second")

    threads = [threading.Thread(target=work) for work in (first, second)]
    threads[0].start()
    assert is_inside.wait(20)
    threads[1].start()
    with pytest.raises(OtherCountRuns), Supervision():  # which never waits
        count_flops(Net(), (X,))
    may_go.set()
    for thread in threads:
        thread.join(20)
    assert ended == ["first", "second"]
    assert torch.random.default_generator is generator


OUTSIDE = nn.Parameter(torch.ones(8, 8))


@pytest.mark.parametrize("reads_memory", [True, False])
def test_gradients_outside_the_model_stay(reads_memory: bool) -> None:
    class Reaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if reads_memory:  # then it is counted on real copies
                x.data_ptr()
            return self.layer(x) @ OUTSIDE

    OUTSIDE.grad = gradient = torch.full((8, 8), 0.5)
    count_flops(Reaches(), (X,))
    assert OUTSIDE.grad is gradient
    assert gradient.eq(0.5).all()


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
