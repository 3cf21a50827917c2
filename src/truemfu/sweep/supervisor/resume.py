"""What an earlier call left in the folder: results that are still valid, and unfinished experiments."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping

from ...errors import RecordError, UsageError, closest
from ...records import CaseResult, Status, SweepRecord, read_record
from ..order import WorkerOrder
from ..paths import RunningCase, SweepFolder
from ..process import kill_leftovers
from .stored import save, stored_result, without_answer

RERUN = ("none", "failed", "all", *(status.value for status in Status if status is not Status.OK))
"""What to run again although it has a result: nothing, failed experiments, all, or those of one status."""

_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""The disk may have space again; the experiment itself has not failed."""

Report = Callable[[str], None]


def check_rerun(rerun: str) -> None:
    """A UsageError unless it is one of `RERUN`."""
    if rerun not in RERUN:
        raise UsageError(f"rerun must be one of {', '.join(RERUN)}; got {rerun!r}{closest(rerun, RERUN)}")


def reusable(
    folder: SweepFolder, hashes: Mapping[str, str], *, rerun: str, timeout_s: float, report: Report
) -> dict[str, CaseResult]:
    """The valid results of these experiments (name → content hash), which are not measured again."""
    valid: dict[str, CaseResult] = {}
    for name, content_hash in hashes.items():
        if not os.path.lexists(folder.result(name)):
            continue  # a log alone may belong to an interrupted run
        stored = stored_result(name, folder.result(name), folder.log(name))
        found = stored.result
        reused = (
            found is not None and found.content_hash == content_hash and _is_valid(found, rerun, timeout_s)
        )
        for fault in stored.faults:
            report(fault if reused else f"{fault}; running it again")
        if found is not None and reused:
            valid[name] = save(folder, found) if stored.faults else found
    return valid


def end_leftovers(
    folder: SweepFolder,
    names: Collection[str],
    record: SweepRecord,
    report: Report,
    *,
    on_cluster: Collection[str] = (),
) -> None:
    """End what a killed supervisor left running; an experiment not in `names` (not run now) is lost.

    One that is not in the record belongs to a sweep that was started over: it gets no result. Those in
    `on_cluster` have a supervisor of their own on their node.
    """
    for name, path in folder.markers().items():
        if name in on_cluster:
            continue
        try:
            left = read_record(path, RunningCase)
        except RecordError as error:
            report(str(error))
        else:
            kill_leftovers(left.token)
            report(f"{name} was left unfinished by a sweep that was killed")
            if name in record.cases and name not in names and not os.path.lexists(folder.result(name)):
                order = WorkerOrder(
                    case=left.case,
                    name=name,
                    sweep_id=record.sweep_id,
                    content_hash=left.content_hash,
                    folder=str(folder.root),
                    progress_path=str(folder.progress(name)),
                    log_path=str(folder.log(name)),
                )
                message = "the sweep ended before the experiment finished"
                save(folder, without_answer(folder, order, Status.LOST, message, began_at_s=left.began_at_s))
        folder.remove_running(name)


def _is_valid(found: CaseResult, rerun: str, timeout_s: float) -> bool:
    if rerun == "all" or found.end.value == rerun or found.end in (Status.LOST, Status.PRUNED):
        return False
    if rerun == "failed":
        return found.end is Status.OK
    if found.end is Status.ERROR and any(words in (found.message or "") for words in _DISK_FULL):
        return False
    # With a higher time limit than then, it is tried again.
    return found.end is not Status.TIMEOUT or (found.wall_s or 0.0) >= timeout_s
