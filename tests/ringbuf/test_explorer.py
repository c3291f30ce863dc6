"""The protocol under all interleavings, and the bugs that would be found that way.

``RINGBUF_EXPLORE=large`` explores longer scripts: minutes instead of seconds.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from ringbuf import Consumer, PeerDied, Producer, RingClosed
from ringbuf._words import ConsumerEnd, ProducerEnd
from tests.ringbuf.explorer import explore
from tests.ringbuf.machine import End, Scenario, Violation
from tests.ringbuf.side import Action, Parts, Side

MORE = os.environ.get("RINGBUF_EXPLORE") == "large"


def producer_of(side: Side) -> Producer:
    assert side.producer is not None
    return side.producer


def consumer_of(side: Side) -> Consumer:
    assert side.consumer is not None
    return side.consumer


# What a producer does.


def send(size: int) -> Action:
    """Until the consumer is gone."""

    def action(side: Side) -> None:
        message = side.message(size)
        try:
            producer_of(side).send(message)
        except (RingClosed, PeerDied):
            return
        side.note(message)

    return action


def send_again(size: int) -> Action:
    """To whoever succeeds a consumer that died."""

    def action(side: Side) -> None:
        message = side.message(size)
        while True:
            try:
                producer_of(side).send(message)
                break
            except PeerDied:
                side.await_successor()
        side.note(message)

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


def reserve(size: int) -> Action:
    def action(side: Side) -> None:
        message = side.message(size)
        view = producer_of(side).try_reserve(size)
        if view is not None:
            view[:] = message
            del view

    return action


def commit(side: Side) -> None:
    producer = producer_of(side)
    if producer._reserved is not None:
        message = bytes(producer._reserved)
        producer.commit()
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


def take_all(side: Side) -> bool:
    """Until nobody sends."""
    try:
        side.take(consumer_of(side).recv())
    except (RingClosed, PeerDied):
        return False
    side.release(0)
    return True


def take_all_in_time(side: Side) -> bool:
    """Asking again each time."""
    try:
        side.take(consumer_of(side).recv(timeout=1))
    except TimeoutError:
        return True
    except RingClosed:
        return False
    side.release(0)
    return True


def take_all_lives(side: Side) -> bool:
    """Also from whoever succeeds a producer that died."""
    try:
        side.take(consumer_of(side).recv())
    except PeerDied:
        side.await_successor()
        return True
    except RingClosed:
        return False
    side.release(0)
    return True


def take_polling(sleeps: bool) -> Action:
    """As an event loop does, or spinning."""

    def action(side: Side) -> bool:
        consumer = consumer_of(side)
        try:
            frame = consumer.try_recv()
        except RingClosed:
            return False
        if frame is not None:
            side.take(frame)
            side.release(0)
        elif sleeps and consumer.park():
            side.waiter.wait(None)
        return True

    return action


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
    told = tuple(message for message in sent if message[0] <= 100)
    assert first[: len(told)] == told
    assert len(first) - len(told) in (0, 1)
    assert end.words["head"] == end.words["tail"]


def nobody_hangs(end: End) -> None:
    """The consumer may have died with messages that it took."""
    sent, received = end.notes
    shared = min(len(sent), len(received))
    assert received[:shared] == sent[:shared]
    assert end.words["producer waits for"] == 0


def the_unreleased_came_again(end: End) -> None:
    sent, received = end.notes
    assert any(
        received == sent[:taken] + sent[released:]
        for taken in range(len(sent) + 1)
        for released in range(taken + 1)
    ), (sent, received)
    assert end.words["messages"] == len(sent)
    assert end.words["head"] == end.words["tail"]
    assert end.words["producer waits for"] == 0


n = 2 if MORE else 1
FRAGMENTED = 64 * (6 if MORE else 4)

SCENARIOS = {
    "blocking": Scenario(((*[send(64)] * (2 + n), close), (take_all, close)), all_arrived),
    "polling": Scenario(((*[send(64)] * (1 + n), close), (take_polling(True), close)), all_arrived),
    "spinning": Scenario(((*[send(64)] * (2 + n), close), (take_polling(False), close)), all_arrived),
    "trying": Scenario(((*[try_send(64)] * (2 + n), close), (take_all, close)), all_arrived),
    "exactly full": Scenario(((*[send(0)] * (4 + n), close), (take_all, close)), all_arrived),
    "empty and not": Scenario(((send(0), send(64), send(1), send(0)), (*[take_one, give_back(0)] * 4,)), all_arrived),
    "wrap": Scenario(((send(192), send(128), send(192), close), (take_all, close)), all_arrived, 512),
    "fragments": Scenario(((send(FRAGMENTED), close), (take_all, close)), all_arrived, 512),
    "unsent": Scenario(
        ((unsend(640), send(64), close), (take_all, close)), all_arrived_but_the_unsent, 512
    ),
    "reserved": Scenario(
        ((reserve(64), commit, reserve(64), abandon, reserve(0), commit, reserve(64), commit, close), (take_all, close)),
        all_arrived,
    ),
    "out of order": Scenario(
        (
            (*[send(0)] * (4 + n),),
            (take_one, take_one, take_one, give_back(1), give_back(1), give_back(0), *[take_one, give_back(0)] * (1 + n)),
        ),
        all_arrived,
    ),
    "consumer closes": Scenario(((*[send(64)] * (2 + n), close), (take_one, give_back(0), close)), some_arrived),
    "timeouts": Scenario(((*[send_in_time(64)] * (1 + n), close), (take_all_in_time, close)), all_arrived),
    "late claims": Scenario(((*[send(64)] * (1 + n), close), (take_all, close)), all_arrived, claims=True),
    "checksums": Scenario(((*[send(64)] * (1 + n), close), (take_all, close)), all_arrived, checksums=True),
    "onlooker": Scenario(((send(64), close), (take_all, close), (look_on,)), all_arrived),
    "producer dies": Scenario(
        ((*[send(64)] * (1 + n), close), (take_all,)), the_published_arrived, mortal=0
    ),
    "producer succeeded": Scenario(
        ((send(64), send(64)), (take_all_lives,)),
        the_published_and_the_successors_arrived,
        mortal=0,
        successor=(send(64), close),
    ),
    "consumer dies": Scenario(((*[send(64)] * (2 + n),), (take_all,)), nobody_hangs, mortal=1),
    "consumer succeeded": Scenario(
        ((*[send_again(64)] * (2 + n), close), (take_all,)), the_unreleased_came_again, mortal=1, successor=(take_all,)
    ),
}
