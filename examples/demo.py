"""`make demo`: every trainer once on this machine, then the summary and a page.

A CPU has no datasheet peak, so its MFU would be unknown. Here it is taken over the matmul rate that the
machine reaches at this moment, which is measured first and said.

    python examples/demo.py
"""

from __future__ import annotations

import os

from truemfu.cli import main
from truemfu.hardware.ceiling.ceiling import measure_ceiling
from truemfu.sweep.gpus import resolve_device

PEAK = "TRUEMFU_PEAK_TFLOPS"

if __name__ == "__main__":
    if resolve_device("auto") == "cpu" and PEAK not in os.environ:
        ceiling = measure_ceiling("cpu", ["fp32"])[0].burst_flops_per_s
        if ceiling is not None:
            os.environ[PEAK] = str(ceiling / 1e12)
            print(f"MFU is over {ceiling / 1e12:.3f} TFLOP/s, the fp32 matmul rate this CPU reaches now")
    main(["sweep", "--mode", "test", "--output", "out/demo", "--rerun", "all"])
