"""Globals, caches and class attributes that a model's code shares with training are as without a count."""

from __future__ import annotations

import array
import collections
import functools
import gc
import itertools
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from truemfu import FlopModel, count_flops
from truemfu.errors import ModelError

X = torch.linspace(-1, 1, 32).reshape(4, 8)
COUNTS: dict[str, Callable[..., Any]] = {"count_flops": count_flops, "FlopModel.fit": FlopModel.fit}
both = pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)


@pytest.fixture(autouse=True)
def _threads_of_other_tests_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of tests may have threads of libraries; where any runs, plain values are left as they are."""
    before = set(threading.enumerate())
    monkeypatch.setattr(
        "truemfu.flops.isolation.shared_state.is_alone", lambda: set(threading.enumerate()) <= before
    )


CACHE: dict[int, torch.Tensor] = {}
BY_KIND: dict[str, dict[int, torch.Tensor]] = {"causal": {}}
ORDERED: collections.OrderedDict[int, torch.Tensor] = collections.OrderedDict()
GROUPS: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
AUX: list[torch.Tensor] = []
RECENT: collections.deque[float] = collections.deque([1.0, 2.0], maxlen=2)
SEEN: set[int] = set()
CALLS = 0
BIAS: torch.Tensor | None = None
HOOKED: list[Callable[..., Any]] = []


class Totals:
    calls = 0

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[torch.Tensor] = []


TOTALS = Totals()


@functools.lru_cache(None)
def mask(size: int) -> torch.Tensor:
    return torch.tril(torch.ones(size, size))


@functools.lru_cache(maxsize=2)
def scale(size: int) -> float:
    return size**-0.5


def remembered(f: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    known: dict[int, torch.Tensor] = {}
    calls = 0

    def wrapped(size: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if size not in known:
            known[size] = f(size) * calls
        return known[size]

    return wrapped


@remembered
def ramp(size: int) -> torch.Tensor:
    return torch.arange(size) / size


def with_default(size: int, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    if size not in known:
        known[size] = torch.ones(size)
    return known[size]


class Net(nn.Module):
    """Its `use` is what each test is about."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.a(x))

    def use(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LruCache(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        return x @ mask(8) * scale(8)


class GlobalDict(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if size not in CACHE:
            CACHE[size] = torch.ones(size)
        ORDERED.setdefault(size, torch.ones(size))
        GROUPS["sizes"].append(size)
        return x * CACHE[size] * ORDERED[size] * len(GROUPS["sizes"])


class NestedDict(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        known = BY_KIND["causal"]
        if len(x) not in known:
            known[len(x)] = torch.ones(8)
        return x * known[len(x)]


class AuxiliaryLosses(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        AUX.append(x.square().mean())
        return x + sum(AUX)


class OtherContainers(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        RECENT.append(RECENT[-1] + 1)
        SEEN.add(len(SEEN))
        return x * RECENT[-1] * len(SEEN)


class Rebound(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS, BIAS
        CALLS += 1
        if BIAS is None:
            BIAS = torch.ones(8)
        return x * CALLS + BIAS


class OnTheClass(Net):
    count = 0
    known: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def use(self, x: torch.Tensor) -> torch.Tensor:
        type(self).count += 1
        if "made" not in vars(type(self)):
            type(self).made = torch.ones(8)
        return x * self.count + self.made + self.known.setdefault(8, torch.ones(8))


class PlainObject(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        TOTALS.steps += 1
        Totals.calls += 1
        TOTALS.losses.append(x.mean())
        return x * TOTALS.steps * Totals.calls + sum(TOTALS.losses)


class ClosuresAndDefaults(Net):
    def use(self, x: torch.Tensor) -> torch.Tensor:
        use = ClosuresAndDefaults.use
        use.calls = getattr(use, "calls", 0) + 1
        return x * ramp(8) * with_default(8) * use.calls


class Iterators(Net):
    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count(1)
        self.factors = itertools.cycle([1, 2, 3])
        self.pairs = zip(iter([1.0, 2.0, 3.0]), map(float, range(9)), strict=False)
        self.sliced = itertools.islice(itertools.count(), 100)

    def use(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.ids) * next(self.factors) + sum(next(self.pairs)) + next(self.sliced)


class OwnQueue(Net):
    def __init__(self) -> None:
        super().__init__()
        self.q: queue.Queue[int] = queue.Queue()
        for number in range(3):
            self.q.put(number)

    def use(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.q.get()


class ArrayAndLocal(Net):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = array.array("i", [1])
        self.local = threading.local()
        self.local.steps = 0
        self.table = functools.lru_cache(None)(lambda size: torch.ones(size))

    def use(self, x: torch.Tensor) -> torch.Tensor:
        self.numbers.append(len(self.numbers))
        self.local.steps += 1
        return x * sum(self.numbers) * self.local.steps * self.table(8)


MODELS = [
    LruCache, GlobalDict, NestedDict, AuxiliaryLosses, OtherContainers, Rebound, OnTheClass, PlainObject,
    ClosuresAndDefaults, Iterators, OwnQueue, ArrayAndLocal,
]  # fmt: skip


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Each training starts with what a new process would have."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    global CALLS, BIAS
    CALLS, BIAS = 0, None
    for container in (CACHE, BY_KIND["causal"], ORDERED, GROUPS, AUX, SEEN, OnTheClass.known, HOOKED):
        container.clear()  # type: ignore[attr-defined]
    RECENT.extend([1.0, 2.0])
    TOTALS.__init__()  # type: ignore[misc]
    Totals.calls = OnTheClass.count = 0
    if "made" in vars(OnTheClass):
        del OnTheClass.made
    mask.cache_clear()
    scale.cache_clear()
    for name, cell in zip(ramp.__code__.co_freevars, ramp.__closure__ or (), strict=True):
        if name == "known":
            cell.cell_contents.clear()
        elif name == "calls":
            cell.cell_contents = 0
    with_default.__defaults__[0].clear()
    vars(ClosuresAndDefaults.use).pop("calls", None)


def trained(make: type[Net], count: Callable[..., Any] | None) -> list[float]:
    """The losses of two steps of training, and the weights after it; the lists of losses are emptied."""
    _forget()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        if count is not None:
            count(model, (X,))
        loss = model(X).square().mean()
        AUX.clear()
        TOTALS.losses.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return [*found, *(float(p.detach().sum()) for p in model.parameters())]


@both
@pytest.mark.parametrize("make", MODELS)
def test_a_training_goes_on_as_without_a_count(make: type[Net], count: Callable[..., Any]) -> None:
    expected = trained(make, None)
    assert trained(make, count) == expected


@both
def test_no_fake_tensor_stays_in_a_cache(count: Callable[..., Any]) -> None:
    for make in MODELS:
        count(make(), (X,))
    assert not CACHE
    assert not ORDERED
    assert not GROUPS
    assert not AUX
    assert BY_KIND == {"causal": {}}
    assert not OnTheClass.known
    assert "made" not in vars(OnTheClass)
    assert BIAS is None
    assert not TOTALS.losses
    assert list(RECENT) == [1.0, 2.0]
    assert not SEEN
    assert CALLS == OnTheClass.count == TOTALS.steps == Totals.calls == 0
    assert type(mask(8)) is type(ramp(8)) is type(with_default(8)) is torch.Tensor


def test_a_cache_of_plain_values_is_kept() -> None:
    scale(3)
    count_flops(LruCache(), (X,))
    assert scale.cache_info().currsize == 2
    assert mask.cache_info().currsize == 0


def test_entries_from_before_a_count_stay() -> None:
    old = CACHE[3] = torch.zeros(())
    losses = AUX
    AUX.append(old)
    count_flops(GlobalDict(), (X,))
    count_flops(AuxiliaryLosses(), (X,))
    assert list(CACHE) == [3]
    assert CACHE[3] is old
    assert AUX is losses
    assert len(AUX) == 1
    assert AUX[0] is old


def test_a_count_that_fails_leaves_nothing_either() -> None:
    class Failing(AuxiliaryLosses):
        def use(self, x: torch.Tensor) -> torch.Tensor:
            super().use(x)
            CACHE[1] = x
            raise RuntimeError("no forward")

    with pytest.raises(ModelError, match="no forward"):
        count_flops(Failing(), (X,))
    assert not AUX
    assert not CACHE


def test_a_loss_function_is_code_of_the_step_too() -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        AUX.append(output.mean())
        return output.mean()

    count_flops(Net(), (X,), loss_fn=loss)
    assert not AUX


def test_code_that_a_forward_registers_is_kept() -> None:
    class Registering(Net):
        def use(self, x: torch.Tensor) -> torch.Tensor:
            if not HOOKED:
                HOOKED.append(torch.relu)
            return HOOKED[0](x)

    count_flops(Registering(), (X,))
    assert [torch.relu] == HOOKED


def test_what_another_thread_does_meanwhile_stays() -> None:
    began, ended = threading.Event(), threading.Event()

    def fetch_ahead() -> None:
        began.wait(30)
        SEEN.add(100)
        ended.set()
        done.wait(30)

    done = threading.Event()

    class Waiting(GlobalDict):
        def use(self, x: torch.Tensor) -> torch.Tensor:
            began.set()
            assert ended.wait(30)
            type(self).steps = len(SEEN)
            return super().use(x)

    thread = threading.Thread(target=fetch_ahead)
    thread.start()
    try:
        count_flops(Waiting(), (X,))
        assert {100} == SEEN
        assert not CACHE, "fake tensors go all the same"
        assert not ORDERED
        assert "steps" not in vars(Waiting)
    finally:
        done.set()
        thread.join()


@both
@pytest.mark.parametrize("kind", ["generator", "SimpleQueue"])
def test_what_cannot_be_copied_ends_a_count_that_would_advance_it(
    kind: str, count: Callable[..., Any]
) -> None:
    class Drawing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gen = (number for number in range(3))
            self.fast: queue.SimpleQueue[int] = queue.SimpleQueue()
            self.fast.put(0)

        def use(self, x: torch.Tensor) -> torch.Tensor:
            return x * (next(self.gen) if kind == "generator" else self.fast.get())

    model = Drawing()
    with pytest.raises(ModelError, match=rf"Drawing\.\w+ is a {kind}, which a count would advance"):
        count(model, (X,))
    assert next(model.gen) == model.fast.get() == 0


def test_a_generator_that_the_forward_does_not_use_is_no_obstacle() -> None:
    model = Net()
    model.unused = model.named_parameters()
    assert isinstance(model.unused, types.GeneratorType)
    assert count_flops(model, (X,)).forward == 2 * 4 * 8 * 8
    assert next(model.unused)[0] == "a.weight"


def test_an_empty_queue_ends_a_count_rather_than_wait() -> None:
    model = OwnQueue()
    model.q = queue.Queue()
    with pytest.raises(ModelError, match="Empty"):
        count_flops(model, (X,))


def test_a_counted_model_is_not_kept_alive() -> None:
    def made() -> weakref.ref[nn.Module]:
        held: list[nn.Module] = []

        class Holding(Net):
            this: Any = None

            def use(self, x: torch.Tensor) -> torch.Tensor:
                return x * len(held)

        model = Holding()
        held.append(model)
        Holding.this = model
        count_flops(model, (X,))
        return weakref.ref(model)

    reference = made()
    gc.collect()
    assert reference() is None


def test_no_tensor_of_a_count_is_left_anywhere() -> None:
    for make in MODELS:
        count_flops(make(), (X,))
    gc.collect()
    mine = [
        CACHE,
        BY_KIND,
        ORDERED,
        GROUPS,
        AUX,
        SEEN,
        vars(TOTALS),
        vars(OnTheClass),
        *gc.get_referents(mask),
    ]
    assert not any(isinstance(value, FakeTensor) for place in mine for value in gc.get_referents(place))
