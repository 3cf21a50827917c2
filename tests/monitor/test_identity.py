"""Training is the same with a monitor: a sample of the programs of the fault suite (`make faults` has all).

Each runs alone, with a `TrainingMonitor` and under `truemfu run`, in processes of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from faults.observed_programs import PROGRAMS

ROOT = Path(__file__).parents[2]
SAMPLE = (
    "global numpy generator",
    "iterator in forward",
    "scratch folder deleted by del",
    "semaphore released by the loop",
    "global module hooks",
    "dispatch mode from step 1 to step 3",
    "exception in backward caught",
    "scripted while watched",
)

CHECK = """
import json, sys
from pathlib import Path
from faults.observed import differences
texts = json.loads(sys.stdin.read())
print(json.dumps(differences(texts, Path(sys.argv[1]))))
"""


_MONITORED = "train(model := Net())\nif 'OBSERVED_MONITOR' in os.environ: "
DIFFERENT = {
    f"{_MONITORED}torch.rand(())": "with a monitor: torch random state",
    f"{_MONITORED}np.random.rand()": "with a monitor: numpy random state",
    f"{_MONITORED}random.random()": "with a monitor: python random state",
    f"{_MONITORED}note('seen')": "with a monitor: noted: [] alone, ['seen']",
    f"{_MONITORED}print('seen')": "with a monitor: output: '' alone",
    f"{_MONITORED}model.one.bias.data[0] += 1": "with a monitor: weights",
    f"{_MONITORED}sys.exit(3)": "with a monitor: exit status: '0' alone, '3'",
    f"{_MONITORED}open('x', 'w').close()": "with a monitor: files: {} alone",
    "train(Net()); note('TRUEMFU_RUN_PID' in os.environ)": "under run: noted: ['False'] alone, ['True']",
    "raise ValueError('own fault')": "the program itself fails",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Differences of each program; from a process of its own, for it forks, which one with threads cannot."""
    texts = {name: PROGRAMS[name] for name in SAMPLE} | {text: text for text in DIFFERENT}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK, str(tmp_path_factory.mktemp("programs"))],
        cwd=ROOT,
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_sample_of_programs_is_the_same_with_a_monitor_and_under_run(found: dict[str, list[str]]) -> None:
    assert {name: found[name] for name in SAMPLE} == {name: [] for name in SAMPLE}


def test_every_kind_of_difference_is_found(found: dict[str, list[str]]) -> None:
    for text, difference in DIFFERENT.items():
        assert any(difference in problem for problem in found[text]), (text, found[text])
