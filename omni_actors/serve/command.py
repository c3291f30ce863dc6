"""The command line of the server: ``omni-actors serve`` and ``python -m omni_actors.serve``.

Exit codes: 0 stopped by a signal, 1 it could not go on (an address that is taken, a stage that does not load), 2 a
configuration that cannot work, or an API key, an origin or a host that is none.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click
import trio

from omni_actors import config as configuration
from omni_actors.command_line import BadConfig, override_option
from omni_actors.errors import ConfigError, OmniError
from omni_actors.serve.access.api_key import normalize_key
from omni_actors.serve.defaults import (
    API_KEY_VARIABLE,
    DRAIN_S,
    HOST,
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    PORT,
)


def _clean_key(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """A key that is meant to be there and is empty must not open the server to everybody."""
    # click takes a variable that is empty for one that is not set.
    given = os.environ.get(API_KEY_VARIABLE) if given is None else given
    if given is None:
        return None
    if not given.strip():
        message = f"the key is empty; to serve everybody, leave out --api-key and unset {API_KEY_VARIABLE}"
        raise click.BadParameter(message)
    try:
        return normalize_key(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("config")
@click.option("--host", default=HOST, show_default=True, help="Address to listen on.")
@click.option("--port", default=PORT, show_default=True, type=click.IntRange(0, 65535), help="0: one that is free.")
@click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    show_envvar=True,
    callback=_clean_key,
    help="What a client must send; without one, everybody is served. Whitespace around it does not count.",
)
@click.option(
    "--max-body-bytes",
    default=MAX_BODY_BYTES,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of a request, and of the files that its URLs name.",
)
@click.option(
    "--allow-media-domain",
    multiple=True,
    metavar="DOMAIN[:PORT]",
    help="A host from which the http(s) URLs of images and videos are fetched; for more than one, say it again.",
)
@click.option(
    "--allow-media-dir",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A folder from which their file: URLs are read; for more than one, say it again.",
)
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="ORIGIN",
    help="An origin whose web pages may use the server: https://app.example.org; for more than one, say it again.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="HOST",
    help="A host that the server answers for, and for no others; for more than one, say it again.",
)
@click.option(
    "--drain-s", default=DRAIN_S, show_default=True, type=click.FloatRange(min=0), help="Time for what is under way."
)
@click.option(
    "--max-connections",
    default=MAX_CONNECTIONS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Connections at a time; fewer where the process may not open so many files.",
)
@click.option(
    "--max-connections-per-address",
    default=MAX_CONNECTIONS_PER_ADDRESS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of one client; raise it behind a proxy.",
)
@click.option(
    "--exit-on-failed-stage",
    is_flag=True,
    help="End, with exit code 1, when a stage is given up; else it is tried again.",
)
@override_option
def serve_command(
    config: str,
    host: str,
    port: int,
    api_key: str | None,
    max_body_bytes: int,
    allow_media_domain: tuple[str, ...],
    allow_media_dir: tuple[Path, ...],
    allow_origin: tuple[str, ...],
    allow_host: tuple[str, ...],
    drain_s: float,
    max_connections: int,
    max_connections_per_address: int,
    exit_on_failed_stage: bool,
    assignments: tuple[str, ...],
) -> None:
    """Serve the pipeline CONFIG (a name or a path) behind an API in the shape of OpenAI's."""
    from omni_actors.serve.access.origins import normalize_host, normalize_origin
    from omni_actors.serve.media.loader import MediaLoader  # the web stack: only a server waits for its import
    from omni_actors.serve.server import serve

    os.environ.pop(API_KEY_VARIABLE, None)  # the workers inherit the environment, and the key is not theirs
    try:
        media = MediaLoader(allow_media_domain, allow_media_dir)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--allow-media-domain / --allow-media-dir") from error
    try:
        origins, hosts = [*map(normalize_origin, allow_origin)], [*map(normalize_host, allow_host)]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--allow-origin / --allow-host") from error
    try:
        server = partial(
            serve,
            config,
            host=host,
            port=port,
            api_key=api_key,
            max_body_bytes=max_body_bytes,
            media=media,
            allow_origins=origins,
            allow_hosts=hosts,
            overrides=configuration.parse_overrides(assignments),
            drain_s=drain_s,
            max_connections=max_connections,
            max_connections_per_address=max_connections_per_address,
            exit_on_failed_stage=exit_on_failed_stage,
            announce=lambda line: click.echo(line),
        )
        trio.run(server)
    except ConfigError as error:
        raise BadConfig(str(error)) from error
    except OmniError as error:
        raise click.ClickException(str(error)) from error
