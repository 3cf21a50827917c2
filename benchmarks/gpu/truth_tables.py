"""The tables that `hardware_truth.py` prints, and which of its checks failed."""

from __future__ import annotations

from typing import Any

from truth_cases import RUNS
from truth_ncu import added_up

WITHIN = 0.02
CORRECTED_WITHIN = 0.003
COST_WITHIN = 0.0005
TOP_WITHIN = 0.01
OLD_INSTRUCTIONS = ("cutlass_75", "s1688")


FLOPS_PER_CYCLE = 1024
"""Of bf16 products, in a quarter of an SM of Hopper, which is what ncu's sums are over."""


def _half_of(kernel: str) -> str:
    return "optimizer" if "multi_tensor_apply" in kernel else "passes"


def refereed_by(row: dict[str, Any], kernels: list[dict[str, Any]]) -> None:
    """Put what ncu saw beside a row."""
    pipe, matrix = (sum(kernel[key] for kernel in kernels) for key in ("pipe", "matrix"))
    row["ncu"] = sum(kernel["ops"] for kernel in kernels)
    row["non_matrix_share"] = 1 - matrix / pipe if pipe else None
    row["ncu_over_activity"] = row["ncu"] / (FLOPS_PER_CYCLE * pipe) if pipe else None
    row["kernels"] = [kernel for kernel in added_up(kernels) if kernel["ops"] or kernel["pipe"]]


def show(result: dict[str, Any]) -> list[str]:
    """The tables; the checks that failed."""
    failed = []
    for part, line in result["measured"].items():
        print(f"{part}: {line}")
    for row in result.get("training", []):
        if row["name"] in result.get("referee", {}):
            refereed_by(row, result["referee"][row["name"]])
    if "matmuls" in result:
        print("\nmatmuls: FLOP a product as a ratio to 2MNK")
        print(
            f"{'product':28} {'TFLOP/s':>8} {'ncu':>8} {'hybrid':>8} {'hyb/ncu':>8} "
            f"{'rep. clock':>10} {'MHz':>6} {'reported':>8} {'W':>5}  kernel"
        )
        for row in result["matmuls"]:
            ncu, counted = row.get("ncu"), row["counted"]
            ratio = row["hybrid"] / ncu if ncu else float("nan")
            print(
                f"{row['name']:28} {row['rate'] / 1e12:8.1f} {(ncu or float('nan')) / counted:8.4f} "
                f"{row['hybrid'] / counted:8.4f} {ratio:8.4f} {row['hybrid_reported_clock'] / counted:10.4f} "
                f"{row['clock_mhz']:6.0f} {row['reported_mhz']:8.0f} {row['power_w']:5.0f}  "
                f"{', '.join(kernel['kernel'][:60] for kernel in row.get('kernels', []))}"
            )
            old = any(
                word in kernel["kernel"] for word in OLD_INSTRUCTIONS for kernel in row.get("kernels", [])
            )
            if not old and not abs(ratio - 1) <= WITHIN:
                failed.append(f"{row['name']}: hybrid {ratio:.4f} of ncu")
    if "elementwise" in result:
        print("\nelementwise kernels by ncu: the tensor pipe's cycles, those of products, HFMA2 instructions")
        for row in result["elementwise"]:
            print(
                f"{row['name']:28} {row['pipe']:>12,} {row['matrix']:>12,} {row['hfma2']:>12,}  "
                f"{row['kernel'][:80]}"
            )
    for name, executed in result.get("instructions", {}).items():
        print(f"\n{name}: warp instructions executed, by ncu's listing; above 3 %, and HFMA2")
        total = sum(executed.values())
        if not total:
            failed.append(f"{name}: ncu listed no instructions")
        for instruction, times in executed.items():
            if times / total > 0.03 or instruction.startswith("HFMA2"):
                print(f"  {times:>12,} {times / total:6.1%}  {instruction}")
    if "halves" in result:
        print("\na step at 4×512 and its halves by the counters: TFLOP if all tensor activity were products")
        kernels = result.get("referee", {}).get(RUNS[0].name, [])
        for row in result["halves"]:
            ncu = FLOPS_PER_CYCLE * sum(
                kernel["pipe"] for kernel in kernels if row["has"] in ("all", _half_of(kernel["kernel"]))
            )
            of_ncu = f"{row['executed'] / ncu:7.4f} of ncu " if ncu else ""
            idle = "unknown" if row["idle"] is None else f"{row['idle']:6.1%}"
            vanished = f"; {row['vanished']:.0%} of the gradients below 1e-14" if "vanished" in row else ""
            print(
                f"{row['name']:52} {row['ms']:7.2f} ms {row['executed'] / 1e12:9.4f} {of_ncu}"
                f"idle {idle}{vanished}"
            )
    if "training" in result:
        print("\ntraining, 1.3 B: FLOP a step as a ratio to the count (recomputation included, all pairs)")
        print(
            f"{'run':32} {'windows':>7} {'ms':>6} {'mean':>6} "
            f"{'MFU':>6} {'ncu':>8} {'hybrid':>8} {'hyb/ncu':>8} "
            f"{'corrected':>9} {'rep. clock':>10} {'no matrix':>9} {'MHz':>6} {'reported':>8} {'W':>4}"
        )
        without_audit = 0
        for row in result["training"]:
            ncu, counted = row.get("ncu"), row["counted"]
            ratio = row["hybrid"] / ncu if ncu else float("nan")
            share, correction = row.get("non_matrix_share") or 0.0, row.get("ncu_over_activity") or 1.0
            print(
                f"{row['name']:32} {row['windows']:7} {row['step_ms']:6.1f} "
                f"{1e3 * row['seconds'] / row['steps']:6.1f} {row['mfu']:6.1%} "
                f"{(ncu or float('nan')) / counted:8.4f} {row['hybrid'] / counted:8.4f} {ratio:8.4f} "
                f"{ratio * correction:9.4f} "
                f"{row['hybrid_reported_clock'] / counted:10.4f} {share:9.2%} {row['clock_hz'] / 1e6:6.0f} "
                f"{row['reported_clock_hz'] / 1e6:8.0f} {row['power_w']:4.0f}"
            )
            if ncu and not abs(ratio * correction - 1) <= WITHIN:
                failed.append(f"training {row['name']}: hybrid {ratio * correction:.4f} of ncu")
            without_audit += abs(ratio - 1) <= WITHIN
        refereed = sum(bool(row.get("ncu")) for row in result["training"])
        print(
            f"within {WITHIN:.0%} of ncu without the correction (no audit of the model): "
            f"{without_audit} of {refereed}"
        )
        for row in result["training"]:
            if "kernels" not in row:
                continue
            print(
                f"\n{row['name']}: {row['ncu']:,} FLOP a step by ncu; "
                "by kernel: share of the count, of the pipe's cycles beyond products"
            )
            pipe = sum(kernel["pipe"] for kernel in row["kernels"])
            for kernel in row["kernels"]:
                beyond = (kernel["pipe"] - kernel["matrix"]) / pipe
                if kernel["ops"] / row["counted"] > 0.001 or beyond > 0.0002:
                    print(
                        f"  {kernel['ops'] / row['counted']:7.2%} {beyond:7.3%} "
                        f"{kernel['launches']:5} launches  {kernel['kernel'][:90]}"
                    )
    if "audited" in result:
        print("\nwith `hybrid_mode.audit`: what the monitor says was executed, as it says it, over ncu's")
        for row in result["audited"]:
            kernels = result.get("referee", {}).get(row["run"], [])
            ncu = sum(kernel["ops"] for kernel in kernels)
            ratio = row["hybrid"] / ncu if ncu else float("nan")
            print(
                f"{row['name']:32} {row['step_ms']:6.1f} ms, "
                f"corrected by {row['executed_over_activity']:.4f}; "
                f"{row['hybrid'] / row['counted']:.4f} of the count, {ratio:.4f} of ncu"
            )
            if not abs(ratio - 1) <= WITHIN:
                failed.append(f"audited {row['name']}: hybrid {ratio:.4f} of ncu")
    if "audit_models" in result:
        print("\nother models: hybrid over ncu, without and with `hybrid_mode.audit`")
        print(
            f"{'model':36} {'ms':>6} {'launches':>8} {'ncu':>10} {'FLOP/cycle':>10} "
            f"{'uncorrected':>11} {'corrected':>9} {'ncu/counted':>11} {'MHz':>6}"
        )
        for row in result["audit_models"]:
            ratio = row["corrected"] / row["ncu"]
            print(
                f"{row['name']:36} {row['step_ms']:6.1f} {row['launches']:8} {row['ncu']:10.4g} "
                f"{row['flops_per_cycle']:10.1f} {row['uncorrected'] / row['ncu']:11.4f} {ratio:9.4f} "
                f"{row['ncu'] / row['counted']:11.4f} {row['clock_hz'] / 1e6:6.0f}"
            )
            print(f"    audit: {row['verdict']}")
            for text in row["warnings"]:
                print(f"    monitor: {text}")
            if not abs(ratio - 1) <= CORRECTED_WITHIN:
                failed.append(f"{row['name']}: corrected hybrid {ratio:.4f} of ncu")
    for part in ("training", "staged"):
        if part in result:
            print(f"\n{part}: where the peak went, in points of it")
            for row in result[part]:
                fall = row.get("waterfall")
                if fall is None:
                    failed.append(f"{part} {row['name']}: no waterfall")
                    continue
                total = 100 * sum(piece["share"] for piece in fall["parts"])
                said = ", ".join(f"{piece['key']} {100 * piece['share']:.1f}" for piece in fall["parts"])
                print(f"{row['name']:32} {said}; sum {total:.1f}; limiter {row['limiter']}")
                if abs(total - 100) > 1:
                    failed.append(f"{part} {row['name']}: parts add up to {total:.1f}")
                if "expected" in row and row["limiter"] not in row["expected"]:
                    failed.append(f"{row['name']}: limiter {row['limiter']}, expected {row['expected']}")
                for sentence in row["advice"]:
                    print(f"{'':34}{sentence}")
    if "cost" in result:
        row = result["cost"]
        print(
            f"\ncost: hybrid against no monitor at 8×1024, all weights zero ({row['step_ms']:.1f} ms a step, "
            f"{row['pairs']} pairs of blocks of {row['block_s']:g} s, {row['windows']} windows): "
            f"{row['difference']:+.3%} (95 % {row['low']:+.3%} … {row['high']:+.3%}); a stamp "
            f"{row['cut_us']:.0f} µs on the training thread and {row['stamp_us']:.0f} µs on the GPU "
            f"every ten seconds; a read every second on a thread of its own {row['read_us']:.0f} µs of CPU "
            f"with the energy counter, {row['read_without_energy_us']:.0f} µs without; `truemfu top` once a "
            f"second {row['top_of_a_core']:.2%} of a core"
        )
        if row["top_of_a_core"] > TOP_WITHIN:
            failed.append(f"top: {row['top_of_a_core']:.2%} of a core")
        if row["difference"] > COST_WITHIN:
            failed.append(f"cost {row['difference']:+.3%}")
        if row["windows"] < row["pairs"]:
            failed.append(f"cost: {row['windows']} windows in {row['pairs']} blocks")
    return failed
