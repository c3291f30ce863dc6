"""Two processes exchange messages of every size and die suddenly: no message is altered, reordered or lost.

``RINGBUF_SOAK_S`` is the duration in seconds (default: 1). ``RINGBUF_SOAK_SEED`` is the seed of the messages and deaths
(default: 0; "new" draws one). ``pytest -s`` shows what was counted.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections import Counter
from typing import NamedTuple

from ringbuf import Ring
from tests.ringbuf.child_processes import WATCHDOG_S, Child, ChildHost
from tests.ringbuf.soak_scripts import CAPACITY, is_fragmented

SOAK_S = float(os.environ.get("RINGBUF_SOAK_S", "1"))


class Message(NamedTuple):
    """life: the life of the producer that sent it. A successor sends a message again that was not reported."""

    number: int
    life: int


def messages(child: Child, verb: str) -> list[Message]:
    return [Message(*map(int, line.split()[1:])) for line in child.reports if line.split()[0] == verb]


def follows(message: Message, before: Message) -> bool:
    if message.life == before.life:
        return message.number == before.number + 1
    return message.life > before.life and message.number in (before.number, before.number + 1)


def check(consumers: list[Child], last: int) -> Counter[str]:
    """The consumers received 1 … ``last`` one after the other, in order."""
    counts: Counter[str] = Counter()
    stream = [Message(0, 0)]
    released = set(stream)
    for consumer in consumers:
        got = messages(consumer, "got")
        if got and got[0] in stream:
            at = stream.index(got[0])
            assert not released.issuperset(stream[: at + 1]), f"{got[0]} came again, though its bytes were given back"
            released.difference_update(stream[at:])  # what was released behind a held frame was not given back
            assert stream[at:][: len(got)] == got[: len(stream) - at]
            counts["came again"] += min(len(got), len(stream) - at)
            got = got[len(stream) - at :]
        elif got:
            # What came in fragments, and nothing else, is lost with the consumer that had taken some of them.
            gone = range(stream[-1].number + 1, got[0].number)
            assert all(map(is_fragmented, gone)), f"{stream[-1]}, then {got[0]}"
            counts["lost with a consumer"] += len(gone)
            stream.append(got.pop(0))
        for message in got:
            assert follows(message, stream[-1]), f"{stream[-1]}, then {message}"
            stream.append(message)
        released.update(messages(consumer, "released"))
    gone = range(stream[-1].number + 1, last + 1)
    assert all(map(is_fragmented, gone)), f"{stream[-1]}, then nothing"
    counts["lost with a consumer"] += len(gone)
    counts["messages"] += len(stream) - 1
    return counts


def soak(ring: Ring, upstream: ChildHost, downstream: ChildHost, last: int, rng: random.Random) -> Counter[str]:
    """Run one ring from its first message to its last, through the deaths of both ends."""
    producers = [upstream.start(ring, "producer", 1, 1, last)]
    consumers = [downstream.start(ring, "consumer", 0)]
    deaths = rng.choice((0, 2, 10))
    while not producers[-1].status == consumers[-1].status == 0:
        living = [child for child in (producers[-1], consumers[-1]) if child.status is None]
        ready, _, _ = select.select(living, [], [], WATCHDOG_S)
        assert ready, "they wait for each other"
        for child in ready:
            if not child.read():
                child.wait()
        if deaths and rng.random() < 0.02:
            rng.choice(living).kill()
            deaths -= 1
        for child in living:
            assert child.status in (None, 0, signal.SIGKILL), "\n".join(child.reports[-20:])
        if producers[-1].status:
            sent = [line.split()[1] for child in producers for line in child.reports if line.startswith("sent")]
            first = int(sent[-1]) + 1 if sent else 1
            producers.append(upstream.start(ring, "producer", len(producers) + 1, first, last))
        if consumers[-1].status:
            consumers.append(downstream.start(ring, "consumer", len(consumers)))
    assert ring.statistics().used == 0
    counts = check(consumers, last)
    counts["dead producers"] += len(producers) - 1
    counts["dead consumers"] += len(consumers) - 1
    return counts


def test_soak() -> None:
    given = os.environ.get("RINGBUF_SOAK_SEED", "0")
    seed = random.SystemRandom().randrange(1 << 32) if given == "new" else int(given)
    rng = random.Random(seed)
    print(f"seed {seed}")
    counts: Counter[str] = Counter()
    with ChildHost("tests.ringbuf.soak_scripts") as upstream, ChildHost("tests.ringbuf.soak_scripts") as downstream:
        finish = time.monotonic() + SOAK_S
        while not counts["rings"] or time.monotonic() < finish:
            counts["rings"] += 1
            with Ring.create(CAPACITY, generation=counts["rings"], checksums=rng.random() < 0.5) as ring:
                counts += soak(ring, upstream, downstream, rng.choice((20, 200, 1000)), rng)
    print(*(f"{count} {what}" for what, count in counts.items()), sep=", ")
    assert counts["messages"]
