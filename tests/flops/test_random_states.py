"""Counts leave every generator of the process as it would be without them, whoever draws meanwhile."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from truemfu import count_flops

X = torch.ones(4, 8)

pytestmark = pytest.mark.filterwarnings("ignore:operators that may do matrix work.*data_ptr")


class Checkpointed(nn.Module):
    """Its checkpoints set the random state back and forth, with dropout inside."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=number % 2 == 0)
        return x


class OnRealCopies(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        return super().forward(x)


def draw_torch() -> Any:
    return int(torch.randint(1 << 30, ()))


def draw_python() -> Any:
    return random.random()


def draw_numpy() -> Any:
    return float(np.random.rand())


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def drawn_by_a_thread(draw: Callable[[], Any], meanwhile: Callable[[], None]) -> list[Any]:
    """What a loader's thread draws while something else goes on."""
    numbers: list[Any] = []
    is_drawing, is_over = threading.Event(), threading.Event()

    def fetch() -> None:
        while not is_over.is_set():
            numbers.append(draw())
            is_drawing.set()

    seed()
    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        is_drawing.wait()
        meanwhile()
    finally:
        is_over.set()
        thread.join()
    return numbers


@pytest.mark.parametrize("draw", [draw_torch, draw_python, draw_numpy])
@pytest.mark.parametrize("kind", [Checkpointed, OnRealCopies])
def test_a_thread_that_draws_meanwhile_draws_what_it_would(
    kind: type[Checkpointed], draw: Callable[[], Any]
) -> None:
    x, model = X.clone().requires_grad_(), kind()
    counts: list[Any] = []
    numbers = drawn_by_a_thread(draw, lambda: counts.extend(count_flops(model, (x,)) for _ in range(3)))
    seed()
    assert numbers == [draw() for _ in numbers]
    assert len(set(numbers)) > 100
    assert counts[0].recompute
    assert counts == counts[:1] * 3


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.draw()
        return self.layer(x)


def seed_everything() -> None:
    torch.manual_seed(99)


@pytest.mark.parametrize("draw", [draw_python, draw_numpy, seed_everything])
@pytest.mark.parametrize("is_alone", [True, False])
def test_what_a_model_draws_itself_is_put_back(draw: Callable[[], Any], is_alone: bool) -> None:
    model = Draws(draw)
    seed()
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    if not is_alone:
        other.start()
    try:
        count_flops(model, (X,))
    finally:
        is_over.set()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))


SEEN: queue.SimpleQueue[int] = queue.SimpleQueue()
"""Not a list: a count would take out again what it adds to a global list."""


def look() -> None:
    SEEN.put(torch.initial_seed())


def look_from_another_thread() -> None:
    torch.manual_seed(1234)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    look()


def test_the_generator_of_other_threads_stays_theirs() -> None:
    model = Draws(look_from_another_thread)
    torch.manual_seed(7)
    count_flops(model, (X,))
    assert [SEEN.get(timeout=1), SEEN.get(timeout=1)] == [7, 1234]
    assert SEEN.empty()
    assert torch.initial_seed() == 7


def test_a_process_wide_generator_that_torch_no_longer_uses_is_put_back_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if a later version read its generator from elsewhere: the name is there, without effect."""
    real = torch.default_generator
    monkeypatch.setattr(torch, "manual_seed", lambda number: real.manual_seed(number))
    model = Draws(seed_everything)
    seed()
    state = torch.get_rng_state()
    count_flops(model, (X,))
    assert torch.equal(torch.get_rng_state(), state)
