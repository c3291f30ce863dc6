"""``omni-actors``: ask, draw, serve a pipeline, explain a configuration, prepare models, look at a machine, inject
faults.

A command writes its result to standard output and reports its work on standard error. Exit codes: 0 done, 1 the work
failed, 2 the arguments or the configuration cannot work, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

import click

from omni_actors.cli.ask import ask
from omni_actors.cli.bench.command import bench
from omni_actors.cli.chat.command import chat
from omni_actors.cli.config import config_group
from omni_actors.cli.doctor.command import doctor
from omni_actors.cli.draw import draw
from omni_actors.cli.prepare import prepare
from omni_actors.cli.top.command import top
from omni_actors.serve.command import serve_command
from omni_actors.stress.command import stress_command

__all__ = ["main"]


@click.group()
@click.version_option(package_name="omni-actors")
def main() -> None:
    """Run pipelines of omni-modality models: text, speech and vision in; text, speech and pictures out."""
    if os.getcwd() not in sys.path:  # an engine "package.module:factory" may be in the working directory
        sys.path.append(os.getcwd())


main.add_command(ask)
main.add_command(bench)
main.add_command(chat)
main.add_command(config_group)
main.add_command(doctor)
main.add_command(draw)
main.add_command(prepare)
main.add_command(serve_command, "serve")
main.add_command(stress_command, "stress")
main.add_command(top)
