"""An identity is the same in every process, and differs wherever the work of a step could."""

from __future__ import annotations

import array
import contextvars
import copy
import datetime
import decimal
import fractions
import functools
import itertools
import json
import logging
import operator
import os
import re
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flops import identity_models
from tests.flops.identity_models import HandWritten, gpt2, llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from truemfu import FlopModel, TrainingMonitor, count_flops, register_formula, register_module
from truemfu.flops.identity.identity import model_identity
from truemfu.flops.registry import MODULE_FORMULAS, OPERATOR_FORMULAS
from truemfu.flops.shadow.snapshot import snapshot

HELPERS = """
import torch

def inner(x):
    return x @ torch.ones(8, 8)

def outer(x):
    return inner(x) * 2

def late(x):
    return x - 1

def frozen(n):
    return torch.nn.Linear(n, n).requires_grad_(False)
"""

SOURCE = """
import functools
import torch
from torch import nn
import own_helpers
from own_helpers import outer

TIMES = 2
TABLE = {"wide": 8, "kinds": ["a", "b"]}
SKIPPED = {"x", "y"}

def close_over(n, function):
    def scaled(x):
        for _ in range(n):
            x = function(x) @ torch.ones(8, 8)
        return x
    return scaled

def repeated(n):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, x):
            for _ in range(n):
                x = function(self, x)
            return x
        return wrapper
    return decorate

def product(x, n=2):
    for _ in range(n):
        x = x @ torch.ones(8, 8)
    return x

class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ torch.ones(8, 8)

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.ones(8, 8)

class Tool:
    def __init__(self, n):
        self.n = n

    def __call__(self, x):
        return self.run(x)

    def run(self, x):
        return x.repeat(2, 1) @ torch.ones(8, 8)

class Choices:
    class inner:
        steps = 1

class Model(nn.Module):
    rounds = 1
    mode = "plain"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.act = lambda x: x @ torch.ones(8, 3)
        self.closed = close_over(2, torch.relu)
        self.part = functools.partial(product, n=3)
        self.tool = Tool(1)
        self.drop = nn.Dropout(0.1)

    @property
    def first(self):
        return self.layer(torch.ones(3, 8))

    @staticmethod
    def fixed(x):
        return x @ torch.ones(8, 5)

    def forward_plain(self, x):
        return x @ torch.ones(8, 2)

    @repeated(1)
    def body(self, x):
        return outer(x)

    def forward(self, x):
        for _ in range(TIMES * self.rounds):
            x = self.layer(x)
        x = self.frozen(self.body(x))
        x = self.part(self.closed(product(x)))
        x = self.drop(Squared.apply(x))
        if "y" in SKIPPED and TABLE["wide"] == 8:
            x = own_helpers.late(x)
        self.fixed(x), self.first, self.act(x)
        getattr(self, f"forward_{self.mode}")(x)
        for _ in range(Choices.inner.steps):
            x = x @ torch.ones(8, 8)
        made = Tool(2)
        return made(self.tool(x)).sum()
"""


@pytest.fixture
def build() -> Iterator[Callable[..., nn.Module]]:
    """Makes the model of the sources above, with texts in them replaced."""

    def make(*changes: tuple[str, str], helper: tuple[str, str] | None = None) -> nn.Module:
        texts = {"own_helpers": HELPERS, "own_model": SOURCE}
        if helper is not None:
            assert helper[0] in HELPERS
            texts["own_helpers"] = HELPERS.replace(*helper)
        for old, new in changes:
            assert old in texts["own_model"], old
            texts["own_model"] = texts["own_model"].replace(old, new)
        for name, text in texts.items():
            module = types.ModuleType(name)
            sys.modules[name] = module
            exec(compile(text, f"{name}.py", "exec"), vars(module))
        model = sys.modules["own_model"].Model()
        assert isinstance(model, nn.Module)
        return model

    yield make
    for name in ("own_helpers", "own_model"):
        sys.modules.pop(name, None)


@pytest.fixture
def registries() -> Iterator[None]:
    operators, modules = dict(OPERATOR_FORMULAS), dict(MODULE_FORMULAS)
    yield
    for registry, before in ((OPERATOR_FORMULAS, operators), (MODULE_FORMULAS, modules)):
        registry.clear()
        registry.update(before)


def identity(model: nn.Module) -> str:
    found = model_identity(model)
    assert found is not None
    assert len(found) == 64
    return found


def test_all_models_have_the_same_identity_in_every_process() -> None:
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.flops.identity_models"],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (json.loads(process.communicate()[0].splitlines()[-1]) for process in processes)
    assert first == second
    assert all(first.values())
    assert first.keys() == identity_models.MODELS.keys()
    assert len(set(first.values())) == len(first)


@pytest.mark.parametrize("name", ["llama", "mixtral", "lora"])
def test_a_step_a_count_and_a_copy_leave_the_identity_as_it_was(name: str) -> None:
    model = identity_models.MODELS[name]()
    before = identity(model)
    ids = torch.ones(2, 8, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    with warnings.catch_warnings():
        if name == "mixtral" and not hasattr(sys.modules[type(model).__module__], "MixtralExperts"):
            # before transformers 5 each expert is a module, whose rows follow no closed form
            warnings.filterwarnings("ignore", "MixtralForCausalLM has no closed form")
        FlopModel.fit(model, {"input_ids": ids, "labels": ids})
    assert identity(model) == before
    assert identity(copy.deepcopy(model)) == before


def test_a_model_loaded_from_its_checkpoint_is_the_same(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    loaded.train()
    assert identity(loaded) == identity(model)


def test_wrappers_are_taken_off() -> None:
    model = HandWritten()
    wrapped = nn.Sequential(model)
    assert identity(nn.DataParallel(model)) == identity(model)
    assert identity(torch.compile(model)) == identity(model)  # type: ignore[arg-type]
    assert identity(wrapped) != identity(model)


def test_two_of_one_kind_are_the_same_and_lines_do_not_matter(build: Callable[..., nn.Module]) -> None:
    same = identity(build())
    assert identity(build()) == same
    assert identity(build(("import functools\n", "import functools\n\n\n# moved down\n"))) == same


# What changes the FLOPs of a step, in every place that code and settings can be in.
WORK = {
    "a constant of forward": ("SOURCE", "torch.ones(3, 8)", "torch.ones(4, 8)"),
    "a global number": ("SOURCE", "TIMES = 2", "TIMES = 3"),
    "a number of the class": ("SOURCE", "rounds = 1", "rounds = 2"),
    "a helper": ("SOURCE", "def product(x, n=2):", "def product(x, n=2):\n    x = x @ torch.ones(8, 8)"),
    "a default argument": ("SOURCE", "def product(x, n=2)", "def product(x, n=4)"),
    "a number in a closure": ("SOURCE", "close_over(2,", "close_over(3,"),
    "a body in a closure": ("SOURCE", "function(x) @ torch.ones(8, 8)", "function(x)"),
    "a decorator's number": ("SOURCE", "@repeated(1)", "@repeated(2)"),
    "a lambda": ("SOURCE", "torch.ones(8, 3)", "torch.ones(8, 4)"),
    "a partial's argument": ("SOURCE", "product, n=3", "product, n=4"),
    "a static method": ("SOURCE", "torch.ones(8, 5)", "torch.ones(8, 6)"),
    "a function's own backward": ("SOURCE", "return grad @ torch.ones(8, 8)", "return grad"),
    "a method of an object": ("SOURCE", "x.repeat(2, 1)", "x.repeat(3, 1)"),
    "a helper two levels deep": ("HELPERS", "return x @ torch.ones(8, 8)", "return x"),
    "a frozen parameter": ("SOURCE", "frozen = nn.Linear(8, 8)", "frozen = own_helpers.frozen(8)"),
    "a method put together by name": ("SOURCE", "torch.ones(8, 2)", "torch.ones(8, 7)"),
    "a variable of a class": ("SOURCE", "steps = 1", "steps = 2"),
    "a helper without gradients": ("SOURCE", "    @repeated(1)", "    @torch.no_grad()"),
    "a helper's name": ("SOURCE", "import outer", "import late as outer"),
}  # fmt: skip

# What leaves the FLOPs alone here but need not elsewhere.
OTHER = {
    "a global table": ("SOURCE", '"wide": 8', '"wide": 9'),
    "a global set": ("SOURCE", '{"x", "y"}', '{"x", "y", "z"}'),
    "a list in a table": ("SOURCE", '["a", "b"]', '["a", "c"]'),
    "a helper by its module": ("HELPERS", "x - 1", "x - 2"),
    "the constructor of an object": ("SOURCE", "self.n = n", "self.n = n + 1"),
    "an attribute of an object": ("SOURCE", "Tool(1)", "Tool(7)"),
    "a rate of dropout": ("SOURCE", "nn.Dropout(0.1)", "nn.Dropout(0.2)"),
    "a function closed over": ("SOURCE", "torch.relu", "torch.tanh"),
}


def changed(build: Callable[..., nn.Module], change: tuple[str, str, str]) -> nn.Module:
    where, old, new = change
    return build(helper=(old, new)) if where == "HELPERS" else build((old, new))


@pytest.mark.parametrize("change", {**WORK, **OTHER}.values(), ids={**WORK, **OTHER}.keys())
def test_changed_code_is_another_model(change: tuple[str, str, str], build: Callable[..., nn.Module]) -> None:
    assert identity(changed(build, change)) != identity(build())


def test_where_the_work_differs_the_identity_does(build: Callable[..., nn.Module]) -> None:
    batch = (torch.ones(4, 8, requires_grad=True),)
    found: dict[str, tuple[int, int]] = {}
    for change in (None, *WORK.values()):
        model = build() if change is None else changed(build, change)
        count = count_flops(model, batch)
        found.setdefault(identity(model), (count.forward, count.backward))
        assert found[identity(model)] == (count.forward, count.backward)
    work, *others = found.values()
    assert len(others) == len(WORK)
    assert work not in others  # each change above is one of the work


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def hooked(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: output)


def pre_hooked(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, args: None)


def overridden(model: nn.Module) -> None:
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "a frozen parameter": frozen,
    "evaluation": lambda model: model.eval(),
    "another dtype": lambda model: model.bfloat16(),
    "a number of the configuration": lambda model: setattr(model.config, "layer_norm_epsilon", 1e-3),
    "a nested number": lambda model: setattr(model.config, "extra", {"a": [1, {"b": 2}]}),
    "another attention": lambda model: setattr(model.config, "_attn_implementation", "eager"),
    "a rate of dropout": lambda model: setattr(model.transformer.drop, "p", 0.5),
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "a hook": hooked,
    "a hook before": pre_hooked,
    "a forward of its own": overridden,
    "an untied weight": untied,
    "a module more": lambda model: model.add_module("more", nn.Linear(2, 2)),
    "a buffer": lambda model: model.register_buffer("more", torch.zeros(3)),
    "a step counter": lambda model: setattr(model, "steps", 3),
    "another vocabulary": lambda model: model.resize_token_embeddings(160),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES.keys())
def test_a_changed_switch_is_another_model(switch: Callable[[Any], Any]) -> None:
    model = gpt2()
    before = identity(model)
    switch(model)
    assert identity(model) != before


def test_what_a_restart_changes_is_not_part_of_it() -> None:
    model = gpt2()
    before = identity(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.config._name_or_path = "out/checkpoint-500"

    def watch(module: nn.Module, args: Any) -> None:
        """Marked as one that only watches."""

    watch._truemfu_skip = True  # type: ignore[attr-defined]
    model.register_forward_pre_hook(watch)
    assert identity(model) == before


@pytest.mark.usefixtures("registries")
def test_registered_formulas_are_part_of_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seen = [identity(model)]
    for factor in (2, 3):

        @register_formula("mylib::product")
        def product(x: Any, *, out: Any, factor: int = factor) -> int:
            return factor * int(x.numel())

        seen.append(identity(model))
    register_formula("mylib::other")(OPERATOR_FORMULAS["aten::mm"])
    seen.append(identity(model))

    @register_module(nn.Bilinear)
    def bilinear(module: nn.Module, x: Any, y: Any) -> Any:
        return x @ y

    seen.append(identity(model))
    assert len(set(seen)) == 5


def test_a_monitored_model_is_the_same(tmp_path: Path) -> None:
    model = gpt2()
    before = identity(model)
    with TrainingMonitor(tmp_path, model=model) as monitor:
        ids = torch.ones(2, 8, dtype=torch.int64)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        monitor.log_step(1, 0, loss, 1.0, 0.1)
        assert identity(model) == before
    assert identity(model) == before


def test_how_parameters_are_split_is_part_of_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found = [identity(model)]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
            for _ in range(2):
                sharded = copy.deepcopy(model)
                fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
                found.append(identity(sharded))
    finally:
        torch.distributed.destroy_process_group()
    assert [found.index(one) for one in found] == [0, 1, 1, 3, 3]


def test_switches_of_torch_are_part_of_it() -> None:
    model = nn.Linear(4, 4)
    before = identity(model)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert identity(model) != before
    assert identity(model) == before


def test_a_function_put_into_torch_is_part_of_it(
    build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    before = identity(model)
    plain = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes: plain(*sizes))
    assert identity(model) != before


class ReadsTheEnvironment(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x if os.environ.get("OWN_MODE") else x


def test_variables_of_the_environment_that_a_forward_reads_are_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = identity(ReadsTheEnvironment())
    monkeypatch.setenv("OTHER_MODE", "1")
    assert identity(ReadsTheEnvironment()) == before
    monkeypatch.setenv("OWN_MODE", "1")
    assert identity(ReadsTheEnvironment()) != before


@pytest.mark.parametrize("name", ["model_type", "revision", "n_hash", "cache_sizes", "name_or_path"])
def test_names_that_libraries_use_for_labels_are_settings_of_other_models(name: str) -> None:
    model = HandWritten()
    setattr(model, name, 1)
    before = identity(model)
    setattr(model, name, 2)
    assert identity(model) != before


def test_what_belongs_to_the_step_can_be_given_too() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(out: torch.Tensor) -> torch.Tensor:
        return out.sum()

    def other_loss_fn(out: torch.Tensor) -> torch.Tensor:
        return (out @ out.T).sum()

    found = {model_identity(model), model_identity(model, loss_fn), model_identity(model, other_loss_fn)}
    assert len(found) == 3
    assert None not in found


class BuiltinForward(nn.Module):
    forward = torch.tanh


class OddAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steering = torch.jit.script(_plus_one)

    def forward(self, x: torch.Tensor) -> Any:
        return self.steering(x)


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def deep_attribute() -> nn.Module:
    model = nn.Linear(2, 2)
    chain: list[Any] = []
    for _ in range(100_000):
        chain = [chain]
    model.chain = chain
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(nn.Linear(4, 4)),
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))),
        lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)),
        BuiltinForward,
        OddAttribute,
        lambda: nn.LazyLinear(4),
        deep_attribute,
    ],
    ids=["scripted", "scripted inside", "traced", "builtin", "scripted function", "lazy", "too deep"],
)
def test_what_cannot_be_read_has_no_identity(make: Callable[[], nn.Module]) -> None:
    assert model_identity(make()) is None


def test_an_identity_takes_a_moment() -> None:
    model = llama(num_hidden_layers=32)
    model_identity(model)
    began_s = time.process_time()
    model_identity(model)
    assert time.process_time() - began_s < 0.5  # ten times what it takes


def test_a_method_bound_to_another_module_names_that_module() -> None:
    def make(index: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.borrowed = functools.partial(model[index].forward)
        return model

    assert identity(make(0)) == identity(make(0))
    assert identity(make(0)) != identity(make(1))


def masked(values: np.ndarray[Any, Any]) -> np.ma.MaskedArray[Any, Any]:
    return np.ma.masked_array(np.ones(2), values)


def closing_over(value: Any) -> Callable[[], Any]:
    return lambda: value


def with_default(value: Any) -> Callable[..., Any]:
    def default(x: Any = value) -> Any:
        return x

    return default


def context_variable(value: Any) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar("own_mode", default=value)


def set_variable(value: Any) -> contextvars.ContextVar[Any]:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("own_mode", default=0)
    variable.set(value)
    return variable


def counting_to(number: int) -> Iterator[int]:
    yield from range(number)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def dispatching(number: int) -> Any:
    def run(self: Any, x: Any) -> int:
        return number

    return functools.singledispatchmethod(run)


# What a module can hold, made of two numbers that differ.
HELD: dict[str, Callable[[int], Any]] = {
    "an array": lambda n: np.array([1, 1, n, 0]),
    "an array in a list": lambda n: [np.array([1, n])],
    "a masked array": lambda n: masked(np.array([False, bool(n)])),
    "a numpy scalar": lambda n: np.int64(n),
    "a numpy dtype": lambda n: np.dtype(("int32", "int64")[n]),
    "an array.array": lambda n: array.array("i", [1, n]),
    "a bytearray": lambda n: bytearray([1, n]),
    "a memoryview": lambda n: memoryview(bytes([1, n])),
    "a decimal": decimal.Decimal,
    "a fraction": lambda n: fractions.Fraction(n, 7),
    "a tensor": lambda n: torch.tensor([1, n]),
    "a tensor of bfloat16": lambda n: torch.tensor([1, n], dtype=torch.bfloat16),
    "a strided tensor": lambda n: torch.tensor([[1, n], [0, 0]]).t(),
    "a tensor of an object": lambda n: Holder(torch.tensor([1, n])),
    "a tensor in a closure": lambda n: closing_over(torch.tensor([1, n])),
    "a tensor as a default": lambda n: with_default(torch.tensor([1, n])),
    "an itemgetter": operator.itemgetter,
    "an itemgetter of a class": lambda n: operator.itemgetter(slice(n, 3)),
    "an attrgetter": lambda n: operator.attrgetter(f"field_{n}"),
    "a methodcaller": lambda n: operator.methodcaller("run", n),
    "a methodcaller with a keyword": lambda n: operator.methodcaller("run", times=n),
    "a partial": lambda n: functools.partial(operator.getitem, [n]),
    "a partial of an array": lambda n: functools.partial(np.add, np.array([n])),
    "a partial of a getter": lambda n: functools.partial(operator.itemgetter(n)),
    "a method of a dictionary": lambda n: {"times": n}.get,
    "a method of a list": lambda n: [1, n].__getitem__,
    "a method by type": dispatching,
    "a default of a context": context_variable,
    "a value of a context": set_variable,
    "a view of a dictionary": lambda n: types.MappingProxyType({"times": n}),
    "a slice of numbers": lambda n: slice(0, n),
    "a regular expression's flags": lambda n: re.compile("a", (re.IGNORECASE, re.MULTILINE)[n]),
    "a date": lambda n: datetime.date(2024, 1, 1 + n),
    "an annotation": lambda n: (list[int], list[str])[n],
}


def test_a_generator_that_a_module_holds_is_part_of_it() -> None:
    def holding(number: int) -> str:
        model = nn.Sequential(nn.Linear(2, 2))
        model.held = counting_to(number)
        return identity(model)  # a snapshot of such a model is not counted

    assert holding(0) == holding(0)
    assert holding(0) != holding(1)


@pytest.mark.parametrize("make", HELD.values(), ids=HELD.keys())
@pytest.mark.parametrize("taken", [lambda model: model, snapshot], ids=["itself", "snapshot"])
def test_values_that_a_module_holds_are_part_of_it(
    make: Callable[[int], Any], taken: Callable[[nn.Module], nn.Module]
) -> None:
    def holding(number: int) -> str:
        model = nn.Sequential(nn.Linear(2, 2))
        model.held = make(number)
        return identity(taken(model))

    assert holding(0) == holding(0)
    assert holding(0) != holding(1)


@pytest.mark.parametrize("old", ["torch.tensor([2])", "numpy.array([2])", "operator.itemgetter(0)"])
def test_values_that_code_names_are_part_of_it(old: str, build: Callable[..., nn.Module]) -> None:
    def naming(value: str) -> str:
        text = f"import numpy, operator\nGLOBAL = {value}\nTIMES = 2"
        return identity(build(("TIMES = 2", text), ("range(TIMES *", "range((GLOBAL is not None) *")))

    assert naming(old) == naming(old)
    assert naming(old) != naming(old.replace("2", "3").replace("0", "1"))


UNREAD: dict[str, Callable[[], Any]] = {
    "a large array": lambda: np.zeros(1 << 18),
    "an array of objects": lambda: np.array([object(), None]),
    "a large tensor": lambda: torch.zeros(1 << 16),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a storage": lambda: torch.zeros(3).untyped_storage(),
    "values of a thread": threading.local,
    "a counter": lambda: itertools.count(3),
    "an iterator": lambda: iter([1, 2]),
    "a method of an iterator": lambda: iter([1, 2]).__next__,
    "a library's object": lambda: np.nditer(np.zeros(3)),
}


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD.keys())
def test_an_object_that_is_not_read_leaves_no_identity(make: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.held = make()
    assert model_identity(model) is None


def test_a_generator_that_has_begun_leaves_no_identity() -> None:
    model = nn.Linear(2, 2)
    model.numbers = counting_to(3)
    assert model_identity(model) is not None
    next(model.numbers)
    assert model_identity(model) is None


HARMLESS: dict[str, Callable[[], Any]] = {
    "a lock": threading.RLock,
    "a thread": lambda: threading.Thread(target=print),
    "a logger": lambda: logging.getLogger("own"),
    "a weak dictionary": weakref.WeakKeyDictionary,
    "a generator of torch": torch.Generator,
    "a generator of numpy": np.random.default_rng,
    "a sentinel": object,
    "a function of numpy": lambda: np.add,
    "an operator": lambda: torch.ops.aten.mm,
    "a tensor on meta": lambda: torch.zeros(1 << 20, device="meta"),
    "a weight": lambda: torch.randn(3, requires_grad=True),
    "a parameter": lambda: [nn.Parameter(torch.randn(1 << 16), requires_grad=False)],
    "an optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
}


@pytest.mark.parametrize("make", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_steers_no_forward_is_known_by_its_type(make: Callable[[], Any]) -> None:
    def holding() -> tuple[str, str]:
        model = nn.Sequential(nn.Linear(2, 2))
        model.held = make()
        return identity(model), identity(snapshot(model))

    assert holding() == holding()


def test_values_of_a_buffer_are_not_part_of_it_wherever_it_is_held() -> None:
    def holding(value: float) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].register_buffer("table", torch.full((3,), value))
        model[0].borrowed = model[1].table
        return identity(model)

    assert holding(1.0) == holding(2.0)


def test_a_method_that_only_a_methodcaller_names_is_part_of_it(build: Callable[..., nn.Module]) -> None:
    def calling(width: int) -> str:
        method = f"    def odd_name(self, x):\n        return x @ torch.ones(8, {width})\n\n"
        getter = 'operator.methodcaller("odd_name", 1)'
        return identity(
            build(
                ("import functools\n", "import functools, operator\n"),
                ("class Tool:\n", "class Tool:\n" + method),
                ("self.tool = Tool(1)", f"self.tool = Tool(1)\n        self.call = {getter}"),
            )
        )

    assert calling(8) == calling(8)
    assert calling(8) != calling(9)


def test_precision_and_determinism_are_part_of_it() -> None:
    model = nn.Linear(4, 4)
    found = [identity(model)]
    precision, is_cudnn_tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("medium")
        found.append(identity(model))
        torch.use_deterministic_algorithms(True)
        found.append(identity(model))
        torch.backends.cudnn.allow_tf32 = not is_cudnn_tf32
        found.append(identity(model))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.allow_tf32 = is_cudnn_tf32
    assert len(set(found)) == 4
    assert identity(model) == found[0]
