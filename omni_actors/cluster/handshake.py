"""The handshake of every connection between nodes: both sides prove that they know the secret.

    hello    connector to acceptor   magic 8, role 8, subject 8, nonce 32     56 bytes
    answer   acceptor to connector   magic 8, nonce 32, tag 32                72 bytes
    proof    connector to acceptor   tag 32                                   32 bytes

A tag is HMAC-SHA256 with the secret, over the name of the side that makes it, the hello, and the acceptor's nonce.

Rule 1: no I/O and no clock here. The caller reads exactly ``wanted`` bytes, passes them to ``receive``, and sends what
that returns. So not one byte beyond the handshake is read before the other side is authenticated.
Rule 2: a tag names its side, so that neither side's own tag, sent back to it, is accepted. The acceptor's nonce is new
for each connection, so that a recorded handshake is worth nothing.
Rule 3: the secret is never sent, and no error contains a tag or a nonce.
Rule 4: an acceptor answers a connector of another version, too, so that both sides can say why it is refused.

The handshake does not protect what follows it. The control connection derives keys from it (``keys``); a link without
TLS trusts the network between the nodes not to change or to inject bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from abc import ABC, abstractmethod
from typing import Final

from omni_actors.errors import OmniError

NAME: Final = b"omnilnk"
VERSION: Final = 6
MAGIC: Final = NAME + bytes([VERSION])
LONGEST_ROLE: Final = 8
"""Bytes of ASCII."""
ROLE_OF_LINKS: Final = "link"
ROLE_OF_AGENTS: Final = "control"
MOST_BYTES: Final = 88
"""The most bytes that an acceptor reads before it knows the other side: hello and proof."""
_NONCE: Final = 32
_TAG: Final = 32
_HELLO: Final = len(MAGIC) + LONGEST_ROLE + 8 + _NONCE
_ANSWER: Final = len(MAGIC) + _NONCE + _TAG
_SHORTEST_SECRET: Final = 16


class HandshakeFailed(OmniError):
    """The other side of a connection did not prove that it belongs to this cluster. why: in words."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the handshake failed: {why}")


class Handshake(ABC):
    """One side. ``wanted`` is the number of bytes that ``receive`` takes next; 0: the other side is authenticated.

    role: what the connection is for, such as "link". subject: which one, such as a link's id. An acceptor knows both
    when it is done.
    """

    def __init__(self, secret: bytes, wanted: int) -> None:
        """Raises ValueError (a secret of fewer than 16 bytes)."""
        if len(secret) < _SHORTEST_SECRET:
            raise ValueError(f"a secret of {len(secret)} bytes; at least {_SHORTEST_SECRET} are needed")
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._transcript = b""
        self.wanted = wanted
        self.role = ""
        self.subject = 0

    @abstractmethod
    def receive(self, data: bytes) -> bytes:
        """Take ``wanted`` bytes of the other side. Returns what is to be sent to it, perhaps nothing.

        Raises HandshakeFailed: close the connection.
        """

    def keys(self) -> tuple[bytes, bytes]:
        """Return two keys of this connection alone: one for what the connector sends, one for what the acceptor does.

        32 bytes each. Valid once ``wanted`` is 0.
        """
        assert not self.wanted, "the handshake is not over"
        return self._tag(b"key of connector"), self._tag(b"key of acceptor")

    def _tag(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, label + b"\0" + self._transcript, hashlib.sha256)

    def _check(self, tag: bytes, label: bytes) -> None:
        if not hmac.compare_digest(tag, self._tag(label)):
            raise HandshakeFailed("the other side has another secret")


class Connector(Handshake):
    """The side that connects. It sends ``hello`` first."""

    def __init__(self, secret: bytes, role: str, subject: int) -> None:
        """subject: below 2**64. Raises ValueError."""
        super().__init__(secret, _ANSWER)
        name = role.encode("ascii")
        if not 0 < len(name) <= LONGEST_ROLE or not 0 <= subject < 1 << 64:
            raise ValueError(f"a role of 1 to {LONGEST_ROLE} letters and a subject of 64 bits, not {role!r}, {subject}")
        self.role, self.subject = role, subject
        self.hello = MAGIC + name.ljust(LONGEST_ROLE, b"\0") + subject.to_bytes(8, "little") + self._nonce

    def receive(self, data: bytes) -> bytes:
        assert len(data) == self.wanted > 0
        _check_version(_version(data))
        nonce, tag = data[len(MAGIC) : -_TAG], data[-_TAG:]
        self._transcript = self.hello + nonce
        self._check(tag, b"acceptor")
        self.wanted = 0
        return self._tag(b"connector")


class Acceptor(Handshake):
    """The side that is connected to."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret, _HELLO)
        self._version = VERSION
        """The protocol version of the connector."""

    @property
    def has_hello(self) -> bool:
        """Whether the other side has said hello. Any process that knows the protocol can."""
        return bool(self._transcript)

    def receive(self, data: bytes) -> bytes:
        assert len(data) == self.wanted > 0
        if self._transcript:
            _check_version(self._version)
            self._check(data, b"connector")
            self.wanted = 0
            return b""
        self._version = _version(data)
        at = len(MAGIC)
        name = data[at : at + LONGEST_ROLE].rstrip(b"\0")
        if not name.isascii():
            raise HandshakeFailed("its role is not ASCII")
        self.role = name.decode("ascii")
        self.subject = int.from_bytes(data[at + LONGEST_ROLE : at + LONGEST_ROLE + 8], "little")
        self._transcript = data + self._nonce
        self.wanted = _TAG
        return MAGIC + self._nonce + self._tag(b"acceptor")


def _version(data: bytes) -> int:
    """Return the version of the side that has sent a hello or an answer. Raises HandshakeFailed (it is neither)."""
    if data[: len(NAME)] != NAME:
        raise HandshakeFailed("the other side does not speak this protocol")
    return data[len(NAME)]


def _check_version(version: int) -> None:
    if version != VERSION:
        raise HandshakeFailed(f"the other side speaks version {version} of the protocol; this is version {VERSION}")
