"""Slurm, by its own commands: sbatch, squeue, sacct, scancel.

    sbatch --test-only ─► sbatch --array ─► squeue (recent jobs) ─► sacct (older ones, with accounting)

Every batch has a job name of its own. If the submitting process dies between sbatch and the note of the job's
number, the next one finds the job by that name. Slurm's own restarts are off (--no-requeue); a job that an
administrator requeues finds its claim and ends.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from ...errors import UsageError
from ...records import Status
from ...text import on_one_line, ranges, shortened
from .engine import ENGINE_JOB_VARIABLE, NODE_AGENT, submit_environment
from .jobs import Batch, JobsFolder, JobState
from .settings import ClusterSettings, Request

_COMMAND_TIMEOUT_S = 120.0

_WAITING = "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD".split()
_STARTED = "RUNNING SUSPENDED COMPLETING CONFIGURING RESIZING STAGE_OUT SIGNALING STOPPED".split()
_UNKNOWN = JobState(over=True, reason="the job is no longer in Slurm's queue, and not in its accounting")
_STATUSES = {"OUT_OF_MEMORY": Status.HOST_OOM, "TIMEOUT": Status.TIMEOUT, "DEADLINE": Status.TIMEOUT}


class Slurm:
    """The Slurm that this machine's commands talk to."""

    name = "Slurm"
    runs_batches_in_turn = False

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings

    def check(self, request: Request) -> None:
        if shutil.which("sbatch") is None:
            raise UsageError(
                "there is no Slurm on this machine (no sbatch): use a login node of the cluster, or "
                "--launcher local"
            )
        _run(
            ["sbatch", "--test-only", *self._options(request), "--array=0"],
            script="#!/bin/sh\n",
            refused="Slurm rejects a test job with these options",
        )

    def submit(self, batch: Batch, jobs: JobsFolder, numbers: Sequence[int], after: Batch | None) -> str:
        limit = self._settings.max_jobs
        # A batch that Slurm no longer knows has no number, and nothing of it is left to wait for.
        before = None if after is None else after.engine_job
        options = [
            "--parsable",
            f"--job-name={_job_name(batch)}",
            f"--array={','.join(ranges(numbers))}{'' if limit is None else f'%{limit}'}",
            f"--chdir={batch.working_folder}",
            f"--output={_output_pattern(jobs)}",
            "--open-mode=append",
            *([] if before is None else [f"--dependency=afterany:{before}"]),
            *self._options(batch.request),
        ]
        agent = shlex.join([*NODE_AGENT, str(jobs.root)])
        script = (
            "#!/bin/sh\n"
            f"{ENGINE_JOB_VARIABLE}=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}\n"
            f"export {ENGINE_JOB_VARIABLE}\n"
            f'exec {agent} "$SLURM_ARRAY_TASK_ID"\n'
        )
        answer = _run(["sbatch", *options], script=script, refused="Slurm rejects these jobs")
        return answer.strip().partition(";")[0]

    def find(self, batch: Batch, jobs: JobsFolder) -> str | None:
        if batch.engine_job is not None:
            return batch.engine_job
        name = _job_name(batch)
        answer = _ask(["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%F"])
        if not answer:
            age_s = max(time.time() - batch.created_at_s, 0.0)
            since = f"--starttime=now-{math.ceil((age_s + 3600) / 60)}minutes"
            answer = _ask(["sacct", "-X", "-n", "-P", since, f"--name={name}", "--format=JobID"])
        found = re.match(r"\s*(\d+)", answer or "")
        return found[1] if found else None

    def job_states(
        self, batch: Batch, jobs: JobsFolder, claimed: Mapping[int, str | None]
    ) -> dict[int, JobState]:
        # A batch that was submitted twice (see `find`) has two arrays: that of the claim counts.
        own = batch.engine_job
        names = {n: job or f"{own}_{n}" for n, job in claimed.items() if job or own}
        states = dict.fromkeys(
            claimed.keys() - names, JobState(over=True, reason="the job was never submitted")
        )
        if not names:
            return states
        arrays = ",".join(sorted({name.partition("_")[0] for name in names.values()}))
        listed = ["--noheader", "--array", "--states=all", f"--jobs={arrays}", "--format=%i|%T|%r"]
        recent = _ask(["squeue", *listed], unknown="Invalid job id")
        found = _parse(recent)
        missing = set(names.values()) - set(found)
        if missing:
            columns = "--format=JobID,State,Reason"
            older = _ask(["sacct", "-X", "-n", "-P", "--array", f"--jobs={arrays}", columns])
            forgotten = {} if recent is None else dict.fromkeys(missing, _UNKNOWN)
            found = {**forgotten, **_parse(older), **found}
        return {**states, **{number: found[name] for number, name in names.items() if name in found}}

    def cancel(self, batch: Batch, jobs: JobsFolder) -> None:
        _run(["scancel", f"--name={_job_name(batch)}"], refused="Slurm did not cancel the jobs")

    def _options(self, request: Request) -> list[str]:
        settings = self._settings
        options = [
            "--ntasks=1",
            "--no-requeue",
            "--export=ALL",
            f"--time={math.ceil(request.time_s / 60)}",
            f"--partition={settings.partition}" if settings.partition else "",
            f"--account={settings.account}" if settings.account else "",
            f"--cpus-per-task={request.cpus}" if request.cpus else "",
            f"--mem={math.ceil(request.memory_bytes / 2**20)}M" if request.memory_bytes else "",
            f"--gres=gpu:{request.gpus}" if request.gpus else "",
            *settings.sbatch_options,
        ]
        return [option for option in options if option]


def _output_pattern(jobs: JobsFolder) -> str:
    """The file that a job prints to; Slurm replaces %a by its number, and %% by %."""
    folder = str(jobs.root)
    return folder.replace("%", "%%") + str(jobs.output("%a")).removeprefix(folder)


def _job_name(batch: Batch) -> str:
    return f"truemfu-{batch.id}"


def _parse(answer: str | None) -> dict[str, JobState]:
    """Lines `12_3|STATE|reason`, by the name of the job."""
    lines = [line.strip().split("|", 2) for line in (answer or "").splitlines()]
    return {line[0]: _state(line[1], line[2]) for line in lines if len(line) == 3}


def _state(state: str, reason: str) -> JobState:
    """`CANCELLED by 0` is a state too."""
    kind = state.split()[0].rstrip("+") if state.split() else "UNKNOWN"
    told = "" if reason in ("", "None", "(null)") else f" ({reason})"
    waits = kind in _WAITING
    over = not waits and kind not in _STARTED
    status = _STATUSES.get(kind, Status.LOST)
    return JobState(over=over, waits=waits, reason=f"{state}{told}", status=status)


def _ask(command: Sequence[str], unknown: str | None = None) -> str | None:
    """What a command prints; None if it fails, unless it does with the words `unknown`: these then."""
    try:
        done = _called(command)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if unknown is not None and unknown in done.stderr:
        return unknown
    return done.stdout if done.returncode == 0 else None


def _run(command: Sequence[str], *, script: str = "", refused: str) -> str:
    """What a command prints; a UsageError with Slurm's own words if it fails."""
    try:
        done = _called(command, script)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{refused}: {command[0]} failed: {on_one_line(str(error))}") from error
    if done.returncode == 0:
        return done.stdout
    said = [
        re.sub(r"^\w+: (error: )?", "", line.strip()) for line in done.stderr.splitlines() if line.strip()
    ]
    raise UsageError(
        f"{refused}: {shortened(on_one_line('; '.join(said))) or f'exit code {done.returncode}'}"
    )


def _called(command: Sequence[str], script: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=script,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        env=submit_environment(),
    )
