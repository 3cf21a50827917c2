"""A self-check before the first count of a process: a known model must give FLOPs that were computed by hand.

Private names that a new version of torch lacks are detected by lookup (`torch_private/`). A name that still
exists but behaves differently shows only in the counts. So a small model with one instance of everything that
a count could get wrong is counted on fake tensors and in a real run: matrix products, a frozen weight, both
kinds of checkpoint, a custom Function, attention, a value that is read. If a count differs, counting is
refused.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ...convention import Convention
from ...errors import ModelError, one_line
from ...torch_private.dispatch import disable_modes
from ..flop_count import FlopCount
from ..isolation.process_state import uncompiled, untouched_casts
from .calls import follow_modules, following_calls
from .counted_step import CountedStep
from .counting_mode import CountingMode

_SAMPLES, _LENGTH, _INPUTS, _WIDTH, _HEADS = 2, 4, 3, 8, 2
_PLACES = _SAMPLES * _LENGTH
_NARROW = 2 * _PLACES * _INPUTS * _WIDTH
"""FLOPs of the product in `first`."""
_WIDE = 2 * _PLACES * _WIDTH * _WIDTH
"""FLOPs of the product in each other layer."""
_PAIRED = 2 * _SAMPLES * _LENGTH * _LENGTH * _WIDTH
"""FLOPs of one product of attention, over all heads."""

FORWARD = _NARROW + 5 * _WIDE + 2 * _PAIRED
BACKWARD = _NARROW + 9 * _WIDE + 4 * _PAIRED
"""`first` has no gradient for its input, `frozen` none for its weight; all other products have both."""
RECOMPUTE = 4 * _WIDE + _PAIRED
"""What checkpoints and a Function recompute, and the scores that fused attention recomputes in its backward
pass."""
BY_MODULE = {
    "": FORWARD + BACKWARD,
    "first": 2 * _NARROW,
    "frozen": 2 * _WIDE,
    "one": 3 * _WIDE,
    "two": 3 * _WIDE,
    "three": 3 * _WIDE,
    "function_layer": 3 * _WIDE,
    "attention": 6 * _PAIRED,
}


class _Layer(nn.Module):
    """A linear layer whose initialisation draws no random numbers."""

    def __init__(self, inputs: int, *, is_trained: bool = True) -> None:
        super().__init__()
        weight = torch.full((_WIDTH, inputs), 0.1, device="cpu", dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=is_trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class _Product(torch.autograd.Function):
    """A product that is recomputed in the backward pass, where its shapes are those of a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight).tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad * (1 - torch.mm(x, weight).tanh().square())
        return torch.mm(grad, weight.t()), torch.mm(x.t(), grad)


class _FunctionLayer(_Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x.flatten(0, 1), self.weight)  # type: ignore[no-untyped-call]
        return product.reshape(x.shape)


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (_HEADS, -1)).transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)


class _KnownModel(nn.Module):
    """One instance of everything that a count could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = _Layer(_INPUTS), _Layer(_WIDTH, is_trained=False)
        self.one, self.two, self.three = _Layer(_WIDTH), _Layer(_WIDTH), _Layer(_WIDTH)
        self.function_layer, self.attention = _FunctionLayer(_WIDTH), _Attention()
        self.register_buffer("samples", torch.tensor(_SAMPLES, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples: Any = self.samples
        x = self.frozen(self.first(x[: int(samples)]).tanh())
        x = _checkpointed(lambda y: self.two(self.one(y).tanh()).tanh(), x, is_reentrant=False)
        x = _checkpointed(lambda y: self.three(y).tanh(), x, is_reentrant=True)
        attended: torch.Tensor = self.attention(self.function_layer(x))
        return attended


def _checkpointed(region: Any, x: torch.Tensor, *, is_reentrant: bool) -> torch.Tensor:
    ran: torch.Tensor = checkpoint(region, x, use_reentrant=is_reentrant, preserve_rng_state=False)
    return ran


_state = threading.local()
_verdict: str | None = None
"""How the count of the known model is wrong; empty if it is right, None before the check."""


def check_known_model() -> None:
    """Count the known model, once per process; raise ModelError if its FLOPs are wrong."""
    global _verdict
    if _verdict is None and not getattr(_state, "is_checking", False):
        _state.is_checking = True
        try:
            _verdict = _first_difference()
        except Exception as error:
            raise ModelError(_refusal(one_line(error))) from error  # the next count tries again
        finally:
            _state.is_checking = False
    if _verdict:
        raise ModelError(_refusal(_verdict))


def _refusal(what: str) -> str:
    return f"this version of torch ({torch.__version__}) counts a known model wrongly: {what}"


def _first_difference() -> str:
    """The first difference, in one line; empty if there is none."""
    for count in (_on_fake_tensors, _in_a_real_run):
        found = count()
        by_module = {name: found.by_module.get(name, 0) for name in BY_MODULE}
        for what, counted, known in (
            ("forward", found.forward, FORWARD),
            ("backward", found.backward, BACKWARD),
            ("recomputed", found.recompute, RECOMPUTE),
            *((f"in {name}", by_module[name], known) for name, known in BY_MODULE.items() if name),
        ):
            if counted != known:
                return f"{counted} FLOPs {what}, not {known}"
    return ""


def _example() -> torch.Tensor:
    return torch.full((_SAMPLES, _LENGTH, _INPUTS), 0.1, device="cpu", dtype=torch.float32)


def _on_fake_tensors() -> FlopCount:
    with disable_modes(), torch.inference_mode(False):
        model, x = _KnownModel(), _example()
    step = CountedStep(
        model, (x,), {}, Convention(), backward=True, loss_fn=None, documents=None, device=None
    )
    tally, method, _ = step.run()
    return tally.result(method=method)


def _in_a_real_run() -> FlopCount:
    """The same step in a real run, with a backward pass that might be differentiated, as in `count_step`."""
    tally = CountingMode(Convention())
    with disable_modes(), torch.inference_mode(False), torch.enable_grad(), untouched_casts(), uncompiled():
        model, x = _KnownModel(), _example()
        follow_modules(model, tally)
        with torch.autograd.set_multithreading_enabled(False), following_calls(tally), tally:
            model(x).sum().backward()
    return tally.result(method="")
