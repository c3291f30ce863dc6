"""LoRA adapters of a running system: which there are, and which one a request gets.

Rules
1. The parent keeps the list of adapters. Each stage's list is a part of its desired state, so a worker that starts
   later has the same adapters before it is ready.
2. A request carries its adapter, with a hash of its files, in its parameters. So a replay uses the adapter with which
   the request began, also after the name was removed or given to another adapter. A worker refuses files that have
   changed since.
3. An adapter is added only after an engine of each of its stages has loaded it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import trio

from omni_actors.config import Pipeline
from omni_actors.errors import InvalidAdapter, InvalidRequest, OmniError, Unsupported, WorkerLost
from omni_actors.stages.adapters import files
from omni_actors.stages.adapters.options import KEEP, LOAD, Adapter
from omni_actors.supervisor.calls import Reply
from omni_actors.system.control import Control
from omni_actors.validation import is_printable

LOAD_TIMEOUT_S = 60.0
PARAMETER = "lora"
LONGEST_NAME = 128


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that requests can name.

    Attributes:
        name: The name.
        directory: Its directory, as an absolute path.
        digest: A hash of its files: the version that requests get.
        stages: The stages whose model it changes.
        pinned: Whether it stays in their workers' memory.
    """

    name: str
    directory: str
    digest: str
    stages: tuple[str, ...]
    pinned: bool = False


class LoraTable:
    """The adapters of a system, by name. ``change`` is held while they are changed."""

    def __init__(self, pipeline: Pipeline) -> None:
        schemas = {name: pipeline.spec(name).params for name in pipeline.stages}
        self.able = tuple(name for name, each in schemas.items() if each and PARAMETER in each.__struct_fields__)
        """The stages whose engines take the parameter ``lora``."""
        self.by_name: dict[str, LoraInfo] = {}
        self.change = trio.Lock()

    def get(self, name: Any) -> LoraInfo:
        """Return the adapter of this name. Raises InvalidAdapter."""
        if not isinstance(name, str) or name not in self.by_name:
            known = ", ".join(map(repr, self.by_name)) or "none"
            raise InvalidAdapter(str(name), f"there is no adapter of this name; known: {known}")
        return self.by_name[name]

    def resolve(self, by_stage: Mapping[str, dict[str, Any]]) -> None:
        """Put a request's adapter in the place of its name, in the parameters of the stages that have it.

        Raises InvalidAdapter for an unknown name, and Unsupported if none of the request's stages has it.
        """
        found = {stage: self.get(name) for stage, own in by_stage.items() if (name := own.get(PARAMETER)) is not None}
        for stage, info in found.items():
            has_it = stage in info.stages
            by_stage[stage][PARAMETER] = msgspec.to_builtins(_adapter(info)) if has_it else None
            if not has_it and not any(stage in each.stages for stage, each in found.items()):
                raise Unsupported(stage, PARAMETER, f"the adapter {info.name!r} is of {', '.join(info.stages)}")


class LoraControl(Control):
    """The methods of ``OmniSystem`` for LoRA adapters."""

    pipeline: Pipeline
    _loras: LoraTable

    async def add_lora(
        self,
        name: str,
        directory: str | Path,
        *,
        stages: Collection[str] | None = None,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> LoraInfo:
        """Add a LoRA adapter, which requests then choose by ``generate(lora=name)``.

        Args:
            name: Its name. An adapter that had this name is replaced; requests that began with it keep it.
            directory: A directory as PEFT saves it: ``adapter_config.json`` and ``adapter_model.safetensors``. The
                files must stay as they are while the adapter is used, because restarted workers read them again.
            stages: The stages whose model it changes; by default every stage whose model it fits.
            timeout_s: Seconds to wait for each worker to load it.

        Returns:
            The adapter, as ``list_loras`` has it.

        Raises:
            InvalidAdapter: The adapter cannot be read, or fits no model.
            InvalidRequest: Another argument is wrong.
            Unsupported: A stage serves no adapters.
            CallError: No worker of a stage has loaded it in time, or the stage has no replicas.
        """
        directory = _absolute(directory)
        if not is_printable(name, LONGEST_NAME) or name == self.pipeline.name:
            accepted = f"1 to {LONGEST_NAME} printable characters, not the pipeline's name"
            raise InvalidRequest(f"name: found {name!r:.200}; accepted: {accepted}", param="name")
        digest = (await trio.to_thread.run_sync(files.read, directory)).digest
        fitting = await self._fitting(Adapter(name, directory, digest), stages, timeout_s)
        info = LoraInfo(name=name, directory=directory, digest=digest, stages=fitting)
        await self._change_loras(lambda known: {**known, name: info}, timeout_s)
        return info

    async def _fitting(self, adapter: Adapter, stages: Collection[str] | None, timeout_s: float) -> tuple[str, ...]:
        """Return those of ``stages`` whose engines have loaded an adapter. Raises as ``add_lora``."""
        asked = self._stages(self._loras.able if stages is None else stages)
        if not asked:
            stage = next(iter(self.pipeline.stages))
            raise Unsupported(stage, PARAMETER, "no stage of the pipeline serves LoRA adapters")
        arguments = {"adapter": msgspec.to_builtins(adapter)}
        replies = await self.call(LOAD, arguments, stages=asked, timeout_s=timeout_s)
        errors = {stage: error for stage in asked if (error := _error(stage, adapter.directory, replies[stage]))}
        fitting = tuple(stage for stage in asked if stage not in errors)
        for error in errors.values():
            is_other = isinstance(error, Unsupported) or (isinstance(error, InvalidAdapter) and error.misfit)
            if stages is not None or not fitting or not is_other:
                raise error
        return fitting

    async def remove_lora(self, name: str, *, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Remove a LoRA adapter. Requests that began with it keep it until they end.

        Raises InvalidAdapter: there is no adapter of this name.
        """

        def without(known: Mapping[str, LoraInfo]) -> dict[str, LoraInfo]:
            removed = self._loras.get(name)
            return {each.name: each for each in known.values() if each is not removed}

        await self._change_loras(without, timeout_s)

    async def pin_lora(self, name: str, *, timeout_s: float = LOAD_TIMEOUT_S) -> LoraInfo:
        """Keep a LoRA adapter in the memory of its stages' workers, also while no request uses it.

        Other adapters that no request uses may be removed from memory (``idle_loras`` of the stage's options), and are
        then read again for the next request. Replacing an adapter ends its pinning.
        Raises InvalidAdapter: there is no adapter of this name. InvalidRequest: an engine can pin no more adapters.
        """

        def pinned(known: Mapping[str, LoraInfo]) -> dict[str, LoraInfo]:
            return {**known, name: msgspec.structs.replace(self._loras.get(name), pinned=True)}

        return (await self._change_loras(pinned, timeout_s))[name]

    def list_loras(self) -> list[LoraInfo]:
        """Return the LoRA adapters that requests can name, in the order in which they were added. It asks no worker."""
        return list(self._loras.by_name.values())

    async def _change_loras(
        self, change: Callable[[Mapping[str, LoraInfo]], dict[str, LoraInfo]], timeout_s: float
    ) -> dict[str, LoraInfo]:
        """Change the adapters that requests can name, and bring the workers of their stages to keep them.

        change: returns the new list of the one before. Cancelling the wait does not cancel the change.
        """

        async def in_turn() -> dict[str, LoraInfo]:
            async with self._loras.change:
                changed = change(self._loras.by_name)
                await self._keep_loras(changed, timeout_s)
                return changed

        return await self._to_the_end(in_turn)

    async def _keep_loras(self, changed: dict[str, LoraInfo], timeout_s: float) -> None:
        """Make these the adapters. If a stage refuses, or cannot be told, those before are left at all stages."""
        before, self._loras.by_name = self._loras.by_name, changed
        concerned = {stage for each in (*before.values(), *changed.values()) for stage in each.stages}
        told: dict[str, Any] = {}
        """What each stage has kept before."""
        for stage in sorted(concerned):
            kept, was = (_kept(loras, stage) for loras in (changed, before))
            if kept != was:
                try:
                    replies = await self.set_desired(KEEP, kept, stages=(stage,), timeout_s=timeout_s)
                    for reply in replies[stage]:
                        if isinstance(reply.error, InvalidRequest):
                            raise reply.error
                except OmniError:
                    self._loras.by_name = before
                    for other, kept_before in told.items():
                        with suppress(OmniError):  # the first error says why the change failed
                            await self.set_desired(KEEP, kept_before, stages=(other,), timeout_s=timeout_s)
                    raise
                told[stage] = was


def _absolute(directory: str | Path) -> str:
    return os.path.abspath(directory)


def _adapter(info: LoraInfo) -> Adapter:
    return Adapter(info.name, info.directory, info.digest)


def _kept(loras: Mapping[str, LoraInfo], stage: str) -> dict[str, Any]:
    """Return the arguments of ``KEEP`` for a stage."""
    own = [each for each in loras.values() if stage in each.stages]
    adapters = [msgspec.to_builtins(_adapter(each)) for each in own]
    return {"adapters": adapters, "pinned": [each.name for each in own if each.pinned]}


def _error(stage: str, directory: str, replies: Collection[Reply]) -> OmniError | None:
    """Return why a stage cannot have an adapter: an engine refuses it, or no worker has loaded it in time."""
    if not replies:
        return WorkerLost(stage, None, LOAD, None)
    errors = [reply.error for reply in replies if reply.error is not None]
    for error in errors:
        if isinstance(error, Unsupported):
            return error
        if isinstance(error, InvalidRequest):
            reason = error.message.partition(f"{directory!r}: ")[2] or error.message
            return InvalidAdapter(directory, f"stage {stage!r}: {reason}", misfit=error.code == InvalidAdapter.MISFIT)
    return errors[0] if len(errors) == len(replies) else None
