"""Kernels that only a GPU has: the count on fake tensors held against the step that really ran.

Flash, memory-efficient and cuDNN attention, flex and varlen attention with their backward, nested tensors,
grouped and scaled products, cuDNN's recurrent layers and convolutions cannot run on the machines that run
our tests. Here each is counted twice: by `count_flops`, on fake CUDA tensors, and by `count_step`, on the
step as the GPU executes it. Forward, backward and recompute must agree with each other and with the integers
written down by hand; the model FLOPs of one attention must be one integer under all its kernels. Counting
must leave GPU memory, the GPU's random state and compiled code as they were.

    PYTHONPATH=src python benchmarks/gpu/kernels.py [--only TEXT]

Prints a line for each check (PASS, FAIL or SKIP, with the integers), then the same as one line of JSON. The
exit code is 1 if a check failed. Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import inspect
import json
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from truemfu import Convention, FlopCount, __version__, count_flops, count_step

FULL, CAUSAL = Convention(), Convention(attention="causal")
SAMPLES, LENGTH, HEADS, HEAD = 2, 256, 8, 64
DOCUMENTS = (100, 156)
FP8 = torch.float8_e4m3fn

Numbers = dict[str, Any]
CHECKS: dict[str, Callable[[], Numbers]] = {}


class Skipped(Exception):
    """This torch, or this device, does not have what the check is about."""


def check(name: str) -> Callable[[Callable[[], Numbers]], Callable[[], Numbers]]:
    """Add a function to the checks: it returns the integers to show, and raises if something is wrong."""

    def add(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
        assert name not in CHECKS, name
        CHECKS[name] = function
        return function

    return add


def require(condition: bool, text: str) -> None:
    """Fail the check unless the condition holds (asserts may be switched off)."""
    if not condition:
        raise AssertionError(text)


# -- counting twice -------------------------------------------------------------------------------------


def parts(count: FlopCount) -> tuple[int, int, int]:
    """Forward, backward, recompute."""
    return count.forward, count.backward, count.recompute


@contextmanager
def gpu_untouched() -> Iterator[None]:
    """GPU memory and the GPU's random state are afterwards as before.

    Torch itself touches the device with one element when it first makes a fake tensor for it, and values that
    a mask function asks for pass through a few bytes: a page is allowed in between, nothing afterwards.
    """
    gc.collect()  # garbage of earlier checks must not be collected, and its memory freed, in between
    torch.cuda.synchronize()
    memory, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    gc.collect()
    require(
        torch.cuda.memory_allocated() <= memory, f"memory {memory} → {torch.cuda.memory_allocated()} bytes"
    )
    peak = torch.cuda.max_memory_allocated()
    require(peak - memory <= 4096, f"counting took {peak - memory} bytes of GPU memory")
    require(torch.equal(torch.cuda.get_rng_state(), state), "the GPU's random state changed")


def runs(model: nn.Module, batch: Any, loss_fn: Any = None) -> None:
    """One plain step: where torch itself cannot run it, skip; and cuBLAS takes its workspace now."""
    try:
        _step(model, batch, loss_fn)
    except Exception as error:
        raise Skipped(f"torch cannot run this here: {' '.join(str(error).split())[:200]}") from error
    torch.cuda.synchronize()
    model.zero_grad()


def _step(model: nn.Module, batch: Any, loss_fn: Any) -> None:
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = loss_fn(out) if loss_fn is not None else out.float().sum()
    loss.backward()


def counted(model: nn.Module, batch: Any, convention: Convention = FULL, **options: Any) -> FlopCount:
    """The count on fake tensors; fails if it fell back to real ones or touched the GPU."""
    with gpu_untouched():
        count = count_flops(model, batch, convention=convention, **options)
    require(not count.uncounted, f"uncounted: {count.uncounted}")
    require("fake" in count.method, f"method: {count.method}")
    return count


def executed(model: nn.Module, batch: Any, convention: Convention = FULL, loss_fn: Any = None) -> FlopCount:
    """The count of a step that runs for real on the GPU."""
    count = count_step(_step, model, batch, loss_fn, convention=convention)
    torch.cuda.synchronize()
    model.zero_grad()
    require(not count.uncounted, f"uncounted in the executed step: {count.uncounted}")
    return count


def both(
    model: nn.Module,
    batch: Any,
    right: tuple[int, int] | None,
    convention: Convention = FULL,
    recompute: int | None = None,
    loss_fn: Any = None,
    operator: str | None = None,
) -> Numbers:
    """Count on fake tensors and count the executed step: they agree, and with the integers by hand."""
    runs(model, batch, loss_fn)
    fake = counted(model, batch, convention, loss_fn=loss_fn)
    real = executed(model, batch, convention, loss_fn)
    numbers = {"forward": fake.forward, "backward": fake.backward, "recompute": fake.recompute}
    require(
        parts(fake) == parts(real), f"fake {parts(fake)}, executed {parts(real)}: {dict(real.by_operator)}"
    )
    if right is not None:
        require(parts(fake)[:2] == right, f"counted {parts(fake)[:2]}, by hand {right}")
    if recompute is not None:
        require(fake.recompute == recompute, f"recompute {fake.recompute}, by hand {recompute}")
    if operator is not None:
        require(
            any(operator in name for name in real.by_operator),
            f"{operator} did not run, but {sorted(real.by_operator)}",
        )
    for view in ("by_operator", "by_dtype", "by_module"):
        require(
            dict(getattr(fake, view)) == dict(getattr(real, view)),
            f"{view}: fake {dict(getattr(fake, view))}, executed {dict(getattr(real, view))}",
        )
    return numbers


# -- one attention, every kernel ------------------------------------------------------------------------

Core = Callable[..., torch.Tensor]


class Attention(nn.Module):
    """Four projections around a core on (samples, heads, length, head size)."""

    def __init__(self, core: Core, *, kv_heads: int = HEADS, head: int = HEAD) -> None:
        super().__init__()
        self.core, self.kv_heads, self.head = core, kv_heads, head
        width, narrow = HEADS * head, kv_heads * head
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, out, bias=False) for out in (width, narrow, narrow, width)
        )

    def forward(self, x: torch.Tensor, **extra: Any) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, self.head)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        return self.o(self.core(q, k, v, **extra).transpose(1, 2).flatten(-2))


def attention(core: Core, **sizes: int) -> nn.Module:
    return Attention(core, **sizes).to("cuda", torch.bfloat16)


def data(head: int = HEAD, **options: Any) -> tuple[torch.Tensor]:
    return (torch.randn(SAMPLES, LENGTH, HEADS * head, device="cuda", dtype=torch.bfloat16, **options),)


def by_hand(
    pairs: int, *, kv_heads: int = HEADS, head: int = HEAD, tokens: int = SAMPLES * LENGTH
) -> tuple[int, int]:
    """Forward and needed backward of the attention model, with data that needs no gradient."""
    width = HEADS * head
    wide, narrow = 2 * tokens * width * width, 2 * tokens * width * kv_heads * head
    one = 2 * pairs * HEADS * head
    return 2 * wide + 2 * narrow + 2 * one, 3 * wide + 2 * narrow + 4 * one


def pairs_of(convention: Convention, causal: bool) -> int:
    triangle = causal and convention is CAUSAL
    return SAMPLES * (LENGTH * (LENGTH + 1) // 2 if triangle else LENGTH * LENGTH)


def sdpa(backend: SDPBackend, **options: Any) -> Core:
    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **extra: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **{**options, **extra})

    return core


def eager(causal: bool) -> Core:
    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v

    return core


BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, "flash_attention"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "efficient_attention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "cudnn_attention"),
    "math": (SDPBackend.MATH, "bmm"),
}


def _sdpa_checks() -> None:
    for backend_name, (backend, operator) in BACKENDS.items():
        fused = backend is not SDPBackend.MATH
        for causal in (False, True):
            for convention in (FULL, CAUSAL):

                @check(f"sdpa {backend_name}, causal={causal}, {convention.attention}")
                def _(
                    backend: SDPBackend = backend,
                    operator: str = operator,
                    causal: bool = causal,
                    convention: Convention = convention,
                    fused: bool = fused,
                ) -> Numbers:
                    pairs = pairs_of(convention, causal)
                    return both(
                        attention(sdpa(backend, is_causal=causal)),
                        data(),
                        by_hand(pairs),
                        convention,
                        recompute=2 * pairs * HEADS * HEAD * fused,
                        operator=operator,
                    )

        for head in (20, 36):

            @check(f"sdpa {backend_name}, head size {head}")
            def _(
                name: str = backend_name, backend: SDPBackend = backend, head: int = head, fused: bool = fused
            ) -> Numbers:
                if name == "cudnn":
                    raise Skipped("cuDNN's attention takes multiples of 8 only")
                pairs = pairs_of(CAUSAL, True)
                return both(
                    attention(sdpa(backend, is_causal=True), head=head),
                    data(head),
                    by_hand(pairs, head=head),
                    CAUSAL,
                    recompute=2 * pairs * HEADS * head * fused,
                )

        @check(f"sdpa {backend_name}, two key heads")
        def _(name: str = backend_name, backend: SDPBackend = backend) -> Numbers:
            if name == "efficient":
                raise Skipped("the memory-efficient kernel takes no enable_gqa")
            model = attention(sdpa(backend, is_causal=True, enable_gqa=True), kv_heads=2)
            return both(model, data(), by_hand(pairs_of(CAUSAL, True), kv_heads=2), CAUSAL)

        @check(f"sdpa {backend_name}, dropout")
        def _(backend: SDPBackend = backend) -> Numbers:
            model = attention(sdpa(backend, is_causal=True, dropout_p=0.1))
            return both(model, data(), by_hand(pairs_of(CAUSAL, True)), CAUSAL)

        for kind in ("boolean", "added"):

            @check(f"sdpa {backend_name}, {kind} mask with padding")
            def _(
                name: str = backend_name,
                backend: SDPBackend = backend,
                operator: str = operator,
                kind: str = kind,
            ) -> Numbers:
                if name == "flash":
                    raise Skipped("the flash kernel takes no mask")
                kept = torch.ones(SAMPLES, 1, 1, LENGTH, dtype=torch.bool, device="cuda")
                kept[0, ..., :16] = False
                mask = kept & torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
                if kind == "added":
                    smallest = torch.finfo(torch.bfloat16).min
                    mask = torch.zeros(mask.shape, device="cuda", dtype=torch.bfloat16).masked_fill(
                        ~mask, smallest
                    )
                model = attention(sdpa(backend, attn_mask=mask))
                both(model, data(), by_hand(pairs_of(FULL, True)), FULL, operator=operator)
                return both(model, data(), by_hand(pairs_of(CAUSAL, True)), CAUSAL, operator=operator)

        @check(f"sdpa {backend_name}, keys frozen")
        def _(backend: SDPBackend = backend, fused: bool = fused) -> Numbers:
            model = attention(sdpa(backend))
            model.k.weight.requires_grad_(False)
            pairs = pairs_of(FULL, False)
            one, wide = 2 * pairs * HEADS * HEAD, 2 * SAMPLES * LENGTH * (HEADS * HEAD) ** 2
            forward, backward = by_hand(pairs)
            surplus = 2 * one * fused  # the scores again, and the keys' gradient
            return both(model, data(), (forward, backward - one - wide), recompute=surplus)

        for reentrant in (False, True):

            @check(f"sdpa {backend_name}, checkpoint, reentrant={reentrant}")
            def _(backend: SDPBackend = backend, reentrant: bool = reentrant, fused: bool = fused) -> Numbers:
                return _checkpointed(sdpa(backend, is_causal=True), reentrant, HEAD, fused)

    @check("sdpa flash, checkpoint, head size 20")
    def _() -> Numbers:
        return _checkpointed(sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True), False, 20, True)

    @check("one attention, one integer")
    def _() -> Numbers:
        cores = {name: sdpa(backend, is_causal=True) for name, (backend, _) in BACKENDS.items()}
        cores |= {"eager": eager(True), "flex": flex(_look_back)}
        result: Numbers = {"kernels": []}
        for name, core in list(cores.items()):
            try:
                runs(attention(core), data())
                result["kernels"].append(name)
            except Skipped:
                del cores[name]
        for convention in (FULL, CAUSAL):
            found = {
                name: counted(attention(core), data(), convention).model_flops for name, core in cores.items()
            }
            require(len(set(found.values())) == 1, f"{convention.attention}: {found}")
            result[convention.attention] = found["eager"]
        return result


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return checkpoint(self.inner, *args, use_reentrant=self.reentrant, **kwargs)


def _checkpointed(core: Core, reentrant: bool, head: int, fused: bool) -> Numbers:
    pairs = pairs_of(CAUSAL, True)
    model = Checkpointed(attention(core, head=head), reentrant=reentrant)
    wide = 2 * SAMPLES * LENGTH * (HEADS * head) ** 2
    forward, backward = by_hand(pairs, head=head)
    again = forward - (0 if reentrant else wide)  # a non-reentrant one stops before the output projection
    return both(
        model,
        data(head, requires_grad=True),
        (forward, backward + 3 * wide),  # and the data's gradient, through three projections
        CAUSAL,
        recompute=again + 2 * pairs * HEADS * head * fused,
    )


# -- flex, varlen, nested -------------------------------------------------------------------------------


def _look_back(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


_COMPILED: dict[str, Any] = {}


def compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if "flex" not in _COMPILED:
        _COMPILED["flex"] = torch.compile(flex_attention)
    return _COMPILED["flex"]


def flex(mask: Callable[..., Any] | None = None, samples: int | None = None, gqa: bool = False) -> Core:
    from torch.nn.attention.flex_attention import create_block_mask

    run = compiled_flex()
    blocks = None if mask is None else create_block_mask(mask, samples, None, LENGTH, LENGTH, device="cuda")
    return lambda q, k, v: run(q, k, v, block_mask=blocks, enable_gqa=gqa)


def regions(run: Callable[[], Any]) -> int:
    """How many compiled regions a call enters."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
        torch.cuda.synchronize()
    return sum("Torch-Compiled Region" in event.name for event in profile.events())


def _flex_checks() -> None:
    for convention in (FULL, CAUSAL):

        @check(f"flex compiled, causal mask, {convention.attention}")
        def _(convention: Convention = convention) -> Numbers:
            model, batch = attention(flex(_look_back)), data()
            model(*batch).float().sum().backward()  # compiled, for real
            model.zero_grad()
            pairs = pairs_of(convention, True)
            return both(
                model, batch, by_hand(pairs), convention, 2 * pairs * HEADS * HEAD, operator="flex_attention"
            )

    @check("flex compiled, no mask")
    def _() -> Numbers:
        return both(attention(flex()), data(), by_hand(pairs_of(FULL, False)), CAUSAL)

    @check("flex compiled, sliding window")
    def _() -> Numbers:
        window = 32

        def near(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (i - j < window)

        pairs = SAMPLES * (window * (window + 1) // 2 + (LENGTH - window) * window)
        return both(attention(flex(near)), data(), by_hand(pairs), CAUSAL)

    @check("flex compiled, two key heads")
    def _() -> Numbers:
        model = attention(flex(_look_back, gqa=True), kv_heads=2)
        return both(model, data(), by_hand(pairs_of(CAUSAL, True), kv_heads=2), CAUSAL)

    @check("flex compiled, documents")
    def _() -> Numbers:
        ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int32, device="cuda")
        ids[1, DOCUMENTS[0] :] = 1

        def same(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (ids[b, i] == ids[b, j])

        class Given(Attention):
            def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return super().forward(x)

        positions = torch.stack(
            [torch.arange(LENGTH), torch.cat([torch.arange(n) for n in DOCUMENTS])],
        ).to("cuda")
        model = Given(flex(same, SAMPLES)).to("cuda", torch.bfloat16)
        batch = {"x": data()[0], "position_ids": positions}
        fake = counted(model, batch)
        pairs = LENGTH * LENGTH + sum(n * n for n in DOCUMENTS)
        require(parts(fake)[:2] == by_hand(pairs), f"{parts(fake)[:2]}, by hand {by_hand(pairs)}")
        return {"forward": fake.forward, "backward": fake.backward}

    for reentrant in (False, True):

        @check(f"flex compiled, checkpoint, reentrant={reentrant}")
        def _(reentrant: bool = reentrant) -> Numbers:
            return _checkpointed(flex(_look_back), reentrant, HEAD, True)

    @check("flex stays compiled")
    def _() -> Numbers:
        model, batch = attention(flex(_look_back)), data()

        def step() -> None:
            model(*batch).float().sum().backward()

        step()
        before = regions(step)
        counted(model, batch)
        executed(model, batch)
        after = regions(step)
        require(before > 0 and after == before, f"compiled regions: {before} before, {after} after")
        return {"regions": after}


class Varlen(nn.Module):
    """Documents in one row, kept apart by cumulative lengths."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        width, narrow = HEADS * HEAD, kv_heads * HEAD
        self.kv_heads = kv_heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, out, bias=False) for out in (width, narrow, narrow, width)
        )

    def forward(self, x: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if self.kv_heads != HEADS:
            if "enable_gqa" not in known:
                raise Skipped("this torch's varlen_attn has no enable_gqa")
            options["enable_gqa"] = True
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        return self.o(varlen_attn(q, k, v, ends, ends, longest, longest, **options).flatten(-2))


class Jagged(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x).values()


class JaggedInside(Attention):
    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.nested.nested_tensor_from_jagged(x, offsets)).values()


def _packed_checks() -> None:
    tokens = sum(DOCUMENTS)

    def row(dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
        ends = torch.tensor([0, DOCUMENTS[0], tokens], device="cuda", dtype=dtype)
        return torch.randn(tokens, HEADS * HEAD, device="cuda", dtype=torch.bfloat16), ends

    def pairs_in(convention: Convention) -> int:
        return sum(n * (n + 1) // 2 if convention is CAUSAL else n * n for n in DOCUMENTS)

    for convention in (FULL, CAUSAL):
        for kv_heads in (HEADS, 2):

            @check(f"varlen, {kv_heads} key heads, {convention.attention}")
            def _(convention: Convention = convention, kv_heads: int = kv_heads) -> Numbers:
                if importlib.util.find_spec("torch.nn.attention.varlen") is None:
                    raise Skipped("this torch has no varlen attention")
                pairs = pairs_in(convention)
                return both(
                    Varlen(kv_heads).to("cuda", torch.bfloat16),
                    (*row(), max(DOCUMENTS)),
                    by_hand(pairs, tokens=tokens, kv_heads=kv_heads),
                    convention,
                    recompute=2 * pairs * HEADS * HEAD,
                )

        for name in ("flash", "efficient"):

            @check(f"nested tensors given, {name}, {convention.attention}")
            def _(convention: Convention = convention, name: str = name) -> Numbers:
                values, _ = row()
                nested = torch.nested.nested_tensor(list(values.split(list(DOCUMENTS))), layout=torch.jagged)
                model = Jagged(sdpa(BACKENDS[name][0], is_causal=True)).to("cuda", torch.bfloat16)
                return _nested(model, (nested,), by_hand(pairs_in(convention), tokens=tokens), convention)

            @check(f"nested tensors made inside, {name}, {convention.attention}")
            def _(convention: Convention = convention, name: str = name) -> Numbers:
                model = JaggedInside(sdpa(BACKENDS[name][0], is_causal=True)).to("cuda", torch.bfloat16)
                right = by_hand(pairs_in(convention), tokens=tokens)
                return _nested(model, row(torch.int64), right, convention)


def _nested(model: nn.Module, batch: Any, right: tuple[int, int], convention: Convention) -> Numbers:
    """Nested tensors may be counted on real copies: the model's integers alone are compared."""
    runs(model, batch)
    with gpu_untouched():
        count = count_flops(model, batch, convention=convention)
    real = executed(model, batch, convention)
    require(parts(count)[:2] == right, f"counted {parts(count)[:2]}, by hand {right}")
    require(parts(real)[:2] == right, f"executed {parts(real)[:2]}, by hand {right}")
    return {"forward": count.forward, "backward": count.backward, "method": count.method}


# -- products -------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """A function of its inputs and weights."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function, self.weights = function, nn.ParameterList(weights)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *self.weights)


def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=a.device)
    right = b.t().contiguous().to(FP8).t()
    return torch._scaled_mm(a.contiguous().to(FP8), right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


class Fp8Product(torch.autograd.Function):
    """Float8 training: three scaled products."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return scaled(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return scaled(grad, weight), scaled(grad.t(), x)


def _product_checks() -> None:
    groups, rows, inner, out = 4, 512, 128, 256

    def randn(*shape: int, **options: Any) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, **options)

    @check("grouped product, rows by groups")
    def _() -> Numbers:
        ends = torch.tensor([64, 80, 320, rows], dtype=torch.int32, device="cuda")
        model = Apply(lambda x, ends, w: torch._grouped_mm(x, w, offs=ends), randn(groups, inner, out))
        one = 2 * rows * inner * out
        return both(model, (randn(rows, inner, requires_grad=True), ends), (one, 2 * one), recompute=0)

    @check("grouped product, batch by batch")
    def _() -> Numbers:
        one = 2 * groups * rows * inner * out
        model = Apply(torch._grouped_mm, randn(groups, inner, out))
        return both(model, (randn(groups, rows, inner, requires_grad=True),), (one, 2 * one), recompute=0)

    @check("scaled product in fp8, forward and backward")
    def _() -> Numbers:
        one = 2 * rows * inner * out
        model = Apply(Fp8Product.apply, randn(out, inner))
        numbers = both(model, (randn(rows, inner, requires_grad=True),), (one, 2 * one), recompute=0)
        found = counted(model, (randn(rows, inner, requires_grad=True),)).by_dtype
        require(found == {"fp8": 3 * one}, f"by dtype: {found}")
        return numbers

    @check("scaled grouped product in fp8, forward")
    def _() -> Numbers:
        def product(x: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            left, right = x.to(FP8), weight.to(FP8).transpose(-2, -1)
            by_row = torch.ones(rows, device=x.device)
            by_column = torch.ones(groups, out, device=x.device)
            return torch._scaled_grouped_mm(
                left, right, by_row, by_column, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        ends = torch.tensor([64, 80, 320, rows], dtype=torch.int32, device="cuda")
        model, batch = Apply(product, randn(groups, out, inner)), (randn(rows, inner), ends)
        try:
            with torch.no_grad():
                model(*batch)
        except Exception as error:
            raise Skipped(f"torch cannot run this here: {' '.join(str(error).split())[:200]}") from error
        fake = counted(model, batch, backward=False)
        with torch.no_grad():
            real = count_step(model, *batch)
        one = 2 * rows * inner * out
        require(parts(fake) == parts(real) == (one, 0, 0), f"{parts(fake)}, {parts(real)}, by hand {one}")
        require(dict(fake.by_dtype) == {"fp8": one}, f"by dtype: {dict(fake.by_dtype)}")
        return {"forward": one}

    @check("int8 product, forward")
    def _() -> Numbers:
        x = torch.randint(-9, 9, (rows, inner), dtype=torch.int8, device="cuda")
        model = Apply(lambda x: torch._int_mm(x, x.t()))
        fake, real = counted(model, (x,), backward=False), count_step(model, x)
        one = 2 * rows * inner * rows
        require(parts(fake) == parts(real) == (one, 0, 0), f"{parts(fake)}, {parts(real)}, by hand {one}")
        return {"forward": one}

    @check("fp32 products are tf32 when torch says so")
    def _() -> Numbers:
        precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        found: Numbers = {}
        model, x = nn.Linear(inner, out, device="cuda"), torch.randn(rows, inner, device="cuda")
        convolution = nn.Conv1d(4, 8, 3, device="cuda")
        sound = torch.randn(2, 4, 64, device="cuda")
        try:
            for setting, name in (("highest", "fp32"), ("high", "tf32")):
                torch.set_float32_matmul_precision(setting)
                require(set(counted(model, (x,)).by_dtype) == {name}, f"{setting}: not {name}")
                found[setting] = name
            for allowed, name in ((False, "fp32"), (True, "tf32")):
                torch.backends.cudnn.allow_tf32 = allowed
                require(
                    set(counted(convolution, (sound,)).by_dtype) == {name}, f"cuDNN {allowed}: not {name}"
                )
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = convolutions
        return found

    @check("autocast in bf16")
    def _() -> Numbers:
        model, x = nn.Linear(inner, out, device="cuda"), torch.randn(rows, inner, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            numbers = both(model, (x,), (2 * rows * inner * out, 2 * rows * inner * out), recompute=0)
            require(set(counted(model, (x,)).by_dtype) == {"bf16"}, "not bf16")
        return numbers

    @check("square product, 2·4096³")
    def _() -> Numbers:
        model, x = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16), randn(4096, 4096)
        return both(model, (x,), (2 * 4096**3, 2 * 4096**3), recompute=0)


# -- convolutions and recurrent layers ------------------------------------------------------------------


def _convolution_checks() -> None:
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
        "2d, stride": (
            lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1),
            (4, 16, 32, 32),
            2 * 4 * 32 * (16 * 16) * 16 * 9,
        ),
        "2d, groups and dilation": (
            lambda: nn.Conv2d(16, 32, 3, groups=4, dilation=2),
            (4, 16, 32, 32),
            2 * 4 * 32 * (28 * 28) * 4 * 9,
        ),
        "2d, depthwise, channels last": (
            lambda: nn.Conv2d(16, 16, 3, groups=16).to(memory_format=torch.channels_last),
            (4, 16, 32, 32),
            2 * 4 * 16 * (30 * 30) * 9,
        ),
        "1d, depthwise and causal": (
            lambda: nn.Conv1d(16, 16, 4, groups=16, padding=3),
            (4, 16, 64),
            2 * 4 * 16 * 67 * 4,
        ),
        "3d": (lambda: nn.Conv3d(4, 8, 3), (2, 4, 8, 8, 8), 2 * 2 * 8 * 6**3 * 4 * 27),
        "transposed 2d, output padding": (
            lambda: nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1, groups=2),
            (4, 16, 16, 16),
            2 * 4 * 16 * (16 * 16) * 4 * 9,
        ),
    }
    for name, (make, shape, one) in cases.items():

        @check(f"convolution {name}")
        def _(
            make: Callable[[], nn.Module] = make, shape: tuple[int, ...] = shape, one: int = one
        ) -> Numbers:
            model = make().to("cuda", torch.bfloat16)
            x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            return both(model, (x,), (one, 2 * one), recompute=0)


STEPS, ROWS, FEATURES, HIDDEN = 16, 8, 32, 64
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(
    gates: int, layers: int, directions: int, *, input_grad: bool, weights: str = "all"
) -> tuple[int, int]:
    """Forward and needed backward of a recurrent stack; `weights` says which ones are trained."""
    forward = backward = 0
    for layer in range(layers):
        features = HIDDEN * directions if layer else FEATURES
        by_input = 2 * STEPS * ROWS * gates * HIDDEN * features * directions
        by_state = 2 * STEPS * ROWS * gates * HIDDEN * HIDDEN * directions
        forward += by_input + by_state
        if weights == "last layer" and layer < layers - 1:
            continue
        wants_input = input_grad if layer == 0 or (weights == "last layer") else True
        if weights in ("all", "last layer"):
            backward += by_input + by_state
        elif weights == "input":
            backward += by_input
        backward += by_input * wants_input + by_state - by_state // STEPS
    return forward, backward


def _first(out: Any) -> torch.Tensor:
    return out[0].float().sum()


def recurrent_both(model: nn.Module, batch: Any, right: tuple[int, int], loss_fn: Any) -> Numbers:
    """Forward and backward, counted and executed, against the integers written out by hand.

    cuDNN's kernel reads its weights' storage and cannot run on fake tensors, so the count runs the layer step
    step: what cuDNN computes beyond the need shows in the executed step alone.
    """
    runs(model, batch, loss_fn)
    with gpu_untouched():
        fake = count_flops(model, batch, loss_fn=loss_fn)
    real = executed(model, batch, loss_fn=loss_fn)
    require(parts(fake)[:2] == right, f"counted {parts(fake)[:2]}, by hand {right}")
    require(parts(real)[:2] == right, f"executed {parts(real)[:2]}, by hand {right}")
    require(parts(real)[2] == 2 * right[0] - right[1], f"executed recompute {parts(real)[2]}")
    return {"forward": fake.forward, "backward": fake.backward, "executed_recompute": real.recompute}


def _recurrent_checks() -> None:
    for name, gates in GATES.items():
        for layers, bidirectional in ((1, False), (2, False), (2, True)):
            for input_grad in (False, True):

                @check(f"cuDNN {name}, {layers} layers, bidirectional={bidirectional}, gradient={input_grad}")
                def _(
                    name: str = name,
                    gates: int = gates,
                    layers: int = layers,
                    bidirectional: bool = bidirectional,
                    input_grad: bool = input_grad,
                ) -> Numbers:
                    model = getattr(nn, name)(FEATURES, HIDDEN, layers, bidirectional=bidirectional)
                    x = torch.randn(STEPS, ROWS, FEATURES, device="cuda", requires_grad=input_grad)
                    right = recurrent(gates, layers, 1 + bidirectional, input_grad=input_grad)
                    return recurrent_both(model.to("cuda"), (x,), right, _first)

    @check("cuDNN LSTM, bf16, batch first")
    def _() -> Numbers:
        model = nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True).to("cuda", torch.bfloat16)
        x = torch.randn(ROWS, STEPS, FEATURES, device="cuda", dtype=torch.bfloat16)
        return recurrent_both(model, (x,), recurrent(4, 2, 1, input_grad=False), _first)

    for frozen, weights in (("_l0", "last layer"), ("weight_hh", "input"), ("weight_", "none")):

        @check(f"cuDNN LSTM, {frozen} frozen")
        def _(frozen: str = frozen, weights: str = weights) -> Numbers:
            model = nn.LSTM(FEATURES, HIDDEN, 2).to("cuda")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(frozen not in name)
            x = torch.randn(STEPS, ROWS, FEATURES, device="cuda")
            return recurrent_both(model, (x,), recurrent(4, 2, 1, input_grad=False, weights=weights), _first)

    @check("cuDNN LSTM, packed sequences")
    def _() -> Numbers:
        lengths = [16, 12, 12, 7, 5, 5, 2, 1]
        x = torch.randn(STEPS, ROWS, FEATURES, device="cuda")
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths))
        model = nn.LSTM(FEATURES, HIDDEN).to("cuda")
        by_input = 2 * sum(lengths) * 4 * HIDDEN * FEATURES
        by_state = 2 * sum(lengths) * 4 * HIDDEN * HIDDEN
        right = (by_input + by_state, by_input + 2 * by_state - 2 * ROWS * 4 * HIDDEN * HIDDEN)

        def loss(out: Any) -> torch.Tensor:
            return out[0].data.sum()

        return recurrent_both(model, (packed,), right, loss)


# -- counting changes nothing ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True, dropout_p=0.1))
        self.norm = nn.LayerNorm(HEADS * HEAD)
        self.up, self.down = nn.Linear(HEADS * HEAD, 1024), nn.Linear(1024, HEADS * HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


def _state_checks() -> None:
    @check("a compiled model stays compiled")
    def _() -> Numbers:
        plain = nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16)
        model, batch = torch.compile(plain), data()

        def step() -> None:
            model(*batch).float().sum().backward()

        step()
        before = regions(step)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        count, eager_count = counted(model, batch), counted(plain, batch)
        real = executed(model, batch)
        after = regions(step)
        compiled_again = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
        require(parts(count) == parts(eager_count) == parts(real), f"{count}, {eager_count}, {real}")
        require(before > 0 and after == before, f"compiled regions: {before} before, {after} after")
        require(compiled_again == 0, f"{compiled_again} graphs compiled again")
        return {"forward": count.forward, "backward": count.backward, "regions": after}

    @check("a module compiled in place stays compiled")
    def _() -> Numbers:
        model, batch = nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16), data()
        for block in model:
            block.compile()

        def step() -> None:
            model(*batch).float().sum().backward()

        step()
        before = regions(step)
        count, real = counted(model, batch), executed(model, batch)
        after = regions(step)
        require(parts(count) == parts(real), f"{parts(count)}, {parts(real)}")
        require(before > 0 and after == before, f"compiled regions: {before} before, {after} after")
        return {"forward": count.forward, "backward": count.backward, "regions": after}

    @check("a whole AdamW step, with checkpoints, under autocast")
    def _() -> Numbers:
        model = nn.Sequential(
            Checkpointed(Block(), reentrant=False),
            Checkpointed(Block(), reentrant=True),
            nn.Linear(HEADS * HEAD, 8),
        ).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(SAMPLES, LENGTH, HEADS * HEAD, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with torch.autocast("cuda", torch.bfloat16):
            fake = counted(model, (x,), loss_fn=lambda out: out.float().square().mean())
        real = count_step(step)
        require(parts(fake) == parts(real), f"fake {parts(fake)}, executed {parts(real)}")
        require(dict(fake.by_module) == dict(real.by_module), f"{fake.by_module}, {real.by_module}")
        require(set(fake.by_dtype) == {"bf16"}, f"by dtype: {dict(fake.by_dtype)}")
        return {"forward": fake.forward, "backward": fake.backward, "recompute": fake.recompute}

    @check("memory, random state, parameters, gradients and buffers are as before")
    def _() -> Numbers:
        model = nn.Sequential(nn.Conv1d(LENGTH, LENGTH, 1), nn.BatchNorm1d(LENGTH), Block()).to("cuda")
        x = torch.randn(SAMPLES, LENGTH, HEADS * HEAD, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            model(x).float().sum().backward()
        tensors = [
            *model.parameters(),
            *model.buffers(),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
        copies = [t.detach().clone() for t in tensors]
        with torch.autocast("cuda", torch.bfloat16):
            for convention in (FULL, CAUSAL):
                counted(model, (x,), convention)
            memory = torch.cuda.memory_allocated()
            counted(model, (x,))
        require(all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True)), "a tensor changed")
        return {"memory_bytes": memory}

    @check("memory is as before when counting fails half-way")
    def _() -> Numbers:
        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = Block()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.block(x)
                raise RuntimeError("half-way")

        model = Broken().to("cuda", torch.bfloat16)
        batch, memory = data(), torch.cuda.memory_allocated()
        state = torch.cuda.get_rng_state()
        try:
            count_flops(model, batch)
        except Exception as error:
            require("half-way" in str(error), f"another error: {error}")
        else:
            raise AssertionError("no error")
        require(torch.cuda.memory_allocated() == memory, "memory changed")
        require(torch.equal(torch.cuda.get_rng_state(), state), "the GPU's random state changed")
        return {"memory_bytes": memory}


# -- a real architecture --------------------------------------------------------------------------------


def _transformers_checks() -> None:
    for padded in (False, True):

        @check(f"Llama from transformers, every attention, padded={padded}")
        def _(padded: bool = padded) -> Numbers:
            try:
                from transformers import LlamaConfig, LlamaForCausalLM
            except ImportError as error:
                raise Skipped("transformers is not installed") from error
            ids = torch.randint(0, 999, (SAMPLES, LENGTH), device="cuda")
            mask = torch.ones_like(ids)
            if padded:
                mask[0, :32] = 0
            batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
            found: Numbers = {}
            for convention in (FULL, CAUSAL):
                for implementation in ("eager", "sdpa", "flex_attention"):
                    config = LlamaConfig(
                        vocab_size=1000,
                        hidden_size=256,
                        intermediate_size=512,
                        num_hidden_layers=2,
                        num_attention_heads=8,
                        num_key_value_heads=2,
                        attn_implementation=implementation,
                    )
                    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
                    fake = counted(model, batch, convention)
                    real = executed(model, batch, convention, lambda out: out.loss)
                    require(
                        parts(fake) == parts(real),
                        f"{implementation}, {convention.attention}: {parts(fake)}, executed {parts(real)}",
                    )
                    found[f"{implementation}, {convention.attention}"] = fake.model_flops
            for convention in (FULL, CAUSAL):
                values = {v for k, v in found.items() if k.endswith(convention.attention)}
                require(len(values) == 1, f"{found}")
            return found


def register_checks() -> None:
    """Fill the table of checks; done at the start of a run, since some ask torch what it has."""
    for add in (
        _sdpa_checks,
        _flex_checks,
        _packed_checks,
        _product_checks,
        _convolution_checks,
        _recurrent_checks,
        _state_checks,
        _transformers_checks,
    ):
        add()


# -- running --------------------------------------------------------------------------------------------


def run(name: str) -> dict[str, Any]:
    """One check: its outcome, its integers or what went wrong, and how long it took."""
    began = time.perf_counter()
    row: dict[str, Any] = {"check": name}
    try:
        row |= {"outcome": "PASS", "numbers": CHECKS[name]()}
    except Skipped as reason:
        row |= {"outcome": "SKIP", "reason": str(reason)}
    except Exception as error:
        text = " ".join(str(error).split())
        where = traceback.extract_tb(error.__traceback__)[-1]
        row |= {
            "outcome": "FAIL",
            "reason": f"{type(error).__name__}: {text[:600]}",
            "where": f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}",
        }
    row["seconds"] = round(time.perf_counter() - began, 2)
    return row


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    if row["outcome"] == "PASS":
        said = "  ".join(
            f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"
            for key, value in row["numbers"].items()
        )
    else:
        said = row["reason"] + (f"  ({row['where']})" if "where" in row else "")
    print(f"{row['outcome']}  {row['check']:<62}{row['seconds']:>7.2f} s  {said}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; 1 if one failed."""
    parser = argparse.ArgumentParser(description="Hold counts on fake CUDA tensors against executed steps.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the checks whose name contains TEXT")
    options = parser.parse_args(arguments)
    summary: dict[str, Any] = {
        "benchmark": "gpu kernels",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "truemfu": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device here")
        print(json.dumps({**summary, "skipped": "no CUDA device"}))
        return 0
    summary |= {
        "device": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
    }
    print("  ".join(f"{key} {value}" for key, value in summary.items()), flush=True)
    register_checks()
    torch.manual_seed(0)
    torch.zeros((), device="cuda")
    rows = []
    warned = nullcontext() if sys.warnoptions else warnings.catch_warnings()
    with warned:
        warnings.simplefilter("ignore", UserWarning)
        for name in CHECKS:
            if options.only in name:
                rows.append(run(name))
                show(rows[-1])
    totals = {outcome: sum(r["outcome"] == outcome for r in rows) for outcome in ("PASS", "FAIL", "SKIP")}
    print("  ".join(f"{outcome} {number}" for outcome, number in totals.items()), flush=True)
    print(json.dumps({**summary, **totals, "checks": rows}))
    return 1 if totals["FAIL"] or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
