"""Odd models: whatever a forward pass does in Python, the count equals what a real step executes.

The referee is naive on purpose: real tensors, one formula per operator, summed as they run. It shares no
code with truemfu. Both see the same random numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import resource
import time
from collections import namedtuple
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from truemfu import FlopModel, count_flops, count_step
from truemfu.errors import TruemfuWarning
from truemfu.flops.shadow import tensor_makers

needs_new_torch = pytest.mark.skipif(
    not hasattr(torch, "_grouped_mm"), reason="operators that the referee does not know, before torch 2.8"
)

# -- the referee --


def _attention(products_qk: int, products_v: int) -> Callable[..., int]:
    def flops(q: Any, k: Any, v: Any) -> int:
        pairs = prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (products_qk * q.shape[-1] + products_v * v.shape[-1])

    return flops


def _trilinear(a: tuple[Any, ...]) -> int:
    sizes: list[int] = []
    for tensor, expanded in zip(a[:3], a[3:6], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(expanded):
            shape.insert(dim, 1)
        sizes = [max(pair) for pair in zip(sizes, shape, strict=True)] if sizes else shape
    return 2 * prod(sizes)


def _rnn(a: tuple[Any, ...]) -> int:
    return 2 * a[0].shape[0] * a[0].shape[1] * (a[1].numel() + a[2].numel())


EXECUTED: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "mm": lambda a, _: 2 * a[0].numel() * a[1].shape[-1],
    "bmm": lambda a, _: 2 * a[0].numel() * a[1].shape[-1],
    "addmm": lambda a, _: 2 * a[1].numel() * a[2].shape[-1],
    "baddbmm": lambda a, _: 2 * a[1].numel() * a[2].shape[-1],
    "addbmm": lambda a, _: 2 * a[1].numel() * a[2].shape[-1],
    "_grouped_mm": lambda a, _: 2 * a[0].numel() * a[1].shape[-1],
    "mv": lambda a, _: 2 * a[0].numel(),
    "dot": lambda a, _: 2 * a[0].numel(),
    "addmv": lambda a, _: 2 * a[1].numel(),
    "convolution": lambda a, out: 2 * (a[0] if a[6] else out).numel() * prod(a[1].shape[1:]),
    "convolution_backward": lambda a, _: (
        2 * (a[1] if a[7] else a[0]).numel() * prod(a[2].shape[1:]) * sum(a[10][:2])
    ),
    "_scaled_dot_product_flash_attention_for_cpu": lambda a, _: _attention(1, 1)(*a[:3]),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda a, _: _attention(3, 2)(*a[1:4]),
    "mkldnn_rnn_layer": lambda a, _: _rnn(a),
    "mkldnn_rnn_layer_backward": lambda a, _: 2 * _rnn(a),
    "_trilinear": lambda a, _: _trilinear(a),
}
BIAS_FIRST = ("addmm", "baddbmm", "addbmm", "addmv")
SUSPECT = ("mm", "mv", "dot", "conv", "attention", "einsum", "linear", "matmul", "rnn", "bilinear")


class Executed(TorchDispatchMode):
    """Adds up the products of every operator that runs, and refuses one it does not know."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", str(func))
        if name in EXECUTED:
            operand = args[1] if name in BIAS_FIRST else args[0]
            self.flops += EXECUTED[name](args, out) * (4 if operand.is_complex() else 1)
        else:
            assert not any(word in name for word in SUSPECT), f"{name} may be a product"
        return out


def _seed() -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)


def _loss(out: Any) -> torch.Tensor:
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        out = [getattr(out, f.name) for f in dataclasses.fields(out)]
    if isinstance(loss := getattr(out, "loss", None), torch.Tensor):
        return loss
    if isinstance(out, dict) and isinstance(out.get("loss"), torch.Tensor):
        return out["loss"]
    tensors = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    total = sum((t.sum() for t in tensors[1:]), tensors[0].sum())
    return total.real if total.is_complex() else total


def executed(model: nn.Module, args: tuple[Any, ...]) -> tuple[int, int]:
    """FLOPs executed before the final backward pass, and in the whole step."""
    _seed()
    with Executed() as step:
        loss = _loss(model(*args))
        forward = step.flops
        loss.backward()
    model.zero_grad(set_to_none=True)
    return forward, step.flops


# -- the models --

X = torch.linspace(-1, 1, 96).reshape(6, 16)
IDS = (torch.arange(21) * 17 % 50).reshape(3, 7)
SEQUENCE = torch.linspace(-1, 1, 160).reshape(2, 5, 16)
WIDE = torch.linspace(-1, 1, 2 * 6 * 81).reshape(2, 6, 9, 9)


class Odd(nn.Module):
    """Two linear layers, an embedding, whatever modules a case adds, and the case's function as forward."""

    def __init__(self, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.up, self.down, self.embed = nn.Linear(16, 24), nn.Linear(24, 16), nn.Embedding(50, 16)
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    modules: Callable[[], dict[str, Any]] = dict
    train: bool = True

    def build(self) -> Odd:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Odd(self.function, **self.modules()).train(self.train)


PLAIN: list[Case] = []
"""No fused kernel and no checkpoint: all that runs is the model's work, so recompute must be 0."""
FUSED: list[Case] = []
"""Kernels or checkpoints that do more than the model needs: only the whole must agree."""
DERIVED: list[Case] = []
"""Derivatives inside forward: when they run is no matter of forward and backward; the whole is."""


def case(
    into: list[Case], name: str, *args: Any, modules: Callable[[], dict[str, Any]] = dict, train: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        into.append(Case(name, function, args, modules, train))
        return function

    return keep


def rows(m: Odd, ids: torch.Tensor) -> torch.Tensor:
    """A product over as many rows as there are ids."""
    return m.up(m.embed(ids))


# values of the batch decide


@case(PLAIN, "early exit taken", X.abs())
@case(PLAIN, "early exit not taken", -X.abs())
def _(m: Odd, x: torch.Tensor) -> Any:
    h = m.up(x)
    return h if x.sum() > 0 else m.down(h)


@case(PLAIN, "boolean index", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return m.up(m.embed(ids)[ids > 25])


@case(PLAIN, "masked_select", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return m.up(torch.masked_select(m.embed(ids), (ids > 25)[..., None]).view(-1, 16))


@case(PLAIN, "masked_select of ids", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return rows(m, ids.masked_select(ids[:, :1] > 10))


@case(PLAIN, "nonzero", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return rows(m, (ids > 25).nonzero()[:, 0]) + rows(m, torch.nonzero(ids > 25, as_tuple=True)[0])


@case(PLAIN, "where", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return m.up(m.embed(ids)[torch.where(ids > 25)]).sum() + rows(m, torch.where(ids > 25, ids, 0)).sum()


@case(PLAIN, "unique", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    values, _, counts = torch.unique(ids % 9, return_inverse=True, return_counts=True)
    runs = torch.unique_consecutive(ids.flatten() // 20)
    return rows(m, values).sum() + rows(m, counts).sum() + rows(m, runs).sum()


@case(PLAIN, "bincount", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return sum(
        rows(m, torch.zeros(int(n), dtype=torch.long)).sum() for n in torch.bincount(ids.flatten() % 5)
    )


@case(PLAIN, "item", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return rows(m, ids[:, : ids.max().item() % 7 + 1]).sum() + rows(m, ids[:, : int(ids.min()) + 1]).sum()


@case(PLAIN, "tolist", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return sum(rows(m, ids[i, : n % 5 + 1]).sum() for i, n in enumerate(ids[:, 1].tolist()))


@case(PLAIN, "numpy", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    kept = torch.from_numpy(np.unique(ids.numpy() % 9)), torch.as_tensor(np.asarray(ids)[:, :2])
    return sum(rows(m, k).sum() for k in kept)


@case(PLAIN, "a tensor of scalars", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    ends = torch.tensor([ids[0, 1], ids[1, 1], 3])
    return rows(m, ids.flatten()[: ends.sum() % 20 + 1])


@case(PLAIN, "arithmetic on plain numbers", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return (
        rows(m, ids[:, : torch.div(7, 2, rounding_mode="trunc")]).sum()
        + rows(m, ids[:, : torch.add(1, 1)]).sum()
    )


@case(PLAIN, "an index that is a tensor", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    return sum(rows(m, ids[:, : ids.max() % 7 + 1]).sum() for _ in range(ids[0, 1] % 5 + 1))


@case(PLAIN, "a loop over a tensor", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    h = m.embed(ids)
    for n in ids[0]:
        if n > 25:
            h = m.down(m.up(h))
    return h


@case(PLAIN, "split and repeat by values", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    flat = ids.flatten()
    parts = m.embed(flat).split([5, *(flat[:1] + 16).tolist()])
    return sum(m.up(p).sum() for p in parts) + rows(m, flat.repeat_interleave(flat % 3)).sum()


@case(PLAIN, "questions about all of a tensor", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    h = m.embed(ids)
    if (ids == ids[0, 0]).any() and ids[0, 0] in ids and torch.equal(ids, ids.clone()):
        h = m.down(m.up(h))
    return m.up(h) if not torch.allclose(X, X + 1) else h


@case(PLAIN, "integers written in place", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    total = torch.zeros((), dtype=torch.long)
    for row in ids:
        total += row[1]
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 2:5] = True
    mask[ids > 40] = True
    mask.index_put_((torch.tensor([1]), torch.tensor([1])), torch.tensor(True))
    return m.up(m.embed(ids)[mask]).sum() + rows(m, ids[:, : int(total) % 7 + 1]).sum()


@case(PLAIN, "views written in turn", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    base = torch.arange(24).view(4, 6)
    earlier = base + 1
    row = base[1]
    part = row[2:]
    base.mul_(2)
    part[0] = 5
    base.view(-1)[0] = 7
    row.copy_(torch.arange(6) * 3)
    out = torch.empty(6, dtype=torch.long)
    torch.add(row, 3, out=out)
    return rows(m, ids.flatten()[: int(base.sum() + earlier.sum() + part.sum() + out.sum()) % 20 + 1])


@case(PLAIN, "a tensor given other data", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    total = torch.zeros((), dtype=torch.long)
    total.data = ids[0, 1] % 5 + 1
    return rows(m, ids[:, : int(total)])


@case(PLAIN, "an unknown value written into a view", IDS)
def _(m: Odd, ids: torch.Tensor) -> Any:
    base = torch.zeros(4, 16)
    copy = base.clone()
    base[1].copy_(m.embed(ids)[0, 0].detach())
    return rows(m, ids[:, : int(copy.sum()) + 2])


@case(PLAIN, "values of buffers and plain tensors", IDS, modules=lambda: {"plain": [torch.arange(5)]})
def _(m: Odd, ids: torch.Tensor) -> Any:
    return rows(m, ids[:, : int(m.plain[0].sum()) % 7 + 1])


# experts: which of them a token visits is unknown, how many is not


def _experts(m: Odd, x: torch.Tensor, chosen: torch.Tensor) -> Any:
    return sum(m.up(x[(chosen == e).nonzero()[:, 0]]).sum() for e in range(24))


@case(PLAIN, "experts by argmax", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return _experts(m, x, m.up(x).argmax(-1))


@case(PLAIN, "experts by max", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return _experts(m, x, m.up(x).softmax(-1).max(dim=-1).indices)


@case(PLAIN, "experts by two best", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return _experts(m, x, m.up(x).topk(2, -1)[1])


@case(PLAIN, "experts by sort", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return _experts(m, x, m.up(x).sort(-1, descending=True)[1][:, :3])


@case(PLAIN, "experts by argsort", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return _experts(m, x, m.up(x).argsort(-1)[:, :2])


@case(PLAIN, "experts drawn", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return _experts(m, x, torch.multinomial(m.up(x).softmax(-1), 2))


@case(PLAIN, "experts by mask", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    mask = F.one_hot(m.up(x).topk(2, -1)[1], 24).permute(2, 1, 0)
    return sum(m.up(x[torch.where(mask[e])[1]]).sum() for e in range(24))


@case(PLAIN, "experts sorted into one list", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    chosen = m.up(x).topk(2, -1)[1].flatten()
    ordered = x.repeat_interleave(2, 0)[chosen.argsort()]
    parts = ordered.split(torch.bincount(chosen, minlength=24).tolist())
    return sum(m.up(part).sum() for part in parts if len(part))


@case(PLAIN, "experts that choose tokens", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    chosen = m.up(x).topk(2, 0)[1]
    return sum(m.up(x[chosen[:, e]]).sum() for e in range(24))


# outputs and inputs of many kinds

Pair = namedtuple("Pair", "loss other")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    steps: int = 3
    nothing: Any = None


@dataclasses.dataclass
class SlottedOutput:
    __slots__ = ("logits",)
    logits: torch.Tensor


case(PLAIN, "a dataclass", X)(lambda m, x: Output(m.down(m.up(x))))
case(PLAIN, "a dataclass with slots", X)(lambda m, x: SlottedOutput(m.down(m.up(x))))
case(PLAIN, "a named tuple with a loss", X)(lambda m, x: Pair(m.up(x).sum(), m.down(m.up(x))))
case(PLAIN, "a dict with a loss", X)(lambda m, x: {"loss": m.up(x).sum(), "logits": m.down(m.up(x))})
case(PLAIN, "mixed outputs", X)(
    lambda m, x: {"a": (m.up(x), 3), "n": x.argmax(), "l": [m.down(m.up(x)), None]}
)
case(PLAIN, "an empty batch", X[:0])(lambda m, x: m.down(m.up(x)))
case(FUSED, "attention over an empty batch", SEQUENCE[:0, None])(
    lambda m, x: F.scaled_dot_product_attention(m.up(x), m.up(x), m.up(x))
)
case(PLAIN, "nested arguments", {"a": [X, (X, 2)]}, None)(
    lambda m, d, n: m.up(d["a"][0]) + m.up(d["a"][1][0])
)
case(PLAIN, "a batch that needs a gradient", X.clone().requires_grad_())(lambda m, x: m.up(x))

# parts that get no gradient, and odd weights


@case(PLAIN, "no_grad inside", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    with torch.no_grad():
        h = m.up(x)
    return m.down(h)


case(PLAIN, "detached", X)(lambda m, x: m.down(m.up(x).detach()))
case(PLAIN, "a weight used twice", X)(lambda m, x: x @ m.up.weight.T @ m.up.weight)
case(PLAIN, "complex", X, modules=lambda: {"c": nn.Parameter(torch.randn(16, 5, dtype=torch.cfloat))})(
    lambda m, x: torch.complex(x, x) @ m.c
)
case(PLAIN, "sparse gradients", IDS, modules=lambda: {"s": nn.Embedding(50, 16, sparse=True)})(
    lambda m, ids: m.up(m.s(ids))
)
case(PLAIN, "bags", IDS, modules=lambda: {"s": nn.EmbeddingBag(50, 16)})(lambda m, ids: m.up(m.s(ids)))
case(PLAIN, "bags by offset", IDS, modules=lambda: {"s": nn.EmbeddingBag(50, 16, mode="max")})(
    lambda m, ids: m.up(m.s(ids.flatten(), torch.tensor([0, 4, 9])))
)
case(PLAIN, "bilinear", X, modules=lambda: {"s": nn.Bilinear(16, 16, 4)})(lambda m, x: m.s(x, x))
case(PLAIN, "einsum", X)(lambda m, x: torch.einsum("bi,oi,bk->ok", x, m.up.weight, x))
case(PLAIN, "vectors", X)(
    lambda m, x: (m.up.weight @ x[0]) @ (m.down.weight.T @ x[1]) + torch.dot(x[0], m.down.bias)
)
case(PLAIN, "matrix power and chains", X)(
    lambda m, x: (
        torch.linalg.multi_dot([x, m.up.weight.T, m.down.weight.T])
        @ torch.linalg.matrix_power(m.up.weight[:16, :16], 5)
    )
)
case(
    PLAIN,
    "convolutions",
    WIDE,
    modules=lambda: {"c": nn.Conv2d(6, 8, 3, 2, groups=2), "t": nn.ConvTranspose2d(8, 4, 3, 2, groups=2)},
)(lambda m, x: m.t(m.c(x)))


@case(PLAIN, "autocast inside", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.down(m.up(x))


@case(PLAIN, "saved tensors kept elsewhere", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return m.down(F.relu(m.up(x)))


# random choices: the real step that follows would make the same ones, or a note says what was assumed


@case(PLAIN, "layers dropped by Python's and numpy's numbers", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    h = m.up(x)
    for _ in range(6):
        if random.random() < 0.5 or np.random.rand() < 0.5:
            h = m.up(m.down(h))
    return h


@case(PLAIN, "layers rarely dropped by torch's numbers", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return m.down(m.up(x)) if torch.rand([]) > 0.05 else x @ m.up.weight.T


@case(PLAIN, "stochastic depth", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    return m.down(m.up(x)) * torch.empty(x.shape[0], 1).bernoulli_(0.8) / 0.8


case(PLAIN, "shuffled", X)(lambda m, x: m.up(x[torch.randperm(len(x))[:4]]))

# derivatives inside forward


@case(DERIVED, "gradient penalty", X)
def _penalty(m: Odd, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(m.down(F.silu(m.up(x))).sum(), x, create_graph=True)
    return grad.pow(2).sum()


@case(DERIVED, "a gradient as an input", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    return m.up(torch.autograd.grad(m.down(F.silu(m.up(x))).sum(), x)[0])


@case(DERIVED, "gradient of a gradient", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(m.down(m.up(x).tanh()).tanh().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return second.sum()


@case(
    DERIVED, "convolution differentiated twice", WIDE, modules=lambda: {"c": nn.Conv2d(6, 8, 3, 2, groups=2)}
)
def _(m: Odd, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(m.c(x).tanh().sum(), x, create_graph=True)[0]


@case(DERIVED, "backward inside forward", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    m.down(m.up(x)).sum().backward()
    return m.up(x)


def _twice(m: Odd, x: torch.Tensor) -> torch.Tensor:
    return m.down(m.up(x)).pow(2).sum()


case(DERIVED, "func.grad", X)(lambda m, x: torch.func.grad(functools.partial(_twice, m))(x))
case(DERIVED, "vmap of grad", X)(
    lambda m, x: torch.func.vmap(torch.func.grad(functools.partial(_twice, m)))(x)
)
case(DERIVED, "jacobian", X)(lambda m, x: torch.func.jacrev(lambda r: m.down(m.up(r)).tanh().sum(0))(x))
case(PLAIN, "vmap", X)(lambda m, x: torch.func.vmap(lambda row: m.down(m.up(row)))(x))
case(PLAIN, "forward-mode derivative", X)(
    lambda m, x: torch.func.jvp(lambda r: m.down(m.up(r)), (x,), (x,))[1]
)
case(PLAIN, "functional_call", X)(
    lambda m, x: torch.func.functional_call(m.up, dict(m.up.named_parameters()), (x,))
)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.T @ x


case(FUSED, "a function with its own backward", X)(lambda m, x: _Product.apply(x, m.up.weight))

# attention and recurrent layers of torch


def _layer(**options: Any) -> Any:
    return lambda: {"t": nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)}


def _heads(**options: Any) -> Any:
    return lambda: {"t": nn.MultiheadAttention(16, 4, batch_first=True, **options)}


PADDING = torch.arange(5)[None] > torch.tensor([[3], [4]])
for _train in (True, False):
    _mode = "training" if _train else "evaluation"
    case(FUSED, f"heads in {_mode}", SEQUENCE, modules=_heads(), train=_train)(lambda m, x: m.t(x, x, x)[0])
    case(FUSED, f"heads without weights in {_mode}", SEQUENCE, modules=_heads(dropout=0.1), train=_train)(
        lambda m, x: m.t(x, x, x, need_weights=False)[0]
    )
    case(FUSED, f"an encoder layer in {_mode}", SEQUENCE, modules=_layer(), train=_train)(lambda m, x: m.t(x))
    case(FUSED, f"a padded encoder in {_mode}", SEQUENCE, PADDING, train=_train,
         modules=lambda: {"t": nn.TransformerEncoder(_layer()()["t"], 2)})(
        lambda m, x, padding: m.t(x, src_key_padding_mask=padding)
    )  # fmt: skip
case(
    FUSED,
    "encoder and decoder",
    SEQUENCE,
    SEQUENCE[:, :3],
    modules=lambda: {"t": nn.Transformer(16, 4, 1, 1, 32, batch_first=True)},
)(lambda m, x, y: m.t(x, y))
for _kind in (nn.LSTM, nn.GRU):
    case(
        FUSED,
        f"{_kind.__name__}",
        SEQUENCE,
        modules=lambda kind=_kind: {"r": kind(16, 8, 2, bidirectional=True)},
    )(lambda m, x: m.r(x)[0])

    @case(FUSED, f"{_kind.__name__} over packed sequences", SEQUENCE, torch.tensor([2, 5]),
          modules=lambda kind=_kind: {"r": kind(16, 8, batch_first=True)})  # fmt: skip
    def _(m: Odd, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(m.r(packed)[0])[0]


# checkpoints


@case(FUSED, "checkpoints in a checkpoint", X)
def _(m: Odd, x: torch.Tensor) -> Any:
    def inner(h: torch.Tensor) -> torch.Tensor:
        return F.relu(m.down(F.relu(m.up(h))))

    def outer(h: torch.Tensor) -> Any:
        return checkpoint(inner, checkpoint(inner, h, use_reentrant=False), use_reentrant=False)

    return checkpoint(outer, x, use_reentrant=False)


case(FUSED, "a checkpoint with dropout", X)(
    lambda m, x: checkpoint(lambda h: m.down(F.dropout(m.up(h))), x, use_reentrant=False)
)
case(FUSED, "a checkpointed choice by values", IDS)(
    lambda m, ids: checkpoint(lambda i: m.up(m.embed(i)[i > 25]) * 2, ids, use_reentrant=False)
)
case(FUSED, "a checkpointed derivative", X)(
    lambda m, x: checkpoint(lambda h: _penalty(m, h), x, use_reentrant=False)
)


@pytest.mark.parametrize("c", PLAIN, ids=lambda c: c.name)
def test_counted_is_executed(c: Case) -> None:
    forward, whole = executed(c.build(), c.args)
    _seed()
    count = count_flops(c.build(), c.args)
    assert (count.forward, count.backward, count.recompute) == (forward, whole - forward, 0)
    assert whole > 0 or c.name == "an empty batch"


@pytest.mark.parametrize("c", FUSED, ids=lambda c: c.name)
def test_counted_is_executed_with_what_kernels_and_checkpoints_add(c: Case) -> None:
    forward, whole = executed(c.build(), c.args)
    _seed()
    count = count_flops(c.build(), c.args)
    if "derivative" not in c.name:
        assert count.forward == forward
    assert count.hardware_flops == whole


@pytest.mark.parametrize("c", DERIVED, ids=lambda c: c.name)
def test_derivatives_inside_forward_are_model_work(c: Case) -> None:
    _, whole = executed(c.build(), c.args)
    _seed()
    count = count_flops(c.build(), c.args)
    assert (count.model_flops, count.recompute) == (whole, 0)


@pytest.mark.parametrize("c", DERIVED[:3], ids=lambda c: c.name)
def test_a_checkpoint_around_a_derivative_changes_no_model_flops(c: Case) -> None:
    def checkpointed(m: Odd, x: torch.Tensor) -> Any:
        return checkpoint(lambda h: c.function(m, h), x, use_reentrant=False)

    plain, model = count_flops(c.build(), c.args), Odd(checkpointed)
    for again in (count_flops(model, c.args), count_step(lambda: _loss(model(*c.args)).backward())):
        assert again.hardware_flops > plain.hardware_flops
        assert again.model_flops == plain.model_flops


@pytest.mark.parametrize("c", [*PLAIN[:4], *DERIVED[:3], FUSED[0], FUSED[-1]], ids=lambda c: c.name)
def test_a_step_that_runs_counts_what_it_executes(c: Case) -> None:
    model = c.build()
    _, whole = executed(model, c.args)
    _seed()
    assert count_step(lambda: _loss(model(*c.args)).backward()).hardware_flops == whole


# -- what only a GPU works out --


Moves = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """Takes a tensor to be on a device that is not the CPU; `meta` stands for a GPU where there is none."""
    moved: list[torch.Tensor] = []
    usual = tensor_makers.device_of

    def device_of(tensor: torch.Tensor) -> torch.device:
        return torch.device("meta") if any(tensor is other for other in moved) else usual(tensor)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return tensor

    monkeypatch.setattr(tensor_makers, "device_of", device_of)
    return move


def _by_histogram(m: Odd, x: torch.Tensor, experts: torch.Tensor) -> Any:
    """Routing as transformers writes it for a GPU: a histogram of integers, which the CPU does not have."""
    counts = torch.histc(experts.int(), bins=4, min=0, max=3)
    assert counts.dtype is torch.int32
    return m.up(x[: int(counts[1])]).sum() + m.down(m.up(x[: int(counts[3])])).sum()


def test_a_histogram_of_integers_is_followed(elsewhere: Moves) -> None:
    experts = elsewhere(torch.tensor([3, 1, 3, 0, 1, 3, 3, 7, -1]))  # four of 3, two of 1, two outside
    count = count_flops(Odd(_by_histogram), (X, experts), backward=False)
    one = 2 * 16 * 24
    assert (count.forward, count.method, count.notes) == ((2 + 2 * 4) * one, "count on fake tensors", ())


@pytest.mark.parametrize(
    ("bins", "lowest", "highest"), [(4, 0, 3), (7, -2, 9), (3, 0, 0), (100, 0, 99), (5, 0, 64)]
)
def test_a_followed_histogram_has_the_bins_of_a_gpu(
    bins: int, lowest: int, highest: int, elsewhere: Moves
) -> None:
    """A GPU bins integers with integer arithmetic; a range of nothing stands for that of the values."""
    values = torch.arange(64).square() % 61 - 3
    first, last = (lowest, highest) if lowest < highest else (int(values.min()), int(values.max()))
    expected = [0] * bins
    for value in values.tolist():
        if first <= value <= last:
            expected[min((value - first) * bins // (last - first), bins - 1)] += 1

    def as_expected(m: Odd, x: torch.Tensor, values: torch.Tensor) -> Any:
        counts = torch.histc(values.int(), bins=bins, min=lowest, max=highest)
        return m.up(x) if counts.tolist() == expected else x

    count = count_flops(Odd(as_expected), (X, elsewhere(values)), backward=False)
    assert count.forward == 2 * 6 * 16 * 24


# -- higher-order operators: the branches' work must not vanish --


def _cond(m: Odd, x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda h: m.down(m.up(h)), lambda h: h * 2, (x,))


def _while(m: Odd, x: torch.Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    with torch.no_grad():
        return while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, m.down(m.up(h))), (torch.tensor(0), x))[1]


@pytest.mark.parametrize(
    ("function", "forward"),
    [(_cond, 2 * 6 * 2 * 16 * 24), (_while, 3 * 2 * 6 * 2 * 16 * 24)],
    ids=["cond", "while"],
)
@needs_new_torch
def test_the_branch_that_runs_is_counted_or_named(function: Any, forward: int) -> None:
    model = Odd(function)
    with torch.no_grad():
        with pytest.warns(TruemfuWarning, match="higher_order"):
            counted = count_flops(model, (X.abs(),), backward=False)
        executed = count_step(lambda: model(X.abs()))
        for count in (counted, executed):
            assert count.forward == forward or count.uncounted


# -- what hangs on activations --


def _fixed_point(m: Odd, x: torch.Tensor) -> Any:
    for _ in range(30):
        x, before = torch.tanh(m.down(torch.tanh(m.up(x)))) * 0.1, x
        if (x - before).norm() < 1e-2:
            break
    return x


def _finite(m: Odd, x: torch.Tensor) -> Any:
    h = m.up(x)
    return m.down(h) if h.isfinite().all() else h


def _selected(m: Odd, x: torch.Tensor) -> Any:
    h = m.up(x)
    return m.down(h[h[:, 0] > 0])


def _random_rows(m: Odd, x: torch.Tensor) -> Any:
    return m.up(x[torch.rand(len(x)) < 0.5])


def _random_length(m: Odd, x: torch.Tensor) -> Any:
    return m.up(x[: int(torch.randint(1, 6, (1,)))])


@pytest.mark.parametrize("function", [_fixed_point, _finite, _selected, _random_rows, _random_length])
def test_what_hangs_on_activations_is_counted_on_real_values_or_said_to_be_assumed(function: Any) -> None:
    torch.manual_seed(0)
    model = Odd(function)
    _, whole = executed(model, (X,))
    _seed()
    count = count_flops(model, (X,))
    assert count.hardware_flops == whole or any("assumed" in note for note in count.notes)
    assert count.forward > 0


# -- models and batches without data --


def _on(place: str, tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    return {"real": tensor, "meta": tensor.to("meta"), "fake": mode.from_tensor(tensor)}[place]


@pytest.mark.parametrize("batch_on", ["real", "meta", "fake"])
@pytest.mark.parametrize("model_on", ["real", "meta", "fake"])
def test_a_model_or_a_batch_without_data_counts_the_same(model_on: str, batch_on: str) -> None:
    def build() -> Odd:
        return Odd(
            lambda m, ids: m.t(m.embed(ids)), t=nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        )

    expected = count_flops(build(), (IDS,))
    mode = FakeTensorMode()
    if model_on == "fake":
        with mode:
            model = build()
    else:
        with torch.device("meta" if model_on == "meta" else "cpu"):
            model = build()
    batch = (_on(batch_on, IDS, mode),)
    assert count_flops(model, batch) == expected
    assert FlopModel.fit(model, batch)(batch).model_flops == expected.model_flops


def test_a_count_inside_another_mode_is_the_same_and_unseen() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Odd(lambda m, x: m.down(m.up(x)))
    expected = count_flops(model, (X,))
    with FlopCounterMode(display=False) as theirs:
        assert count_flops(model, (X,)) == expected
    assert theirs.get_total_flops() == 0
    with FakeTensorMode():
        assert count_flops(model, (X,)) == expected


class Wide(nn.Module):
    """A layer of a very large decoder: grouped queries, gated feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, width // 4, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, 128)).transpose(1, 2)
        k, v = (t.unflatten(-1, (-1, 128)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_model_of_hundreds_of_billions_takes_seconds_and_no_memory() -> None:
    width, layers, samples, length, vocab = 16384, 100, 4, 8192, 128_000
    with torch.device("meta"):
        blocks = [Wide(width) for _ in range(layers)]
        model = nn.Sequential(nn.Embedding(vocab, width), *blocks, nn.Linear(width, vocab, bias=False))
    ids = torch.zeros(samples, length, dtype=torch.long)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    count = count_flops(model, (ids,))
    assert time.process_time() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB: one GiB
    products = layers * (2 * width * width + width * width // 4 + 12 * width * width) + vocab * width
    pairs = layers * 2 * samples * length * length * 2 * width
    forward = 2 * samples * length * products + pairs
    assert (count.forward, count.backward) == (forward, 2 * forward)


# -- architectures beyond the public cases --

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
FEW = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
MOE = {**FEW, "num_local_experts": 4, "num_experts_per_tok": 2}
VISION = {"image_size": 32, "patch_size": 8, "num_channels": 3}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {**SMALL, "ffn_dim": 40, "word_embed_proj_dim": 32, "layerdrop": 0.0},
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
    "GPTNeoXForCausalLM": SMALL,
    "FalconForCausalLM": {**SMALL, "num_kv_heads": 2},
    "PhiForCausalLM": SMALL,
    "CohereForCausalLM": {**SMALL, "num_key_value_heads": 2},
    "GptOssForCausalLM": {**MOE, "sliding_window": 8},
    "OlmoeForCausalLM": {**FEW, "num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": {**MOE},
    "RwkvForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 99},
    "ModernBertForMaskedLM": {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 8},
    "DebertaV2ForMaskedLM": {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "AlbertForMaskedLM": {**SMALL, "embedding_size": 16},
    "LongformerForMaskedLM": {**SMALL, "attention_window": 8},
    "BigBirdForMaskedLM": {**SMALL, "attention_type": "original_full"},
    "XLNetLMHeadModel": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40, "vocab_size": 99},
    "BartForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 99,
    },
    "MT5ForConditionalGeneration": {
        "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4, "vocab_size": 99,
        "decoder_start_token_id": 0,
    },
    "Dinov2ForImageClassification": {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, **VISION},
    "SegformerForImageClassification": {
        "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 16,
    },
    "Wav2Vec2ForCTC": {
        **SMALL, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "layerdrop": 0.0,
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.0,
    },
}  # fmt: skip


def _architecture(name: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    config = cls.config_class(
        **{**ARCHITECTURES[name], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    )
    torch.manual_seed(0)
    model = cls(config).train()
    ids = torch.arange(2 * 24).reshape(2, 24) % 90 + 3
    if name.startswith("Wav2Vec2"):
        return model, {"input_values": torch.rand(2, 400), "labels": ids[:, :3]}
    if "Image" in name:
        return model, {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", ARCHITECTURES)
@needs_new_torch
def test_an_architecture_of_transformers_counts_what_it_executes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the configurations are those of transformers 5")
    model, batch = _architecture(name)
    _seed()
    with Executed() as step:
        loss = model(**batch).loss
        forward = step.flops
        loss.backward()
    model.zero_grad(set_to_none=True)
    _seed()
    count = count_flops(model, batch)
    assert (count.forward, count.hardware_flops) == (forward, step.flops)
    assert not count.uncounted


def test_a_write_without_a_cpu_kernel_is_followed_no_further() -> None:
    library = torch.library.Library("truemfu_odd", "DEF")
    library.define("write_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("write_", lambda x: x, "Meta")
    try:

        class Writes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                steps = torch.arange(4)
                assert int(steps.sum()) == 6  # it was read, so that the write cannot wait
                torch.ops.truemfu_odd.write_(steps)
                return self.layer(x) * steps[:, None]

        assert count_flops(Writes().to("meta"), (torch.ones(4, 8, device="meta"),)).forward == 2 * 4 * 8 * 8
    finally:
        library._destroy()


def test_a_write_that_returns_nothing_is_followed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            times = torch.zeros(1, dtype=torch.long)
            torch._foreach_add_([times], 3)
            for _ in range(int(times)):
                x = self.layer(x)
            return x

    assert count_flops(Writes(), (torch.ones(4, 8),)).forward == 3 * 2 * 4 * 8 * 8
