"""The slash commands of a conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from omni_actors.cli.chat.conversation import reason_of
from omni_actors.cli.chat.session import Session
from omni_actors.cli.running import notes
from omni_actors.errors import OmniError
from omni_actors.plain_text import clean


class Quit(Exception):
    """The user wants to end the conversation."""


class _Command(NamedTuple):
    """usage: its arguments. help: what it does. run: takes the session and the text after the name."""

    usage: str
    help: str
    run: Callable[[Session, str], Awaitable[None]]


class CommandFailed(OmniError):
    """A slash command cannot do what it was asked."""


async def execute(session: Session, line: str) -> None:
    """Run the command in a line that begins with "/". Raises Quit, CommandFailed and what the command raises."""
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        raise CommandFailed(f"there is no command {name}; /help lists them")
    command = COMMANDS[name]
    argument = argument.strip()
    if not argument and command.usage and not command.usage.startswith("["):
        raise CommandFailed(f"usage: {name} {command.usage}")
    await command.run(session, argument)


def _path(argument: str) -> Path:
    """Return the file that an argument names. Raises CommandFailed."""
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # "~name" of a user that there is not
        raise CommandFailed(f"{argument}: {error}") from error


async def _help(session: Session, argument: str) -> None:
    for name, command in COMMANDS.items():
        notes.print(f"{name} {command.usage}".ljust(16) + command.help)
    notes.print("A line that ends with \\ goes on in the next one. Ctrl-C stops an answer, Ctrl-D ends.")


async def _system(session: Session, argument: str) -> None:
    if argument:
        session.conversation.system = argument
    notes.print(session.conversation.system or "there are no instructions", style="dim")


async def _audio(session: Session, argument: str) -> None:
    session.conversation.attach_sound(_path(argument))
    notes.print("attached to your next message; an empty one sends it alone", style="dim")


async def _image(session: Session, argument: str) -> None:
    session.conversation.attach_picture(_path(argument))
    notes.print("attached to your next message; an empty one sends it alone", style="dim")


async def _detach(session: Session, argument: str) -> None:
    files = session.conversation.files()
    session.conversation.detach()
    notes.print(clean(f"dropped: {files}") if files else "no file is attached", style="dim")


async def _save(session: Session, argument: str) -> None:
    path = _path(argument)
    try:
        session.conversation.save(path)
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{path}: {reason_of(error)}") from error
    notes.print(f"saved: {path}", style="dim")


async def _reset(session: Session, argument: str) -> None:
    session.conversation.reset()
    notes.print("a new conversation", style="dim")


async def _model(session: Session, argument: str) -> None:
    known = await session.server.models()
    if argument:
        if argument not in known:
            raise CommandFailed(f"there is no model {argument!r}; the server has {', '.join(known)}")
        session.model = argument
    for name in known:
        notes.print(("* " if name == session.model else "  ") + clean(name))


async def _stats(session: Session, argument: str) -> None:
    for line in session.statistics():
        notes.print(line)


async def _quit(session: Session, argument: str) -> None:
    raise Quit


COMMANDS: dict[str, _Command] = {
    "/help": _Command("", "lists the commands", _help),
    "/system": _Command("[TEXT]", "sets or shows the instructions to the model", _system),
    "/audio": _Command("FILE", "attaches a sound file to the next message", _audio),
    "/image": _Command("FILE", "attaches a picture to the next message", _image),
    "/detach": _Command("", "drops all attached files, also earlier ones; keeps the text", _detach),
    "/save": _Command("FILE", "writes the conversation: .json, or Markdown", _save),
    "/reset": _Command("", "begins a new conversation", _reset),
    "/model": _Command("[NAME]", "lists the models, or takes another one", _model),
    "/stats": _Command("", "shows the times of the last answer, and sums", _stats),
    "/quit": _Command("", "ends", _quit),
}
