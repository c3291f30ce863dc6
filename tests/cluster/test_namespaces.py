"""Links between network namespaces: partitions, one-sided ones, and slow lines."""

from __future__ import annotations

import fcntl
import math
import select
import socket
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from omni_actors.cluster.handshake import Acceptor
from omni_actors.cluster.link import ALIVE, HEADER, SIGNS
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.receiving import ReceivingLink
from ringbuf import Ring
from tests.cluster.linked_rings import LONG_S, SECRET, WATCHDOG_S, LinkedRings, Losses
from tests.cluster.strangers import wait_early
from tests.support.network import Namespace, namespaces, two_namespaces
from tests.support.slow_lines import slow_lines

pytestmark = pytest.mark.usefixtures("needs_namespaces")
INTERRUPTION_S = 8.0
"""Longer than a handshake may take."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Namespace, Namespace]]:
    with two_namespaces() as made:
        yield made


@contextmanager
def pump_at(node: Namespace, silent_s: float) -> Iterator[tuple[Pump, Losses]]:
    losses = Losses()
    with node.entered():
        pump = Pump(SECRET, node.address, losses, silent_s=silent_s)
    try:
        yield pump, losses
    finally:
        pump.stop()


@contextmanager
def link_between(
    nodes: tuple[Namespace, Namespace], silent_s: float
) -> Iterator[tuple[LinkedRings, tuple[Losses, Losses]]]:
    """Yield rings whose link has carried a record."""
    with pump_at(nodes[0], silent_s) as (near, near_losses), pump_at(nodes[1], silent_s) as (far, far_losses):
        made = LinkedRings(near, far, near_bytes=1 << 20, far_bytes=1 << 20)
        made.receive()
        made.send()
        made.producer.send(b"first")
        made.consumer.recv(WATCHDOG_S).release()
        try:
            yield made, (near_losses, far_losses)
        finally:
            made.close()


def numbers(made: LinkedRings, pause_s: float) -> list[int]:
    """Receive until nothing comes for ``pause_s`` seconds. Returns the first word of each record."""
    found = []
    while True:
        try:
            with made.consumer.recv(pause_s) as frame:
                found.append(int.from_bytes(frame.data[:4], "little"))
        except TimeoutError:
            return found


@pytest.mark.parametrize("mute", [(0,), (1,), (0, 1)])
def test_a_short_partition_only_delays(nodes: tuple[Namespace, Namespace], mute: tuple[int, ...]) -> None:
    with link_between(nodes, silent_s=15.0) as (made, losses):
        with ExitStack() as muted:
            for number in mute:
                muted.enter_context(nodes[number].muted())
            for number in range(50):
                made.producer.send(number.to_bytes(4, "little") + bytes(10_000), timeout=WATCHDOG_S)
            arrived = numbers(made, 0.3)
            most = 0 if 0 in mute else 49  # TCP sends the first ones without an acknowledgement
            assert len(arrived) <= most
        while len(arrived) < 50:
            arrived += numbers(made, 0.3)
        assert arrived == list(range(50))
        assert not [each for ends in losses for each in ends.all()]


class Interruption:
    """A partition of both ways, once: it begins before something is sent, and lasts for some seconds.

    Nothing may reach ``receiver`` meanwhile.
    """

    def __init__(self, nodes: tuple[Namespace, Namespace], moment: str) -> None:
        self._nodes, self._moment = nodes, moment

    @contextmanager
    def of(self, moment: str, receiver: socket.socket) -> Iterator[None]:
        if moment != self._moment:
            yield
            return
        self._moment = "none"
        with self._nodes[0].muted(), self._nodes[1].muted():
            yield
            assert not select.select([receiver], [], [], INTERRUPTION_S)[0]


@contextmanager
def first_record(listener: socket.socket, interruption: Interruption) -> Iterator[bytes]:
    """Be the receiving end of a link. Give its first record, and end the connection after that."""
    while True:
        with listener.accept()[0] as connection, suppress(ConnectionError):
            acceptor = Acceptor(SECRET)
            answer = acceptor.receive(connection.recv(acceptor.wanted, socket.MSG_WAITALL))
            with interruption.of("answer", connection):
                connection.sendall(answer)
            if len(proof := connection.recv(acceptor.wanted, socket.MSG_WAITALL)) < acceptor.wanted:
                continue  # given up, and made again
            acceptor.receive(proof)
            with interruption.of("sign", connection):
                connection.sendall(ALIVE)
            yield connection.recv(HEADER.size + 5, socket.MSG_WAITALL)[HEADER.size :]
            return


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["connection", "answer", "sign"])
def test_a_partition_while_a_link_opens_only_delays(nodes: tuple[Namespace, Namespace], moment: str) -> None:
    """moment: what is lost first."""
    interruption = Interruption(nodes, moment)
    with nodes[1].entered(), socket.create_server((nodes[1].address, 0)) as listener:
        listener.settimeout(WATCHDOG_S)
        with pump_at(nodes[0], silent_s=LONG_S) as (near, losses), Ring.create(4096) as ring:
            producer = ring.claim_producer()
            producer.send(b"first")
            with interruption.of("connection", listener):
                near.send(7, ring.claim_consumer(), listener.getsockname())
            with first_record(listener, interruption) as record:
                assert record == b"first"
                assert not losses.all()
                near.close(7)


def wait_acknowledged(pump: Pump) -> None:
    """Wait until the other side has all that a pump has sent on its one connection that has no link yet."""
    [dial] = pump._dialing._dials.values()
    assert dial.opening is not None
    give_up = time.monotonic() + WATCHDOG_S
    while any(fcntl.ioctl(dial.opening.fileno(), termios.TIOCOUTQ, bytes(4))):
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.slow
def test_a_connection_that_came_too_early_and_is_dropped_in_a_partition_comes_again(
    nodes: tuple[Namespace, Namespace],
) -> None:
    """The sending end has sent all that it has to say, and the other side's reset is lost."""
    with pump_at(nodes[0], silent_s=15.0) as (near, near_losses), pump_at(nodes[1], silent_s=15.0) as (far, far_losses):
        made = LinkedRings(near, far, near_bytes=4096, far_bytes=4096)
        made.producer.send(b"first")
        made.send()
        wait_early(far, made.link_id)
        wait_acknowledged(near)
        with nodes[0].muted(), nodes[1].muted():
            far._call(lambda: far._accepting.pass_deadlines(math.inf))
        made.receive()
        with made.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == b"first"
        assert not [*near_losses.all(), *far_losses.all()]
        made.close()


def shorten(pump: Pump, silent_s: float) -> None:
    """Let a pump whose links are open take a shorter silence for a loss. Called in its thread."""
    pump._silent_s, pump._sign_s, pump._next_sign = silent_s, silent_s / SIGNS, 0.0
    for link in pump._links.values():
        if isinstance(link, ReceivingLink):
            link.channel.limit_silence(silent_s)


@pytest.mark.parametrize("mute", [(0,), (1,), (0, 1)])
@pytest.mark.slow
def test_both_ends_report_a_long_partition(nodes: tuple[Namespace, Namespace], mute: tuple[int, ...]) -> None:
    with link_between(nodes, silent_s=LONG_S) as (made, losses), ExitStack() as muted:
        for number in mute:
            muted.enter_context(nodes[number].muted())
        for pump in (made.near, made.far):
            pump._call(lambda pump=pump: shorten(pump, 0.5))
        assert losses[0].next()[0] == 7
        assert losses[1].next()[0] == 7


def test_a_slow_line_carries_everything(nodes: tuple[Namespace, Namespace]) -> None:
    if (why := nodes[0].why_not_limited()) is not None:
        pytest.skip(why)
    with nodes[0].limited(40_000_000), link_between(nodes, silent_s=15.0) as (made, losses):
        for number in range(20):
            made.producer.send(number.to_bytes(4, "little") + bytes(100_000), timeout=WATCHDOG_S)
        for number in range(20):
            with made.consumer.recv(WATCHDOG_S) as frame:
                assert int.from_bytes(frame.data[:4], "little") == number
        assert not [each for ends in losses for each in ends.all()]


@pytest.mark.slow
@pytest.mark.usefixtures("needs_slow_lines")
def test_lines_with_a_delay_carry_everything_and_the_old_way_is_back_behind_them() -> None:
    with namespaces(3) as nodes, link_between((nodes[1], nodes[2]), silent_s=15.0) as (made, losses):
        with slow_lines(nodes, 0.02, 40_000_000):
            began = time.monotonic()
            made.producer.send(b"delayed")
            made.consumer.recv(WATCHDOG_S).release()
            assert time.monotonic() - began >= 0.02
            for number in range(20):
                made.producer.send(number.to_bytes(4, "little") + bytes(100_000), timeout=WATCHDOG_S)
            for number in range(20):
                with made.consumer.recv(WATCHDOG_S) as frame:
                    assert int.from_bytes(frame.data[:4], "little") == number
        made.producer.send(b"last")
        with made.consumer.recv(WATCHDOG_S) as frame:
            assert bytes(frame.data) == b"last"
        assert not [each for ends in losses for each in ends.all()]
