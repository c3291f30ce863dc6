"""Calls to the engines of a running system, and the desired state of its stages.

Rules
1. A call waits for its own timeout at each replica alone: a stage that stands still delays no other stage's reply.
2. What the parent knows itself is answered without a call.
3. What an engine refuses is taken out of the desired state when its answer arrives, also if the caller was cancelled,
   or its timeout has passed: the next worker could not load.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import trio

from omni_actors.errors import InvalidRequest, OmniError, SystemClosed, TooManyCalls
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.calls import MAX_CALLS, PendingCall, Reply, require_sendable
from omni_actors.supervisor.desired_state import Part
from omni_actors.supervisor.nodes import HasNodes
from omni_actors.supervisor.supervisor import Supervisor

CALL_TIMEOUT_S = 10.0

Replies: TypeAlias = dict[str, list[Reply]]
"""The reply of each replica of a stage in their order, standbys included, by stage."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class EngineCalls:
    """The methods of ``OmniSystem`` that call engines."""

    _supervisor: Supervisor
    _orchestrator: Orchestrator
    _cluster: HasNodes | None

    def __init__(self) -> None:
        self._running = False
        self._lifetime = trio.CancelScope()
        """Around everything that runs for the system."""
        self._tasks: trio.Nursery
        """Runs the system's own tasks while it is open."""
        self._all_ended = trio.Event()
        """Set when nothing runs any more."""

    @property
    def is_stopped(self) -> bool:
        """Whether the system was closed, or shut down."""
        return self._all_ended.is_set() or self._lifetime.cancel_called

    def _require_running(self) -> None:
        """Raise SystemClosed if the system has closed."""
        if not self._running or self.is_stopped:
            raise SystemClosed

    async def call(
        self,
        capability: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        stages: Collection[str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Replies:
        """Use a capability of the engines, between two of their steps.

        Args:
            capability: Its name, as the engine declares it (``stages.base.Controllable``).
            arguments: What the engine takes with it; msgpack must be able to encode it.
            stages: The stages to ask; by default all.
            timeout_s: Seconds to wait for each replica. A worker may take so long to answer before it counts as hung.

        Returns:
            A reply of every replica of these stages: a value or an error, none of which is raised.

        Raises:
            InvalidRequest: A stage is unknown, or the arguments cannot be sent.

        Cancelling the wait does not cancel the calls.
        """
        chosen = self._stages(stages)
        return await self._replies(self._begin_calls(capability, arguments or {}, chosen, timeout_s), chosen)

    async def set_desired(
        self,
        capability: str,
        arguments: Mapping[str, Any],
        *,
        key: str = "",
        stages: Collection[str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Replies:
        """Make a call a part of the stages' desired state: every worker that starts later makes it before it is ready.

        Requests that are submitted after this method was called meet engines that have carried the call out.

        Args:
            capability, arguments, stages, timeout_s: As for ``call``.
            key: Parts with different keys exist beside each other; a later part replaces one with the same key.

        Returns:
            As ``call``. A replica without a worker replies ``WorkerLost``, and its next worker makes the call. If an
            engine of a stage refuses the call, also after its timeout, the desired state is again what it was. So it
            is if no engine has carried the call out, and those of the next workers raise in it.

        Raises as ``call``, InvalidRequest if the desired state becomes too large, and TooManyCalls if a worker has many
        changes of its state to answer. Nothing has changed then, at any replica. Cancelling the wait does not cancel
        the change.
        """
        chosen = self._stages(stages)
        calls, _ = self._begin_change(capability, arguments, key, chosen, timeout_s)
        return await self._replies(calls, chosen)

    def _begin_change(
        self, capability: str, arguments: Mapping[str, Any], key: str, stages: Sequence[str], timeout_s: float
    ) -> tuple[list[PendingCall], dict[str, Part]]:
        """Change the desired state, and post it. Return the calls, and the new part of each stage.

        Raises as ``set_desired``.
        """
        parts: dict[str, Part] = {}
        require_sendable(capability, arguments, timeout_s)
        try:
            for stage in stages:
                parts[stage] = self._supervisor.desired.set(stage, capability, arguments, key)
            calls = self._begin_calls(capability, arguments, stages, timeout_s, changes_state=True)
        except OmniError:
            for part in parts.values():
                self._supervisor.desired.take_back(part)
            raise
        for call in calls:
            self._supervisor.desired.follow(parts[call.address.stage], call)
        return calls, parts

    async def _to_the_end(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work`` in a task of the system, and return its result. Cancelling the wait does not cancel it.

        Raises what it raises, and SystemClosed if the system closes first. If the system has closed already, ``work``
        runs in the caller's task: its calls have ended.
        """
        if not self._running or self.is_stopped:
            return await work()
        results, errors, ended, waits = list[T](), list[Exception](), trio.Event(), True

        @trio.lowlevel.enable_ki_protection
        async def run() -> None:
            try:
                results.append(await work())
            except Exception as error:  # noqa: BLE001 - raised to the caller
                if waits:
                    errors.append(error)
                else:
                    _log.warning("a change failed after its caller was cancelled: %s", error)
            finally:
                ended.set()

        self._tasks.start_soon(run)
        try:
            await ended.wait()
        finally:
            waits = False
        if results:
            return results.pop()
        raise errors.pop() if errors else SystemClosed

    async def collective_rpc(
        self,
        method: str,
        timeout_s: float = CALL_TIMEOUT_S,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        stages: Collection[str] | None = None,
    ) -> Replies:
        """Call a method of the model's workers inside the engines that have such workers (vLLM), by its name.

        A reply's value is the list of what each of the engine's ranks returned. Arguments and results must be such
        that msgpack can encode them.
        """
        arguments = {"method": method, "timeout_s": timeout_s, "args": list(args), "kwargs": dict(kwargs or {})}
        return await self.call("collective_rpc", arguments, stages=stages, timeout_s=timeout_s)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, *, stages: Collection[str] | None = None
    ) -> Replies:
        """Empty the engines' caches of prompt prefixes.

        Args:
            reset_running_requests: Whether running requests give up their cached blocks too, and compute them again.
            stages: The stages; by default all. Those without such a cache reply ``Unsupported``.

        A reply's value is false if blocks are in use, so that nothing was reset.
        """
        arguments = {"reset_running_requests": reset_running_requests}
        return await self.call("reset_prefix_cache", arguments, stages=stages)

    async def reset_mm_cache(self, *, stages: Collection[str] | None = None) -> Replies:
        """Empty the engines' caches of processed media. Stages without such a cache reply ``Unsupported``."""
        return await self.call("reset_mm_cache", stages=stages)

    async def reset_encoder_cache(self, *, stages: Collection[str] | None = None) -> Replies:
        """Empty the engines' caches of encoded media. Stages without such a cache reply ``Unsupported``."""
        return await self.call("reset_encoder_cache", stages=stages)

    def drop_desired(self, capability: str, *, key: str = "", stages: Collection[str] | None = None) -> None:
        """Remove a part of the stages' desired state. Workers that run keep what the call did.

        Raises InvalidRequest: a stage is unknown.
        """
        for stage in self._stages(stages):
            self._supervisor.desired.drop(stage, capability, key)

    def _stages(self, stages: Collection[str] | None) -> Sequence[str]:
        """Return the stages that are asked for, in the order of the pipeline. Raises InvalidRequest."""
        known = list(self._supervisor.stages)
        if stages is None:
            return known
        if not are_names(stages):
            example = stages if isinstance(stages, str) else known[0]
            message = f"stages: expected names such as ({example!r},), found {stages!r:.200}"
            raise InvalidRequest(message, param="stages")
        if unknown := sorted(set(stages) - set(known)):
            raise InvalidRequest(f"stages: there is no stage {unknown[0]!r}; stages: {known}", param="stages")
        return [stage for stage in known if stage in stages]

    def _elsewhere(self) -> dict[Address, str]:
        """Return the node of each worker that runs on another node than this process."""
        nodes = {} if self._cluster is None else self._cluster.nodes()
        found = {
            address: replica.worker.node
            for address, replica in self._supervisor.replicas.items()
            if replica.worker is not None and replica.worker.node is not None
        }
        return {address: node for address, node in found.items() if node in nodes and not nodes[node].parent}

    def _begin_calls(
        self,
        capability: str,
        arguments: Mapping[str, Any],
        stages: Sequence[str],
        timeout_s: float,
        *,
        changes_state: bool = False,
    ) -> list[PendingCall]:
        """Post a call to every replica of ``stages``.

        changes_state: whether it changes their desired state. Such a call reaches every replica that has a worker.
        Raises InvalidRequest, and for a change TooManyCalls: nothing was posted.
        """
        require_sendable(capability, arguments, timeout_s)
        chosen = [replica for address, replica in self._supervisor.replicas.items() if address.stage in stages]
        for replica in chosen if changes_state else ():
            if replica.worker is not None and not replica.incarnation.calls.has_room(changes_state=True):
                raise TooManyCalls(replica.address.stage, replica.address.replica, capability, MAX_CALLS)
        return [replica.call(capability, arguments, timeout_s, changes_state=changes_state) for replica in chosen]

    async def _replies(self, calls: Sequence[PendingCall], stages: Iterable[str]) -> Replies:
        """Return the replies of ``calls`` by stage. stages: those that have an entry even without replicas."""
        replies: Replies = {stage: [] for stage in stages}
        for call in calls:  # their deadlines are the same, so waiting in turn takes no longer
            replies.setdefault(call.address.stage, []).append(await call.wait())
        return replies


def are_names(given: Any) -> bool:
    """Whether an argument is a collection of strings, and not one string."""
    is_collection = isinstance(given, Collection) and not isinstance(given, str)
    return is_collection and all(isinstance(each, str) for each in given)
