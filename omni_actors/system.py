"""OmniSystem: a pipeline, running. Opens workers, takes requests, gives typed outputs, says how it is."""

from __future__ import annotations

import functools
import importlib.util
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgspec
import trio

from omni_actors import config as configuration
from omni_actors import media
from omni_actors.config import Pipeline
from omni_actors.errors import ConfigError, InvalidRequest, StageFailed
from omni_actors.generation import Generation, RequestMetrics
from omni_actors.media import MultiModalData
from omni_actors.metrics import Gauges, Metrics
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request import OnFailure, Request
from omni_actors.orchestrator.routes import Node, plan, routes_of, topological
from omni_actors.protocol.messages import CLIENT, Address, WorkerSpec
from omni_actors.stages import assets
from omni_actors.supervisor.edges import Edges, EdgeSpec
from omni_actors.supervisor.process import LocalSpawner, Spawner
from omni_actors.supervisor.replica import Replica, ReplicaState
from omni_actors.supervisor.supervisor import Supervisor

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: {"role": "user", "content": "…"}, where content may be a list of parts, as in OpenAI's chat API:
{"type": "text", "text": "…"} and {"type": "audio", "index": i}, the i-th of ``multi_modal_data["audio"]``; so, too,
"image" and "video"."""


WORKER_DESCRIPTORS, RING_DESCRIPTORS = 8, 4
"""Of this process, for each worker and each ring. A test counts them."""


class PastExit(msgspec.Struct, frozen=True):
    """How an earlier worker of a replica ended. at: Unix time, s. What it wrote to stderr is in ``dead_error`` only."""

    generation: int
    at: float
    pid: int
    exit_code: int | None
    signal: str | None
    reason: str | None


class ReplicaHealth(msgspec.Struct, frozen=True):
    """state: loading, ready, restarting or failed. note: what it is doing, in words.

    retry_in_s: seconds until a failed replica is tried again; None where it is not. history: its latest workers, oldest
    first.
    """

    replica: int
    state: str
    note: str
    generation: int
    restarts: int
    pid: int | None
    load_s: float | None
    last_exit: str | None
    retry_in_s: float | None
    history: list[PastExit]


class Health(msgspec.Struct, frozen=True):
    """ready: every stage has a replica that serves."""

    ready: bool
    errored: bool
    stages: dict[str, list[ReplicaHealth]]
    error: str | None


class OmniSystem:
    """A running pipeline; open it with ``OmniSystem.open``."""

    def __init__(self, pipeline: Pipeline, models: Mapping[str, Path], spawner: Spawner) -> None:
        self.pipeline = pipeline
        self._nodes = {name: Node(s.accepts, s.inputs, s.emits) for name, s in pipeline.stages.items()}
        self._route = functools.cache(functools.partial(plan, self._nodes))
        self._defaults = {name: _defaults(pipeline, name) for name in self._nodes}
        self._edges = Edges(_edge_specs(pipeline), spawner)
        self.metrics = Metrics(self._gauges)
        self._orchestrator = Orchestrator(
            self._edges,
            limits=pipeline.limits,
            deterministic_stages={name for name in self._nodes if pipeline.deterministic(name)},
            on_end=self._count,
        )
        # Half of it is room for what every request may post: Start and Abort, Resend when a stage below starts again,
        # and Resume after a Pause. Where the other half is taken, no more requests are admitted, and none is paused.
        capacity = 8 * pipeline.limits.max_requests + 4 * len(self._nodes) + 16
        self._supervisor = Supervisor(
            _worker_specs(pipeline, models, topological(self._nodes)),
            pipeline.stages,
            edges=self._edges,
            spawner=spawner,
            listener=self._orchestrator,
            mailbox_capacity=capacity,
        )
        self._running = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: str | Path | Pipeline = "voice",
        *,
        wait_ready: bool = True,
        spawner: Spawner | None = None,
        **overrides: Any,
    ) -> AsyncIterator[OmniSystem]:
        """Start a pipeline: a name in configs/, a path, or a Pipeline. overrides: ``**{"stages.llm.threads": 2}``.

        With ``wait_ready`` the block begins when every stage is loaded. Leaving it, also by cancellation or
        KeyboardInterrupt, has reaped every process and freed every byte.
        Raises ConfigError before any process starts, and StageFailed where a stage cannot load.
        """
        pipeline = configuration.load(config, overrides)
        system = cls(pipeline, _resolve_models(pipeline), spawner or LocalSpawner())
        left_by: BaseException | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(system._orchestrator.run, system._supervisor.replicas)
            nursery.start_soon(system._supervisor.run)
            system._running = True
            try:
                if wait_ready:
                    await system.wait_ready()
                yield system
            except BaseException as error:  # noqa: BLE001
                left_by = error  # raised below as it is, not inside the nursery's exception group
            finally:
                system._running = False
                system._supervisor.changes.unpark_all()
                nursery.cancel_scope.shield = True  # so that a cancellation from outside does not replace ``left_by``
                nursery.cancel_scope.cancel()
        if left_by is not None:
            raise left_by

    # requests

    def generate(
        self,
        prompt: str | Messages | None = None,
        *,
        multi_modal_data: MultiModalData | None = None,
        script: str | None = None,
        modalities: Sequence[str] = ("text",),
        request_id: str | None = None,
        deadline_s: float | None = None,
        on_failure: OnFailure = "replay",
        **params: Any,
    ) -> Generation:
        """Ask for ``modalities`` of an answer. Returns at once; the answer is read by iterating.

        prompt: a question, or a conversation. multi_modal_data: {"audio": AudioChunk, "image": …, "video": …}, of each
        one or a list; a question comes after them, a conversation names their places. script: text to be spoken as it
        is, instead of a prompt.
        What is given must not change before the request's end. on_failure: what a worker's death means for it.
        "replay": the stage starts again, and what follows is what would have followed anyway; where that cannot be, and
        with "fail", the request ends with StageCrashed. params: of the engines on the way (max_tokens, temperature,
        seed, speed, …).
        Raises InvalidRequest, Overloaded, Quarantined, StageUnavailable.
        """
        inputs = media.pieces(multi_modal_data or {})
        if prompt is not None:
            messages = media.question(prompt, inputs) if isinstance(prompt, str) else list(prompt)
            inputs["messages"] = [Input({"messages": messages})]
        if script is not None:
            inputs["script"] = [Input({"text": script})]
        return self.submit(
            inputs, modalities, request_id=request_id, deadline_s=deadline_s, on_failure=on_failure, **params
        )

    def submit(
        self,
        inputs: Mapping[str, Sequence[Input]],
        modalities: Sequence[str],
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        on_failure: OnFailure = "replay",
        **params: Any,
    ) -> Generation:
        """``generate`` for a pipeline of your own: pieces of input by the kinds that its stages accept."""
        route = self._route(frozenset(kind for kind, pieces in inputs.items() if pieces), frozenset(modalities))
        by_stage = self._params(route.stages, params)
        deadline_s = self.pipeline.limits.deadline_s if deadline_s is None else deadline_s
        if not 0 <= deadline_s < math.inf:
            raise InvalidRequest(f"deadline_s: {deadline_s} is no time", param="deadline_s")
        if on_failure not in get_args(OnFailure):
            raise InvalidRequest(f'on_failure: found {on_failure!r}; accepted: "replay", "fail"', param="on_failure")
        stream = self._orchestrator.submit(inputs, route, by_stage, deadline_s, request_id, on_failure)
        return Generation(stream, self.pipeline, self._observe)

    def abort(self, request_id: str) -> None:
        """End a request now, in every stage; reading it then raises ``Aborted``. Harmless when it has ended."""
        self._orchestrator.abort_named(request_id)

    def abort_all(self, reason: str) -> None:
        """End every request now; reading one then raises ``Aborted`` with this reason."""
        self._orchestrator.abort_all(reason)

    def _params(self, stages: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Each stage's share: its defaults, and what the request gives that its engine knows.

        A ``seed`` that nobody gives is drawn here: a replay starts from the same one.
        """
        given = {name: value for name, value in given.items() if value is not None}
        taken: set[str] = set()
        by_stage: dict[str, dict[str, Any]] = {}
        for stage in stages:
            schema = self.pipeline.spec(stage).params
            known = given.keys() if schema is None else given.keys() & schema.__struct_fields__
            taken |= known
            share = {**self._defaults[stage], **{name: given[name] for name in known}}
            if schema is not None and known:
                share = _validated(share, schema)
            if schema is not None and share.get("seed", 0) is None:
                share["seed"] = random.getrandbits(63)
            by_stage[stage] = share
        if unknown := sorted(given.keys() - taken):
            raise InvalidRequest(f"no stage on the way of this request takes {unknown[0]!r}", param=unknown[0])
        return by_stage

    # state

    @property
    def is_running(self) -> bool:
        """Whether the system is open and can serve something."""
        return self._running and not self.errored

    @property
    def errored(self) -> bool:
        """Whether failed stages leave no way from any input to any output."""
        failed = self._orchestrator.failed_stages.keys()
        return bool(failed) and not any(failed.isdisjoint(route.stages) for route in routes_of(self._nodes))

    @property
    def dead_error(self) -> StageFailed | None:
        """Why the first stage that was given up on failed, with the exits that led there; None while there is none."""
        return next(iter(self._orchestrator.failed_stages.values()), None)

    @property
    def in_flight(self) -> int:
        """Requests admitted and not ended, and those whose clients do not have all of a large answer yet."""
        return self._orchestrator.in_flight

    def make_room(self) -> bool:
        """Where no place is free, end the request that is read slowest; False where none is read slowly enough."""
        return self._orchestrator.readers.make_room()

    @property
    def retry_after_s(self) -> float:
        """When one more request is likely to find a place, where there is none; seconds."""
        return self._orchestrator.retry_after_s

    @property
    def descriptors(self) -> int:
        """How many descriptors of this process its workers and their rings take when all of them are there."""
        replicas = {CLIENT: 1} | {name: stage.replicas for name, stage in self.pipeline.stages.items()}
        rings = sum(replicas[spec.producer] * replicas[spec.consumer] for spec in _edge_specs(self.pipeline))
        return WORKER_DESCRIPTORS * (sum(replicas.values()) - 1) + RING_DESCRIPTORS * rings

    @property
    def _replicas(self) -> Sequence[Replica]:
        return tuple(self._supervisor.replicas.values())

    def health(self) -> Health:
        """How every replica is, now."""
        stages: dict[str, list[ReplicaHealth]] = {name: [] for name in self._nodes}
        for replica in self._replicas:
            stages[replica.address.stage].append(_replica_health(replica))
        ready = self._running and all(
            any(r.state == ReplicaState.READY.value for r in stage) for stage in stages.values()
        )
        return Health(ready, self.errored, stages, str(self.dead_error) if self.dead_error else None)

    async def check_health(self) -> Health:
        """``health()``, or raise ``dead_error`` where the system is errored."""
        await trio.lowlevel.checkpoint()
        if self.errored and self.dead_error is not None:
            raise self.dead_error
        return self.health()

    async def wait_ready(self) -> None:
        """Until every replica has loaded or was given up on. Raises StageFailed where a stage has none left."""
        while self.dead_error is None and any(
            r.state not in (ReplicaState.READY, ReplicaState.FAILED) for r in self._replicas
        ):
            await self.wait_changed()
        if self.dead_error is not None:
            raise self.dead_error

    async def wait_changed(self) -> None:
        """Until the state or the note of any replica changes. Raises RuntimeError when the system closes."""
        if self._running:
            await self._supervisor.changes.park()
        if not self._running:
            raise RuntimeError("the system is closed")

    # metrics

    def _count(self, request: Request) -> None:
        self.metrics.requests.labels(type(request.error).__name__ if request.error else "done").inc()
        self.metrics.replays.inc(request.replays)

    def _observe(self, metrics: RequestMetrics) -> None:
        self.metrics.latency.observe(metrics.total_s)
        for histogram, value in (
            (self.metrics.ttft, metrics.ttft_s),
            (self.metrics.ttfa, metrics.ttfa_s),
            (self.metrics.rtf, metrics.rtf),
        ):
            if value is not None:
                histogram.observe(value)

    def _gauges(self) -> Gauges:
        yield (
            "omni_requests_in_flight",
            "Requests admitted and not ended, and large answers that clients do not have yet",
            {},
            self._orchestrator.in_flight,
        )
        readers = self._orchestrator.readers
        yield "omni_requests_paused", "Requests whose stages wait for their clients", {}, readers.paused
        yield "omni_unread_bytes", "Bytes of output that clients do not have yet", {}, readers.unread_bytes
        yield (
            "omni_requests_queued",
            "Admitted requests that wait for a stage to be ready, at first or to be replayed",
            {},
            self._orchestrator.queued,
        )
        for replica in self._replicas:
            labels = {"stage": replica.address.stage, "replica": str(replica.address.replica)}
            yield (
                "omni_stage_requests",
                "Requests placed on a replica",
                labels,
                self._orchestrator.load(replica.address),
            )
            yield "omni_stage_restarts", "Restarts of a replica", labels, replica.restarts
            yield "omni_stage_ready", "1 while a replica serves", labels, float(replica.state is ReplicaState.READY)
            for name, value in replica.gauges.items():
                yield (
                    "omni_engine",
                    "What an engine measures of itself, as of its last answer to a ping (one each step_timeout_s / 20)",
                    {**labels, "name": name},
                    value,
                )
        for (producer, consumer), ring in self._edges.statistics().items():
            labels = {"producer": str(producer), "consumer": str(consumer)}
            yield "omni_ring_used_bytes", "Bytes in a ring now", labels, ring.used
            yield "omni_ring_capacity_bytes", "Capacity of a ring", labels, ring.capacity
            yield (
                "omni_ring_payload_bytes",
                "Payload that has crossed a ring",
                labels,
                ring.payload_bytes,
            )


def _resolve_models(pipeline: Pipeline) -> dict[str, Path]:
    """Where each stage's model is. Raises ConfigError, also where an engine's libraries are not installed."""
    models = {}
    for name, stage in pipeline.stages.items():
        spec = pipeline.spec(name)
        for library in spec.libraries:
            if importlib.util.find_spec(library) is None:
                accepted = f"an engine whose libraries are there; {library!r} comes with omni-actors[{spec.extra}]"
                raise ConfigError(pipeline.file, f"stages.{name}.engine", stage.engine, accepted)
        if stage.model is not None:
            try:
                models[name] = assets.resolve(stage.model)
            except assets.ModelNotFound as error:
                raise ConfigError(pipeline.file, f"stages.{name}.model", stage.model, str(error)) from error
    return models


def _edge_specs(pipeline: Pipeline) -> list[EdgeSpec]:
    """Inputs of stages, input from the client, output to it; a ring is as large as its producing stage says."""
    specs = []
    for name, stage in pipeline.stages.items():
        specs += [EdgeSpec(source, name, pipeline.stages[source].ring_bytes) for source in stage.inputs]
        if stage.accepts:
            specs.append(EdgeSpec(CLIENT, name, stage.ring_bytes))
        if stage.emits:
            specs.append(EdgeSpec(name, CLIENT, stage.ring_bytes))
    return specs


def _worker_specs(pipeline: Pipeline, models: Mapping[str, Path], order: Sequence[str]) -> list[WorkerSpec]:
    """Return what the workers of a pipeline run. order: the stages in topological order."""
    return [
        WorkerSpec(
            address=Address(name, replica),
            factory=pipeline.spec(name).factory,
            model=str(models[name]) if name in models else None,
            options=pipeline.options(name),
            threads=pipeline.threads(name),
            nice=pipeline.stages[name].nice,
            device=pipeline.stages[name].device,
            spins=pipeline.spins,
        )
        for name in order
        for replica in range(pipeline.stages[name].replicas)
    ]


def _replica_health(replica: Replica) -> ReplicaHealth:
    history = [
        PastExit(death.generation, death.at, death.exit.pid, death.exit.exit_code, death.exit.signal, death.exit.reason)
        for death in replica.history
    ]
    return ReplicaHealth(
        replica.address.replica,
        replica.state.value,
        replica.note,
        replica.generation,
        replica.restarts,
        replica.worker.pid if replica.worker else None,
        replica.load_s,
        str(replica.history[-1].exit) if replica.history else None,
        None if replica.retry_at is None else max(0.0, replica.retry_at - trio.current_time()),
        history,
    )


def _defaults(pipeline: Pipeline, stage: str) -> dict[str, Any]:
    """What a stage is asked where the request says nothing."""
    defaults, schema = pipeline.stages[stage].defaults, pipeline.spec(stage).params
    return defaults if schema is None else _validated(defaults, schema)


def _validated(share: dict[str, Any], schema: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        validated: dict[str, Any] = msgspec.to_builtins(msgspec.convert(share, schema))
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`").partition("[")[0] or None
        raise InvalidRequest(f"{param}: {message}" if param else message, param=param) from error
    return validated
