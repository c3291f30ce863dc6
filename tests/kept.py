"""A system that is kept open, in a thread, for all the tests of a module: trio's fixtures are no wider than a test."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, load

WATCHDOG_S = 60.0
Work: TypeAlias = Callable[[OmniSystem], Awaitable[None]]
Kept: TypeAlias = Callable[[Work], None]
"""Does some work with the system, and waits until all of its stages serve again."""


@contextmanager
def kept_open(opening: Callable[[], AbstractAsyncContextManager[OmniSystem]], its_own: set[int]) -> Iterator[Kept]:
    """its_own: the fixture of that name, so that workers that come back are nobody else's doing."""
    opened: queue.SimpleQueue[tuple[trio.lowlevel.TrioToken, OmniSystem, trio.Event] | None] = queue.SimpleQueue()

    async def keep_open() -> None:
        async with opening() as omni:
            close = trio.Event()
            opened.put((trio.lowlevel.current_trio_token(), omni, close))
            await close.wait()

    with ThreadPoolExecutor(1) as thread:
        kept = thread.submit(trio.run, keep_open)
        kept.add_done_callback(lambda _: opened.put(None))
        found = opened.get()
        assert found is not None, kept.exception()
        token, omni, close = found

        async def do_and_recover(work: Work) -> None:
            try:
                await work(omni)
            finally:  # a test that fails leaves the next one a system that serves
                with trio.fail_after(WATCHDOG_S):
                    while not omni.health().ready:
                        await omni.wait_changed()

        def do(work: Work) -> None:
            try:
                trio.from_thread.run(do_and_recover, work, trio_token=token)
            finally:
                its_own.update(replica.pid for [replica] in omni.health().stages.values() if replica.pid)

        yield do
        trio.from_thread.run_sync(close.set, trio_token=token)
        kept.result()


def in_kept(work: Work) -> Callable[[Kept], None]:
    """``work`` as a test, with the system of the module's fixture ``kept``."""

    def test(kept: Kept) -> None:
        kept(work)

    return test


def stand_in(kept: Kept, patch: pytest.MonkeyPatch) -> list[Pipeline]:
    """Let a program, run here, ask the kept system instead of one that it would open. Returns what it asks for."""
    systems: list[OmniSystem] = []
    asked: list[Pipeline] = []

    async def tell(omni: OmniSystem) -> None:
        systems.append(omni)

    def run(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """``trio.run``, in the loop that the system lives in."""
        results = []

        async def work(_: OmniSystem) -> None:
            results.append(await function(*arguments))

        kept(work)
        return results[0]

    @asynccontextmanager
    async def open_kept(config: str, **overrides: Any) -> AsyncIterator[OmniSystem]:
        asked.append(load(config, overrides))
        yield systems[0]

    kept(tell)
    patch.setattr(trio, "run", run)
    patch.setattr(OmniSystem, "open", open_kept)
    return asked
