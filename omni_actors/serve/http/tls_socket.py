"""A connected socket with TLS, which connections use as they use any other (``buffered_socket``).

Rules
1. The ssl module sees memory only: one buffer that receives what the client sends, and one that it fills with what the
   client must get. So every wait is a wait of this server, with its limits, and can be cancelled.
2. What is encrypted is sent in order, whichever task sends it. A cancelled send leaves the rest in ``_unsent``, and the
   next send begins with it: a record is never cut.
3. Receiving never waits for another task that sends: a client that does not read is still heard.
4. The client's error, such as bytes that are not TLS, counts as a disconnect. Only a client that sends HTTP gets an
   answer, without TLS: it says that the server speaks https.
"""

from __future__ import annotations

import os
import ssl
from contextlib import suppress

import trio

from omni_actors.serve.http.buffered_socket import PIECE_BYTES, BufferedSocket, ClientDisconnected
from omni_actors.serve.http.errors import HTTPError


class TLSSocket(BufferedSocket):
    """A connected socket with TLS. ``handshake`` comes before anything else.

    context: that of the server.
    """

    scheme = "https"

    def __init__(self, sock: trio.socket.SocketType, context: ssl.SSLContext) -> None:
        super().__init__(sock)
        self._received, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._encrypted, server_side=True)
        self._unsent = bytearray()
        self._flushing = trio.Lock()
        self._says_goodbye = True
        """Whether the end of the connection is announced, so that the client knows that it has everything."""
        self._speaks_tls = True
        """False: the client sends HTTP without TLS (rule 4)."""

    async def handshake(self) -> None:
        """Agree on a key with the client. Raises ClientDisconnected, and HTTPError if the client sends HTTP."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                if not await self._receive():
                    raise ClientDisconnected from None
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    self._speaks_tls = self._says_goodbye = False
                    message = "this server speaks https: use https:// in place of http://"
                    raise HTTPError(400, message, code="invalid_http") from error
                await self._flush()  # an alert, which tells the client the reason
                raise ClientDisconnected from error
            else:
                await self._flush()
                return

    async def fill(self) -> bool:
        """As that of ``BufferedSocket``."""
        while True:
            try:
                data = self._tls.read(PIECE_BYTES)
            except ssl.SSLWantReadError:
                if not await self._receive():
                    return False
            except ssl.SSLError as error:
                raise ClientDisconnected from error
            else:
                self.buffer += data
                return bool(data)

    async def _receive(self) -> bool:
        """Receive encrypted bytes. Return False if the client has closed its side. Raises ClientDisconnected."""
        if not self._flushing.locked():  # else the task that holds it sends what this one has encrypted, too
            await self._flush()
        try:
            data = await self._socket.recv(PIECE_BYTES)
        except OSError as error:
            raise ClientDisconnected from error
        self._received.write(data)
        return bool(data)

    async def send(self, *pieces: bytes) -> None:
        """As that of ``BufferedSocket``."""
        if not self._speaks_tls:
            await super().send(*pieces)
            return
        if sum(map(len, pieces)) <= PIECE_BYTES:
            pieces = (b"".join(pieces),)
        for piece in pieces:
            for at in range(0, len(piece), PIECE_BYTES):
                self._encrypt(piece[at : at + PIECE_BYTES])
                await self._flush()

    def _encrypt(self, data: bytes) -> None:
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise ClientDisconnected from error

    async def _flush(self) -> None:
        """Send what is encrypted. Raises ClientDisconnected. Cancellation: see rule 2."""
        async with self._flushing:
            self._unsent += self._encrypted.read()
            while self._unsent:
                data = memoryview(bytes(self._unsent[:PIECE_BYTES]))
                del self._unsent[: await self._send_some(data)]
                self._unsent += self._encrypted.read()

    def try_send(self, data: bytes) -> None:
        """As that of ``BufferedSocket``."""
        if data and not self._unsent:
            with suppress(ClientDisconnected, OSError):
                self._encrypt(data)
                os.write(self._socket.fileno(), self._encrypted.read())

    def reset_on_close(self) -> None:
        """As that of ``BufferedSocket``. The end is not announced either."""
        self._says_goodbye = False
        super().reset_on_close()

    def close(self) -> None:
        """Announce the end, if the kernel takes that at once, and close the socket."""
        self._say_goodbye()
        super().close()

    async def linger(self) -> None:
        """As that of ``BufferedSocket``."""
        self._say_goodbye()
        await super().linger()

    def _say_goodbye(self) -> None:
        if not self._says_goodbye or self._unsent:
            return
        self._says_goodbye = False
        with suppress(ssl.SSLError, OSError):  # it raises because the client has not said goodbye yet
            self._tls.unwrap()
        with suppress(OSError):
            os.write(self._socket.fileno(), self._encrypted.read())
