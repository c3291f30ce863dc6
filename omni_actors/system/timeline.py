"""What happened to a request and when, as a tree of periods. ``tracing`` turns it into spans.

Rules
1. The timeline is made when the request is closed, or when the live state is read, from what the orchestrator keeps of
   the request anyway: the statistics of its stages and the deaths that it went through. Nothing is recorded for it.
2. Times are seconds of the parent's CLOCK_MONOTONIC. The workers of its machine share that clock, and the times of
   others are converted (``StageStats``).
3. A stage's period has the parts of one hop: ``queue`` (its ``Start`` waits for the engine loop), ``transfer`` (the
   first chunk is on its way) and ``compute`` (the engine has input). They follow each other; between ``queue`` and
   ``transfer`` the stage waits for its sources.
4. A stage whose worker died has one period for each incarnation. The one that was lost carries the death as its error.
   ``resume`` lasts from the death until the stage's next new output: the delay that the death cost. For a stage without
   output to the client, that is the first output that the next incarnation sends.
5. Facts have the names of OpenTelemetry's semantic conventions for generative AI where those have one. The others begin
   with ``omni_actors.``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from omni_actors.config import Pipeline
from omni_actors.errors import RequestError, StageCrashed
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.orchestrator.request import Loss, Request
from omni_actors.protocol.messages import CLIENT, StageStats

Facts: TypeAlias = dict[str, str | int | float | bool | list[str]]

REQUEST_FACTS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""The request parameters that OpenTelemetry has names for."""
USAGE_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
"""The data of a last output that OpenTelemetry has names for."""


@dataclass
class Period:
    """A part of a request's life.

    Attributes:
        name: What happened.
        began, ended: When.
        facts: What is known of it.
        error: The error that ended it; None if it was not ended by one.
        deaths: Deaths of workers that held the request in this period, with their times.
        parts: Periods within it.
    """

    name: str
    began: float
    ended: float
    facts: Facts = field(default_factory=dict)
    error: RequestError | None = None
    deaths: list[tuple[float, StageCrashed]] = field(default_factory=list)
    parts: list[Period] = field(default_factory=list)


@dataclass
class _Run:
    """One incarnation's work for a request: from its dispatch until it finished, was lost, or the request ended."""

    stage: str
    began: float
    ended: float
    stats: StageStats | None
    loss: Loss | None = None
    resumed: bool = False


def timeline(request: Request, pipeline: Pipeline) -> Period:
    """Return the life of a request that has ended, from its submission to its outcome."""
    ended = request.submitted if request.finished is None else request.finished
    whole = Period("request", request.submitted, ended, error=request.error)
    whole.facts = _request_facts(request, pipeline)
    whole.deaths = [(loss.at, loss.crash) for loss in request.deaths.losses]
    whole.parts = periods(request, pipeline, ended)
    return whole


def periods(request: Request, pipeline: Pipeline, until: float) -> list[Period]:
    """Return the parts of a request's life. until: its end or, of a request that runs, now. Open parts end then."""
    if request.dispatched is None:
        return [Period("queue", request.submitted, until)]
    found = [Period("queue", request.submitted, request.dispatched)]
    for stage in request.route.stages:
        runs = list(_runs(request, stage, request.dispatched, until))
        found += [_stage_period(request, pipeline, run) for run in runs]
        found += _resumes(request, runs, until)
    return found


def _runs(request: Request, stage: str, dispatched: float, until: float) -> Iterator[_Run]:
    """Yield the incarnations that worked on the request, the earliest first."""
    began, resumed = dispatched, False
    for loss in request.deaths.losses:
        if loss.crash.stage != stage:
            continue
        ended = loss.at if loss.stats is None else loss.stats.finished
        yield _Run(stage, began, ended, loss.stats, loss=loss, resumed=resumed)
        if loss.restarted is None:
            return
        began, resumed = loss.restarted, True
    stats = request.stats.get(stage)
    yield _Run(stage, began, until if stats is None else stats.finished, stats, resumed=resumed)


def _stage_period(request: Request, pipeline: Pipeline, run: _Run) -> Period:
    period = Period(f"stage {run.stage}", run.began, run.ended)
    period.facts = {
        "omni_actors.stage": run.stage,
        "omni_actors.engine": pipeline.stages[run.stage].engine,
        "omni_actors.finished": run.stats is not None,
    }
    if run.resumed:
        period.facts["omni_actors.resumed"] = True
    if run.loss is not None:
        period.facts["omni_actors.replica"] = run.loss.crash.replica
        period.facts["omni_actors.generation"] = run.loss.crash.generation
        if run.loss.crash.exit.node is not None:
            period.facts["omni_actors.node"] = run.loss.crash.exit.node
        period.deaths = [(run.loss.at, run.loss.crash)]
        if run.stats is None:
            period.error = run.loss.crash
    elif (address := request.replay_state.stages[run.stage].address) is not None:
        period.facts["omni_actors.replica"] = address.replica
    if run.stats is not None:
        if run.stats.node is not None:
            period.facts["omni_actors.node"] = run.stats.node
        period.facts["omni_actors.chunks"] = run.stats.chunks
        period.facts["omni_actors.sent_bytes"] = sum(run.stats.sent_bytes.values())
        period.parts = list(_hop(request, run, run.stats))
    return period


def _hop(request: Request, run: _Run, stats: StageStats) -> Iterator[Period]:
    """Yield the parts of a stage's work. A part that was skipped, or that cannot be placed, is missing."""
    yield Period("queue", run.began, max(run.began, stats.started))
    if (
        stats.first_input is not None
        and (sent := first_sent(request, run.stage, run.began, stats.first_input)) is not None
    ):
        at, source = sent
        facts: Facts = {"omni_actors.source": source}
        yield Period("transfer", max(stats.started, at), stats.first_input, facts)
    began = stats.started if stats.first_input is None else stats.first_input
    compute: Facts = {"omni_actors.step_s": stats.step_s}
    if stats.first_output is not None:
        compute["omni_actors.first_output_s"] = stats.first_output - began
    yield Period("compute", began, stats.finished, compute)


def first_sent(request: Request, stage: str, dispatched: float, arrived: float) -> tuple[float, str] | None:
    """Return when a stage's first chunk was sent, and by which source; None if no source can be the one.

    dispatched, arrived: when the request was dispatched to the stage, and when the first chunk arrived there.
    """
    earliest: tuple[float, str] | None = None
    for source in request.route.sources[stage]:
        stats = request.stats.get(source)
        at = dispatched if source == CLIENT else stats.first_output if stats is not None else None
        if at is not None and at <= arrived and (earliest is None or (at, source) < earliest):
            earliest = at, source
    return earliest


def _resumes(request: Request, runs: list[_Run], until: float) -> Iterator[Period]:
    """Yield a period for each death after which the stage had to start again."""
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        if run.loss is None or (following is None and not _waits(request, run.stage)):
            continue
        resume = Period(f"resume {run.stage}", run.loss.at, until, {"omni_actors.stage": run.stage})
        if following is not None:
            resume.ended = _resumed(run.loss, following)
            # An output may arrive before the message that the incarnation has started.
            started = min(run.loss.started or resume.ended, resume.ended)
            resume.facts["omni_actors.resume.wait_s"] = following.began - run.loss.at
            resume.facts["omni_actors.resume.start_s"] = started - following.began
            resume.facts["omni_actors.resume.compute_s"] = resume.ended - started
        yield resume


def _resumed(loss: Loss, following: _Run) -> float:
    """Return when the incarnation after a death sent something new, or else when it ended."""
    if loss.resumed is not None:
        return loss.resumed
    if following.stats is not None and following.stats.first_output is not None:
        return following.stats.first_output
    return following.ended


def _waits(request: Request, stage: str) -> bool:
    """Return whether the request ended while this stage was to start again."""
    return request.replay_state.stages[stage].phase is Phase.WAITING


def pipeline_facts(pipeline: Pipeline) -> Facts:
    """Return what is the same for all requests of a pipeline."""
    return {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "omni_actors",
        "gen_ai.request.model": pipeline.name,
    }


def _request_facts(request: Request, pipeline: Pipeline) -> Facts:
    modalities = [pipeline.stages[name].emits for name in request.route.stages if CLIENT in request.route.targets[name]]
    facts: Facts = {
        "gen_ai.output.type": "speech" if "audio" in modalities else "text",
        "omni_actors.request": request.name,
        "omni_actors.outcome": request.lifecycle.state.value,
        "omni_actors.replays": request.replays,
    }
    for stage in request.route.stages:
        params: Mapping[str, Any] = msgspec.msgpack.decode(request.params[stage])
        for name, fact in REQUEST_FACTS.items():
            if params.get(name) not in (None, []):
                facts.setdefault(fact, params[name])
    first = [stats.first_output for stage, stats in request.stats.items() if CLIENT in request.route.targets[stage]]
    if arrived := [at for at in first if at is not None]:
        facts["gen_ai.response.time_to_first_chunk"] = min(arrived) - request.submitted
    for data in request.last_data.values():
        facts |= {fact: data[name] for name, fact in USAGE_FACTS.items() if name in data}
        if reason := data.get("finish_reason"):
            facts["gen_ai.response.finish_reasons"] = [str(reason)]
    return facts
