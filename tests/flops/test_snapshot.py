"""A model as its forward pass found it: what is counted later is that, whatever became of the model since."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from truemfu import Convention, FlopModel, count_flops, register_module
from truemfu.errors import ModelError
from truemfu.flops.host_copy import host_copy, original_device, start_host_copy
from truemfu.flops.interruption import Fetched, Supervision
from truemfu.flops.isolation.process_state import autocast_state
from truemfu.flops.registry import MODULE_FORMULAS
from truemfu.flops.shadow.snapshot import snapshot

pytestmark = pytest.mark.filterwarnings("ignore:operators that may do matrix work.*data_ptr")

X = torch.linspace(-1, 1, 32).reshape(4, 8)
ONE = 2 * 4 * 8 * 8
"""Forward FLOPs of a linear layer of 8 by 8 on `X`."""


def counted(model: nn.Module, batch: Any, **options: Any) -> Any:
    return count_flops(snapshot(model), batch, **options)


@functools.cache
def cases() -> dict[str, Any]:
    pytest.importorskip("transformers", minversion="5.0")
    from benchmarks.cases import CASES

    return {case.name: case for case in CASES}


NAMES = (
    "gpt2 llama-sdpa llama-eager llama-checkpointed llama-lora llama-padded qwen2 qwen3 mistral gemma2 "
    "gemma3 mixtral qwen3-moe-grouped_mm qwen3-moe-batched_mm qwen3-moe-eager deepseek-v3 bert t5 vit clip "
    "qwen2.5-vl llava mamba mamba2 whisper resnet llama-compiled gpt2-compiled resnet-compiled"
).split()


def test_every_public_case_is_named_here() -> None:
    assert list(cases()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_counts_as_the_model(name: str) -> None:
    case = cases()[name]
    model, batch = case.build(), case.batch(samples=2, length=24)
    convention = Convention(attention="full" if case.compiled else "causal")
    assert counted(model, batch, convention=convention) == count_flops(model, batch, convention=convention)


def test_a_fit_of_a_snapshot_is_the_same_closed_form() -> None:
    case = cases()["llama-checkpointed"]
    model, batch = case.build(), case.batch(samples=2, length=24)
    other = case.batch(samples=3, length=41)
    assert FlopModel.fit(snapshot(model), batch)(other) == FlopModel.fit(model, batch)(other)


class Net(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.between = between
        self.two = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self.one(x)))


def test_a_snapshot_stays_as_the_model_was() -> None:
    model = Net(nn.Dropout(0.5))
    before = count_flops(model, (X,))
    taken = snapshot(model)
    model.requires_grad_(False).eval()
    model.one.register_forward_hook(lambda module, args, output: output @ output.T @ output)
    model.between = nn.Sequential(nn.Linear(8, 8))
    model.two = nn.Linear(8, 3)
    assert taken.training
    assert count_flops(taken, (X,)) == before


def test_a_snapshot_runs_no_operator_and_keeps_no_parameter_alive() -> None:
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} ran")

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    buffer = model[1].running_mean
    weight = weakref.ref(model[0].weight)
    with Nothing():
        taken = snapshot(model)
    assert taken[1].running_mean is buffer
    del model
    gc.collect()
    assert weight() is None


def test_parameters_of_a_snapshot_say_what_they_stand_for() -> None:
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    model.weight.data = model.weight.data.t().contiguous().t()
    model.weight.sharding = ["rows"]
    model.bias.requires_grad_(False)
    taken = snapshot(model)
    for name, parameter in model.named_parameters():
        stand_in = dict(taken.named_parameters())[name]
        assert isinstance(stand_in, nn.Parameter)
        for say in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(stand_in, say) == getattr(parameter, say)
        assert stand_in.stride() == parameter.stride()
    assert taken.weight.sharding == ["rows"]
    assert taken.weight.sharding is not model.weight.sharding
    with pytest.raises(ModelError, match="a parameter of a snapshot, which can only be counted"):
        taken(X.bfloat16())


def test_tied_weights_and_shared_modules_are_one_in_a_snapshot() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Linear(8, 8), layer)
    model[1].weight = layer.weight
    taken = snapshot(model)
    assert taken[0] is taken[2]
    assert taken[1].weight is taken[0].weight


def test_registered_modules_count_by_their_formula_in_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("this kernel runs on no fake tensor")

    monkeypatch.setattr("truemfu.flops.registry.MODULE_FORMULAS", MODULE_FORMULAS)
    register_module(Kernel)(lambda self, x: F.linear(x, self.weight, self.bias))
    try:
        count = counted(Kernel(8, 8), (X,))
    finally:
        del MODULE_FORMULAS[Kernel]
    assert (count.forward, count.backward) == (ONE, ONE)


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
    assert counted(model, (X,)) == plain
    assert watcher.calls == 0


def test_other_hooks_are_still_counted() -> None:
    model = Net()
    model.one.register_forward_hook(lambda module, args, output: output @ module.weight)
    assert counted(model, (X,)).forward == 3 * ONE
    assert counted(model, (X,)) == count_flops(model, (X,))


def test_autocast_is_carried_over() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        state = autocast_state()
        here = count_flops(Net(), (X,))
    taken = snapshot(Net())

    def count() -> Any:
        with state.applied():
            found = count_flops(taken, (X,))
        assert not torch.is_autocast_enabled("cpu")
        return found

    assert set(here.by_dtype) == {"bf16"}
    assert count() == here
    assert set(count_flops(taken, (X,)).by_dtype) == {"fp32"}


def test_the_default_device_is_carried_over() -> None:
    with torch.device("meta"):
        state = autocast_state()

    def places() -> list[str]:
        with state.applied():
            inside = torch.zeros(1).device.type
        return [inside, torch.zeros(1).device.type]

    assert places() == ["meta", "cpu"]


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
    taken = snapshot(Casts())
    with torch.autocast("cpu", torch.bfloat16):
        before = cast_of_weight(layer(X))
        count = count_flops(taken, (X,))
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
    count = counted(model, (X,))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.own.get_state(), own)
    assert count == count_flops(model, (X,))
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


def test_messages_of_other_threads_about_fake_tensors_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def speak(x: torch.Tensor) -> torch.Tensor:
        logger.error("from the count")
        thread = threading.Thread(target=logger.error, args=("from the training",))
        thread.start()
        thread.join()
        return x

    logger.addHandler(caplog.handler)
    try:
        counted(Net(speak), (X,))
    finally:
        logger.removeHandler(caplog.handler)
    assert "from the training" in caplog.text
    assert "from the count" not in caplog.text


def test_code_that_is_compiled_as_an_attribute_is_taken_as_it_was_written() -> None:
    runs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        runs.append(1)
        return graph.forward

    model = Net(torch.compile(lambda x: x.sin(), backend=backend))
    assert counted(model, (X,)) == count_flops(model, (X,))
    assert not runs
    model(X)
    assert len(runs) == 1


def test_a_host_copy_of_a_cpu_tensor_is_a_copy_and_there_at_once() -> None:
    source = torch.arange(6).reshape(2, 3)
    copy = start_host_copy(source)
    source.zero_()
    assert copy.ready()
    assert copy.get().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert original_device(copy.get()) == torch.device("cpu")
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
    for warm in [start_host_copy(source), start_host_copy(source.t())]:
        warm.get()
    del warm
    torch.cuda._sleep(2_000_000_000)
    torch.cuda.set_sync_debug_mode("error")
    copy = start_host_copy(source)
    late = start_host_copy(source.t())
    assert not copy.ready()
    source.zero_()  # after the copy in the stream
    values = copy.get()
    torch.cuda.set_sync_debug_mode("default")
    assert values.tolist() == torch.arange(1000).reshape(10, 100).tolist()
    assert late.get().tolist() == torch.arange(1000).reshape(10, 100).t().tolist()
    assert values.device.type == "cpu"
    assert original_device(values) == cuda


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "llama-checkpointed", "t5", "qwen2.5-vl", "resnet"])
def test_a_model_on_cuda_counts_as_such_without_synchronising(name: str, cuda: torch.device) -> None:
    case = cases()[name]
    model, batch = case.build().to(cuda), case.batch(samples=2, length=24)
    there = {k: v.to(cuda) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    here = count_flops(model, there)
    torch.cuda.set_sync_debug_mode("error")
    gc.collect()
    memory = torch.cuda.memory_allocated()
    taken = snapshot(model)
    copies = {k: start_host_copy(v).get() if isinstance(v, torch.Tensor) else v for k, v in there.items()}
    fetched = Fetched(start_host_copy)
    fetched.start(t for t in there.values() if isinstance(t, torch.Tensor))
    while not fetched.ready():
        time.sleep(0.001)
    with Supervision(fetched=fetched):
        assert count_flops(taken, copies) == here
        assert count_flops(taken, there) == here
    torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == memory


class Record(list[float]):
    """A list that a count leaves alone: what it adds to a plain one is taken out again."""


def test_a_snapshot_is_run_on_the_models_own_values_where_it_needs_any() -> None:
    seen = Record()

    class NeedsMemory(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.data_ptr()
            seen.append(float(self.one.weight.sum()))
            return super().forward(x)

    model = NeedsMemory()
    taken = snapshot(model)
    with torch.no_grad():
        model.one.weight.fill_(2.0)
    model.requires_grad_(False)
    count = count_flops(taken, (X,))
    assert count.method == "count on real CPU copies"
    assert (count.forward, count.backward) == (2 * ONE, 3 * ONE)
    assert seen == [128.0]
    del model
    gc.collect()
    with pytest.raises(ModelError, match="the model no longer exists"):
        count_flops(taken, (X,))
