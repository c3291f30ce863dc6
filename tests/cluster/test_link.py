"""Records that cross a link arrive as they were sent, whatever their sizes and the rings'."""

from __future__ import annotations

import random
import select
import socket
import threading

import pytest

from omni_actors.cluster import sending
from omni_actors.cluster.channel import Channel
from omni_actors.cluster.link import HEADER
from omni_actors.cluster.pump import PumpStopped
from omni_actors.cluster.receiving import ReceivingLink
from omni_actors.cluster.sending import SendingLink
from ringbuf import Ring, RingClosed
from tests.cluster.linked_rings import WATCHDOG_S, LinkedRings, linked_rings, open_pump


def test_records_of_all_sizes_arrive_in_order() -> None:
    sizes = [0, 1, 63, 64, 65, 4096, 0, 16_000, 32_704, 40_000, 300_000, 1, 0]
    with linked_rings() as rings:
        received = []

        def receive() -> None:
            for _ in sizes:
                with rings.consumer.recv(WATCHDOG_S) as frame:
                    received.append(bytes(frame.data))

        thread = threading.Thread(target=receive)
        thread.start()
        sent = [random.randbytes(size) for size in sizes]
        for message in sent:
            rings.producer.send(message, timeout=WATCHDOG_S)
        thread.join()
        assert received == sent
        assert rings.far_ring.statistics().messages == len(sizes)


def test_many_small_records_arrive() -> None:
    with linked_rings(1 << 20) as rings:
        for n in range(3000):
            rings.producer.send(n.to_bytes(4, "little"), timeout=WATCHDOG_S)
        for n in range(3000):
            with rings.consumer.recv(WATCHDOG_S) as frame:
                assert int.from_bytes(frame.data, "little") == n
        statistics = rings.near.statistics()[7], rings.far.statistics()[7]
        assert statistics[0] == statistics[1] == ("open", 3000, 12_000, 0)


def test_a_full_ring_holds_the_sender_back_and_nothing_is_lost() -> None:
    """The socket's buffers are filled too: the sender stops when all of the way is full."""
    with linked_rings(1 << 16) as rings:
        sent = 0
        message = bytes(30_000)
        is_held_back = False
        while not is_held_back or rings.far_ring.statistics().used <= (1 << 15) - 64:
            try:
                rings.producer.send(sent.to_bytes(4, "little"), message, timeout=0.5)
                sent, is_held_back = sent + 1, False
            except TimeoutError:
                is_held_back = True
        for n in range(sent):
            with rings.consumer.recv(WATCHDOG_S) as frame:
                assert int.from_bytes(frame.data[:4], "little") == n


def test_the_end_of_the_producer_follows_its_last_record() -> None:
    with linked_rings() as rings:
        rings.producer.send(b"last")
        rings.producer.close()
        with rings.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == b"last"
        with pytest.raises(RingClosed, match="producer"):
            rings.consumer.recv(WATCHDOG_S)


def test_a_link_ends_that_the_other_node_closes_right_after_a_turn_filled_by_the_end_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "TURN_BYTES", len(b"a record") + HEADER.size + 1)
    near, far = Ring.create(4096), Ring.create(4096)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed, accepted = socket.create_connection(listener.getsockname()), listener.accept()[0]
    sender = SendingLink(7, near.claim_consumer(), accepted.getsockname())
    receiver = ReceivingLink(7, far.claim_producer())
    producer = near.claim_producer()
    producer.send(b"a record")
    producer.close()
    try:
        sender.open(Channel(dialed))
        receiver.open(Channel(accepted))
        assert sender.step(), "the turn is over before all that the end asks for was done"
        while receiver.state == "open":
            receiver.readable = wait(accepted, select.POLLIN)
            receiver.step()
        sender.readable = sender.hung_up = wait(dialed, select.POLLRDHUP)
        assert not sender.step()
        assert (sender.state, receiver.state, receiver.records) == ("ended", "ended", 1)
    finally:
        for each in (sender, receiver, near, far):
            each.close()


def wait(connection: socket.socket, event: int) -> bool:
    """Wait for an event of a connection. Return True."""
    poll = select.poll()
    poll.register(connection, event)
    assert poll.poll(WATCHDOG_S * 1000)
    return True


def test_the_end_of_the_consumer_reaches_the_producer() -> None:
    with linked_rings() as rings:
        rings.consumer.close()

        def send_on() -> None:
            while True:
                rings.producer.send(bytes(1000), timeout=WATCHDOG_S)

        with pytest.raises(RingClosed, match="consumer"):
            send_on()


def test_a_connection_may_come_before_its_link_is_expected() -> None:
    with open_pump() as (near, _), open_pump() as (far, _):
        early = LinkedRings(near, far, near_bytes=1 << 16, far_bytes=1 << 16)
        early.send()
        early.producer.send(b"early")
        early.receive()
        with early.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == b"early"
        early.close()


def test_a_closed_link_lets_go_of_the_ring() -> None:
    with open_pump() as (near, near_losses), open_pump() as (far, far_losses):
        rings = LinkedRings(near, far, near_bytes=1 << 16, far_bytes=1 << 16)
        rings.receive()
        rings.send()
        rings.producer.send(bytes(100))
        rings.consumer.recv(WATCHDOG_S).release()
        near.close(7)
        with pytest.raises(RingClosed, match="consumer"):
            rings.producer.send(bytes(100))
        rings.near_ring.close()
        assert far_losses.next()[0] == 7
        assert not near_losses.all()
        rings.close()


def test_a_stopped_pump_says_so() -> None:
    with open_pump() as (pump, _):
        pump.stop()
        pump.stop()
        with pytest.raises(PumpStopped):
            pump.statistics()
