"""A system that is kept open, in a thread, for all the tests of a module: trio's fixtures are no wider than a test."""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeAlias

import trio

from omni_actors import OmniSystem

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
            await work(omni)
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
