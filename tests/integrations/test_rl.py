"""Loops of reinforcement learning: work of every phase against a count by hand, and the MFUs of each step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.22")

from benchmarks.rl_phases import LOOPS, rows_of, work_of

OWN, TRL_STEPS = 16, 6


@pytest.mark.parametrize("name", LOOPS)
def test_work_of_every_phase_is_that_by_hand(name: str, tmp_path: Path) -> None:
    is_trl = name.startswith("TRL")
    if is_trl:
        pytest.importorskip("trl", minversion="1.0")
    steps = TRL_STEPS if is_trl else OWN
    hand = LOOPS[name](tmp_path, steps)
    rows, known = rows_of(tmp_path), {"training": 0, "no_grad": 0, "generate": 0}
    assert len(rows) == len(hand.steps) == steps
    for row, by_hand in list(zip(rows, hand.steps, strict=True))[1:]:
        for phase, flops in work_of(row).items():
            if flops is not None:
                assert (phase, flops) == (phase, by_hand[phase]), row
                known[phase] += 1
        if "perf/mfu_whole_step" in row:
            gap_s = sum(row.get(f"perf/{kind}_time", 0.0) for kind in ("evaluation", "other_pause"))
            seconds = row["perf/step_time"] + gap_s
            whole = by_hand["training"] + by_hand["no_grad"]
            assert row["perf/mfu_whole_step"] * seconds * 1e12 == pytest.approx(whole)
        assert row.get("perf/mfu_training", 1.0) > 0.999 * row.get("perf/mfu", 0.0)
    does = {work: sum(step[work] > 0 for step in hand.steps[1:]) for work in known}
    if is_trl:
        assert all((known[work] > 0) == (does[work] > 0) for work in known)
    else:
        assert known["training"] == OWN - 1
        assert known["no_grad"] >= OWN - 9
        assert known["generate"] >= does["generate"] - 3
        assert any("perf/observed" not in row and "perf/mfu_whole_step" in row for row in rows)
