"""The values of small arrays, and of tensors that are neither parameters nor buffers, as bytes.

Values are read where that is cheap. A larger array, or a tensor on another device, is `Unreadable`: its shape
alone does not determine what a forward does with it.
"""

from __future__ import annotations

import array
import ctypes
import decimal
import fractions
from typing import Any

import torch
from torch import nn

from ...torch_private.dispatch import FakeTensor
from .code_digest import name_of, pack
from .compiled_code import Unreadable

MAX_ARRAY_BYTES = 1 << 20
MAX_TENSOR_BYTES = 1 << 16

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def array_bytes(value: Any) -> bytes | None:
    """The bytes of a number or of an array of numbers that is not a tensor; None for anything else."""
    if isinstance(value, (decimal.Decimal, fractions.Fraction)):
        return pack(name_of(type(value)), str(value).encode())
    if isinstance(value, (bytearray, memoryview, array.array)):
        view = memoryview(value)
        _check_size(view.nbytes, MAX_ARRAY_BYTES)
        return pack(name_of(type(value)), f"{view.format} {view.shape}".encode(), view.tobytes())
    if any(cls.__module__ == "numpy" for cls in type(value).__mro__) and hasattr(value, "tobytes"):
        return _numpy_bytes(value)
    return None


def _numpy_bytes(value: Any) -> bytes:
    if value.dtype.hasobject:
        raise Unreadable("an array of objects")
    _check_size(value.nbytes, MAX_ARRAY_BYTES)
    metadata = f"{value.dtype.descr} {value.shape}"
    return pack(name_of(type(value)), metadata.encode(), value.tobytes())


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """The digest of a tensor without its values."""
    metadata = f"{type(tensor).__qualname__} {tensor.dtype} {tensor.requires_grad} {tensor.device.type}"
    if tensor.is_nested:
        return pack(b"nested", metadata.encode(), b"%d" % tensor.dim())
    mesh = getattr(tensor, "device_mesh", None)
    split = "" if mesh is None else f"{getattr(tensor, 'placements', None)} {tuple(mesh.shape)}"
    return pack(b"tensor", metadata.encode(), repr(tuple(tensor.shape)).encode(), split.encode())


def valued_digest(tensor: torch.Tensor) -> bytes:
    """The digest of a tensor with its values; without them for a weight or a tensor that has none."""
    is_weight = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    original = getattr(tensor, "_truemfu_of", None)  # a tensor of a snapshot
    source = tensor if original is None else original()
    if is_weight or isinstance(source, FakeTensor) or (source is not None and source.is_meta):
        return tensor_digest(tensor)
    is_plain = type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or tensor.is_quantized or tensor.device.type != "cpu":
        raise Unreadable(f"the values of a {type(tensor).__name__} on {tensor.device} are not read")
    _check_size(tensor.nbytes, MAX_TENSOR_BYTES)
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(values.data_ptr(), values.nbytes) if values.nbytes else b""
    return pack(tensor_digest(tensor), content)


def _check_size(size_bytes: int, most_bytes: int) -> None:
    if size_bytes > most_bytes:
        raise Unreadable(f"{size_bytes} bytes of values, more than {most_bytes}")
