"""OmniSystem: the public face of a running pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from omni_actors import config as configuration
from omni_actors.config import Pipeline
from omni_actors.errors import StageFailed, StartTimedOut, SystemClosed
from omni_actors.metrics import Metrics
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.orchestrator.routes import routes_of, topological
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.nodes import HasNodes
from omni_actors.supervisor.process import LocalSpawner, Spawner
from omni_actors.supervisor.replica import ReplicaState
from omni_actors.supervisor.supervisor import Supervisor
from omni_actors.system import machine, workers
from omni_actors.system.autoscaling import AutoscaleControl
from omni_actors.system.ended import EndedRequests, tracing_with
from omni_actors.system.gauges import gauges
from omni_actors.system.health import Health, ReplicaHealth, replica_health
from omni_actors.system.information import Information
from omni_actors.system.live_state import LiveState, TrioClock, live_state
from omni_actors.system.loras import LoraControl, LoraTable
from omni_actors.system.profiling import ProfileControl
from omni_actors.system.requests import Requests
from omni_actors.system.sleep import SleepControl
from omni_actors.system.texts import TextControl
from omni_actors.system.weights import WeightControl

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider  # of the extra "tracing"

    from omni_actors.system.tracing import Tracing


@asynccontextmanager
async def _spawner(pipeline: Pipeline, given: Spawner | None, cluster: str | None) -> AsyncIterator[Spawner]:
    """Give what starts the workers of a system."""
    if given is not None and cluster is not None:
        raise ValueError("a system has a spawner or a cluster, not both")
    if cluster is None:
        yield given or LocalSpawner()
    else:
        from omni_actors.cluster.on_ray import open_on_ray  # takes 20 ms; most systems run on one machine

        async with open_on_ray(pipeline, cluster) as spawner:
            yield spawner


class OmniSystem(
    Requests, TextControl, LoraControl, SleepControl, AutoscaleControl, WeightControl, ProfileControl, Information
):
    """A running pipeline. ``OmniSystem.open`` starts one.

    >>> async def main():
    ...     async with OmniSystem.open("echo") as omni:
    ...         async for output in omni.generate("hello"):
    ...             print(output.stage, output.modality, output.delta)
    >>> trio.run(main)
    first text hello
    """

    def __init__(
        self, pipeline: Pipeline, models: Mapping[str, Path], spawner: Spawner, tracing: Tracing | None = None
    ) -> None:
        super().__init__(pipeline)
        self._models = models
        self._clock: trio.abc.Clock
        """Trio's clock since the start, which tells the time outside trio, too."""
        self.start_error: StartTimedOut | None = None
        """Set if not all replicas became ready in ``start_timeout_s``."""
        self._loras = LoraTable(pipeline)
        self._edges = Edges(workers.edge_specs(pipeline), spawner)
        self._orchestrator = Orchestrator(
            self._edges,
            limits=pipeline.limits,
            deterministic_stages={name for name in self._nodes if pipeline.deterministic(name)},
            resumable_stages={name for name in self._nodes if pipeline.resumable(name)},
            on_end=lambda request: self._ended.closed(request),
        )
        self._supervisor = Supervisor(
            workers.worker_specs(pipeline, models, topological(self._nodes)),
            {name: pipeline.stages[name] for name in topological(self._nodes)},
            edges=self._edges,
            spawner=spawner,
            listener=self._orchestrator.events,
            mailbox_capacity=partial(workers.mailbox_capacity, pipeline),
        )
        for name, stage in pipeline.stages.items():
            self._orchestrator.pools.want(name, stage.replicas)
        self._cluster = spawner if isinstance(spawner, HasNodes) else None
        self.metrics = Metrics(
            lambda: gauges(self._orchestrator, self._supervisor.replicas.values(), self._edges, self._cluster)
        )
        self._ended = EndedRequests(pipeline, self.metrics, tracing)
        self._trio_clock: TrioClock | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: str | Path | Pipeline = "voice",
        *,
        wait_ready: bool = True,
        spawner: Spawner | None = None,
        cluster: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        tracer_provider: TracerProvider | None = None,
        **more_overrides: Any,
    ) -> AsyncIterator[OmniSystem]:
        """Start a pipeline, and stop it when the block ends.

        Args:
            config: The name of a shipped pipeline, the path of a YAML file, a model (a checkpoint directory, or a name
                on a hub that is in the local cache), or a ``Pipeline``.
            wait_ready: Whether the block begins only after every stage has loaded.
            spawner: Starts the workers; by default processes of this machine.
            cluster: Start the workers on the nodes of a Ray cluster, where the pipeline's section ``cluster`` places
                them (docs/cluster.md): the address of its head, "auto", or "local" to start one on this machine.
                Not together with ``spawner``.
            overrides: Dotted path to value: ``overrides={"stages.llm.threads": 2}``. A value replaces what is at its
                path, also a mapping, so write ``stages.llm.threads`` and not ``{"stages": {"llm": …}}``. "model" and
                "tokenizer" stand for those of all stages.
            tracer_provider: OpenTelemetry's; it receives a trace of each request, and is not shut down here.
            more_overrides: The same as keywords: ``model="/data/mine"``, ``**{"stages.llm.threads": 2}``.

        Raises:
            ConfigError: The pipeline cannot work, or a library or model is missing. No process was started.
            ClusterUnavailable: Ray, or a node of it that is needed, cannot be used.
            NoPlace: No node of the cluster can run a worker.
            StageFailed: A stage could not load (only with ``wait_ready``).
            StartTimedOut: The stages did not load in ``start_timeout_s`` (only with ``wait_ready``).

        When the block ends, by whatever exception or cancellation, every worker has been reaped and all shared memory
        is freed. An exception of the block is raised as it is, not in an exception group.
        """
        pipeline = configuration.load(config, {**overrides, **more_overrides} if overrides else more_overrides)
        if spawner is None and cluster is None:
            pipeline = msgspec.structs.replace(pipeline, cluster=None)  # all workers run on this machine
        async with _spawner(pipeline, spawner, cluster) as starts:
            system = cls(pipeline, machine.resolve_models(pipeline), starts, tracing_with(tracer_provider, pipeline))
            body_error: BaseException | None = None
            async with trio.open_nursery() as nursery:
                await nursery.start(system._run)
                try:
                    if wait_ready:
                        await system.wait_ready()
                    yield system
                except BaseException as error:  # noqa: BLE001
                    body_error = error  # raised below, outside the nursery's exception group
                finally:
                    system._close()
                    nursery.cancel_scope.shield = True  # a cancellation from outside must not replace ``body_error``
                    nursery.cancel_scope.cancel()
            if body_error is not None:
                raise body_error

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        """Run the orchestrator and the supervisor until the system is closed."""
        self._clock = trio.lowlevel.current_clock()
        try:
            with self._lifetime:
                async with trio.open_nursery() as nursery:
                    self._tasks = nursery
                    await nursery.start(self._orchestrator.run, self._supervisor.replicas.values())
                    nursery.start_soon(self._supervisor.run)
                    nursery.start_soon(self._watch_start)
                    nursery.start_soon(self._scale_from_zero)
                    nursery.start_soon(self._autoscale)
                    self._running = True
                    task_status.started()
        finally:
            self._kept.memory.keep_only(())
            self._all_ended.set()

    # state

    @property
    def is_running(self) -> bool:
        """Whether the system is open and not ``errored``."""
        return self._running and not self.errored

    @property
    def errored(self) -> bool:
        """Whether failed stages leave no route from any input to any output."""
        failed = self._orchestrator.failed_stages.keys()
        return bool(failed) and not any(failed.isdisjoint(route.stages) for route in routes_of(self._nodes))

    @property
    def dead_error(self) -> StageFailed | None:
        """Why the first failed stage failed, with the exits of its workers; None if no stage has failed."""
        return next(iter(self._orchestrator.failed_stages.values()), None)

    @property
    def in_flight(self) -> int:
        """Number of admitted requests that have not ended, or of which more than 64 KiB of output is unread."""
        return self._orchestrator.in_flight

    def make_room(self, count: int = 1) -> bool:
        """End the requests with the ``count`` slowest readers, for a full system.

        Returns False, and ends none, if fewer readers are too slow.
        """
        return self._orchestrator.readers.make_room(count)

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until another request would be admitted, if the system is full."""
        return self._orchestrator.retry_after_s

    @property
    def descriptors(self) -> int:
        """Most file descriptors that this process opens for the system's workers and rings."""
        return workers.descriptors(self.pipeline)

    def health(self) -> Health:
        """Return the current state of every replica. It may be called outside trio, and when the system is closed."""
        stages: dict[str, list[ReplicaHealth]] = {name: [] for name in self._nodes}
        now = self._clock.current_time()
        for replica in self._supervisor.replicas.values():
            standby = self._orchestrator.pools.is_standby(replica)
            stages[replica.address.stage].append(replica_health(replica, standby=standby, now=now))
        ready = self._running and all(
            any(r.state == ReplicaState.READY.value for r in replicas) or self._starts_when_needed(stage)
            for stage, replicas in stages.items()
        )
        error = str(self.dead_error) if self.dead_error else None
        nodes = {} if self._cluster is None else self._cluster.nodes()
        return Health(ready=ready, errored=self.errored, stages=stages, error=error, nodes=nodes)

    def live_state(self) -> LiveState:
        """Return what happens in the system now: stages, rings and requests."""
        self._trio_clock = self._trio_clock or TrioClock(self._clock)
        return live_state(
            self.pipeline,
            self._orchestrator,
            self._supervisor.replicas.values(),
            rings=self._edges.statistics(),
            links={} if self._cluster is None else self._cluster.links(),
            recent=self._ended.recent,
            health=self.health(),
            clock=self._trio_clock,
        )

    async def check_health(self) -> Health:
        """Return ``health()``, or raise ``dead_error`` if the system is ``errored``."""
        await trio.lowlevel.checkpoint()
        if self.errored and self.dead_error is not None:
            raise self.dead_error.with_traceback(None)  # it is raised often, and must not keep each caller's frames
        return self.health()

    async def wait_ready(self) -> None:
        """Wait until every replica is ready, asleep or failed.

        Raises StageFailed if a stage has failed, StartTimedOut if they do not load in ``start_timeout_s``.
        """
        while self.dead_error is None and self.start_error is None and self._unsettled():
            await self.wait_changed()
        if (error := self.dead_error or self.start_error) is not None:
            raise error.with_traceback(None)

    def _unsettled(self) -> dict[tuple[str, int], str]:
        """Return what each replica does that is not ready, asleep or failed, by its address."""
        settled = (ReplicaState.READY, ReplicaState.ASLEEP, ReplicaState.DRAINING, ReplicaState.FAILED)
        replicas = self._supervisor.replicas
        return {
            (address.stage, address.replica): each.note
            for address, each in replicas.items()
            if each.state not in settled
        }

    async def _watch_start(self) -> None:
        """Note it if the replicas are not ready in ``start_timeout_s``."""
        if (timeout_s := self.pipeline.start_timeout_s) is None:
            return
        with trio.move_on_after(timeout_s):
            try:
                while self._unsettled():
                    await self.wait_changed()
            except SystemClosed:  # it closes, and workers still load: that is no error of the start
                return
        if waiting := self._unsettled():
            self.start_error = StartTimedOut(timeout_s, waiting)
            self._supervisor.changes.unpark_all()

    @property
    def is_tracing_enabled(self) -> bool:
        """Whether the system was opened with a tracer provider."""
        return self._ended.tracing is not None
