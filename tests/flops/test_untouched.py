"""Counting changes nothing: not the model, not what hangs on it, not the process it runs in.

Every test takes a picture before and after `count_flops` and `FlopModel.fit`, also where they fail half-way.
"""

from __future__ import annotations

import abc
import collections
import copy
import functools
import gc
import logging
import random
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations, prune

from truemfu import FlopModel, count_flops, count_step, errors
from truemfu.errors import ModelError, TruemfuError, TruemfuWarning

T = TypeVar("T")
X = torch.linspace(-1, 1, 32).reshape(4, 8)
FORWARD = 2 * 4 * (8 * 8 + 8 * 4)
"""Forward FLOPs of a `Net` on `X`."""

COUNTS: dict[str, Callable[..., Any]] = {"count_flops": count_flops, "FlopModel.fit": FlopModel.fit}
both = pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.bn(self.a(x))))


# -- pictures --


def _tensor(t: torch.Tensor | None) -> Any:
    if t is None:
        return None
    assert not isinstance(t, FakeTensor), "a fake tensor in the model"
    return id(t), type(t), t.requires_grad, t._version, t.detach().cpu().numpy().tobytes(), str(t.device)


def _of_model(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that training could notice."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found[f"parameter {name}"] = (_tensor(p), _tensor(p.grad), dict(p._backward_hooks or {}))
    for name, b in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name}"] = _tensor(b)
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"module {path}"] = (id(module), type(module), module.training, sorted(module.__dict__))
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                found[f"attribute {path}.{name}"] = (_tensor(value), _tensor(value.grad))
            elif name.endswith("_hooks") and isinstance(value, dict):
                found[f"hooks {path}.{name}"] = (id(value), [(k, id(v)) for k, v in value.items()])
            elif not name.startswith("_"):
                found[f"attribute {path}.{name}"] = (id(value), repr(value) if _is_plain(value) else None)
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, list, dict, set, tuple, collections.deque))


def _of_process() -> dict[str, Any]:
    """Everything of the process that training could notice."""
    devices = ("cpu", "cuda")
    return {
        "torch random state": torch.get_rng_state().numpy().tobytes(),
        "python random state": random.getstate(),
        "numpy random state": repr(np.random.get_state()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "default dtype and device": (torch.get_default_dtype(), torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "stance": torch._dynamo.eval_frame._stance.stance,
        "global hooks": [
            len(getattr(nn.modules.module, name))
            for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
        ],
    }


@pytest.fixture(autouse=True)
def _only_new_objects() -> None:
    """What lives before a test is none of its business, and walking through it takes a second."""
    gc.freeze()


def _alive(cls: type) -> int:
    """Tensors of this class alive anywhere in the process."""
    found = -1
    while True:  # cycles through a tensor take more than one collection
        gc.collect()
        before, found = found, sum(isinstance(o, cls) for o in gc.get_objects())
        if found == before:
            return found


def _assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    assert not changed, f"changed: {', '.join(changed)}"


class untouched:
    """`with untouched(model):` asserts that nothing has changed at the end, whatever happened inside."""

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

    def _picture(self) -> dict[str, Any]:
        found = _of_process()
        for index, model in enumerate(self.models):
            found.update({f"{index} {key}": value for key, value in _of_model(model).items()})
        return found

    def __enter__(self) -> None:
        self.fakes = _alive(FakeTensor)
        self.before = self._picture()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None or isinstance(error[1], AssertionError):
            _assert_same(self.before, self._picture())
            assert _alive(FakeTensor) <= self.fakes, "fake tensors are left somewhere"


@torch.library.custom_op("truemfu_tests::value_of", mutates_args=())
def _value_of(x: torch.Tensor) -> torch.Tensor:
    """An operator without a fake implementation: only real tensors can run it."""
    return x.sum()


# -- the model --


class Everything(Net):
    """Dropout, statistics, a power iteration, tied and frozen weights, old gradients, mixed modes."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.shared = self.a
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.normed = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.late = nn.BatchNorm1d(8).eval()
        self.conv = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2, momentum=None))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.plain = torch.zeros(8)
        self.plain_grad = torch.zeros(8, requires_grad=True)
        self.history: list[Any] = []
        self.seen: dict[str, Any] = {}
        self.calls = 0
        self.a.weight.grad = torch.full_like(self.a.weight, 3.0)
        self.frozen.weight.grad = torch.ones_like(self.frozen.weight)
        self.b.weight.add_marker = "mine"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x
        self.history.append(x)
        self.seen["x"] = x
        self.steps += 1
        self.hidden.add_(1)
        self.plain += 1
        self.plain = self.plain + 1
        self.train()
        random.random()
        np.random.rand()
        x = self.conv(x[:, None]).mean(1) + self.plain_grad + torch.rand(8)
        return super().forward(self.late(self.normed(self.frozen(self.shared(self.drop(x))))))


@both
def test_nothing_of_model_or_process_changes(count: Callable[..., Any]) -> None:
    model = Everything()
    with untouched(model):
        count(model, (X,))
    assert not hasattr(model, "last")


@both
def test_nothing_changes_when_only_the_forward_pass_is_counted(count: Callable[..., Any]) -> None:
    model = Everything()
    with untouched(model):
        count(model, (X,), backward=False)


def test_nothing_changes_when_real_copies_must_be_run() -> None:
    class NeedsValues(Everything):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + _value_of(x)

    model = NeedsValues()
    with untouched(model):
        assert count_flops(model, (X,)).method == "count on real CPU copies"


POINTERS: list[int] = []


def test_a_kernel_never_gets_a_null_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels bound by hand (pybind, ctypes, raw Triton) read a pointer: a null one ends the process."""

    class ByHand(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            POINTERS.append(out.data_ptr())
            return out

    POINTERS.clear()
    monkeypatch.setattr(errors, "_already_warned", set())
    with pytest.warns(TruemfuWarning, match="torch.Tensor.data_ptr"):
        count = count_flops(ByHand(), (X,))
    assert 0 not in POINTERS
    assert (count.method, count.forward) == ("count on real CPU copies", FORWARD)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way\nback")


class Failing(Everything):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        if self.where == "forward":
            raise ValueError("no way\nforward")
        if self.where == "interrupt":
            raise KeyboardInterrupt
        if self.where == "modes":  # fails while states are half changed
            torch.set_grad_enabled(False)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                self.a(x)
                raise ValueError("in autocast")
        return _RaisesInBackward.apply(out) if self.where == "backward" else out


def _raises(output: Any) -> torch.Tensor:
    torch.rand(3)
    raise KeyError("no loss")


@both
@pytest.mark.parametrize("where", ["forward", "backward", "loss", "no loss", "interrupt", "modes"])
def test_nothing_changes_when_a_count_fails_half_way(count: Callable[..., Any], where: str) -> None:
    model = Failing(where)
    loss_fn = {"loss": _raises, "no loss": lambda out: None}.get(where)
    with untouched(model):
        expected = KeyboardInterrupt if where == "interrupt" else TruemfuError
        with pytest.raises(expected):
            count(model, (X,), loss_fn=loss_fn)


def test_counts_leave_no_tensors_behind() -> None:
    model = Everything()
    count_flops(model, (X,))
    before = _alive(torch.Tensor)
    for _ in range(3):
        count_flops(model, (X,))
    assert _alive(torch.Tensor) <= before


@both
def test_the_batch_is_untouched(count: Callable[..., Any]) -> None:
    class Greedy(Net):
        def forward(self, x: torch.Tensor, extra: dict[str, Any], cache: Any) -> torch.Tensor:
            x.mul_(2)
            out = super().forward(x)
            extra.pop("one")
            extra["two"].append(x)
            cache.keys.append(out)
            cache.length += 1
            return out

    model, x = Greedy(), X.clone().requires_grad_()
    cache = types.SimpleNamespace(keys=[], length=0)
    batch = {"x": x, "extra": {"one": 1, "two": []}, "cache": cache}
    with untouched(model):
        count(model, {**batch, "x": x.detach()})
    assert (batch["extra"], cache.keys, cache.length) == ({"one": 1, "two": []}, [], 0)
    count(Net(), (x,))
    assert torch.equal(x, X)
    assert x.grad is None


def test_a_cache_of_keys_and_values_is_untouched() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=20))
    ids, cache = torch.arange(10).reshape(2, 5), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    before = [_tensor(t) for layer in cache.layers for t in (layer.keys, layer.values)]
    with untouched(model):
        count_flops(model, {"input_ids": ids, "labels": ids, "past_key_values": cache, "use_cache": True})
    assert cache.get_seq_length() == 5
    assert [_tensor(t) for layer in cache.layers for t in (layer.keys, layer.values)] == before


# -- hooks --


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.calls = 0
        self.inner = types.SimpleNamespace(calls=0)

    def __call__(self, *args: Any) -> None:
        self.seen.append(args)
        self.calls += 1
        self.inner.calls += 1

    def hook(self, *args: Any) -> None:
        self(*args)

    @property
    def trace(self) -> Any:
        return (len(self.seen), self.calls, self.inner.calls) if self.seen or self.inner.calls else None


class Slotted:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, *args: Any) -> None:
        self.seen.append(args)


class CountsFromZero:
    """Its counter is an attribute of the class until the first call."""

    calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1


def _from_zero() -> tuple[Any, Any]:
    recorder = CountsFromZero()
    return recorder, lambda: recorder.calls


def _closure_list() -> tuple[Any, Any]:
    seen: list[Any] = []
    return lambda *args: seen.append(args), lambda: seen


def _closure_dict() -> tuple[Any, Any]:
    seen: dict[str, Any] = collections.defaultdict(list)
    return lambda *args: seen["x"].append(args), lambda: seen


def _closure_set() -> tuple[Any, Any]:
    seen: set[int] = set()
    return lambda *args: seen.add(1), lambda: seen


def _closure_deque() -> tuple[Any, Any]:
    seen: collections.deque[Any] = collections.deque()
    return lambda *args: seen.append(args), lambda: seen


def _nonlocal() -> tuple[Any, Any]:
    calls = 0

    def hook(*args: Any) -> None:
        nonlocal calls
        calls += 1

    return hook, lambda: calls


def _default() -> tuple[Any, Any]:
    seen: list[Any] = []

    def hook(module: Any, args: Any, out: Any = None, seen: list[Any] = seen) -> None:
        seen.append(args)

    return hook, lambda: seen


def _keyword_default() -> tuple[Any, Any]:
    seen: list[Any] = []

    def hook(*args: Any, seen: list[Any] = seen) -> None:
        seen.append(args)

    return hook, lambda: seen


def _partial() -> tuple[Any, Any]:
    seen: list[Any] = []
    return functools.partial(lambda store, *args: store.append(args), seen), lambda: seen


def _object() -> tuple[Any, Any]:
    recorder = Recorder()
    return recorder, lambda: recorder.trace


def _method() -> tuple[Any, Any]:
    recorder = Recorder()
    return recorder.hook, lambda: recorder.trace


def _closure_object() -> tuple[Any, Any]:
    recorder = Recorder()
    return lambda *args: recorder(*args), lambda: recorder.trace


def _partial_method() -> tuple[Any, Any]:
    recorder = Recorder()
    return functools.partial(recorder.hook, "name"), lambda: recorder.trace


def _slotted() -> tuple[Any, Any]:
    recorder = Slotted()
    return recorder, lambda: recorder.seen


HOOKS = (
    _closure_list, _closure_dict, _closure_set, _closure_deque, _nonlocal, _default, _keyword_default,
    _partial, _object, _method, _closure_object, _partial_method, _slotted, _from_zero,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("make", HOOKS, ids=lambda f: f.__name__.strip("_"))
def test_a_hook_leaves_no_trace(make: Callable[[], tuple[Any, Any]], kind: str) -> None:
    model = Net()
    hook, trace = make()
    getattr(model.a, kind)(hook)
    with untouched(model):
        count_flops(model, (X,))
        assert not trace()
    model(X)
    assert trace()


def test_a_hook_that_is_a_method_of_the_model_leaves_no_trace() -> None:
    class Watching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: dict[str, Any] = {}
            self.a.register_forward_hook(self.keep)
            self.b.register_forward_pre_hook(functools.partial(self.keep_named, "b"))

        def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.outputs["a"] = out
            self.note = out

        def keep_named(self, name: str, module: nn.Module, args: Any) -> None:
            self.outputs[name] = args

    model = Watching()
    with untouched(model):
        count_flops(model, (X,))
    assert model.outputs == {}


def test_a_hook_that_writes_to_its_module_leaves_no_trace() -> None:
    def hook(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        module.out = out
        return out * 2

    model = Net()
    model.a.calls = 0  # type: ignore[assignment]
    model.a.register_forward_hook(hook)
    with untouched(model):
        count_flops(model, (X,))


def test_a_hook_that_does_matrix_work_is_counted() -> None:
    model = Net()
    model.a.register_forward_hook(lambda module, args, out: out @ module.weight)
    assert count_flops(model, (X,)).forward == FORWARD + 2 * 4 * 8 * 8


def test_gradient_hooks_do_not_fire() -> None:
    fired: list[str] = []
    model = Net()
    for p in model.parameters():
        p.register_hook(lambda g: fired.append("tensor"))
        p.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    model.a.register_full_backward_hook(lambda *_: fired.append("module"))
    model.a.register_full_backward_pre_hook(lambda *_: fired.append("before module"))
    with untouched(model):
        count_flops(model, (X,))
    assert fired == []
    model(X).sum().backward()
    assert set(fired) == {"tensor", "accumulated", "module", "before module"}


def test_state_dict_hooks_do_not_fire() -> None:
    fired: list[str] = []
    model = Net()
    model.register_state_dict_pre_hook(lambda *_: fired.append("before"))
    model._register_state_dict_hook(lambda *_: fired.append("after"))
    model.register_load_state_dict_post_hook(lambda *_: fired.append("loaded"))
    count_flops(model, (X,))
    assert fired == []


# -- states of the process --


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_stays_and_decides_the_dtype(cached: bool) -> None:
    model = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached), untouched(model):
        assert set(count_flops(model, (X,)).by_dtype) == {"bf16"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        count_flops(model, (X,))
        model(X).sum().backward()
    assert not isinstance(model.a.weight.grad, FakeTensor)


@both
@pytest.mark.parametrize(
    "state",
    [
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
        functools.partial(torch.device, "meta"),
        functools.partial(torch.autograd.set_detect_anomaly, True),
        functools.partial(torch.compiler.set_stance, "eager_on_recompile"),
    ],
    ids=["no_grad", "inference_mode", "enable_grad", "on meta", "anomaly", "stance"],
)
def test_a_count_works_inside_any_state_and_leaves_it(count: Callable[..., Any], state: Any) -> None:
    model = Net()
    with state(), untouched(model):
        counted = count(model, (X,))
    if count is count_flops:
        assert (counted.forward, counted.backward) == (FORWARD, 2 * FORWARD - 2 * 4 * 8 * 8)


def test_defaults_stay() -> None:
    model = Net().double()
    torch.set_default_dtype(torch.float64)
    try:
        with untouched(model):
            assert set(count_flops(model, (X.double(),)).by_dtype) == {"fp64"}
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_numbers_go_on_as_if_nothing_had_been_counted() -> None:
    def draw() -> tuple[Any, ...]:
        return torch.rand(2).tolist(), random.random(), np.random.rand(), F.dropout(torch.ones(9)).tolist()

    def seed() -> None:
        for one in (random.seed, np.random.seed, torch.manual_seed):
            one(5)

    model = Everything()
    seed()
    expected = draw()
    seed()
    count_flops(model, (X,))
    FlopModel.fit(model, (X,))
    assert draw() == expected


@pytest.mark.parametrize("values", [False, True], ids=["fake", "real"])
def test_generators_of_the_model_do_not_advance(values: bool) -> None:
    class Noisy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.torch = torch.Generator().manual_seed(1)
            self.python = random.Random(1)
            self.numpy = np.random.default_rng(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if values:
                _value_of(x)
            noise = torch.randn(x.shape, generator=self.torch) * self.python.random() * self.numpy.random()
            return super().forward(x + noise)

    model = Noisy()

    def states() -> tuple[Any, ...]:
        return (
            model.torch.get_state().tolist(),
            model.python.getstate(),
            repr(model.numpy.bit_generator.state),
        )

    before = states()
    with untouched(model):
        count_flops(model, (X,))
    for name, one, other in zip(("torch", "python", "numpy"), before, states(), strict=True):
        assert one == other, f"the {name} generator has advanced"


def test_count_step_leaves_the_process_as_it_was() -> None:
    model = Net()
    before = _of_process()
    count_step(lambda: model(X).sum().backward())
    with pytest.raises(ZeroDivisionError):
        count_step(lambda: model(X).sum() / (1 // 0))
    _assert_same(before, _of_process())


# -- compiled code --


class Backend:
    """A backend that counts what it compiles and how often that runs."""

    def __init__(self) -> None:
        self.compiled = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


class Step(nn.Module):
    """A module of the user's own, since dynamo leaves torch's alone when called from plain code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x)) * 2


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Step(), Step()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))

    def work(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def _whole(backend: Backend) -> nn.Module:
    return torch.compile(Steps(), backend=backend)  # type: ignore[return-value]


def _in_place(backend: Backend) -> nn.Module:
    model = Steps()
    model.compile(backend=backend)
    return model


def _submodule(backend: Backend) -> nn.Module:
    model = Steps()
    model.one = torch.compile(model.one, backend=backend)  # type: ignore[assignment]
    return model


def _submodule_in_place(backend: Backend) -> nn.Module:
    model = Steps()
    model.one.compile(backend=backend)
    return model


def _forward(backend: Backend) -> nn.Module:
    model = Steps()
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    return model


def _bound(backend: Backend) -> nn.Module:
    class Bound(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.run = torch.compile(self.work, backend=backend)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    return Bound()


def _function(backend: Backend) -> nn.Module:
    scale = torch.compile(lambda x: x * 2, backend=backend)

    class Function(Steps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scale(super().forward(x))

    return Function()


def _decorated(backend: Backend) -> nn.Module:
    class Decorated(Steps):
        @torch.compile(backend=backend)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    return Decorated()


@pytest.mark.parametrize(
    "make",
    [_whole, _in_place, _submodule, _submodule_in_place, _forward, _bound, _function, _decorated],
    ids=lambda f: f.__name__.strip("_"),
)
def test_compiled_code_stays_compiled_and_runs(make: Callable[[Backend], nn.Module]) -> None:
    torch._dynamo.reset()
    backend = Backend()
    model = make(backend)
    expected = model(X)
    model(X)
    assert (backend.compiled, backend.runs) == (1, 2)
    frames = dict(torch._dynamo.utils.counters["frames"])
    with untouched(model):
        count = count_flops(model, (X,))
        FlopModel.fit(model, (X,))
    with pytest.raises(ModelError):
        count_flops(model, (X,), loss_fn=_raises)
    count_step(lambda: model(X))
    assert (backend.compiled, backend.runs) == (1, 2), "counting compiled or ran compiled code"
    assert torch.equal(model(X), expected)
    assert (backend.compiled, backend.runs) == (1, 3), "compiled code is gone, or was compiled again"
    assert dict(torch._dynamo.utils.counters["frames"]) == frames
    assert (count.forward, count.backward) == (2 * 2 * 4 * 64, 3 * 2 * 4 * 64)


def test_a_model_counted_before_its_first_run_compiles_once() -> None:
    torch._dynamo.reset()
    backend = Backend()
    model = torch.compile(Steps(), backend=backend)
    count_flops(model, (X,))
    assert backend.compiled == 0
    model(X)
    model(X)
    assert (backend.compiled, backend.runs) == (1, 2)


# -- parametrised weights --


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        functools.partial(prune.l1_unstructured, name="weight", amount=0.3),
        functools.partial(prune.ln_structured, name="weight", amount=2, n=2, dim=0),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
    ],
    ids=["weight norm", "spectral norm", "pruned", "pruned rows", "old weight norm", "old spectral norm"],
)
def test_parametrised_weights_stay(wrap: Callable[[nn.Module], Any]) -> None:
    model = Net()
    wrap(model.a)
    with untouched(model):
        count_flops(model, (X,))
        FlopModel.fit(model, (X,))
    model(X).sum().backward()
    state = copy.deepcopy(model.state_dict())
    count_flops(model, (X,))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


# -- attributes nobody can copy, and ways to reach a module --


def test_attributes_that_cannot_be_copied_do_not_matter() -> None:
    class Holder(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.rlock = threading.Lock(), threading.RLock()
            self.file = tempfile.TemporaryFile()  # noqa: SIM115
            self.generator = (n for n in range(3))
            self.local = threading.local()
            self.thread = threading.current_thread()
            self.module, self.frames = np, types.SimpleNamespace(lock=threading.Lock())
            self.me = weakref.ref(self)
            self.device, self.dtype = torch.device("cpu"), torch.float32
            self.event = threading.Event()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.lock, self.rlock, self.frames.lock:
                return super().forward(x)

    model = Holder()
    with untouched(model):
        assert count_flops(model, (X,)).forward == FORWARD
    assert not model.lock.locked()
    assert list(model.generator) == [0, 1, 2]


@dataclass
class State:
    calls: int = 0
    kept: Any = None
    items: list[Any] = field(default_factory=list)


class OwnState:
    def __init__(self) -> None:
        self.calls = 0
        self.kept: Any = None
        self.items: list[Any] = []


class SlottedState:
    __slots__ = ("calls", "items", "kept")

    def __init__(self) -> None:
        self.calls, self.kept = 0, None
        self.items: list[Any] = []


class ClassState:
    """Everything is an attribute of the class until it is written."""

    calls = 0
    kept: Any = None

    @property
    def items(self) -> list[Any]:
        return []


class AbstractState(OwnState, abc.ABC):
    pass


class GenericState(OwnState, Generic[T]):
    pass


class MappingState(collections.UserDict[str, Any]):
    def __init__(self) -> None:
        super().__init__()
        OwnState.__init__(self)  # type: ignore[arg-type]


STATES = (
    State, OwnState, SlottedState, ClassState, AbstractState, GenericState, MappingState,
    types.SimpleNamespace,
)  # fmt: skip


@pytest.mark.parametrize("kind", STATES)
def test_objects_that_the_model_writes_to_stay(kind: Any) -> None:
    class Stateful(Net):
        def __init__(self) -> None:
            super().__init__()
            self.state = kind()
            if kind is types.SimpleNamespace:
                self.state = kind(calls=0, kept=None, items=[])
            self.states = [self.state]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state.calls += 1
            self.state.kept = self.a.weight * 2
            self.states[0].items.append(x)
            return super().forward(x)

    model = Stateful()
    with untouched(model):
        count_flops(model, (X,))
    assert (model.state.calls, model.state.kept, model.state.items) == (0, None, [])


def test_containers_that_the_model_writes_to_stay() -> None:
    class Collecting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.list: list[Any] = []
            self.dict: dict[str, Any] = {}
            self.set: set[int] = set()
            self.deque: collections.deque[Any] = collections.deque(maxlen=2)
            self.counter: collections.Counter[str] = collections.Counter()
            self.default: Any = collections.defaultdict(list)
            self.ordered: Any = collections.OrderedDict()
            self.bytes = bytearray()
            self.nested: Any = {"a": [{}]}
            self.array = np.zeros(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for append in (self.list.append, self.deque.append, self.default["k"].append):
                append(x)
            self.dict["k"] = self.ordered["k"] = self.nested["a"][0]["k"] = x
            self.set.add(1)
            self.counter["k"] += 1
            self.bytes.append(1)
            self.array[0] += 1
            return super().forward(x)

    model = Collecting()
    with untouched(model):
        count_flops(model, (X,))
    names = ("list", "dict", "set", "deque", "counter", "default", "ordered", "bytes")
    assert {name: len(getattr(model, name)) for name in names} == dict.fromkeys(names, 0)
    assert model.nested == {"a": [{}]}
    assert model.array.tolist() == [0, 0]


def _in_containers() -> nn.Module:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.list, self.tuple, self.dict = [self.a], (self.bn,), {"b": [self.b]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dict["b"][0](F.relu(self.tuple[0](self.list[0](x))))

    return Listed()


def _in_closures() -> nn.Module:
    class Closing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = lambda x: self.a(x)
            self.second = functools.partial(lambda module, x: module(x), self.bn)
            self.third = self.last

        def last(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(F.relu(self.second(self.first(x))))

    return Closing()


def _in_defaults() -> nn.Module:
    class Defaulting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = lambda x, a=self.a: a(x)

            def second(x: torch.Tensor, *, bn: nn.Module = self.bn) -> torch.Tensor:
                return bn(x)  # type: ignore[no-any-return]

            self.second = second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.second(self.first(x))))

    return Defaulting()


def _unregistered() -> nn.Module:
    class Unregistered(Net):
        def __init__(self) -> None:
            super().__init__()
            a = self.a
            del self.a
            object.__setattr__(self, "a", a)

    return Unregistered()


def _in_an_object() -> nn.Module:
    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.holder = types.SimpleNamespace(a=self.a, parts=[self.bn])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.holder.parts[0](self.holder.a(x))))

    return Holding()


def _only_in_an_object() -> nn.Module:
    class Hiding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.holder = types.SimpleNamespace(a=self.a, bn=self.bn)
            del self.a, self.bn

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.holder.bn(self.holder.a(x))))

    return Hiding()


def _by_weak_reference() -> nn.Module:
    class Weak(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weak = weakref.ref(self.a)
            object.__setattr__(self, "proxy", weakref.proxy(self.bn))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.weak()
            assert a is not None
            return self.b(F.relu(self.proxy(a(x))))

    return Weak()


def _by_parent() -> nn.Module:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = [parent]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parent[0].a(x)  # type: ignore[operator,no-any-return]

    class Parent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.bn(self.child(x))))

    return Parent()


def _patched_with_method() -> nn.Module:
    model = Net()
    model.forward = types.MethodType(lambda self, x: Net.forward(self, x), model)  # type: ignore[method-assign]
    return model


def _patched_around() -> nn.Module:
    model = Net()
    original = model.forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return original(x)

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    return model


def _patched_by_closure() -> nn.Module:
    model = Net()
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]
    return model


def _patched_by_partial() -> nn.Module:
    model = Net()
    model.forward = functools.partial(lambda original, x: original(x), model.forward)  # type: ignore[method-assign]
    return model


def _patched_by_object() -> nn.Module:
    class Around:
        def __init__(self, original: Callable[..., Any]) -> None:
            self.original = original
            self.calls = 0

        def __call__(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return self.original(x)

    model = Net()
    model.forward = Around(model.forward)  # type: ignore[method-assign]
    return model


def _patched_child() -> nn.Module:
    model = Net()
    original = model.bn.forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return original(x)

    model.bn.forward = types.MethodType(forward, model.bn)  # type: ignore[method-assign]
    return model


def _made_with_arguments() -> nn.Module:
    class Made(Net):
        def __new__(cls, width: int) -> Any:
            return super().__new__(cls)

        def __init__(self, width: int) -> None:
            super().__init__()

    return Made(8)


def _with_slots() -> nn.Module:
    class Slots(Net):
        __slots__ = ("kept",)

        def __init__(self) -> None:
            super().__init__()
            self.kept = [self.a]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.bn(self.kept[0](x))))

    return Slots()


def _own_attribute_rules() -> nn.Module:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["parts"] = {"first": self.a}
            self.__dict__["sealed"] = True

        def __getattr__(self, name: str) -> Any:
            parts = self.__dict__.get("parts", {})
            return parts[name] if name in parts else super().__getattr__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if self.__dict__.get("sealed"):
                raise AttributeError("sealed")
            super().__setattr__(name, value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.bn(self.first(x))))

    return Own()


def _traced() -> nn.Module:
    return torch.fx.symbolic_trace(Net())


WAYS = (
    _in_containers, _in_closures, _in_defaults, _unregistered, _in_an_object, _only_in_an_object,
    _by_weak_reference, _by_parent, _patched_with_method, _patched_around, _patched_by_closure,
    _patched_by_partial, _patched_by_object, _patched_child, _made_with_arguments, _with_slots,
    _own_attribute_rules, _traced,
)  # fmt: skip


def _hidden_parts(model: nn.Module) -> list[nn.Module]:
    holder = getattr(model, "holder", None)
    return [m for m in vars(holder).values() if isinstance(m, nn.Module)] if holder is not None else []


@both
@pytest.mark.parametrize("make", WAYS, ids=lambda f: f.__name__.strip("_"))
def test_however_a_module_is_reached_its_copy_runs(
    make: Callable[[], nn.Module], count: Callable[..., Any]
) -> None:
    model = make()
    with untouched(model, *_hidden_parts(model)):
        counted = count(model, (X,))
    if count is count_flops:
        assert (counted.forward, counted.backward) == (FORWARD, 2 * FORWARD - 2 * 4 * 8 * 8)
    model(X).sum().backward()
    assert all(p.grad is not None and type(p.grad) is torch.Tensor for p in model.parameters())


@both
@pytest.mark.parametrize("how", ["closure", "module", "method", "partial", "default"])
def test_modules_of_the_loss_are_untouched_and_counted(how: str, count: Callable[..., Any]) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(x)
            return self.linear(self.bn(x)).sum()

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)  # type: ignore[no-any-return]

    model, head = Net(), Head()
    loss_fn: Any = {
        "closure": lambda out: head(out),
        "module": head,
        "method": head.loss,
        "partial": functools.partial(lambda module, out: module(out), head),
        "default": lambda out, module=head: module(out),
    }[how]
    with untouched(model, head):
        counted = count(model, (X,), loss_fn=loss_fn)
    assert head.seen == []
    if count is count_flops:
        assert counted.forward == FORWARD + 2 * 4 * 4 * 3


HEAD = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
"""A module at the top of a script, as losses often are."""


def _global_loss(output: torch.Tensor) -> torch.Tensor:
    return HEAD(output).sum()


@both
@pytest.mark.parametrize("where", ["loss", "closure of the loss", "hook", "forward"])
def test_modules_that_are_globals_are_untouched_and_counted(where: str, count: Callable[..., Any]) -> None:
    class Reaching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return HEAD(super().forward(x))

    model = Reaching() if where == "forward" else Net()
    options: dict[str, Any] = {}
    if where == "hook":
        model.b.register_forward_hook(lambda module, args, out: HEAD(out))
    elif where != "forward":
        options["loss_fn"] = _global_loss if where == "loss" else lambda out: _global_loss(out)
    before = copy.deepcopy(HEAD.state_dict())
    with untouched(model):
        counted = count(model, (X,), **options)
    assert all(torch.equal(value, before[name]) for name, value in HEAD.state_dict().items())
    assert all(parameter.grad is None for parameter in HEAD.parameters())
    if count is count_flops:
        assert counted.forward == FORWARD + 2 * 4 * 4 * 3


def test_a_cached_method_keeps_no_fake_tensor() -> None:
    class Cached(Net):
        @functools.lru_cache(maxsize=4)  # noqa: B019
        def table(self, n: int) -> torch.Tensor:
            return torch.arange(n, dtype=torch.float32)

        @functools.cached_property
        def bias(self) -> torch.Tensor:
            return torch.ones(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.table(8) + self.bias)

    model = Cached()
    count_flops(model, (X,))
    assert "bias" not in vars(model)
    assert type(model.table(8)) is torch.Tensor
    assert type(model(X)) is torch.Tensor
    Cached.table.cache_clear()


def test_a_lazily_made_attribute_is_made_by_the_first_real_run() -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(8.0)
                self.register_buffer("kept", self.table * 2)
            return super().forward(x + self.table)

    model = Lazy()
    with untouched(model):
        count_flops(model, (X,))
    assert model.table is None


def test_modules_used_twice_and_tied_weights_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.layer = nn.Linear(8, 8)
            self.again = self.layer
            self.head = nn.Linear(8, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(self.layer(self.embed(ids))))

    model = Tied()
    with untouched(model):
        count = count_flops(model, (torch.arange(6).reshape(2, 3),))
    assert model.head.weight is model.embed.weight
    forward = 2 * 6 * (64 + 64 + 72)
    assert (count.forward, count.backward) == (forward, 2 * forward)


def test_plain_enumerations_and_frozen_values_on_a_parameter_stay() -> None:
    """Quantised weights carry settings: classes, enumerations, frozen values."""
    import enum

    class Kind(enum.Enum):
        ONE = 1

        def double(self) -> int:
            return int(self.value) * 2

    @dataclass(frozen=True)
    class Setting:
        kind: Kind
        cls: type
        table: torch.Tensor

    model = Net()
    setting = Setting(Kind.ONE, State, torch.ones(2))
    model.a.weight.setting = setting  # type: ignore[attr-defined]
    model.a.weight.kind = Kind.ONE  # type: ignore[attr-defined]
    before = dict(vars(State)), dict(vars(Kind.ONE)), dict(vars(Kind))
    with untouched(model):
        assert count_flops(model, (X,)).forward == FORWARD
    assert (dict(vars(State)), dict(vars(Kind.ONE)), dict(vars(Kind))) == before
    assert model.a.weight.setting is setting


# -- on a GPU --


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield torch.device("cuda")
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_counting_takes_no_gpu_memory_and_leaves_its_random_state(cuda: torch.device) -> None:
    model, x = Everything().to(cuda), X.to(cuda)
    model.plain, model.plain_grad = model.plain.to(cuda), model.plain_grad.detach().to(cuda).requires_grad_()
    count_flops(model, (x,))  # torch puts one number on the device before its first fake tensor
    torch.cuda.synchronize()
    state, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    with untouched(model):
        torch.cuda.reset_peak_memory_stats()
        count_flops(model, (x,))
        FlopModel.fit(model, (x,))
        peak = torch.cuda.max_memory_allocated()  # before the model's state is compared on the device
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() == allocated
    assert peak == allocated


@pytest.mark.gpu
def test_counting_does_not_wait_for_the_gpu(cuda: torch.device) -> None:
    # Without batch norm: its counter is read, because values of integers may decide the work.
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(cuda), X.to(cuda)
    count_flops(model, (x,))
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    done.record()
    count_flops(model, (x,))
    assert not done.query(), "the count waited for the device"


class WithoutModuleName:
    """Its class has no module name, as that of some types written in C."""

    factor = 2


WithoutModuleName.__module__ = property(lambda self: "somewhere")  # type: ignore[assignment]
WITHOUT_MODULE_NAME = WithoutModuleName()


@both
def test_an_object_whose_class_has_no_module_name_is_no_obstacle(count: Callable[..., Any]) -> None:
    class Holding(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * WITHOUT_MODULE_NAME.factor

    assert not isinstance(WithoutModuleName.__module__, str)
    counted = count(Holding(), X)
    flops = counted(X) if isinstance(counted, FlopModel) else counted
    assert flops.forward == FORWARD


class Waiting(Net):
    """Its first count sets `entered`, and lasts until `leave` is set."""

    entered, leave = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not Waiting.entered.is_set():
            Waiting.entered.set()
            Waiting.leave.wait(60)
        return super().forward(x)


def test_counts_of_two_threads_leave_the_process_as_it_was() -> None:
    Waiting.entered.clear()
    Waiting.leave.clear()
    before = logging.getLogger("torch._subclasses.fake_tensor").disabled
    first = threading.Thread(target=count_flops, args=(Waiting(), (X,)))
    first.start()
    assert Waiting.entered.wait(60)
    second = threading.Thread(target=count_flops, args=(Net(), (X,)))
    second.start()
    second.join(0.3)  # it waits for the first one
    Waiting.leave.set()
    first.join()
    second.join()
    assert logging.getLogger("torch._subclasses.fake_tensor").disabled == before


def test_modules_of_another_thread_are_not_followed() -> None:
    """A module with a hook is in its forward pass when the count begins, and leaves it meanwhile."""
    inside, may_leave = threading.Event(), threading.Event()

    class Training(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            may_leave.wait(60)
            return x

    training = Training()
    training.register_forward_hook(lambda module, args, output: None)
    thread = threading.Thread(target=training, args=(X,))

    class Counted(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            may_leave.set()
            thread.join()
            return super().forward(x)

    thread.start()
    assert inside.wait(60)
    count = count_flops(Counted(), (X,))
    assert (count.method, count.notes, count.forward) == ("count on fake tensors", (), FORWARD)
