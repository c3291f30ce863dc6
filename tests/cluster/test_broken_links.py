"""Links that break: every complete record arrives, no other, and the loss is reported."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.cluster.channel import Tls
from omni_actors.cluster.link import ALIVE, END_MARK, HEADER, MOST_MISSED, SIGNS
from omni_actors.cluster.pump import Pump, PumpStopped
from ringbuf import Ring, RingClosed, RingCorrupted
from ringbuf._words import PRODUCER
from tests.cluster.linked_rings import LONG_S, SECRET, WATCHDOG_S, LinkedRings, Losses, linked_rings, open_pump
from tests.cluster.strangers import authenticated
from tests.support.frozen import freeze
from tests.support.network import Forwarder

ROOT = Path(__file__).parent.parent.parent
CERTIFICATES = ROOT / "tests/serve/http/certificates"
MESSAGES = (b"first record", b"", b"third")
STREAM = b"".join(HEADER.pack(len(message) << 8 | 1, 0) + message for message in MESSAGES) + END_MARK


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[Pump, Losses]]:
    with open_pump(silent_s=LONG_S) as made:  # so it says once that it lives
        yield made


def received(pump: Pump, losses: Losses, said: bytes, *, reset: bool = False) -> tuple[list[bytes], Any]:
    """Send bytes on an authenticated link. Returns the messages that arrived, and the loss or the end."""
    with Ring.create(4096) as ring:
        consumer = ring.claim_consumer()
        pump.receive(3, ring.claim_producer())
        connection, _ = authenticated(pump.address, 3)
        with connection:
            assert connection.recv(1) == ALIVE  # unread, it would make a reset of the end
            connection.sendall(said)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        messages: list[bytes] = []
        end: Any = None
        while end is None:
            try:
                with consumer.recv(0.02) as frame:
                    messages.append(bytes(frame.data))
            except TimeoutError:
                if lost := losses.all():
                    end = lost
            except RingClosed:
                end = "closed"
            except RingCorrupted:
                end = "corrupted"
        while isinstance(end, list) and (late := consumer.try_recv()) is not None:
            messages.append(bytes(late.data))
            late.release()
        pump.close(3)
        losses.all()
        return messages, end


@pytest.mark.parametrize("length", range(len(STREAM) + 1))
def test_a_stream_cut_at_any_byte_gives_its_complete_records(far: tuple[Pump, Losses], length: int) -> None:
    pump, losses = far
    messages, end = received(pump, losses, STREAM[:length])
    complete = [n for n in range(4) if length >= sum(16 + len(each) for each in MESSAGES[:n])][-1]
    assert messages == list(MESSAGES[:complete])
    assert end == ("closed" if length == len(STREAM) else [(3, "the other node closed the connection")])


def test_a_reset_is_a_loss(far: tuple[Pump, Losses]) -> None:
    messages, end = received(*far, STREAM[:40], reset=True)
    assert messages in ([], [MESSAGES[0]])
    assert end != "closed"


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ((1 << 40 | 1, 0), "a record of 4294967296 bytes, where the ring takes 1984"),
        ((1985 << 8 | 1, 0), "a record of 1985 bytes, where the ring takes 1984"),
        ((5, 0), "a record of kind 5 and place 0"),
        ((1 << 8, 0), "a record of kind 0 and 1 bytes"),
        ((1, 1 << 60), "a record of kind 1 and place 1152921504606846976"),
        ((2**64 - 1, 2**64 - 1), "a record of 72057594037927935 bytes, where the ring takes 1984"),
    ],
)
def test_a_header_that_no_ring_has_is_a_loss(far: tuple[Pump, Losses], header: tuple[int, int], why: str) -> None:
    assert received(*far, HEADER.pack(*header) + bytes(100)) == ([], [(3, why)])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2100), st.integers(0, 5000)), max_size=8), st.binary())
@settings(max_examples=60, deadline=None)
def test_whatever_an_authenticated_node_sends_only_its_link_ends(
    far: tuple[Pump, Losses], records: list[tuple[int, int, int]], rest: bytes
) -> None:
    said = b"".join(HEADER.pack(length << 8 | kind, place) + bytes(length) for kind, length, place in records)
    pump, losses = far
    received(pump, losses, said + rest)
    assert received(pump, losses, STREAM) == (list(MESSAGES), "closed")


def test_a_producer_that_goes_away_with_its_link_is_a_loss_at_the_far_end() -> None:
    """The link is closed while a record is on its way, of which the socket took a part."""
    with open_pump() as (near, near_losses), open_pump() as (far_pump, far_losses):
        made = LinkedRings(near, far_pump, near_bytes=1 << 25, far_bytes=1 << 25)
        made.receive()
        made.send()
        sender = threading.Thread(target=_send_until_closed, args=(made,))
        sender.start()
        with made.consumer.recv(WATCHDOG_S):
            near.close(7)
        sender.join(WATCHDOG_S)
        assert far_losses.next()[0] == 7
        assert not near_losses.all()
        made.close()


def _send_until_closed(made: LinkedRings) -> None:
    message = bytes(8 << 20)
    try:
        while True:
            made.producer.send(message, timeout=WATCHDOG_S)
    except RingClosed:
        return


def pass_checks(pump: Pump, count: int, between: Callable[[float], None] = lambda now: None) -> None:
    """Let a pump check the silence of its links, as if time went by. between: called with the time of each check."""
    now = time.monotonic()
    for _ in range(count):
        now += LONG_S / SIGNS + 0.001
        between(now)
        pump._call(lambda at=now: pump._pass_deadlines(at))


@pytest.mark.parametrize(
    ("victim", "stop"), [("near", signal.SIGKILL), ("far", signal.SIGKILL), ("far", signal.SIGSTOP)]
)
def test_a_killed_or_stopped_node_is_a_loss(victim: str, stop: signal.Signals) -> None:
    """The kernel of a node that is stopped acknowledges what arrives: the sending end notices its silence.

    A sending end that is stopped cannot be told from an idle one by its link.
    """
    with open_pump(silent_s=LONG_S) as (pump, losses), Ring.create(1 << 16) as ring:
        arguments = ["send", *map(str, pump.address)] if victim == "near" else ["receive"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.node_process", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            if victim == "near":
                consumer = ring.claim_consumer()
                pump.receive(7, ring.claim_producer())
            else:
                producer = ring.claim_producer()
                pump.send(7, ring.claim_consumer(), ("127.0.0.1", int(process.stdout.readline())))
            for number in range(100):
                if victim == "near":
                    consumer.recv(WATCHDOG_S).release()
                else:
                    producer.send(bytes(2000), timeout=WATCHDOG_S)
                    if number == 50:
                        assert process.stdout.readline()
            assert not losses.all()
            if stop == signal.SIGSTOP:
                freeze(process.pid)
                pass_checks(pump, 2 * MOST_MISSED)
            else:
                process.send_signal(stop)
                process.wait()
                if victim == "near":  # the ring is full, so only the signs that it is sent find out
                    pass_checks(pump, 2 * MOST_MISSED)
            assert losses.next()[0] == 7
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            pump.close(7)


def test_a_sign_that_came_while_this_process_stood_still_is_read_before_its_link_is_lost() -> None:
    """The process stands still after the pump has read, and before it looks how long the other node was silent."""
    with open_pump(silent_s=LONG_S) as (near, losses), open_pump(silent_s=LONG_S) as (far_pump, _):
        made = LinkedRings(near, far_pump, near_bytes=4096, far_bytes=4096)
        made.receive()
        made.send()
        made.producer.send(b"before")
        made.consumer.recv(WATCHDOG_S).release()
        resumed = time.monotonic() + 10 * LONG_S

        def stand_still() -> None:
            far_pump._call(lambda: far_pump._pass_deadlines(resumed))  # it says that it lives
            near._pass_deadlines(resumed)

        near._call(stand_still)
        assert not losses.all()
        made.producer.send(b"after")
        with made.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == b"after"
        made.close()


def test_a_dead_node_is_noticed_in_the_time_that_this_process_runs() -> None:
    """Seven checks, one each fifth of the time of silence. A standstill makes one check late, and counts as one."""
    with open_pump(silent_s=LONG_S) as (near, losses), open_pump(silent_s=LONG_S) as (far_pump, _):
        made = LinkedRings(near, far_pump, near_bytes=4096, far_bytes=4096)
        made.receive()
        made.send()
        made.producer.send(b"last")
        made.consumer.recv(WATCHDOG_S).release()
        now, found = time.monotonic(), []
        for passed_s in (LONG_S / 5, 10 * LONG_S, *[LONG_S / 5] * 6):
            now += passed_s + 0.001
            near._call(lambda at=now: near._pass_deadlines(at))
            found.append(losses.all())
        assert found == [*[[]] * 7, [(7, "no sign of the other node for 420 s")]]
        made.close()


def test_a_full_ring_is_no_loss_however_long_it_lasts() -> None:
    """The sending end's socket is full for longer than the time of silence; the receiving end says that it lives."""
    with open_pump(silent_s=LONG_S) as (near, near_losses), open_pump(silent_s=LONG_S) as (far_pump, far_losses):
        made = LinkedRings(near, far_pump, near_bytes=1 << 16, far_bytes=1 << 16)
        made.receive()
        made.send()
        sent, is_held_back = 0, False
        while not is_held_back or made.far_ring.statistics().used <= (1 << 15) - 64:
            try:
                made.producer.send(sent.to_bytes(4, "little") + bytes(30_000), timeout=0.5)
                sent, is_held_back = sent + 1, False
            except TimeoutError:
                is_held_back = True

        def say_alive(now: float) -> None:
            far_pump._call(lambda: far_pump._pass_deadlines(now))
            give_up = time.monotonic() + WATCHDOG_S
            while not near._links[7]._was_heard:  # type: ignore[attr-defined]
                assert time.monotonic() < give_up
                time.sleep(0.001)

        pass_checks(near, 2 * MOST_MISSED, say_alive)
        for number in range(sent):
            with made.consumer.recv(WATCHDOG_S) as frame:
                assert int.from_bytes(frame.data[:4], "little") == number
        assert not near_losses.all()
        assert not far_losses.all()
        made.close()


def test_a_link_that_cannot_be_made_is_a_loss() -> None:
    with socket.socket() as taken, open_pump(silent_s=0.2) as (near, losses):
        taken.bind(("127.0.0.1", 0))  # it does not listen
        address = taken.getsockname()
        with Ring.create(4096) as ring:
            near.send(7, ring.claim_consumer(), address)
            link_id, why = losses.next()
            assert (link_id, why.partition(": ")[0]) == (7, f"no connection to {address[0]}:{address[1]}")
            near.close(7)


def test_a_node_that_starts_late_is_reached() -> None:
    with open_pump() as (far_pump, _), open_pump() as (near, losses):
        made = LinkedRings(near, far_pump, near_bytes=4096, far_bytes=4096)
        with Forwarder(far_pump.address, cut_after=0) as cutting:
            near.send(7, made.near_ring.claim_consumer(), cutting.address)
            made.producer.send(b"x")
            assert cutting.wait_connections(3)
            cutting.cut_after(None)
            made.receive()
            with made.consumer.recv(WATCHDOG_S) as frame:
                assert frame.data == b"x"
            made.near.close(7)
        assert not losses.all()
        made.close()


def test_a_slow_and_stalled_line_only_delays() -> None:
    with open_pump() as (far_pump, far_losses), open_pump() as (near, losses):
        made = LinkedRings(near, far_pump, near_bytes=1 << 16, far_bytes=1 << 16)
        with Forwarder(far_pump.address, delay_s=0.02) as line:
            made.receive()
            near.send(7, made.near_ring.claim_consumer(), line.address)
            made.producer.send(b"slow")
            made.consumer.recv(WATCHDOG_S).release()
            line.set_stalled(True)
            made.producer.send(b"stalled")
            with pytest.raises(TimeoutError):
                made.consumer.recv(0.2)
            line.set_stalled(False)
            with made.consumer.recv(WATCHDOG_S) as frame:
                assert frame.data == b"stalled"
            assert not [*losses.all(), *far_losses.all()]
            made.close()


def test_a_corrupted_ring_is_a_loss_and_ends_no_other_link() -> None:
    with open_pump() as (near, losses), open_pump() as (far_pump, far_losses):
        other, broken = (
            LinkedRings(near, far_pump, near_bytes=4096, far_bytes=4096, link_id=link_id) for link_id in (1, 2)
        )
        for made in (other, broken):
            made.receive()
            made.send()
            made.producer.send(b"before")
            made.consumer.recv(WATCHDOG_S).release()
        segment = broken.near_ring._segment
        segment.data[128:192] = bytes(range(64))
        segment.words[PRODUCER.position] = 192
        os.eventfd_write(broken.near_ring.fds[1], 1)
        link_id, why = losses.next()
        assert link_id == 2
        assert why.startswith("RingCorrupted: corrupted ring: no record")
        assert far_losses.next() == (2, "[Errno 104] Connection reset by peer")
        other.producer.send(b"alive")
        with other.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == b"alive"
        other.close()
        broken.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pump_that_fails_says_why() -> None:
    def fail(link_id: int, why: str) -> None:
        raise ZeroDivisionError(f"{link_id}: {why}")

    pump = Pump(SECRET, "127.0.0.1", fail, silent_s=0.1)
    with Ring.create(4096) as ring:
        pump.receive(7, ring.claim_producer())
        authenticated(pump.address, 7)[0].close()
        pump._thread.join(WATCHDOG_S)
        with pytest.raises(PumpStopped) as stopped:
            pump.statistics()
        assert isinstance(stopped.value.__cause__, ZeroDivisionError)


def contexts() -> Tls:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(CERTIFICATES / "server.pem")
    client = ssl.create_default_context()
    client.load_verify_locations(CERTIFICATES / "server.pem")
    return Tls(server, client)


def test_links_over_tls_carry_records_of_all_sizes() -> None:
    with linked_rings(1 << 18, tls=contexts()) as made:
        for size in (0, 1, 100, 16_384, 100_000, 500_000):
            message = bytes(range(256)) * (size // 256 + 1)
            thread = threading.Thread(target=made.producer.send, args=(message[:size],))
            thread.start()
            with made.consumer.recv(WATCHDOG_S) as frame:
                assert frame.data == message[:size]
            thread.join()
        made.producer.close()
        with pytest.raises(RingClosed):
            made.consumer.recv(WATCHDOG_S)


def test_a_node_without_tls_is_refused() -> None:
    with open_pump(tls=contexts()) as (far_pump, far_losses), open_pump(silent_s=0.2) as (near, losses):
        made = LinkedRings(near, far_pump, near_bytes=4096, far_bytes=4096)
        made.receive()
        made.send()
        assert losses.next()[0] == 7
        assert far_pump.statistics()[7].state == "opening"
        assert not far_losses.all()
        made.close()
