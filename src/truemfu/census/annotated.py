"""A trace written again, with what the census knows of each kernel in the event's arguments.

The trace is copied event by event, so its size does not matter. Other steps stay as they are.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import classes
from .items import Device, Found, Item
from .json_stream import EventStream
from .trace import HOST, ON_DEVICE, Kernel


def write_annotated(source: Path, target: Path, found: Found) -> None:
    """Write the trace at `source` to `target` with class, FLOPs, bytes and limit of its kernels; gzip.

    `found` is what `items_of` gave for it. A trace that is not written whole is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        _write(source, part, found)
        part.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _write(source: Path, target: Path, found: Found) -> None:
    known: dict[Any, Mapping[str, Any]] = {
        _key_of(item.kernel): _arguments(item, found.device) for item in found.items
    }
    categories = {"cpu_op"} if found.step.device == HOST else ON_DEVICE
    stream = EventStream(source)
    with gzip.open(target, "wt", compresslevel=4, encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for number, event in enumerate(stream):
            if event.get("cat") in categories:
                args = event.get("args") or {}
                key = event.get("name"), args.get("correlation"), args.get("External id")
                event["args"] = {**args, **known.get(key, {})}
            file.write(",\n" if number else "\n")
            file.write(json.dumps(event, ensure_ascii=False))
        file.write("\n]")
        for name, value in stream.header.items():
            file.write(f",\n{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
        file.write("}\n")


def _key_of(kernel: Kernel) -> tuple[Any, ...]:
    """A graph's launch has many kernels of one correlation, which may have one name and are then alike."""
    operator = kernel.within if kernel.kind == HOST else None  # it stands for the kernel
    return kernel.name, kernel.correlation, kernel.external if operator is None else operator.external


def _arguments(item: Item, device: Device) -> Mapping[str, Any]:
    limit, least = device.limit_of([item]) or (None, None)
    return {
        "truemfu class": classes.CLASSES[item.kind],
        "truemfu module": item.module,
        "truemfu dtype": item.dtype,
        "truemfu FLOPs": None if item.work is None else item.work.flops,
        "truemfu bytes": item.bytes,
        "truemfu limit": limit,
        "truemfu least time us": None if least is None else 1e6 * least,
        "truemfu waited for launch us": item.waited_ns / 1e3,
    }
