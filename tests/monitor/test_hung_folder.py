"""A run's folder that hangs, as on a dead NFS: nobody else waits for it.

Each run is a process of its own in which every access to the folder blocks for ever, on whatever thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 200
RUN = """
import json, os, sys, threading, time, warnings
from pathlib import Path
folder, after, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hangs = False
held = set()

def hold():
    held.add(threading.current_thread().name)
    print("held:", threading.current_thread().name, file=sys.stderr, flush=True)
    threading.Event().wait()

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir", "os.truncate", "os.link"}

def on_event(event, args):
    if hangs and event in EVENTS and any(str(arg).startswith(folder) for arg in args):
        hold()

def blocking(call):
    def blocked(path, *args, **kwargs):
        is_there = isinstance(path, int) or str(path).startswith(folder)
        if hangs and is_there and (not isinstance(path, int) or call is os_pwrite):
            hold()
        return call(path, *args, **kwargs)
    return blocked

os_pwrite = os.pwrite
for name in ("stat", "lstat", "pwrite"):
    setattr(os, name, blocking(getattr(os, name)))
sys.addaudithook(on_event)

import torch
from torch import nn
import truemfu.monitor.monitor as monitor_module
import truemfu.monitor.rows.output as output_module
from truemfu import TrainingMonitor

warnings.simplefilter("ignore")
torch.set_num_threads(1)
monitor_module._CLOSE_TIMEOUT_S = output_module._RUN_FILE_S = 1.0

class Memory:
    def __init__(self):
        self.rows = []
    def start(self, run): pass
    def log(self, step, metrics): self.rows.append(dict(metrics))
    def flush(self): pass
    def finish(self, summary): pass

model, memory = nn.Linear(8, 8), Memory()
config = {"monitoring": {"peak_tflops": 1, "detailed_log_freq": 1, "save_freq": 10}}
hangs = after == 0
monitor = TrainingMonitor(folder, config, model=model, trackers=[memory])
for step in range(1, steps + 1):
    model(torch.ones(2, 8)).sum().backward()
    monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    time.sleep(0.005)
    if step == after:
        while not Path(folder, "training_run.json").exists():
            time.sleep(0.01)
        hangs = True
limit_s = time.monotonic() + 120
while not memory.rows and time.monotonic() < limit_s:
    time.sleep(0.05)
rows_before_close = len(memory.rows)
monitor.close()
summary = monitor.summary()
print(json.dumps({
    "before_close": rows_before_close,
    "steps": [row["global_step"] for row in memory.rows],
    "method": memory.rows[-1].get("perf/method") if memory.rows else None,
    "lost": summary["lost"], "warnings": summary["warnings"], "held": sorted(held),
}))
"""


def outcome(folder: Path, after: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(after), str(STEPS)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("after", [0, 100])
def test_a_folder_that_hangs_holds_up_nobody(tmp_path: Path, after: int) -> None:
    found = outcome(tmp_path / "run", after)
    assert found["steps"] == list(range(1, STEPS + 1))
    assert found["before_close"] > 0
    assert found["method"] == "count of observed steps"
    assert "truemfu-file" in found["held"]
    assert not {"MainThread", "truemfu-rows", "truemfu-Memory"} & set(found["held"])
    lost = "; ".join(found["lost"])
    assert "rows of tracker file: it did not finish within" in lost
    assert "the content of training_run.json: it did not finish within" in lost
    assert any("tracker training_run.json failed" in text for text in found["warnings"])
