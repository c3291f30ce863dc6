"""Control of a running system beside requests: its end, the abort of requests, and pauses of generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import trio

from omni_actors.errors import InvalidRequest, SystemClosed
from omni_actors.system.calls import CALL_TIMEOUT_S, EngineCalls, Replies
from omni_actors.validation import require_seconds

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
PAUSE_MODES = get_args(PauseMode)


class Freed(msgspec.Struct, frozen=True):
    """What an abort has freed.

    Attributes:
        requests: For each request that was in flight, the stages that held it.
        replies: The replies of the workers that held one. A value is sent after the worker has freed the requests:
            ``requests`` that are left, ``rss_bytes``, ``device_bytes``. A worker that died has freed everything.
    """

    requests: dict[str, list[str]]
    replies: Replies


class PendingAbort(Awaitable[Freed]):
    """Requests that were aborted. Awaiting it waits until the workers have freed them."""

    def __init__(self, requests: dict[str, list[str]], confirm: Callable[[], Awaitable[Replies]]) -> None:
        self._requests, self._confirm = requests, confirm

    def __await__(self) -> Generator[Any, None, Freed]:
        return self._wait().__await__()

    async def _wait(self) -> Freed:
        return Freed(self._requests, await self._confirm())


class Control(EngineCalls):
    """The methods of ``OmniSystem`` that do not concern single requests."""

    def __init__(self) -> None:
        super().__init__()
        self._pauses = 0
        """How often generation was paused."""

    # the end

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        """Drain the system and stop it: return when every worker has been reaped. The block goes on without it.

        Args:
            timeout_s: Seconds in which the requests in flight may end; those that have not are then aborted. New ones
                are refused (``SystemClosed``) from the beginning.

        Raises InvalidRequest: ``timeout_s`` is wrong, and the system goes on. A cancelled wait for the requests goes on
        with the stop.
        """
        require_seconds("timeout_s", timeout_s, endless=True)
        self._orchestrator.closures.draining = True
        try:
            with trio.move_on_after(timeout_s):
                await self._orchestrator.wait_ended(queued=True)
        finally:
            self._orchestrator.abort_all("the system is shutting down")
            self._close()
            self._lifetime.cancel()
        await self._all_ended.wait()

    def _close(self) -> None:
        self._running = False
        self._supervisor.changes.unpark_all()

    async def wait_changed(self) -> None:
        """Wait until the state or the note of any replica changes. Raises SystemClosed when the system closes."""
        if self._running:
            await self._supervisor.changes.park()
        if not self._running:
            raise SystemClosed

    # aborting and pausing

    def abort(self, request_id: str | Iterable[str]) -> PendingAbort:
        """End a request now, or several, in every stage; reading one then raises ``Aborted``.

        Args:
            request_id: One identifier or several. One that is not in flight is ignored.

        Returns:
            An object that need not be awaited. Awaiting it waits, for 10 s at most, until the workers have freed the
            requests, and returns what was freed (``Freed``).
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        held = {name: by for name in names if (by := self._orchestrator.abort_named(name)) is not None}
        addresses = {address for by in held.values() for address in by}
        requests = {name: [address.stage for address in by] for name, by in held.items()}

        async def confirm() -> Replies:
            await trio.lowlevel.checkpoint()
            replicas = self._supervisor.replicas
            posted = [
                replicas[each].call("worker_status", {}, CALL_TIMEOUT_S) for each in replicas if each in addresses
            ]
            return await self._replies(posted, ())

        return PendingAbort(requests, confirm)

    def abort_all(self, reason: str) -> None:
        """End every request now; reading one then raises ``Aborted`` with ``reason``."""
        self._orchestrator.abort_all(reason)

    async def pause_generation(self, mode: PauseMode = "abort") -> Replies:
        """Stop generating: requests that are submitted from now on are admitted and wait for ``resume_generation``.

        Their deadlines count meanwhile, and they take places of ``limits.max_requests``.

        Args:
            mode: What happens to the requests that run. "abort": they end with ``Aborted``. "wait": they run to their
                end, which this method waits for. "keep": every worker makes no step until generation is resumed, and
                then goes on exactly where it was; their deadlines count.

        Returns:
            With "keep", the reply of each worker: from then on it makes no step. A worker without a reply makes no
            step after the one that it is in. Otherwise nothing.

        Raises InvalidRequest (an unknown mode), TooManyCalls ("keep": see ``set_desired``; new requests wait anyhow).
        Cancelling the wait leaves generation paused.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode: found {mode!r}; accepted: {', '.join(map(repr, PAUSE_MODES))}", param="mode")
        await trio.lowlevel.checkpoint()
        return await self._pause(mode)

    async def _pause(self, mode: PauseMode) -> Replies:
        """As ``pause_generation``. No request is dispatched from the first moment on."""
        self._pauses += 1
        self._orchestrator.set_dispatch_paused(paused=True, frozen=mode == "keep")
        if mode == "abort":
            self._orchestrator.abort_all("generation was paused")
        elif mode == "wait":
            await self._orchestrator.wait_ended()
        else:
            return await self.set_desired("freeze", {"frozen": True})
        return {}

    async def resume_generation(self) -> None:
        """Generate again after ``pause_generation``. Has no effect if generation is not paused.

        During an update of weights (see ``start_weight_update``), it has its effect when the update ends.
        Raises TooManyCalls: a worker has many changes of its state to answer. Generation is still paused; try again.
        """
        await trio.lowlevel.checkpoint()
        if self._is_frozen:
            self._begin_calls("freeze", {"frozen": False}, self._stages(None), CALL_TIMEOUT_S, changes_state=True)
            self.drop_desired("freeze")
        self._release()

    def _release(self) -> None:
        self._orchestrator.set_dispatch_paused(paused=False)

    async def is_paused(self) -> bool:
        """Return whether generation is paused."""
        await trio.lowlevel.checkpoint()
        return self._orchestrator.is_dispatch_paused

    @property
    def _is_frozen(self) -> bool:
        """Whether generation is paused with "keep"."""
        return any(self._supervisor.desired.get(stage, "freeze") is not None for stage in self._stages(None))
