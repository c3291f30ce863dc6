"""One running system for all tests of a module.

trio's fixtures last for one test only, so the system runs in an event loop of its own, in a thread.
"""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, TypeAlias

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, load
from tests.support.worker_environment import clear_choices_in_workers

WATCHDOG_S = 60.0
Work: TypeAlias = Callable[[OmniSystem], Awaitable[None]]


class SharedSystem:
    """A handle on the system that tests in other threads use.

    fixture_processes: the fixture of that name. Workers that a test lets restart are added to it, so that the check for
    leftover processes does not blame the test for them.
    """

    def __init__(self, omni: OmniSystem, token: trio.lowlevel.TrioToken, fixture_processes: set[int]) -> None:
        self.omni, self._token, self._fixture_processes = omni, token, fixture_processes

    def run(self, work: Work) -> None:
        """Run ``work(omni)`` in the system's event loop. Return when all stages are ready again."""
        try:
            trio.from_thread.run(self._run, work, trio_token=self._token)
        finally:
            stages = self.omni.health().stages.values()
            self._fixture_processes.update(each.pid for replicas in stages for each in replicas if each.pid)

    async def _run(self, work: Work) -> None:
        try:
            await work(self.omni)
        finally:  # also after a failed test: the next one finds a ready system
            with trio.fail_after(WATCHDOG_S):
                while not self.omni.health().ready:
                    await self.omni.wait_changed()


@contextmanager
def open_shared_system(
    opening: Callable[[], AbstractAsyncContextManager[OmniSystem]],
    fixture_processes: set[int],
    *,
    clear_choices: bool = False,
) -> Iterator[SharedSystem]:
    """Run the system that ``opening`` returns in a thread until the block ends.

    clear_choices: its workers choose tokens by the rules of ``tests.support.clear_choices``.
    """
    opened: queue.SimpleQueue[tuple[SharedSystem, Callable[[], None]] | None] = queue.SimpleQueue()

    async def serve() -> None:
        async with opening() as omni:
            token, close = trio.lowlevel.current_trio_token(), trio.Event()
            opened.put((SharedSystem(omni, token, fixture_processes), lambda: token.run_sync_soon(close.set)))
            await close.wait()

    with clear_choices_in_workers() if clear_choices else nullcontext(), ThreadPoolExecutor(1) as thread:
        serving = thread.submit(trio.run, serve)
        serving.add_done_callback(lambda _: opened.put(None))
        found = opened.get()
        assert found is not None, serving.exception()
        shared_system, close = found
        try:
            yield shared_system
        finally:  # also when the block raises: leaving the thread's block waits for it
            close()
        serving.result()


def with_shared_system(work: Work) -> Callable[[SharedSystem], None]:
    """Decorator: make ``work(omni)`` a test that runs on the module's fixture ``shared_system``."""

    def test(shared_system: SharedSystem) -> None:
        shared_system.run(work)

    return test


def use_shared_system(shared_system: SharedSystem, patch: pytest.MonkeyPatch) -> list[Pipeline]:
    """Let a program that runs in this process use the shared system in place of the one that it opens.

    Returns a list that receives the pipelines that the program asks for.
    """
    asked: list[Pipeline] = []

    def run(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Replacement of ``trio.run``: run in the event loop of the shared system."""
        results = []

        async def work(_: OmniSystem) -> None:
            results.append(await function(*arguments))

        shared_system.run(work)
        return results[0]

    @asynccontextmanager
    async def open_shared(config: str, overrides: Mapping[str, Any] | None = None) -> AsyncIterator[OmniSystem]:
        asked.append(load(config, overrides))
        yield shared_system.omni

    patch.setattr(trio, "run", run)
    patch.setattr(OmniSystem, "open", open_shared)
    return asked
