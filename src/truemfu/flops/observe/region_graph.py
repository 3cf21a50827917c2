"""The products of a compiled region, read from the text of its graph.

Inductor keeps with each compiled region the graph that it lowered, as Python source in which every value is
annotated with its dtype, shape and device. The text is stored with the region in torch's caches on disk, so
it is there for code that this process did not compile itself, unlike the graph.

    mm: "f32[s77, 32][32, 1]cpu" = torch.ops.aten.mm.default(where, permute_7)

A size may be an expression of symbols, whose values are the sizes of the region's inputs. In the graph of a
backward pass, what does not depend on an incoming gradient is a part of the forward pass that runs again.

Inductor replaces some products before this graph. A product with an inner dimension of one becomes an outer
product, one with a single row or column a sum of products: both are recognised by their shapes. A product
whose sizes do not suit the hardware is padded with zeros, and its result cut back: see `executed`.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2", "f8e4m3fnuz": "float8_e4m3fnuz", "f8e5m2fnuz": "float8_e5m2fnuz",
    "f8e8m0fnu": "float8_e8m0fnu", "f4e2m1fnx2": "float4_e2m1fn_x2", "c32": "complex32", "c64": "complex64",
    "c128": "complex128", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "b8": "bool",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\[[^\]]*\])?(?P<device>[\w:]*)")
_OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Max": max,
    "Min": min,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
_PADDED = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
"""The operators that inductor pads, and the positions of their factors."""


class RegionError(Exception):
    """The products of a region cannot be read; the text is a clause that says why."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """An operator of a region that may multiply matrices; tensors in it are on the meta device.

    `executed` are the positional arguments that the region really multiplies, where they are padded.
    `used` are the positions of those results that the graph uses, of several.
    `recomputes` tells, in a backward graph, that it belongs to the forward pass.
    """

    name: str
    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    device: str
    recomputes: bool
    used: frozenset[int] = frozenset()
    executed: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class _Node:
    name: str
    target: str
    """The operator as `library::name`; empty for a value that no operator returns."""
    call: ast.Call | None
    overload: str
    users: tuple[str, ...]
    depends_on_gradient: bool
    item: int
    """The position of a value among an operator's several results; else -1."""


@dataclass(frozen=True)
class RegionGraph:
    """A graph that was read: its inputs in order, the annotation of each value, its nodes in order."""

    inputs: tuple[str, ...]
    annotations: Mapping[str, str]
    nodes: Mapping[str, _Node]

    def products(
        self, sizes: Sequence[Any], *, is_backward: bool, matters: Callable[[str], bool]
    ) -> Iterator[Product]:
        """The products for inputs of these sizes (an integer, or a tensor's shape, for each input).

        `matters` selects operators by name. RegionError if a size cannot be derived from the inputs.
        """
        values = _Values(self, sizes)
        for node in self.nodes.values():
            if node.call is None:
                continue
            recomputes = is_backward and not node.depends_on_gradient
            written_out = _written_out(self, node, values)
            if written_out is not None:
                name = "mm" if written_out[0].dim() == 2 else "bmm"
                yield Product(
                    name=f"aten::{name}",
                    operator=getattr(torch.ops.aten, name).default,
                    args=written_out,
                    kwargs={},
                    out=values.of(node.name),
                    device=values.device(node.name),
                    recomputes=recomputes,
                )
            elif matters(node.target):
                yield _product(self, node, values, recomputes)


@functools.lru_cache(maxsize=64)
def read_graph(text: str) -> RegionGraph:
    """Read the text of a graph; RegionError if it is not what this module knows."""
    try:
        module = ast.parse(text.replace("<lambda>", "_"))
        body = next(n for n in module.body if isinstance(n, ast.ClassDef)).body
        forward = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    except (SyntaxError, StopIteration, ValueError, RecursionError) as error:
        raise RegionError("the graph of compiled code cannot be read") from error
    annotations: dict[str, str] = {}
    inputs = tuple(argument.arg for argument in forward.args.args[1:])
    for argument in forward.args.args[1:]:
        _annotate(annotations, argument.arg, argument.annotation)
    tainted = {name for name in inputs if name.startswith("tangents")}
    users: dict[str, list[str]] = {}
    found: list[tuple[str, ast.expr, bool]] = []
    for statement in forward.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name, value = statement.target.id, statement.value
            _annotate(annotations, name, statement.annotation)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
        else:
            continue
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            continue  # a value that is released
        used = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        if used & tainted:
            tainted.add(name)
        for other in used:
            users.setdefault(other, []).append(name)
        found.append((name, value, bool(used & tainted)))
    nodes = {
        name: _node(name, value, tuple(users.get(name, ())), is_tainted) for name, value, is_tainted in found
    }
    return RegionGraph(inputs, annotations, nodes)


def _node(name: str, value: ast.expr, users: tuple[str, ...], depends_on_gradient: bool) -> _Node:
    value = _without_random_state(value)
    target, overload = _target(value)
    call = value if isinstance(value, ast.Call) and target else None
    item = -1
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        item = value.slice.value if isinstance(value.slice.value, int) else -1
    return _Node(name, target, call, overload, users, depends_on_gradient, item)


def _without_random_state(value: ast.expr) -> ast.expr:
    """The call of an operator that another one runs with a saved random state, as a checkpoint does."""
    if not isinstance(value, ast.Call) or "rng_state" not in _target(value)[0]:
        return value
    for position, argument in enumerate(value.args):
        if isinstance(argument, ast.Attribute):
            call = ast.Call(func=argument, args=value.args[position + 1 :], keywords=value.keywords)
            return call if _target(call)[0] else value
    return value


def _annotate(annotations: dict[str, str], name: str, annotation: ast.expr | None) -> None:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotations[name] = annotation.value


def _target(value: ast.expr) -> tuple[str, str]:
    """The operator that an expression calls, as `library::name`, and its overload; empty if it is none."""
    path: list[str] = []
    callee = value.func if isinstance(value, ast.Call) else None
    while isinstance(callee, ast.Attribute):
        path.insert(0, callee.attr)
        callee = callee.value
    if not isinstance(callee, ast.Name) or callee.id != "torch" or path[:1] != ["ops"] or len(path) < 3:
        return "", ""
    return f"{path[1]}::{path[2]}", path[3] if len(path) > 3 else ""


class _Values:
    """The values of a graph for given sizes of its inputs."""

    def __init__(self, graph: RegionGraph, sizes: Sequence[Any]) -> None:
        if len(sizes) != len(graph.inputs):
            raise RegionError("compiled code was called with other inputs than its graph has")
        self._annotations = graph.annotations
        self._symbols: dict[str, int] = {}
        for name, size in zip(graph.inputs, sizes, strict=True):
            annotation = graph.annotations.get(name, "")
            if isinstance(size, int):
                self._bind(annotation.removeprefix("Sym(").removesuffix(")"), size)
            elif size is not None and (match := _TENSOR.fullmatch(annotation)):
                for text, length in zip(_split(match["shape"]), size, strict=False):
                    self._bind(text, length)

    def _bind(self, text: str, value: int) -> None:
        if text.isidentifier():
            self._symbols.setdefault(text, value)

    def of(self, name: str) -> Any:
        """A tensor on the meta device, an integer, or None if the graph does not annotate the value."""
        annotation = self._annotations.get(name, "")
        if annotation.startswith("Sym("):
            return self._size(annotation[4:-1])
        if (match := _TENSOR.fullmatch(annotation)) is None:
            return None
        dtype = getattr(torch, _DTYPES.get(match["dtype"], ""), None)
        if dtype is None:
            raise RegionError(f"compiled code contains values of an unknown dtype ({match['dtype']})")
        shape = [self._size(text) for text in _split(match["shape"])]
        return torch.empty(shape, dtype=dtype, device="meta")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if the value is not a tensor, or if it cannot be derived."""
        try:
            value = self.of(name)
        except RegionError:
            return None
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    def device(self, name: str) -> str:
        """The device of a tensor in the compiled code."""
        match = _TENSOR.fullmatch(self._annotations.get(name, ""))
        return match["device"] if match else ""

    def _size(self, text: str) -> int:
        try:
            return self._evaluate(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, KeyError, TypeError, ZeroDivisionError) as error:
            raise RegionError(f"a size in compiled code is not derived from its inputs ({text})") from error

    def _evaluate(self, expression: ast.expr) -> int:
        match expression:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return self._symbols[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATIONS[type(op)](self._evaluate(left), self._evaluate(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(operand)
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return _FUNCTIONS[name](*(self._evaluate(argument) for argument in arguments))
        raise KeyError(ast.dump(expression))

    def argument(self, expression: ast.expr) -> Any:
        """The value of an argument; None for what has no size, such as a device or a subgraph."""
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.of(name)
            case ast.List(elts=elements):
                return [self.argument(element) for element in elements]
            case ast.Tuple(elts=elements):
                return tuple(self.argument(element) for element in elements)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
                return -value  # type: ignore[operator]
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
                return getattr(torch, attribute, None)
        return None


def _split(shape: str) -> list[str]:
    """The sizes of a shape; commas inside a function's parentheses do not separate."""
    sizes, depth, start = [], 0, 0
    for position, character in enumerate(shape):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            sizes.append(shape[start:position].strip())
            start = position + 1
    return [*sizes, shape[start:].strip()] if shape.strip() else []


def _product(graph: RegionGraph, node: _Node, values: _Values, recomputes: bool) -> Product:
    assert node.call is not None
    args = tuple(values.argument(argument) for argument in node.call.args)
    kwargs = {k.arg: values.argument(k.value) for k in node.call.keywords if k.arg is not None}
    library, _, name = node.target.partition("::")
    packet = getattr(getattr(torch.ops, library, None), name, None)
    unpadded = _unpadded(graph, node, values, args)
    return Product(
        name=node.target,
        operator=getattr(packet, node.overload, packet) if node.overload else packet,
        args=unpadded or args,
        kwargs=kwargs,
        out=values.of(node.name),
        device=values.device(node.name) or next(map(values.device, _names(node.call)), ""),
        recomputes=recomputes,
        used=frozenset(graph.nodes[user].item for user in node.users if user in graph.nodes),
        executed=args if unpadded else None,
    )


def _names(expression: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id != "torch"]


def _unpadded(
    graph: RegionGraph, node: _Node, values: _Values, args: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """The arguments of a padded product before padding; None if it is not padded, or not by the compiler.

    The compiler pads factors so that they still fit each other, and cuts the result back.
    """
    assert node.call is not None
    if node.target not in _PADDED:
        return None
    positions, sources = _PADDED[node.target], list(args)
    for position in positions:
        argument = node.call.args[position]
        pad = graph.nodes.get(argument.id) if isinstance(argument, ast.Name) else None
        if pad is not None and pad.call is not None and pad.target == "aten::constant_pad_nd":
            sources[position] = values.argument(pad.call.args[0])
    left, right = (sources[position] for position in positions)
    is_padded = any(sources[position] is not args[position] for position in positions)
    if not is_padded or left is None or right is None or left.shape[-1] != right.shape[-2]:
        return None
    needed = (*left.shape[:-1], right.shape[-1])
    is_cut = all(graph.nodes[user].target == "aten::slice" for user in node.users if user in graph.nodes)
    return tuple(sources) if needed == values.shape(node.name) or (is_cut and node.users) else None


def _written_out(
    graph: RegionGraph, node: _Node, values: _Values
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The factors of a product that inductor has written as elementwise work; None if this is none.

    Autograd multiplies a gradient elementwise only by values that broadcast to the gradient's own shape, so
    (M, 1) by (1, N) in a backward pass is an outer product; in a forward pass (1, N) is a transposed weight.
    """
    if node.target == "aten::mul" and node.overload == "Tensor":
        shapes = _factor_shapes(node, values)
        if shapes is None or any(len(shape) != 2 for shape in shapes):
            return None
        (m, k), (inner, n) = shapes
        if k != 1 or inner != 1 or m == 1 or n == 1:
            return None
        if not (node.depends_on_gradient or _is_transposed_input(graph, node)):
            return None
        return _matrices((m, 1), (1, n), values.of(node.name))
    if node.target == "aten::sum" and node.call is not None and len(node.call.args) > 1:
        argument = node.call.args[0]
        factor = graph.nodes.get(argument.id) if isinstance(argument, ast.Name) else None
        if factor is None or factor.target != "aten::mul" or factor.overload != "Tensor":
            return None
        shapes = _factor_shapes(factor, values)
        if shapes is None or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) not in (3, 4):
            return None
        (*batch, m, k, one), (*other, first, inner, n) = shapes
        summed = values.argument(node.call.args[1])
        if [one, first, batch, k] != [1, 1, other, inner] or (m > 1 and n > 1) or summed != [len(batch) + 1]:
            return None
        return _matrices((*batch, m, k), (*batch, k, n), values.of(node.name))
    return None


def _matrices(
    left: Sequence[int], right: Sequence[int], result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.empty(shape, dtype=result.dtype, device="meta") for shape in (left, right))  # type: ignore[return-value]


def _factor_shapes(node: _Node, values: _Values) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    assert node.call is not None
    names = [argument.id for argument in node.call.args if isinstance(argument, ast.Name)]
    shapes = [values.shape(name) for name in names]
    if len(shapes) != 2 or shapes[0] is None or shapes[1] is None:
        return None
    return shapes[0], shapes[1]


def _is_transposed_input(graph: RegionGraph, node: _Node) -> bool:
    """Whether the second factor is an input of the region, transposed."""
    assert node.call is not None
    second = node.call.args[1]
    permuted = graph.nodes.get(second.id) if isinstance(second, ast.Name) else None
    if permuted is None or permuted.target != "aten::permute" or permuted.call is None:
        return False
    source = permuted.call.args[0]
    return isinstance(source, ast.Name) and source.id in graph.inputs
