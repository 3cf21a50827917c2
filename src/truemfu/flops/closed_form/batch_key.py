"""What the work of a batch can depend on: its kind, its sizes, and the lengths that its values state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ...errors import BatchError
from ...torch_private.dispatch import FakeTensor
from ...torch_private.trees import tree_flatten, tree_leaves
from ..batch import CUMULATIVE, GRIDS, documents_of, grids_of, is_readable
from ..isolation.process_state import autocast_state

Sizes = tuple[tuple[str, int], ...]
"""Sizes by name."""
Lengths = tuple[tuple[str, tuple[int, ...]], ...]
"""Lengths by what they are of, in ascending order."""

DOCUMENTS = "documents"
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


def kind_and_sizes(batch: Mapping[Any, Any]) -> tuple[tuple[Hashable, ...], Sizes]:
    """Equal for batches that differ in their sizes alone; and every dimension of every tensor, by name."""
    kind: list[Hashable] = []
    sizes: list[tuple[str, int]] = []
    for key, value in batch.items():
        leaves = [value] if isinstance(value, torch.Tensor) else tree_flatten(value)[0]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                name = str(key) if leaf is value else f"{key}.{number}"
                kind.append((name, leaf.dim(), leaf.dtype, leaf.requires_grad))
                sizes += [(f"{name}[{i}]", size) for i, size in enumerate(leaf.shape)]
            elif type(leaf) is int and leaf > 0:  # tokens of a step, say: its work is fitted like sizes
                kind.append((key, int))
                sizes.append((f"{key}.{number}", leaf))
            else:
                kind.append((key, type(leaf), leaf if isinstance(leaf, _PLAIN) else None))
    return tuple(kind), tuple(sizes)


def lengths_in(batch: Any) -> Lengths:
    """What the values of a batch say of its work: lengths of documents, patches of images."""
    found: list[tuple[str, tuple[int, ...]]] = []
    documents = documents_of(batch)
    if documents is not None:
        found.append((DOCUMENTS, tuple(sorted(length for row in documents for length in row))))
    for key in GRIDS if isinstance(batch, Mapping) else ():
        if grids := grids_of(batch, key):
            found.append((key, tuple(sorted(t * h * w for t, h, w in grids))))
    return tuple(found)


def sizes_of_lengths(lengths: Lengths) -> Sizes:
    """The sizes that attention within such lengths depends on."""
    return tuple(
        size
        for name, each in lengths
        for size in (
            (f"{name}.number", len(each)),
            (f"{name}.sum", sum(each)),
            (f"{name}.sum_of_squares", sum(length * length for length in each)),
        )
    )


class BatchKey(NamedTuple):
    """What a batch shows of its work without being counted."""

    kind: tuple[Hashable, ...]
    sizes: Sizes
    grids: tuple[tuple[int, int, int], ...]
    """The grids of its images: their work is no function of the sizes."""
    documents: tuple[int, ...]
    """The lengths of its packed documents."""

    @classmethod
    def of(cls, batch: Any) -> BatchKey | None:
        """The key of a batch; None if it holds something that cannot be compared by shape."""
        if not isinstance(batch, (Mapping, tuple, list)):
            return None
        arguments = _flat(batch)
        grids = []
        for name, value in arguments.items():
            own_name = name.rpartition(".")[2]
            if own_name in CUMULATIVE or own_name in GRIDS:
                if not is_readable(value):
                    raise BatchError(
                        f"{own_name!r} has no values (it is a meta or fake tensor), and the work of the "
                        "batch depends on them: pass it as a CPU tensor"
                    )
                grids += grids_of(arguments, name) if own_name in GRIDS else []
        if not all(map(_is_comparable, tree_leaves(arguments))):
            return None
        kind, sizes = kind_and_sizes(arguments)
        lengths = lengths_in(batch)
        documents = dict(lengths).get(DOCUMENTS, ())
        call = isinstance(batch, Mapping), autocast_state().dtypes, bool(documents)
        return cls((*call, *kind), (*sizes, *sizes_of_lengths(lengths)), tuple(grids), documents)


def _flat(batch: Any) -> dict[str, Any]:
    """The arguments by name or position; those of a mapping inside have its name before theirs."""
    found: dict[str, Any] = {}
    for key, value in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": item for name, item in _flat(value).items()}
        else:
            found[str(key)] = value
    return found


def _is_comparable(leaf: Any) -> bool:
    """Whether a plain value, or a tensor whose work depends on its shape alone."""
    if not isinstance(leaf, torch.Tensor):
        return isinstance(leaf, _PLAIN)
    is_dense = leaf.layout is torch.strided and not leaf.is_nested
    return is_dense and type(leaf) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
