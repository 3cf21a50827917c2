"""The dtype names in counts: bf16, tf32, fp8. Peaks are looked up by these names."""

from __future__ import annotations

import torch

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}


def dtype_name(dtype: torch.dtype, device_type: str, *, convolution: bool) -> str:
    """The name of the dtype that a product of this dtype runs in on such a device; else torch's own name."""
    if dtype is torch.float32 and device_type == "cuda":
        return _float32_on_cuda(convolution)
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    text = str(dtype).removeprefix("torch.")
    return "fp8" if "float8" in text else "fp4" if "float4" in text else text


def _float32_on_cuda(convolution: bool) -> str:
    """fp32 or tf32, depending on torch's settings and the device."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "fp32"
    if convolution:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
