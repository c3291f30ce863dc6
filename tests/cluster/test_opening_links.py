"""Links until they are open: a connection that ends before is one attempt, and costs no record."""

from __future__ import annotations

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_actors.cluster.link import ALIVE, HEADER
from omni_actors.cluster.pump import Pump
from ringbuf import Ring
from tests.cluster.linked_rings import LONG_S, SECRET, WATCHDOG_S, LinkedRings, open_pump
from tests.cluster.strangers import accept_and_shake_hands, give_up_link, wait_forgotten
from tests.support.open_descriptors import open_descriptors

RESET = b"\1\0\0\0\0\0\0\0"
MESSAGE = b"the first record"


def test_a_connection_that_is_dropped_before_the_link_is_open_is_tried_again() -> None:
    def serve() -> bytes:
        for _ in range(2):
            with accept_and_shake_hands(listener) as dropped:
                dropped.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        with accept_and_shake_hands(listener) as accepted:
            accepted.sendall(ALIVE)
            return accepted.recv(HEADER.size + len(MESSAGE), socket.MSG_WAITALL)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor() as threads,
        open_pump() as (near, losses),
        Ring.create(4096) as ring,
    ):
        listener.settimeout(WATCHDOG_S)
        served = threads.submit(serve)
        producer = ring.claim_producer()
        producer.send(MESSAGE)
        near.send(7, ring.claim_consumer(), listener.getsockname())
        assert served.result(WATCHDOG_S)[HEADER.size :] == MESSAGE
        near.close(7)
        assert not [why for _, why in losses.all() if "before the link was open" in why]


def test_no_record_is_sent_before_the_link_is_open() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open_pump(silent_s=LONG_S, handshake_s=WATCHDOG_S) as (near, losses),
        Ring.create(4096) as ring,
    ):
        producer = ring.claim_producer()
        producer.send(MESSAGE)
        near.send(7, ring.claim_consumer(), listener.getsockname())
        with accept_and_shake_hands(listener) as connection:
            give_up_link(near)
            assert losses.next() == (7, "no connection to {}:{}: no answer".format(*listener.getsockname()))
            with pytest.raises(ConnectionResetError):
                assert connection.recv(1)
        near.close(7)


def test_a_connection_that_came_too_early_and_was_dropped_comes_again() -> None:
    with open_pump() as (near, near_losses), open_pump(handshake_s=WATCHDOG_S) as (far, far_losses):
        made = LinkedRings(near, far, near_bytes=4096, far_bytes=4096)
        made.producer.send(MESSAGE)
        made.send()
        wait_forgotten(far, made.link_id)
        made.receive()
        with made.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == MESSAGE
        assert not [*near_losses.all(), *far_losses.all()]
        made.close()


def test_a_pump_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = open_descriptors()
    monkeypatch.setattr(os, "eventfd", refuse)
    with pytest.raises(OSError, match="Too many") as caught:
        Pump(SECRET, "127.0.0.1", lambda link_id, why: None)
    assert open_descriptors() == before
    assert caught.value.errno == errno.EMFILE
