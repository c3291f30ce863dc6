"""New weights for stages that serve.

Rules
1. No request is computed with two versions: the requests of a stage end, or are aborted, before its weights change,
   and later ones wait until it has the new ones.
2. The new weights are a part of the desired state, so a worker that starts later has them before it is ready. The files
   must stay as they are until then; tensors are kept in shared memory as long (``kept_updates``).
3. All replicas of a stage have one version. If one refuses new weights, or its engine raises, the others get the
   earlier ones back. A replica that does not take those is restarted.
4. The others get the earlier weights back also if a worker dies at new weights, and the next one of its replica dies
   before it is ready: memory may not suffice, and the kernel then kills a worker, which leaves no message on stderr.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import trio

from omni_actors.config import Pipeline
from omni_actors.errors import CallTimedOut, InvalidRequest, OmniError, Unsupported, WorkerLost
from omni_actors.protocol.messages import FIRST_VERSION, Address
from omni_actors.supervisor.calls import PendingCall, Reply
from omni_actors.supervisor.desired_state import Part
from omni_actors.supervisor.incarnation import IncarnationState
from omni_actors.supervisor.replica import ReplicaState
from omni_actors.system.calls import CALL_TIMEOUT_S, Replies
from omni_actors.system.control import Control, PauseMode
from omni_actors.system.kept_updates import CAPABILITY, KeptUpdates, files_at, key_of
from omni_actors.validation import is_printable, require_seconds

UPDATE_TIMEOUT_S = 300.0
LONGEST_VERSION = 256
"""Most characters of a version's name: every output brings it."""


class WeightControl(Control):
    """The methods of ``OmniSystem`` for new weights."""

    pipeline: Pipeline
    _models: Mapping[str, Path]

    def __init__(self) -> None:
        super().__init__()
        self._updating = False
        self._paused_before = False
        self._own_pauses = 0
        """What ``_pauses`` is if no other caller has paused generation since the update began."""
        self._turn = trio.Semaphore(1)
        """Held by an update until it has ended, also after its caller was cancelled."""
        self._updates = 0
        """How many updates had no version."""

    @cached_property
    def _kept(self) -> KeptUpdates:
        return KeptUpdates(self._supervisor)

    async def start_weight_update(self, mode: PauseMode = "wait") -> None:
        """Pause generation for one or several calls of ``update_weights``, until ``finish_weight_update``.

        mode: "wait" or "abort", what happens to the requests that run (see ``pause_generation``). Raises InvalidRequest
        for another one ("keep" would compute one request with two versions), and for "wait" if a pause with "keep"
        holds requests. An update that goes on is waited for first. Cancelling the wait for requests leaves generation
        paused until ``finish_weight_update``.
        """
        await self._wait_for_turn()
        await self._start(mode)

    async def _wait_for_turn(self) -> None:
        """Wait until no update goes on. What the caller does before its next checkpoint is done without one."""
        await self._turn.acquire()
        self._turn.release()

    async def _start(self, mode: PauseMode) -> None:
        """As ``start_weight_update``, beside the update of the caller."""
        if mode not in ("wait", "abort"):
            raise InvalidRequest(f'mode: found {mode!r}; accepted: "wait", "abort"', param="mode")
        if mode == "wait":
            self._require_not_held()
        if not self._updating:
            self._paused_before, self._own_pauses = self._orchestrator.is_dispatch_paused, self._pauses
        self._own_pauses += 1
        self._updating = True
        await self._pause(mode)

    def _require_not_held(self) -> None:
        """Raise InvalidRequest if a pause with "keep" holds requests."""
        if self._is_frozen and self._orchestrator.using(queued=False):
            message = 'generation is paused with "keep", so the requests that run cannot end; resume it, or abort them'
            raise InvalidRequest(message, param="mode", code="paused")

    async def update_weights(
        self,
        path: str | Path | Mapping[str, Any],
        *,
        version: str | None = None,
        stages: Collection[str],
        mode: PauseMode = "wait",
        timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> Replies:
        """Replace weights of stages, in place and between requests.

        Args:
            path: A safetensors file, or a directory with such files. Or the tensors themselves, by name: arrays of
                numpy or tensors of torch, which are copied into shared memory once. Names and shapes are those of the
                model's own checkpoint; weights that are missing stay as they are. Files must not change while they are
                in use. Of tensors, the newest of each name are kept until all are replaced. On a cluster, each node
                with a worker of the stages needs the files at this path, with the time of their last change; tensors
                are for stages that no other node than the parent's may run.
            version: The name of the version, 1 to 256 printable characters. Every output has it from then on as
                ``data["weights_version"]``. By default it is the last part of the absolute path, and "update-1",
                "update-2" … for tensors. It is "0" before all updates.
            stages: The stages whose model it is.
            mode: What happens to the requests that run. If ``start_weight_update`` has paused generation, its mode
                counts, and those that still run are waited for.
            timeout_s: Seconds to wait for the requests that run, and then for each worker. An earlier update is waited
                for before, without a limit.

        Returns:
            The reply of each replica: the number of tensors that were ``updated``, and whether these were all
            (``complete``). If a stage's replica refused them, its engine raised, or its workers died at them twice, the
            stage has its earlier weights (see ``get_weight_version``). So it has if that happens after ``timeout_s``;
            the replicas that have taken them by then start again. If the requests did not end in time, the replies
            are ``CallTimedOut``, and nothing has changed.

        Raises InvalidRequest: an argument is wrong, or there are no such files; nothing has changed. TooManyCalls: a
        worker has many changes of its state to answer; nothing has changed. A call that is cancelled while it waits for
        the requests changes nothing. Later, the update goes on to its end. SystemClosed: the system is closed, or
        closes meanwhile.
        """
        if version is not None and not is_printable(version, LONGEST_VERSION):
            message = f"version: expected 1 to {LONGEST_VERSION} printable characters, found {version!r:.200}"
            raise InvalidRequest(message, param="version")
        if not isinstance(path, Mapping) and not _is_path(path):
            message = f"path: expected a path, or tensors by name, found {path!r:.200}"
            raise InvalidRequest(message, param="path")
        require_seconds("timeout_s", timeout_s, endless=True)
        chosen = self._stages(stages)
        if isinstance(path, Mapping):
            self._require_shared_memory(chosen)
        patience_s = min(CALL_TIMEOUT_S, timeout_s)
        supported = await self.call("supports", {"capability": CAPABILITY}, stages=chosen, timeout_s=patience_s)
        if any(isinstance(reply.error, InvalidRequest) for replies in supported.values() for reply in replies):
            return supported
        await self._turn.acquire()
        return await self._load(path, version, chosen, mode, timeout_s)

    def _require_shared_memory(self, stages: Collection[str]) -> None:
        """Raise InvalidRequest if a stage has, or may get, workers that cannot read this process's memory."""
        if self._cluster is None:
            return
        from omni_actors.cluster.placement import may_leave_parent  # a system without a cluster does not load it

        elsewhere = {address.stage for address in self._elsewhere()}
        for stage in stages:
            if stage in elsewhere or may_leave_parent(self.pipeline, stage):
                message = (
                    f"path: workers of stage {stage!r} may run on other nodes, which cannot read tensors of this one; "
                    "save them to a safetensors file that every node has, and name it"
                )
                raise InvalidRequest(message, param="path", code="other_nodes")

    async def _load(
        self,
        path: str | Path | Mapping[str, Any],
        version: str | None,
        stages: Collection[str],
        mode: PauseMode,
        timeout_s: float,
    ) -> Replies:
        """Update weights in this update's turn, and end the turn."""
        alone, has_begun = not self._updating, False
        try:
            self._require_running()  # nothing would free the tensors in the desired state of a closed system
            if isinstance(path, Mapping):
                self._kept.require_room(stages)
                path = await trio.to_thread.run_sync(self._kept.memory.write, path)
                self._updates += version is None
                version = version or f"update-{self._updates}"
            files = await trio.to_thread.run_sync(files_at, Path(path))
            with trio.move_on_after(timeout_s) as waiting:
                if alone:
                    await self._start(mode)
                else:  # the caller of ``start_weight_update`` may still wait, or was cancelled
                    self._require_not_held()
                    await self._orchestrator.wait_ended()
            if waiting.cancelled_caught:
                return self._all_timed_out(stages, timeout_s)
            self._require_running()
            arguments, has_begun = {"files": files, "version": version or _version_at(Path(path))}, True
            return await self._to_the_end(partial(self._carry_out, stages, arguments, timeout_s, alone))
        finally:
            if not has_begun:
                self._end_turn(alone)

    async def _carry_out(
        self, stages: Collection[str], arguments: dict[str, Any], timeout_s: float, alone: bool
    ) -> Replies:
        try:
            replies = await self._update(stages, arguments, timeout_s)
            if not any(isinstance(reply.error, CallTimedOut) for of_stage in replies.values() for reply in of_stage):
                # Else an engine may still refuse them, which takes them back.
                while await self._kept.merge(self._stages(stages)):
                    pass
            return replies
        finally:
            self._end_turn(alone)

    def _end_turn(self, alone: bool) -> None:
        """Free what is not used, and begin the next update. alone: whether this one has paused generation itself."""
        self._kept.free_unused()
        try:
            if alone:
                self._finish()
        finally:
            self._turn.release()

    async def finish_weight_update(self) -> None:
        """Resume generation after ``start_weight_update``, unless a caller has paused it, too. No effect without it.

        An update that goes on is waited for first. Cancelling the wait does not cancel the rest.
        """

        async def in_turn() -> None:
            await self._wait_for_turn()
            self._finish()

        await self._to_the_end(in_turn)

    def _finish(self) -> None:
        """As ``finish_weight_update``, beside the update of the caller."""
        was_updating, self._updating = self._updating, False
        if was_updating and not self._paused_before and self._pauses == self._own_pauses:
            self._release()

    def _release(self) -> None:
        """Dispatch requests again: now, or when the update that goes on ends."""
        if not self._updating:
            super()._release()
        else:
            self._paused_before, self._own_pauses = False, self._pauses

    async def _update(self, stages: Collection[str], arguments: dict[str, Any], timeout_s: float) -> Replies:
        key = key_of(arguments)
        asked = dict(self._supervisor.replicas)  # scaling changes them while their replies are waited for
        before = {  # the generations of those that can show whether new weights end a worker
            address: replica.generation
            for address, replica in asked.items()
            if replica.state is not ReplicaState.FAILED and replica.load_s is not None
        }
        chosen = self._stages(stages)
        calls, parts = self._begin_change(CAPABILITY, arguments, key, chosen, timeout_s)
        replies = await self._replies(calls, chosen)
        # Not by ``replies``: a worker may answer after its timeout, while those of others are waited for.
        failed = {call.address.stage for call in calls if call.reply is not None and _failed(call.reply)}
        for call in calls:
            call.on_end = partial(self._on_late_end, parts[call.address.stage], call)
        for stage in stages:
            part, of_stage = parts[stage], [each for each in asked if each.stage == stage]
            pairs = zip(of_stage, replies[stage], strict=True)
            lost = [each for each, reply in pairs if each in before and isinstance(reply.error, WorkerLost)]
            if stage in failed or await self._die_again(part, {each: before[each] for each in lost}, timeout_s):
                self._supervisor.desired.take_back(part)
                for call in calls:  # a worker that answers late gets the earlier weights next
                    if call.address.stage == stage:
                        self._supervisor.desired.follow(part, call)
                await self._restore(stage, timeout_s)
            elif of_stage and all(reply.error is None and reply.value["complete"] for reply in replies[stage]):
                self._supervisor.desired.keep_only(stage, CAPABILITY, key)
        return replies

    def _on_late_end(self, part: Part, call: PendingCall, reply: Reply) -> None:
        """Handle an answer after the timeout. If a replica has refused new weights, those that took them start again.

        Replicas that load with them do so when they are ready (see ``Supervisor``).
        """
        self._supervisor.desired.note_end(part, call, reply)
        if _failed(reply):
            self._supervisor.desired.take_back(part)
        for replica in self._supervisor.replicas.values() if part.taken_back else ():
            incarnation, worker = replica.incarnation, (replica.address, replica.generation)
            has_them = part in incarnation.parts or worker in part.accepted
            if has_them and incarnation.state is IncarnationState.READY:
                replica.kill("another replica has refused its new weights", took_back=True)

    async def _die_again(self, part: Part, lost: Mapping[Address, int], timeout_s: float) -> bool:
        """Wait until each replica has a ready worker again, or is removed; return whether one died first, or failed.

        part: the new weights. lost: the replicas, with the generation whose worker had not answered: it died, or was
        not started yet. Only a worker that loads with the weights shows whether they are the cause, and the loss of its
        node or link does not. A replica that no node has room for is not waited for.
        """
        with trio.move_on_after(timeout_s):
            for address, first in lost.items():
                while self._running and (replica := self._supervisor.replicas.get(address)) is not None:
                    if replica.accepts_work and (replica.generation > first or part in replica.incarnation.parts):
                        break
                    died = any(each.generation > first and not each.exit.was_cut_off for each in replica.history)
                    failed = replica.state is ReplicaState.FAILED
                    if died or (failed and not replica.history[-1].exit.was_cut_off):
                        return True
                    no_place = replica.incarnation.no_place is not None
                    if failed or no_place or replica.leaving or replica.state is ReplicaState.ASLEEP:
                        break
                    await self._supervisor.changes.park()
        return False

    async def get_weight_version(self, *, stages: Collection[str] | None = None) -> dict[str, str]:
        """Return the version of the weights of each stage, as its outputs have it from now on.

        stages: The stages; by default all. Raises InvalidRequest: a stage is unknown.
        """
        await trio.lowlevel.checkpoint()
        versions = {}
        for stage in self._stages(stages):
            updates = self._kept.of(stage)
            versions[stage] = str(updates[-1].desired.arguments["version"]) if updates else FIRST_VERSION
        return versions

    async def _restore(self, stage: str, timeout_s: float) -> None:
        """Give every replica of a stage the weights of its desired state again. Those that do not take them restart."""
        try:
            await self._give_back(stage, timeout_s)
        except OmniError as error:
            for address, replica in self._supervisor.replicas.items():
                if address.stage == stage:
                    replica.kill(f"its earlier weights cannot be sent: {error}", took_back=True)

    async def _give_back(self, stage: str, timeout_s: float) -> None:
        """As ``_restore``: the model's own weights, then each update. Raises InvalidRequest, TooManyCalls."""
        model, folder = self._models.get(stage), self.pipeline.spec(stage).checkpoint_folder
        own = {
            "files": {} if model is None else await trio.to_thread.run_sync(files_at, model / folder),
            "version": None,
        }
        for update in (None, *self._kept.of(stage)):
            if update is not None and update.taken_back:
                continue  # while the replies to the ones before it were waited for
            arguments = own if update is None else update.desired.arguments
            calls = self._begin_calls(CAPABILITY, arguments, [stage], timeout_s, changes_state=True)
            for call, reply in zip(calls, (await self._replies(calls, [stage]))[stage], strict=True):
                if reply.error is None or isinstance(reply.error, WorkerLost | Unsupported):
                    continue  # a later worker gets them, or it has no other ones
                if (replica := self._supervisor.replicas.get(call.address)) is not None:
                    replica.kill(f"its earlier weights are not back: {reply.error}", took_back=True)

    def _all_timed_out(self, stages: Collection[str], timeout_s: float) -> Replies:
        """Return the replies of an update that no worker was asked for."""
        replies: Replies = {}
        for address in self._supervisor.replicas:
            if address.stage in stages:
                error = CallTimedOut(address.stage, address.replica, CAPABILITY, timeout_s)
                replies.setdefault(address.stage, []).append(Reply(error=error))
        return replies


def _is_path(given: Any) -> bool:
    return isinstance(given, str | PathLike)


def _version_at(path: Path) -> str:
    """Return the version of the weights at a path whose caller has named none."""
    name = os.path.basename(os.path.abspath(path))
    return name if is_printable(name, LONGEST_VERSION) else repr(name)[:LONGEST_VERSION]


def _failed(reply: Reply) -> bool:
    """Whether an engine has refused new weights, or raised. A worker that a signal ended says nothing about them."""
    return isinstance(reply.error, InvalidRequest) or (isinstance(reply.error, WorkerLost) and reply.error.raised)
