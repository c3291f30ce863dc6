"""The updates of weights that the desired state has, and the memory of those that were given as tensors.

Rules
1. A file of tensors is kept as long as a worker loads it, or a later one will.
2. Tensors of successive updates are merged, the newest of each name. So they take no more memory than the whole model,
   or, where updates by files come between them, ``MOST_TENSORS`` times as much.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import trio

from omni_actors.errors import InvalidRequest
from omni_actors.supervisor.desired_state import Part
from omni_actors.supervisor.incarnation import Incarnation, IncarnationState
from omni_actors.supervisor.supervisor import Supervisor
from omni_actors.system.weight_memory import WeightMemory

CAPABILITY = "update_weights"
MOST_TENSORS = 4
"""Most updates by tensors that a stage keeps, if updates by files between them prevent that they are merged."""


class KeptUpdates:
    """The updates that the desired state of a supervisor has. memory: the tensors of some."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor, self._desired = supervisor, supervisor.desired
        self.memory = WeightMemory()

    def of(self, stage: str) -> list[Part]:
        """Return the updates of a stage, the oldest first."""
        return [part for part in self._desired.parts(stage) if part.desired.capability == CAPABILITY]

    def require_room(self, stages: Collection[str]) -> None:
        """Raise InvalidRequest if tensors of a stage are kept that cannot be merged: files came between them."""
        for stage in stages:
            kept = sum(path in self.memory for part in self.of(stage) for path in part.desired.arguments["files"])
            if kept >= MOST_TENSORS:
                message = f"path: stage {stage!r} keeps {kept} updates by tensors; the next must be by files, of all"
                raise InvalidRequest(message, param="path", code="too_many_parts")

    async def merge(self, stages: Collection[str]) -> bool:
        """Replace the last two updates of each stage by one, if both were given as tensors (rule 2).

        stages: whose replicas have answered the last update, and so all earlier ones. Returns whether any was replaced.
        """
        merged, replaced = dict[tuple[str, str], dict[str, Any]](), False
        for stage in stages:
            last = self._last_updates(stage)
            paths = [path for part in last for path in part.desired.arguments["files"] if path in self.memory]
            if len(last) < 2 or len(paths) != 2:
                continue
            earlier, later = paths
            try:
                if (earlier, later) not in merged:
                    path = await trio.to_thread.run_sync(self.memory.merge, earlier, later)
                    version = last[-1].desired.arguments["version"]
                    merged[earlier, later] = {"files": files_at(path), "version": version}
            except OSError:  # there is no memory for a copy: both are kept, and the next update tries again
                return False
            if self._last_updates(stage) != last:
                continue  # meanwhile a worker began to load with them, or one of them was taken back
            for each in last:
                self._desired.drop(stage, CAPABILITY, each.key)
            both = merged[earlier, later]
            part = self._desired.set(stage, CAPABILITY, both, key_of(both))
            part.established, replaced = last[-1].carried_out, True
        return replaced

    def _last_updates(self, stage: str) -> list[Part]:
        """Return the last two updates of a stage if they can be one: workers have carried out both or none.

        [] while a worker loads with one of them, since that worker may carry it out.
        """
        updates = self.of(stage)[-2:]
        loading = {part for incarnation in self._starting() for part in incarnation.parts}
        if not loading.isdisjoint(updates) or len({each.carried_out for each in updates}) > 1:
            return []
        return updates

    def _starting(self) -> list[Incarnation]:
        """Return the incarnations whose workers start or load."""
        incarnations = [replica.incarnation for replica in self._supervisor.replicas.values()]
        return [each for each in incarnations if each.state is IncarnationState.STARTING]

    def free_unused(self) -> None:
        """Free the tensors that no worker needs (rule 1)."""
        parts = [part for stage in self._supervisor.stages for part in self.of(stage)]
        parts += [part for incarnation in self._starting() for part in incarnation.parts]
        updates = [part.desired for part in parts if part.desired.capability == CAPABILITY]
        self.memory.keep_only({file for update in updates for file in update.arguments["files"]})


def key_of(arguments: Mapping[str, Any]) -> str:
    """Return the key of an update in the desired state."""
    return "\n".join(arguments["files"])


def files_at(path: Path) -> dict[str, tuple[int, int]]:
    """Return the safetensors files at a path, each with its size and the time of its last change. InvalidRequest."""
    path = path.absolute()
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    try:
        statuses = {str(file): file.stat() for file in found}
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InvalidRequest(f"path: {error}", param="path") from error
    if not statuses:
        raise InvalidRequest(f"path: {path} has no *.safetensors files", param="path")
    return {name: (status.st_size, status.st_mtime_ns) for name, status in statuses.items()}
