"""What is known of a backward pass before it runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import pytest
import torch

from truemfu.torch_private import backward_passes

Asked = tuple[list[int], Hashable]


class Listener:
    def __init__(self) -> None:
        self.begun: list[Asked] = []
        self.ended = 0

    def backward_begins(self, numbers: Sequence[int], asked: Hashable, makes_graph: bool) -> None:
        self.begun.append((list(numbers), asked))

    def backward_ended(self) -> None:
        self.ended += 1


@pytest.fixture
def passes() -> Iterator[list[Asked]]:
    listener = Listener()
    stop = backward_passes.listen(listener)
    yield listener.begun
    stop()
    assert listener.ended == len(listener.begun)


def loss(layer: torch.nn.Linear) -> torch.Tensor:
    return layer(torch.ones(2, 3)).sum()  # type: ignore[no-any-return]


def test_equal_requests_are_equal_and_others_are_not(passes: list[Asked]) -> None:
    layer = torch.nn.Linear(3, 4)
    loss(layer).backward()
    loss(layer).backward()
    loss(layer).backward(inputs=[layer.bias])
    torch.autograd.grad(loss(layer), layer.weight)
    torch.autograd.grad(loss(layer), layer.weight, create_graph=True)
    asked = [what for _, what in passes]
    assert asked[0] == asked[1]
    assert len(set(asked[1:])) == 4


def test_the_node_of_an_output_is_known(passes: list[Asked]) -> None:
    out = loss(torch.nn.Linear(3, 4))
    node = out.grad_fn
    assert node is not None
    out.backward()
    assert passes[0][0] == [node._sequence_nr()]


def test_a_program_sees_no_read_of_its_tensors(passes: list[Asked]) -> None:
    seen: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(*, watched: bool) -> list[str]:
        seen.clear()
        out = loss(torch.nn.Linear(3, 4))
        with Mode():
            backward_run = torch.autograd._engine_run_backward
            if not watched:
                torch.autograd._engine_run_backward = backward_run.__wrapped__  # type: ignore[attr-defined]
            try:
                out.backward()
            finally:
                torch.autograd._engine_run_backward = backward_run  # type: ignore[attr-defined]
        return list(seen)

    assert run(watched=True) == run(watched=False)
    assert len(passes) == 1


def test_an_error_of_the_program_is_its_own(passes: list[Asked]) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert passes == [([], (1, False))]


def test_torch_is_left_as_it_was_after_the_last_listener() -> None:
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    first, second = (backward_passes.listen(Listener()) for _ in range(2))
    first()
    assert torch.autograd._engine_run_backward is not before  # type: ignore[attr-defined]
    second()
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]
