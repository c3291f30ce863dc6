"""Processes that die at a chosen step of what they do with a ring.

Rule 1: a step is one access to what both sides share: a word's load or store, half a copy of a payload, a bell's ring
or hush, going to sleep at it. A child kills itself just before its n-th step of one kind; the last kind is the end of
its script. (Of one kind: how many steps there are in all depends on which of the two is faster.)
Rule 2: children are forked by a small process of one thread (this file, run as a program), so that hundreds of them
cost little, and nothing of the test's own process is in them.
Rule 3: what a child has got done it tells through a pipe, which outlives it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringbuf
from ringbuf import Frame, Ring, RingClosed
from ringbuf._claim import Waiter
from ringbuf._words import CONSUMER, HEADER, PRODUCER, RECORD, Bell

CAPACITY = 4096
START = 3328
"""Position at which the rings begin, so that the third message meets the end of the data area."""
WATCHDOG_S = 30.0

MESSAGES = tuple(bytes([65 + n]) * size for n, size in enumerate((10, 500, 1000, 0, 64, 700)))
BIG = b"".join(n.to_bytes(4, "little") for n in range(CAPACITY // 4 * 3 // 2))
STREAM = (b"first", BIG, b"third")
FILLING = (b"a" * 1984, b"b" * 1984, b"c" * 100)

DIED = "died"

Step = Callable[[str], None]
Tell = Callable[[str], None]

NAMES = {8 * index: f"header word {index}" for index in range(HEADER // 8)} | {
    8 * getattr(column, field): f"{column.end}.{field}"
    for column in (PRODUCER, CONSUMER)
    for field in ("position", "waits", "closed", "claim")
}


def name_of(index: int) -> str:
    return NAMES[8 * index] if 8 * index < HEADER else f"record word {index % (RECORD // 8)}"


class SteppingWords:
    def __init__(self, words: memoryview, step: Step) -> None:
        self._words, self._step = words, step

    def __getitem__(self, index: int) -> int:
        self._step(f"load {name_of(index)}")
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._step(f"store {name_of(index)}")
        self._words[index] = value

    def release(self) -> None:
        self._words.release()


class SteppingData:
    def __init__(self, data: memoryview, step: Step) -> None:
        self._data, self._step = data, step

    def __getitem__(self, place: slice) -> memoryview:
        self._step("look at a payload")
        return self._data[place]

    def __setitem__(self, place: slice, piece: bytes | memoryview) -> None:
        middle = place.start + len(piece) // 2
        self._step("copy a payload")
        self._data[place.start : middle] = piece[: len(piece) // 2]
        self._step("copy a payload's second half")
        self._data[middle : place.stop] = piece[len(piece) // 2 :]

    def release(self) -> None:
        self._data.release()


def stepping(method: Callable[..., Any], label: str, step: Step) -> Callable[..., Any]:
    def stepped(*arguments: Any) -> Any:
        step(label)
        return method(*arguments)

    return stepped


def send_whole(ring: Ring, step: Step, tell: Tell) -> None:
    producer = ring.claim_producer()
    for number, message in enumerate(MESSAGES[:4]):
        producer.send(message)
        tell(f"sent {number}")
    for number, message in enumerate(MESSAGES[4:], 4):
        for commit in (False, True):
            view = producer.try_reserve(len(message))
            assert view is not None
            view[: len(message) // 2] = message[: len(message) // 2]
            step("fill a reservation's second half")
            view[len(message) // 2 :] = message[len(message) // 2 :]
            if commit:
                producer.commit()
                tell(f"sent {number}")
            else:
                producer.abandon()
    producer.close()


def send_all(ring: Ring, messages: tuple[bytes, ...], tell: Tell) -> None:
    producer = ring.claim_producer()
    for number, message in enumerate(messages):
        producer.send(message, timeout=WATCHDOG_S)
        tell(f"sent {number}")
    producer.close()


def receive_whole(ring: Ring, step: Step, tell: Tell) -> None:
    consumer = ring.claim_consumer()
    held: dict[int, Frame] = {}

    def release(number: int) -> None:
        tell(f"releasing {number}")
        held.pop(number).release()
        tell(f"released {number}")

    for number, message in enumerate(MESSAGES):
        held[number] = consumer.recv()
        step("read a payload")
        assert held[number].data == message
        if number == 0:
            release(0)
        if number == 2:
            release(2)
            release(1)
    for number in (4, 3, 5):
        release(number)
    consumer.close()


def receive_all(ring: Ring, messages: tuple[bytes, ...], tell: Tell) -> None:
    consumer = ring.claim_consumer()
    for number, message in enumerate(messages):
        frame = consumer.recv(WATCHDOG_S)
        assert frame.data == message
        tell(f"releasing {number}")
        frame.release()
        tell(f"released {number}")
    try:
        consumer.recv(WATCHDOG_S)
    except RingClosed:
        consumer.close()


SCRIPTS: dict[str, Callable[[Ring, Step, Tell], None]] = {
    "send whole": send_whole,
    "send fragments": lambda ring, step, tell: send_all(ring, STREAM, tell),
    "send into a full ring": lambda ring, step, tell: send_all(ring, FILLING, tell),
    "receive whole": receive_whole,
    "receive fragments": lambda ring, step, tell: receive_all(ring, STREAM, tell),
    "receive from an empty ring": lambda ring, step, tell: receive_all(ring, MESSAGES[:2], tell),
}


def live(script: str, fatal: str, occurrence: int, generation: int, fds: list[int], report: int) -> None:
    """In the child."""
    counts: Counter[str] = Counter()

    def tell(line: str) -> None:
        os.write(report, f"{line}\n".encode())

    def step(label: str) -> None:
        if label == fatal and counts[label] == occurrence:
            tell(DIED)
            os.kill(os.getpid(), signal.SIGKILL)
        counts[label] += 1

    ring = Ring.attach(fds, generation=generation)
    segment = ring._segment
    segment.words = SteppingWords(segment.words, step)  # type: ignore[assignment]
    segment.data = SteppingData(segment.data, step)  # type: ignore[assignment]
    Bell.ring = stepping(Bell.ring, "ring", step)  # type: ignore[method-assign]
    Bell.hush = stepping(Bell.hush, "hush", step)  # type: ignore[method-assign]
    Waiter.wait = stepping(Waiter.wait, "sleep", step)  # type: ignore[method-assign]
    SCRIPTS[script](ring, step, tell)
    ring.close()
    step("end")
    tell("took " + "; ".join(counts))


class Child:
    """A process that runs a script. ``told`` is complete once it is dead."""

    def __init__(self, pid: int, report: int, server: socket.socket) -> None:
        self.pid, self._report, self._server = pid, report, server
        self.told: list[str] = []
        self.status: int | None = None

    def is_dead(self) -> bool:
        return bool(select.select([self._server], [], [], 0)[0])

    def wait(self) -> None:
        """Until it died, by its own signal or at the end of its script."""
        with open(self._report) as report:
            self.told += report.read().splitlines()
        self.status = int(self._server.recv(64))
        expected = signal.SIGKILL if DIED in self.told else 0
        assert self.status == expected, f"status {self.status}: " + "\n".join(self.told)

    def steps(self) -> list[str]:
        """All kinds that there were. Of one that came to its end."""
        return self.told[-1].removeprefix("took ").split("; ")

    def numbers(self, verb: str) -> set[int]:
        return {int(line.split()[1]) for line in self.told if line.split()[0] == verb}


class Nursery:
    """The small process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(WATCHDOG_S)
        self._child: Child | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(ringbuf.__file__).parent.parent),
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )

    def bear(self, script: str, fatal: str, occurrence: int, ring: Ring) -> Child:
        read, write = os.pipe()
        request = json.dumps([script, fatal, occurrence, ring.generation]).encode()
        socket.send_fds(self._socket, [request], [*ring.fds, write])
        os.close(write)
        self._child = Child(int(self._socket.recv(64)), read, self._socket)
        return self._child

    def end_child(self) -> list[str]:
        """What the last one told. It is killed, if need be: a test failed."""
        if (child := self._child) is None:
            return []
        if child.status is None:
            os.kill(child.pid, signal.SIGKILL)  # not somebody else's number: it is not collected before we ask
            child.wait()
        return child.told

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(WATCHDOG_S) == 0


def serve(server: socket.socket) -> None:
    while True:
        request, fds, _, _ = socket.recv_fds(server, 4096, 4)
        if not request:
            return
        script, fatal, occurrence, generation = json.loads(request)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                server.close()
                live(script, fatal, occurrence, generation, fds[:3], fds[3])
                status = 0
            except BaseException:
                os.write(fds[3], traceback.format_exc().encode())
                raise
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        server.send(str(pid).encode())
        server.send(str(os.waitpid(pid, 0)[1]).encode())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as server:
        serve(server)
