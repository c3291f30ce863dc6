"""The load generator: sends the requests of a run, and measures each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

import httpx2
import msgspec
import trio

from omni_actors.cli.bench.endpoints import ENDPOINTS, Ask, Request
from omni_actors.cli.bench.workload import Arrivals, Prompt, arrival_times
from omni_actors.cli.measurement import Measurement
from omni_actors.cli.server_client import Server, ServerError


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How a run loads the server.

    Attributes:
        endpoint: One of ``ENDPOINTS``.
        requests: How many requests are measured.
        duration_s: No request is sent after this many seconds; None: no limit.
        rate: Requests per second; None: ``concurrency`` decides.
        arrivals: How requests with a rate arrive.
        concurrency: Requests in progress at a time; each that ends is followed by the next one.
        warmup: Requests that are sent before, one after the other, and not measured.
        timeout_s: The longest that a request may take.
        seed: Of the arrivals and the prompts.
    """

    endpoint: Literal["chat", "completions", "speech", "transcriptions", "images"]
    requests: int
    duration_s: float | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    concurrency: int = 1
    warmup: int = 1
    timeout_s: float = 600.0
    seed: int = 0


class Run(msgspec.Struct, frozen=True):
    """measurements: of the requests, in the order of their arrivals. elapsed_s, cpu_s: of the generator."""

    measurements: list[Measurement]
    elapsed_s: float
    cpu_s: float


async def run_load(
    server: Server, load: Load, ask: Ask, prompts: Iterator[Prompt], progress: Callable[[int], None] = lambda _: None
) -> Run:
    """Send all requests, and return when the last one has ended.

    progress: called with the number of requests that have ended. Cancellation ends all requests.

    Raises ServerError: a request of the warm-up failed, so that the others would too.
    """
    generator = _Generator(server, load, ask, prompts, progress=progress)
    for _ in range(load.warmup):
        await generator.warm_up()
    began, cpu = time.monotonic(), time.process_time()
    async with trio.open_nursery() as nursery:
        if load.rate is None:
            for _ in range(load.concurrency):
                nursery.start_soon(generator.repeat, began)
        else:
            await generator.arrive(nursery, began)
    return Run(generator.measurements, time.monotonic() - began, time.process_time() - cpu)


class _Generator:
    def __init__(
        self, server: Server, load: Load, ask: Ask, prompts: Iterator[Prompt], *, progress: Callable[[int], None]
    ) -> None:
        self._server, self._load, self._prompts, self._progress = server, load, prompts, progress
        self._request: Callable[[Prompt], Request] = lambda prompt: ENDPOINTS[load.endpoint](ask, prompt)
        self.measurements: list[Measurement] = []
        self._ended = 0

    async def warm_up(self) -> None:
        now = time.monotonic()
        measurement = Measurement(now, now)
        try:
            with trio.fail_after(self._load.timeout_s):
                await self._exchange(self._request(next(self._prompts)), measurement)
        except trio.TooSlowError as error:
            reason = f"a request of the warm-up took longer than {self._load.timeout_s:g} s (--timeout)"
            raise ServerError("timeout", reason) from error

    async def repeat(self, began: float) -> None:
        """Send one request after the other until there are enough."""
        while self._goes_on(time.monotonic() - began):
            now = time.monotonic()
            await self._measure(self._begin(now), self._request(next(self._prompts)))

    async def arrive(self, nursery: trio.Nursery, began: float) -> None:
        """Send each request when it is due. The body is made before."""
        load = self._load
        assert load.rate is not None
        for due in arrival_times(load.arrivals, load.rate, load.seed):
            if not self._goes_on(due):
                return
            request = self._request(next(self._prompts))
            await trio.sleep(max(0.0, began + due - time.monotonic()))
            nursery.start_soon(self._measure, self._begin(began + due), request)

    def _goes_on(self, elapsed_s: float) -> bool:
        load = self._load
        is_in_time = load.duration_s is None or elapsed_s < load.duration_s
        return len(self.measurements) < load.requests and is_in_time

    def _begin(self, due: float) -> Measurement:
        self.measurements.append(Measurement(due, time.monotonic()))
        return self.measurements[-1]

    async def _measure(self, measurement: Measurement, request: Request) -> None:
        measurement.sent = time.monotonic()
        try:
            with trio.fail_after(self._load.timeout_s):
                await self._exchange(request, measurement)
        except trio.TooSlowError:
            measurement.error = "timeout"
        except ServerError as error:
            measurement.error = error.kind
        measurement.ended = time.monotonic()
        self._ended += 1
        self._progress(self._ended)

    async def _exchange(self, request: Request, measurement: Measurement) -> None:
        response: httpx2.Response
        async with self._server.stream("POST", request.path, **request.content) as response:
            await request.read(response, measurement)
        if not measurement.is_complete:
            raise ServerError("incomplete answer", "the connection ended before the answer did")
