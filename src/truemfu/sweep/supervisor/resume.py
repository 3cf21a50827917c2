"""What an earlier call left in the folder: results that still hold, and experiments it never finished."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping

import msgspec

from ... import plain_files
from ...errors import UsageError, closest, one_line
from ...records import CaseResult, End, Phase, SweepRecord
from ..paths import RunningCase, SweepFolder
from ..process import kill_leftovers
from ..progress import read_progress
from .case_log import last_lines
from .stored import stored_result
from .supervise import peaks, save

RERUN = ("none", "failed", "all", *(end.value for end in End if end is not End.OK))
"""What to run again although there is a result: nothing, whatever failed, everything, or one kind of end."""

_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""There may be room again; the experiment itself has not failed."""

Say = Callable[[str], None]


def check_rerun(rerun: str) -> None:
    """A UsageError unless it is one of `RERUN`."""
    if rerun not in RERUN:
        raise UsageError(f"rerun must be one of {', '.join(RERUN)}; got {rerun!r}{closest(rerun, RERUN)}")


def reusable(
    folder: SweepFolder, hashes: Mapping[str, str], *, rerun: str, timeout_s: float, say: Say
) -> dict[str, CaseResult]:
    """The results that hold for these experiments (name → content hash) and are not to be measured again."""
    held: dict[str, CaseResult] = {}
    for name, content_hash in hashes.items():
        if not os.path.lexists(folder.result(name)):
            continue  # a log alone may be of a run that was not to count
        stored = stored_result(name, folder.result(name), folder.log(name))
        found = stored.result
        reused = found is not None and found.content_hash == content_hash and _holds(found, rerun, timeout_s)
        for fault in stored.faults:
            say(fault if reused else f"{fault}; it is run again")
        if found is not None and reused:
            held[name] = save(folder, found) if stored.faults else found
    return held


def end_leftovers(folder: SweepFolder, names: Collection[str], record: SweepRecord, say: Say) -> None:
    """End what a killed supervisor left running; an experiment not among `names`, to be run, is lost.

    One that is not in the record is of a sweep that has been started over, and leaves nothing.
    """
    for name, path in folder.markers().items():
        try:
            left = msgspec.json.decode(plain_files.read(path), type=RunningCase)
        except (msgspec.MsgspecError, OSError, UnicodeDecodeError, RecursionError) as error:
            say(f"{path} is no mark of a running experiment: {one_line(error)}")
        else:
            kill_leftovers(left.token)
            say(f"{name} was left unfinished by a sweep that was killed")
            if name in record.cases and name not in names and not os.path.lexists(folder.result(name)):
                save(folder, _lost(name, left, record.sweep_id, folder))
        plain_files.remove(path)
        plain_files.remove(folder.progress(name))


def _holds(found: CaseResult, rerun: str, timeout_s: float) -> bool:
    if rerun == "all" or found.end.value == rerun or found.end in (End.LOST, End.PRUNED):
        return False
    if rerun == "failed":
        return found.end is End.OK
    if found.end is End.ERROR and any(words in (found.message or "") for words in _DISK_FULL):
        return False
    # A time limit that has been raised since is worth another try.
    return found.end is not End.TIMEOUT or (found.wall_s or 0.0) >= timeout_s


def _lost(name: str, left: RunningCase, sweep_id: str, folder: SweepFolder) -> CaseResult:
    trail = read_progress(folder.progress(name))
    return CaseResult(
        name=name,
        sweep_id=sweep_id,
        content_hash=left.content_hash,
        case=left.case,
        end=End.LOST,
        phase=trail[-1].phase if trail else Phase.START,
        message="whoever supervised it ended before it did",
        log_tail=last_lines(folder.log(name)),
        memory=peaks(trail),
        began_at_s=left.began_at_s,
    )
