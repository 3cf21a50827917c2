"""What an earlier call left in the folder: results that still hold, and experiments it never finished."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from ..errors import RecordError, UsageError, closest
from ..records import CaseResult, End, Phase, SweepRecord, read_record
from .case_log import last_lines
from .paths import RunningCase, SweepFolder
from .process import kill_leftovers
from .progress import read_progress
from .supervise import peaks, save

RERUN = ("none", "failed", "all", *(end.value for end in End if end is not End.OK))
"""What to run again although there is a result: nothing, whatever failed, everything, or one kind of end."""

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
        path = folder.result(name)
        if not path.exists():
            continue
        try:
            found = read_record(path, CaseResult)
        except RecordError as error:
            say(f"{error}; it is run again")
            continue
        if found.content_hash == content_hash and _holds(found, rerun, timeout_s):
            held[name] = found
    return held


def end_leftovers(folder: SweepFolder, names: Collection[str], record: SweepRecord, say: Say) -> None:
    """End what a killed supervisor left running; an experiment not among `names`, to be run, is lost.

    One that is not in the record is of a sweep that has been started over, and leaves nothing.
    """
    for name, path in folder.markers().items():
        try:
            left = msgspec.json.decode(path.read_bytes(), type=RunningCase)
        except msgspec.MsgspecError as error:
            say(f"{path} is no mark of a running experiment: {error}")
        else:
            kill_leftovers(left.token)
            say(f"{name} was left unfinished by a sweep that was killed")
            if name in record.cases and name not in names and not folder.result(name).exists():
                save(folder, _lost(name, left, record.sweep_id, folder))
        path.unlink(missing_ok=True)
        folder.progress(name).unlink(missing_ok=True)


def _holds(found: CaseResult, rerun: str, timeout_s: float) -> bool:
    if rerun == "all" or found.end.value == rerun or found.end in (End.LOST, End.PRUNED):
        return False
    if rerun == "failed":
        return found.end is End.OK
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
