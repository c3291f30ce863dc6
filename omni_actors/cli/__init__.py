"""``omni-actors``: ask, draw, serve a pipeline, explain a configuration, prepare models, look at a machine, inject
faults.

A command writes its result to standard output and reports its work on standard error. Exit codes: 0 done, 1 the work
failed, 2 the arguments or the configuration cannot work, 130 interrupted.

A command is imported when it is used: ``doctor`` must work where the runtime cannot be imported.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import import_module

import click

__all__ = ["main"]

COMMANDS = {
    "ask": "omni_actors.cli.ask:ask",
    "bench": "omni_actors.cli.bench.command:bench",
    "chat": "omni_actors.cli.chat.command:chat",
    "config": "omni_actors.cli.config:config_group",
    "doctor": "omni_actors.cli.doctor.command:doctor",
    "draw": "omni_actors.cli.draw:draw",
    "prepare": "omni_actors.cli.prepare:prepare",
    "serve": "omni_actors.serve.command:serve_command",
    "stress": "omni_actors.stress.command:stress_command",
    "top": "omni_actors.cli.top.command:top",
}
"""Where each command is: its module and its name there."""


class _Commands(click.Group):
    """The commands of ``COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None if there is none of this name.

        Raises click.ClickException: this system lacks what the command imports.
        """
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        try:
            command: click.Command = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            if platform.system() == "Linux":
                raise
            raise click.ClickException(
                f"this command needs Linux on x86-64 ({error}); `omni-actors doctor` says what this machine lacks"
            ) from error
        return command


@click.command(cls=_Commands)
@click.version_option(package_name="omni-actors")
def main() -> None:
    """Run pipelines of omni-modality models: text, speech and vision in; text, speech and pictures out."""
    if os.getcwd() not in sys.path:  # an engine "package.module:factory" may be in the working directory
        sys.path.append(os.getcwd())
