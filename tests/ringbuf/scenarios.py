"""Actions of the sides of a ring, the outcomes that must hold, and the scenarios to explore.

Sizes are the smallest that show a behaviour. With ``RINGBUF_EXPLORE=large`` each side repeats its action once, which
takes minutes instead of seconds.
"""

from __future__ import annotations

import os

from ringbuf import Consumer, PeerDied, Producer, RingClosed
from tests.ringbuf.machine import End, Scenario
from tests.ringbuf.side import Action, Script, Side

MORE = int(os.environ.get("RINGBUF_EXPLORE") == "large")


def producer_of(side: Side) -> Producer:
    assert side.producer is not None
    return side.producer


def consumer_of(side: Side) -> Consumer:
    assert side.consumer is not None
    return side.consumer


# What a producer does.


def send(size: int) -> Action:
    """Send, unless the consumer has closed or died."""

    def action(side: Side) -> None:
        message = side.message(size)
        try:
            producer_of(side).send(message)
        except (RingClosed, PeerDied):
            return
        side.note(message)

    return action


def send_again(size: int) -> Action:
    """Send again to the successor of a consumer that died."""

    def action(side: Side) -> bool:
        message = side.message(size)
        try:
            producer_of(side).send(message)
        except PeerDied:
            side.written -= 1
            side.await_successor()
            return True
        side.note(message)
        return False

    return action


def send_in_time(size: int) -> Action:
    def action(side: Side) -> None:
        message = side.message(size)
        try:
            producer_of(side).send(message, timeout=1)
        except TimeoutError:
            return
        side.note(message)

    return action


def try_send(size: int) -> Action:
    def action(side: Side) -> None:
        message = side.message(size)
        if producer_of(side).try_send(message):
            side.note(message)

    return action


def unsend(size: int) -> Action:
    """At the first wait."""

    def action(side: Side) -> None:
        message = side.message(size)
        parts = producer_of(side).sending(message)
        for _ in parts:
            parts.close()
            return
        side.note(message)

    return action


def offer(size: int) -> Action:
    """As an event loop does."""

    def action(side: Side) -> bool:
        producer, message = producer_of(side), side.message(size)
        if producer.try_send(message):
            side.note(message)
            return False
        side.written -= 1
        if producer.park():
            side.waiter.wait(None)
        return True

    return action


def reserve(size: int) -> Action:
    def action(side: Side) -> None:
        producer_of(side).reserve(size)[:] = side.message(size)

    return action


def commit(side: Side) -> None:
    reserved = producer_of(side)._reserved
    assert reserved is not None
    message = bytes(reserved)
    producer_of(side).commit()
    side.note(message)


def abandon(side: Side) -> None:
    producer_of(side).abandon()


def close(side: Side) -> None:
    (side.producer or consumer_of(side)).close()


# What a consumer does.


def take_one(side: Side) -> None:
    side.take(consumer_of(side).recv())


def give_back(index: int) -> Action:
    return lambda side: side.release(index)


def take(count: int) -> Script:
    """Each given back at once."""
    return (take_one, give_back(0)) * count


def take_all(side: Side) -> bool:
    """Receive until the producer has closed or died."""
    try:
        side.take(consumer_of(side).recv())
    except (RingClosed, PeerDied):
        return False
    side.release(0)
    return True


def take_in_time(count: int) -> Action:
    """Asking again each time."""

    def action(side: Side) -> bool:
        try:
            side.take(consumer_of(side).recv(timeout=1))
        except TimeoutError:
            return True
        side.release(0)
        return len(side.notes) < count

    return action


def take_polling(last: int, sleeps: bool = True) -> Action:
    """As an event loop does, or spinning, until the message of that number, or the end."""

    def action(side: Side) -> bool:
        consumer = consumer_of(side)
        try:
            frame = consumer.try_recv()
        except RingClosed:
            return False
        if frame is not None:
            side.take(frame)
            side.release(0)
            return bool(side.notes[-1][:1] < bytes([last]))
        if sleeps and consumer.park():
            side.waiter.wait(None)
        return True

    return action


def take_until_the_successors(side: Side) -> bool:
    consumer = consumer_of(side)
    frame = consumer.try_recv()
    if frame is not None:
        side.take(frame)
        side.release(0)
        return side.notes[-1][0] <= 100
    if consumer.park():
        try:
            side.waiter.wait(None)
        except PeerDied:
            side.await_successor()
    return True


def look_on(side: Side) -> None:
    before = side.segment.counts()
    assert 0 <= side.segment.used() <= side.segment.capacity
    after = side.segment.counts()
    assert before[0] <= after[0]
    assert before[1] <= after[1]


# How it must end.


def all_arrived(end: End) -> None:
    sent, received = end.notes[:2]
    assert received == sent
    assert end.words["messages"] == len(sent)
    assert end.words["payload bytes"] == sum(map(len, sent))
    assert end.words["head"] == end.words["tail"]
    both_awake(end)


def all_arrived_but_the_unsent(end: End) -> None:
    """Fragments that were sent count as bytes."""
    sent, received = end.notes
    assert received == sent
    assert end.words["messages"] == len(sent)
    assert end.words["head"] == end.words["tail"]
    both_awake(end)


def some_arrived(end: End) -> None:
    sent, received = end.notes
    assert received == sent[: len(received)]
    assert end.words["messages"] == len(sent)
    both_awake(end)


def both_awake(end: End) -> None:
    assert end.words["producer waits for"] == end.words["consumer waits for"] == 0


def the_published_arrived(end: End) -> None:
    """The producer may have died between publishing a message and saying so, or between counting and publishing it."""
    sent, received = end.notes
    assert received[: len(sent)] == sent
    assert len(received) - len(sent) in (0, 1)
    assert end.words["messages"] - len(received) in (0, 1)
    assert end.words["head"] == end.words["tail"]


def the_published_and_the_successors_arrived(end: End) -> None:
    sent, received = end.notes
    first = tuple(message for message in received if message[0] <= 100)
    second = tuple(message for message in received if message[0] > 100)
    assert received == first + second
    assert second == tuple(message for message in sent if message[0] > 100)
    reported = tuple(message for message in sent if message[0] <= 100)
    assert first[: len(reported)] == reported
    assert len(first) - len(reported) in (0, 1)
    assert end.words["head"] == end.words["tail"]


def no_side_hangs(end: End) -> None:
    """The consumer may have died with messages that it took."""
    sent, received = end.notes
    shared = min(len(sent), len(received))
    assert received[:shared] == sent[:shared]
    assert end.words["producer waits for"] == 0


def the_unreleased_came_again(end: End, lost: int = 0) -> None:
    sent, received = end.notes
    assert any(
        received == sent[:taken] + sent[released:]
        for taken in range(len(sent) + 1)
        for released in range(max(taken, lost) + 1)
    )
    assert end.words["messages"] == len(sent)
    assert end.words["head"] == end.words["tail"]


def perhaps_without_the_first(end: End) -> None:
    """A message in fragments is lost with the consumer that took the first of them."""
    the_unreleased_came_again(end, lost=1)


def messages(*sizes: int) -> Script:
    """And the first size once more when there is time."""
    return (*map(send, sizes), *map(send, sizes[:MORE]))


def taken(count: int) -> Script:
    return take(count + MORE)


SCENARIOS = {
    "blocking": Scenario((messages(64, 64, 64), taken(3)), all_arrived),
    "polling": Scenario(((offer(64),) * (3 + MORE), (take_polling(3 + MORE),)), all_arrived),
    "spinning": Scenario((messages(64, 64, 64), (take_polling(3 + MORE, sleeps=False),)), all_arrived),
    "trying": Scenario(((*(try_send(64),) * 3, close), (take_all,)), all_arrived),
    "exactly full": Scenario((messages(0, 0, 0), taken(3)), all_arrived, 128),
    "empty and not": Scenario((messages(0, 64, 1), taken(3)), all_arrived),
    "wrap": Scenario((messages(192, 192, 64), taken(3)), all_arrived, 512, 64),
    "rewind": Scenario((messages(0, 0, 64), taken(3)), all_arrived),
    "fragments": Scenario((messages(225), (take_polling(1 + MORE),)), all_arrived, 576, 64),
    "unsent": Scenario(((unsend(225), send(64)), (take_polling(2),)), all_arrived_but_the_unsent, 576, 64),
    "reserved": Scenario(
        ((reserve(64), commit, reserve(64), abandon, reserve(0), commit, reserve(64), commit), take(3)),
        all_arrived,
    ),
    "out of order": Scenario(
        (
            messages(0, 0, 0, 0),
            (take_one, take_one, give_back(1), take_one, give_back(1), give_back(0), *taken(1)),
        ),
        all_arrived,
        192,
    ),
    "held past the end": Scenario(
        (messages(64, 64, 64), (take_one, take_one, give_back(1), give_back(0), *taken(1))),
        all_arrived,
        320,
        128,
    ),
    "both close": Scenario(((*messages(64, 64), close), (take_all, close)), all_arrived),
    "consumer closes": Scenario((messages(64, 64, 64, 64), (*take(1), close)), some_arrived),
    "timeouts of the producer": Scenario(((*(send_in_time(64),) * 3, close), (take_all,)), all_arrived),
    "timeouts of the consumer": Scenario((messages(64, 64, 64), (take_in_time(3 + MORE),)), all_arrived),
    "claims": Scenario((messages(64, 64), taken(2)), all_arrived, claims=True),
    "checksums": Scenario((messages(64, 64), taken(2)), all_arrived, checksums=True),
    "onlooker": Scenario((messages(64), taken(1), (look_on,)), all_arrived),
    "producer dies": Scenario(((*messages(64, 64), close), (take_all,)), the_published_arrived, mortal=0),
    "producer succeeded": Scenario(
        (messages(64), (take_until_the_successors,)),
        the_published_and_the_successors_arrived,
        mortal=0,
        successor=(send(64),),
        claims=True,
    ),
    "producer succeeded in fragments": Scenario(
        (messages(225), (take_until_the_successors,)),
        the_published_and_the_successors_arrived,
        576,
        mortal=0,
        successor=(send(64),),
    ),
    "consumer dies": Scenario(((*messages(64, 64, 64), close), (take_all,)), no_side_hangs, mortal=1),
    "consumer succeeded": Scenario(
        ((send_again(64), send_again(64), close), (take_all,)),
        the_unreleased_came_again,
        mortal=1,
        successor=(take_all,),
    ),
    "consumer succeeded in fragments": Scenario(
        ((send_again(225), close), (take_polling(1),)),
        perhaps_without_the_first,
        576,
        mortal=1,
        successor=(take_polling(1),),
    ),
}
