"""Time in collectives from torch's records of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from truemfu.monitor.ranks.collective_times import CollectiveTimes

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
for _ in range(5):
    dist.all_reduce(torch.ones(1000))
print(torch._C._distributed_c10d._dump_fr_trace_json(True, False).decode())
"""


NCCL = {
    "collective_seq_id": 598,
    "duration_ms": 0.12665599584579468,
    "input_dtypes": ["Float"],
    "input_sizes": [[67108864]],
    "is_p2p": False,
    "op_id": 598,
    "output_dtypes": ["Float"],
    "output_sizes": [[67108864]],
    "p2p_seq_id": 0,
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "nccl:_all_gather_base",
    "record_id": 597,
    "retired": True,
    "state": "completed",
    "thread_id": "140521572163904",
    "thread_name": "python3",
    "time_created_ns": 1794950097790151788,
    "time_discovered_completed_ns": 1794950097875831304,
    "time_discovered_started_ns": 1794950097875831075,
    "timeout_ms": 600000,
}
"""As NCCL 2.28 and torch 2.11 recorded it in a process on an H200, with TORCH_NCCL_ENABLE_TIMING=1."""


def record(number: int, group: str, at_s: float, took_s: float | None) -> dict[str, Any]:
    """As torch 2.13 writes it, without what is not read."""
    found: dict[str, Any] = {
        "record_id": number,
        "process_group": [group, f"mesh_{group}"],
        "time_created_ns": int(at_s * 1e9),
        "state": "scheduled",
    }
    return found if took_s is None else found | {"duration_ms": 1e3 * took_s, "state": "completed"}


def encoded(*records: dict[str, Any]) -> bytes:
    return json.dumps({"version": "2.10", "entries": records}).encode()


def test_the_share_of_each_group() -> None:
    records = [record(n, "dp", 0.1 * n, 0.02) for n in range(0, 20, 2)]
    records += [record(n, "tp", 0.1 * n, 0.05) for n in range(1, 20, 2)]
    times = CollectiveTimes(lambda: encoded(*records))
    assert times.shares() == pytest.approx({"mesh_dp": 0.1, "mesh_tp": 0.25})
    assert times.shares() is None  # nothing new
    records[:] = [record(18, "dp", 1.8, 0.02), record(20, "dp", 2.2, 0.3), record(21, "dp", 2.6, None)]
    assert times.shares() == pytest.approx({"mesh_dp": 0.02 / 0.4})
    records[:] = [record(20, "dp", 2.2, 0.3), record(21, "dp", 2.6, 0.1)]
    assert times.shares() == pytest.approx({"mesh_dp": 0.3 / 0.4})


def test_records_of_nccl_are_read() -> None:
    later = NCCL | {"record_id": 598, "time_created_ns": NCCL["time_created_ns"] + 1_000_000}  # type: ignore[operator]
    times = CollectiveTimes(lambda: encoded(NCCL, later))
    assert times.shares() == pytest.approx({"default_pg": 0.12665599584579468})


def test_groups_of_one_description_stay_apart() -> None:
    records = [
        record(n, group, 0.1 * n, 0.16) | {"process_group": [group, "undefined"]}
        for n in range(20)
        for group in [str(n % 2)]
    ]
    times = CollectiveTimes(lambda: encoded(*records))
    assert times.shares() == pytest.approx({"undefined 0": 0.8, "undefined 1": 0.8})


def test_records_that_were_overwritten_are_left_out() -> None:
    records = [record(n, "dp", float(n), 0.5) for n in range(3)]
    times = CollectiveTimes(lambda: encoded(*records))
    times.shares()
    records[:] = [record(n, "dp", float(n), 0.1) for n in range(100, 110)]
    assert times.shares() == pytest.approx({"mesh_dp": 0.1})


@pytest.mark.parametrize("records", [None, encoded(), encoded(record(1, "dp", 1.0, None))])
def test_without_durations_nothing_is_known(records: bytes | None) -> None:
    assert CollectiveTimes(lambda: records).shares() is None


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch records NCCL's alone"
)
def test_records_of_torch_can_be_read() -> None:
    """Gloo's are not timed, but have the same format."""
    ran = subprocess.run(
        [sys.executable, "-c", GLOO],
        env={"TORCH_FR_BUFFER_SIZE": "100", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    data = json.loads(ran.stdout)
    assert len(data["entries"]) == 5
    assert CollectiveTimes(lambda: ran.stdout.encode()).shares() is None
    for entry in data["entries"]:
        entry["duration_ms"] = 0.001
    (description,) = CollectiveTimes(lambda: json.dumps(data).encode()).shares() or {}
    assert description == "default_pg"
