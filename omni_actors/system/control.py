"""Control of a running system beside requests: calls to the engines, and the desired state of the stages.

Rules
1. A call waits for its own timeout at each replica alone: a stage that stands still delays no other stage's reply.
2. What the parent knows itself is answered without a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from omni_actors.errors import InvalidRequest
from omni_actors.supervisor.calls import PendingCall, Reply
from omni_actors.supervisor.supervisor import Supervisor

CALL_TIMEOUT_S = 10.0
LARGEST_ARGUMENTS = 64 * 1024
"""Most bytes of a call's arguments, encoded: they travel in one control message."""

Replies: TypeAlias = dict[str, list[Reply]]
"""By stage, the reply of each of its replicas in their order, standbys included."""


class Control:
    """The methods of ``OmniSystem`` that do not concern single requests."""

    _supervisor: Supervisor

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
        return await self._replies(self._begin_calls(capability, arguments or {}, self._stages(stages), timeout_s))

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
            engine of a stage refuses the call, the stage's desired state is again what it was.

        Raises as ``call``, and InvalidRequest if the desired state becomes too large.
        """
        chosen, desired = self._stages(stages), self._supervisor.desired
        before = {stage: desired.get(stage, capability, key) for stage in chosen}
        calls = self._begin_calls(capability, arguments, chosen, timeout_s)
        for stage in chosen:
            desired.set(stage, capability, arguments, key)
        replies = await self._replies(calls)
        for stage in chosen:
            refused = any(isinstance(reply.error, InvalidRequest) for reply in replies[stage])
            if refused and desired.get(stage, capability, key) == arguments:  # else it was changed meanwhile
                desired.set(stage, capability, before[stage], key)
        return replies

    def drop_desired(self, capability: str, *, key: str = "", stages: Collection[str] | None = None) -> None:
        """Remove a part of the stages' desired state. Workers that run keep what the call did.

        Raises InvalidRequest: a stage is unknown.
        """
        for stage in self._stages(stages):
            self._supervisor.desired.set(stage, capability, None, key)

    def _stages(self, stages: Collection[str] | None) -> Sequence[str]:
        """Return the stages that are asked for, in the order of the pipeline. Raises InvalidRequest."""
        known = list(dict.fromkeys(address.stage for address in self._supervisor.replicas))
        if isinstance(stages, str):
            raise InvalidRequest(f"stages: expected names such as ({stages!r},), found {stages!r}", param="stages")
        if unknown := sorted(set(stages or ()) - set(known)):
            raise InvalidRequest(f"stages: there is no stage {unknown[0]!r}; stages: {known}", param="stages")
        return [stage for stage in known if stages is None or stage in stages]

    def _begin_calls(
        self, capability: str, arguments: Mapping[str, Any], stages: Sequence[str], timeout_s: float
    ) -> list[PendingCall]:
        """Post a call to every replica of ``stages``. Raises InvalidRequest."""
        try:
            size = len(msgspec.msgpack.encode(arguments))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"arguments of {capability!r}: {error}", param="arguments") from error
        if size > LARGEST_ARGUMENTS:
            message = f"arguments of {capability!r}: at most {LARGEST_ARGUMENTS} bytes can be sent, found {size}"
            raise InvalidRequest(message, param="arguments")
        replicas = self._supervisor.replicas
        return [replicas[each].call(capability, arguments, timeout_s) for each in replicas if each.stage in stages]

    async def _replies(self, calls: Sequence[PendingCall]) -> Replies:
        replies: Replies = {}
        for call in calls:  # their deadlines are the same, so waiting in turn takes no longer
            replies.setdefault(call.address.stage, []).append(await call.wait())
        return replies
