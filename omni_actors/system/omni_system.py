"""OmniSystem: the public face of a running pipeline."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from omni_actors import config as configuration
from omni_actors import prompts as prompt_inputs
from omni_actors.config import Pipeline
from omni_actors.errors import InvalidRequest, StageFailed
from omni_actors.generation import Answer, Generation
from omni_actors.media import MultiModalData
from omni_actors.metrics import Metrics
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.orchestrator.pieces import Input, Inputs, Segments
from omni_actors.orchestrator.request import ON_FAILURE, OnFailure
from omni_actors.orchestrator.routes import Node, Route, plan, routes_of, topological
from omni_actors.prompts import Prompt
from omni_actors.supervisor.calls import MAX_CALLS
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.process import LocalSpawner, Spawner
from omni_actors.supervisor.replica import ReplicaState
from omni_actors.supervisor.supervisor import Supervisor
from omni_actors.system import batch, capabilities, machine, workers
from omni_actors.system.ended import EndedRequests, tracing_with
from omni_actors.system.gauges import gauges
from omni_actors.system.health import Health, ReplicaHealth, replica_health
from omni_actors.system.loras import LoraControl, LoraTable
from omni_actors.system.parameters import Parameters
from omni_actors.system.texts import TextControl

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider  # of the extra "tracing"

    from omni_actors.system.tracing import Tracing


class OmniSystem(TextControl, LoraControl):
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
        self.pipeline = pipeline
        self._nodes = {
            name: Node(accepts=s.accepts, inputs=s.inputs, emits=s.emits) for name, s in pipeline.stages.items()
        }
        self._route = functools.cache(functools.partial(plan, self._nodes))
        self._parameters, self._loras = Parameters(pipeline), LoraTable(pipeline)
        self._edges = Edges(workers.edge_specs(pipeline), spawner)
        self._orchestrator = Orchestrator(
            self._edges,
            limits=pipeline.limits,
            deterministic_stages={name for name in self._nodes if pipeline.deterministic(name)},
            resumable_stages={name for name in self._nodes if pipeline.resumable(name)},
            on_end=lambda request: self._ended.closed(request),
        )
        # One half of a mailbox is for what each request may cause: Start with its journal, Abort, Resend or Switch
        # after the restart of another stage, Resume after Pause. While the other half is full, requests are neither
        # admitted nor paused. Calls have room of their own, twice, because of the two halves.
        capacity = 12 * pipeline.limits.max_requests + 4 * len(self._nodes) + 2 * MAX_CALLS + 16
        self._supervisor = Supervisor(
            workers.worker_specs(pipeline, models, topological(self._nodes)),
            pipeline.stages,
            edges=self._edges,
            spawner=spawner,
            listener=self._orchestrator,
            mailbox_capacity=capacity,
        )
        self.metrics = Metrics(lambda: gauges(self._orchestrator, self._supervisor.replicas.values(), self._edges))
        self._ended = EndedRequests(self.metrics, tracing)
        self._running = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: str | Path | Pipeline = "voice",
        *,
        wait_ready: bool = True,
        spawner: Spawner | None = None,
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
            overrides: Dotted path to value: ``overrides={"stages.llm.threads": 2}``. "model" and "tokenizer" stand for
                those of all stages.
            tracer_provider: OpenTelemetry's; it receives a trace of each request, and is not shut down here.
            more_overrides: The same as keywords: ``model="/data/mine"``, ``**{"stages.llm.threads": 2}``.

        Raises:
            ConfigError: The pipeline cannot work, or a library or model is missing. No process was started.
            StageFailed: A stage could not load (only with ``wait_ready``).

        When the block ends, by whatever exception or cancellation, every worker has been reaped and all shared memory
        is freed. An exception of the block is raised as it is, not in an exception group.
        """
        pipeline = configuration.load(config, {**overrides, **more_overrides} if overrides else more_overrides)
        spawner = spawner or LocalSpawner(cpu_sharing=pipeline.shares_cores)
        system = cls(pipeline, machine.resolve_models(pipeline), spawner, tracing_with(tracer_provider, pipeline))
        body_error: BaseException | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(system._orchestrator.run, system._supervisor.replicas)
            nursery.start_soon(system._supervisor.run)
            system._running = True
            try:
                if wait_ready:
                    await system.wait_ready()
                yield system
            except BaseException as error:  # noqa: BLE001
                body_error = error  # raised below, outside the nursery's exception group
            finally:
                system._running = False
                system._supervisor.changes.unpark_all()
                nursery.cancel_scope.shield = True  # a cancellation from outside must not replace ``body_error``
                nursery.cancel_scope.cancel()
        if body_error is not None:
            raise body_error

    # requests

    def generate(
        self,
        /,
        prompt: Prompt | AsyncIterable[str] | None = None,
        *,
        multi_modal_data: MultiModalData | None = None,
        script: str | AsyncIterable[str] | None = None,
        modalities: Sequence[str] = ("text",),
        request_id: str | None = None,
        deadline_s: float | None = None,
        on_failure: OnFailure = "replay",
        trace_headers: Mapping[str, str] | None = None,
        **params: Any,
    ) -> Generation:
        """Submit a request. It returns at once; reading the returned object reads the answer.

        Args:
            prompt: A question, a conversation (see ``Messages``), or a raw prompt that passes the chat template:
                ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or ``{"prompt_embeds": array}`` (see ``prompts``).
                An iterator of the parts of a question is read to its end before a language model begins.
            multi_modal_data: ``{"audio": AudioChunk, "image": …, "video": …}``, for each kind one item or a list; see
                ``media.MultiModalData``. A question follows all of them; a conversation refers to them by index.
            script: Text that is spoken as it is. It replaces the prompt. It may be an asynchronous iterator of parts,
                cut anywhere: each sentence is spoken as soon as it is complete. (See ``submit`` for iterators.)
            modalities: What to return, by the names that the pipeline's stages emit: "text", "audio", "transcript".
            request_id: An identifier of your own, for ``abort``; by default one is made.
            deadline_s: Seconds until the request ends with ``DeadlineExceeded``; by default ``limits.deadline_s``.
            on_failure: "replay": after the death of a worker its work for this request is repeated, and the answer
                continues as if nothing had happened; if that is impossible the request ends with ``StageCrashed``.
                "fail": the request ends with ``StageCrashed`` at once.
            trace_headers: A W3C trace context to continue (``traceparent``, ``tracestate``); default: the current span.
            params: Parameters of the engines, such as max_tokens, temperature, seed or speed; ``lora`` is the name of a
                LoRA adapter (see ``add_lora``). None means not given.

        Returns:
            The answer. Dropping it aborts the request. The inputs must not change before the request has ended.

        Raises:
            InvalidRequest: An argument is wrong, or no route leads from the input to the modalities.
            Unsupported: A stage of the route cannot take such a prompt; it names the stage.
            Overloaded: ``limits.max_requests`` requests are running. A request never waits for admission; ``map``
                submits any number of prompts without this error.
            Quarantined: The same request has ended workers a short time ago.
            StageUnavailable: A stage that the request needs has failed.
            Unsupported: No stage of the request has the LoRA adapter.
        """
        inputs = prompt_inputs.pieces(prompt, multi_modal_data)
        if script is not None:
            inputs["script"] = prompt_inputs.script(script)
        if (kind := prompt_inputs.raw_kind(prompt)) is not None:
            capabilities.require_raw_prompt(self.pipeline, self._planned(inputs, modalities), kind)
        params["trace_headers"] = trace_headers  # an argument of ``submit``, as the others
        return self.submit(
            inputs, modalities, request_id=request_id, deadline_s=deadline_s, on_failure=on_failure, **params
        )

    def map(
        self,
        /,
        prompts: Iterable[Prompt],
        *,
        concurrency: int | None = None,
        keep_errors: bool = False,
        **arguments: Any,
    ) -> AbstractAsyncContextManager[AsyncIterator[Answer]]:
        """Answer many prompts, several at a time, without exceeding ``limits.max_requests``.

        Args:
            prompts: Questions, conversations or raw prompts. They are taken from the iterable as they are needed.
            concurrency: Requests at a time; at most, and by default, ``limits.max_requests``.
            keep_errors: False: the loop raises the error of the first request that fails. True: it continues, and
                returns such a request as an ``Answer`` with its ``error``.
            arguments: Those of ``generate``, for every prompt: modalities, deadline_s, max_tokens, …

        Returns:
            A block with an iterator. The answers come in the order in which they are complete; ``Answer.index`` is the
            position of the prompt. If other callers fill the system, ``map`` waits instead of raising ``Overloaded``.
            Leaving the block, also by an exception or cancellation, aborts the requests that are not complete.

        >>> async def main():
        ...     async with OmniSystem.open("echo") as omni, omni.map(["a", "b", "c"], concurrency=2) as answers:
        ...         return {answer.index: answer.text async for answer in answers}
        >>> sorted(trio.run(main).items())
        [(0, 'a'), (1, 'b'), (2, 'c')]
        """
        most = self.pipeline.limits.max_requests
        return batch.answers(
            lambda prompt: self.generate(prompt, **arguments),
            prompts,
            concurrency=max(1, min(concurrency or most, most)),
            keep_errors=keep_errors,
        )

    def submit(
        self,
        /,
        inputs: Mapping[str, Sequence[Input] | AsyncIterable[Input] | Segments],
        modalities: Sequence[str],
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        on_failure: OnFailure = "replay",
        trace_headers: Mapping[str, str] | None = None,
        **params: Any,
    ) -> Generation:
        """Submit a request for a pipeline of your own.

        Args:
            inputs: Pieces of input, by the kinds that the pipeline's stages accept: a list, or an asynchronous iterator
                for pieces that arrive while the request runs. One task reads it, at most as fast as the stages take its
                pieces, and closes it when the request ends. Its end ends the input; an exception ends the request with
                ``InputFailed``. A replay sends the pieces again; beyond ``limits.retain_bytes`` they are not kept.
            modalities, request_id, deadline_s, on_failure, trace_headers, params: As for ``generate``.

        Returns and raises what ``generate`` does.
        """
        pieces = {kind: prompt_inputs.live(given) for kind, given in inputs.items()}
        route = self._planned(pieces, modalities)
        by_stage = self._parameters.by_stage(route.stages, params)
        self._loras.resolve(by_stage)
        deadline_s = self.pipeline.limits.deadline_s if deadline_s is None else deadline_s
        if not 0 <= deadline_s < math.inf:
            raise InvalidRequest(f"deadline_s: expected seconds from 0 on, found {deadline_s}", param="deadline_s")
        if on_failure not in ON_FAILURE:
            raise InvalidRequest(f'on_failure: found {on_failure!r}; accepted: "replay", "fail"', param="on_failure")
        stream = self._orchestrator.submit(
            inputs=pieces, route=route, params=by_stage, deadline_s=deadline_s, name=request_id, on_failure=on_failure
        )
        if (tracing := self._ended.tracing) is not None:
            stream.request.trace = tracing.context(trace_headers)
        return Generation(stream, self.pipeline, self._ended.answered)

    def _planned(self, inputs: Inputs, modalities: Sequence[str]) -> Route:
        if isinstance(modalities, str):
            accepted = f"modalities: expected a sequence of names such as ({modalities!r},), found {modalities!r}"
            raise InvalidRequest(accepted, param="modalities")
        return self._route(frozenset(kind for kind, pieces in inputs.items() if pieces), frozenset(modalities))

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
        """Number of admitted requests whose client does not have the whole answer yet."""
        return self._orchestrator.in_flight

    def make_room(self) -> bool:
        """End the request with the slowest reader, if the system is full. Return False if no reader is too slow."""
        return self._orchestrator.readers.make_room()

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until another request would be admitted, if the system is full."""
        return self._orchestrator.retry_after_s

    @property
    def descriptors(self) -> int:
        """Most file descriptors that this process opens for the system's workers and rings."""
        return workers.descriptors(self.pipeline)

    def health(self) -> Health:
        """Return the current state of every replica."""
        stages: dict[str, list[ReplicaHealth]] = {name: [] for name in self._nodes}
        for replica in self._supervisor.replicas.values():
            standby = self._orchestrator.is_standby(replica)
            stages[replica.address.stage].append(replica_health(replica, standby=standby))
        ready = self._running and all(
            any(r.state == ReplicaState.READY.value for r in stage) for stage in stages.values()
        )
        error = str(self.dead_error) if self.dead_error else None
        return Health(ready=ready, errored=self.errored, stages=stages, error=error)

    async def check_health(self) -> Health:
        """Return ``health()``, or raise ``dead_error`` if the system is ``errored``."""
        await trio.lowlevel.checkpoint()
        if self.errored and self.dead_error is not None:
            raise self.dead_error
        return self.health()

    async def wait_ready(self) -> None:
        """Wait until every replica is ready or failed. Raises StageFailed if a stage has failed."""
        while self.dead_error is None and any(
            replica.state not in (ReplicaState.READY, ReplicaState.FAILED)
            for replica in self._supervisor.replicas.values()
        ):
            await self.wait_changed()
        if self.dead_error is not None:
            raise self.dead_error

    async def wait_changed(self) -> None:
        """Wait until the state or the note of any replica changes. Raises RuntimeError when the system closes."""
        if self._running:
            await self._supervisor.changes.park()
        if not self._running:
            raise RuntimeError("the system is closed")

    @property
    def is_tracing_enabled(self) -> bool:
        """Whether the system was opened with a tracer provider."""
        return self._ended.tracing is not None
