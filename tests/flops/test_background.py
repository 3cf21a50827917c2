"""Counting on a thread of its own: the training beside it notices nothing, and the counts are the same."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from truemfu import Convention, FlopModel, count_flops, count_step, register_module
from truemfu.errors import BatchError, ModelError, NeedsTrainingThread
from truemfu.flops import background as background_module
from truemfu.flops.background import background, in_background
from truemfu.flops.host_copy import host_copy, place_of, start_host_copy
from truemfu.flops.off_thread import needs_training_thread
from truemfu.flops.registry import MODULE_FORMULAS
from truemfu.flops.snapshot import snapshot
from truemfu.flops.surroundings import autocast_state

X = torch.linspace(-1, 1, 32).reshape(4, 8)
ONE = 2 * 4 * 8 * 8
"""Forward FLOPs of a linear layer of 8 by 8 on `X`."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "PAUSE_S", 0)
    monkeypatch.setattr(background_module, "WORK_S", 0)


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of `work` on a background thread; its error is raised here."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with background():
                results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def counted_elsewhere(model: nn.Module, batch: Any, **options: Any) -> Any:
    taken = snapshot(model)
    return elsewhere(lambda: count_flops(taken, batch, **options))


class Net(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.between = between
        self.two = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self.one(x)))


# The same counts


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
def test_a_snapshot_counts_in_the_background_as_the_model_on_its_own_thread(name: str) -> None:
    case = cases()[name]
    model, batch = case.build(), case.batch(samples=2, length=24)
    convention = Convention(attention="full" if case.compiled else "causal")
    assert needs_training_thread(model, batch) is None
    here = count_flops(model, batch, convention=convention)
    if here.method == "count on fake tensors":
        assert counted_elsewhere(model, batch, convention=convention) == here
    else:  # the experts' kernel on older versions of torch
        with pytest.raises(NeedsTrainingThread, match="has to be run on real tensors"):
            counted_elsewhere(model, batch, convention=convention)


def test_a_fit_in_the_background_gives_the_same_closed_form() -> None:
    case = cases()["llama-checkpointed"]
    model, batch = case.build(), case.batch(samples=2, length=24)
    other = case.batch(samples=3, length=41)
    taken = snapshot(model)
    fitted = elsewhere(lambda: FlopModel.fit(taken, batch))
    assert fitted(other) == FlopModel.fit(model, batch)(other)
    assert elsewhere(lambda: fitted(other)) == fitted(other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_recomputed_in_the_background_too(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x, use_reentrant=reentrant)

    x, model = X.clone().requires_grad_(), Checkpointed()
    state = torch.get_rng_state()
    count = counted_elsewhere(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    again = 2 * ONE if reentrant else ONE  # what is not needed again is not run again
    assert (count.forward, count.backward, count.recompute) == (2 * ONE, 4 * ONE, again)
    assert count == count_flops(model, (x,))


def test_a_selective_checkpoint_enters_its_modes_on_its_own_thread_alone() -> None:
    def keep_products() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x, use_reentrant=False, context_fn=keep_products)

    assert counted_elsewhere(Selective(), (X,)) == count_flops(Selective(), (X,))


# Snapshots


def test_a_snapshot_stays_as_the_model_was() -> None:
    model = Net(nn.Dropout(0.5))
    before = count_flops(model, (X,))
    taken = snapshot(model)
    model.requires_grad_(False).eval()
    model.one.register_forward_hook(lambda module, args, output: output @ output.T @ output)
    model.between = nn.Sequential(nn.Linear(8, 8))
    model.two = nn.Linear(8, 3)
    assert taken.training
    assert elsewhere(lambda: count_flops(taken, (X,))) == before
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
    with pytest.raises(ModelError, match="a parameter of a snapshot, which is there to be counted only"):
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
        count = counted_elsewhere(Kernel(8, 8), (X,))
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
    assert counted_elsewhere(model, (X,)) == plain
    assert watcher.calls == 0


def test_other_hooks_are_still_counted() -> None:
    model = Net()
    model.one.register_forward_hook(lambda module, args, output: output @ module.weight)
    assert counted_elsewhere(model, (X,)).forward == 3 * ONE
    assert counted_elsewhere(model, (X,)) == count_flops(model, (X,))


# Autocast


def test_autocast_is_carried_over() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        state = autocast_state()
        here = count_flops(Net(), (X,))
    taken = snapshot(Net())

    def count() -> Any:
        with state.applied():
            counted = count_flops(taken, (X,))
        assert not torch.is_autocast_enabled("cpu")
        return counted

    assert set(here.by_dtype) == {"bf16"}
    assert elsewhere(count) == here
    assert set(elsewhere(lambda: count_flops(taken, (X,))).by_dtype) == {"fp32"}


def test_the_default_device_is_carried_over() -> None:
    with torch.device("meta"):
        state = autocast_state()

    def places() -> list[str]:
        with state.applied():
            inside = torch.zeros(1).device.type
        return [inside, torch.zeros(1).device.type]

    assert elsewhere(places) == ["meta", "cpu"]


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
        count = elsewhere(lambda: count_flops(taken, (X,)))
        assert cast_of_weight(layer(X)) is before
        assert torch.is_autocast_cache_enabled()
    assert set(count.by_dtype) == {"bf16"}


# Nothing of the process is touched


SETTERS = [
    (torch, "set_rng_state"),
    (torch.random, "set_rng_state"),
    (torch, "manual_seed"),
    (torch.random, "manual_seed"),
    (torch.cuda, "set_rng_state_all"),
    (random, "setstate"),
    (np.random, "set_state"),
    (torch.compiler, "set_stance"),
    (torch.backends.cudnn, "flags"),
    (torch, "clear_autocast_cache"),
    (warnings, "catch_warnings"),
    (torch, "set_num_threads"),
]
if hasattr(torch._logging, "hide_warnings"):
    SETTERS.append((torch._logging, "hide_warnings"))


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of process-wide setters that a background thread has called."""
    found: set[str] = set()

    def watch(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def note() -> None:
            if in_background():
                found.add(name)

        def setter(*args: Any, **kwargs: Any) -> Any:
            note()
            return own(*args, **kwargs)

        if isinstance(own, type):

            def enter(self: Any) -> Any:
                note()
                return own.__enter__(self)

            monkeypatch.setattr(owner, name, type(name, (own,), {"__enter__": enter}))
        else:
            monkeypatch.setattr(owner, name, setter)

    for owner, name in SETTERS:
        watch(owner, name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_state_of_the_process_is_set(name: str, touched: set[str]) -> None:
    case = cases()[name]
    model, batch = case.build(), case.batch(samples=2, length=24)
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with contextlib.suppress(NeedsTrainingThread):  # on older versions of torch, for some experts' kernel
        counted_elsewhere(model, batch)
    assert not touched
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))


def test_the_watch_on_setters_sees_a_count_that_is_not_in_the_background(
    touched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_background.in_background", lambda: True)
    count_flops(Net(), (X,))
    assert touched >= {"set_rng_state", "setstate", "set_state", "set_stance"}


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
    count = counted_elsewhere(model, (X,))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.own.get_state(), own)
    assert count == count_flops(model, (X,))
    assert "a random draw was assumed" in count.notes


DOORS = [
    (TorchDispatchMode, "__enter__"),
    (TorchDispatchMode, "__exit__"),
    (sys.modules["torch.utils.checkpoint"], "_checkpoint_without_reentrant_generator"),
    (sys.modules["torch.utils.checkpoint"].CheckpointFunction, "forward"),
    (torch.nn.attention, "_sdpa_kernel"),
    (sys.modules["torch._subclasses.meta_utils"], "safe_grad"),
]


def test_doors_are_up_only_while_somebody_counts_in_the_background() -> None:
    import torch._dynamo.eval_frame as eval_frame
    import torch.nn.attention.flex_attention as flex

    opener = next(n for n in ("setup_compilation_env", "_set_compilation_env") if n in vars(flex))
    doors = [*DOORS, (eval_frame, "_callback_from_stance"), (flex, opener)]
    before = [vars(owner)[name] for owner, name in doors]
    go, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with background():
            go.set()
            leave.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    assert go.wait(30)
    with background():
        assert in_background()
    assert not in_background()
    inside = [vars(owner)[name] for owner, name in doors]
    leave.set()
    thread.join()
    assert all(a is not b for a, b in zip(inside, before, strict=True))
    assert [vars(owner)[name] for owner, name in doors] == before


def test_an_error_in_the_background_leaves_everything_as_it_was() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no luck today")

    def picture() -> dict[str, Any]:
        return {
            "doors": [vars(owner)[name] for owner, name in DOORS],
            "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            "autocast cache": torch.is_autocast_cache_enabled(),
            "autocast regions": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
            "random state": torch.get_rng_state().tolist(),
            "in background": in_background(),
        }

    taken = snapshot(Net(fail))
    before, inside = picture(), []

    def count() -> None:
        with pytest.raises(NeedsTrainingThread, match="no luck today"), background():
            count_flops(taken, (X,))
        inside.append(picture())

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    for key in before:
        assert inside[0][key] == before[key], key
    assert picture() == before


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
        counted_elsewhere(Net(speak), (X,))
    finally:
        logger.removeHandler(caplog.handler)
    assert "from the training" in caplog.text
    assert "from the count" not in caplog.text


# Training goes on


class Trained(nn.Module):
    """Dropout, a checkpoint with dropout inside, a weight used twice under autocast, draws of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8))
        self.twice = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = random.random() + float(np.random.rand()) + torch.rand(()).item()
        x = checkpoint(self.inside, x * scale, use_reentrant=False)
        return self.twice(torch.tanh(self.twice(self.dropout(x))))


def train(steps: int, until: Callable[[], bool] = lambda: True) -> dict[str, Any]:
    """Train for some steps, and on until something is over; the losses and states after `steps`."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    result: dict[str, Any] = {}
    step = 0
    while step < steps or not until():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X + torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % steps == 0:
            states = (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()))
            weights = [p.detach().clone() for p in model.parameters()]
            result = {"losses": losses[:], "states": states, "weights": weights, "steps": step}
    return result


def test_training_is_bit_identical_beside_counts() -> None:
    names = ["gpt2", "llama-checkpointed", "t5", "qwen2.5-vl"]
    work = [(cases()[n].build(), cases()[n].batch(samples=2, length=24)) for n in names]
    expected = [count_flops(model, batch) for model, batch in work]
    counts: list[Any] = []
    over = threading.Event()

    def count() -> None:
        try:
            with background():
                counts.extend(count_flops(snapshot(model), batch) for model, batch in work)
        finally:
            over.set()

    thread = threading.Thread(target=count)
    thread.start()
    beside = train(100, until=over.is_set)
    thread.join()
    alone = train(beside["steps"])
    assert counts == expected
    assert beside["losses"] == alone["losses"]
    assert beside["states"] == alone["states"]
    assert all(torch.equal(a, b) for a, b in zip(beside["weights"], alone["weights"], strict=True))


TO_COMPILE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.sin(),
    lambda x: x.cos(),
    lambda x: x.exp(),
    lambda x: x.tanh(),
    lambda x: x.abs(),
    lambda x: x.neg(),
    lambda x: x.square(),
    lambda x: x.sigmoid(),
]


def test_code_is_compiled_beside_counts_and_stays_compiled() -> None:
    compiled: list[int] = []
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)

        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    taken = snapshot(Net())
    began, over = threading.Event(), threading.Event()

    def count() -> None:
        with background():
            while not over.is_set():
                count_flops(taken, (X,))
                began.set()

    thread = threading.Thread(target=count)
    thread.start()
    assert began.wait(30)
    functions = [torch.compile(function, backend=backend) for function in TO_COMPILE]
    for function in functions:
        function(X)
    over.set()
    thread.join()
    assert len(compiled) == len(functions)
    ran.clear()
    for function in functions:
        function(X)
    assert len(ran) == len(functions)
    assert len(compiled) == len(functions)


SEEN: list[bool] = []


def look_at_flags(x: torch.Tensor) -> torch.Tensor:
    flags = [name for name in vars(_python_dispatch) if re.match("_is_in_.*mode", name)]
    SEEN.extend(vars(_python_dispatch)[name] for name in flags)
    return x


def test_no_other_thread_sees_the_modes_of_a_count() -> None:
    SEEN.clear()
    counted_elsewhere(Net(look_at_flags), (X,))
    assert SEEN
    assert not any(SEEN)
    count_flops(Net(look_at_flags), (X,))
    assert any(SEEN)  # as they are set on the training thread


def test_a_count_beside_another_count_on_the_training_thread_is_right() -> None:
    case = cases()["qwen2"]
    model, batch = case.build(), case.batch(samples=2, length=24)
    expected, taken = count_flops(model, batch), snapshot(model)
    counts: list[Any] = []

    def count() -> None:
        with background():
            counts.extend(count_flops(taken, batch) for _ in range(2))

    thread = threading.Thread(target=count)
    thread.start()
    while thread.is_alive():
        assert count_flops(model, batch) == expected
    thread.join()
    assert counts == [expected] * 2


def test_a_count_rests_as_long_as_it_is_told_to() -> None:
    allowed, resting = threading.Event(), threading.Event()
    counts: list[Any] = []

    def rest() -> None:
        resting.set()
        assert allowed.wait(30)

    def count() -> None:
        with background(rest):
            counts.append(count_flops(Net(), (X,)))

    thread = threading.Thread(target=count)
    thread.start()
    assert resting.wait(30)
    thread.join(0.1)
    assert thread.is_alive()
    assert not counts
    allowed.set()
    thread.join(30)
    assert counts == [count_flops(Net(), (X,))]


def test_a_count_that_is_given_up_while_it_rests_leaves_no_trace() -> None:
    calls: list[int] = []

    def rest() -> None:
        calls.append(1)
        if len(calls) == 10:
            raise ModelError("the run has ended")

    before = [vars(owner)[name] for owner, name in DOORS]
    with pytest.raises(ModelError, match="the run has ended"), background(rest):
        count_flops(Net(), (X,))
    assert len(calls) == 10
    assert not in_background()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert [vars(owner)[name] for owner, name in DOORS] == before


# What must be counted on the training thread


def draws_python(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


@torch.compile(backend="eager")
def compiled_scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Python(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.uniform(0, 1))


class Numpy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * float(np.random.rand()))


class Compiled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(compiled_scale(x))


class Kernels(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class Seeds(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.seeded(x)

    def seeded(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Python, "Python.forward draws random numbers"),
        (Numpy, "Numpy.forward draws random numbers"),
        (Compiled, "Compiled.forward calls compiled_scale, which is compiled"),
        (Kernels, "Kernels.forward chooses attention kernels"),
        (Seeds, "Seeds.seeded seeds torch's random numbers"),
    ],
)
def test_a_model_that_would_disturb_the_training_is_refused_beforehand(kind: type[Net], why: str) -> None:
    model = kind()
    states = torch.get_rng_state(), random.getstate()
    assert why in (needs_training_thread(model, (X,)) or "")
    with pytest.raises(NeedsTrainingThread, match=why):
        counted_elsewhere(model, (X,))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert count_flops(model, (X,)).forward == 2 * ONE  # on this thread it counts


def test_code_that_is_compiled_as_an_attribute_is_taken_as_it_was_written() -> None:
    runs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        runs.append(1)
        return graph.forward

    model = Net(torch.compile(lambda x: x.sin(), backend=backend))
    assert counted_elsewhere(model, (X,)) == count_flops(model, (X,))
    assert not runs
    model(X)
    assert len(runs) == 1


class Helped(Net):
    """Draws in a helper function, if at all."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(draws_python(x) if self.draws else x)


def test_a_helper_function_that_draws_is_refused_only_when_it_is_called() -> None:
    state = random.getstate()
    assert needs_training_thread(Helped(True), (X,)) is None
    assert counted_elsewhere(Helped(False), (X,)) == count_flops(Helped(False), (X,))
    with pytest.raises(NeedsTrainingThread, match=r"Helped\.forward calls draws_python, which draws random"):
        counted_elsewhere(Helped(True), (X,))
    assert random.getstate() == state


def test_kernels_chosen_in_a_helper_are_refused_and_stay_as_they_are() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
            return x

    before = torch.nn.attention._cur_sdpa_kernel_backends()
    with pytest.raises(NeedsTrainingThread, match="chooses attention kernels"):
        counted_elsewhere(Net(choose), (X,))
    assert torch.nn.attention._cur_sdpa_kernel_backends() == before


@pytest.mark.parametrize("backward", [True, False])
def test_flex_attention_is_refused(backward: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.reshape(1, 1, 4, 8).expand(1, 1, 4, 8)
        return flex_attention(q, q, q).reshape(4, 8)

    # Newer versions of torch refuse to differentiate flex attention on a CPU before we can refuse it.
    why = "real tensors|calls the compiler" if backward else "calls the compiler"
    with pytest.raises(NeedsTrainingThread, match=why):
        counted_elsewhere(Net(attend), (X,), backward=backward)


def test_jagged_batches_are_refused() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(2, 8)], layout=torch.jagged)
    assert "jagged" in (needs_training_thread(nn.Linear(8, 8), (jagged,)) or "")
    assert "jagged" in (needs_training_thread(nn.Linear(8, 8), {"x": jagged}) or "")
    assert needs_training_thread(nn.Linear(8, 8), X) is None


def test_recurrent_layers_on_the_cpu_are_counted() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cells(x)[0]

    assert counted_elsewhere(Recurrent(), (X[None],)) == count_flops(Recurrent(), (X[None],))


OUTSIDE = nn.Linear(8, 8)
LEAF = torch.ones(8, requires_grad=True)


REACH: list[Callable[[torch.Tensor], torch.Tensor]] = []


class Reaches(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(REACH[0](x))


@pytest.mark.parametrize(
    "reach",
    [OUTSIDE.forward, lambda x: OUTSIDE(x), lambda x: x * LEAF, lambda x: torch.cat([x, LEAF[None]])[:4]],
    ids=["a method", "a module", "a leaf", "in a list"],
)
def test_a_gradient_outside_the_model_never_changes(reach: Callable[[torch.Tensor], torch.Tensor]) -> None:
    REACH[:] = [reach]
    with pytest.raises(NeedsTrainingThread, match="a parameter outside the model takes part"):
        counted_elsewhere(Reaches(), (X,))
    assert OUTSIDE.weight.grad is None
    assert LEAF.grad is None
    count_flops(Reaches(), (X,))
    assert OUTSIDE.weight.grad is None
    assert LEAF.grad is None


def test_a_model_that_needs_real_tensors_needs_the_training_thread() -> None:
    def needs_memory(x: torch.Tensor) -> torch.Tensor:
        assert x.data_ptr()
        return x

    model = Net(needs_memory)
    with pytest.raises(NeedsTrainingThread, match="Net has to be run on real tensors"):
        counted_elsewhere(model, (X,))
    assert count_flops(model, (X,)).method == "count on real CPU copies"
    with pytest.raises(BatchError, match="reads a tensor's memory"):  # nowhere can it be counted
        counted_elsewhere(Net(needs_memory).to("meta"), (X,))


def test_hooks_on_all_modules_need_the_training_thread() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(NeedsTrainingThread, match="hooks on all modules"):
            counted_elsewhere(Net(), (X,))
    finally:
        handle.remove()
    assert counted_elsewhere(Net(), (X,)).forward == 2 * ONE


def test_a_step_that_is_executed_needs_the_training_thread() -> None:
    with pytest.raises(NeedsTrainingThread, match="count_step runs a step for real"):
        elsewhere(lambda: count_step(lambda: None))


# Copies to the host


def test_a_host_copy_of_a_cpu_tensor_is_a_copy_and_there_at_once() -> None:
    source = torch.arange(6).reshape(2, 3)
    copy = start_host_copy(source)
    source.zero_()
    assert copy.ready()
    assert copy.get().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert place_of(copy.get()) == torch.device("cpu")
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
    assert place_of(values) == cuda


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
    assert elsewhere(lambda: count_flops(taken, copies)) == here
    assert elsewhere(lambda: count_flops(taken, there)) == here
    torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == memory


@pytest.mark.gpu
def test_a_recurrent_layer_on_cuda_needs_the_training_thread(cuda: torch.device) -> None:
    model = nn.LSTM(8, 8).to(cuda)
    assert "cuDNN" in (needs_training_thread(model, (X[None].to(cuda),)) or "")
    assert torch.backends.cudnn.enabled
