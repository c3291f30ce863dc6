"""Measure what slow and stalled clients cost the other clients of a server (``python -m bench.readers``).

The benchmark starts a server on 127.0.0.1, without an API key. First, normal clients ask for short speeches in a closed
loop, alone. Then they do the same beside hostile clients, which connect from another loopback address:

- slow readers ask for a speech of 4,096 characters and read 16 kB of it every 20 s;
- stalled readers ask for the same and read nothing;
- slow heads send one byte of a request's head every 2 s;
- slow bodies send one byte of a request's body every 2 s;
- idle clients complete one request and then keep their connection open.

A reader whose connection the server closes does not return; the other kinds reconnect, so that their number holds for
the whole phase. The report gives the rates and the refusals of the normal clients, the ratio of the two rates, the peak
resident memory of the server and of its workers, and how the server ended the hostile connections.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
import trio

from bench import tone

LONG = ("The sea is wide, and the ships on it are many. " * 90)[:4096]
SHORT = "It is late. Good night."
NORMAL_ADDRESS, HOSTILE_ADDRESS = "127.0.0.1", "127.0.0.2"
"""The server limits the connections of one address. Hostile clients must not use up the share of the normal ones."""
SLOW_BYTES, SLOW_S = 16_384, 20.0
DRIP_S = 2.0
SAMPLE_S = 0.5
RETRY_S = 0.25
"""The pause of a normal client after a refusal, and of a hostile client before it reconnects."""
MB = 1e6
GAUGES = ("omni_unread_bytes", "omni_requests_paused", "omni_requests_in_flight", "omni_http_arriving")


@dataclass
class Phase:
    """The measurements of one part of the run. peaks: bytes, by process. gauges: the highest values seen."""

    name: str
    seconds: float
    answers: int = 0
    answer_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)
    gauges: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.answers / self.seconds


class Server:
    """A server process, as its clients and its operator see it."""

    def __init__(self, process: subprocess.Popen[str], port: int, model: str) -> None:
        self.process, self.port, self.model = process, port, model

    async def send(self, data: bytes, source: str = NORMAL_ADDRESS) -> trio.SocketStream:
        """Open a connection from the address ``source`` and send ``data``."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port, local_address=source)
        await stream.send_all(data)
        return stream

    async def speak(self, text: str, source: str = NORMAL_ADDRESS) -> trio.SocketStream:
        """Ask for ``text`` as speech."""
        body = {"model": self.model, "voice": "alloy", "input": text, "response_format": "pcm"}
        return await self.send(request("POST /v1/audio/speech", json.dumps(body).encode()), source)

    async def samples(self) -> dict[str, float]:
        """The server's own metrics, by name and labels."""
        async with await self.send(request("GET /metrics")) as stream:
            lines = (await read_all(stream)).decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if line.startswith("omni_")]
        return {name: float(value) for name, _, value in samples}

    def memory(self) -> dict[str, int]:
        """Resident bytes of the server, of its workers together, and of its largest worker."""
        parent = psutil.Process(self.process.pid)
        workers = [worker.memory_info().rss for worker in parent.children(recursive=True)]
        return {"server": parent.memory_info().rss, "workers": sum(workers), "largest worker": max(workers, default=0)}


def request(line: str, body: bytes = b"", *, length: int | None = None, connection: str = "close") -> bytes:
    """A request. length: its Content-Length, if that is not the length of ``body``."""
    headers = ("Host: 127.0.0.1", f"Connection: {connection}", "Content-Type: application/json")
    size = len(body) if length is None else length
    return "\r\n".join((f"{line} HTTP/1.1", *headers, f"Content-Length: {size}", "", "")).encode() + body


async def read_all(stream: trio.SocketStream) -> bytes:
    return b"".join([part async for part in stream])


@asynccontextmanager
async def serving(config: str, overrides: tuple[str, ...]) -> AsyncIterator[Server]:
    """Run a server process; "tone" is the pipeline of ``bench.tone``."""
    with tempfile.TemporaryDirectory() as folder:
        model = config
        if config == "tone":
            file = Path(folder) / "tone.yaml"
            file.write_text(tone.CONFIG)
            config = str(file)
        command = [sys.executable, "-u", "-m", "omni_actors.serve", config, "--port", "0"]
        command += [part for override in overrides for part in ("-s", override)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: ASYNC220
            try:
                port = await trio.to_thread.run_sync(_wait_ready, process)
                yield Server(process, port, model)
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def _wait_ready(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    port = 0
    for line in process.stdout:
        if line.startswith("listening on "):
            port = int(line.split(";")[0].rpartition(":")[2])
        if line.startswith("ready: "):
            return port
    raise RuntimeError(f"the server ended with {process.wait()}")


# clients


async def normal(server: Server, phase: Phase) -> None:
    """Ask for a short speech, read it, and ask again."""
    while True:
        began = trio.current_time()
        try:
            async with await server.speak(SHORT) as stream:
                answer = await read_all(stream)
        except (OSError, trio.BrokenResourceError) as error:
            phase.refused[type(error).__name__] += 1
            await trio.sleep(RETRY_S)
            continue
        status = answer[9:12].decode()
        if status == "200":
            phase.answers += 1
            phase.answer_s.append(trio.current_time() - began)
        else:
            phase.refused[status] += 1
            await trio.sleep(RETRY_S)


async def read_slowly(server: Server, size: int) -> str:
    """Ask for a long speech, and read ``size`` bytes of it every ``SLOW_S``; 0: read nothing."""
    async with await server.speak(LONG, HOSTILE_ADDRESS) as stream:
        while True:
            await trio.sleep(SLOW_S)
            if size and not await stream.receive_some(size):
                return "closed"


async def slow_reader(server: Server) -> str:
    return await read_slowly(server, SLOW_BYTES)


async def stalled_reader(server: Server) -> str:
    return await read_slowly(server, 0)


async def slow_head(server: Server) -> str:
    async with await server.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", HOSTILE_ADDRESS) as stream:
        return await drip(stream)


async def slow_body(server: Server) -> str:
    async with await server.send(request("POST /v1/audio/speech", length=1_000_000), HOSTILE_ADDRESS) as stream:
        return await drip(stream)


async def idle(server: Server) -> str:
    """Complete a request, and wait until the server closes the connection."""
    async with await server.send(request("GET /health", connection="keep-alive"), HOSTILE_ADDRESS) as stream:
        return (await read_all(stream))[9:12].decode() + ", closed"


async def drip(stream: trio.SocketStream) -> str:
    """Send a byte every ``DRIP_S`` until the server closes the connection. Returns the status of its answer."""
    answer = b""
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            nonlocal answer
            answer = await read_all(stream)
            nursery.cancel_scope.cancel()

        nursery.start_soon(read)
        while True:
            await trio.sleep(DRIP_S)
            await stream.send_all(b"x")
    return answer[9:12].decode()


HOSTILE: dict[str, Callable[[Server], Awaitable[str]]] = {
    "slow readers": slow_reader,
    "stalled readers": stalled_reader,
    "slow heads": slow_head,
    "slow bodies": slow_body,
    "idle clients": idle,
}


async def hostile(server: Server, kind: str, ends: Counter[str]) -> None:
    """Be one hostile client, and count how the server ends its connections."""
    while True:
        try:
            ends[f"{kind}: {await HOSTILE[kind](server)}"] += 1
        except* (OSError, trio.BrokenResourceError):
            ends[f"{kind}: reset"] += 1
        if kind.endswith("readers"):
            return
        await trio.sleep(RETRY_S)


# the run


async def watch(server: Server, phase: Phase) -> None:
    """Keep the peaks of memory and of the server's gauges."""
    while True:
        for name, size in (await trio.to_thread.run_sync(server.memory)).items():
            phase.peaks[name] = max(phase.peaks[name], size)
        samples = await server.samples()
        for name in GAUGES:
            phase.gauges[name] = max(phase.gauges[name], int(samples.get(name, 0)))
        await trio.sleep(SAMPLE_S)


async def run_phase(server: Server, phase: Phase, clients: int) -> Phase:
    with trio.move_on_after(phase.seconds):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, server, phase)
            for _ in range(clients):
                nursery.start_soon(normal, server, phase)
    return phase


async def measure(
    config: str,
    overrides: tuple[str, ...],
    counts: dict[str, int],
    *,
    clients: int,
    seconds: float,
    alone_s: float,
    report: Callable[[str], None],
) -> tuple[list[Phase], Counter[str], dict[str, float]]:
    """Run both phases.

    counts: how many hostile clients of each kind of ``HOSTILE``. clients: how many normal ones. seconds, alone_s: how
    long the normal clients ask beside hostile ones, and alone. Returns the two phases, how the hostile connections
    ended, and the server's counters of requests and of refused connections.
    """
    ends: Counter[str] = Counter()
    async with serving(config, overrides) as server, trio.open_nursery() as nursery:
        report("normal clients alone")
        phases = [await run_phase(server, Phase("alone", alone_s), clients)]
        report("beside " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
        for kind, count in counts.items():
            for _ in range(count):
                nursery.start_soon(hostile, server, kind, ends)
        phases.append(await run_phase(server, Phase("beside hostile clients", seconds), clients))
        samples = await server.samples()
        nursery.cancel_scope.cancel()
    counted = ("omni_requests_total", "omni_http_refused_connections_total")
    return phases, ends, {name: value for name, value in samples.items() if name.startswith(counted)}


@click.command()
@click.option("--config", default="tone", show_default=True, help="A pipeline that speaks; tone needs no model.")
@click.option("--slow", default=20, show_default=True, help="Clients that read 16 kB every 20 s.")
@click.option("--stalled", default=10, show_default=True, help="Clients that read nothing.")
@click.option("--slow-heads", default=0, show_default=True, help="Clients that send a byte of a head every 2 s.")
@click.option("--slow-bodies", default=0, show_default=True, help="Clients that send a byte of a body every 2 s.")
@click.option("--idle", "idle_clients", default=0, show_default=True, help="Clients that keep idle connections open.")
@click.option("--clients", default=2, show_default=True, help="Normal clients.")
@click.option("--seconds", default=30.0, show_default=True, help="Duration of the phase with hostile clients.")
@click.option("--alone-s", default=10.0, show_default=True, help="Duration of the phase without them.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the measurements to this file.")
@click.option("-s", "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a value of the pipeline.")
def main(
    config: str,
    slow: int,
    stalled: int,
    slow_heads: int,
    slow_bodies: int,
    idle_clients: int,
    clients: int,
    seconds: float,
    alone_s: float,
    json_file: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Measure what hostile clients cost normal ones, and print it."""
    counts = dict(zip(HOSTILE, (slow, stalled, slow_heads, slow_bodies, idle_clients), strict=True))

    async def run() -> tuple[list[Phase], Counter[str], dict[str, float]]:
        return await measure(
            config, overrides, counts, clients=clients, seconds=seconds, alone_s=alone_s, report=click.echo
        )

    phases, ends, counters = trio.run(run)
    for phase in phases:
        median = sorted(phase.answer_s)[len(phase.answer_s) // 2] if phase.answer_s else float("nan")
        click.echo(f"{phase.name}: {phase.rate:.2f} answers/s, median {median:.3f} s, refused {dict(phase.refused)}")
        click.echo("  peak memory: " + ", ".join(f"{name} {size / MB:.0f} MB" for name, size in phase.peaks.items()))
        click.echo("  peak gauges: " + ", ".join(f"{name} {value}" for name, value in phase.gauges.items()))
    click.echo(f"rate beside hostile clients / rate alone: {phases[1].rate / max(phases[0].rate, 1e-9):.2f}")
    click.echo(f"ends of hostile connections: {dict(ends)}")
    click.echo(f"the server's counters: {counters}")
    if json_file is not None:
        rows = [{**vars(phase), "rate": phase.rate} for phase in phases]
        json_file.write_text(json.dumps({"phases": rows, "ends": ends, "counters": counters}, indent=1))


if __name__ == "__main__":
    main()
