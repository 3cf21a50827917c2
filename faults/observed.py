"""Programs that notice whether their step runs otherwise, or twice, when truemfu watches it.

Each program of `observed_programs.py` runs alone, with a `TrainingMonitor` and under `truemfu run`. Weights
(bit by bit), the states of all generators of random numbers, standard output, noted side effects, files and
the exit code must be the same, within the time limit.

    python -m faults.observed [NAME …]     a line for each program
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import truemfu

from .attack import Attack
from .observed_process import HUNG, Place, run_script, wait
from .observed_programs import PROGRAMS

TOGETHER = 8
"""Programs of one attack: they share the start of one `truemfu run`."""
_ROOT = Path(__file__).parents[1]
_HEAD = "from faults.observed_loop import *\nbegin()\n"
_RECORDED = ("weights", "torch random state", "numpy random state", "python random state", "noted")


def script_of(text: str) -> str:
    """The whole script of a program: it begins with the seeds and ends with the record."""
    return f"{_HEAD}{text.strip()}\nfinish()\n"


def run_forked(text: str, script: Path, *, monitored: bool) -> dict[str, Any]:
    """In a fork of this process, which has torch loaded; with a monitor or without."""
    script.write_text(script_of(text), "utf-8")
    place = Place(script)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 1
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of the caller: they remove its files
        try:
            run_script(place, monitored=monitored)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            _end()
            os._exit(code)
    wait(pid, place)
    return _found(place)


def _end() -> None:
    """What Python does at the end of a process; this one cannot return into what it was forked from."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()


def run_watched(texts: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """All in forks of one process under `truemfu run`."""
    places = [Place(folder / f"run-{n}.py") for n in range(len(texts))]
    for place, text in zip(places, texts, strict=True):
        place.script.write_text(script_of(text), "utf-8")
    source = str(Path(truemfu.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, str(_ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    filters = [f"-W{option}" for option in sys.warnoptions]  # those of the process that the others fork
    scripts = [str(place.script) for place in places]
    command = [sys.executable, *filters, "-m", "faults.observed_process", *scripts]
    with open(folder / "run.err", "wb") as errors:
        subprocess.run(
            [sys.executable, "-m", "truemfu", "run", "-o", str(folder / "run"), "--", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            check=False,
        )
    return [_found(place) for place in places]


def differences(texts: Mapping[str, str], folder: Path) -> dict[str, list[str]]:
    """What is not the same with us, for each of these programs."""
    found = {}
    watched = run_watched(list(texts.values()), folder)
    for number, ((name, text), under_run) in enumerate(zip(texts.items(), watched, strict=True)):
        alone = run_forked(text, folder / f"alone-{number}.py", monitored=False)
        with_monitor = run_forked(text, folder / f"monitor-{number}.py", monitored=True)
        if alone["weights"] is None:
            found[name] = [f"the program itself fails: {(folder / f'alone-{number}.err').read_text()[-500:]}"]
            continue
        found[name] = [
            *_compared(alone, with_monitor, "with a monitor"),
            *_compared(alone, under_run, "under run"),
        ]
    return found


def check(texts: Mapping[str, str], folder: Path) -> None:
    """Raise where one of these programs with us is not the program alone."""
    found = {name: problems for name, problems in differences(texts, folder).items() if problems}
    assert not found, "; ".join(f"{name!r} {problem}" for name in found for problem in found[name])


def attacks(chance: random.Random) -> list[Attack]:
    """Several programs each; none is drawn."""
    names = list(PROGRAMS)
    groups = [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]
    return [
        Attack(
            f"{group[0]} … {group[-1]}",
            partial(check, {name: PROGRAMS[name] for name in group}),
            parts=len(group),
        )
        for group in groups
    ]


def _found(place: Place) -> dict[str, Any]:
    record = json.loads(place.record.read_text("utf-8")) if place.record.exists() else {}
    return {
        "exit status": place.status.read_text() if place.status.exists() else "it was not started",
        **{key: record.get(key) for key in _RECORDED},
        "output": place.output.read_text(errors="replace") if place.output.exists() else None,
        "files": {
            str(path.relative_to(place.files)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for path in sorted(place.files.rglob("*"))
            if path.is_file()
        },
    }


def _compared(alone: dict[str, Any], found: dict[str, Any], how: str) -> list[str]:
    if found["exit status"] == HUNG:
        return [f"{how}: {HUNG}"]
    return [
        f"{how}: {key}: {_shown(alone[key])} alone, {_shown(found[key])}"
        for key in alone
        if alone[key] != found[key]
    ]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:50]} … {text[-40:]}"


def main() -> int:
    """Each program's differences, as a table."""
    torch.set_num_threads(1)
    chosen = {name: text for name, text in PROGRAMS.items() if len(sys.argv) < 2 or name in sys.argv[1:]}
    names, failed = list(chosen), 0
    for start in range(0, len(names), TOGETHER):
        with tempfile.TemporaryDirectory(prefix="truemfu-observed-") as folder:
            group = {name: chosen[name] for name in names[start : start + TOGETHER]}
            for name, problems in differences(group, Path(folder)).items():
                failed += bool(problems)
                print(
                    f"{'DIFFERS' if problems else 'same':<8}{name:<60}{'; '.join(problems)[:400]}", flush=True
                )
    print(f"{len(chosen) - failed} of {len(chosen)} programs are the same with truemfu")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
