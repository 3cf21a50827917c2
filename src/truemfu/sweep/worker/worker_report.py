"""A worker's last words: the result file, a report people can read, and the result as one line of JSON."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ... import plain_files
from ...records import CaseResult, End, encode, write_record

_GIB = 1 << 30
_STDOUT = 1


class Voice:
    """How a worker speaks: lines for its log, and its result to the supervisor.

    Both go to descriptors of its own: whatever the trainer does to sys.stdout, its measurement is heard.
    """

    def __init__(self, answer_file: int | None = None) -> None:
        self._log = os.dup(_STDOUT)
        self._answer_file = answer_file

    def say(self, text: str) -> None:
        """A line for the log, at once. A disk that is full costs the line, not the experiment."""
        with contextlib.suppress(Exception):  # what the trainer has put there, or closed
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            plain_files.write_all(self._log, text.encode(errors="replace") + b"\n")

    def report(self, result: CaseResult, file: Path) -> int:
        """Hand the result over, write it to `file` and say it in the log, the JSON last; the exit code."""
        handed_over = self._hand_over(encode(result))
        try:
            write_record(file, result)
            handed_over = True
        except OSError as error:
            self.say(f"note: the result cannot be written: {error.strerror or error}")
        for line in lines_about(result):
            self.say(line)
        self.say(encode(result).decode())
        return 0 if handed_over and result.end is End.OK else 1

    def _hand_over(self, data: bytes) -> bool:
        if self._answer_file is None:
            return False
        try:
            plain_files.write_all(self._answer_file, data)
        except OSError:  # the trainer has closed every descriptor
            return False
        return True


def lines_about(result: CaseResult) -> list[str]:
    """The result for people, a line for each thing."""
    lines = [f"{result.name}: {result.end.value}" + (f": {result.message}" if result.message else "")]
    if result.environment is not None:
        lines.append(f"  device      {result.environment.device_name}")
    if result.parameters is not None:
        lines.append(
            f"  model       {result.case.model}, {result.parameters:,} parameters, {result.case.dtype}"
        )
    if result.gate is not None:
        verdict = "passed" if result.gate.passed else "failed"
        lines.append(
            f"  gate        {verdict}, relative error {result.gate.relative_error:.1e} on {result.gate.model}"
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
    return [*lines, *(f"  note: {note}" for note in result.notes)]
