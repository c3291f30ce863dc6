"""The command line of the server: ``omni-actors serve`` and ``python -m omni_actors.serve``.

Exit codes: 0 stopped by a signal; 1 the server cannot start or continue (an address in use, a lost socket, a stage that
does not load, an internal error); 2 a bad configuration, API key, origin or host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_args

import click
import trio

from omni_actors import config as configuration
from omni_actors.command_line import PIPELINE, Number, click_errors, override_option, verbose_option
from omni_actors.config import Pipeline
from omni_actors.errors import ConfigError
from omni_actors.serve import logs
from omni_actors.serve.logs import LogFormat
from omni_actors.serve.settings import API_KEY_VARIABLE, DEFAULTS, SSL_PASSWORD_VARIABLE, ServerSettings

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]*)=(.+)")
"""A name may have a slash, as those of models on a hub have."""
AT_LEAST_1 = click.IntRange(min=1)

_Option: TypeAlias = Callable[[Callable[..., Any]], Any]


def _setting(flag: str, kind: click.ParamType[Any], help: str) -> _Option:
    """Return the option of the setting with the flag's name."""
    default = getattr(DEFAULTS, flag.removeprefix("--").replace("-", "_"))
    return click.option(flag, default=default, show_default=True, type=kind, help=help)


def _allow(flag: str, name: str, help: str, **options: Any) -> _Option:
    """Return an option that may be repeated. name: of the parameter that receives its values."""
    return click.option(flag, name, multiple=True, help=f"{help} May be repeated.", **options)


@click.command()
@click.argument("configs", metavar="PIPELINE...", nargs=-1, required=True, type=PIPELINE)
@_setting("--host", click.STRING, "Address to listen on.")
@_setting("--port", click.IntRange(0, 65535), "0 selects a free port.")
@click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    show_envvar=True,
    # click ignores an empty variable, which must not silently disable the check.
    default=partial(os.environ.get, API_KEY_VARIABLE),
    help="The key that clients must send. Without one, the server checks no key. Surrounding white space is removed.",
)
@_setting("--max-body-bytes", AT_LEAST_1, "Limit of a request's body and the files that its URLs name.")
@_setting("--max-event-bytes", AT_LEAST_1, "Limit of one event that a client sends over a WebSocket.")
@_setting("--max-sessions", AT_LEAST_1, "Limit of realtime sessions.")
@click.option(
    "--max-sessions-per-address",
    type=AT_LEAST_1,
    help="Limit for one address. By default half of --max-sessions. Raise it behind a proxy.",
)
@_setting("--session-s", Number(min=0, min_open=True), "Longest realtime session, in seconds.")
@_setting("--session-items", AT_LEAST_1, "Limit of the items of a realtime conversation.")
@_setting("--session-bytes", AT_LEAST_1, "Limit of the text and the recordings of a realtime conversation.")
@_allow(
    "--allow-media-domain",
    "media_domains",
    "Fetch images, videos and sounds at URLs of this host.",
    metavar="DOMAIN[:PORT]",
)
@_allow(
    "--allow-media-dir",
    "media_folders",
    "Read images and videos below this folder.",
    metavar="DIR",
    type=click.Path(path_type=Path),
)
@_allow("--allow-origin", "allow_origins", "Let web pages of this origin use the server; '*': all.", metavar="ORIGIN")
@click.option("--allow-credentials", is_flag=True, help="Let these pages send cookies and certificates.")
@_allow("--allow-host", "allow_hosts", "An accepted value of the header Host; others are refused.", metavar="HOST")
@_setting(
    "--drain-notice-s",
    Number(min=0),
    "After the first signal, serve new requests for so long while /health reports 503, for load balancers.",
)
@_setting("--drain-s", Number(min=0), "Time for requests in progress to end.")
@_setting("--max-connections", AT_LEAST_1, "Limit of connections. It is lower if the process may open few files.")
@_setting("--max-connections-per-address", AT_LEAST_1, "Limit for one address. Raise it behind a proxy.")
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Send traces to this OpenTelemetry collector (OTLP over HTTP). By default the OTEL_* variables decide.",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help='Run workers on the nodes of a Ray cluster: the address of its head, "auto", or "local" to start one here.',
)
@click.option("--enable-admin", is_flag=True, help="Have the routes that control the server. Needs an API key.")
@click.option("--page/--no-page", default=None, help="Serve a page at /. By default only on a loopback address.")
@click.option("--chaos", is_flag=True, help="Let the page kill, freeze and starve workers. Loopback addresses only.")
@click.option("--exit-on-failed-stage", is_flag=True, help="Exit with code 1 when a stage is given up.")
@click.option("--ssl-certfile", metavar="FILE", help="Speak TLS, with the certificate in this PEM file.")
@click.option("--ssl-keyfile", metavar="FILE", help="Its private key, if that is in another file.")
@click.option(
    "--ssl-keyfile-password", envvar=SSL_PASSWORD_VARIABLE, show_envvar=True, help="The password of an encrypted key."
)
@click.option("--ssl-ca-certs", metavar="FILE", help="Accept clients only with a certificate that one of these signed.")
@click.option("--access-log/--no-access-log", default=DEFAULTS.access_log, show_default=True, help="Log each request.")
@click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="plain",
    show_default=True,
    help="How to write the log to stderr; with json, all output is one JSON object a line.",
)
@verbose_option
@override_option
def serve_command(
    configs: tuple[str, ...],
    media_domains: tuple[str, ...],
    media_folders: tuple[Path, ...],
    assignments: tuple[str, ...],
    log_format: LogFormat,
    verbose: bool,
    **options: Any,
) -> None:
    """Serve PIPELINE (a name or a path) with an API compatible with OpenAI's.

    PIPELINE may also be a model: a directory, or a name on a hub. Several pipelines share the server, and requests
    choose one by its name as their model. NAME=PIPELINE gives a pipeline another name; --set NAME:PATH=VALUE is for one
    of them.
    """
    from omni_actors.serve.media.loader import MediaLoader  # the web stack, which other commands need not import
    from omni_actors.serve.server import serve

    for secret in (API_KEY_VARIABLE, SSL_PASSWORD_VARIABLE):
        os.environ.pop(secret, None)  # the workers inherit the environment, and must not see it
    try:
        settings = ServerSettings(**options)  # each other option has the name of a field
        media = MediaLoader(media_domains, media_folders)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    logs.configure(log_format)
    as_json = log_format == "json"
    with logs.logged_errors(verbose=verbose) if as_json else click_errors(verbose=verbose):
        pipelines = load_pipelines(configs, assignments)
        announce = None if as_json else click.echo
        trio.run(partial(serve, pipelines, settings, media=media, announce=announce))


def load_pipelines(configs: Sequence[str], assignments: Sequence[str]) -> list[Pipeline]:
    """Return the pipelines of the command line.

    Args:
        configs: each PIPELINE or NAME=PIPELINE.
        assignments: the arguments of ``--set``. "NAME:PATH=VALUE" is for the pipeline NAME (or PIPELINE, as it was
            given), others are for all.

    Raises ConfigError, also for two pipelines of one name.
    """
    labels = [_split_name(config)[0] or config for config in configs]
    pipelines: dict[str, Pipeline] = {}
    for config, label in zip(configs, labels, strict=True):
        name, source = _split_name(config)
        owners = [
            (next((each for each in labels if given.startswith(f"{each}:")), None), given) for given in assignments
        ]
        own = [
            given if owner is None else given.removeprefix(f"{owner}:")
            for owner, given in owners
            if owner in (None, label)
        ]
        overrides = configuration.parse_overrides([*own, *([f"name={name}"] if name else [])])
        pipeline = configuration.load(source, overrides)
        if pipeline.name in pipelines:
            accepted = "a name that no other pipeline of the server has; NAME=PIPELINE gives one"
            raise ConfigError(config, "name", pipeline.name, accepted)
        pipelines[pipeline.name] = pipeline
    return list(pipelines.values())


def _split_name(config: str) -> tuple[str | None, str]:
    """Return the name that NAME=PIPELINE gives, or None, and the PIPELINE."""
    found = None if Path(config).exists() else _NAMED.fullmatch(config)
    return (None, config) if found is None else (found[1], found[2])
