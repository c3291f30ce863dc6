"""`python -m bench.readers`: a server whose clients read slowly or not at all, and what it costs the others.

It starts a server of its own on 127.0.0.1. First, normal clients ask in a closed loop, alone; then beside ``--slow``
clients that read 16 kB each 20 s, and ``--stalled`` ones that read nothing, of a speech of 4,096 characters each. A
client whose connection is closed by the server does not come back. Reported are the normal clients' rates and refusals,
and the largest resident memory of the server and of its workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
import trio

from bench import tone

LONG = ("The sea is wide, and the ships on it are many. " * 90)[:4096]
SHORT = "It is late. Good night."
SLOW_BYTES, SLOW_S = 16_384, 20.0
LOOK_S = 0.5
RETRY_S = 0.25
"""After which a normal client that was refused asks again."""
MB = 1e6


@dataclass
class Phase:
    """What was seen in one part of the run. peaks: bytes, by process."""

    name: str
    seconds: float
    answers: int = 0
    answer_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)
    gauges: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.answers / self.seconds


class Server:
    """A server process and its metrics."""

    def __init__(self, process: subprocess.Popen[str], port: int, model: str) -> None:
        self.process, self.port, self.model = process, port, model

    async def request(self, head: str, body: bytes = b"") -> trio.SocketStream:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        lines = (head, "Host: 127.0.0.1", "Connection: close", "Content-Type: application/json")
        await stream.send_all("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
        return stream

    async def speak(self, text: str) -> trio.SocketStream:
        body = {"model": self.model, "voice": "alloy", "input": text, "response_format": "pcm"}
        return await self.request("POST /v1/audio/speech HTTP/1.1", json.dumps(body).encode())

    async def gauges(self) -> dict[str, float]:
        async with await self.request("GET /metrics HTTP/1.1") as stream:
            lines = (await read_all(stream)).decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if line.startswith("omni_")]
        return {name: float(value) for name, _, value in samples}

    def memory(self) -> dict[str, int]:
        """Resident bytes of the server, and of its workers together."""
        parent = psutil.Process(self.process.pid)
        workers = [worker.memory_info().rss for worker in parent.children(recursive=True)]
        return {"server": parent.memory_info().rss, "workers": sum(workers), "largest worker": max(workers, default=0)}


async def read_all(stream: trio.SocketStream) -> bytes:
    return b"".join([part async for part in stream])


@asynccontextmanager
async def serving(config: str, overrides: tuple[str, ...]) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        model = config
        if config == "tone":
            file = Path(folder) / "tone.yaml"
            file.write_text(tone.CONFIG)
            config = str(file)
        command = [sys.executable, "-u", "-m", "omni_actors.serve", config, "--port", "0"]
        command += [part for override in overrides for part in ("-s", override)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(  # noqa: ASYNC220 - it does not block
            command, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            port = await trio.to_thread.run_sync(_wait_ready, process)
            yield Server(process, port, model)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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


async def slow(server: Server, ends: Counter[str], size: int) -> None:
    """Ask for a long speech, and read ``size`` bytes of it each ``SLOW_S``; 0: none."""
    try:
        async with await server.speak(LONG) as stream:
            while True:
                await trio.sleep(SLOW_S)
                if size and not await stream.receive_some(size):
                    break
        ends["closed"] += 1
    except trio.BrokenResourceError:
        ends["reset"] += 1


async def watch(server: Server, phase: Phase) -> None:
    while True:
        for name, size in (await trio.to_thread.run_sync(server.memory)).items():
            phase.peaks[name] = max(phase.peaks[name], size)
        gauges = await server.gauges()
        for name in ("omni_unread_bytes", "omni_requests_paused", "omni_requests_in_flight"):
            phase.gauges[name] = max(phase.gauges[name], int(gauges.get(name, 0)))
        await trio.sleep(LOOK_S)


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
    counts: tuple[int, int, int],
    seconds: float,
    alone_s: float,
    say: Callable[[str], None],
) -> tuple[list[Phase], Counter[str], dict[str, float]]:
    """counts: slow, stalled and normal clients. Returns the phases, how slow clients ended, the outcomes counted."""
    ends: Counter[str] = Counter()
    slow_clients, stalled_clients, clients = counts
    async with serving(config, overrides) as server, trio.open_nursery() as nursery:
        say("normal clients alone")
        phases = [await run_phase(server, Phase("alone", alone_s), clients)]
        say(f"beside {slow_clients} slow and {stalled_clients} stalled ones")
        for i in range(slow_clients + stalled_clients):
            nursery.start_soon(slow, server, ends, SLOW_BYTES if i < slow_clients else 0)
        phases.append(await run_phase(server, Phase("beside slow readers", seconds), clients))
        gauges = await server.gauges()
        nursery.cancel_scope.cancel()
    outcomes = {name: value for name, value in gauges.items() if name.startswith("omni_requests_total")}
    return phases, ends, outcomes


@click.command()
@click.option("--config", default="tone", show_default=True, help="A pipeline that speaks; tone has no model.")
@click.option("--slow", "slow_clients", default=20, show_default=True, help="Clients that read 16 kB each 20 s.")
@click.option("--stalled", default=10, show_default=True, help="Clients that read nothing.")
@click.option("--clients", default=2, show_default=True, help="Normal clients.")
@click.option("--seconds", default=30.0, show_default=True, help="Of normal clients beside slow ones.")
@click.option("--alone-s", default=10.0, show_default=True, help="Of normal clients alone, before.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("-s", "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a value of the pipeline.")
def main(
    config: str,
    slow_clients: int,
    stalled: int,
    clients: int,
    seconds: float,
    alone_s: float,
    json_file: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Measure and print what was seen."""
    counts = (slow_clients, stalled, clients)
    phases, ends, outcomes = trio.run(measure, config, overrides, counts, seconds, alone_s, click.echo)
    for phase in phases:
        median = sorted(phase.answer_s)[len(phase.answer_s) // 2] if phase.answer_s else float("nan")
        click.echo(f"{phase.name}: {phase.rate:.2f} answers/s, median {median:.3f} s, refused {dict(phase.refused)}")
        click.echo("  peaks: " + ", ".join(f"{name} {size / MB:.0f} MB" for name, size in phase.peaks.items()))
        click.echo("  highest: " + ", ".join(f"{name} {value}" for name, value in phase.gauges.items()))
    click.echo(f"rate beside slow readers / alone: {phases[1].rate / max(phases[0].rate, 1e-9):.2f}")
    click.echo(f"slow clients that were cut: {dict(ends)}; requests by outcome: {outcomes}")
    if json_file is not None:
        rows = [{**vars(phase), "rate": phase.rate} for phase in phases]
        json_file.write_text(json.dumps({"phases": rows, "cut": ends, "outcomes": outcomes}, indent=1))


if __name__ == "__main__":
    main()
