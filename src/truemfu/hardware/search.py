"""Rows of the table by a part of their name, as people type it: `4090`, `rtx 4090`, `H100`.

`detect.py` finds the row of a real device, by its full name. Here a person names a device: what is assumed
is returned too, so that it can be shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import UsageError, closest
from .detect import find_spec
from .specs import DEVICES, DeviceSpec

_LEAST_ALIKE = 0.8


def search_devices(text: str) -> list[DeviceSpec]:
    """The rows whose names have every word of the text somewhere in them; a UsageError if there is none."""
    words = text.casefold().split()
    found = [spec for spec in DEVICES if all(word in _names(spec) for word in words)]
    if not found:
        raise UsageError(f"no device {text!r} in the table{_hint(text)}; `truemfu devices` lists them all")
    return found


def named_device(text: str) -> tuple[str, Sequence[str]]:
    """The name under which `detect.py` has the device that a person means, and keys of its other variants.

    A model number that several variants share (H100: SXM, PCIe, NVL) is the first of them in the table. A
    name that could be different chips is a UsageError with the keys to choose from.
    """
    if find_spec(text) is not None:
        return text, ()
    found = search_devices(text)
    if len(found) == 1:
        return found[0].key, ()
    variants = [spec for spec in found if _starts_with_number(spec, text)]
    if variants and len({_stem(spec, text) for spec in variants}) == 1:
        return variants[0].key, tuple(spec.key for spec in variants[1:])
    keys = ", ".join(spec.key for spec in found[:12])
    more = f" and {len(found) - 12} more" if len(found) > 12 else ""
    raise UsageError(f"{text!r} could be several devices; give one of {keys}{more}")


def _hint(text: str) -> str:
    """`h100` for `H-100`, else a key, or the model number at its head, that is much like the text."""
    plain = _plain(text)
    same = [spec.key for spec in DEVICES if plain and plain in _plain(spec.key)]
    if same:
        meant = plain if plain in same[0] else same[0]
        return f" (did you mean {meant!r}?)"
    numbers = [spec.key.partition("-")[0] for spec in DEVICES]
    known = [spec.key for spec in DEVICES] + [number for number in numbers if re.search(r"\d", number)]
    return closest(text, known, _LEAST_ALIKE)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.casefold())


def _names(spec: DeviceSpec) -> str:
    return " ".join((spec.key, spec.name, *spec.device_names)).casefold()


def _number(text: str) -> str:
    """`RTX 4090` → `rtx-4090`, as keys spell it."""
    return "-".join(text.casefold().removeprefix("nvidia ").removeprefix("amd instinct ").split())


def _stem(spec: DeviceSpec, text: str) -> str | None:
    """A key up to the text that stands in it as whole parts: `rtx-4090` of `rtx-4090-d` for `4090`."""
    found = re.match(rf"(?:.*-)?{re.escape(_number(text))}(?=-|$)", spec.key)
    return None if found is None else found[0]


def _starts_with_number(spec: DeviceSpec, text: str) -> bool:
    """Whether the text is a model number (it has a digit) and a whole part of the key."""
    return any(character.isdigit() for character in text) and _stem(spec, text) is not None
