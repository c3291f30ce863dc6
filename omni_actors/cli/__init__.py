"""``omni-actors``: ask, draw, serve a pipeline, explain a configuration, prepare models, look at a machine, inject
faults.

A command writes its result to standard output and reports its work on standard error. Exit codes: 0 done, 1 the work
failed, 2 the arguments or the configuration cannot work, 130 interrupted.

A command is imported when it is used: ``doctor`` must work where the runtime cannot be imported.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

STANDARD_OUTPUT = 1
"""Its descriptor."""


class _Place(NamedTuple):
    """Where a command is, and what it does. The list of commands needs no import of them."""

    module: str
    name: str
    summary: str


COMMANDS = {
    "ask": _Place("omni_actors.cli.ask", "ask", "Ask a pipeline one question."),
    "bench": _Place("omni_actors.cli.bench.command", "bench", "Load a server, and report what its clients notice."),
    "chat": _Place("omni_actors.cli.chat.command", "chat", "Talk to a pipeline or to a server."),
    "config": _Place(
        "omni_actors.cli.config", "config_group", "List and explain pipelines; print the schema of their files."
    ),
    "doctor": _Place("omni_actors.cli.doctor.command", "doctor", "Report what this machine has and lacks."),
    "draw": _Place("omni_actors.cli.draw", "draw", "Draw one picture."),
    "prepare": _Place("omni_actors.cli.prepare", "prepare", "Download or convert the models of a pipeline."),
    "serve": _Place("omni_actors.serve.command", "serve_command", "Serve pipelines over HTTP, as OpenAI does."),
    "stress": _Place("omni_actors.stress.command", "stress_command", "Inject faults into the workers of a pipeline."),
    "top": _Place("omni_actors.cli.top.command", "top", "Watch the stages, rings and requests of a server."),
}


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
        place = COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(import_module(place.module), place.name)
        except (ImportError, AttributeError) as error:
            if platform.system() == "Linux":
                raise
            raise click.ClickException(
                f"this command needs Linux on x86-64 ({error}); `omni-actors doctor` says what this machine lacks"
            ) from error
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program. A full disk ends it with a sentence."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            click.echo(f"Error: {_unwritten(error)} cannot be written: {error.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C ends those that do not handle it themselves."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, each with its summary."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with ``incomplete``, or the options if it begins with a dash."""
        found = [CompletionItem(name, help=place.summary) for name, place in COMMANDS.items()]
        return [item for item in found if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )


def _unwritten(error: OSError) -> str:
    """Return what could not be written, in words.

    Commands report their own files, so without a name it is standard output. What it has buffered, and cannot write, is
    dropped: Python would fail once more at the end.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)
    return str(error.filename or "the output")


@click.command(cls=_Commands)
@click.version_option(package_name="omni-actors")
def main() -> None:
    """Run pipelines of omni-modality models: text, speech and vision in; text, speech and pictures out."""
    with suppress(OSError):  # the working directory was deleted
        if (here := os.getcwd()) not in sys.path:  # an engine "package.module:factory" may be in it
            sys.path.append(here)
    if sys.stdin is None:  # the shell has closed it
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - until the program ends
    if isinstance(sys.stdout, TextIOWrapper):  # a character that the terminal does not have is no reason to fail
        sys.stdout.reconfigure(errors="replace")
