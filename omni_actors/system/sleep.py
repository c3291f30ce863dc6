"""Sleeping stages: their memory is free for other programs until they are woken.

Rules
1. A stage sleeps as a whole. Requests that need it are refused (``StageAsleep``) from the beginning of ``sleep`` until
   ``wake_up``; those in flight are aborted or waited for first.
2. Level 1: the engines move their weights to host memory. It is a part of the desired state, so a worker that is
   restarted meanwhile sleeps too. Level 2: the workers end, and ``wake_up`` starts new ones.
3. Workers are put to sleep, and woken, under one lock. A stage that was woken while ``sleep`` waited for its requests
   stays awake. One whose workers another ``sleep`` has ended meanwhile stays at level 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias, get_args

import trio

from omni_actors.errors import InvalidRequest, OmniError, SystemClosed, WorkerLost
from omni_actors.supervisor.calls import Reply, require_sendable
from omni_actors.system.calls import Replies, are_names
from omni_actors.system.scaling import ScaleControl

SLEEP_TIMEOUT_S = 120.0
SleepMode: TypeAlias = Literal["abort", "wait"]
SLEEP_MODES = get_args(SleepMode)
LEVELS = (1, 2)


class SleepControl(ScaleControl):
    """The methods of ``OmniSystem`` for sleeping stages."""

    def __init__(self) -> None:
        super().__init__()
        self._sleep_lock = trio.Lock()
        self._engines_asleep: set[str] = set()
        """The stages whose engines were put to sleep (level 1), and are not all awake again."""

    async def sleep(
        self,
        level: int = 1,
        *,
        stages: Collection[str] | None = None,
        mode: SleepMode = "abort",
        timeout_s: float = SLEEP_TIMEOUT_S,
    ) -> Replies:
        """Free the memory of stages until ``wake_up``.

        Args:
            level: 1: the weights move to host memory, where the engine can do that. 2: the workers end, which frees
                everything; waking loads the model again.
            stages: The stages; by default all.
            mode: Whether the requests that use these stages are aborted, or waited for.
            timeout_s: Seconds to wait for each worker, after the requests have ended.

        Returns:
            By stage, a reply of each replica. Its value has the memory of the worker ``before`` and ``after``, each
            with ``rss_bytes`` and ``device_bytes``. If a stage does not support level 1, its replies have the error
            ``Unsupported``, and nothing has changed in any stage. At level 2, a replica that has no worker, such as
            one that slept before, has no memory ``before``. A stage that was woken before its requests had ended stays
            awake: its replies have the same memory twice. If an engine of a stage refuses, that stage is woken.

        Raises InvalidRequest (an argument is wrong), SystemClosed, and TooManyCalls (level 1: a worker has many changes
        of its state to answer). Then no stage sleeps that did not before, but one that was to be woken after a refusal.
        While a stage sleeps, requests that need it are refused with ``StageAsleep``. A cancelled call may leave stages
        asleep.
        """
        chosen = self._stages(stages)
        for name, found, accepted in (("level", level, LEVELS), ("mode", mode, SLEEP_MODES)):
            if found not in accepted:
                message = f"{name}: found {found!r}; accepted: {', '.join(map(repr, accepted))}"
                raise InvalidRequest(message, param=name)
        require_sendable("sleep", {"level": level}, timeout_s)
        if level == 1:
            supported = await self.call("supports", {"capability": "sleep"}, stages=chosen)
            if any(reply.error is not None for replies in supported.values() for reply in replies):
                return supported
        self._orchestrator.closures.asleep.update(chosen)
        if mode == "abort":
            self._orchestrator.abort_all("the stage goes to sleep", chosen)
        await self._orchestrator.wait_ended(chosen, queued=True)
        async with self._unscaled(chosen):
            return await self._sleep(level, chosen, timeout_s)

    async def _sleep(self, level: int, chosen: Collection[str], timeout_s: float) -> Replies:
        """Let stages sleep whose requests have ended. Their replicas stay the same meanwhile."""
        before = await self.call("worker_status", stages=chosen, timeout_s=timeout_s)
        async with self._sleep_lock:
            asleep = [stage for stage in chosen if stage in self._orchestrator.closures.asleep]
            if level == 2:
                await self._supervisor.stop_stages(asleep)
                self.drop_desired("sleep", stages=asleep)  # of an earlier sleep at level 1
                self._engines_asleep.difference_update(asleep)
            ended = {address.stage for address, each in self._supervisor.replicas.items() if each.asleep}
            replies = {stage: [_ended(each) for each in before[stage]] for stage in asleep if stage in ended}
            if level == 1:  # another call may have ended workers while this one waited for requests
                still = [stage for stage in asleep if stage not in ended]
                replies |= await self._sleep_engines(still, before, timeout_s)
        return {stage: replies.get(stage, [_memory(each, each) for each in before[stage]]) for stage in chosen}

    async def _sleep_engines(self, chosen: Sequence[str], before: Replies, timeout_s: float) -> Replies:
        """Move the weights of the stages (level 1). before: their workers' status, for the replies."""
        replies = {}
        try:
            calls, _ = self._begin_change("sleep", {"level": 1}, "", chosen, timeout_s)
        except OmniError:  # nothing has changed, so what was awake serves
            self._orchestrator.closures.asleep.difference_update(set(chosen) - self._engines_asleep)
            raise
        self._engines_asleep.update(chosen)
        slept = await self._replies(calls, chosen)
        refused = [stage for stage in chosen if any(isinstance(each.error, InvalidRequest) for each in slept[stage])]
        if refused:  # no request may meet those of their replicas that sleep
            await self._wake(None, refused, timeout_s)
        after = await self.call("worker_status", stages=chosen, timeout_s=timeout_s)
        for stage in chosen:
            pairs = zip(slept[stage], before[stage], after[stage], strict=True)
            replies[stage] = [call if call.error else _memory(first, last) for call, first, last in pairs]
        return replies

    async def wake_up(
        self,
        tags: Sequence[str] | None = None,
        *,
        stages: Collection[str] | None = None,
        timeout_s: float = SLEEP_TIMEOUT_S,
    ) -> Replies:
        """Wake sleeping stages, and return when they serve again. Stages that do not sleep are left alone.

        Args:
            tags: Parts to wake, for engines that name parts ("weights", "kv_cache" of vLLM); None: all. A stage whose
                workers have ended wakes as a whole only.
            stages: The stages; by default all.
            timeout_s: Seconds to wait for each worker that sleeps at level 1.

        Returns:
            The replies of the workers that slept at level 1; a true value: the engine is awake. A replica without a
            worker replies with ``WorkerLost``; its next worker is awake, unless only ``tags`` were woken.

        Raises InvalidRequest (an argument is wrong), StageFailed (a stage cannot load any more), SystemClosed, and
        TooManyCalls (a worker that sleeps at level 1 has many changes of its state to answer; it still sleeps).
        A cancelled call may leave stages at level 1 asleep; those at level 2 wake.
        """
        async with self._sleep_lock:
            replies, started = await self._wake(tags, stages, timeout_s)
        await self._wait_stages_ready(started)
        return replies

    async def _wake(
        self, tags: Sequence[str] | None, stages: Collection[str] | None, timeout_s: float
    ) -> tuple[Replies, Collection[str]]:
        """Wake stages as ``wake_up``. Return the replies, and the stages that are awake now or get new workers."""
        if not self._running:
            raise SystemClosed
        if tags is not None and not are_names(tags):
            example = tags if isinstance(tags, str) else "weights"
            raise InvalidRequest(f"tags: expected names such as ({example!r},), found {tags!r:.200}", param="tags")
        asleep = [stage for stage in self._stages(stages) if stage in self._orchestrator.closures.asleep]
        level_1 = [stage for stage in asleep if stage in self._engines_asleep]
        level_2 = [stage for stage in asleep if stage not in self._engines_asleep]
        if tags is not None and level_2:
            why = "sleeps at level 2, so it can only be woken as a whole; leave tags out"
            raise InvalidRequest(f"tags: stage {level_2[0]!r} {why}", param="tags")
        calls = self._begin_calls("wake_up", {"tags": tags and list(tags)}, level_1, timeout_s, changes_state=True)
        self._orchestrator.closures.asleep.difference_update(level_2)
        await self._supervisor.start_stages(level_2)
        for stage in level_2:
            self._orchestrator.pools.recover(stage)  # one that was given up is tried again
        if tags is None:  # of a worker that starts from now on, nothing sleeps
            self.drop_desired("sleep", stages=level_1)
        replies = await self._replies(calls, level_1)
        woken = [stage for stage in level_1 if all(_is_awake(each, whole=tags is None) for each in replies[stage])]
        self.drop_desired("sleep", stages=woken)
        self._orchestrator.closures.asleep.difference_update(woken)
        self._engines_asleep.difference_update(woken)
        return replies, [*level_2, *woken]

    async def is_sleeping(self) -> bool:
        """Return whether any stage sleeps."""
        await trio.lowlevel.checkpoint()
        return bool(self._orchestrator.closures.asleep)

    async def _wait_stages_ready(self, stages: Collection[str]) -> None:
        """Wait until a replica of each stage is ready, or the stage sleeps again. Raises StageFailed, SystemClosed."""
        for stage in stages:
            while self._orchestrator.pools.replicas(stage) and not self._orchestrator.pools.serves(stage):
                if stage in self._orchestrator.closures.asleep:
                    break
                if (failure := self._orchestrator.failed_stages.get(stage)) is not None:
                    raise failure.with_traceback(None)
                await self.wait_changed()


def _is_awake(reply: Reply, *, whole: bool) -> bool:
    """Return whether the worker of a reply is awake, or the next one will be. whole: whether all parts were woken."""
    return bool(reply.value) or (whole and isinstance(reply.error, WorkerLost))


_ENDED = Reply({"rss_bytes": 0, "device_bytes": 0})


def _ended(before: Reply) -> Reply:
    """Return the reply of a replica whose worker was ended, or had none. before: its reply to ``worker_status``."""
    return _memory(_ENDED if isinstance(before.error, WorkerLost) else before, _ENDED)


def _memory(before: Reply, after: Reply) -> Reply:
    """Return one reply of two replies to ``worker_status``."""
    if (error := before.error or after.error) is not None:
        return Reply(error=error)
    names = ("rss_bytes", "device_bytes")
    return Reply(
        {when: {name: each.value[name] for name in names} for when, each in (("before", before), ("after", after))}
    )
