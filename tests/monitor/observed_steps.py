"""THE table: training programs with unusual steps, for rows that must have the FLOPs of their own step.

A program gets a `run` (`step_truth.py`): `run.watch(model)` before the first step, `run.log(loss)` after
each.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


@dataclass(frozen=True)
class Program:
    """One program, and what is allowed of its rows."""

    name: str
    run: Callable[[Any], None]
    changes: bool = False
    """Its work changes from step to step while its batches and its model look the same."""
    may_be_unknown: str | None = None
    """Why no row of it need have FLOPs."""


PROGRAMS: list[Program] = []


def program(**options: Any) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        PROGRAMS.append(Program(function.__name__.replace("_", "-"), function, **options))
        return function

    return add


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, out: int = 4) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(width, 12), nn.Linear(12, 10), nn.Linear(10, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x).relu()).relu())  # type: ignore[no-any-return]


def mean_square(output: Any) -> Tensor:
    return output.square().mean()  # type: ignore[no-any-return]


def vectors(steps: int = 6, samples: int = 5, width: int = WIDTH) -> list[Tensor]:
    return [torch.randn(samples, width) for _ in range(steps)]


def loop(
    run: Any,
    model: nn.Module,
    batches: Iterable[Any],
    call: Callable[[nn.Module, Any], Tensor] = lambda model, x: mean_square(model(x)),
    before: Callable[[int], None] = lambda step: None,
) -> None:
    """The usual loop: `call` gives the loss of a batch; a list is several micro-batches."""
    run.watch(model)
    for step, batch in enumerate(batches, start=1):
        before(step)
        for part in batch if isinstance(batch, list) else [batch]:
            loss = call(model, part)
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
                    parameter.grad = None
        run.log(loss.detach())


# Steps that are more, or less, than one forward and one backward pass of the model.


@program()
def plain(run: Any) -> None:
    loop(run, Mlp(), vectors())


@program()
def gradient_penalty(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        with run.higher_order():
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mean_square(out) + (slope.norm(dim=1) - 1).square().mean()

    loop(run, Mlp(), vectors(), call)


@program()
def second_backward_with_retain_graph(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out.sum().backward(retain_graph=True)
        return mean_square(out)

    loop(run, Mlp(), vectors(), call)


@program()
def second_backward_in_some_steps(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for step, x in enumerate(vectors(15), start=1):
        loss = mean_square(model(x))
        if step % 5 == 0:
            loss.backward(retain_graph=True)
        loss.backward()
        run.log(loss.detach())


@program()
def gradients_measured_in_some_steps(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for step, x in enumerate(vectors(15), start=1):
        loss = mean_square(model(x))
        if step % 7 == 0:
            torch.autograd.grad(loss, list(model.two.parameters()), retain_graph=True)
        loss.backward()
        run.log(loss.detach())


@program()
def some_steps_without_backward(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for step, x in enumerate(vectors(15), start=1):
        loss = mean_square(model(x))
        if step not in (5, 8, 14):
            loss.backward()
        run.log(loss.detach())


@program()
def one_of_two_losses_in_some_steps(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for step, x in enumerate(vectors(15), start=1):
        hidden = model.one(x)
        losses = mean_square(model.three(model.two(hidden))), mean_square(hidden)
        losses[step % 5 == 0].backward()
        run.log(losses[0].detach())


@program()
def backward_for_some_inputs(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for x in vectors():
        loss = mean_square(model(x))
        loss.backward(inputs=list(model.three.parameters()))
        run.log(loss.detach())


@program()
def output_outside_the_loss(run: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(16, 4), nn.Linear(16, 9)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.body(x).relu()
            return self.a(x), self.b(x)

    loop(run, Two(), vectors(), lambda model, x: mean_square(model(x)[0]))


@program()
def product_after_the_model(run: Any) -> None:
    loop(run, Mlp(), vectors(), lambda model, x: mean_square((y := model(x)) @ y.T))


@program()
def product_before_the_model(run: Any) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    loop(run, Mlp(), vectors(), lambda model, x: mean_square(model(x @ weight)))


@program()
def contrastive_loss(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        a, b = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
        return F.cross_entropy(a @ b.T, torch.arange(len(x)))

    loop(run, Mlp(), vectors(), call)


@program()
def submodule_called_directly(run: Any) -> None:
    def call(model: Any, x: Tensor) -> Tensor:
        return mean_square(model(x)) + mean_square(model.one(x))

    loop(run, Mlp(), vectors(), call)


@program()
def submodules_alone(run: Any) -> None:
    loop(run, Mlp(), vectors(), lambda model, x: mean_square(model.two(model.one(x))))  # type: ignore[operator]


@program()
def forward_replaced(run: Any) -> None:
    model = Mlp()
    model.forward = lambda x: model.three(model.two(model.one(x) + model.one(x * 2)))  # type: ignore[assignment]
    loop(run, model, vectors())


@program(may_be_unknown="no forward pass of the model is called")
def method_that_is_not_forward(run: Any) -> None:
    class Flow(Mlp):
        def log_prob(self, x: Tensor) -> Tensor:
            return self.forward(x).sum(1)

    loop(run, Flow(), vectors(), lambda model, x: -model.log_prob(x).mean())  # type: ignore[operator]


@program()
def sparse_product(run: Any) -> None:
    adjacency = torch.eye(40).roll(1, 0).to_sparse()

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sparse.mm(adjacency, self.one(x)).relu()
            return torch.sparse.mm(adjacency, self.two(x))

    loop(run, Graph(), vectors(samples=40))


@program()
def sparse_rows_compressed(run: Any) -> None:
    adjacency = torch.eye(30).roll(2, 0).to_sparse_csr()
    loop(run, Mlp(), vectors(samples=30), lambda model, x: mean_square(adjacency @ model(x)))


class MyCheckpoint(torch.autograd.Function):
    """An ordinary product, whatever its name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


@program()
def function_named_checkpoint(run: Any) -> None:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.three(MyCheckpoint.apply(self.one(x), self.two.weight.T))

    loop(run, Model(), vectors())


@program()
def per_sample_gradients_first(run: Any) -> None:
    model = Mlp()
    values = {name: value.detach() for name, value in model.named_parameters()}
    vmap(grad(lambda p, x: functional_call(model, p, (x[None],)).sum()), (None, 0))(
        values, torch.ones(3, WIDTH)
    )
    loop(run, model, vectors())


@program()
def per_sample_gradients_watched_first(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    values = {name: value.detach() for name, value in model.named_parameters()}
    vmap(grad(lambda p, x: functional_call(model, p, (x[None],)).sum()), (None, 0))(
        values, torch.ones(3, WIDTH)
    )
    for x in vectors():
        loss = mean_square(model(x))
        loss.backward()
        run.log(loss.detach())


@program()
def accumulation(run: Any) -> None:
    loop(run, Mlp(), [vectors(3) for _ in range(5)])


@program()
def accumulation_of_unequal_parts(run: Any) -> None:
    loop(run, Mlp(), [[*vectors(1, samples=3), *vectors(1, samples=7)] for _ in range(5)])


@program()
def accumulation_changed_in_the_middle(run: Any) -> None:
    loop(run, Mlp(), [vectors(parts) for parts in (2, 2, 2, 4, 4, 4, 1, 1)])


@program()
def several_losses_one_backward_each(run: Any) -> None:
    def call(model: Any, x: Tensor) -> Tensor:
        hidden = model.one(x)
        mean_square(hidden).backward(retain_graph=True)
        return mean_square(model.three(model.two(hidden)))

    class Model(Mlp):
        pass

    loop(run, Model(), vectors(), call)


@program()
def model_called_twice(run: Any) -> None:
    loop(run, Mlp(out=WIDTH), vectors(), lambda model, x: mean_square(model(model(x))))


@program()
def recurrent_use_of_one_model(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + model(x)
        return mean_square(x)

    loop(run, Mlp(out=WIDTH), vectors(), call)


@program()
def meta_learning(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        values = dict(model.named_parameters())
        inner = mean_square(functional_call(model, values, (x,)))
        with run.higher_order():
            slopes = torch.autograd.grad(inner, list(values.values()), create_graph=True)
        fast = {name: value - 0.1 * s for (name, value), s in zip(values.items(), slopes, strict=True)}
        return mean_square(functional_call(model, fast, (x,)))

    loop(run, Mlp(), vectors(), call)


@program()
def sharpness_aware(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        mean_square(model(x)).backward()
        return mean_square(model(x))

    loop(run, Mlp(), vectors(), call)


@program()
def teacher_without_gradients(run: Any) -> None:
    teacher = Mlp()

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with run.apart():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    loop(run, Mlp(), vectors(), call)


@program()
def own_model_without_gradients(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with run.apart():
            target = model(x)
        return F.mse_loss(model(x + 1), target)

    loop(run, Mlp(), vectors(), call)


@program()
def average_of_weights(run: Any) -> None:
    model = Mlp()
    average = copy.deepcopy(model)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with run.apart():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)
            average(x)
        return mean_square(model(x))

    loop(run, model, vectors(), call)


@program()
def evaluation_inside_the_run(run: Any) -> None:
    model = Mlp()

    def before(step: int) -> None:
        if step == 3:
            model.eval()
            with run.apart():
                for x in vectors(4, samples=9):
                    model(x)
            model.train()

    loop(run, model, vectors(), before=before)


@program()
def products_of_the_optimizer(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for x in vectors():
        loss = mean_square(model(x))
        loss.backward()
        with run.apart():
            for p in model.parameters():
                if p.ndim == 2:
                    p -= 1e-3 * (p.grad @ p.grad.T @ p.grad)
                p.grad = None
        run.log(loss.detach())


@program()
def second_order_optimizer(run: Any) -> None:
    """By hand: the products of vectors inside the optimizer are no work of the model."""
    model, calls = Mlp(), []
    once = 2 * 5 * (WIDTH * 12 * 2 + 12 * 10 * 3 + 10 * 4 * 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2, tolerance_change=0)
    run.watch(model)
    for x in vectors(4):
        calls.clear()

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = mean_square(model(x))
            loss.backward()
            calls.append(1)
            return loss

        loss = optimizer.step(closure)
        run.expect(len(calls) * once)
        run.log(loss.detach())


@program()
def checkpointing(run: Any) -> None:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.three(
                checkpoint(lambda y: self.two(y.relu()).relu(), self.one(x), use_reentrant=False)
            )

    loop(run, Model(), vectors())


@program()
def checkpointing_with_reentry(run: Any) -> None:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.three(checkpoint(lambda y: self.two(y.relu()), self.one(x), use_reentrant=True))

    loop(run, Model(), vectors())


@program()
def checkpointing_inside_a_checkpoint(run: Any) -> None:
    class Model(Mlp):
        def inner(self, x: Tensor) -> Tensor:
            return checkpoint(self.two, self.one(x), use_reentrant=False)  # type: ignore[no-any-return]

        def forward(self, x: Tensor) -> Tensor:
            return self.three(checkpoint(self.inner, x, use_reentrant=False))

    loop(run, Model(), vectors())


@program()
def frozen_layers(run: Any) -> None:
    model = Mlp()
    model.one.requires_grad_(False)
    model.two.requires_grad_(False)
    loop(run, model, vectors())


@program()
def adapters(run: Any) -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Mlp().requires_grad_(False)
            self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 10, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.base.one(x)
            return self.base.three(self.base.two(x) + self.up(self.down(x)))

    loop(run, Lora(), vectors())


@program()
def input_that_needs_a_gradient(run: Any) -> None:
    loop(run, Mlp(), vectors(), lambda model, x: mean_square(model(x.requires_grad_())))


@program()
def adversarial_example(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mean_square(model(x)), x)
        return mean_square(model((x + 0.1 * slope.sign()).detach()))

    loop(run, Mlp(), vectors(), call)


@program()
def detached_half(run: Any) -> None:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.two(self.one(x).detach()))

    loop(run, Model(), vectors())


@program()
def exception_caught_by_the_loop(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for step, x in enumerate(vectors(), start=1):
        try:
            hidden = model.one(x)
            if step == 3:
                raise ValueError("bad batch")
            loss = mean_square(model.three(model.two(hidden))) + mean_square(model(x))
            loss.backward()
        except ValueError:
            loss = mean_square(model(x))
            loss.backward()
        run.log(loss.detach())


# Models that change, and steps that alternate.


@program(changes=True)
def frozen_in_the_middle(run: Any) -> None:
    model = Mlp()
    loop(run, model, vectors(8), before=lambda step: model.one.requires_grad_(step < 4) and None)


@program(changes=True)
def unfrozen_layer_by_layer(run: Any) -> None:
    model = Mlp()
    model.one.requires_grad_(False)
    model.two.requires_grad_(False)

    def before(step: int) -> None:
        if step == 3:
            model.two.requires_grad_(True)
        if step == 6:
            model.one.requires_grad_(True)

    loop(run, model, vectors(8), before=before)


@program(changes=True)
def layer_swapped(run: Any) -> None:
    model = Mlp()

    def before(step: int) -> None:
        if step == 4:
            model.two = nn.Sequential(nn.Linear(12, 30), nn.Linear(30, 10))  # type: ignore[assignment]

    loop(run, model, vectors(8), before=before)


@program(changes=True)
def layer_added(run: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def before(step: int) -> None:
        if step in (3, 6):
            model.append(nn.Linear(WIDTH, WIDTH))

    loop(run, model, vectors(8), before=before)


@program(changes=True)
def forward_changed_in_the_middle(run: Any) -> None:
    model = Mlp()

    def before(step: int) -> None:
        if step == 4:
            model.forward = lambda x: model.three(model.two(model.one(x) + model.one(-x)))  # type: ignore

    loop(run, model, vectors(8), before=before)


@program()
def checkpointing_switched_on(run: Any) -> None:
    class Model(Mlp):
        saves = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.three(checkpoint(self.two, x, use_reentrant=False) if self.saves else self.two(x))

    model = Model()

    def before(step: int) -> None:
        model.saves = step >= 4

    loop(run, model, vectors(8), before=before)


@program(changes=True)
def adapters_merged(run: Any) -> None:
    model = Mlp()
    model.register_module("extra", nn.Linear(12, 12))
    model.forward = lambda x: model.three(
        model.two(model.extra(model.one(x)) if model.extra else model.one(x))
    )  # type: ignore

    def before(step: int) -> None:
        if step == 5:
            model.extra = None  # type: ignore[assignment]

    loop(run, model, vectors(8), before=before)


@program(changes=True)
def penalty_every_fourth_step(run: Any) -> None:
    model = Mlp()
    run.watch(model)
    for step, x in enumerate(vectors(16), start=1):
        x.requires_grad_()
        out = model(x)
        loss = mean_square(out)
        if step % 4 == 0:
            with run.higher_order():
                (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + slope.square().mean()
        loss.backward()
        run.log(loss.detach())


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Mlp(out=6), Mlp(width=6, out=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.critic(self.generator(z))  # type: ignore[no-any-return]


@program()
def adversarial_pair_in_each_step(run: Any) -> None:
    model = Gan()
    run.watch(model)
    for z in vectors():
        with run.apart():
            fake = model.generator(z)
        (model.critic(fake).mean() - model.critic(torch.randn(5, 6)).mean()).backward()
        loss = -model(z).mean()
        loss.backward()
        run.log(loss.detach())


@program(changes=True)
def adversarial_pair_in_turn(run: Any) -> None:
    model = Gan()
    run.watch(model)
    for step, z in enumerate(vectors(10), start=1):
        if step % 2:
            with run.apart():
                fake = model.generator(z)
            loss = model.critic(fake).mean() - model.critic(torch.randn(5, 6)).mean()
        else:
            loss = -model(z).mean()
        loss.backward()
        run.log(loss.detach())


@program(changes=True)
def five_critic_steps_for_each_of_the_generator(run: Any) -> None:
    model = Gan()
    run.watch(model)
    for step, z in enumerate(vectors(18), start=1):
        model.generator.requires_grad_(step % 6 == 0)
        loss = -model(z).mean() if step % 6 == 0 else model.critic(torch.randn(5, 6)).mean()
        loss.backward()
        run.log(loss.detach())


@program(changes=True)
def layer_drop(run: Any) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            self.chance = random.Random(3)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if self.chance.random() < 0.7:
                    x = x + layer(x).relu()
            return self.layers[0](x)  # type: ignore[no-any-return]

    loop(run, Dropped(), vectors(12))


@program(changes=True)
def early_exit_by_value(run: Any) -> None:
    class Exits(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.three(self.two(x)) if x.sum() > 0 else x

    loop(run, Exits(), vectors(12))


@program(changes=True)
def auxiliary_loss_now_and_then(run: Any) -> None:
    counter = iter(range(100))

    def call(model: Any, x: Tensor) -> Tensor:
        loss = mean_square(model(x))
        return loss + mean_square(model(x.flip(0))) if next(counter) % 3 == 2 else loss

    loop(run, Mlp(), vectors(12), call)


@program(changes=True)
def growing_curriculum(run: Any) -> None:
    def call(model: Any, x: Tensor) -> Tensor:
        for _ in range(depth[0]):
            x = model(x)
        return mean_square(x)

    depth = [1]

    def before(step: int) -> None:
        depth[0] = 1 + step // 4

    loop(run, Mlp(out=WIDTH), vectors(12), call, before)


# Threads, modes, subclasses, compiled code.


@program(may_be_unknown="part of the step runs on other threads")
def forward_on_two_threads(run: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    one, two, three = (2 * 4 * a * b for a, b in ((WIDTH, 12), (12, 10), (10, 4)))
    with ThreadPoolExecutor(2) as pool:

        def call(model: nn.Module, x: Tensor) -> Tensor:
            run.expect(one * 2 + two * 3 + three * 3)
            return mean_square(torch.cat(list(pool.map(model, x.chunk(2)))))

        loop(run, Mlp(), vectors(samples=4), call)


@program(may_be_unknown="a user's dispatch mode may hide what runs below it")
def dispatch_mode_of_the_user(run: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with Mode():
            return mean_square(model(x))

    loop(run, Mlp(), vectors(), call)


@program()
def compiled_model(run: Any) -> None:
    torch._dynamo.reset()
    loop(run, torch.compile(Mlp()), vectors())  # type: ignore[arg-type]


@program()
def compiled_block(run: Any) -> None:
    torch._dynamo.reset()
    model = Mlp()
    model.two = torch.compile(nn.Sequential(model.two))  # type: ignore[assignment]
    loop(run, model, vectors())


@program(may_be_unknown="the backward pass of this backend cannot be told from recomputation")
def compiled_by_another_backend(run: Any) -> None:
    torch._dynamo.reset()
    loop(run, torch.compile(Mlp(), backend="aot_eager"), vectors())  # type: ignore[arg-type]


@program()
def autocast(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_square(model(x).float())

    loop(run, Mlp(), vectors(), call)


@program()
def per_sample_gradients_in_each_step(run: Any) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        values = dict(model.named_parameters())
        losses = vmap(lambda row: functional_call(model, values, (row[None],)).square().mean())(x)
        return losses.mean()

    loop(run, Mlp(), vectors(), call)


@program()
def scripted_model(run: Any) -> None:
    loop(run, torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 3))), vectors())


@program()
def tied_weights(run: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(50, 16), nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return self.body(self.table(ids)) @ self.table.weight.T

    loop(run, Tied(), [torch.randint(50, (3, 7)) for _ in range(6)])


# Steps that run the same forward operators, of which the backward pass reaches others: only gradients tell.


class Branches(nn.Module):
    """An encoder, which is cut off from the gradient in some steps, and heads of these widths."""

    def __init__(self, *widths: int, is_cut: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.encoder, self.is_cut = nn.Linear(WIDTH, 12), is_cut
        self.heads = nn.ModuleList(nn.Linear(12, width) for width in widths)

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.encoder(x).relu()
        if self.is_cut():
            hidden = hidden.detach()
        return [head(hidden) for head in self.heads]


class Routed(Branches):
    """Each sample goes to one expert of equal cost, chosen at random; some get none."""

    def __init__(self, experts: int = 8, is_cut: Callable[[], bool] = lambda: False) -> None:
        super().__init__(*[6] * experts, is_cut=is_cut)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.encoder(x)
        if self.is_cut():
            hidden = hidden.detach()
        chosen = torch.randint(len(self.heads), (len(x),)).tolist()
        rows = {number: [n for n, each in enumerate(chosen) if each == number] for number in set(chosen)}
        return torch.cat([self.heads[number](hidden[each]) for number, each in rows.items()])


def at_random(share: float, seed: int = 1) -> Callable[[], bool]:
    chance = random.Random(seed)
    return lambda: chance.random() < share


def optimized(
    run: Any,
    model: nn.Module,
    loss_of: Callable[[int, Any], Tensor] = lambda step, heads: mean_square(heads[0]),
    steps: int = 40,
    samples: int = 5,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    accumulated: int = 1,
) -> None:
    """The usual loop with optimizers of torch; they step after so many logged backward passes."""
    optimizers = list(optimizers) or [torch.optim.SGD(model.parameters(), lr=1e-3)]
    run.watch(model)
    for step, x in enumerate(vectors(steps, samples), start=1):
        loss = loss_of(step, model(x))
        loss.backward()
        if step % accumulated == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        run.log(loss.detach())


@program()
def another_head_every_seventh_step(run: Any) -> None:
    optimized(run, Branches(4, 40), lambda step, heads: heads[step % 7 == 5].mean())


@program()
def another_head_at_random(run: Any) -> None:
    is_other = at_random(0.3)
    optimized(run, Branches(4, 40), lambda step, heads: heads[is_other()].mean())


@program()
def one_of_five_heads_at_random_of_which_one_costs_more(run: Any) -> None:
    chance, weights = random.Random(3), (5, 5, 5, 5, 2)
    model = Branches(4, 4, 4, 4, 40)
    optimized(run, model, lambda step, heads: chance.choices(heads, weights)[0].mean(), 60)


@program()
def an_added_loss_of_another_head_every_fifth_step(run: Any) -> None:
    def loss_of(step: int, heads: list[Tensor]) -> Tensor:
        return heads[0].mean() + heads[1 if step % 5 == 0 else 2].mean()

    optimized(run, Branches(4, 40, 8), loss_of)


@program()
def an_encoder_cut_off_at_random(run: Any) -> None:
    optimized(run, Branches(4, is_cut=at_random(0.3)))


@program()
def an_encoder_seldom_cut_off(run: Any) -> None:
    optimized(run, Branches(4, is_cut=at_random(0.06, seed=7)), steps=80)


@program()
def an_encoder_cut_off_every_sixth_step(run: Any) -> None:
    calls = itertools.count(1)
    optimized(run, Branches(4, is_cut=lambda: next(calls) % 6 == 4))


@program()
def an_encoder_with_its_own_optimizer_cut_off_at_random(run: Any) -> None:
    model = Branches(4, is_cut=at_random(0.3, seed=4))
    parts = model.encoder, model.heads
    optimized(run, model, optimizers=[torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts])


@program()
def an_encoder_frozen_at_random_by_taking_its_gradients(run: Any) -> None:
    """After they were computed: the work is that of every step."""
    model, is_frozen = Branches(4), at_random(0.3, seed=6)
    for parameter in model.encoder.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda found: setattr(found, "grad", None if is_frozen() else found.grad)
        )
    parts = model.encoder, model.heads
    optimized(run, model, optimizers=[torch.optim.SGD(part.parameters(), lr=1e-3) for part in parts])


@program()
def experts_without_samples(run: Any) -> None:
    optimized(run, Routed(), lambda step, y: mean_square(y), 120, samples=16)


@program()
def experts_without_samples_and_an_encoder_cut_off_at_random(run: Any) -> None:
    optimized(run, Routed(4, is_cut=at_random(0.2, seed=5)), lambda step, y: mean_square(y), 60)


@program()
def an_optimizer_step_after_four_logged_ones(run: Any) -> None:
    optimized(run, Branches(4), accumulated=4)
