"""Which GPUs there are, asked of a driver's tool that answers as nvidia-smi does, and one slot for each."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from supervised import Recorder

from truemfu.errors import UsageError
from truemfu.records import SweepCase
from truemfu.sweep.config import TEST_CONFIG, override
from truemfu.sweep.gpus import chosen_gpus, device_name, resolve_device, visible_gpus
from truemfu.sweep.launchers.local import slots
from truemfu.sweep.supervisor.runner import run_sweep


@pytest.fixture
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\nNVIDIA A100\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.usefixtures("three_gpus")
def test_all_gpus_are_there_by_number() -> None:
    assert visible_gpus() == ["0", "1", "2"]
    assert resolve_device("auto") == "cuda"
    assert device_name("cuda") == "NVIDIA A100 + NVIDIA H200"


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("allowed", "visible"),
    [("2,0", ["2", "0"]), ("GPU-1a2b", ["GPU-1a2b"]), ("", []), ("-1", []), ("1,-1,2", ["1"])],
)
def test_cuda_visible_devices_is_respected_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, allowed: str, visible: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible_gpus() == visible
    assert resolve_device("auto") == ("cuda" if visible else "cpu")


@pytest.mark.usefixtures("three_gpus")
def test_gpus_are_chosen_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert chosen_gpus(None) == {0: "2", 1: "0"}
    assert chosen_gpus([1]) == {1: "0"}
    with pytest.raises(UsageError, match=r"gpus must be numbers from 0 to 1 \(visible here: 2\); got 2"):
        chosen_gpus([0, 2])


def test_cuda_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="no NVIDIA GPU is visible"):
        resolve_device("cuda")
    assert resolve_device("auto") == "cpu"
    assert resolve_device("cpu") == "cpu"
    assert device_name("cpu")


SHOW = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']), os.environ.get('CUDA_DEVICE_ORDER'))"
CASE = SweepCase(trainer="StandardTrainer", model="tiny", batch_size=2, seq_len=32)


def seen_by_workers(device: str) -> list[str]:
    seen = []
    for slot in slots(TEST_CONFIG, device, [sys.executable, "-c", SHOW]):
        worker = slot.worker_for(CASE)
        assert worker.wait(600.0)
        worker.end()
        seen.append(f"{slot.name} {worker.first_output.decode().strip()}")
    return seen


@pytest.mark.usefixtures("three_gpus")
def test_each_slot_shows_its_worker_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert seen_by_workers("cuda") == [f"gpu{n} '{n}' PCI_BUS_ID" for n in range(3)]


@pytest.mark.usefixtures("three_gpus")
def test_a_slot_on_a_cpu_hides_the_gpus() -> None:
    (only,) = seen_by_workers("cpu")
    assert only.startswith("cpu ''")


def test_a_worker_made_ready_is_used_and_one_that_died_meanwhile_is_not() -> None:
    (slot,) = slots(TEST_CONFIG, "cpu", [sys.executable, "-c", "import sys; sys.stdin.readline()"])
    slot.make_ready(CASE)
    first = slot.worker_for(CASE)
    slot.make_ready(CASE)
    second = slot.worker_for(CASE)
    assert first.pid != second.pid
    for worker in (first, second):
        assert not worker.wait(0.0)
        worker.end()

    (slot,) = slots(TEST_CONFIG, "cpu", [sys.executable, "-c", "import sys; sys.exit(5)"])
    slot.make_ready(CASE)
    ready = slot._ready
    assert ready is not None
    assert ready.wait(600.0)
    fresh = slot.worker_for(CASE)
    assert fresh.pid != ready.pid
    fresh.end()


@pytest.mark.usefixtures("three_gpus")
def test_a_slot_is_named_after_its_gpu_and_no_gpu_has_two() -> None:
    config = override(TEST_CONFIG, gpus=[2, 0, 2])
    assert [slot.name for slot in slots(config, "cuda")] == ["gpu2", "gpu0"]


def test_a_gpu_by_number_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="gpus is 7, but no NVIDIA GPU is visible"):
        resolve_device("auto", [7])
    assert resolve_device("cpu", [7]) == "cpu"


def test_a_worker_made_ready_with_other_imports_is_not_used() -> None:
    (slot,) = slots(TEST_CONFIG, "cpu", [sys.executable, "-c", "import sys; sys.stdin.readline()"])
    slot.make_ready(msgspec.structs.replace(CASE, trainer="DPSGDTrainer"))
    ready = slot._ready
    assert ready is not None
    plain = slot.worker_for(CASE)
    assert plain.pid != ready.pid
    assert ready.signal_name == "SIGKILL"
    plain.end()


@pytest.mark.usefixtures("three_gpus")
def test_a_slot_of_several_gpus_has_them_to_itself() -> None:
    config = override(TEST_CONFIG, gpus=[2, 0])
    (both,) = slots(config, "cuda", [sys.executable, "-c", SHOW], gpus_per_experiment=2)
    assert both.name == "gpu2-0"
    assert [slot.name for slot in slots(TEST_CONFIG, "cuda", gpus_per_experiment=2)] == ["gpu0-1"]
    assert [slot.name for slot in slots(TEST_CONFIG, "cpu", gpus_per_experiment=4)] == ["cpu"]


@pytest.mark.usefixtures("three_gpus")
def test_too_few_gpus_start_nothing(tmp_path: Path) -> None:
    config = override(TEST_CONFIG, device="cuda", gpus_per_experiment=[1, 4], parallel="ddp")
    with pytest.raises(UsageError, match="gpus_per_experiment is 4, but only 3 GPUs can be used here"):
        run_sweep(config, tmp_path / "sweep", listener=Recorder())
    assert not (tmp_path / "sweep").exists()
