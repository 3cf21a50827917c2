"""Generates batches of other sizes from an example; only integer tensors have values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ..batch import CUMULATIVE, GRIDS, grids_of, is_readable
from ..host_copy import on_host
from .config_numbers import merge_size
from .dimension_names import Key
from .layout import Layout, arguments_of


@dataclass(frozen=True)
class Visual:
    """How images appear among the tokens: each patch or image is `tokens_per_unit` tokens of id `token`."""

    pixels: str
    grid: str | None
    token: int
    start: int
    tokens_per_unit: Fraction


class BatchMaker:
    """Generates batches like an example, of other sizes."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._example = arguments_of(batch)
        self._model, self._config = model, getattr(model, "config", None)
        self.visuals = [v for v in map(self._visual, ("pixel_values", "pixel_values_videos")) if v]

    def _visual(self, pixels: str) -> Visual | None:
        ids: Any = self._example.get("input_ids")
        if pixels not in self._example or self._config is None:
            return None
        kind = "video" if pixels.endswith("videos") else "image"
        token = getattr(self._config, f"{kind}_token_id", getattr(self._config, f"{kind}_token_index", None))
        if token is None or not isinstance(ids, torch.Tensor):
            return None
        grid = next((g for g, p in GRIDS.items() if p == pixels and g in self._example), None)
        if not is_readable(ids):
            return self._visual_by_config(pixels, grid, int(token))
        ids = on_host(ids)
        found = (ids == token).flatten().nonzero().flatten()
        units = (
            sum(t * h * w for t, h, w in grids_of(self._example, grid))  # type: ignore[arg-type,misc]
            if grid
            else self._example[pixels].shape[0]
        )
        if not len(found) or not units:
            return None
        start = int(ids.flatten()[max(int(found[0]) - 1, 0)])
        return Visual(pixels, grid, int(token), start, Fraction(len(found), int(units)))

    def _visual_by_config(self, pixels: str, grid: str | None, token: int) -> Visual | None:
        """The same if the tokens cannot be read: the configuration gives the number per image."""
        if grid is not None:
            tokens_per_unit = Fraction(1, merge_size(self._model) ** 2)
        else:
            stated = getattr(self._config, "image_seq_length", None)
            if not isinstance(stated, int):
                return None
            tokens_per_unit = Fraction(stated)
        start = getattr(self._config, "vision_start_token_id", None)
        return Visual(pixels, grid, token, start if isinstance(start, int) else token, tokens_per_unit)

    def make(self, layout: Layout, sizes: Mapping[str, Any]) -> Any:
        """A batch of this layout with these sizes."""
        return _call(layout, self._made(layout, sizes))

    def own(self, layout: Layout, sizes: Mapping[str, Any]) -> Any:
        """The example itself; integer tensors without values are generated."""
        return _call(layout, self._filled(layout, sizes))

    def other(self, layout: Layout, sizes: Mapping[str, Any]) -> Any:
        """The example with other values where a model's work is likely to depend on them.

        A mask without padding gets some, tokens lose their labels, a scalar tensor gets another number.
        None if there is no such tensor.
        """
        filled = self._filled(layout, sizes)
        changed = {
            key: other
            for key in layout.tensors
            if (other := self._changed(key, filled[key], layout)) is not None
        }
        return _call(layout, {**filled, **changed}) if changed else None

    def _changed(self, key: Key, value: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        if value.is_floating_point() or value.is_complex() or not value.numel() or value.dim() not in (0, 2):
            return None
        value = on_host(value).clone()
        first = value.flatten()[0].item()
        if value.dim() == 0:
            return torch.full_like(value, first - 1 if first > 0 else first + 1)
        tail = value[:, -(-2 * value.shape[1] // 3) :]
        if "mask" in str(key) and not (layout.is_packed or self.visuals):
            if first not in (0, 1) or not bool((value == first).all()):
                return None
            tail.fill_(1 - first)
        elif key == "labels" and bool((value >= 0).all()):
            tail.fill_(-100)
        else:
            return None
        return value if tail.numel() else None

    def _filled(self, layout: Layout, sizes: Mapping[str, Any]) -> dict[Key, Any]:
        without = [
            key
            for key, t in layout.tensors.items()
            if not t.is_floating and not is_readable(self._example[key])
        ]
        try:
            made = self._made(layout, sizes) if without else {}
        except IndexError:  # the row is too short for the placeholders of its images
            made = {}
        return {**self._example, **{key: made[key] for key in without if key in made}}

    def _made(self, layout: Layout, sizes: Mapping[str, Any]) -> dict[Key, Any]:
        made: dict[Key, Any] = dict(layout.constants)
        documents = sizes.get("documents")
        for key, tensor in layout.tensors.items():
            example = self._example[key]
            shape = [_extent(d, sizes) if isinstance(d, str) else d for d in tensor.dims]
            if example.is_floating_point() or example.is_complex():
                made[key] = torch.empty(
                    shape, dtype=example.dtype, device="meta", requires_grad=example.requires_grad
                )
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
            elif key == "position_ids" and len(shape) == 1 and documents:
                made[key] = torch.cat([torch.arange(n) for n in documents[0]]).to(example.dtype)
            else:
                made[key] = torch.full(shape, self._filler(key), dtype=example.dtype)
        for key in layout.constants:
            if documents and layout.is_longest(key):
                made[key] = max(n for row in documents for n in row)
        for visual in self.visuals:
            self._insert_placeholders(visual, made, sizes)
        return made

    def _filler(self, key: Key) -> int:
        """An integer that is valid for this argument and is not an image placeholder."""
        example = self._example[key]
        if not is_readable(example) or example.dtype is torch.bool or str(key).endswith("type_ids"):
            return 0
        special = {t for v in self.visuals for t in (v.token, v.start)}
        usual = [n for n in on_host(example.flatten()[:4096]).tolist() if n not in special and n >= 0]
        return usual[0] if usual else 0

    def _insert_placeholders(self, visual: Visual, made: dict[Key, Any], sizes: Mapping[str, Any]) -> None:
        """Insert the image placeholders into the tokens, image by image, row by row."""
        ids = made["input_ids"]
        if visual.grid is not None:
            units = [t * h * w for t, h, w in sizes["grids"]]
        else:
            units = [1] * int(sizes.get("images", self._example[visual.pixels].shape[0]))
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
        """The row length needed for the image placeholders and a little text."""
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


def _call(layout: Layout, made: dict[Key, Any]) -> Any:
    """Arguments as the model takes them."""
    if layout.inside is not None:
        return {layout.inside: made} if isinstance(layout.inside, str) else (made,)
    return made if layout.is_mapping else tuple(made[i] for i in range(len(made)))


def _extent(name: str, sizes: Mapping[str, Any]) -> int:
    if name == "_documents":
        return sum(len(row) for row in sizes["documents"]) + 1
    if name == "_grids":
        return len(sizes["grids"])
    if name == "_patches":
        return sum(t * h * w for t, h, w in sizes["grids"])
    return int(sizes[name])
