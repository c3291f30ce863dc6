"""The handshake between two nodes, byte by byte: what it accepts and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.cluster import handshake
from omni_actors.cluster.handshake import (
    MAGIC,
    MOST_BYTES,
    VERSION,
    Acceptor,
    Connector,
    Handshake,
    HandshakeFailed,
)

SECRET = bytes(range(32))


def shake(connector: Connector, acceptor: Handshake) -> list[bytes]:
    """Return what was sent: hello, answer, proof."""
    answer = acceptor.receive(connector.hello)
    proof = connector.receive(answer)
    assert not acceptor.receive(proof)
    return [connector.hello, answer, proof]


def test_both_sides_know_each_other_at_the_end() -> None:
    connector, acceptor = Connector(SECRET, "link", 2**64 - 1), Acceptor(SECRET)
    sent = shake(connector, acceptor)
    assert (connector.wanted, acceptor.wanted) == (0, 0)
    assert (acceptor.role, acceptor.subject) == ("link", 2**64 - 1)
    assert connector.keys() == acceptor.keys()
    assert len({*connector.keys(), *acceptor.keys()}) == 2
    assert len(sent[0]) + len(sent[2]) == MOST_BYTES


def test_keys_differ_between_connections() -> None:
    first, second = Connector(SECRET, "link", 1), Connector(SECRET, "link", 1)
    shake(first, Acceptor(SECRET))
    shake(second, Acceptor(SECRET))
    assert not {*first.keys()} & {*second.keys()}


def test_neither_side_accepts_another_secret() -> None:
    connector = Connector(SECRET, "link", 1)
    with pytest.raises(HandshakeFailed, match="another secret"):
        connector.receive(Acceptor(bytes(32)).receive(connector.hello))
    acceptor, stranger = Acceptor(SECRET), Connector(bytes(32), "link", 1)
    acceptor.receive(stranger.hello)
    with pytest.raises(HandshakeFailed, match="another secret"):
        acceptor.receive(bytes(32))
    assert acceptor.wanted


def test_a_recorded_handshake_is_refused() -> None:
    hello, _, proof = shake(Connector(SECRET, "link", 1), Acceptor(SECRET))
    acceptor = Acceptor(SECRET)
    acceptor.receive(hello)
    with pytest.raises(HandshakeFailed, match="another secret"):
        acceptor.receive(proof)


def test_a_tag_sent_back_to_its_maker_is_refused() -> None:
    """A stranger opens a connection and returns the acceptor's own tag as its proof."""
    acceptor = Acceptor(SECRET)
    answer = acceptor.receive(Connector(bytes(32), "link", 1).hello)
    with pytest.raises(HandshakeFailed, match="another secret"):
        acceptor.receive(answer[-32:])


@pytest.mark.parametrize("at", [*range(8, 24), 24, 55])
def test_a_changed_role_subject_or_nonce_is_noticed(at: int) -> None:
    connector, acceptor = Connector(SECRET, "link", 1), Acceptor(SECRET)
    changed = bytearray(connector.hello)
    changed[at] ^= 1
    with pytest.raises(HandshakeFailed):
        connector.receive(acceptor.receive(bytes(changed)))


def test_another_version_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acceptor answers, and accepts no proof, although the other side knows the secret."""
    acceptor, connector = Acceptor(SECRET), Connector(SECRET, "link", 1)
    connector.hello = hello = MAGIC[:-1] + b"\x09" + connector.hello[len(MAGIC) :]
    answer = acceptor.receive(hello)
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "VERSION", 9)
        with pytest.raises(HandshakeFailed, match=f"version {VERSION} of the protocol; this is version 9"):
            connector.receive(answer)
    with pytest.raises(HandshakeFailed, match=f"version 9 of the protocol; this is version {VERSION}"):
        acceptor.receive(connector.receive(answer))
    assert acceptor.wanted
    with pytest.raises(HandshakeFailed, match="does not speak"):
        Acceptor(SECRET).receive(b"GET / HTTP/1.1\r\n".ljust(len(hello)))


@given(st.binary(min_size=56, max_size=56), st.binary(min_size=32, max_size=32), st.booleans())
@settings(max_examples=300)
def test_no_bytes_of_a_stranger_are_accepted(hello: bytes, proof: bytes, has_magic: bool) -> None:
    acceptor = Acceptor(SECRET)
    if has_magic:
        hello = Connector(SECRET, "link", 1).hello[:8] + hello[8:]
    try:
        acceptor.receive(hello)
    except HandshakeFailed:
        assert not has_magic or not hello[8:16].isascii()
    else:
        with pytest.raises(HandshakeFailed):
            acceptor.receive(proof)
    assert acceptor.wanted


@pytest.mark.parametrize(("secret", "role", "subject"), [(b"short", "link", 1), (SECRET, "", 1), (SECRET, "link", -1)])
def test_wrong_arguments_are_refused(secret: bytes, role: str, subject: int) -> None:
    with pytest.raises(ValueError, match=r"secret|role"):
        Connector(secret, role, subject)
