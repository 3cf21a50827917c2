"""Hardware limits: the table of chips, a device's row in it, and measured limits."""

from .ceiling.ceiling import MatmulCeiling, measure_ceiling
from .detect import find_spec, get_gpu_peak_flops, spec_of
from .specs import DEVICES, DTYPES, DeviceSpec, Peaks

__all__ = [
    "DEVICES",
    "DTYPES",
    "DeviceSpec",
    "MatmulCeiling",
    "Peaks",
    "find_spec",
    "get_gpu_peak_flops",
    "measure_ceiling",
    "spec_of",
]
