"""What the tests of the cluster launchers share: sweeps of light workers, and what has to be true of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from supervised import HERE, Recorder, alive, processes_of_sweeps, small

from truemfu.records import CaseResult, Status
from truemfu.sweep.config import SweepConfig
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.supervisor.runner import run_sweep

WORKER = (sys.executable, str(HERE / "light_worker.py"))
ENDS = {
    "Raises": (Status.ERROR, 1, None, "the loss has exploded"),
    "OutOfGpuMemory": (Status.CUDA_OOM, 1, None, "CUDA out of memory"),
    "EatsMemory": (Status.HOST_OOM, 1, None, "MemoryError"),
    "KillsItself": (Status.SIGNAL, None, "SIGKILL", "ended by SIGKILL in phase warm_up"),
    "Segfaults": (Status.SIGNAL, None, "SIGSEGV", "ended by SIGSEGV in phase warm_up"),
    "Exits": (Status.ERROR, 3, None, "exited with code 3 in phase warm_up without a result: about to leave"),
    "Hangs": (Status.TIMEOUT, None, "SIGKILL", "did not finish within its time limit"),
    "Daemonises": (Status.OK, 0, None, ""),
    "Nothing": (Status.OK, 0, None, ""),
}
"""How an experiment has to end wherever it runs: status, exit code, signal, message."""

TIME_LIMIT_S = 45.0
"""Of an experiment: light workers need a fraction of a second, on a busy machine some seconds."""

IN_A_PROCESS = """
import json, sys
from pathlib import Path
from clusters import WORKER, sweep_of
from supervised import Recorder
from truemfu.sweep.supervisor.runner import run_sweep

settings = json.loads(sys.argv[2])
run_sweep(sweep_of(**settings), Path(sys.argv[1]), listener=Recorder(), command=WORKER)
"""


def name_of(what: str, batch: int = 2) -> str:
    return f"{what}_bs{batch}_seq16"


def sweep_of(what: list[str], *, launcher: str, cluster: dict[str, Any], **settings: Any) -> SweepConfig:
    """A sweep of light workers; one second is enough to see another process's files on this machine."""
    settings = {"batch_sizes": [2], "memory_limit_gib": 0.25, "timeout_s": TIME_LIMIT_S, **settings}
    return small(
        trainers=[f"light_worker:{name}" for name in what],
        find_fit=False,
        launcher=launcher,
        cluster={"stale_view_s": 1.0, **cluster},
        **settings,
    )


def submitter(root: Path, **settings: Any) -> subprocess.Popen[bytes]:
    """A sweep in a process of its own, which a test can kill."""
    return subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, str(root), json.dumps(settings)])


def results(root: Path, config: SweepConfig) -> tuple[dict[str, CaseResult], Recorder]:
    """Run a sweep to its end; its results by what their workers did."""
    heard = Recorder()
    outcome = run_sweep(config, root, listener=heard, command=WORKER)
    assert not outcome.interrupted
    return {result.name.partition("_")[0]: result for result in outcome.results}, heard


def ran(folder: Path) -> list[dict[str, Any]]:
    """Every start and end of a worker, in order."""
    try:
        return [json.loads(line) for line in (folder / "ran").read_text().splitlines()]
    except FileNotFoundError:
        return []


def is_collected(root: Path, number: int) -> bool:
    """Whether the submitter has taken this experiment's result from the node: its order is then gone."""
    return not any((jobs / f"{number}.order").exists() for jobs in SweepFolder(root).all_jobs())


def check_ends(found: dict[str, CaseResult], what: list[str]) -> None:
    assert list(found) == what
    for name, result in found.items():
        end, exit_code, signal_name, message = ENDS[name]
        assert (name, result.end, result.exit_code, result.signal) == (name, end, exit_code, signal_name)
        assert message in (result.message or "")
        assert result.wall_s is not None
        assert result.notes == []


def check_ran_once(folder: Path, what: list[str]) -> None:
    starts = Counter(line["name"] for line in ran(folder) if line["event"] == "began")
    assert starts == Counter(name_of(name) for name in what)


def check_gpus_were_not_shared(folder: Path) -> None:
    """At no time did two workers have the same GPU; one that was killed has no end and is left out."""
    spans: dict[int, list[Any]] = {}
    for line in ran(folder):
        spans.setdefault(line["pid"], [line["gpu"]]).append(line["at_s"])
    whole = [span for span in spans.values() if len(span) == 3]
    assert {gpu for gpu, *_ in whole} <= {"0", "1"}
    for index, (gpu, began, ended) in enumerate(whole):
        for other_gpu, other_began, other_ended in whole[:index]:
            assert gpu != other_gpu or ended <= other_began or other_ended <= began


def check_two_at_once_have_different_gpus(root: Path, mark: Path, settings: dict[str, Any]) -> None:
    """Each of the two waits for the other, so both run at once."""
    config = sweep_of(["Meets"], **settings, batch_sizes=[2, 4])
    outcome = run_sweep(config, root, listener=Recorder(), command=WORKER)
    assert [result.end for result in outcome.results] == [Status.OK, Status.OK]
    assert {line["gpu"] for line in ran(mark)} == {"0", "1"}


def check_nothing_is_left(root: Path, mark: Path) -> None:
    folder = SweepFolder(root)
    assert [path.name for path in folder.running.iterdir()] == ["lock"]
    assert processes_of_sweeps(str(mark)) == []
    if (mark / "daemon.pid").exists():
        assert not alive(int((mark / "daemon.pid").read_text()))
