"""Graphs that are captured once and replayed: the stand-in class has the methods of a CUDA graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from truemfu import Convention
from truemfu.flops.observe.graphs import CAPTURED_BEFORE, Captures
from truemfu.flops.observe.observer import StepObserver, observe_capture

FORWARD = 2 * 4 * 8 * 16


def make() -> tuple[type, Captures]:
    class Graph:
        def capture_begin(self, pool: object = None) -> None:
            self.pool = pool

        def capture_end(self) -> None:
            pass

        def replay(self) -> None:
            self.has_run = True

    return Graph, Captures(Graph, lambda: observe_capture(Convention()))


def capture(graph: type, model: nn.Module, x: torch.Tensor) -> object:
    made = graph()
    made.capture_begin(pool=1)
    model(x).sum().backward()
    made.capture_end()
    return made


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(8, 16)


def test_each_replay_counts_as_the_captured_step(model: nn.Module) -> None:
    kind, captures = make()
    captures.hold()
    made = capture(kind, model, torch.zeros(4, 8))
    observer = StepObserver(Convention(), captures=captures)
    observer.enter()
    made.replay()
    made.replay()
    observation = observer.leave()
    count = observation.count()
    captures.release()
    assert made.has_run
    assert observation.problem is None
    assert (count.forward, count.backward) == (2 * FORWARD, 2 * FORWARD)


def test_a_capture_in_an_observed_step_executes_nothing(model: nn.Module) -> None:
    kind, captures = make()
    observer = StepObserver(Convention(), captures=captures)
    observer.enter()
    made = capture(kind, model, torch.zeros(4, 8))
    assert made.pool == 1
    model(torch.zeros(4, 8))
    made.replay()
    count = observer.leave().count()
    assert (count.forward, count.backward) == (2 * FORWARD, FORWARD)


def test_a_backward_pass_captured_apart_is_a_backward_pass(model: nn.Module) -> None:
    kind, captures = make()
    captures.hold()
    forward, backward = kind(), kind()
    forward.capture_begin()
    loss = model(torch.zeros(4, 8)).sum()
    forward.capture_end()
    backward.capture_begin()
    loss.backward()
    backward.capture_end()
    observer = StepObserver(Convention(), captures=captures)
    observer.enter()
    forward.replay()
    backward.replay()
    observation = observer.leave()
    count = observation.count()
    captures.release()
    assert observation.problem is None
    assert (count.forward, count.backward) == (FORWARD, FORWARD)


def test_a_graph_captured_before_is_a_reason_for_unknown_flops(model: nn.Module) -> None:
    kind, captures = make()
    made = capture(kind, model, torch.zeros(4, 8))
    observer = StepObserver(Convention(), captures=captures)
    observer.enter()
    made.replay()
    observation = observer.leave()
    observation.count()
    assert observation.problem == CAPTURED_BEFORE


def test_the_class_is_as_before_when_nobody_holds_its_captures() -> None:
    kind, captures = make()
    before = dict(vars(kind))
    captures.hold()
    captures.hold()
    captures.release()
    assert kind.replay is not before["replay"]
    captures.release()
    assert dict(vars(kind)) == before


def test_a_capture_holds_no_graph_alive(model: nn.Module) -> None:
    import gc
    import weakref

    kind, captures = make()
    captures.hold()
    made = capture(kind, model, torch.zeros(4, 8))
    gone = weakref.ref(made)
    del made
    gc.collect()
    captures.release()
    assert gone() is None


def test_a_capture_on_another_thread_hides_nothing_of_the_step(model: nn.Module) -> None:
    kind, captures = make()
    observer = StepObserver(Convention(), captures=captures)
    made = kind()
    with ThreadPoolExecutor(1) as other:
        observer.enter()
        other.submit(made.capture_begin).result()
        model(torch.zeros(4, 8)).sum().backward()
        other.submit(made.capture_end).result()
        count = observer.leave().count()
    assert (count.forward, count.backward) == (FORWARD, FORWARD)
