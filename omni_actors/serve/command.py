"""The command line of the server: ``omni-actors serve`` and ``python -m omni_actors.serve``.

Exit codes: 0 stopped by a signal, 1 it could not go on (an address that is taken, a stage that does not load), 2 a
configuration that cannot work.
"""

from __future__ import annotations

from functools import partial

import click
import trio

from omni_actors import config as configuration
from omni_actors.errors import ConfigError, OmniError


class BadConfig(click.ClickException):
    """How a command line ends on a configuration that cannot work."""

    exit_code = 2


@click.command()
@click.argument("config")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8091, show_default=True, type=click.IntRange(0, 65535), help="0: one that is free.")
@click.option("--api-key", envvar="OMNI_ACTORS_API_KEY", show_envvar=True, help="What a client must send.")
@click.option("--max-body-bytes", default=32 * 1024 * 1024, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--drain-s", default=5.0, show_default=True, type=click.FloatRange(min=0), help="Time for what is under way."
)
@click.option("-s", "--set", "assignments", multiple=True, metavar="PATH=VALUE", help="Such as stages.llm.threads=2")
def serve_command(
    config: str,
    host: str,
    port: int,
    api_key: str | None,
    max_body_bytes: int,
    drain_s: float,
    assignments: tuple[str, ...],
) -> None:
    """Serve the pipeline CONFIG (a name or a path) behind an API in the shape of OpenAI's."""
    from omni_actors.serve.server import serve  # the web stack: only a server waits for its import

    try:
        server = partial(
            serve,
            config,
            host=host,
            port=port,
            api_key=api_key or None,
            max_body_bytes=max_body_bytes,
            overrides=configuration.parse_overrides(assignments),
            drain_s=drain_s,
            announce=lambda line: click.echo(line),
        )
        trio.run(server)
    except ConfigError as error:
        raise BadConfig(str(error)) from error
    except OmniError as error:
        raise click.ClickException(str(error)) from error
