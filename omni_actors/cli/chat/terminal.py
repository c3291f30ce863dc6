"""The prompt on a terminal: history, search, completion of commands, and messages of several lines."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from omni_actors.cli.chat.reader import CONTINUES, with_replacements
from omni_actors.cli.running import notes

HISTORY_BYTES = 256 * 1024
"""When the history is larger, its older half is dropped."""


class TerminalReader:
    """Reads messages at a prompt with history, search, and completion of commands. Wrong bytes become U+FFFD.

    Args:
        commands: The words to complete.
        history: What keeps the messages.
    """

    def __init__(self, commands: list[str], history: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=history,
            completer=WordCompleter(commands, sentence=True),
            key_bindings=_keys(),
            multiline=True,
            complete_while_typing=False,
            enable_open_in_editor=True,
            prompt_continuation="  ",
        )
        self._is_cancelled = False
        """Whether the prompt is to end."""

    async def read(self) -> str | None:
        """Return the next message; None at Ctrl-D, and when the terminal is gone.

        Cancellation ends the prompt and restores the terminal.
        """
        self._is_cancelled = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._exit_when_cancelled)
            try:
                return with_replacements(await trio.to_thread.run_sync(self._prompt))
            except EOFError:
                return None
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return None  # the terminal was closed
            except KeyboardInterrupt:
                interrupted = True
            finally:
                nursery.cancel_scope.cancel()
        assert interrupted
        raise KeyboardInterrupt

    def _prompt(self) -> str:
        """Show the prompt, in a thread: prompt_toolkit runs on asyncio, and signals belong to the main thread."""
        return self._session.prompt(handle_sigint=False, pre_run=self._exit_if_cancelled)

    async def _exit_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._is_cancelled = True  # first: a prompt that has no loop yet looks at this when it has one
            if (loop := self._session.app.loop) is not None:
                with suppress(RuntimeError):  # the loop is closed: the prompt has ended
                    loop.call_soon_threadsafe(self._exit_if_cancelled)

    def _exit_if_cancelled(self) -> None:
        """End the prompt, if it is to end and has not. Called in its event loop."""
        app = self._session.app
        if self._is_cancelled and app.future is not None and not app.future.done():
            app.exit(exception=EOFError)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def accept(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith(CONTINUES):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _KeptHistory(FileHistory):
    """Keeps the messages in a file, as long as the file can be written."""

    def store_string(self, string: str) -> None:
        """Add a message to the file. If that fails (the disk is full), the message is kept until the program ends."""
        with suppress(OSError):
            super().store_string(string)


def open_history() -> History:
    """Return the messages of earlier conversations. If their file cannot be used, say so, and return none."""
    try:
        return _KeptHistory(_prepared(_history_file()))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        notes.print(f"your messages are not kept for later: {error}", style="dim")
        return InMemoryHistory()


def _history_file() -> Path:
    """Return the file of earlier messages: below ``$XDG_STATE_HOME``, else ``~/.local/state``.

    Raises RuntimeError: there is neither.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "omni_actors" / "chat_history"


def _prepared(history: Path) -> Path:
    """Make the file, which only the user may read, or drop the older half of a large one. Return it. Raises OSError."""
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)
    history.open("a+b").close()  # it can be read and written
    if history.stat().st_size > HISTORY_BYTES:
        _, found, newer = history.read_bytes()[-HISTORY_BYTES // 2 :].partition(b"\n\n# ")  # the start of an entry
        history.write_bytes(b"\n# " + newer if found else b"")
    return history
