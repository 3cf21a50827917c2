"""The short form of the fault suite, a family a test: an attack that gets through fails here.

`make faults` runs every attack; `python -m faults --only FAMILY:INDEX` runs one again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from faults.__main__ import main
from faults.attack import Attack, Family, run_all
from faults.families import FAMILIES

ROOT = Path(__file__).parents[1]
SEED = 0
TIMEOUT_S = 600


SAMPLED_ELSEWHERE = "observed"
"""By tests/monitor/test_identity.py."""


@pytest.mark.parametrize("family", [f.name for f in FAMILIES if f.name != SAMPLED_ELSEWHERE])
def test_no_attack_of_the_short_form_gets_through(family: str) -> None:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(  # a process of its own: it forks, which one with threads cannot
        [sys.executable, "-m", "faults", "--short", "--json", "--seed", str(SEED), "--family", family],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (outcome,) = json.loads(done.stdout)
    assert outcome["survived"] == outcome["tried"] > 0


@pytest.mark.parametrize("only", ["nothing", "names:x", "names:99999"])
def test_an_attack_that_does_not_exist_is_one_clear_line(
    only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", only])
    assert ended.value.code == 2
    assert f"--only takes FAMILY:INDEX, such as kills:0; got {only!r}" in capsys.readouterr().err


def hangs(folder: Path) -> None:
    import time

    time.sleep(600)


def raises(folder: Path) -> None:
    raise ValueError("through")


def ends_thread(folder: Path) -> None:
    import threading

    thread = threading.Thread(target=raises, args=(folder,))
    thread.start()
    thread.join()


def prints_traceback(folder: Path) -> None:
    import traceback

    try:
        raises(folder)
    except ValueError:
        traceback.print_exc()


def dies(folder: Path) -> None:
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (raises, "ValueError: through"),
        (ends_thread, "exceptions left a thread"),
        (prints_traceback, "a traceback was printed: ValueError: through"),
        (dies, "ended by SIGKILL"),
        (hangs, "not over after 1 s"),
    ],
)
def test_the_runner_sees_an_attack_that_gets_through(
    attack: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attack is hangs:
        monkeypatch.setattr("faults.attack.TIME_LIMIT_S", 1.0)
    outcome = run_all("f", [(3, Attack("a", attack))], jobs=1, report=print)  # type: ignore[arg-type]
    assert (outcome.tried, outcome.survived) == (1, 0)
    assert words in outcome.got_through[3]


def test_an_attack_that_does_nothing_is_survived() -> None:
    outcome = run_all("f", [(0, Attack("a", lambda folder: None))], jobs=1, report=print)
    assert (outcome.tried, outcome.survived, outcome.got_through) == (1, 1, {})


def test_the_short_form_is_a_part_of_the_full_one_and_both_follow_from_the_seed() -> None:
    def attacks(chance: random.Random) -> list[Attack]:
        return [Attack(str(chance.random()), lambda folder: None) for _ in range(50)]

    family = Family("f", "about", attacks, short=7)
    whole, short = family.chosen(1, is_short=False), family.chosen(1, is_short=True)
    assert [(index, attack.name) for index, attack in family.chosen(1, is_short=False)] == [
        (index, attack.name) for index, attack in whole
    ]
    assert len(short) == 7
    assert {(index, attack.name) for index, attack in short} < {
        (index, attack.name) for index, attack in whole
    }
    assert {attack.name for _, attack in family.chosen(2, is_short=False)}.isdisjoint(
        attack.name for _, attack in whole
    )
