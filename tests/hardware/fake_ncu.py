"""What Nsight Compute printed on an H200, and a stand-in for it that runs a command and prints the same.

`h200_operators.csv` has products of several dtypes and shapes, and three elementwise operators;
`h200_step_2_layers.csv` forward, backward and fused AdamW of the sweep's 1b model cut to two layers, bf16,
4 samples × 512 tokens. Nsight Compute 2025.3.1, driver 580; most columns were cut out, nothing else changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from truemfu.hardware.nsight.command import ProductWork, StepCount

FOLDER = Path(__file__).parent / "ncu"
OPERATORS = (FOLDER / "h200_operators.csv").read_text(encoding="utf-8")
STEP_FILE = FOLDER / "h200_step_2_layers.csv"
STEP = STEP_FILE.read_text(encoding="utf-8")
STEP_PROCESS = 749

CUBE = 2 * 4096**3
EXECUTED = 2_101_044_314_112
EXECUTED_MATMUL = 2_063_463_350_272
EXECUTED_ATTENTION = 10_737_418_240 + 26_843_545_600

TOKENS, HIDDEN, VOCAB = 4 * 512, 2048, 32_000
_ATTENTION = 2 * 2 * 2 * 4 * 32 * 512 * 512 * 64  # two layers, two products of 2·samples·heads·S²·D


def _products() -> tuple[ProductWork, ...]:
    """Each linear layer's product with its two gradients, worked out by hand."""
    shapes: dict[tuple[int, int, int], int] = {}

    def add(inputs: int, outputs: int, layers: int) -> None:
        for shape in (
            (TOKENS, outputs, inputs),
            (TOKENS, inputs, outputs),
            (outputs, inputs, TOKENS),
        ):
            shapes[shape] = shapes.get(shape, 0) + layers * 2 * TOKENS * inputs * outputs

    add(HIDDEN, HIDDEN, 2 * 4)
    add(HIDDEN, 4 * HIDDEN, 2)
    add(4 * HIDDEN, HIDDEN, 2)
    add(HIDDEN, VOCAB, 1)
    return tuple(ProductWork(m=m, n=n, k=k, flops=flops) for (m, n, k), flops in shapes.items())


PRODUCTS = _products()
MATMUL = sum(product.flops for product in PRODUCTS)
STEP_COUNT = StepCount(
    process_id=STEP_PROCESS,
    attention="full",
    method="closed form",
    model_flops=MATMUL + 3 * _ATTENTION,  # backward is four products
    hardware_flops=MATMUL + _ATTENTION * 7 // 2,  # and the kernel's own fifth
    model_flops_by_operator={
        "aten.mm": MATMUL,
        "aten._scaled_dot_product_cudnn_attention": _ATTENTION,
        "aten._scaled_dot_product_cudnn_attention_backward": 2 * _ATTENTION,
    },
    products=PRODUCTS,
    attention_flops=_ATTENTION * 7 // 2,
    attention_blocked_flops=_ATTENTION * 7 // 2 * 5 // 8,  # (n + 1) / 2n of n = 4 blocks a side
)

_SCRIPT = """#!{python}
import os, shutil, subprocess, sys
arguments = sys.argv[1:]
if "--import" in arguments:
    sys.stdout.write(open(arguments[arguments.index("--import") + 1], encoding="utf-8").read())
    sys.exit(0)
log = open(arguments[arguments.index("--log-file") + 1], "w", encoding="utf-8")
report = arguments[arguments.index("--export") + 1]
command = arguments[arguments.index("--profile-from-start") + 2 :]
while command and command[0].startswith("--"):
    command = command[2:]
for number in range(int(os.environ.get("FAKE_NCU_KERNELS", 0))):
    print(f'==PROF== Profiling "nvjet" - {{number}}: 0%....50%....100% - 7 passes', file=log, flush=True)
# As the real one does: the report is written when the process is gone, whatever became of it.
code = subprocess.run(command).returncode
prints = open(os.environ["FAKE_NCU_PRINTS"], encoding="utf-8").readlines()
log.writelines(line for line in prints if line.startswith("=="))
log.close()
if any(not line.startswith("==") for line in prints):
    with open(report, "w", encoding="utf-8") as file:
        file.writelines(line for line in prints if not line.startswith("=="))
sys.exit(abs(code))
"""


def install_fake_ncu(folder: Path) -> Path:
    """An `ncu` in this folder: its messages and its report are those of the file in FAKE_NCU_PRINTS.

    It says first that it profiles FAKE_NCU_KERNELS kernels.
    """
    fake = folder / "ncu"
    fake.write_text(_SCRIPT.format(python=sys.executable), encoding="utf-8")
    fake.chmod(0o755)
    return fake
