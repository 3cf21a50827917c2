"""`truemfu top` as its users run it: a process of its own, on a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.hardware.recorded import MATMUL, PIPES, TROUBLE, together

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0

SCREEN = """\
GPU     FLOP util  TFLOP/s  "GPU util"  tensor      SM    DRAM  reported MHz    power W  memory GiB  processes
────────────────────────────────────────────────────────────────────────────────────────────────────────────────
0 H200     72.6 %      718     100.0 %  86.4 %  89.8 %  17.0 %   1538 / 1980  688 / 700     2 / 140  python3 1.2
1 H200      0.0 %        0     100.0 %   0.0 %  98.1 %  90.0 %   1980 / 1980  653 / 700     4 / 140  python3 3.0
GPU 0: clock throttled by power limit 100.0 % of the time
FLOP util: driver clock; the real one is 4 to 11 % lower in steady tensor work
"""  # noqa: E501


class Terminal:
    """What a terminal shows of what was written to it: the few controls that rich uses on a live table."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = 0

    def write(self, text: str) -> None:
        for control, plain in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", text):
            if plain:
                self.lines[self._row] += plain
            elif control == "\n":
                self._row += 1
                self.lines += [""] * (self._row + 1 - len(self.lines))
            elif control == "\x1b[2K":
                self.lines[self._row] = ""
            elif control.endswith("A"):
                self._row -= int(control[2:-1])
            else:
                assert control == "\r" or control.endswith(("m", "h", "l")), control

    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


class Top:
    """`truemfu top` on a terminal of 120 columns."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._text = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._terminal, 65536)
            except OSError:  # the other end is closed
                return
            if not part:
                return
            self._text += part

    def screen(self) -> str:
        terminal = Terminal()
        # What was read last may end in the middle of a character or a control.
        terminal.write(re.sub(r"\x1b[^A-Za-z]*$", "", self._text.decode(errors="ignore")))
        return terminal.shown()

    def hides_the_cursor(self) -> bool:
        return self._text.rfind(b"\x1b[?25l") > self._text.rfind(b"\x1b[?25h")

    def wait_for(self, reached: Callable[[str], bool]) -> str:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not reached(self.screen()):
            assert time.monotonic() < deadline_s, f"the screen does not get there:\n{self.screen()}"
            time.sleep(0.05)
        return self.screen()

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(5)
        return code


@contextmanager
def top(*arguments: str, path: Path | None = None) -> Iterator[Top]:
    """`path` is a folder whose modules come first."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    folders = [str(folder) for folder in (path, ROOT / "src", ROOT) if folder is not None]
    environment |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(folders)}
    process = subprocess.Popen(
        [sys.executable, "-m", "truemfu", "top", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    running = Top(process, ours)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def driver(folder: Path, *, gpus: int, before_read: str) -> Path:
    """A folder with a module `pynvml` whose GPUs play a recorded trace; `before_read` is what a hook does."""
    (folder / "pynvml.py").write_text(
        f"""\
import os, signal, time
from tests.hardware import fake_nvml
from tests.hardware.recorded import MATMUL, rows_of

nvml = fake_nvml.FakeNvml(rows=rows_of(MATMUL)[20:], gpus={gpus})

def before_read(reads):
{textwrap.indent(textwrap.dedent(before_read), "    ")}

nvml.before_read = before_read

def __getattr__(name):
    return getattr(nvml, name)
""",
        encoding="utf-8",
    )
    return folder


def test_the_screen_of_a_recorded_trace(tmp_path: Path) -> None:
    trace = together(tmp_path / "two.jsonl", MATMUL, PIPES, rounds=40)
    with top("--replay", str(trace), "--interval", "0.01") as running:
        assert running.ended() == 0
        assert running.screen() == SCREEN


def test_once_keeps_to_the_width_of_the_terminal(tmp_path: Path) -> None:
    trace = together(tmp_path / "two.jsonl", MATMUL, PIPES, rounds=40)
    with top("--replay", str(trace), "--once") as running:
        assert running.ended() == 0
        lines = running.screen().splitlines()
    assert lines[0].endswith("memory GiB  processes")
    assert max(map(len, lines)) <= 120


def test_before_there_is_an_interval_it_says_that_it_reads(tmp_path: Path) -> None:
    with top("--interval", "1", path=driver(tmp_path, gpus=1, before_read="pass")) as running:
        assert running.wait_for(lambda screen: screen != "").startswith("reading…")
        screen = running.wait_for(lambda screen: "GPU util" in screen)
        assert "reading" not in screen


def test_a_term_gives_the_cursor_back(tmp_path: Path) -> None:
    with top("--interval", "0.25", path=driver(tmp_path, gpus=1, before_read="pass")) as running:
        running.wait_for(lambda screen: "GPU util" in screen)
        assert running.hides_the_cursor()
        running.process.send_signal(signal.SIGTERM)
        assert running.ended() == 143
        assert not running.hides_the_cursor()


def test_nothing_is_left_of_what_is_no_longer_said() -> None:
    """The trace begins with faults and ends without one."""
    with top("--replay", str(TROUBLE), "--interval", "0.05") as running:
        running.wait_for(lambda screen: "intervals dropped" in screen)
        assert running.ended() == 0
        last = running.screen()
    assert "dropped" not in last
    assert last.count("GPU util") == 1
    assert len(last.splitlines()) == 4


def test_a_driver_that_does_not_answer_is_said_and_can_be_left(tmp_path: Path) -> None:
    hanging = driver(tmp_path, gpus=2, before_read="if reads == 8: fake_nvml.hang()")
    with top("--interval", "0.25", path=hanging) as running:
        running.wait_for(lambda screen: "100.0 %" in screen)
        screen = running.wait_for(lambda screen: "has not answered" in screen)
        assert screen.splitlines()[2].split() == ["0", "H200", *["-"] * 10]
        assert re.search(
            r"^GPUs 0-1: the driver has not answered for \d+ s \(0 intervals", screen, re.MULTILINE
        )
        running.process.send_signal(signal.SIGINT)
        assert running.ended() == 0


@pytest.mark.parametrize("error", [15, 999])
def test_a_driver_that_fails_all_the_time_is_watched_all_the_same(tmp_path: Path, error: int) -> None:
    failing = driver(
        tmp_path,
        gpus=1,
        before_read=f"nvml.errors = {{'nvmlGpmSampleGet': {error}}} if 4 <= reads < 8 else {{}}",
    )
    with top("--interval", "0.25", path=failing) as running:
        running.wait_for(lambda screen: f"NVML error {error} (4 intervals dropped)" in screen)
        running.wait_for(lambda screen: "dropped" not in screen and "%" in screen.splitlines()[2])
        running.process.send_signal(signal.SIGINT)
        assert running.ended() == 0


def test_a_scrape_of_what_a_process_serves(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with top(
        "--interval", "0.25", "--export", "0", path=driver(tmp_path, gpus=2, before_read="pass")
    ) as running:
        screen = running.wait_for(lambda screen: "GPU util" in screen)
        address = re.search(r"serving (http://127.0.0.1:\d+/metrics)", screen)
        assert address, screen
        with urllib.request.urlopen(address[1], timeout=10) as answer:
            text = answer.read().decode()
        assert re.search(r'^truemfu_gpu_tensor_active_ratio\{gpu="1",.*\} 0\.8\d+$', text, re.MULTILINE)
        running.process.send_signal(signal.SIGINT)
        assert running.ended() == 0
