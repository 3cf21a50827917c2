"""Hostile text in every field that a command shows, on a real terminal: all of it is shown, none of it acts.

One process calls every command, once on a plain terminal (no sequence at all may arrive) and once on one that
draws (rich's own colours and cursor movements may, and nothing else).
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from truemfu.monitor.summary import show
from truemfu.records import (
    CaseResult,
    Environment,
    Flops,
    Measured,
    Memory,
    Phase,
    RankFigures,
    Status,
    StepTimes,
    SweepCase,
    SweepRecord,
    encode,
    write_record,
)

ROOT = Path(__file__).parents[1]
# Clipboard, title, clear screen, ask for a report, 8-bit CSI, DCS and OSC, bell, delete, backspace, return,
# bidirectional override, zero-width, a tag character, rich's markup and emoji.
EVIL = (
    "<\x1b]52;c;aGk=\x07\x1b]0;t\x1b\\\x1b[2J\x1b[6n\x9b2J\x90q\x9c\x9d0;t\x9c\a\x7f\b\r\u202e\u200b\U000e0041"
    "[red]:skull:[/nothing]>"
)
NAME = EVIL.replace("/", "")  # of a file
SHOWN = re.compile(r"\\(u00|x)1b\\?\]52")  # as we show it (also escaped in Markdown), or as repr does
TIMEOUT_S = 240.0

DRIVER = """
import json, sys, time, warnings
from pathlib import Path
import msgspec
from truemfu.cli import main

EVIL = json.loads(sys.argv[1])

def live():
    from truemfu.cli.console import working
    from truemfu.cli.live import Lines
    from truemfu.records import CaseResult, Phase
    from truemfu.sweep.supervisor.state import CaseState
    files = [Path("sweep/results", name) for name in ("standard.json", "a.json", "b.json")]
    results = [msgspec.json.decode(path.read_bytes(), type=CaseResult) for path in files]
    with working("reading the folder") as show:
        listener = Lines(show)
        listener.started([result.name for result in results], results[:1])
        state = CaseState(slot=EVIL, phase=Phase.GRADIENT_CHECK, elapsed_s=1.0, time_limit_s=9.0)
        listener.changed(EVIL, state)
        time.sleep(0.6)  # what runs is drawn four times a second
        for result in results:
            listener.ended(result)
        listener.message(EVIL)

def closing_summary():
    from truemfu.monitor.summary import show
    show(json.loads(Path("summary.json").read_text()))

def warning():
    from truemfu.errors import warn_once
    warn_once(EVIL)

def spinner():
    from truemfu.cli.console import working
    with working(EVIL):
        pass

for name, arguments in json.loads(Path("calls.json").read_text()):
    print(f"=== {name}", flush=True)
    print(f"=== {name}", file=sys.stderr, flush=True)
    if arguments is None:
        globals()[name]()
    else:
        try:
            main(arguments)
        except SystemExit:
            pass
    sys.stdout.flush()
print("=== end", flush=True)
"""

FACTORIES = """
import warnings
import torch
EVIL = {evil!r}

def raises():
    raise ValueError(EVIL)

def hostile():
    import truemfu.errors
    truemfu.errors.warn_once(EVIL + " warned")
    inner = torch.nn.Sequential()
    inner.add_module(EVIL.replace(".", ""), torch.nn.Linear(4, 4))
    kind = type(EVIL, (torch.nn.Module,), {{"forward": lambda self, x, **rest: self.inner(x)}})
    model = kind()
    model.inner = inner
    return model, {{"x": torch.zeros(2, 4), EVIL: torch.zeros(2)}}
"""


def result(trainer: str, name: str, end: Status, *, gpus: int = 1) -> CaseResult:
    case = SweepCase(
        trainer=trainer,
        model=EVIL,
        batch_size=4,
        seq_len=8,
        dtype=EVIL,
        optimizer=EVIL,
        device=EVIL,
        gpus=gpus,
        parallel=EVIL if gpus > 1 else None,
    )
    flops = Flops(
        model_flops=10,
        hardware_flops=10,
        model_method=EVIL,
        hardware_method=EVIL,
        attention=EVIL,
        peak_flops_per_s=1e12,
        peak_source=EVIL,
        mfu=0.5,
        hfu=0.5,
    )
    times = StepTimes(
        times_s=[1.0] * 20,
        median_s=1.0,
        mean_s=1.0,
        p10_s=1.0,
        p90_s=1.0,
        relative_error=0.4,
        source=EVIL,
        stable=False,
    )
    measured = Measured(
        steps=times,
        tokens_per_step=32,
        tokens_per_s=32.0,
        samples_per_s=4.0,
        flops=flops,
        data_wait_s=0.0,
        final_loss=1.0,
        trace=EVIL,
        ranks=[RankFigures(rank=0, host=f"{EVIL}2", device_name=EVIL, step_time_s=1.0, memory=Memory())]
        if gpus > 1
        else [],
    )
    return CaseResult(
        name=name,
        sweep_id="s",
        content_hash=EVIL,
        case=case,
        end=end,
        phase=Phase.DONE,
        message=None if end is Status.OK else EVIL,
        exit_code=1,
        fits=EVIL,
        log_tail=[EVIL, f"second {EVIL}"],
        began_at_s=0.0,
        wall_s=1.0,
        parameters=10,
        measured=measured if end is Status.OK else None,
        memory=Memory(process_bytes=100),
        environment=Environment(
            device_name=EVIL, python=EVIL, versions={EVIL: EVIL}, host=EVIL, git_commit=EVIL
        ),
    )


def write_sweep(folder: Path) -> None:
    results = [
        result("StandardTrainer", "standard", Status.OK),
        result(f"a{NAME}", "a", Status.OK),
        result(f"b{NAME}", "b", Status.ERROR),
        result(f"e{NAME}", "e", Status.OK, gpus=2),
    ]
    for part in ("logs", "results"):
        (folder / part).mkdir(parents=True)
    for one in results:
        (folder / "results" / f"{one.name}.json").write_bytes(encode(one))
    renamed = encode(results[0]).replace(b'"standard"', json.dumps(NAME).encode())  # refused, with its name
    (folder / "results" / f"{NAME}.json").write_bytes(renamed)
    (folder / "logs" / f"c{NAME}_bs4_seq8.log").write_text(f"{EVIL}\nlast {EVIL}\n")
    (folder / "logs" / f"d{NAME}_bs4_seq8.log").write_text(f"{{{EVIL}\n")
    (folder / "logs" / f"stranger{NAME}.log").write_text(EVIL)
    record = SweepRecord(
        sweep_id="s",
        truemfu_version=EVIL,
        created_at_s=0.0,
        cases=[*(one.name for one in results), "never"],
        config={"trainers": [EVIL]},
    )
    write_record(folder / "sweep.json", record)


def write_trace(path: Path) -> None:
    lines = (ROOT / "tests" / "hardware" / "traces" / "h200_matmul.jsonl").read_text().splitlines()
    header, samples = json.loads(lines[0]), [json.loads(line) for line in lines[1:6]]
    header["note"] = header["gpus"][0]["driver"] = header["gpus"][0]["uuid"] = EVIL
    header["gpus"][0]["name"] = f"NVIDIA {EVIL}"
    for sample in samples:
        sample["processes"] = [{"pid": 1, "name": EVIL, "memory_bytes": 2**30}]
        sample["throttle_reasons"] = [EVIL]
    failure = {"kind": "error", "index": 0, "message": EVIL}
    path.write_text("\n".join(map(json.dumps, [header, *samples, failure, *samples, failure])) + "\n")


def write_audits(folder: Path) -> None:
    text = (ROOT / "tests" / "hardware" / "ncu" / "h200_operators.csv").read_text()
    name = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert name in text
    (folder / "step.csv").write_text(text.replace(name, f"{EVIL} gemm", 1))
    (folder / "step.csv.count.json").write_text(json.dumps({"reason": EVIL, "is_whole_step": True}))
    (folder / "failed.csv").write_text(f"==PROF== Connected\n==ERROR== {EVIL}\n")
    (folder / "nothing.csv").write_text("==PROF== Connected to process 1\n")
    (folder / "nothing.csv.count.json").write_text(json.dumps({"reason": EVIL}))


def write_summary(path: Path) -> None:
    part = {"key": EVIL, "name": EVIL, "share": 0.5}
    hardware = {
        "executed_flops_per_s": 1e12,
        "executed_hfu": 0.5,
        "executed_over_expected": 1.0,
        "executed_over_activity": None,
        "clock_hz": 1e9,
        "clock_source": EVIL,
        "energy_j_per_step": 1.0,
        "energy_j_per_million_tokens": 1.0,
        "power_w": 1.0,
        "waterfall": {"parts": [part], "notes": [EVIL]},
        "advice": [EVIL],
    }
    cost = {
        "training_thread_us_per_step": 1.0,
        "profiling_s": 0.0,
        "share_of_step": 0.1,
        "checks_s": 0.0,
        "observed": 0,
        "observing_s": 0.0,
        "observed_steps": [],
    }
    rank = {
        "rank": 0,
        "status": EVIL,
        "host": EVIL,
        "device": EVIL,
        "last_seen": EVIL,
        "steps": 1,
        "step_time_s": 1.0,
        "data_wait_s": 0.1,
        "collective_s": 0.1,
        "clock_mhz": 1.0,
        "memory_bytes": 1,
    }
    summary = {
        "steps": 1,
        "skipped_steps": 0,
        "warmup_steps": 0,
        "medians_over": EVIL,
        "median_step_time_s": 1.0,
        "median_mfu": 0.5,
        "median_mfu_by_model": {EVIL: 0.5},
        "left_out": {EVIL: {"times": 2, "seconds": 1.5, "share": 0.1}},
        "between_steps_share": 0.5,
        "forwards_between_steps": 1,
        "model": {"name": EVIL, "parameters": 1, "trainable_parameters": 1},
        "batch_shapes": [{EVIL: [1, 2]}],
        "median_hfu": 0.5,
        "hfu_method": EVIL,
        "peak_source": EVIL,
        "method": EVIL,
        "convention": {"attention": EVIL},
        "median_tokens_per_second": 1.0,
        "median_samples_per_second": 1.0,
        "scope": EVIL,
        "totals": {"tokens": 1, "samples": 1, "model_flops": 1, "is_complete": False},
        "ranks": [rank, {"rank": 1, "status": EVIL}],
        "stragglers": [{"rank": 1, "text": EVIL}],
        "padding_lost": None,
        "data_wait_share": None,
        "hardware": hardware,
        "monitor_cost": cost,
        "notes": [EVIL],
        "lost": [EVIL],
        "warnings": [EVIL],
    }
    path.write_text(json.dumps(summary))


SWEEP = ["--trainers", "StandardTrainer", "--batch-sizes", "1", "--seq-lengths", "8", "--device", "cpu"]
CALLS: dict[str, list[str] | None] = {
    "no such command": [EVIL],
    "no such option": ["count", f"--{EVIL}"],
    "count, a name": ["count", EVIL],
    "count, a path": ["count", f"./{EVIL}"],
    "count, a bad file": ["count", f"{NAME}.json"],
    "count, a model type": ["count", f"type{NAME}.json"],
    "count, an import": ["count", f"{EVIL}:f"],
    "count, a factory": ["count", f"evil_factories:{EVIL}"],
    "count, an exception": ["count", "evil_factories:raises"],
    "count, debugged": ["count", "evil_factories:raises", "--debug"],
    "count, a table": ["count", "evil_factories:hostile", "--batch", "3"],
    "count, JSON": ["count", "evil_factories:hostile", "--json"],
    "count, a number": ["count", "tiny", "--batch", EVIL],
    "count, a dtype": ["count", "tiny", "--dtype", EVIL],
    "count, a choice": ["count", "tiny", "--attention-convention", EVIL],
    "devices": ["devices"],
    "peak, a dtype": ["peak", "--dtype", EVIL],
    "top, no trace": ["top", "--replay", EVIL],
    "top, an address": ["top", "--replay", "trace.jsonl", "--export", EVIL],
    "top, once": ["top", "--replay", "trace.jsonl", "--once"],
    "top, JSON": ["top", "--replay", "trace.jsonl", "--once", "--json"],
    "top, lines of JSON": ["top", "--replay", "trace.jsonl", "--json", "--interval", "0.01"],
    "top, live": ["top", "--replay", "trace.jsonl", "--interval", "0.01"],
    "audit, a table": ["audit", "--csv", "step.csv"],
    "audit, JSON": ["audit", "--csv", "step.csv", "--json"],
    "audit, failed": ["audit", "--csv", "failed.csv"],
    "audit, nothing": ["audit", "--csv", "nothing.csv"],
    "audit, no file": ["audit", "--csv", EVIL],
    "sweep, a mode": ["sweep", "--mode", EVIL],
    "sweep, a trainer": ["sweep", "--trainers", EVIL, "--device", "cpu", "--output", EVIL],
    "sweep, listed": ["sweep", *SWEEP, "--model-sizes", f"./type{NAME}.json", "--dry-run"],
    "sweep, a config": ["sweep", "--config", f"{NAME}.json"],
    "sweep, a key": ["sweep", "--config", "key.json"],
    "sweep, a number": ["sweep", "--batch-sizes", EVIL],
    "summarize, tables": ["summarize", "--logs-dir", "sweep"],
    "summarize, Markdown": ["summarize", "--logs-dir", "sweep", "--format", "markdown"],
    "summarize, CSV": ["summarize", "--logs-dir", "sweep", "--format", "csv"],
    "summarize, JSON": ["summarize", "--logs-dir", "sweep", "--json"],
    "summarize, no folder": ["summarize", "--logs-dir", EVIL],
    "summarize, no kind": ["summarize", "--logs-dir", "sweep", "--output", EVIL],
    "compare, tables": ["compare", "sweep", "sweep"],
    "compare, Markdown": ["compare", "sweep", "sweep", "--format", "markdown"],
    "compare, JSON": ["compare", "sweep", "sweep", "--json"],
    "compare, no folder": ["compare", "sweep", EVIL],
    "compare, no kind": ["compare", "sweep", "sweep", "--output", EVIL],
    "compare, a limit": ["compare", "sweep", "sweep", "--max-regression", EVIL],
    "report, a sweep": ["report", "sweep", "-o", f"{NAME}.html"],
    "report, no folder": ["report", EVIL],
    "live": None,
    "spinner": None,
    "closing_summary": None,
    "warning": None,
}
# What says nothing of the hostile value.
SILENT = {"devices", "spinner"}
TERMINALS = {"plain": {"TERM": "dumb", "NO_COLOR": "1"}, "drawing": {"TERM": "xterm-256color"}}
OF_RICH = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[\d*A|\r")


def on_terminal(folder: Path, settings: dict[str, str]) -> str:
    """All that the driver writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    environment |= {
        **settings,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONIOENCODING": "utf-8",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(EVIL)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=environment,
    )
    os.close(theirs)
    written = b""
    try:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            written += part
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        os.close(ours)
    return written.decode("utf-8", errors="surrogateescape")


def write_all(made: Path) -> None:
    """Everything that the calls read, hostile in every field."""
    write_sweep(made / "sweep")
    write_trace(made / "trace.jsonl")
    write_audits(made)
    write_summary(made / "summary.json")
    (made / "evil_factories.py").write_text(textwrap.dedent(FACTORIES.format(evil=EVIL)))
    (made / f"{NAME}.json").write_text(f"{{{EVIL}")
    (made / f"type{NAME}.json").write_text(json.dumps({"model_type": EVIL, "architectures": [EVIL]}))
    (made / "key.json").write_text(json.dumps({EVIL: EVIL}))
    (made / "calls.json").write_text(json.dumps(list(CALLS.items())))


def parts_of(text: str) -> dict[str, str]:
    """What each call wrote, from all that the driver wrote."""
    assert "=== end" in text, text[-3000:]
    parts = re.split(r"=== ([^\r\n]+)\r\n(?:=== \1\r\n)?", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def assert_harmless(call: str, terminal: str, text: str) -> None:
    """Nothing of it acts on a terminal, and it is shown."""
    plain = OF_RICH.sub("", text) if terminal == "drawing" else text.replace("\r\n", "\n")
    left = [character for character in plain if not character.isprintable() and character not in "\n\t"]
    assert not left, (left, plain[-2000:])
    if call not in SILENT:
        assert SHOWN.search(plain.replace("\n", "")), plain[-2000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    write_all(made)
    return made


@pytest.fixture(scope="module")
def shown(folder: Path) -> Callable[[str], dict[str, str]]:
    """What each call writes to this terminal."""
    kept: dict[str, dict[str, str]] = {}

    def of(terminal: str) -> dict[str, str]:
        if terminal not in kept:
            kept[terminal] = parts_of(on_terminal(folder, TERMINALS[terminal]))
        return kept[terminal]

    return of


@pytest.mark.parametrize("terminal", TERMINALS)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_hostile_reaches_the_terminal_as_it_is(
    call: str, terminal: str, shown: Callable[[str], dict[str, str]]
) -> None:
    assert_harmless(call, terminal, shown(terminal)[call])


def test_a_call_that_is_unexpected_is_not_among_them(shown: Callable[[str], dict[str, str]]) -> None:
    unexpected = {
        call: text
        for call, text in shown("plain").items()
        if "error: unexpected" in text or "Traceback" in text
    }
    assert set(unexpected) <= {"count, debugged"}, unexpected


def test_files_hold_no_control_character_either(folder: Path, shown: Callable[[str], dict[str, str]]) -> None:
    shown("plain")
    text = (folder / f"{NAME}.html").read_text(encoding="utf-8")
    assert "\\u001b" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_hostile_values_of_a_result_survive_in_json(shown: Callable[[str], dict[str, str]]) -> None:
    text = shown("plain")["summarize, JSON"]
    summary = msgspec.json.decode(text.encode())
    assert EVIL in {experiment["model"] for experiment in summary["experiments"]}


def test_the_closing_summary_is_plain_in_a_file_too(folder: Path) -> None:
    stream = io.StringIO()
    show(json.loads((folder / "summary.json").read_text()), stream)
    text = stream.getvalue()
    assert SHOWN.search(text)
    assert all(character.isprintable() or character == "\n" for character in text)


def test_commands_print_in_no_other_way() -> None:
    """Help is click's own text; all else passes `say` or a `SafeConsole`."""
    for path in sorted((ROOT / "src" / "truemfu" / "cli").glob("*.py")):
        source = path.read_text(encoding="utf-8").replace("click.echo(context.get_help())", "")
        if path.name != "console.py":
            assert not re.search(r"click\.echo|(?<![\w.])print\(|[^e]Console\((?!\)\.width)", source), (
                path.name
            )
