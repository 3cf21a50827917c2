"""An audit of two layers in a file, for hybrid runs of twenty-four."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from fake_ncu import EXECUTED, STEP, STEP_COUNT

from truemfu import Convention
from truemfu.errors import RecordError
from truemfu.flops.count.counted_step import CountedStep
from truemfu.flops.count.step_work import work_of
from truemfu.hardware.nsight.audit import audit_of
from truemfu.hardware.nsight.audited import read_audit
from truemfu.hardware.nsight.csv_output import parse_ncu_csv
from truemfu.hardware.tiles import mean_tile_factor
from truemfu.sweep.worker.models import build_reference_model

HOPPER = (9, 0)
AUDIT = (
    '{{"executed_over_activity": {ratio}, "executed_by_dtype": {{}}, "products": [{products}], '
    '"is_a_step": {is_a_step}}}'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "audit.json"
    audit = msgspec.to_builtins(audit_of(parse_ncu_csv(STEP), STEP_COUNT))
    path.write_text(json.dumps({**audit, "is_a_step": True}), encoding="utf-8")
    return path


def test_two_layers_tell_what_all_layers_execute_to_the_last_operation(file: Path) -> None:
    """By Nsight Compute, 24 layers at 4 × 512 execute 15,669,919,744,000 FLOP in products (H200)."""
    model = build_reference_model("1b", device=torch.device("meta"), dtype=torch.bfloat16)
    ids = torch.zeros(4, 512, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    tally, _, _ = CountedStep(model, batch, Convention(), True, None).run()
    work = work_of(tally)
    needed = sum(work.products.values())
    audited = read_audit(file).tile_factors()
    factor = mean_tile_factor(work.products, HOPPER, audited=audited)
    assert factor is not None
    assert round(factor * needed) == 15_669_919_744_000
    assert mean_tile_factor(work.products, HOPPER) == 1.0  # the model alone takes tiles without waste
    assert work.attention_blocked == 450_971_566_080


def test_what_else_is_in_the_file(file: Path) -> None:
    audit = read_audit(file)
    assert audit.executed_over_activity == EXECUTED / 1024 / 2_088_614_782
    assert audit.executed_by_dtype == {"bf16": EXECUTED}
    factors = audit.tile_factors()
    assert len(factors) == 7
    assert factors[2048, 32_000, 2048] == factors[32_000, 2048, 2048] == pytest.approx(1.0395, abs=1e-4)
    assert {value for shape, value in factors.items() if shape[0] != 32_000 and shape[1] != 32_000} == {1.0}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("no json", "is not an audit"),
        ("[" * 100_000, "is not an audit"),
        ("{}", "is not an audit: .*executed_over_activity"),
        (AUDIT.format(ratio=0.9, products="", is_a_step="false"), "a selection of launches"),
        (AUDIT.format(ratio=1.5, products="", is_a_step="true"), "expected above 0 and at most 1"),
        (AUDIT.format(ratio=0, products="", is_a_step="true"), "expected above 0 and at most 1"),
        (
            AUDIT.format(
                ratio="null",
                is_a_step="true",
                products='{"m": 1, "n": 1, "k": 1, "needed_flops": 2, "executed_flops": 1}',
            ),
            "executed fewer FLOPs than it needs",
        ),
    ],
)
def test_what_is_no_audit_is_said(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "audit.json").write_text(content, encoding="utf-8")
    with pytest.raises(RecordError, match=problem):
        read_audit(tmp_path / "audit.json")


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        read_audit(tmp_path / "audit.json")
