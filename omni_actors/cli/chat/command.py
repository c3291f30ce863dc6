"""The command ``omni-actors chat``."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from omni_actors import config as configuration
from omni_actors.cli.chat.commands import COMMANDS, Quit, execute
from omni_actors.cli.chat.conversation import DETACH
from omni_actors.cli.chat.reader import MessageTooLong, PipeReader, Reader
from omni_actors.cli.chat.session import Session, Speech
from omni_actors.cli.chat.sound import PLAYERS, find_player
from omni_actors.cli.running import helper_tasks, notes, run
from omni_actors.cli.server_client import ServerError, open_server
from omni_actors.command_line import (
    KEY_OPTION,
    PIPELINE,
    TEXT,
    URL,
    URL_OPTION,
    Number,
    click_errors,
    override_option,
    verbose_option,
)
from omni_actors.errors import OmniError
from omni_actors.plain_text import clean
from omni_actors.serve.settings import ServerSettings

_Address = tuple[str, str | None]
"""A server's URL and its key."""


@click.command()
@click.argument("pipeline", required=False, type=PIPELINE)
@URL_OPTION
@KEY_OPTION
@click.option("--model", type=TEXT, help="The model. By default the first one that the server lists.")
@click.option("--system", type=TEXT, default="", help="Instructions to the model.")
@click.option("--speak", is_flag=True, help="Ask for spoken answers.")
@click.option("--play", is_flag=True, help=f"Play them with {', '.join(player[0] for player in PLAYERS)}.")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Write each spoken answer to this directory: answer-1.wav, …",
)
@click.option("--voice", type=TEXT, default="alloy", show_default=True, help="The voice of spoken answers.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.")
@click.option("--temperature", type=Number(0, 2), help="Temperature of sampling; 0 is greedy.")
@click.option("--commands", "has_commands", is_flag=True, help="In a pipe, run lines that begin with a slash.")
@verbose_option
@override_option
def chat(
    pipeline: str | None,
    url: str | None,
    api_key: str | None,
    model: str | None,
    system: str,
    speak: bool,
    play: bool,
    folder: Path | None,
    voice: str,
    has_commands: bool,
    verbose: bool,
    assignments: tuple[str, ...],
    **params: Any,
) -> None:
    """Talk to a PIPELINE, which is run here, or to the server at --url.

    On a terminal there is a prompt; /help lists its commands. From a pipe, each line of standard input is a message,
    also one that begins with a slash, unless there is --commands. With a pipe, the exit code is 1 if a message got no
    answer.
    """
    if pipeline is not None and url is not None:
        raise click.UsageError("give a PIPELINE or --url, not both")
    player = find_player() if play else None
    if play and player is None:
        names = ", ".join(each[0] for each in PLAYERS)
        raise click.UsageError(f"--play needs a player, and this machine has none of {names}; --output writes files")
    speech = Speech(wanted=speak or play or folder is not None, voice=voice, folder=folder, player=player)
    parameters = {name: value for name, value in params.items() if value is not None}
    with click_errors():
        loaded = configuration.load(pipeline, configuration.parse_overrides(assignments)) if pipeline else None
    open_session = partial(Session, speech=speech, parameters=parameters, system=system)
    talk = _Talk(model, open_session, has_commands=has_commands)
    where = _local_server(loaded) if loaded is not None else nullcontext((url or URL, api_key))
    run(partial(talk.run, where), verbose=verbose, on_interrupt=talk.stop_answer)
    if talk.has_failed and not talk.is_terminal:
        sys.exit(1)


class _Talk:
    """Reads messages, and has them answered.

    model: the model; None: the server's first one. open_session: makes a session with a server and a model.
    has_commands: whether a line from a pipe may be a command. At a prompt it always may.
    """

    def __init__(self, model: str | None, open_session: partial[Session], *, has_commands: bool) -> None:
        self._model, self._open_session = model, open_session
        self._session: Session | None = None
        self.is_terminal = sys.stdin.isatty()
        self._has_commands = has_commands or self.is_terminal
        self.has_failed = False
        """Whether a message got no answer, or a command failed."""

    def stop_answer(self) -> bool:
        return self._session is not None and self._session.stop_answer()

    async def run(self, where: AbstractAsyncContextManager[_Address]) -> None:
        """Talk until the end of the input. Raises ServerError: the server cannot be reached."""
        async with where as (url, key), open_server(url, key) as server:
            model = self._model or await server.first_model()
            self._session = self._open_session(server, model)
            if self.is_terminal:
                notes.print(Text.assemble((clean(model), "bold"), f" at {url}; /help lists the commands"))
            await self._converse(self._session, _terminal_reader() if self.is_terminal else PipeReader())

    async def _converse(self, session: Session, reader: Reader) -> None:
        was_refused = False  # what is attached to a refused message is not sent alone at the end of the input
        while True:
            try:
                line = await reader.read()
            except KeyboardInterrupt:
                notes.print("Ctrl-D or /quit ends", style="dim")
                continue
            except MessageTooLong as error:
                self._report(error)
                continue
            if line is None and (was_refused or not session.conversation.attached):
                return
            try:
                if line is not None and line.startswith("/") and self._has_commands:
                    await execute(session, line)
                elif (line or "").strip() or session.conversation.attached:
                    was_refused = await self._ask(session, (line or "").strip())
            except Quit:
                return
            except OmniError as error:
                self._report(error)
            if line is None:
                return

    async def _ask(self, session: Session, text: str) -> bool:
        """Ask, and return whether the server refused the message. Raises OmniError."""
        try:
            await session.ask(text)
        except ServerError as error:
            self._report(error)
            if files := session.conversation.files():
                notes.print(clean(f"sent with each message: {files}; {DETACH}"), style="dim")
            return True
        return False

    def _report(self, error: OmniError) -> None:
        self.has_failed = True
        notes.print(clean(str(error)), style="red")


def _terminal_reader() -> Reader:
    from omni_actors.cli.chat.terminal import TerminalReader, open_history  # takes 50 ms; pipes need no prompt

    return TerminalReader(list(COMMANDS), open_history())


@asynccontextmanager
async def _local_server(pipeline: configuration.Pipeline) -> AsyncIterator[_Address]:
    """Serve a pipeline in this process, to this process only: the key is random. Raises what ``serve`` raises."""
    from omni_actors.serve.server import serve  # the web stack, which other commands need not import

    settings = ServerSettings(port=0, api_key=secrets.token_urlsafe())
    async with helper_tasks() as nursery:
        with notes.status(Text(f"starting {pipeline.name}")):
            start = partial(serve, pipeline, settings, announce=lambda _: None, handles_signals=False)
            url: str = await nursery.start(start)
        yield url, settings.api_key
        nursery.cancel_scope.cancel()
