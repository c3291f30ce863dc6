"""Measures one system with some concurrent requests: what the clients see, and the CPU time that it takes."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import msgspec
import psutil
import trio

from bench.omni.pipelines import PROMPT, Scenario
from omni_actors import AudioChunk, OmniSystem
from omni_actors.generation import Generation
from omni_actors.outputs import RequestMetrics

SETTLED_S = 0.1
"""How long a system must take no CPU time to count as idle. The kernel reports CPU time in hundredths of a second."""
LONGEST_SETTLING_S = 60.0


class Run(msgspec.Struct):
    """Times are in seconds since all requests were submitted; all but ``e2e_s`` are medians over the requests."""

    ttft_s: float
    ttfa_s: float | None
    """To the first output of the last stage; None without speech."""
    e2e_s: float
    """To the end of the last request."""
    steps_s: dict[str, float]
    """By stage, the longest time that one request was in its steps: all steps, if all requests are concurrent."""
    cpu_s: float
    """User and system time of all workers and the parent."""
    parent_cpu: float
    """The parent's share of ``cpu_s``, which includes the work of this client."""
    client_bytes: int
    """Bytes that the parent received through its rings."""
    output_bytes: int
    """The text and samples among them."""


class Client:
    """Sends a scenario's requests to one open system."""

    def __init__(self, omni: OmniSystem, scenario: Scenario, modalities: tuple[str, ...]) -> None:
        self._omni, self._scenario, self._modalities = omni, scenario, modalities

    def silent(self) -> Client:
        """Return a client that requests only text from the same system."""
        return Client(self._omni, self._scenario, ("text",))

    def _ask(self) -> Generation:
        params = self._scenario.params if "audio" in self._modalities else _for_text(self._scenario.params)
        return self._omni.generate(PROMPT, modalities=self._modalities, **params)

    async def ttft_s(self, concurrent: int) -> float:
        """Measure ``Run.ttft_s`` with requests that are aborted once all have their first text."""
        began = time.monotonic()
        answers = [self._ask() for _ in range(concurrent)]
        seen: list[float] = []

        async def first_of(answer: Generation) -> None:
            async for out in answer:
                if out.modality == "text":
                    seen.append(time.monotonic() - began)
                    return

        async with trio.open_nursery() as nursery:
            for answer in answers:
                nursery.start_soon(first_of, answer)
        for answer in answers:
            answer.abort()
        await self._settle()
        return statistics.median(seen)

    async def _settle(self) -> None:
        """Wait until no worker computes, so that the next measurement has the machine to itself."""
        workers = self._workers()
        before = -1.0
        with trio.fail_after(LONGEST_SETTLING_S):
            while (now := sum(map(_cpu, workers))) != before:
                before = now
                await trio.sleep(SETTLED_S)

    def _workers(self) -> list[psutil.Process]:
        replicas = [replica for stage in self._omni.health().stages.values() for replica in stage]
        return [psutil.Process(replica.pid) for replica in replicas if replica.pid]

    async def run(self, concurrent: int) -> Run:
        """Measure this number of concurrent requests, to their end."""
        workers = self._workers()
        cpu = [_cpu(worker) for worker in workers]
        parent = _cpu(psutil.Process())
        first: list[dict[str, float]] = []
        ended: list[RequestMetrics] = []
        outputs: list[int] = []
        began = time.monotonic()

        async def one() -> None:
            seen: dict[str, float] = {}
            first.append(seen)
            async for out in self._ask():
                seen.setdefault(out.modality, time.monotonic() - began)
                outputs.append(_size(out.delta))
                if out.metrics is not None:
                    ended.append(out.metrics)

        async with trio.open_nursery() as nursery:
            for _ in range(concurrent):
                nursery.start_soon(one)
        e2e_s = time.monotonic() - began
        parent_s = _cpu(psutil.Process()) - parent
        cpu_s = parent_s + sum(_cpu(worker) - before for worker, before in zip(workers, cpu, strict=True))
        stages = ended[0].stages
        return Run(
            ttft_s=statistics.median(seen["text"] for seen in first),
            ttfa_s=statistics.median(seen["audio"] for seen in first) if "audio" in self._modalities else None,
            e2e_s=e2e_s,
            steps_s={stage: max(metrics.stages[stage].step_s for metrics in ended) for stage in stages},
            cpu_s=cpu_s,
            parent_cpu=parent_s / cpu_s,
            client_bytes=sum(
                sent
                for metrics in ended
                for times in metrics.stages.values()
                for target, sent in times.sent_bytes.items()
                if target.startswith("client")
            ),
            output_bytes=sum(outputs),
        )


def median(runs: list[Run], ttft_s: list[float]) -> Run:
    """Return the median of each field. ttft_s: further values of that field, from shorter runs."""
    fields: dict[str, Any] = {}
    for name in Run.__struct_fields__:
        values = [getattr(run, name) for run in runs]
        if name == "ttft_s":
            values += ttft_s
        if name == "steps_s":
            fields[name] = {stage: statistics.median(value[stage] for value in values) for stage in values[0]}
        else:
            fields[name] = None if values[0] is None else statistics.median(values)
    return Run(**fields)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _size(delta: str | AudioChunk | None) -> int:
    if isinstance(delta, AudioChunk):
        return delta.samples.nbytes
    return len((delta or "").encode())


def _for_text(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if not name.startswith("talker_")}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
