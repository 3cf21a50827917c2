"""`truemfu completion`: the script that lets a shell complete commands, options and names, by click."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .console import say

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_TRUEMFU_COMPLETE"


@click.command(short_help="Print the completion script for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, /, shell: str) -> None:
    """The script that lets SHELL complete truemfu's commands, options, files, models and devices.

    \b
    Examples: a line for the shell's start-up file
        eval "$(truemfu completion bash)"       ~/.bashrc (bash 4.4 or newer)
        eval "$(truemfu completion zsh)"        ~/.zshrc
        truemfu completion fish | source        ~/.config/fish/config.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    say(found(context.find_root().command, {}, "truemfu", _VARIABLE).source())
