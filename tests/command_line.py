"""The command line called in this process, as tests of it do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import click
import pytest

from truemfu.cli import cli, main

CONTEXT = click.Context(cli)
COMMANDS = {name: cli.get_command(CONTEXT, name) or cli for name in cli.list_commands(CONTEXT)}
"""Every command by its name."""


class Result(NamedTuple):
    """What a call left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def caller(captured: pytest.CaptureFixture[str]) -> Run:
    """A function that calls `truemfu` with its arguments."""

    def call(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        said = captured.readouterr()
        return Result(int(stop.value.code or 0), said.out, said.err)

    return call
