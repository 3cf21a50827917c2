"""Which sizes of a batch can change, and batches of other sizes made from one example.

    example ──► Layout: input_ids is (samples, length), pixel_values is (images, 3, 24, 24) …
    Layout.sizes(batch)  the sizes of another batch of the same kind, from shapes alone where they tell
    Layout.make(sizes)   a batch of these sizes, for a calibration

What a dimension means follows from the argument's name where models agree on it, else from its dtype and
number of dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ..errors import BatchError
from .batch import CUMULATIVE, GRIDS, documents_of, grids_of, is_readable

Key = str | int

_TOKENS = ("samples", "length")
_NAMED: Mapping[str, tuple[str | None, ...]] = {
    "input_ids": _TOKENS,
    "attention_mask": _TOKENS,
    "token_type_ids": _TOKENS,
    "mm_token_type_ids": _TOKENS,
    "position_ids": _TOKENS,
    "labels": _TOKENS,
    "loss_mask": _TOKENS,
    "inputs_embeds": ("samples", "length", None),
    "decoder_input_ids": ("samples", "decoder_length"),
    "decoder_attention_mask": ("samples", "decoder_length"),
    "input_features": ("samples", None, "frames"),
    "input_values": ("samples", "frames"),
    "pixel_values": ("images", None, "height", "width"),
}
_BY_DIMS: Mapping[tuple[bool, int], tuple[str | None, ...]] = {  # (floating point, dimensions)
    (False, 1): ("samples",),
    (False, 2): _TOKENS,
    (True, 1): ("samples",),
    (True, 2): ("samples", None),
    (True, 3): ("samples", "length", None),
    (True, 4): ("samples", None, "height", "width"),
    (True, 5): ("samples", None, "frames", "height", "width"),
}


@dataclass(frozen=True)
class Visual:
    """How images appear among the tokens: `token` stands for `tokens_per_unit` of a patch or an image."""

    pixels: str
    grid: str | None
    token: int
    start: int
    tokens_per_unit: Fraction


class Layout:
    """The kind of a batch: which keys it has, and which of their dimensions vary together."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.example: dict[Key, Any] = _items(batch)
        self.is_mapping = isinstance(batch, Mapping)
        self.packed = documents_of(batch) is not None
        self.dims: dict[Key, tuple[str | int, ...]] = {}
        self.constants: dict[Key, Any] = {}
        self.grids = [key for key in GRIDS if key in self.example]
        self._config = getattr(model, "config", None)
        for key, value in self.example.items():
            if isinstance(value, torch.Tensor):
                self.dims[key] = self._dims_of(key, value)
            else:
                self.constants[key] = value
        self.visuals = [v for v in map(self._visual, ("pixel_values", "pixel_values_videos")) if v]
        self._own_sizes = self.sizes(batch)
        self._plan_reading()

    @property
    def names(self) -> list[str]:
        """The sizes that vary, in a fixed order."""
        return sorted({d for dims in self.dims.values() for d in dims if isinstance(d, str) and d[0] != "_"})

    def fix(self, name: str) -> None:
        """This size cannot change after all: the model takes it only as it is."""
        self.dims = {
            key: tuple(int(self.example[key].shape[i]) if d == name else d for i, d in enumerate(dims))
            for key, dims in self.dims.items()
        }
        self._own_sizes.pop(name, None)
        self._plan_reading()

    def _dims_of(self, key: Key, tensor: torch.Tensor) -> tuple[str | int, ...]:
        shape = tuple(int(n) for n in tensor.shape)
        if key in CUMULATIVE:
            return ("_documents",)
        if key in GRIDS:
            return ("_grids", 3)
        if key in GRIDS.values() and any(GRIDS[g] == key for g in self.grids):
            return ("_patches", *shape[1:])
        names = _NAMED.get(str(key)) if self.is_mapping else None
        if names is not None and len(names) != len(shape):
            names = ("samples",) if len(shape) == 1 and key == "labels" else None
        if names is None:
            names = _BY_DIMS.get((tensor.is_floating_point(), len(shape)), (None,) * len(shape))
        tokens = self.example.get("input_ids")
        if key == "labels" and names == _TOKENS and self._labels_are_decoded(shape):
            names = ("samples", "decoder_length")
        if key == "pixel_values" and not isinstance(tokens, torch.Tensor):
            names = ("samples", *names[1:])
        if (
            key == "position_ids"
            and shape[0] == 1
            and isinstance(tokens, torch.Tensor)
            and tokens.shape[0] != 1
        ):
            names = (None, *names[1:])
        return tuple(n if n is not None else shape[i] for i, n in enumerate(names))

    def _labels_are_decoded(self, shape: tuple[int, ...]) -> bool:
        """Labels of an encoder-decoder are as long as the decoder's input, not the encoder's."""
        tokens = self.example.get("input_ids")
        other = not isinstance(tokens, torch.Tensor) or tuple(tokens.shape) != shape
        return bool(getattr(self._config, "is_encoder_decoder", False)) or other

    def _visual(self, pixels: str) -> Visual | None:
        ids: Any = self.example.get("input_ids")
        if pixels not in self.example or not is_readable(ids) or self._config is None:
            return None
        kind = "video" if pixels.endswith("videos") else "image"
        token = getattr(self._config, f"{kind}_token_id", getattr(self._config, f"{kind}_token_index", None))
        if token is None:
            return None
        found = (ids == token).flatten().nonzero().flatten()
        grid = next((g for g, p in GRIDS.items() if p == pixels and g in self.example), None)
        units = (
            sum(t * h * w for t, h, w in grids_of(self.example, grid))  # type: ignore[arg-type,misc]
            if grid
            else self.example[pixels].shape[0]
        )
        if not len(found) or not units:
            return None
        start = int(ids.flatten()[max(int(found[0]) - 1, 0)])
        return Visual(pixels, grid, int(token), start, Fraction(len(found), int(units)))

    def _plan_reading(self) -> None:
        self._reading = [
            (
                key,
                len(dims),
                self.example[key].is_floating_point(),
                [(i, d) for i, d in enumerate(dims) if isinstance(d, str) and d[0] != "_"],
                [(i, d) for i, d in enumerate(dims) if isinstance(d, int)],
            )
            for key, dims in self.dims.items()
        ]
        self._reads_values = self.packed or bool(self.grids) or "position_ids" in self.dims
        self._keys = frozenset(self.example)

    def sizes(self, batch: Any) -> dict[str, Any]:
        """The sizes of a batch of this kind; a BatchError where its tensors do not agree with each other."""
        found: dict[str, Any] = {}
        for key, dims in self.dims.items():
            for i, d in enumerate(dims):
                if isinstance(d, str) and d[0] != "_":
                    n = int(batch[key].shape[i])
                    if found.setdefault(d, n) != n:
                        raise BatchError(
                            f"{key!r} has {n} {d} where another tensor of the batch has {found[d]}: "
                            "they must agree"
                        )
        self._read_values(batch, found)
        return found

    def _read_values(self, batch: Any, found: dict[str, Any]) -> None:
        if self.packed:
            found["documents"] = documents_of(batch) or [[found["length"]]] * found["samples"]
        if self.grids:
            found["grids"] = [grid for key in self.grids for grid in grids_of(batch, key)]

    def quick_sizes(self, batch: Any) -> dict[str, Any] | None:
        """Likewise, in microseconds; None for a batch of another kind."""
        if self.is_mapping:
            if not isinstance(batch, Mapping) or batch.keys() != self._keys:
                return None
        elif len(batch) != len(self._keys):
            return None
        found: dict[str, Any] = {}
        for key, count, floating, named, fixed in self._reading:
            value = batch[key]
            if not isinstance(value, torch.Tensor) or value.is_floating_point() is not floating:
                return None
            shape = value.shape
            if len(shape) != count:
                return None
            for i, n in fixed:
                if shape[i] != n:
                    return None
            for i, name in named:
                if found.setdefault(name, shape[i]) != shape[i]:
                    return None
        for key, constant in self.constants.items():
            if batch[key] is not constant and batch[key] != constant:
                return None
        if self._reads_values:
            if (documents_of(batch) is not None) != self.packed:
                return None
            self._read_values(batch, found)
        return found

    def make(self, sizes: Mapping[str, Any]) -> Any:
        """A batch of this kind with these sizes: integers have real values, floating-point tensors none."""
        made: dict[Key, Any] = dict(self.constants)
        documents = sizes.get("documents")
        for key, dims in self.dims.items():
            example = self.example[key]
            shape = [self._extent(d, sizes, key) if isinstance(d, str) else d for d in dims]
            if example.is_floating_point() or example.is_complex():
                made[key] = torch.empty(shape, dtype=example.dtype, device="meta")
            elif key in CUMULATIVE:
                ends = torch.tensor([0, *(n for row in documents or () for n in row)])
                made[key] = ends.cumsum(0).to(example.dtype)
            elif key in GRIDS:
                made[key] = torch.tensor(sizes["grids"], dtype=example.dtype)
            elif key == "attention_mask":
                made[key] = torch.ones(shape, dtype=example.dtype)
            elif key == "position_ids" and len(shape) == 2:
                rows = documents or [[shape[1]]] * shape[0]
                made[key] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
                made[key] = made[key].to(example.dtype)
            else:
                made[key] = torch.full(shape, self._filler(key), dtype=example.dtype)
        for key, value in self.constants.items():
            if documents and isinstance(value, int) and "max" in str(key):
                made[key] = max(n for row in documents for n in row)
        for visual in self.visuals:
            self._place(visual, made, sizes)
        return made if self.is_mapping else tuple(made[i] for i in range(len(made)))

    def _extent(self, name: str, sizes: Mapping[str, Any], key: Key) -> int:
        if name == "_documents":
            return sum(len(row) for row in sizes["documents"]) + 1
        if name == "_grids":
            return len(sizes["grids"])
        if name == "_patches":
            return sum(t * h * w for t, h, w in sizes["grids"])
        return int(sizes[name])

    def _filler(self, key: Key) -> int:
        """An integer that is valid where the example's are, and is no placeholder of an image."""
        example = self.example[key]
        if not is_readable(example) or example.dtype is torch.bool or str(key).endswith("type_ids"):
            return 0
        special = {t for v in self.visuals for t in (v.token, v.start)}
        usual = [n for n in example.flatten()[:4096].tolist() if n not in special and n >= 0]
        return usual[0] if usual else 0

    def _place(self, visual: Visual, made: dict[Key, Any], sizes: Mapping[str, Any]) -> None:
        """Put the placeholders of the images into the tokens, image by image, row by row."""
        ids = made["input_ids"]
        if visual.grid is not None:
            units = [t * h * w for t, h, w in sizes["grids"]]
        else:
            units = [1] * int(sizes["images"])
        counts = [int(visual.tokens_per_unit * n) for n in units]
        rows = ids.shape[0]
        ends = [1] * rows
        types = made.get("mm_token_type_ids")
        for index, count in enumerate(counts):
            row = index * rows // len(counts)
            at = ends[row]
            ids[row, at] = visual.start if visual.start != visual.token else ids[row, 0]
            ids[row, at + 1 : at + 1 + count] = visual.token
            if types is not None:
                types[row, at + 1 : at + 1 + count] = 2 if visual.pixels.endswith("videos") else 1
            if "labels" in made and made["labels"].shape == ids.shape:
                made["labels"][row, at : at + 1 + count] = -100
            ends[row] = at + count + 2

    def tokens_for(self, sizes: Mapping[str, Any]) -> int:
        """The length a row needs for its images' placeholders and a little text."""
        rows, need = int(sizes.get("samples", 1)), [8] * int(sizes.get("samples", 1))
        for visual in self.visuals:
            units = (
                [t * h * w for t, h, w in sizes["grids"]]
                if visual.grid
                else [1] * int(sizes.get("images", 0))
            )
            for index, n in enumerate(units):
                need[index * rows // len(units)] += int(visual.tokens_per_unit * n) + 2
        return max(need)


def _items(batch: Any) -> dict[Key, Any]:
    return dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
