"""The command line of the server: ``omni-actors serve`` and ``python -m omni_actors.serve``.

Exit codes: 0 stopped by a signal; 1 the server cannot continue (an address in use, a stage that does not load); 2 a bad
configuration, API key, origin or host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import trio

from omni_actors import config as configuration
from omni_actors.command_line import BadConfig, override_option
from omni_actors.errors import ConfigError, OmniError
from omni_actors.serve import defaults
from omni_actors.serve.access.api_key import normalize_key

AT_LEAST_1 = click.IntRange(min=1)

_Option: TypeAlias = Callable[[Callable[..., Any]], Any]


def _limit(name: str, default: float, kind: click.ParamType[Any], help: str) -> _Option:
    """Return an option with a number."""
    return click.option(name, default=default, show_default=True, type=kind, help=help)


def _allow(name: str, metavar: str, help: str, kind: click.ParamType[Any] = click.STRING) -> _Option:
    """Return an option that may be repeated."""
    return click.option(name, multiple=True, metavar=metavar, type=kind, help=f"{help} May be repeated.")


def _check_key(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Refuse an empty key: it must not silently disable the check."""
    # click treats an empty variable as one that is not set.
    given = os.environ.get(defaults.API_KEY_VARIABLE) if given is None else given
    if given is None:
        return None
    if not given.strip():
        message = f"the key is empty; to serve without a key, omit --api-key and unset {defaults.API_KEY_VARIABLE}"
        raise click.BadParameter(message)
    try:
        return normalize_key(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("config")
@click.option("--host", default=defaults.HOST, show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=defaults.PORT, show_default=True, type=click.IntRange(0, 65535), help="0 selects a free port."
)
@click.option(
    "--api-key",
    envvar=defaults.API_KEY_VARIABLE,
    show_envvar=True,
    callback=_check_key,
    help="The key that clients must send. Without one, the server checks no key. Surrounding white space is removed.",
)
@_limit(
    "--max-body-bytes",
    defaults.MAX_BODY_BYTES,
    AT_LEAST_1,
    "Limit of a request's body and the files that its URLs name.",
)
@_allow("--allow-media-domain", "DOMAIN[:PORT]", "A host from which http(s) URLs of images and videos are fetched.")
@_allow(
    "--allow-media-dir",
    "DIR",
    "A folder from which file: URLs of images and videos are read.",
    click.Path(path_type=Path),
)
@_allow("--allow-origin", "ORIGIN", "An origin whose web pages may use the server, such as https://app.example.org.")
@_allow("--allow-host", "HOST", "An accepted value of the header Host; others are refused.")
@_limit("--drain-s", defaults.DRAIN_S, click.FloatRange(min=0), "Time for requests in progress to end.")
@_limit(
    "--max-connections",
    defaults.MAX_CONNECTIONS,
    AT_LEAST_1,
    "Limit of connections. It is lower if the process may not open so many files.",
)
@_limit(
    "--max-connections-per-address",
    defaults.MAX_CONNECTIONS_PER_ADDRESS,
    AT_LEAST_1,
    "Limit of connections from one address. Raise it behind a proxy.",
)
@click.option(
    "--exit-on-failed-stage",
    is_flag=True,
    help="Exit with code 1 when a stage is given up, instead of trying it again.",
)
@override_option
def serve_command(
    config: str,
    allow_media_domain: tuple[str, ...],
    allow_media_dir: tuple[Path, ...],
    allow_origin: tuple[str, ...],
    allow_host: tuple[str, ...],
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve the pipeline CONFIG (a name or a path) with an API compatible with OpenAI's."""
    from omni_actors.serve.access.origins import normalize_host, normalize_origin
    from omni_actors.serve.media.loader import MediaLoader  # the web stack, which other commands need not import
    from omni_actors.serve.server import serve

    os.environ.pop(defaults.API_KEY_VARIABLE, None)  # the workers inherit the environment, and must not see the key
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
            media=media,
            allow_origins=origins,
            allow_hosts=hosts,
            overrides=configuration.parse_overrides(assignments),
            announce=click.echo,
            **options,  # the other options have the names of the function's parameters
        )
        trio.run(server)
    except ConfigError as error:
        raise BadConfig(str(error)) from error
    except OmniError as error:
        raise click.ClickException(str(error)) from error
