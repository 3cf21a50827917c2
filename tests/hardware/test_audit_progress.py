"""Kernels that ncu has profiled so far: beside a spinner on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from truemfu.cli import progress as module
from truemfu.cli.audit import _profiled
from truemfu.cli.progress import Progress

KERNEL = '==PROF== Profiling "nvjet_sm90_tst_256x128_64x4..." - {}: 0%....50%....100% - 7 passes\n'


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_a_line_every_so_often(
    tmp_path: Path, now_s: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "ncu.log"
    progress = Progress()
    for second in range(1, 46):
        now_s[0] = 100.0 + second
        if second == 16:
            log.write_text("==PROF== Connected to process 1\n" + KERNEL.format(0))
        elif second == 31:
            with log.open("a") as file:
                file.writelines(KERNEL.format(number) for number in range(1, 1300))
        progress.update(lambda: _profiled(log))
    assert capsys.readouterr().err.splitlines() == [
        "audit: no kernel profiled yet, 15 s",
        "audit: 1 kernel profiled, 30 s",
        "audit: 1,300 kernels profiled, 45 s",
    ]


def test_a_terminal_is_redrawn_twice_a_second(tmp_path: Path, now_s: list[float]) -> None:
    log, shown = tmp_path / "ncu.log", list[str]()
    progress = Progress(shown.append)
    log.write_text(KERNEL.format(0))
    for now_s[0] in (100.2, 100.6, 100.8, 101.2):
        progress.update(lambda: _profiled(log))
    assert shown == ["audit: 1 kernel profiled, 1 s"] * 2
