"""What passes between `truemfu try` and the processes it starts: the order of a process, and its result.

TrialOrder  ─► environment of the command ─► each process of it that trains
TrialResult ◄─ rank-0.json, rank-1.json … ◄─ at its last step, at its end, or at its error
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

ORDER = "TRUEMFU_TRIAL"
"""The environment variable with the order."""
UNCHANGED = "unchanged"
RUN_FOLDER = "run"
"""Inside the folder of a process: what the monitor writes."""


class TrialOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a trial is to do."""

    folder: str
    """Absolute: where its results go."""
    steps: int
    """After warm-up; it ends when they are done."""
    warm_up_steps: int
    remedies: dict[str, str] = {}
    """Name → option, as in `table.py`; none: unchanged."""

    @property
    def all_steps(self) -> int:
        return self.warm_up_steps + self.steps

    def as_text(self) -> str:
        """For `ORDER`."""
        return msgspec.json.encode(self).decode()


def order_from(environment: Mapping[str, str]) -> TrialOrder | None:
    """The order in the environment; None outside of a trial."""
    text = environment.get(ORDER)
    return msgspec.json.decode(text, type=TrialOrder) if text else None


def result_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its result."""
    return folder / f"rank-{rank}.json"


class SeenOptimizer(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer that stepped."""

    name: str
    is_fused: bool
    foreach: bool | None
    """As it was given; None: torch decides."""
    takes_fused: bool
    """Whether its class has the argument."""
    takes_foreach: bool


class SeenLoader(msgspec.Struct, frozen=True, kw_only=True):
    """A DataLoader that was iterated."""

    workers: int
    pins_memory: bool
    is_stream: bool
    """Whether its dataset is iterable: each worker would repeat all of it, unless the dataset shards."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the unchanged process did; None where it is not known."""

    device: str | None = None
    """ "cuda" or "cpu"."""
    device_name: str | None = None
    capability: list[int] | None = None
    """Of a CUDA device: [9, 0]."""
    device_memory_bytes: int | None = None
    cpus: int | None = None
    """That this process may use."""
    ranks: int | None = None
    torch: str | None = None
    models: list[str] = []
    """Classes of the modules that a step calls."""
    parameter_dtypes: dict[str, int] = {}
    """Elements of the parameters by dtype."""
    is_compiled: bool | None = None
    """Whether torch.compile has compiled anything."""
    products: dict[str, int] | None = None
    """Matrix products and convolutions of one forward pass by dtype; None: not seen, as in compiled code."""
    convolutions: int | None = None
    convolutions_2d: int | None = None
    are_channels_last: bool | None = None
    """Whether the inputs of 2-d convolutions are; None without any."""
    attention_calls: int | None = None
    """Calls of scaled_dot_product_attention in one forward pass."""
    attention_kernels: list[str] = []
    """Of those, as autograd names them."""
    attention_implementation: str | None = None
    """As transformers names it."""
    vocabulary: int | None = None
    """The rows of the largest embedding table."""
    matmul_precision: str | None = None
    """As torch.get_float32_matmul_precision says."""
    cudnn_benchmark: bool | None = None
    checkpoints: bool | None = None
    """Whether torch.utils.checkpoint ran."""
    repeated_blocks: dict[str, int] = {}
    """Containers with several blocks of one class, and how many."""
    is_transformers_model: bool | None = None
    has_liger: bool | None = None
    """Whether liger_kernel is installed."""
    optimizers: list[SeenOptimizer] = []
    loaders: list[SeenLoader] = []
    step_time_s: float | None = None
    """Of the first unchanged run, as the next three and `ranks`."""
    data_wait_s: float | None = None
    padding: float | None = None
    """The share of tokens that are padding."""
    peak_memory_bytes: int | None = None


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank leaves."""

    rank: int = 0
    world_size: int = 1
    steps: int = 0
    losses: list[float | None] = []
    """Of each step from the first, on this rank; None where none was seen or it is not finite."""
    non_finite_losses: int = 0
    """How many of them are NaN or infinite."""
    peak_memory_bytes: int | None = None
    """On CUDA what torch allocated after warm-up, else of the process."""
    evidence: Evidence | None = None
    """Of the unchanged command."""
    error: str | None = None
    """The exception that ended it, or why the remedy could not be applied."""
    is_out_of_memory: bool = False
    is_complete: bool = False
    """Whether all steps were done."""
