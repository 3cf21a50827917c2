"""The tables of an audit: FLOPs executed by the tensor cores, by kernel, next to counted and expected FLOPs.

    launches ─┬─► KernelWork: operations, active cycles, FLOP per cycle ─┐
    StepCount ┴─► by kind: executed | counted | expected ────────────────┴─► Audit

Expected is the count including known properties of kernels: tiles that overhang their product
(`tile_match`), and attention that computes whole blocks of its mask.

The pipe's active cycles are what an activity counter reads for the step. Some kernels without a product use
the pipe too, and some with products run below the usual rate of their dtype. One ratio covers both, by which
`hybrid` corrects:

    executed_over_activity = executed operations / (active cycles × usual FLOP per cycle)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..tiles import Shape
from .audited import AuditedProduct
from .command import StepCount
from .csv_output import MATRIX_METRIC, PIPE_METRIC, KernelLaunch
from .tile_match import Match, matched_products

_USUAL_RATES: Mapping[str, Mapping[str, int]] = {
    "9.0": {"bf16": 1024, "fp16": 1024, "tf32": 512, "fp8": 2048},
}
"""FLOP per active cycle and sub-core by compute capability and dtype, as measured on an H200."""

_OTHER_PIPES = frozenset(("fp64", "int8"))
_AT_RATE = 0.99


class KernelWork(msgspec.Struct, frozen=True, kw_only=True):
    """All launches of one kernel; values that ncu did not report are None.

    `needed_flops` is what the counted products of these launches need, if each of them was found;
    `pipe_cycles` are all active cycles of the tensor pipe, `matrix_cycles` those with products. Rates are
    operations in an active cycle of one sub-core. A counter of active cycles overstates the work of a kernel
    that is below the usual rate of its dtype.
    """

    name: str
    kind: str
    launches: int
    executed_flops: int | None
    needed_flops: int | None
    dtypes: tuple[str, ...]
    pipe_cycles: int | None
    matrix_cycles: int | None
    non_matrix_cycles: int | None
    flops_per_cycle: float | None
    usual_flops_per_cycle: float | None
    share_of_usual_rate: float | None
    is_below_usual_rate: bool


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Executed FLOPs by kernel (largest first), and the counted FLOPs, if known.

    The mappings by kind have the keys attention, convolution, matmul and other. `counted_by_kind` is what
    the model needs; `expected_by_kind` includes recomputation, tiles and blocks of masks, and has no key
    for a kind whose recomputation is not known. `unmeasured_launches` had no value. `pipe_cycles` are active
    cycles of the tensor pipe, summed over sub-cores, `matrix_cycles` those with matrix instructions.
    """

    kernels: tuple[KernelWork, ...]
    launches: int
    unmeasured_launches: int
    executed_flops: int | None
    executed_by_dtype: dict[str, int]
    executed_by_kind: dict[str, int]
    counted_by_kind: dict[str, int]
    expected_by_kind: dict[str, int]
    tile_flops: int | None
    """Executed beyond 2·m·n·k because tiles overhang, for launches with a matched product, or None."""
    unmatched_flops: int | None
    """Executed by matrix products that match no counted one."""
    products: tuple[AuditedProduct, ...]
    """The matched products, by shape."""
    count: StepCount | None
    pipe_cycles: int | None
    matrix_cycles: int | None
    executed_over_activity: float | None
    """Executed FLOPs relative to the pipe's activity; None if a part of it is not known."""

    @property
    def below_usual_rate(self) -> tuple[KernelWork, ...]:
        """Kernels that need more cycles for their work than usual for their dtype."""
        return tuple(kernel for kernel in self.kernels if kernel.is_below_usual_rate)


def audit_of(launches: Sequence[KernelLaunch], count: StepCount | None = None) -> Audit:
    """Sum launches by kernel; only those of the counting process, if its id is known."""
    own = count.process_id if count is not None else None
    if own is not None and any(launch.process_id == own for launch in launches):
        launches = [launch for launch in launches if launch.process_id == own]
    works = _launch_works(launches, count)
    by_name: dict[str, list[_LaunchWork]] = defaultdict(list)
    by_kind: dict[str, int] = defaultdict(int)
    for work in works:
        by_name[work.launch.name].append(work)
        by_kind[work.kind] += work.executed or 0
    kernels = [_kernel(of_one_name) for of_one_name in by_name.values()]
    products = [work for work in works if work.kind == "matmul" and work.executed]
    found = [work.executed - work.needed for work in products if work.executed and work.needed]
    by_shape: dict[Shape, list[int]] = defaultdict(lambda: [0, 0])
    for work in products:
        if work.match is not None:
            by_shape[work.match.shape][0] += work.match.needed_flops
            by_shape[work.match.shape][1] += work.executed or 0
    tile_flops = sum(found) if found else None
    counted: dict[str, int] = defaultdict(int)
    for operator, amount in (count.model_flops_by_operator if count is not None else {}).items():
        counted[kind_of(operator, otherwise="matmul")] += amount
    unmeasured = sum(work.flops is None for work in works)
    return Audit(
        kernels=tuple(sorted(kernels, key=_most_first)),
        launches=len(launches),
        unmeasured_launches=unmeasured,
        executed_flops=_sum([kernel.executed_flops for kernel in kernels]),
        executed_by_dtype=_flops_by_dtype(works),
        executed_by_kind={kind: amount for kind, amount in by_kind.items() if amount},
        counted_by_kind=dict(counted),
        expected_by_kind={} if count is None else _expected(count, counted, tile_flops or 0),
        tile_flops=tile_flops,
        unmatched_flops=None
        if tile_flops is None
        else sum(w.executed or 0 for w in products if not w.needed),
        products=tuple(
            AuditedProduct(m=m, n=n, k=k, needed_flops=needed, executed_flops=executed)
            for (m, n, k), (needed, executed) in sorted(by_shape.items())
        ),
        count=count,
        pipe_cycles=_sum([kernel.pipe_cycles for kernel in kernels]),
        matrix_cycles=_sum([kernel.matrix_cycles for kernel in kernels]),
        executed_over_activity=None if unmeasured else _over_activity(kernels),
    )


def _over_activity(kernels: Sequence[KernelWork]) -> float | None:
    usual, active = 0.0, _sum([kernel.pipe_cycles for kernel in kernels])
    for kernel in kernels:
        if kernel.executed_flops and not set(kernel.dtypes) <= _OTHER_PIPES:
            if kernel.usual_flops_per_cycle is None:
                return None
            usual += kernel.executed_flops / kernel.usual_flops_per_cycle
    return usual / active if usual and active else None


class _LaunchWork(NamedTuple):
    launch: KernelLaunch
    kind: str
    flops: Mapping[str, int] | None
    match: Match | None

    @property
    def needed(self) -> int | None:
        return None if self.match is None else self.match.needed_flops

    @property
    def executed(self) -> int | None:
        return None if self.flops is None else sum(self.flops.values())


def _launch_works(launches: Sequence[KernelLaunch], count: StepCount | None) -> list[_LaunchWork]:
    """Each launch with its executed FLOPs and, if it matches a counted product, the needed FLOPs."""
    shapes: dict[Shape, int] = defaultdict(int)
    for product in () if count is None else count.products:
        shapes[product.m, product.n, product.k] += product.flops
    works = [_LaunchWork(launch, kind_of(launch.name), launch.tensor_flops(), None) for launch in launches]
    indices = [index for index, work in enumerate(works) if work.kind == "matmul"]
    launched = [(works[index].launch.name, works[index].executed or 0) for index in indices]
    for index, match in zip(indices, matched_products(launched, shapes), strict=True):
        works[index] = works[index]._replace(match=match)
    return works


def _most_first(kernel: KernelWork) -> tuple[int, int, str]:
    return -(kernel.executed_flops or 0), -(kernel.pipe_cycles or 0), kernel.name


def _kernel(works: Sequence[_LaunchWork]) -> KernelWork:
    done = _flops_by_dtype(works)
    launches = [work.launch for work in works]
    executed = _sum([work.executed for work in works])
    active = _sum([launch.metrics.get(PIPE_METRIC) for launch in launches])
    matrix = _sum([launch.metrics.get(MATRIX_METRIC) for launch in launches])
    rate = executed / matrix if executed and matrix else None
    usual = _usual_rate(launches[0].compute_capability, done)
    share = None if rate is None or usual is None else rate / usual
    return KernelWork(
        name=launches[0].name,
        kind=works[0].kind,
        launches=len(launches),
        executed_flops=executed,
        needed_flops=_sum([work.needed for work in works]) if all(work.needed for work in works) else None,
        dtypes=tuple(done),
        pipe_cycles=active,
        matrix_cycles=matrix,
        non_matrix_cycles=None if active is None or matrix is None else active - matrix,
        flops_per_cycle=rate,
        usual_flops_per_cycle=usual,
        share_of_usual_rate=share,
        is_below_usual_rate=share is not None and share < _AT_RATE,
    )


def _flops_by_dtype(works: Sequence[_LaunchWork]) -> dict[str, int]:
    """What these launches executed, by dtype; those without work are left out."""
    by_dtype = sum((Counter(work.flops) for work in works), Counter())
    return dict(sorted(by_dtype.items()))


def _usual_rate(compute_capability: str | None, flops_by_dtype: Mapping[str, int]) -> float | None:
    """FLOP per cycle at which the cycles of all dtypes add up; None if one of them is not known."""
    rates = _USUAL_RATES.get(compute_capability or "", {})
    if not flops_by_dtype or any(dtype not in rates for dtype in flops_by_dtype):
        return None
    cycles = sum(amount / rates[dtype] for dtype, amount in flops_by_dtype.items())
    return sum(flops_by_dtype.values()) / cycles


def _expected(count: StepCount, counted: Mapping[str, int], tile_flops: int) -> dict[str, int]:
    """The expected executed FLOPs by kind, as far as known."""
    expected: dict[str, int] = {}
    if count.attention_blocked_flops is not None:
        expected["attention"] = count.attention_blocked_flops
    others = [kind for kind in counted if kind != "attention"]
    if count.hardware_flops is None or count.attention_flops is None:
        return expected
    executed = count.hardware_flops - count.attention_flops
    recomputed = executed - sum(counted[kind] for kind in others)
    for kind in others:
        # Recomputation is not known by kind: with a single kind, all of it belongs to that.
        if not recomputed or len(others) == 1:
            expected[kind] = counted[kind] + recomputed + (tile_flops if kind == "matmul" else 0)
    return {kind: amount for kind, amount in expected.items() if amount}


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_KINDS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE),
    "convolution": re.compile(r"conv(?!ert)|dgrad|wgrad|fprop", re.IGNORECASE),
    "matmul": re.compile(
        r"gemm|nvjet|matmul|cublas|cutlass|gemv|xmma|(?<![a-z])(?:b|add|badd?b)?mm(?![a-z])", re.IGNORECASE
    ),
}


def kind_of(name: str, otherwise: str = "other") -> str:
    """The kind of work of a kernel or an operator, from its name."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), otherwise)
