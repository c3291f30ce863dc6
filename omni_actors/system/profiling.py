"""Profiles: what requests and engines did in a time, in one file that Perfetto opens."""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import trio

from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.calls import PendingCall, Reply, require_sendable
from omni_actors.system.calls import Replies
from omni_actors.system.control import Control
from omni_actors.system.ended import EndedRequests
from omni_actors.system.profile_file import ProfileFile
from omni_actors.system.timeline import Period

PROFILE_TIMEOUT_S = 120.0
"""The first profile of a worker imports torch's profiler, and a large one takes long to write."""
MOST_REQUESTS = 10_000


class Profile(msgspec.Struct, frozen=True):
    """A profile that was written.

    Attributes:
        path: The file, in the format of trace events: https://ui.perfetto.dev opens it.
        requests: How many requests are in it: those that ended meanwhile, the last 10,000 of them.
        replies: The replies of the workers that were asked for what they computed.
    """

    path: Path
    requests: int
    replies: Replies


class ProfileControl(Control):
    """The methods of ``OmniSystem`` for profiles."""

    _ended: EndedRequests
    _profile_began_ns = 0
    _profiled: Collection[str] = ()

    async def start_profile(
        self, stages: Collection[str] | None = None, *, timeout_s: float = PROFILE_TIMEOUT_S
    ) -> Replies:
        """Begin to record what requests and engines do. Memory grows with it, so a profile should last for seconds.

        Args:
            stages: Stages whose engines are profiled, by torch; by default all. Requests are recorded in all stages.
            timeout_s: Seconds to wait for each worker.

        Returns:
            The reply of each worker. An engine that does not compute with torch replies ``Unsupported``, and so does a
            worker on another node than this process, which cannot hand its profile over. A worker that starts later is
            not profiled.

        Raises InvalidRequest: a stage is unknown, or a profile runs.
        """
        chosen = self._stages(stages)
        if self._ended.profiled is not None:
            raise InvalidRequest("a profile runs already", code="profile_runs")
        require_sendable("start_profile", {}, timeout_s)
        self._ended.profiled = deque(maxlen=MOST_REQUESTS)
        self._profile_began_ns, self._profiled = time.time_ns(), chosen
        replies = await self._replies(self._call_here("start_profile", {}, chosen, timeout_s), chosen)
        self._profiled = [stage for stage in chosen if any(reply.error is None for reply in replies[stage])]
        return replies

    async def stop_profile(self, path: str | Path, *, timeout_s: float = PROFILE_TIMEOUT_S) -> Profile:
        """End the profile and write it to one file.

        Args:
            path: The file. Its directory must exist, and the workers write there too meanwhile.
            timeout_s: Seconds to wait for each worker.

        Returns:
            What was written. A worker that does not reply, or runs on another node, is missing in the file.

        Raises InvalidRequest: no profile runs. Raises OSError: the file cannot be written, and an earlier one is as it
        was; if its directory is the reason, the profile goes on. A cancelled call drops the profile.
        """
        path = Path(await trio.Path(path).resolve())
        if self._ended.profiled is None:
            raise InvalidRequest("no profile runs", code="no_profile")
        require_sendable("stop_profile", {}, timeout_s)
        with tempfile.TemporaryDirectory(prefix=".profile-", dir=path.parent) as folder:
            requests, self._ended.profiled = self._ended.profiled, None
            calls = self._call_here("stop_profile", {"folder": folder}, self._profiled, timeout_s)
            replies = await self._replies(calls, self._profiled)
            written = {call.address: call.reply.value for call in calls if call.reply and call.reply.error is None}
            await trio.to_thread.run_sync(self._write, path, Path(folder), requests, written)
        told = {stage: [_without_file(reply) for reply in replies[stage]] for stage in replies}
        return Profile(path, len(requests), told)

    def _call_here(
        self, capability: str, arguments: Mapping[str, Any], stages: Collection[str], timeout_s: float
    ) -> list[PendingCall]:
        """Call the workers of stages that run on this process's node. For the others the reply is ``Unsupported``."""
        require_sendable(capability, arguments, timeout_s)
        elsewhere, calls = self._elsewhere(), []
        for address, replica in self._supervisor.replicas.items():
            if address.stage not in stages:
                continue
            if (node := elsewhere.get(address)) is None:
                calls.append(replica.call(capability, arguments, timeout_s))
            else:
                why = f"its worker runs on the node {node!r}, and profiles cover the parent's node only"
                calls.append(call := PendingCall(address, replica.generation, capability, timeout_s))
                call.end(Reply(error=Unsupported(address.stage, "start_profile", why)))
        return calls

    def _write(
        self,
        path: Path,
        folder: Path,
        requests: Iterable[tuple[str, Period]],
        written: Mapping[Address, Mapping[str, Any]],
    ) -> None:
        """Write the file, in a thread: a profile may be large. A write that fails leaves an earlier file as it was.

        written: what the workers that have written their parts replied.
        """
        file = ProfileFile(self._profile_began_ns)
        offset_ns = time.time_ns() - time.monotonic_ns()
        file.add_requests(requests, offset_ns)
        for address, part in written.items():
            trace: dict[str, Any] = json.loads(Path(part["file"]).read_text(encoding="utf-8"))
            file.add_worker(str(address), part["pid"], trace)
        whole = folder / "whole.json"
        file.write(whole)
        whole.replace(path)


def _without_file(reply: Reply) -> Reply:
    """Return a reply without the name of a file that is gone."""
    return reply if reply.error is not None else Reply({"pid": reply.value["pid"]})
