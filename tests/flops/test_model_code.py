"""The walk over a model's code finds every helper, stays out of torch, and sees shared random numbers."""

from __future__ import annotations

import functools
import math
import random
import sys
import time
import types
from collections.abc import Callable
from random import gauss
from random import random as draw
from typing import Any

import numpy as np
import pytest
import torch
from numpy import random as numpy_random
from numpy.random import rand
from tests.flops.identity_models import MODELS, llama
from torch import manual_seed as seed_all_of_torch
from torch import nn

from truemfu.flops.identity.model_code import functions_of, random_generators_used

helpers = types.ModuleType("own_walked_helpers")
exec("def by_attribute(x):\n    return deeper(x)\n\ndef deeper(x):\n    return x\n", vars(helpers))


def plain(x: Any) -> Any:
    return two_deep(x)


def two_deep(x: Any) -> Any:
    return x


def in_partial(x: Any, n: int) -> Any:
    return x


def in_attribute(x: Any) -> Any:
    return x


def in_list(x: Any) -> Any:
    return x


def in_hook(*_: Any) -> None:
    return None


def in_pre_hook(*_: Any) -> None:
    return None


def in_skipped_hook(*_: Any) -> None:
    return None


in_skipped_hook._truemfu_skip = True  # type: ignore[attr-defined]


def never_named(x: Any) -> Any:
    return x


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorated
def beneath(x: Any) -> Any:
    return x


@torch.no_grad()
def beneath_torch(x: Any) -> Any:
    return x


@functools.lru_cache
def remembered(n: int) -> int:
    return n


class Operation(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Tool:
    def __init__(self) -> None:
        self.n = 1

    def __call__(self, x: Any) -> Any:
        return self.work(x)

    def work(self, x: Any) -> Any:
        return x

    def unused_work(self, x: Any) -> Any:
        return x


class Held:
    def worked(self, x: Any) -> Any:
        return x


class Base(nn.Module):
    def inherited(self, x: Any) -> Any:
        return x


class Walked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.function = in_attribute
        self.part = functools.partial(in_partial, n=1)
        self.several = {"a": [in_list]}
        self.held = Held()
        self.child = nn.Sequential(nn.Linear(2, 2))
        self.child.forward = types.MethodType(own_forward, self.child)
        self.register_forward_hook(in_hook)
        self.register_forward_pre_hook(in_pre_hook)
        self.register_forward_pre_hook(in_skipped_hook)

    @property
    def shown(self) -> int:
        return 1

    @staticmethod
    def static(x: Any) -> Any:
        return x

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x

    def other(self, x: Any) -> Any:
        return plain(x)

    def save(self) -> None:
        never_named(1)

    def forward(self, x: Any) -> Any:
        x = self.other(helpers.by_attribute(beneath(beneath_torch(x))))
        x = self.inherited(self.of_class(self.static(x))) * self.shown * remembered(1) * math.pi
        x = Operation.apply(self.held.worked(Tool()(x)))
        return self.child(self.function(self.part(self.several["a"][0](x))))


def own_forward(self: Any, x: Any) -> Any:
    return x


FOUND = (
    "plain", "two_deep", "in_partial", "in_attribute", "in_list", "in_hook", "in_pre_hook", "beneath",
    "beneath_torch", "remembered", "own_forward", "by_attribute", "deeper", "Operation.forward",
    "Operation.backward", "Operation.setup_context", "Tool.__init__", "Tool.__call__", "Tool.work",
    "Held.worked", "Base.inherited", "Walked.forward", "Walked.other", "Walked.shown", "Walked.static",
    "Walked.of_class",
)  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_function_that_forward_can_run_is_found(name: str) -> None:
    assert name in {function.__qualname__ for function in functions_of(Walked())}


@pytest.mark.parametrize("name", ["never_named", "Walked.save", "Tool.unused_work", "in_skipped_hook"])
def test_a_function_that_no_step_runs_is_left_out(name: str) -> None:
    assert name not in {function.__qualname__ for function in functions_of(Walked())}


@pytest.mark.parametrize("name", MODELS)
def test_each_function_comes_once_and_none_is_torchs(name: str) -> None:
    functions = list(functions_of(MODELS[name]()))
    assert len(functions) == len({id(function) for function in functions}) > 0
    homes = {function.__globals__.get("__name__", "").partition(".")[0] for function in functions}
    assert not homes & {"torch", "numpy", "truemfu", "functools", "collections", "typing"}


def test_helpers_of_a_library_are_found() -> None:
    names = {function.__qualname__ for function in functions_of(llama())}
    assert {"apply_rotary_pos_emb", "eager_attention_forward", "sdpa_attention_forward"} <= names
    assert {"LlamaMLP.forward", "ForCausalLMLoss", "create_causal_mask"} <= names


def test_the_walk_takes_a_moment() -> None:
    model = llama()
    list(functions_of(model))
    began_s = time.process_time()
    list(functions_of(model))
    assert time.process_time() - began_s < 0.15


def test_a_recursive_function_ends_the_walk() -> None:
    class Recursive(nn.Module):
        def forward(self, x: Any) -> Any:
            return turn(x)

    assert {function.__qualname__ for function in functions_of(Recursive())} >= {"turn", "turn_back"}


def turn(x: Any) -> Any:
    return turn_back(x)


def turn_back(x: Any) -> Any:
    return turn(x)


def module(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    made = nn.Identity()
    vars(made).update(attributes)
    made.forward = types.MethodType(forward, made)
    return made


def by_module(self: Any, x: Any) -> Any:
    return x * random.random()


def by_function(self: Any, x: Any) -> Any:
    return x * draw()


def by_method(self: Any, x: Any) -> Any:
    return x * gauss(0, 1)


def by_helper(self: Any, x: Any) -> Any:
    return helper_that_draws(x)


def helper_that_draws(x: Any) -> Any:
    return x * random.random()


def by_import(self: Any, x: Any) -> Any:
    from random import random as other

    return x * other()


def by_attribute(self: Any, x: Any) -> Any:
    return x * self.draw()


def by_default(self: Any, x: Any, number: Callable[[], float] = random.random) -> Any:
    return x * number()


def by_numpy(self: Any, x: Any) -> Any:
    return x * np.random.rand()


def by_numpy_module(self: Any, x: Any) -> Any:
    return x * numpy_random.rand()


def by_numpy_function(self: Any, x: Any) -> Any:
    return x * rand()


def by_numpy_import(self: Any, x: Any) -> Any:
    import numpy.random as other

    return x * other.rand()


def by_seed(self: Any, x: Any) -> Any:
    torch.manual_seed(0)
    return x


def by_renamed_seed(self: Any, x: Any) -> Any:
    seed_all_of_torch(0)
    return x


def by_fork(self: Any, x: Any) -> Any:
    with torch.random.fork_rng():
        return x


def by_both(self: Any, x: Any) -> Any:
    torch.set_rng_state(torch.get_rng_state())
    return x * random.random()


def by_none(self: Any, x: Any) -> Any:
    return x * torch.rand(()) * math.pi * self.own.random()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (module(by_module), {"python"}),
        (module(by_function), {"python"}),
        (module(by_method), {"python"}),
        (module(by_helper), {"python"}),
        (module(by_import), {"python"}),
        (module(by_attribute, draw=random.random), {"python"}),
        (module(by_attribute, draw=functools.partial(random.uniform, 0, 1)), {"python"}),
        (module(by_attribute, draw=np.random.rand), {"numpy"}),
        (module(by_attribute, draw=random.Random(0).random), set()),
        (module(by_default), {"python"}),
        (module(by_numpy), {"numpy"}),
        (module(by_numpy_module), {"numpy"}),
        (module(by_numpy_function), {"numpy"}),
        (module(by_numpy_import), {"numpy"}),
        (module(by_seed), {"torch"}),
        (module(by_renamed_seed), {"torch"}),
        (module(by_fork), {"torch"}),
        (module(by_both), {"torch", "python"}),
        (module(by_none, own=random.Random(0)), set()),
        (nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2)), set()),
    ],
)
def test_shared_random_numbers_are_seen(model: nn.Module, expected: set[str]) -> None:
    assert random_generators_used(model) == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert", "t5", "hand-written"])
def test_ordinary_models_mention_none(name: str) -> None:
    assert random_generators_used(MODELS[name]()) == frozenset()


def test_more_code_than_is_read_could_mention_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truemfu.flops.identity.model_code.MAX_FUNCTIONS", 5)
    model = Walked()
    assert len(list(functions_of(model))) == 5
    assert random_generators_used(model) == {"python", "numpy", "torch"}


def test_nothing_is_imported_for_a_walk() -> None:
    def forward(self: Any, x: Any) -> Any:
        import own_module_that_does_not_exist

        return own_module_that_does_not_exist.run(x)

    before = set(sys.modules)
    assert [function.__name__ for function in functions_of(module(forward))] == ["forward"]
    assert set(sys.modules) == before
