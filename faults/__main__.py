"""`python -m faults`: run the attacks, print the table, exit with 1 where one got through."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence

import torch

import truemfu

from .attack import Outcome, run_all, run_here
from .families import FAMILIES
from .preload import preload


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a sample of each family")
    parser.add_argument("--family", action="append", choices=[family.name for family in FAMILIES])
    parser.add_argument("--only", metavar="FAMILY:INDEX", help="one attack, here, with what it prints")
    parser.add_argument("--list", action="store_true", help="the attacks by name, without running them")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="attacks side by side")
    chosen = parser.parse_args(arguments)
    preload()
    families = [family for family in FAMILIES if chosen.family is None or family.name in chosen.family]
    if chosen.only is not None:
        name, _, index = chosen.only.partition(":")
        attacks = {
            (family.name, str(number)): attack
            for family in FAMILIES
            for number, attack in (family.chosen(chosen.seed, is_short=False) if family.name == name else ())
        }
        attack = attacks.get((name, index))
        if attack is None:
            known = f"0 to {len(attacks) - 1}" if attacks else ", ".join(family.name for family in FAMILIES)
            parser.error(f"--only takes FAMILY:INDEX, such as kills:0; got {chosen.only!r} (known: {known})")
        print(f"{name}:{index}  {attack.name}", file=sys.stderr)
        run_here(attack)
        return 0
    if chosen.list:
        for family in families:
            for index, attack in family.chosen(chosen.seed, is_short=chosen.short):
                print(f"{family.name}:{index}  {attack.name}")
        return 0
    outcomes = []
    for family in families:
        print(f"{family.name}: {family.about}", file=sys.stderr, flush=True)
        attacks = family.chosen(chosen.seed, is_short=chosen.short)
        outcomes.append(run_all(family.name, attacks, jobs=chosen.jobs, report=_say))
    if chosen.json:
        print(json.dumps([{**vars(outcome), "survived": outcome.survived} for outcome in outcomes], indent=2))
    else:
        print(table(outcomes, seed=chosen.seed))
    for outcome in outcomes:
        for index, problem in outcome.got_through.items():
            _say(f"{problem}\n  python -m faults --seed {chosen.seed} --only {outcome.family}:{index}")
    return 1 if any(outcome.got_through for outcome in outcomes) else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(outcomes: Sequence[Outcome], *, seed: int) -> str:
    """Tried and survived, with what they were tried on."""
    about = {family.name: family.about for family in FAMILIES}
    rows = [
        (outcome.family, about[outcome.family], outcome.tried, outcome.survived, outcome.seconds)
        for outcome in outcomes
    ]
    rows.append(("all", "", *(sum(row[column] for row in rows) for column in (2, 3, 4))))
    lines = [
        f"truemfu {truemfu.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, "
        f"seed {seed}",
        "",
        f"{'family':<14} {'what is attacked':<52} {'tried':>6} {'survived':>9} {'seconds':>8}",
        "─" * 93,
    ]
    lines += [
        f"{name:<14} {what:<52} {tried:>6,} {survived:>9,} {took:>8.0f}"
        for name, what, tried, survived, took in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
