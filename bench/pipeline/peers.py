"""What the pipeline is compared with. None of these restarts, replays, admits or accounts for anything.

Rule: each stage receives a number and a payload, and sends both on. A peer that is not installed raises ImportError.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from multiprocessing.queues import Queue
from typing import Any, TypeAlias

import msgspec

from bench.pipeline.load import Meter, fork, running

STAGES = 3
Message: TypeAlias = tuple[int, bytes]
"""A request's number and payload."""


class MpQueues:
    """Three processes between four ``multiprocessing.Queue``. One thread of the parent sends and receives."""

    name = "multiprocessing.Queue"

    def run(self, meter: Meter) -> None:
        queues: list[Queue[Message]] = [fork.Queue() for _ in range(STAGES + 1)]
        with running(_repeat, pairwise(queues)):
            under_way = meter.cell.in_flight
            for _ in range(under_way):
                self._send(meter, queues[0])
            while under_way:
                number, payload = queues[-1].get()
                meter.complete(number, len(payload))
                under_way -= not self._send(meter, queues[0])
            with meter.idle() as idle_s:
                time.sleep(idle_s)

    def _send(self, meter: Meter, queue: Queue[Message]) -> bool:
        """Send the next request. Return False when the load is over."""
        number = meter.submit()
        if number is not None:
            queue.put((number, meter.payload))
        return number is not None


class ZmqMsgpack:
    """PUSH and PULL sockets over ipc, with msgspec's msgpack. The parent uses asyncio, a task for each client."""

    name = "ZMQ ipc + msgpack, asyncio"

    def run(self, meter: Meter) -> None:
        import zmq  # noqa: F401  (fails before a process starts)

        folder = tempfile.mkdtemp(prefix="zmq-")
        addresses = [f"ipc://{folder}/{number}" for number in range(STAGES + 1)]
        try:
            with running(_repeat_zmq, pairwise(addresses)):
                asyncio.run(self._run(meter, addresses))
        finally:
            shutil.rmtree(folder)

    async def _run(self, meter: Meter, addresses: list[str]) -> None:
        import zmq
        import zmq.asyncio

        decode = msgspec.msgpack.Decoder(tuple[int, bytes]).decode
        answers: dict[int, asyncio.Future[Message]] = {}
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as back:
            out.sndhwm = back.rcvhwm = 0
            out.bind(addresses[0])
            back.bind(addresses[-1])

            async def receive() -> None:
                while True:
                    answer = decode(await back.recv())
                    answers.pop(answer[0]).set_result(answer)

            async def ask(number: int) -> Message:
                answer = answers[number] = asyncio.get_running_loop().create_future()
                await out.send(msgspec.msgpack.encode((number, meter.payload)))
                return await answer  # it may have come while the request was being sent

            receiving = asyncio.create_task(receive())
            await _load(meter, ask)
            receiving.cancel()


class RayActors:
    """Three actors on one local node; each gets the result of the one before as its argument. The driver awaits the
    last one, with an asyncio task for each client. CPU time includes Ray's daemons."""

    name = "Ray actors"

    def run(self, meter: Meter) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise it leaves a token in the user's home
        import ray

        folder = tempfile.mkdtemp(prefix="ray-")
        try:
            ray.init(
                num_cpus=STAGES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=folder,
            )
            stages = [ray.remote(num_cpus=1)(Repeater).remote() for _ in range(STAGES)]

            async def ask(number: int) -> Message:
                message: Any = (number, meter.payload)
                for stage in stages:
                    message = stage.repeat.remote(message)
                answer: Message = await message
                return answer

            asyncio.run(_load(meter, ask))
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


class Repeater:
    """The actor of ``RayActors``."""

    def repeat(self, message: Message) -> Message:
        """Return the message."""
        return message


async def _load(meter: Meter, ask: Callable[[int], Awaitable[Message]]) -> None:
    """Carry the load of ``meter`` with asyncio tasks. ask: sends a request and returns its answer."""

    async def client() -> None:
        while (number := meter.submit()) is not None:
            answered, payload = await ask(number)
            meter.complete(answered, len(payload))

    await asyncio.gather(*(client() for _ in range(meter.cell.in_flight)))
    with meter.idle() as idle_s:
        await asyncio.sleep(idle_s)


def _repeat(source: Queue[Message], target: Queue[Message]) -> None:
    while True:
        target.put(source.get())


def _repeat_zmq(source: str, target: str) -> None:
    import zmq

    decode, encode = msgspec.msgpack.Decoder(tuple[int, bytes]).decode, msgspec.msgpack.Encoder().encode
    with zmq.Context() as context, context.socket(zmq.PULL) as incoming, context.socket(zmq.PUSH) as outgoing:
        outgoing.sndhwm = incoming.rcvhwm = 0
        # The parent binds the first and the last address, and each stage the address that the next one connects to.
        incoming.connect(source)
        (outgoing.connect if target.endswith(f"/{STAGES}") else outgoing.bind)(target)
        while True:
            outgoing.send(encode(decode(incoming.recv())))
