"""What all commands share: names of options, help with examples, tables, colours, completion."""

from __future__ import annotations

import os
import pty
import re
import shlex
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import click
import pytest
from rich.cells import cell_len
from tests.command_line import COMMANDS, Run, caller

from truemfu.cli.console import SafeConsole, fitted, output, table
from truemfu.hardware.specs import DEVICES

ROOT = Path(__file__).parents[1]
OWN = {"--help", "--debug"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)
    return caller(capsys)


def options_of(name: str) -> list[click.Option]:
    return [option for option in COMMANDS[name].params if isinstance(option, click.Option)]


def flags() -> dict[str, list[str]]:
    """Every option that help shows, with the commands that have it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in COMMANDS:
        for option in options_of(name):
            if not option.hidden:
                for flag in option.opts:
                    if flag.startswith("--") and flag not in OWN:
                        found[flag].append(name)
    return found


def test_the_page_of_commands_has_every_option_with_its_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--[\w-]+)`[^|]* \| ([\w, ]+) \|", page, re.MULTILINE)
    documented = {flag: sorted(commands.split(", ")) for flag, commands in rows}
    assert documented == {flag: sorted(commands) for flag, commands in flags().items()}


OLD_NAMES = {
    ("count", "--batch-size"): "samples",
    ("count", "--batch-sizes"): "samples",
    ("count", "--seq-len"): "length",
    ("sweep", "--trainers"): "trainers",
    ("sweep", "--batch-size"): "batch_sizes",
    ("sweep", "--batch-sizes"): "batch_sizes",
    ("sweep", "--seq-len"): "seq_lengths",
    ("sweep", "--seq-lengths"): "seq_lengths",
    ("sweep", "--model-size"): "models",
    ("sweep", "--model-sizes"): "models",
    ("sweep", "--dtypes"): "dtypes",
    ("sweep", "--gpus"): "gpus",
    ("audit", "--save"): "save",
    ("audit", "--csv"): "saved",
    ("summarize", "--logs-dir"): "logs_dir",
}


@pytest.mark.parametrize(("command", "old"), OLD_NAMES)
def test_an_older_name_still_works_and_is_not_shown(run: Run, command: str, old: str) -> None:
    value = "3"
    arguments = ["tiny", old, value] if command == "count" else [old, value]
    context = COMMANDS[command].make_context(command, arguments)
    given = context.params[OLD_NAMES[command, old]]
    assert value in map(str, given if isinstance(given, tuple) else [given])
    assert not re.search(rf"{old}\b(?!-)", run(command, "--help").out)


def test_an_error_names_an_option_as_help_does(run: Run) -> None:
    assert run("count", "tiny", "--batch-size", "x").err == run("count", "tiny", "--batch", "x").err


def examples(command: str) -> list[list[str]]:
    """The calls of a command in its help, as the shell would split them."""
    text = (COMMANDS[command].help or "").replace("\\\n", " ")
    found = re.findall(rf"^\s+(?:.*\$\()?(truemfu {command}\b[^\n|>)]*)", text, re.MULTILINE)
    # Comments stand in a column of their own.
    return [shlex.split(re.split(r"\s{3,}", call)[0])[2:] for call in found]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_has_examples_that_parse(command: str) -> None:
    calls = examples(command)
    assert calls
    for call in calls:
        COMMANDS[command].make_context(command, call)


def test_lists_may_have_commas_or_be_repeated(run: Run) -> None:
    for call in (["--dtype", "bf17,fp32"], ["--dtype", "fp32", "--dtype", "bf17"]):
        assert "unknown dtype 'bf17'" in run("peak", *call).err
    assert "'nothing'" in run("run", "--tracker", "tensorboard,nothing", "--", sys.executable, "-V").err


def test_devices_are_found_by_a_part_of_their_name(run: Run) -> None:
    assert "RTX 4090 D" in run("devices", "4090").out
    rows = run("devices", "rtx", "4090").out.splitlines()
    assert [line.split("  ")[0] for line in rows if line.startswith("NVIDIA")] == [
        spec.name for spec in DEVICES if "4090" in spec.name
    ]
    result = run("devices", "h2000")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "error: no device 'h2000' in the table (did you mean 'h200'?); `truemfu devices` lists them all\n"
    )


def shown(command: list[str], stream: str, columns: int = 80, **environment: str) -> str:
    """What a command writes to a terminal of this width on one of its streams."""
    ours, theirs = pty.openpty()
    terminal = {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color", "NO_COLOR": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "truemfu", *command],
        stdin=subprocess.DEVNULL,
        stdout=theirs if stream == "stdout" else subprocess.DEVNULL,
        stderr=theirs if stream == "stderr" else subprocess.DEVNULL,
        env={**os.environ, **terminal, **environment},
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    process.wait()
    os.close(ours)
    return b"".join(parts).decode()


def test_a_terminal_of_80_columns_gets_every_figure_in_lines_that_fit() -> None:
    narrow, wide = (
        re.sub(r"\x1b\[[\d;]*m", "", shown(["devices", "h100"], "stdout", columns)) for columns in (80, 200)
    )
    assert max(map(cell_len, narrow.splitlines())) <= 80
    assert max(map(cell_len, wide.splitlines())) > 80
    figures = re.compile(r"(?<=\s)[\d.]+(?=\s)")
    assert sorted(figures.findall(narrow)) == sorted(figures.findall(wide))


def test_colours_are_for_terminals_that_want_them() -> None:
    wrong = ["cuont"]
    assert "\x1b[1;31merror:" in shown(wrong, "stderr")
    without = shown(wrong, "stderr", NO_COLOR="1")
    assert "\x1b[1;31m" not in without
    assert "error:" in without
    assert "\x1b" not in shown(wrong, "stderr", TERM="dumb")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_wide_table_is_split_and_nothing_is_cut(width: int) -> None:
    drawn = table("name", *(f"column {i}" for i in range(9)), "remark", title="a table")
    rows = [(f"row {r}", *(str(10 ** (r + i)) for i in range(9)), "words " * 20 + str(r)) for r in range(4)]
    for row in rows:
        drawn.add_row(*row)
    console = SafeConsole(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(drawn)
    text = console.export_text()
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    words = text.split()
    for row in rows:
        assert all(figure in words for figure in row[1:-1])
    assert words.count("words") == 80
    parts = fitted(drawn, width)
    assert [column.header for part in parts for column in part.columns[1:]] == [
        column.header for column in drawn.columns[1:]
    ]
    assert all(part.columns[0].header == "name" for part in parts)


def test_a_pipe_is_not_made_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert output().width == 140
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert output().width == 80


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with an executable `truemfu`."""
    path = tmp_path / "bin" / "truemfu"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m truemfu "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path.parent


def completed(program: Path, *words: str) -> list[str]:
    """What a real bash offers for the last word."""
    script = f"""
        eval "$(truemfu completion bash)"
        COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}
        compopt() {{ :; }}
        $(complete -p truemfu | sed -E 's/.*-F ([^ ]+).*/\\1/') truemfu
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=program, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_real_bash_completes_commands_options_and_names(program: Path) -> None:
    assert completed(program, "truemfu", "su") == ["summarize"]
    assert completed(program, "truemfu", "count", "tiny", "--attn") == ["--attn-implementation"]
    assert completed(program, "truemfu", "count", "tiny", "--attn-implementation", "e") == ["eager"]
    assert completed(program, "truemfu", "count", "sma") == ["small"]
    assert completed(program, "truemfu", "count", "qwen3-8") == ["qwen3-8b"]
    assert completed(program, "truemfu", "count", "tiny", "--device", "h100-n") == ["h100-nvl"]
    assert completed(program, "truemfu", "devices", "rtx-4090") == ["rtx-4090", "rtx-4090-d"]
    assert completed(program, "truemfu", "sweep", "--batch-") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(run: Run, shell: str) -> None:
    result = run("completion", shell)
    assert (result.code, result.err) == (0, "")
    assert f"_TRUEMFU_COMPLETE={shell}_complete" in result.out


def test_an_unknown_shell_is_one_line(run: Run) -> None:
    result = run("completion", "tcsh")
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"error: .*'tcsh' is not one of.*\n", result.err)
