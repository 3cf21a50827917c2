"""`truemfu sweep`: the profiling matrix, one fresh process per experiment.

    mode, profiling_config.json, flags ─► SweepConfig ─► run_sweep ─► summary, report, exit code

Progress goes to stderr; stdout gets the summary, or only JSON with `--json`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from ..errors import RecordError, UsageError, closest
from ..plain_files import what_is_there
from ..records import Status, SweepRecord, read_record
from ..report.drawing.documents import json_text
from ..report.sweep.figures import SweepSummary
from ..report.sweep.load import LoadedSweep, load_sweep, with_results
from ..report.sweep.summary import summarize
from ..sweep.config import TEST_CONFIG, SweepConfig, load_config, override, parse
from ..sweep.paths import SweepFolder
from ..sweep.supervisor.cluster_batches import cancel_all
from ..sweep.supervisor.runner import run_sweep
from ..text import counted
from .console import FilePath, ignoring_closed_pipe, json_option, say, working
from .live import Lines
from .options import SIZE_NAMES, list_option, older_names, output_option
from .summarize import show_summary
from .sweep_plan import show_plan

MODES = ("profile", "test", "single")
CONFIG_NAME = "profiling_config.json"
FOLDERS = {"profile": "out/sweep", "test": "out/sweep-test", "single": "out/sweep"}

_ONE_EXPERIMENT: dict[str, list[Any]] = {
    "trainers": ["StandardTrainer"],
    "batch_sizes": [4],
    "seq_lengths": [512],
    "models": ["1b"],
    "gpus_per_experiment": [1],
}


_OLD_NAMES = {
    **SIZE_NAMES,
    "trainers": "trainer",
    "models": "model",
    "model-size": "model",
    "model-sizes": "model",
    "dtypes": "dtype",
    "gpus": "gpu-ids",
}
_OF_CLUSTER = "job_"
"""Begins the parameters that are keys of `cluster`; the others are keys of the configuration."""


@click.command(
    short_help="Profile a matrix of experiments, each in its own process.",
    context_settings=older_names(_OLD_NAMES),
)
@click.option("--mode", default="profile", show_default=True, help="profile, test or single; see above.")
@click.option(
    "--config",
    "config_path",
    type=FilePath(),
    help=f"The whole matrix as JSON; flags override it.  [default: {CONFIG_NAME}, if it exists]",
)
@output_option(
    "folder",
    "Folder of logs/, runs/ and results/.  [default: out/sweep; out/sweep-test in test mode]",
)
@list_option("--trainer", "trainers", help="Trainers, comma-separated; or package.module:Class.")
@list_option("--batch", "batch_sizes", help="Samples in the batch: 4,8", of=int)
@list_option("--seq", "seq_lengths", help="Tokens per sample: 512,1024", of=int)
@list_option(
    "--model",
    "models",
    help="tiny, small, medium, 1b, a Hugging Face config.json or its folder, or package.module:factory.",
)
@list_option("--dtype", "dtypes", help="fp32 or bf16.  [default: bf16 on a GPU, else fp32]")
@click.option("--optimizer", help="sgd or adamw.  [default: sgd]")
@click.option("--compile", is_flag=True, default=None, help="Use torch.compile, if the trainer supports it.")
@click.option("--device", help="cuda or cpu.  [default: a GPU if there is one]")
@list_option(
    "--gpu-ids", "gpus", help="GPUs to use, by number; each runs one experiment at a time: 0,1", of=int
)
@list_option("--gpus-per-experiment", help="GPUs per experiment (on a CPU: processes): 1,2,4", of=int)
@click.option("--parallel", help="ddp or fsdp2: how several GPUs share the training. --batch is per GPU.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Time limit of an experiment.")
@click.option(
    "--memory-limit",
    "memory_limit_gib",
    type=float,
    metavar="GIB",
    help="Host memory an experiment may use.  [default: no limit]",
)
@click.option(
    "--rerun",
    metavar="WHICH",
    help="Run again: none, failed, all, or a status such as timeout.  [default: none; all in test mode]",
)
@click.option(
    "--prune",
    is_flag=True,
    default=None,
    help="After an out-of-memory failure, skip larger batches (marked pruned).",
)
@click.option(
    "--no-fit",
    "find_fit",
    is_flag=True,
    flag_value=False,
    default=None,
    help="After an out-of-memory failure, do not search for the batch that fits.",
)
@click.option("--launcher", help="Where experiments run: local, slurm or ray.  [default: local]")
@click.option("--partition", "job_partition", help="Slurm's partition.")
@click.option("--account", "job_account", help="Slurm's account.")
@click.option(
    "--sbatch-option",
    "job_sbatch_options",
    multiple=True,
    callback=lambda context, option, values: values or None,
    metavar="OPTION",
    help="Another option for sbatch: --sbatch-option=--constraint=h200",
)
@click.option(
    "--ray-address",
    "job_ray_address",
    metavar="HOST:PORT",
    help="A Ray cluster, or auto.  [default: a local one is started]",
)
@click.option(
    "--job-gpus", type=int, metavar="N", help="GPUs that each experiment requests from the cluster."
)
@click.option(
    "--job-cpus", type=int, metavar="N", help="CPUs that each experiment requests from the cluster."
)
@click.option(
    "--job-memory",
    "job_memory_gib",
    type=float,
    metavar="GIB",
    help="Host memory that each experiment requests from the cluster.",
)
@click.option(
    "--max-jobs",
    "job_max_jobs",
    type=int,
    metavar="N",
    help="Maximum number of experiments on the cluster at a time.",
)
@click.option("--cancel", is_flag=True, help="Cancel the experiments of this folder on their cluster.")
@click.option(
    "--dry-run", is_flag=True, help="List the experiments and what each requests, without starting any."
)
@json_option
def sweep(
    mode: str,
    config_path: Path | None,
    folder: Path | None,
    rerun: str | None,
    cancel: bool,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Profile a matrix of trainers × batch sizes × sequence lengths × models, each in a fresh process.

    \b
    Modes
        profile   the matrix; by default 4 trainers × batch 4, 8 × sequence 512, 1024 × 1b
        test      every trainer once on the tiny model: is this machine ready? Under a minute, always rerun
        single    one experiment: --trainer, --batch 4, --seq 512, --model 1b
    \b
    Trainers
        StandardTrainer                  plain PyTorch
        DPBookKeepingTrainer             private in one backward pass; not in the default matrix
        DPSGDTrainer                     per-sample gradients (this one and the next two need Opacus)
        DPGhostClippingTrainer           ghost clipping
        DPFastGradientClippingTrainer    fast gradient clipping
        package.module:Class             your own trainer
    \b
    Examples
        truemfu sweep --mode test
        truemfu sweep --mode single --trainer DPSGDTrainer --batch 4 --seq 512 --model 1b
        truemfu sweep --batch 4,8,16 --seq 512 --model small,medium --prune
        truemfu sweep --config profiling_config.json --output out/night --timeout 900
        truemfu sweep --output out/night --rerun failed
        truemfu sweep --launcher slurm --partition gpu --max-jobs 8 --output /shared/night
        truemfu sweep --output /shared/night              waits for the jobs already submitted

    To continue an interrupted sweep, run the same command again. Exit codes: 0 every experiment
    succeeded, 1 at least one did not, 2 wrong usage and nothing was started, 130 interrupted.
    """

    folder = folder or Path(FOLDERS.get(mode, FOLDERS["profile"]))
    if cancel:
        return _cancel(folder)
    config = _config(mode, config_path, folder, flags)
    if dry_run:
        show_plan(config, folder, as_json)
        return 0
    if mode == "test" and rerun is None:
        # A test always runs again, but another sweep's folder is only started over on request.
        return _run(config, folder, "all", as_json, start_over=False)
    return _run(config, folder, rerun or "none", as_json)


def _config(mode: str, path: Path | None, folder: Path, flags: dict[str, Any]) -> SweepConfig:
    """Mode and file give the defaults; flags override them. A sweep on a cluster brings its own settings."""

    if mode not in MODES:
        raise UsageError(f"no mode {mode!r}{closest(mode, MODES)}: expected {', '.join(MODES)}")
    if mode == "test":
        if path is not None:
            raise UsageError("test mode has its own matrix: leave out --config, or use --mode profile")
        start = TEST_CONFIG
    elif path is None and (recorded := _recorded_on_cluster(folder)) is not None:
        start = recorded
        if Path(CONFIG_NAME).is_file():
            say(
                f"using the settings of the sweep in {folder}; {CONFIG_NAME} is not read without --config",
                err=True,
            )
    elif path is not None or Path(CONFIG_NAME).is_file():
        start = load_config(path or CONFIG_NAME)
    else:
        start = SweepConfig()
    if mode == "single":
        several = [key for key in _ONE_EXPERIMENT if len(flags[key] or ()) > 1]
        if several:
            raise UsageError(f"single mode runs one experiment; got several {several[0]}: use --mode profile")
        start = override(msgspec.structs.replace(start, parallel=None), **_ONE_EXPERIMENT)
    cluster = msgspec.to_builtins(start.cluster)
    for name in [name for name in flags if name.startswith(_OF_CLUSTER)]:
        if (value := flags.pop(name)) is not None:
            cluster[name.removeprefix(_OF_CLUSTER)] = value
    return override(start, **flags, cluster=cluster)


def _recorded_on_cluster(folder: Path) -> SweepConfig | None:
    """The settings of the sweep in this folder, if its experiments were given to a cluster."""

    try:
        config = parse(read_record(SweepFolder(folder).record, SweepRecord).config)
    except (RecordError, UsageError):  # no sweep, or one of another version: `claim` reports that
        return None
    return None if config.launcher == "local" else config


def _run(
    config: SweepConfig, folder: Path, rerun: str, as_json: bool, *, start_over: bool | None = None
) -> int:

    files = SweepFolder(folder)
    with working("reading the folder") as show:
        outcome = run_sweep(config, folder, rerun=rerun, start_over=start_over, listener=Lines(show))
    try:
        found = load_sweep(folder)
    except UsageError as error:  # an experiment has destroyed the folder: the results are still in memory
        if not outcome.results:
            raise
        found = LoadedSweep(source=folder, record=None, entries=(), notes=(str(error),))
    summary = summarize(with_results(found, outcome.results))
    page = _write_page(files.page, summary)
    with ignoring_closed_pipe():
        if as_json:
            say(json_text(summary), nl=False)
        else:
            show_summary(summary)
            say(f"\ntime:   {outcome.wall_s:.1f} s")
            say(f"logs:   {files.logs}")
            say(f"traces: tensorboard --logdir {shlex.quote(str(files.runs))} (or Perfetto)")
            if page is not None:
                say(f"report: {page}")
    if outcome.interrupted and outcome.on_cluster:
        return _leave_or_cancel(folder, outcome.on_cluster, ask=outcome.by_ctrl_c)
    if outcome.interrupted:
        how = "the same command" if rerun == "none" else "the same command with --rerun none"
        say(f"interrupted: {how} continues from here", err=True)
        return 130
    return 0 if all(result.end is Status.OK for result in outcome.results) else 1


def _leave_or_cancel(folder: Path, count: int, *, ask: bool) -> int:
    """After an interruption: the jobs stay, unless the user at the terminal says otherwise."""
    experiments = counted(count, "experiment")
    if ask and sys.stdin.isatty() and sys.stderr.isatty():
        try:
            say(f"{experiments} on the cluster. Cancel? [y/N] ", err=True, nl=False)
            answer = sys.stdin.readline()
        except (KeyboardInterrupt, OSError):
            answer = ""
        if answer.strip().lower() in ("y", "yes"):
            _cancel(folder)
            return 130
    again = f"truemfu sweep --output {shlex.quote(str(folder))}"
    say(f"{experiments} stay on the cluster; to wait for them: {again}", err=True)
    say(f"to cancel them: {again} --cancel", err=True)
    return 130


def _cancel(folder: Path) -> int:

    count = cancel_all(folder)
    say(f"cancelled: {counted(count, 'experiment')}", err=True)
    return 0


def _write_page(page: Path, summary: SweepSummary) -> Path | None:
    from ..report.sweep.page import write_sweep_page

    if (instead := what_is_there(page)) is not None:
        say(f"warning: no report: {page} is {instead}, not a file", err=True)
        return None
    try:
        return write_sweep_page(page, summary)
    except OSError as error:
        say(f"warning: no report: {error.strerror}", err=True)
        return None
