"""The records written to disk and read back: one struct per file, versioned, JSON.

    sweep.json              SweepRecord      the matrix, and which sweep this folder belongs to
    results/<name>.json     CaseResult       one experiment and its result
    logs/<name>.log         …                the worker's output; its last line is the CaseResult again
    training_run.json       RunRecord        a monitored run, and at its end its summary

The monitor writes the last one during the run, so any of its fields may be missing.

Field names carry their units. Unknown values are None. A record of a newer version is refused with one line;
unknown fields of the same version are ignored, so that a reader survives a small addition.

The records of a sweep also carry a checksum of their content, so that a damaged one is not shown; one without
a checksum is read without this check. Experiment names become file names: a name
that is a path is rejected.
"""

from __future__ import annotations

import hashlib
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from . import plain_files
from .errors import RecordError, brief
from .text import shortened

RECORD_VERSION = 1

Record = TypeVar("Record", bound=msgspec.Struct)


class VersionedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records that are a file."""

    version: int = RECORD_VERSION


class _SweepsRecord(VersionedRecord, frozen=True, kw_only=True):
    """Base of a sweep's records, which are written with a checksum."""


def _check_name(name: str) -> None:
    if not plain_files.is_name(name):
        raise ValueError(f"{brief(name)} is not a valid experiment name")


class Status(str, Enum):
    """The status of a finished experiment; all but OK are failures, by cause."""

    OK = "ok"
    CUDA_OOM = "cuda_oom"
    """The GPU ran out of memory."""
    HOST_OOM = "host_oom"
    """The host ran out of memory, or the experiment reached its memory limit."""
    SIGNAL = "signal"
    """Killed by a signal that the sweep did not send."""
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    """The trainer reports that it cannot train this model."""
    INCORRECT = "incorrect"
    """The trainer runs, but its gradient is wrong, or its steps do not train."""
    ERROR = "error"
    PRUNED = "pruned"
    """Not run: the same experiment with a smaller batch ran out of memory."""
    LOST = "lost"
    """Started, but its supervisor ended before it finished."""


OUT_OF_MEMORY = (Status.CUDA_OOM, Status.HOST_OOM)


class Phase(str, Enum):
    """The phases of a worker, in order."""

    START = "start"
    """The interpreter starts and imports."""
    GRADIENT_CHECK = "gate"
    """The trainer's gradient is compared with a per-sample loop."""
    BUILD = "build"
    WARM_UP = "warm_up"
    TIMED = "timed"
    COUNT = "count"
    PROFILED = "profiled"
    DONE = "done"
    """Measured; only files are left to write."""


MAX_INT = 2**63 - 1
"""The largest integer of JSON decoders and torch."""
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
MAX_FLOAT = sys.float_info.max
"""All finite numbers are at most this."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=MAX_FLOAT)]


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to train. Only private trainers clip and add noise."""

    optimizer: str = "sgd"
    """One of `sweep.trainers.base.OPTIMIZERS`."""
    learning_rate: Positive = 1e-4
    max_grad_norm: Positive = 1.0
    """A private trainer scales each sample's gradient down to this norm."""
    noise_multiplier: Annotated[float, msgspec.Meta(ge=0, le=MAX_FLOAT)] = 1.0
    """Standard deviation of the noise, in units of `max_grad_norm`."""
    compile: bool = False


class CaseSettings(TrainerSettings, frozen=True, kw_only=True):
    """How experiments train and are measured: the same for all of a sweep."""

    attention: str = "full"
    """The convention of the FLOP counts: full or causal."""
    seed: CountOrZero = 0
    warm_up_steps: CountOrZero = 5
    min_steps: Count = 20
    max_steps: Count = 200
    max_timed_s: Positive = 30.0
    """Timing stops after this long, once `min_steps` are timed."""
    profiled_steps: CountOrZero = 2
    """Steps under torch.profiler after the timed ones; 0: no trace."""


class SweepCase(CaseSettings, frozen=True, kw_only=True):
    """One experiment: everything that determines what runs and how it is measured."""

    trainer: str
    """A name of `sweep.trainers.TRAINERS`, or `package.module:Class`."""
    model: str
    """A size of `sweep.models.SIZES`, a Hugging Face config file or folder, or `package.module:factory`."""
    batch_size: int
    """Of each rank: on two GPUs a step trains on twice as many samples."""
    seq_len: int
    dtype: str = "bf16"
    """fp32 or bf16: the dtype of weights and activations."""
    device: str = "cuda"
    """cuda or cpu."""
    target_spread: float = 0.005
    """Timing stops when the median's relative standard error is below this."""
    max_trace_bytes: int = 200_000_000
    gpus: int = 1
    """How many GPUs it uses, one rank each; on a CPU the number of processes."""
    parallel: str | None = None
    """How the ranks share the training, ddp or fsdp2; None with one."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The timed steps of an experiment, in seconds."""

    times_s: list[float]
    median_s: float
    mean_s: float
    p10_s: float
    p90_s: float
    relative_error: float | None
    """Standard error of the median over the median, from the spread of the steps."""
    source: str
    """"CUDA events" or "host clock"."""
    stable: bool
    """Whether `target_spread` was reached before `max_steps` or `max_timed_s`."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks, in bytes; `allocated` and `reserved` are torch's on the GPU and None on a CPU."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    """Peak resident memory of the process on the host."""
    device_total_bytes: int | None = None


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an experiment on several GPUs."""

    rank: int
    host: str
    device_name: str
    step_time_s: float
    """Median of its own timed steps."""
    memory: Memory


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """The FLOPs of one step: needed by the model, and executed by this trainer; of all ranks."""

    model_flops: int
    hardware_flops: int
    model_method: str
    hardware_method: str
    attention: str
    peak_flops_per_s: float | None
    peak_source: str | None
    mfu: float | None
    hfu: float | None
    uncounted: dict[str, int] = {}


class GradientCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's gradient against a per-sample loop on a tiny model."""

    passed: bool
    relative_error: float
    tolerance: float
    model: str
    batch_size: int
    seq_len: int
    clipped: bool
    """Whether the loop clips each sample's gradient, as a private trainer must."""
    stands_in: bool = False
    """Whether the tiny model has another architecture, because the case's cannot be made small."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a successful experiment: of all ranks, with the step times of the slowest."""

    steps: StepTimes
    tokens_per_step: int
    tokens_per_s: float
    samples_per_s: float
    flops: Flops | None
    data_wait_s: float | None
    """Median time a step waited for its batch."""
    final_loss: float | None
    trace: str | None
    """The profiler's trace, relative to the sweep's folder; None without a trace."""
    trace_note: str | None = None
    """Why there is no trace, or why it covers fewer steps than requested."""
    ranks: list[RankFigures] = []
    """Each rank of an experiment on several GPUs; none with one."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where an experiment ran."""

    device_name: str
    """Of several ranks on unlike devices: all names, joined by " + "."""
    python: str
    versions: dict[str, str]
    host: str
    git_commit: str | None
    """Of the folder the sweep was started in, with "-dirty" appended if files differ; None outside git."""
    driver: str | None = None


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """The wall-clock time at which a phase began."""

    phase: Phase
    began_at_s: float


class CaseResult(_SweepsRecord, frozen=True, kw_only=True):
    """One experiment and its result."""

    name: str
    sweep_id: str
    content_hash: str
    """Of everything that affects the result; a result with the same hash is reused."""
    case: SweepCase
    end: Status
    phase: Phase
    """The last phase it reached."""
    message: str | None = None
    """Why it failed, in one line."""
    log_tail: list[str] = []
    exit_code: int | None = None
    signal: str | None = None
    """The name of the signal that ended it, for instance SIGSEGV; of several ranks, the one that failed."""
    began_at_s: float | None = None
    wall_s: float | None = None
    """From sending the case to the worker until its process ended."""
    phases: list[PhaseTime] = []
    parameters: int | None = None
    measured: Measured | None = None
    memory: Memory | None = None
    """Of several ranks, the one with the highest peak."""
    gate: GradientCheck | None = None
    environment: Environment | None = None
    fits: str | None = None
    """After an out-of-memory: the largest batch, or model, that was measured to fit, as text."""
    notes: list[str] = []

    def __post_init__(self) -> None:
        _check_name(self.name)


class SweepRecord(_SweepsRecord, frozen=True, kw_only=True):
    """The matrix of a sweep, as requested."""

    sweep_id: str
    created_at_s: float
    truemfu_version: str
    cases: list[str]
    """Names of all experiments, in order: the denominator of success rates."""
    config: dict[str, Any]

    def __post_init__(self) -> None:
        for name in self.cases:
            _check_name(name)


RUN_FILE = "training_run.json"
LOG_FILE = "training_log.json"
"""The default name of a run's log: a JSON array, one row per logged step."""


class WaterfallPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the peak, as `truemfu.waterfall` splits it."""

    key: str
    name: str
    share: float | None = None
    """Of the peak; negative is a gain."""
    of: list[WaterfallPart] = []
    missing: list[str] = []
    """Unknown values, because of which this part could not be split further."""


class WaterfallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where the peak went: parts from the top, the useful FLOPs last; their shares add up to 1."""

    parts: list[WaterfallPart] = []
    peak_flops_per_s: float | None = None
    notes: list[str] = []


UPPER_BOUND = "upper bound: no audit"
"""The label of executed FLOPs from counters that no audit has corrected."""


class RunHardware(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the GPU's counters, over all windows of the run."""

    windows: int | None = None
    seconds: float | None = None
    steps: int | None = None
    executed_flops_per_s: float | None = None
    executed_hfu: float | None = None
    executed_over_activity: float | None = None
    """The audit's correction of the tensor pipe's activity; None: executed is an upper bound."""
    executed_over_counted: float | None = None
    executed_over_expected: float | None = None
    """Relative to the count including known differences (tiles, masks)."""
    clock_hz: float | None = None
    clock_source: str | None = None
    reported_clock_hz: float | None = None
    """The clock the driver requested, which differs from the clock the SMs ran at."""
    power_w: float | None = None
    energy_j_per_step: float | None = None
    energy_j_per_million_tokens: float | None = None
    tensor_active: float | None = None
    sm_active: float | None = None
    dram_active: float | None = None
    limiter: str | None = None
    """Key of the most costly part, which may be nested."""
    advice: list[str] = []
    waterfall: WaterfallRecord | None = None


class MonitorCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of monitoring."""

    training_thread_us_per_step: float | None = None
    share_of_step: float | None = None
    """Both without the first step, in which the monitor starts."""
    first_step_s: float | None = None
    checks_s: float | None = None
    observing_s: float | None = None
    """How much longer the observed steps took than others."""
    observed: int | None = None
    observed_steps: list[int] = []
    """Which they were, the first ones."""
    profiling_s: float | None = None
    census_s: float | None = None
    """Of recording a step for `truemfu explain`, outside of steps."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """What ran in a run without belonging to its steps: evaluation, checkpoints, generation."""

    times: int | None = None
    seconds: float | None = None
    share: float | None = None
    """Of the run's time."""


class RunTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What was processed in all, over all ranks; None where a step's amount is unknown."""

    steps: int | None = None
    ranks: int | None = None
    is_complete: bool = True
    """Whether every rank has reported every step."""
    model_flops: float | None = None
    tokens: float | None = None
    useful_tokens: float | None = None
    samples: float | None = None


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a job, as rank 0 last saw it."""

    rank: int
    status: str | None = None
    """ "ended", "silent", "no last row" or "never reported"."""
    host: str | None = None
    device: str | None = None
    last_seen: str | None = None
    step: int | None = None
    steps: int | None = None
    """After warm-up; the means below are over these."""
    step_time_s: float | None = None
    data_wait_s: float | None = None
    collective_s: float | None = None
    """Of its last window: a step's time in collectives, whether other kernels ran meanwhile or not."""
    clock_mhz: float | None = None
    memory_bytes: int | None = None


class StragglerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that held up its job for some time."""

    rank: int
    host: str | None = None
    device: str | None = None
    cause: str | None = None
    """ "input", "gpu", "host", "link", "work", "blocked", "silent" or "ended"."""
    since_s: float | None = None
    until_s: float | None = None
    since_step: int | None = None
    excess_s: float | None = None
    lost_s: float | None = None
    share: float | None = None
    text: str | None = None


class GenerationServer(msgspec.Struct, frozen=True, kw_only=True):
    """What a generation server did, by its own counters; the names from `time` on are those in a row."""

    number: int
    url: str | None = None
    device: str | None = None
    """Of which the peaks are."""
    time: float | None = None
    """Seconds between its first and last reading, without restarts."""
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    method: str | None = None
    """Whose estimate its FLOPs and bytes are."""
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    mfu_unknown: str | None = None
    read_bytes_per_gpu: float | None = None
    mbu: float | None = None
    mbu_unknown: str | None = None


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a step on the device's time line."""

    phase: str
    """One of `run_summary.sums.PHASES`, or "pause": left out of the step's time."""
    work: str | None = None
    """ "generate", a model that ran without gradients, or the kind of a pause."""
    seconds: float = 0.0


class TypicalStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose time is the median of recent ones that do the same kind of work; of rank 0 in a job."""

    step: int | None = None
    steps: int = 1
    """How many end with this one, if those before it were not logged."""
    like: int | None = None
    """Steps after warm-up that do the same kind of work."""
    of: int | None = None
    """All steps after warm-up whose phases are known."""
    parts: list[StepPart] = []
    """From its begin to its end, one after the other; those that are no pause add up to its time."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a run."""

    ended_by: str | None = None
    """The exception that ended the program; None if it ended by itself, or that is not known."""
    steps: int | None = None
    warmup_steps: int | None = None
    observed_steps: int | None = None
    skipped_steps: int | None = None
    medians_over: str | None = None
    median_steps: dict[str, int] = {}
    """How many steps each median is of: `{"mfu": 887, "hfu": 212}`."""
    median_step_time_s: float | None = None
    median_mfu: float | None = None
    median_mfu_by_model: dict[str, float | None] = {}
    """Each model's part of `median_mfu`, if several are monitored."""
    median_mfu_estimate: float | None = None
    """Over the steps whose FLOPs are unknown: what the model's structure suggests."""
    median_hfu: float | None = None
    hfu_method: str | None = None
    """How HFU was measured; None: by the count."""
    median_tflops_per_gpu: float | None = None
    """The model's work of one device, without recomputation."""
    median_mfu_training: float | None = None
    """The training's work over the step's time without `data_wait` and `no_grad`."""
    median_mfu_whole_step: float | None = None
    """All counted work over all time of a step, in runs with work without gradients."""
    median_tokens_per_second: float | None = None
    median_samples_per_second: float | None = None
    padding_lost: float | None = None
    data_wait_share: float | None = None
    between_steps_share: float | None = None
    """Time between steps that is not known to be data wait."""
    forwards_between_steps: int | None = None
    """Forward passes without gradients in that time."""
    left_out: dict[str, LeftOut] = {}
    phases_s: dict[str, float] = {}
    """Mean seconds of a step in each phase, after warm-up; they add up to the mean step."""
    phases_unknown: dict[str, int] = {}
    """Why steps have no phases, and how many."""
    typical_step: TypicalStep | None = None
    totals: RunTotals | None = None
    ranks: list[RankSummary] = []
    """Of a job, the first few dozen."""
    stragglers: list[StragglerSummary] = []
    """Of a job: those that still held it up, then the newest others."""
    method: str | None = None
    methods: dict[str, int] = {}
    """How the FLOPs of steps were found, and of how many."""
    mfu_unknown: dict[str, int] = {}
    """Why the FLOPs of steps are unknown, and of how many."""
    peak_source: str | None = None
    monitor_cost: MonitorCost | None = None
    hardware: RunHardware | None = None
    generation_servers: list[GenerationServer] = []
    without_tensor: dict[str, float] = {}
    """Kinds of kernels without matrix work, as shares of their time together, by the census of one step."""
    notes: list[str] = []
    lost: list[str] = []
    warnings: list[str] = []

    @property
    def waterfall(self) -> WaterfallRecord | None:
        """Where the peak went; None if counters do not tell."""
        return None if self.hardware is None else self.hardware.waterfall


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a run."""

    name: str | None = None
    """Of its class."""
    parameters: int | None = None
    trainable_parameters: int | None = None
    dtypes: list[str] = []
    """Of its parameters, sorted; empty if unknown."""


_UnixTime = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run, which may be started several times in one folder; times are Unix times."""

    process_began_at_s: _UnixTime | None = None
    began_at_s: _UnixTime
    """When the training began, with its first batch."""
    ended_at_s: _UnixTime | None = None
    """When the monitor was closed; None while it runs, or if the process was killed."""
    ended_by: str | None = None
    """The exception that ended it."""
    signal_at_s: _UnixTime | None = None
    """When SIGTERM or SIGHUP came, which ends most programs."""
    last_write_at_s: _UnixTime | None = None
    """When its log was last written, where only the next start could see that."""
    log_begins_at: int | None = None
    """The position of its first row in the log, in bytes; None before there is one."""
    host: str | None = None
    device: str | None = None
    devices: Count = 1
    """How many: one for each rank."""
    allocation: str | None = None
    """The scheduler's job that held the devices."""
    allocation_began_at_s: _UnixTime | None = None


class RunRecord(VersionedRecord, frozen=True, kw_only=True):
    """A monitored run as its report reads it; without a summary it is still running, or was killed."""

    truemfu_version: str | None = None
    versions: dict[str, str] = {}
    python: str | None = None
    started_at: str | None = None
    """ISO 8601, UTC."""
    log_file: str = LOG_FILE
    mode: str | None = None
    convention: dict[str, Any] = {}
    device: str | None = None
    time_source: str | None = None
    world_size: int | None = None
    scope: str | None = None
    """What the rates cover: "one device", "job of 8 ranks, summed"."""
    model: ModelFacts | None = None
    batch_shapes: list[dict[str, list[int]]] = []
    """Names and shapes of the tensors of the latest distinct batches."""
    loader_workers: int | None = None
    """Of the DataLoader of the last batch; None if batches came from elsewhere."""
    command: list[str] = []
    """How the run was started, without the values of secrets."""
    git_commit: str | None = None
    """Of the folder it was started in; "-dirty" is appended if files differ, "-unchecked" if that is not
    known; None outside git."""
    starts: list[RunStart] = []
    """All starts in this folder, the last one last."""
    summary: RunSummary | None = None


_CHECKSUM = "checksum"


def encode(record: msgspec.Struct) -> bytes:
    """A record as one line of JSON."""
    if not isinstance(record, _SweepsRecord):
        return msgspec.json.encode(record)
    content = msgspec.to_builtins(record)
    return msgspec.json.encode({**content, _CHECKSUM: _checksum(content)})


def decode(data: bytes | str, record_type: type[Record], where: str) -> Record:
    """A record read back; a RecordError that names `where` if it is not a valid record."""
    try:
        version = _version_of(data)
        if version > RECORD_VERSION:
            raise RecordError(
                f"{where} was written by a newer truemfu (record version {version}, this one reads up to "
                f"{RECORD_VERSION}): update truemfu"
            )
        found = msgspec.json.decode(data, type=record_type)
        is_whole = not issubclass(record_type, _SweepsRecord) or _matches_checksum(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(
            f"{where} is not a valid {record_type.__name__}: {shortened(str(error))}"
        ) from error
    if not is_whole:
        raise RecordError(f"{where} is damaged: its content does not match its checksum")
    return found


def _version_of(data: bytes | str) -> int:
    """The version alone: a newer record may have other fields, or fields of other types."""
    return msgspec.json.decode(data, type=VersionedRecord).version


def _matches_checksum(data: bytes | str) -> bool:
    content = msgspec.json.decode(data)
    written = content.pop(_CHECKSUM, None)
    return written is None or bool(written == _checksum(content))


def _checksum(content: dict[str, Any]) -> str:
    """Of every key and value, independent of the file's layout; unknown fields are included."""
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


def read_record(path: Path, record_type: type[Record]) -> Record:
    """Read one record from its file; also one that is short-lived, and written without a version."""
    try:
        data = plain_files.read(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    return decode(data, record_type, str(path))


def write_record(path: Path, record: msgspec.Struct, *, durable: bool = False) -> None:
    """Write a record under a temporary name and rename it: a reader never sees an incomplete one."""
    plain_files.replace(path, msgspec.json.format(encode(record), indent=2) + b"\n", durable=durable)
