"""The prompt of ``omni-actors chat`` when it is cancelled."""

from __future__ import annotations

import threading
from typing import Any

import trio
import trio.testing
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from omni_actors.cli.chat.terminal import TerminalReader


def test_a_cancellation_before_the_prompt_runs_ends_it() -> None:
    """SIGTERM may come while the prompt's thread starts. The prompt would wait for a key, and the command with it."""
    starting, cancelled, outcomes = threading.Event(), threading.Event(), list[Any]()

    async def test() -> None:
        with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
            reader = TerminalReader([], InMemoryHistory())
            app = reader._session.app
            run = app.run_async

            async def run_late(*args: Any, **kwargs: Any) -> Any:
                starting.set()
                cancelled.wait()
                try:
                    outcomes.append(await run(*args, **kwargs))
                except EOFError as error:
                    outcomes.append(error)
                    raise
                return outcomes[-1]

            app.run_async = run_late  # type: ignore[method-assign]
            keys.send_text("hello\r")  # what ends a prompt that the cancellation does not end
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader.read)
                await trio.to_thread.run_sync(starting.wait)
                nursery.cancel_scope.cancel()
                nursery.start_soon(_set_later, cancelled)

    trio.run(test)
    assert [type(outcome) for outcome in outcomes] == [EOFError]


async def _set_later(event: threading.Event) -> None:
    """Set an event when all tasks have handled a cancellation."""
    with trio.CancelScope(shield=True):
        await trio.testing.wait_all_tasks_blocked()
    event.set()
