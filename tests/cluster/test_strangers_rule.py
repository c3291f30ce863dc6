"""Which connection that is not authenticated makes room for a new one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_actors.cluster.handshake import Acceptor, Connector
from omni_actors.cluster.strangers import MOST_STRANGERS, Strangers

SECRET = bytes(range(32))


def acceptor(*, has_hello: bool) -> Acceptor:
    made = Acceptor(SECRET)
    if has_hello:
        made.receive(Connector(bytes(32), "control", 1).hello)
    return made


def hosts(count: int) -> st.SearchStrategy[str]:
    return st.integers(1, count).map(lambda n: f"10.0.0.{n}")


def survives(host: str, flood: list[tuple[str, bool]], *, has_hello: bool) -> bool:
    """Whether a connection keeps its place in a flood, which begins before it. flood: address, and whether it spoke."""
    strangers = Strangers[int]()
    for n, (address, spoke) in enumerate(flood):
        strangers.add(n, address, acceptor(has_hello=spoke))
    strangers.add(-1, host, acceptor(has_hello=has_hello))
    for n, (address, spoke) in enumerate(flood, len(flood)):
        strangers.add(n, address, acceptor(has_hello=spoke))
    assert len([*strangers]) == min(MOST_STRANGERS, 2 * len(flood) + 1)
    return -1 in [*strangers]


@given(st.lists(st.tuples(hosts(MOST_STRANGERS - 1), st.booleans()), max_size=200))
def test_a_flood_from_other_addresses_displaces_no_node(flood: list[tuple[str, bool]]) -> None:
    assert survives("10.0.0.200", flood, has_hello=False)


def test_a_flood_from_a_network_of_one_sender_displaces_no_node() -> None:
    assert survives("2001:db8:0:1::1", [(f"2001:db8::{n:x}", True) for n in range(200)], has_hello=False)


@given(st.integers(0, 200))
def test_a_silent_flood_from_its_own_address_displaces_no_node_that_has_said_hello(count: int) -> None:
    assert survives("10.0.0.1", [("10.0.0.1", False)] * count, has_hello=True)


def test_of_equals_the_oldest_makes_room() -> None:
    strangers = Strangers[int]()
    for n in range(MOST_STRANGERS):
        assert strangers.add(n, "10.0.0.1", acceptor(has_hello=True)) is None
    assert [strangers.add(100 + n, "10.0.0.1", acceptor(has_hello=True)) for n in range(3)] == [0, 1, 2]


def test_a_connection_that_is_forgotten_leaves_its_place() -> None:
    strangers = Strangers[int]()
    for n in range(MOST_STRANGERS):
        strangers.add(n, "10.0.0.1", acceptor(has_hello=False))
    strangers.discard(5)
    strangers.discard(5)
    assert strangers.add(100, "10.0.0.1", acceptor(has_hello=False)) is None
    assert strangers.add(101, "10.0.0.1", acceptor(has_hello=False)) == 0
