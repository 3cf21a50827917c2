"""The shadow of a model: what is copied, what is shared, and that no object of the user ends twice."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from truemfu import FlopModel, count_flops, register_module
from truemfu.flops.host_copy import HostCopy, host_copy
from truemfu.flops.isolation.process_state import autocast_state
from truemfu.flops.registry import MODULE_FORMULAS

pytestmark = pytest.mark.filterwarnings("ignore:operators that may do matrix work.*data_ptr")

X = torch.linspace(-1, 1, 32).reshape(4, 8)
ONE = 2 * 4 * 8 * 8
"""Forward FLOPs of a linear layer of 8 by 8 on `X`."""


class Net(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.between = between
        self.two = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self.one(x)))


class Watcher:
    _truemfu_skip = True

    def __init__(self) -> None:
        self.calls = 0

    def see(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.calls += 1
        return output @ output.T @ output


def test_hooks_that_watch_the_run_are_left_out() -> None:
    plain = count_flops(Net(), (X,))
    model, watcher = Net(), Watcher()

    def watch(module: nn.Module, args: Any) -> None:
        watcher.calls += 1

    watch._truemfu_skip = True  # type: ignore[attr-defined]
    model.one.register_forward_hook(watcher.see)
    model.two.register_forward_pre_hook(watch)
    assert count_flops(model, (X,)) == plain
    assert watcher.calls == 0


def test_other_hooks_are_still_counted() -> None:
    model = Net()
    model.one.register_forward_hook(lambda module, args, output: output @ module.weight)
    assert count_flops(model, (X,)).forward == 3 * ONE


def test_autocast_is_carried_over() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        state = autocast_state()
        here = count_flops(Net(), (X,))
    with state.applied():
        there = count_flops(Net(), (X,))
    assert not torch.is_autocast_enabled("cpu")
    assert set(here.by_dtype) == {"bf16"}
    assert there == here
    assert set(count_flops(Net(), (X,)).by_dtype) == {"fp32"}


def cast_of_weight(output: torch.Tensor) -> Any:
    """The autograd node that cast the weight of a linear layer without a bias."""
    product = output.grad_fn
    turned = next(edge for edge, _ in product.next_functions if edge is not None)
    return turned.next_functions[0][0]


def test_casts_that_the_training_thread_has_cached_stay_cached() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.wrapped = torch.autocast("cpu", torch.bfloat16)(self.layer.forward)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.wrapped(x).float()

    layer = nn.Linear(8, 8, bias=False)
    model = Casts()
    with torch.autocast("cpu", torch.bfloat16):
        before = cast_of_weight(layer(X))
        count = count_flops(model, (X,))
        assert cast_of_weight(layer(X)) is before
        assert torch.is_autocast_cache_enabled()
    assert set(count.by_dtype) == {"bf16"}


def test_random_values_that_a_model_reads_are_drawn_from_a_generator_of_its_own() -> None:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.own = torch.Generator().manual_seed(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                keep = torch.rand(()).item() + torch.randint(0, 9, (1,)).item() + torch.randperm(3)[0].item()
                if keep + torch.rand((), generator=self.own).item() > 0:
                    x = layer(x)
            return x

    model = LayerDrop()
    state, own = torch.get_rng_state(), model.own.get_state()
    count = count_flops(model, (X,))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.own.get_state(), own)
    assert count.forward == 4 * ONE
    assert "a random draw was assumed" in count.notes


@pytest.mark.parametrize("rate", [0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("keeps", [torch.ge, torch.gt])
def test_a_layer_that_is_dropped_at_rate_0_or_1_assumes_no_draw(keeps: Any, rate: float) -> None:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(self.first(x), 0.0)
            return self.second(x) if keeps(torch.rand([]), rate) else x

    count = count_flops(LayerDrop(), (X,))
    assert count.notes == (("a random draw was assumed",) if rate == 0.5 else ())
    if rate != 0.5:
        assert ("second" in count.by_module) == (rate == 0)


def test_messages_about_fake_tensors_are_hidden_during_a_count(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def speak(x: torch.Tensor) -> torch.Tensor:
        logger.error("from the count")
        return x

    logger.addHandler(caplog.handler)
    try:
        count_flops(Net(speak), (X,))
        logger.error("from later on")
    finally:
        logger.removeHandler(caplog.handler)
    assert "from later on" in caplog.text
    assert "from the count" not in caplog.text


def test_code_that_is_compiled_as_an_attribute_is_taken_as_it_was_written() -> None:
    runs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        runs.append(1)
        return graph.forward

    model = Net(torch.compile(lambda x: x.sin(), backend=backend))
    assert count_flops(model, (X,)).forward == 2 * ONE
    assert not runs
    model(X)
    assert len(runs) == 1


def test_a_host_copy_of_a_cpu_tensor_is_a_copy_and_there_at_once() -> None:
    source = torch.arange(6).reshape(2, 3)
    copy = HostCopy(source)
    source.zero_()
    assert copy.ready()
    assert copy.get().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert host_copy(source).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.ones(1, device=device).sum().item()  # initialised, so that nothing below waits for that
    mode = torch.cuda.get_sync_debug_mode()
    yield device
    torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
def test_a_host_copy_does_not_synchronise(cuda: torch.device) -> None:
    source = torch.arange(1000, device=cuda).reshape(10, 100)
    # Page-locked memory that is new to the process makes it wait for the device; used again, it does not.
    for warm in [HostCopy(source), HostCopy(source.t())]:
        warm.get()
    del warm
    torch.cuda._sleep(2_000_000_000)
    torch.cuda.set_sync_debug_mode("error")
    copy = HostCopy(source)
    late = HostCopy(source.t())
    assert not copy.ready()
    source.zero_()  # after the copy in the stream
    values = copy.get()
    torch.cuda.set_sync_debug_mode("default")
    assert values.tolist() == torch.arange(1000).reshape(10, 100).tolist()
    assert late.get().tolist() == torch.arange(1000).reshape(10, 100).t().tolist()
    assert values.device.type == "cpu"


class Scratch:
    """A folder that lives as long as this object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def __del__(self) -> None:
        self.path.rmdir()


class ScratchList(list[Path]):
    """The same as a list of folders."""

    def __del__(self) -> None:
        for path in self:
            path.rmdir()


class ScratchModule(nn.Linear):
    """The same as a module."""

    def __init__(self, path: Path) -> None:
        super().__init__(8, 8)
        self.path = path
        path.mkdir()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, ScratchModule)
        assert type(self).__name__ == "ScratchModule"
        return super().forward(x)

    def __del__(self) -> None:
        self.path.rmdir()


def _held(path: Path) -> Any:
    return Scratch(path)


def _in_a_container(path: Path) -> Any:
    return {"folders": [Scratch(path)]}


def _in_a_closure(path: Path) -> Any:
    scratch = Scratch(path)
    return lambda: scratch.path


def _of_a_container(path: Path) -> Any:
    path.mkdir()
    return ScratchList([path])


def _as_a_module(path: Path) -> Any:
    return ScratchModule(path)


@pytest.mark.parametrize("needs_memory", [False, True], ids=["fake", "real copies"])
@pytest.mark.parametrize("make", [_held, _in_a_container, _in_a_closure, _of_a_container, _as_a_module])
def test_an_object_that_cleans_up_at_its_end_does_so_once(
    make: Callable[[Path], Any], needs_memory: bool, tmp_path: Path
) -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        assert not needs_memory or x.data_ptr()
        return x

    model, folder = Net(between), tmp_path / "scratch"
    model.held = make(folder)
    if isinstance(model.held, nn.Module):
        model.two = model.held
    count = count_flops(model, (X,))
    FlopModel.fit(model, (X,))(X)
    gc.collect()
    assert folder.exists()
    assert count.method == f"count on {'real CPU copies' if needs_memory else 'fake tensors'}"
    assert (count.forward, count.backward) == (2 * ONE, 3 * ONE)
    del model
    gc.collect()
    assert not folder.exists()


def test_a_module_with_an_end_of_its_own_counts_by_its_registered_formula(tmp_path: Path) -> None:
    model = ScratchModule(tmp_path / "scratch")
    register_module(ScratchModule)(lambda self, x: F.linear(F.linear(x, self.weight), self.weight))
    try:
        assert count_flops(model, (X,)).forward == 2 * ONE
    finally:
        del MODULE_FORMULAS[ScratchModule]
    gc.collect()
    assert model.path.exists()
