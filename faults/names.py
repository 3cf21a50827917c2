"""Hostile names in files that are read and in arguments: none leads out of its folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from truemfu import TrainingMonitor
from truemfu.errors import TruemfuError
from truemfu.monitor.config import load_config

from .attack import Attack
from .sweep_folder import call, check_shown, resume, shown, template
from .training import Kept, Net

NAMES = {
    "a parent": "../outside",
    "a grandparent": "../../outside",
    "many parents": "../" * 40 + "tmp",
    "dots": "..",
    "a dot": ".",
    "nothing": "",
    "a folder and a file": "a/b",
    "a backslash": "..\\outside",
    "NUL": "a\0b",
    "300 characters": "x" * 300,
    "300 bytes": "é" * 150,
    "5,000 characters": "y" * 5000,
    "clipboard": "a\x1b]52;c;aGk=\x07b",
    "clear screen": "\x1b[2J\x9b2J",
    "right to left": "a\u202eb\u200b",
    "half a pair": "\udcff",
    "line breaks": "a\r\nerror: b",
    "an option": "--output=outside",
    "home": "~/outside",
    "a variable": "$HOME`id`",
    "wildcards": "*?[a-z]",
    "formats": "%s%n{0}{}",
    "markup": "[red]<script>alert(1)</script>![x](http://a.b)",
    "a formula": "=cmd|' /C calc'!A0",
    "a device": "/dev/full",
}


def _absolute(name: str, inside: Path) -> str:
    return name if name != "<outside>" else str(inside / "outside")


def _digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A record of ours, changed as whoever can write to the folder would: without its checksum."""
    record = json.loads(path.read_text())
    record.pop("checksum", None)
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8", errors="surrogatepass")


def _in_cases(folder: Path, name: str) -> None:
    _changed(folder / "sweep.json", lambda record: record["cases"].append(name))


def _in_trainers(folder: Path, name: str) -> None:
    _changed(folder / "sweep.json", lambda record: record["config"]["trainers"].append(name))


def _in_result(folder: Path, name: str) -> None:
    _changed(sorted((folder / "results").iterdir())[0], lambda record: record.update(name=name))


def _in_trace(folder: Path, name: str) -> None:
    path = sorted((folder / "results").iterdir())[0]
    _changed(path, lambda record: record["measured"].update(trace=name))
    (folder / "logs" / f"{path.stem}.log").unlink()


def _of_file(part: str, suffix: str, folder: Path, name: str) -> None:
    source = sorted(path for path in (folder / part).iterdir() if path.is_file())[0]
    try:
        shutil.copy(source, folder / part / f"{name}{suffix}")
    except (OSError, ValueError):  # no file can have this name: another one lies there
        shutil.copy(source, folder / part / f"a{suffix}")


SWEEP_PLACES: dict[str, Callable[[Path, str], None]] = {
    "cases of sweep.json": _in_cases,
    "trainers of sweep.json": _in_trainers,
    "name of a result": _in_result,
    "trace of a result": _in_trace,
    "file in results": partial(_of_file, "results", ".json"),
    "file in logs": partial(_of_file, "logs", ".log"),
    "file in running": partial(_of_file, "running", ".json"),
}


_RERUNS = {
    "cases of sweep.json": ("none", "all"),
    "trainers of sweep.json": ("none", "all"),
    "file in running": ("none", "all"),
    "name of a result": ("none",),
}
"""How the sweep is resumed where it reads the name; `all` may take it for something of its own to remove."""


def _printable(text: str) -> None:
    left = {character for character in text if not character.isprintable() and character not in "\n\t"}
    assert not left, f"{left} reach the terminal"


def _sweep_attack(inside: Path, *, place: str, name: str) -> None:
    folder, outside = inside / "sweep", inside / "outside"
    outside.mkdir()
    for kind in ("file", "file.log", "file.json"):
        (outside / kind).write_text("mine")
    for end in (".log", ".json"):
        (inside / f"outside{end}").write_text("mine")
    shutil.copytree(template(), folder)
    intact = shown(folder)
    assert intact is not None
    SWEEP_PLACES[place](folder, _absolute(name, inside))
    before = {path: digest for path, digest in _digest(inside).items() if not path.startswith("sweep/")}
    if place not in ("file in logs", "file in results", "cases of sweep.json", "trainers of sweep.json"):
        check_shown(folder, intact[0])
    for format_name in ("table", "markdown", "csv"):
        _, out, err = call("summarize", "--logs-dir", str(folder), "--format", format_name)
        _printable(out + err)
    _, out, err = call("report", str(folder), "-o", str(folder / "page.html"))
    _printable(out + err)
    for rerun in _RERUNS.get(place, ()):
        refused = resume(folder, rerun=rerun)
        assert refused is None or (len(refused.splitlines()) == 1 and len(refused) < 2000), refused
        _printable(refused or "")
    after = {path: digest for path, digest in _digest(inside).items() if not path.startswith("sweep/")}
    assert after == before, f"outside of the folder: {set(after.items()) ^ set(before.items())}"


def check_one_line(error: TruemfuError) -> None:
    """An error that a user is shown."""
    text = str(error)
    assert len(text.splitlines()) <= 1, text
    assert len(text) < 2000, len(text)
    _printable(text)


def _output_folder(inside: Path, name: str) -> None:
    """The user's own argument may lead anywhere: the run still trains, and its log loads."""
    _train(lambda model, kept: TrainingMonitor(name or "out", model=model, trackers=[kept]))


def _log_file(inside: Path, name: str) -> None:
    _train(
        lambda model, kept: TrainingMonitor(
            inside / "out", log_file=name or "log", model=model, trackers=[kept]
        )
    )


def _train(make: Callable[[Net, Kept], TrainingMonitor]) -> None:
    model, kept = Net(), Kept()
    try:
        monitor = make(model, kept)
    except TruemfuError as error:
        check_one_line(error)
        return
    for step in range(1, 6):
        model(torch.randn(2, 8)).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 0.1)
    monitor.close()
    assert len(kept.steps) == 5


def _dataset(inside: Path, name: str) -> None:
    model, kept = torch.nn.Linear(4, 8), Kept()
    monitor = TrainingMonitor(
        inside / "out",
        {"monitoring": {"dataset_metrics_freq": 1}},
        model=model,
        trackers=[kept, "tensorboard", "prometheus"],
    )
    for step in range(1, 5):
        logits = model(torch.randn(2, 3, 4))
        batch = {"labels": torch.zeros(2, 3, dtype=torch.long), "dataset_name": [name, "other"]}
        logits.sum().backward()
        monitor.update_dataset_metrics(batch, {"logits": logits}, logits.sum())
        monitor.log_step(step, 0, 1.0, 1.0, 0.1)
    monitor.close()
    rows = json.loads((inside / "out" / "training_log.json").read_bytes())
    assert len(rows) == len(kept.steps) == 4, monitor.summary()["lost"]


def _tracker(inside: Path, name: str) -> None:
    for config in (
        {"monitoring": {"trackers": [name]}},
        {"monitoring": {name: 1}},
        {"monitoring": {"mfu_calculation_mode": name}},
        {"monitoring": {"prometheus_address": name}},
        {name: {}},
    ):
        try:
            load_config(config)
        except TruemfuError as error:
            check_one_line(error)


def _config_file(inside: Path, name: str) -> None:
    path = inside / "config.json"
    path.write_text(json.dumps({"monitoring": {"trackers": [name]}, name: name}))
    for source in (path, name or "x"):
        try:
            load_config(source)
        except TruemfuError as error:
            check_one_line(error)


def _commands(inside: Path, name: str) -> None:
    name = os.fsencode(name.replace("\0", "")).decode(errors="surrogateescape") or "x"
    for arguments in (
        ("count", name),
        ("count", f"{name}:f"),
        ("summarize", "--logs-dir", name),
        ("report", name),
        ("sweep", "--trainers", name, "--device", "cpu", "--dry-run"),
        ("sweep", "--config", name),
        ("top", "--replay", name, "--once"),
        ("audit", "--csv", name),
    ):
        _printable(call(*arguments)[2])


def _run_page(inside: Path, name: str) -> None:
    """The name of a run's log, as its record gives it, leads nowhere else."""
    run, outside = inside / "run", inside / "outside"
    run.mkdir()
    outside.mkdir()
    rows = [{"global_step": step, "training/loss": 424242.0, "perf/step_time": 1.0} for step in range(1, 5)]
    for path in (outside / "training_log.json", inside / "outside.json"):
        path.write_text(json.dumps(rows))
    record = {
        "log_file": f"{name}/training_log.json",
        "model": {"name": name},
        "device": name,
        "command": name,
    }
    (run / "training_run.json").write_text(json.dumps(record))
    code, out, err = call("report", str(run), "-o", str(inside / "page.html"))
    _printable(out + err)
    if not code:
        assert "424242" not in (inside / "page.html").read_text(), (
            "a log outside of the run's folder was read"
        )


OTHER_PLACES: dict[str, Callable[[Path, str], None]] = {
    "output folder": _output_folder,
    "log file": _log_file,
    "data set": _dataset,
    "configuration": _tracker,
    "configuration file": _config_file,
    "arguments of commands": _commands,
    "log of a run's record": _run_page,
}


def attacks(chance: random.Random) -> list[Attack]:
    """Every name at every place."""
    template()
    names = {**NAMES, "an absolute path": "<outside>"}
    found = []
    for what, name in names.items():
        for place in SWEEP_PLACES:
            run = partial(_sweep_attack, place=place, name=name)
            found.append(Attack(f"{place}: {what}", lambda inside, run=run: run(inside)))
        for place, attack in OTHER_PLACES.items():
            other = partial(_elsewhere, attack, name)
            found.append(Attack(f"{place}: {what}", other))
    return found


def _elsewhere(attack: Callable[[Path, str], None], name: str, inside: Path) -> None:
    attack(inside, _absolute(name, inside))
