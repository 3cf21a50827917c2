"""The ledger of `truemfu try`: what it measures from outside against the same line written by hand.

Why: a tool that says "compile gains 24 %" is believed when the same line, written into the script by hand and
timed without the tool, gains 24 %. For each model (random weights, synthetic batches, `try_training.py`) this
runs
  try        `truemfu try` on the script, every remedy that applies
  by hand    the script with the remedy's line in its code and the unchanged one, in turns in one process; it
             times its steps by CUDA events, and truemfu is not imported
and prints a row for each remedy: the step, the gain by `try` with its 95 % interval, the gain by hand,
whether that lies in the interval or within 1 % of the step, and the verdict. `at most` is the bound of
`truemfu explain`, if this truemfu has it. It ends with how many rows agree, and all as one line of JSON.

    PYTHONPATH=src python benchmarks/gpu/try_ledger.py --models llama vit -o ledger-1 --time 500
    PYTHONPATH=src python benchmarks/gpu/try_ledger.py --merge ledger-1 ledger-2  # of several calls

A model takes three to six minutes on an H200, a third of it by hand. --time is a limit in seconds for all, in
equal parts for the models; what it leaves out is named. --only names remedies, --rounds and --steps are the
repeats of `try`, and --tiny makes models for a CPU. A model that fails costs its own rows. The folder has the
trials, and each model's entry.json once it is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = ("llama", "llama_checkpointed", "vit", "convnext", "bert", "moe", "unet")
WARM_UP = 10
WITHIN = 0.01
HAND_LIMIT_S = 240

SCRIPT = Path(__file__).with_name("try_training.py")


def run_try(model: str, folder: Path, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """The trial of one model."""
    command = [sys.executable, "-m", "truemfu", "try", "--json", "-o", str(folder / "try")]
    command += ["--steps", str(options.steps), "--warm-up", str(WARM_UP), "--rounds", str(options.rounds)]
    if math.isfinite(left_s):
        command += ["--time", f"{left_s:.0f}s"]
    if options.only:
        command += ["--only", ",".join(options.only)]
    command += ["--", sys.executable, str(SCRIPT), model, *(["--tiny"] if options.tiny else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"truemfu try ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def gain_by_hand(model: str, folder: Path, options: argparse.Namespace, case: dict[str, Any]) -> float:
    """The share of a step that the lines of a case gain in the script: by medians, and with workers, where
    steps differ in their wait, by means."""
    out = folder / f"hand-{case['name']}.json"
    command = [sys.executable, str(SCRIPT), model, "--warm-up", str(WARM_UP), "--out", str(out)]
    command += ["--write", *(case["remedies"] or [case["name"]]), *(["--tiny"] if options.tiny else [])]
    if lines := [line for line in case["lines"] if "block" in line or "sdp(" in line or "set_attn" in line]:
        command += ["--line", lines[0]]
    if workers := [line for line in case["lines"] if "num_workers" in line]:
        command += ["--workers", workers[0].partition("num_workers=")[2].partition(",")[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HAND_LIMIT_S)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed")
    step_s = {
        name: statistics.fmean(times) if workers else statistics.median(times)
        for name, times in json.loads(out.read_text()).items()
    }
    print(
        f"  by hand {case['name']}: {1e3 * step_s['unchanged']:.2f} {1e3 * step_s['written']:.2f} ms",
        flush=True,
    )
    return 1 - step_s["written"] / step_s["unchanged"]


def by_hand(
    model: str, folder: Path, options: argparse.Namespace, trial: dict[str, Any], until_s: float
) -> dict[str, Any]:
    """Gains by hand of all cases that `try` measured."""
    cases = [case for case in [*trial["cases"], trial["together"]] if case and case["gain"] is not None]
    gains: dict[str, float] = {}
    failures: dict[str, str] = {}
    for case in cases:
        if time.monotonic() > until_s:
            failures[case["name"]] = "--time is over"
            continue
        try:
            gains[case["name"]] = gain_by_hand(model, folder, options, case)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failures[case["name"]] = str(error)[:300]
    return {"gains": gains, "failures": failures}


def bounds_of(model: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds that each remedy can gain at most, by `truemfu explain`; none if there is no such command."""
    command = [sys.executable, "-m", "truemfu", "explain", "--json", "--", sys.executable, str(SCRIPT), model]
    try:
        done = subprocess.run(
            command + (["--tiny"] if options.tiny else []),
            capture_output=True,
            text=True,
            check=False,
            timeout=HAND_LIMIT_S,
        )
        found = json.loads(done.stdout) if not done.returncode else {}
        return {one["remedy"]: one["at_most_s"] for one in found["bounds"] if one["at_most_s"] is not None}
    except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return {}


def rows_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a model."""
    trial, hand = entry["try"], entry["hand"]
    cases = [case for case in trial["cases"] if case["verdict"] not in ("does not apply", "not measured")]
    cases += [trial["together"]] if trial["together"] else []
    rows = []
    for case in cases:
        by, gain = hand["gains"].get(case["name"]), case["gain"]
        agrees = None
        if by is not None and gain is not None:
            agrees = case["gain_low"] <= by <= case["gain_high"] or abs(by - gain) <= WITHIN
        at_most_s = entry["bounds"].get(case["name"])
        bound = None if at_most_s is None else at_most_s / trial["step_time_s"]
        rows.append(
            {
                "model": entry["model"],
                "remedy": case["name"],
                "verdict": case["verdict"],
                "reason": case["reason"],
                "step_time_s": trial["step_time_s"],
                "at_most": bound,
                "gain": gain,
                "gain_low": case["gain_low"],
                "gain_high": case["gain_high"],
                "by_hand": by,
                "by_hand_unknown": hand["failures"].get(case["name"]),
                "agrees": agrees,
                "losses": case["losses"],
                "is_recommended": case["name"] in trial["recommended"],
            }
        )
    return rows


COLUMNS = (
    ("model", 20), ("remedy", 19), ("step", 11), ("at most", 9), ("by try", 9), ("95 % interval", 18),
    ("by hand", 9), ("agrees", 8), ("verdict", 0),
)  # fmt: skip


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def cells_of(row: dict[str, Any]) -> list[str]:
    low, high = row["gain_low"], row["gain_high"]
    return [
        row["model"],
        row["remedy"],
        f"{1e3 * row['step_time_s']:.2f} ms",
        percent(row["at_most"]),
        percent(row["gain"]),
        "-" if low is None else f"{100 * low:+.1f} to {100 * high:+.1f}",
        percent(row["by_hand"]),
        {None: "-", True: "yes", False: "NO"}[row["agrees"]],
        row["verdict"] + (f": {row['reason'][:80]}" if row["verdict"] == "failed" else ""),
    ]


def show(entries: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for entry in entries if "try" in entry for row in rows_of(entry)]
    print()
    for cells in ([name for name, _ in COLUMNS], *map(cells_of, rows)):
        print("".join(cell.ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)))
    judged = [row["agrees"] for row in rows if row["agrees"] is not None]
    chosen = [row for row in rows if row["is_recommended"]]
    wrong = [f"{row['model']} {row['remedy']}" for row in chosen if (row["by_hand"] or 0) < -WITHIN]
    failed = {entry["model"]: entry["error"] for entry in entries if "error" in entry}
    print(f"\n{sum(judged)} of {len(judged)} rows agree", end="; ")
    print(f"recommended although it loses by hand: {', '.join(wrong) or 'none'}")
    for model, error in failed.items():
        print(f"{model}: {error}")
    return {"rows": rows, "agree": sum(judged), "judged": len(judged), "wrong": wrong, "failed": failed}


def machine() -> dict[str, Any]:
    import torch

    import truemfu

    found = {
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "truemfu": truemfu.__version__,
    }
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ImportError:
        found["transformers"] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--only", nargs="*", default=[], help="remedies")
    parser.add_argument("--time", type=float, default=math.inf, help="seconds for all")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=Path("try-ledger"))
    parser.add_argument("--merge", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    if options.merge:
        entries = [
            json.loads(p.read_text()) for folder in options.merge for p in sorted(folder.glob("*/entry.json"))
        ]
        print(json.dumps(show(entries)))
        return
    until_s = time.monotonic() + options.time
    about, entries = machine(), []
    print(json.dumps(about), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    for number, model in enumerate(options.models):
        left_s = (until_s - time.monotonic()) / (len(options.models) - number)
        if left_s < 30:
            print(f"{model}: left out, --time is over", flush=True)
            continue
        model_until_s = time.monotonic() + left_s
        folder = options.output / model
        folder.mkdir(parents=True, exist_ok=True)
        entry: dict[str, Any] = {"model": model, "about": about}
        try:
            entry["bounds"] = bounds_of(model, options)
            entry["try"] = run_try(model, folder, options, left_s * 0.65)
            entry["hand"] = by_hand(model, folder, options, entry["try"], model_until_s)
        except (RuntimeError, OSError, ValueError) as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            entry.pop("try", None)
        entries.append(entry)
        (folder / "entry.json").write_text(json.dumps(entry))
        show([entry])
    print(json.dumps({"about": about, **show(entries)}))


if __name__ == "__main__":
    main()
