"""An observed step computes what an unobserved one does, to the bit, whatever operators it runs and where."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from truemfu import Convention
from truemfu.flops.observe.observer import StepObserver

CONTEXTS = {"gradients": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def module(make: Callable[..., nn.Module], *sizes: Any, **options: Any) -> Callable[..., Any]:
    """A call of a module that is made anew, in training mode or not, with its gradients."""
    training = options.pop("training", True)

    def call(*args: torch.Tensor) -> Any:
        with torch.inference_mode(mode=False), torch.enable_grad():
            made = make(*sizes, **options).train(training)
        return made(*args), list(made.parameters()), list(made.buffers())

    return call


def encoder(**options: Any) -> Callable[..., Any]:
    return module(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.3, **options)


@torch.library.custom_op("truemfu_tests::scores", mutates_args=())
def scores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Calls an operator that autocast handles."""
    return a @ b.mT


@torch.library.custom_op("truemfu_tests::own_scores", mutates_args=(), device_types="cpu")
def own_scores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same with a kernel of this device."""
    return a @ b.mT


for operator in (scores, own_scores):
    operator.register_autograd(lambda context, gradient: (gradient.sum() * torch.ones(5, 8), None))


class Doubling(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_another_mode(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: torch.Tensor) -> torch.Tensor:
        with Doubling():
            return function(*args)

    return call


def recomputed_by_choice(*args: torch.Tensor) -> Any:
    """Selective checkpointing has modes of its own."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(own_scores, *args, use_reentrant=False, context_fn=contexts)


class Wrapped(torch.Tensor):
    """A subclass whose handler calls operators."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*[a.inner if isinstance(a, Wrapped) else a for a in args], **(kwargs or {})))


def of_a_subclass(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return own_scores(Wrapped(a.detach()), Wrapped(b.detach())).inner  # type: ignore[no-any-return]


SEQUENCE, SPARSE = x(2, 5, 16), torch.eye(5, 8).to_sparse()
CASES: dict[str, Case] = {
    "encoder": (encoder(), (SEQUENCE,), {}),
    "encoder, batch first": (encoder(batch_first=True), (SEQUENCE,), {}),
    "encoder, fast path": (encoder(batch_first=True, training=False), (SEQUENCE,), {}),
    "decoder": (module(nn.TransformerDecoderLayer, 16, 2, 32), (SEQUENCE, x(2, 4, 16)), {}),
    "decoder, evaluated": (
        module(nn.TransformerDecoderLayer, 16, 2, 32, batch_first=True, training=False),
        (SEQUENCE, x(2, 4, 16)),
        {},
    ),
    "attention over others": (
        module(nn.MultiheadAttention, 16, 2, kdim=8, vdim=6, batch_first=True),
        (SEQUENCE, x(2, 7, 8), x(2, 7, 6)),
        {},
    ),
    "lstm": (module(nn.LSTM, 16, 8, 2, dropout=0.5, bidirectional=True), (SEQUENCE,), {}),
    "gru": (module(nn.GRU, 16, 8), (SEQUENCE,), {}),
    "batch norm": (module(nn.BatchNorm1d, 5), (SEQUENCE,), {}),
    "convolution": (module(nn.Conv1d, 5, 4, 3), (SEQUENCE,), {}),
    "transposed convolution": (module(nn.ConvTranspose1d, 5, 4, 3), (SEQUENCE,), {}),
    "bags": (module(nn.EmbeddingBag, 9, 4), (torch.arange(8).reshape(2, 4),), {}),
    "bilinear": (F.bilinear, (x(3, 4), x(3, 5), x(6, 4, 5)), {}),
    "bilinear under another mode": (under_another_mode(F.bilinear), (x(3, 4), x(3, 5), x(6, 4, 5)), {}),
    "distances": (torch.cdist, (x(40, 8), x(39, 8)), {}),
    "inverse": (torch.linalg.pinv, (x(6, 4),), {}),
    "inverse, cast": (torch.pinverse, (x(6, 4),), {}),
    "sparse": (lambda b: torch.sparse.mm(SPARSE, b), (x(8, 3),), {}),
    "sparse, added": (lambda c, b: torch.sparse.addmm(c, SPARSE, b), (x(5, 3), x(8, 3)), {}),
    "own operator": (scores, (x(5, 8), x(6, 8)), {}),
    "own operator under another mode": (under_another_mode(own_scores), (x(5, 8), x(6, 8)), {}),
    "own operator, recomputed": (recomputed_by_choice, (x(5, 8), x(6, 8)), {}),
    "own operator of a subclass": (of_a_subclass, (x(5, 8), x(6, 8)), {}),
    "affine grid": (F.affine_grid, (x(2, 2, 3), [2, 1, 4, 4]), {}),
    "dropout": (F.dropout, (x(40, 5), 0.3), {}),
    "attention": (F.scaled_dot_product_attention, (x(2, 2, 5, 8),) * 3, {"dropout_p": 0.25}),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (x(2, 3, 4), x(2, 5, 4)), {}),
    "product with a view": (lambda a, b: a.transpose(0, 1) @ b.mT, (SEQUENCE, x(6, 16)), {}),
    "nested": (
        lambda a, b: F.linear(torch.nested.as_nested_tensor([a, a[:2]]), b).to_padded_tensor(0.0),
        (x(3, 8), x(4, 8)),
        {},
    ),
    "losses": (
        lambda a: [F.cross_entropy(a, torch.arange(4)), F.mse_loss(a, a * 2), F.cosine_similarity(a, a + 1)],
        (x(4, 6),),
        {},
    ),
}


def picture(value: Any) -> Any:
    """All of a result that a program can tell: its bits and how they lie, and how it is differentiated."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.layout is not torch.strided:
        return str(value.layout), picture(value.to_dense())
    bits = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1)).view(torch.uint8)
    facts = value.dtype, value.shape, value.stride(), value.requires_grad, value.is_inference()
    return facts, bytes(bits.numpy())


def results(case: Case, context: str, *, cast: bool, observed: bool) -> list[Any]:
    function, args, options = case
    torch.manual_seed(1)
    given = tree_map(
        lambda a: a.clone().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a, args
    )
    observer = StepObserver(Convention())
    if observed:
        observer.enter()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast), CONTEXTS[context]():
            out = tree_leaves(function(*given, **options))
        tensors = [each for each in out if torch.is_tensor(each) and each.grad_fn is not None]
        if context == "gradients" and tensors:
            sum(each.to_dense().abs().float().nansum() for each in tensors).backward()  # type: ignore[union-attr]
    except Exception as error:  # it is to be the same one
        out = [type(error).__name__, str(error)]
    finally:
        if observed:
            observer.leave()
    inputs = [each for each in tree_leaves(given) if torch.is_tensor(each)]
    leaves = [each for each in (*inputs, *out) if torch.is_tensor(each) and not each.is_inference()]
    return [
        *map(picture, [*out, *inputs, *(each.grad for each in leaves if each.is_leaf)]),
        [each._version for each in inputs],
        picture(torch.get_rng_state()),
    ]


def differences(case: Case) -> list[str]:
    return [
        f"{context}{', autocast' * cast}"
        for context, cast in itertools.product(CONTEXTS, (False, True))
        if results(case, context, cast=cast, observed=False)
        != results(case, context, cast=cast, observed=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_an_unobserved_step(name: str) -> None:
    assert differences(CASES[name]) == []


def _all_operators() -> Iterator[tuple[str, Case]]:
    """The operators that torch tests itself, with some of its samples."""
    missing = types.ModuleType("expecttest")  # torch's samples are in a module that loads it and uses a name
    missing.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", missing)
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if torch.float32 not in op.dtypes or "empty" in op.name:
            continue
        samples: list[Any] = []
        with contextlib.suppress(Exception):  # some need a library that is not there
            torch.manual_seed(0)
            samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32), 200))
        for sample in samples[:: max(1, len(samples) // 2)][:2]:
            yield op.name, (op.op, (sample.input, *sample.args), sample.kwargs)


COMPILED_CHECKS = set(
    "linalg.cond linalg.eigvalsh linalg.svdvals masked.prod max median min nanmedian norm".split()
)
"""Known to differ: torch's compiled code asks whether a mode is active, and then takes another algorithm."""


@pytest.mark.long
def test_results_of_every_operator_are_those_of_an_unobserved_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: different for name, case in _all_operators() if (different := differences(case))}
    assert set(found) <= COMPILED_CHECKS, found
