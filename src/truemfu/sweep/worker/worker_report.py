"""A worker's report: the result file, a readable summary, and the result as one line of JSON."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ... import plain_files
from ...records import CaseResult, Status, encode, write_record

_GIB = 1 << 30
_STDOUT = 1


class WorkerOutput:
    """A worker's output: lines for its log, and its result for the supervisor.

    Both use separate descriptors, so that a trainer that changes sys.stdout cannot lose the result.
    """

    def __init__(self, answer_file: int | None = None) -> None:
        self._log = os.dup(_STDOUT)
        self._answer_file = answer_file

    def write_line(self, text: str) -> None:
        """Write a line to the log at once. On a full disk the line is lost, the experiment continues."""
        with contextlib.suppress(Exception):  # the trainer may have replaced or closed it
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            plain_files.write_all(self._log, text.encode(errors="replace") + b"\n")

    def report(self, result: CaseResult, file: Path | None) -> int:
        """Send the result, write it to `file` and to the log, with the JSON last; returns the exit code."""
        sent = self._send(encode(result))
        try:
            if file is not None:
                write_record(file, result)
                sent = True
        except OSError as error:
            self.write_line(f"note: the result cannot be written: {error.strerror or error}")
        for line in lines_about(result):
            self.write_line(line)
        self.write_line(encode(result).decode())
        return 0 if sent and result.end is Status.OK else 1

    def _send(self, data: bytes) -> bool:
        if self._answer_file is None:
            return False
        try:
            plain_files.write_all(self._answer_file, data)
        except OSError:  # the trainer has closed every descriptor
            return False
        return True


def lines_about(result: CaseResult) -> list[str]:
    """The result as readable lines."""
    lines = [f"{result.name}: {result.end.value}" + (f": {result.message}" if result.message else "")]
    if result.environment is not None:
        lines.append(f"  device      {result.environment.device_name}")
    if result.parameters is not None:
        lines.append(
            f"  model       {result.case.model}, {result.parameters:,} parameters, {result.case.dtype}"
        )
    if result.case.gpus > 1:
        lines.append(
            f"  ranks       {result.case.gpus}, {result.case.parallel}, batch {result.case.batch_size} each"
        )
    if result.gate is not None:
        verdict = "passed" if result.gate.passed else "failed"
        lines.append(
            f"  gradients   {verdict}, relative error {result.gate.relative_error:.1e} on {result.gate.model}"
        )
    measured = result.measured
    if measured is not None:
        steps = measured.steps
        spread = "" if steps.relative_error is None else f" ± {100 * steps.relative_error:.2f} %"
        lines.append(f"  step        {1e3 * steps.median_s:.2f} ms{spread} ({len(steps.times_s)} steps)")
        lines.append(f"  tokens/s    {measured.tokens_per_s:,.0f}")
        if measured.flops is not None:
            flops = measured.flops
            lines.append(
                f"  FLOPs       {flops.model_flops:,} of the model, {flops.hardware_flops:,} executed"
            )
            if flops.mfu is not None and flops.hfu is not None:
                lines.append(f"  MFU, HFU    {100 * flops.mfu:.1f} %, {100 * flops.hfu:.1f} %")
    memory = result.memory
    if memory is not None and memory.allocated_bytes is not None:
        lines.append(f"  GPU memory  {memory.allocated_bytes / _GIB:.2f} GiB allocated at the peak")
    if memory is not None and memory.process_bytes is not None:
        lines.append(f"  host memory {memory.process_bytes / _GIB:.2f} GiB resident at the peak")
    if measured is not None:
        for rank in measured.ranks:
            peak = rank.memory.allocated_bytes or rank.memory.process_bytes
            held = "unknown" if peak is None else f"{peak / _GIB:.2f} GiB"
            lines.append(f"  rank {rank.rank:<6} {rank.device_name}, {held} at the peak")
    return [*lines, *(f"  note: {note}" for note in result.notes)]
