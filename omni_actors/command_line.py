"""What the commands of the command line share."""

from __future__ import annotations

import click

override_option = click.option(
    "-s", "--set", "assignments", multiple=True, metavar="PATH=VALUE", help="Override a value: stages.llm.threads=2"
)
"""The ``--set`` option of each command that reads a pipeline. ``config.parse_overrides`` parses its values."""


class BadConfig(click.ClickException):
    """Ends a command with exit code 2 because the configuration cannot work."""

    exit_code = 2
