"""Options and error handling that all commands share."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from omni_actors.errors import ConfigError, OmniError
from omni_actors.plain_text import clean, encodable

override_option = click.option(
    "-s", "--set", "assignments", multiple=True, metavar="PATH=VALUE", help="Override a value: stages.llm.threads=2"
)
"""The ``--set`` option of each command that reads a pipeline. ``config.parse_overrides`` parses its values."""
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="After a failure, print what the worker wrote to stderr."
)
"""The ``--verbose`` option of each command that runs a pipeline. Pass its value to ``click_errors``."""


class Text(click.ParamType[str]):
    """Text that a request can carry. Python reads a byte of an argument that is not UTF-8 as a lone surrogate."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not text in UTF-8.", param, ctx)
        return text


TEXT = Text()

URL = "http://127.0.0.1:8091"
"""The server that a client uses by default."""
URL_OPTION = click.option("--url", metavar="URL", type=TEXT, help=f'The server; "/v1" may follow.  [default: {URL}]')
"""The ``--url`` option of the commands that are clients of a server."""
KEY_OPTION = click.option(
    "--api-key", envvar=["OMNI_ACTORS_API_KEY", "OPENAI_API_KEY"], show_envvar=True, help="The server's key."
)
"""The ``--api-key`` option of the commands that are clients of a server."""


class Number(click.FloatRange):
    """A range of numbers. Click's own accepts "nan" in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class PipelineName(click.ParamType[str]):
    """The name of a shipped pipeline, or anything else that ``config.load`` accepts. A shell completes the names."""

    name = "pipeline"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the shipped pipelines whose names begin with ``incomplete``; files, if there is none."""
        from omni_actors.config import config_names  # imports what only Linux has; `doctor` does without it

        names = [CompletionItem(name) for name in config_names() if name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


PIPELINE = PipelineName()


class BadConfig(click.ClickException):
    """Ends a command with exit code 2 because the configuration cannot work."""

    exit_code = 2


@contextmanager
def click_errors(*, verbose: bool = False) -> Iterator[None]:
    """End the command with one sentence if the block raises a typed error.

    verbose: add the error's notes, the last lines of a worker's stderr.
    """
    try:
        yield
    except OmniError as error:
        details: list[str] = getattr(error, "__notes__", [])
        shown = "\n".join([str(error), *details] if verbose else [str(error)])
        if details and not verbose:
            shown += "\n(--verbose shows what the worker wrote to stderr)"
        kind = BadConfig if isinstance(error, ConfigError) else click.ClickException
        raise kind(clean(shown, keep_lines=True)) from error


class CannotWrite(OmniError):
    """What was computed cannot be written.

    Attributes:
        what: The file, or what was to be written, in words.
        reason: Why it cannot be written.
    """

    def __init__(self, what: str | Path, error: Exception) -> None:
        self.what, self.reason = str(what), getattr(error, "strerror", None) or str(error)
        super().__init__(f"{self.what} cannot be written: {self.reason}")


def require_writable(path: Path, option: str = "--output") -> None:
    """Raise click.BadParameter, for ``option``, unless a file can be written. It is left as it is."""
    try:
        if not path.parent.is_dir():
            raise click.BadParameter(f"there is no directory {path.parent}", param_hint=option)
        if not path.exists():
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        elif not path.is_fifo():  # a pipe would be waited for, and its reader would see an end
            path.open("ab").close()
    except OSError as error:
        raise click.BadParameter(str(CannotWrite(path, error)), param_hint=option) from error


def echo_json(json: str) -> None:
    """Print a JSON text on standard output, with escapes for what its encoding lacks."""
    click.echo(encodable(json, getattr(sys.stdout, "encoding", None) or "utf-8"))
