"""What a pump has to do with NIXL: a process that runs it (``nixl_process``), and the staging memory that both share.

    outgoing memory   payloads for other nodes, which read them
    incoming memory   payloads that this node has read

Links copy between the staging memory and their rings. So no node ever reads or writes the memory of a ring on another
node: a ring that is closed, unmapped or given up is out of its reach.

Rules
1. The pump's thread alone uses it. Nothing here waits, once ``Transfers`` is made.
2. All of it is bounded: both memories, what an offer may have, and the orders that wait. Where there is no outgoing
   memory, ``stage`` says so at once, and the record travels by TCP.
3. An extent of outgoing memory may be taken back at any time. Its stamp is cleared first, so a READ of it that is under
   way fails (``nixl_process``, rule 2). An extent of incoming memory is used again when no READ writes into it.
4. When the process ends, what it had to read fails, and ``is_up`` is False from then on: links use TCP. A process that
   has not read something after ``READ_S`` is ended.
"""

from __future__ import annotations

import bisect
import importlib.util
import itertools
import logging
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final, Literal, TypeAlias

import msgspec

from omni_actors.cluster.link import LinkBroken
from omni_actors.cluster.nixl_process import (
    MOST_PACKET,
    STAMP,
    Done,
    Drop,
    Failed,
    Load,
    Loaded,
    News,
    NotLoaded,
    NotStarted,
    Order,
    Read,
    Started,
    TakenBack,
)
from omni_actors.cluster.poller import SOCKET, Poller
from omni_actors.errors import ConfigError, OmniError
from ringbuf.syscalls import memfd_create, seal_size

Transport: TypeAlias = Literal["tcp", "nixl"]
"""What carries the large records of links (``config.schema.Cluster``)."""
PACKAGE: Final = "nixl_cu12"
OUTGOING: Final = 64 << 20
"""Bytes of outgoing memory."""
INCOMING: Final = 64 << 20
"""Bytes of incoming memory."""
MOST_OFFER: Final = 32 << 10
"""The most bytes of an offer: UCX's address of each network device, and the keys of one region."""
MOST_ORDERS: Final = 4096
"""So many may wait for the process, beyond those in its socket."""
START_S: Final = 10.0
READ_S: Final = 60.0
"""How long a read of another node's memory may take. Links count it in checks (``nixl_links``, rule 4)."""
_FAILED_S: Final = 10.0
"""How long an extent is left alone after a READ into it has failed: a network card may be slower than its error."""
_NOTHING: Final = bytes(8)
_log = logging.getLogger(__name__)


class NixlUnavailable(OmniError):
    """NIXL does not work on this node. why: in words."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"NIXL (cluster.transport) does not work here: {why}")


def require_nixl(file: str) -> None:
    """Raise ConfigError if the package is not installed. file: the pipeline's, for the error."""
    if importlib.util.find_spec(PACKAGE) is None:
        accepted = "tcp; or nixl, with the extra installed (pip install '.[nixl]' in the clone)"
        raise ConfigError(file, "cluster.transport", "nixl", accepted)


class Extents:
    """Divides a range of memory: ``take`` gives the first gap that is large enough."""

    def __init__(self, begin: int, size: int) -> None:
        self._gaps = [(begin, begin + size)]
        """In order, and none touches another one."""
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return where ``size`` bytes begin, aligned to 64; None: there is no such gap."""
        size += -size % 64
        for n, (begin, end) in enumerate(self._gaps):
            if size <= end - begin:
                self._gaps[n : n + 1] = [(begin + size, end)] if size < end - begin else []
                self._taken[begin] = begin + size
                return begin
        return None

    def give(self, begin: int) -> None:
        """Give back what begins there."""
        end = self._taken.pop(begin)
        n = bisect.bisect(self._gaps, (begin, end))
        if n < len(self._gaps) and self._gaps[n][0] == end:
            end = self._gaps.pop(n)[1]
        if n and self._gaps[n - 1][1] == begin:
            n, begin = n - 1, self._gaps.pop(n - 1)[0]
        self._gaps.insert(n, (begin, end))


class Staged:
    """An extent of outgoing memory. ``memory`` is to be filled before ``publish``."""

    def __init__(self, transfers: Transfers, begin: int, length: int) -> None:
        self.begin, self.stamp = begin, 0
        self.memory = transfers.view(begin, length)
        self._transfers = transfers

    def publish(self) -> None:
        """Let other nodes read it."""
        self.stamp = secrets.randbits(64) | 1
        self._transfers.set_stamp(self.begin, self.stamp.to_bytes(8, "little"))

    def release(self) -> None:
        """Take the extent back. What reads it now gets an error."""
        self._transfers.set_stamp(self.begin, _NOTHING)
        self.memory.release()
        self._transfers.give_outgoing(self.begin)


class Source:
    """The outgoing memory of another node. is_loaded: whether it can be read. wake: called when it can be."""

    def __init__(self, number: int, wake: Callable[[], None]) -> None:
        self.number, self.wake = number, wake
        self.is_loaded = False


class Fetch:
    """The READ of one record from another node into incoming memory.

    is_over: whether the READ has ended. why: the reason if it failed; else empty. wake: called when it has ended.
    """

    def __init__(self, transfers: Transfers, begin: int, memory: memoryview, wake: Callable[[], None]) -> None:
        self.begin, self.memory = begin, memory
        self.is_over, self.why = False, ""
        self._transfers, self._wake = transfers, wake
        self._is_released, self._gives = False, True

    def release(self) -> None:
        """Give the extent back, once no READ writes into it. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self.memory.release()
            self._give()

    def end(self, why: str = "", *, gives: bool = True) -> None:
        """Record that the READ has ended.

        why: the reason if it failed. gives: whether its extent of incoming memory can be used again.
        """
        self.is_over, self.why, self._gives = True, why, gives
        self._give()
        if not self._is_released:
            self._wake()

    def _give(self) -> None:
        if self.is_over and self._is_released and self._gives:
            self._transfers.give_incoming(self.begin)


class Transfers:
    """The NIXL process of a pump, the staging memory, and the reads that are under way.

    The constructor starts the process and waits for NIXL: about a second. ``watch`` follows, in the pump's thread.
    """

    offer: bytes
    """What other nodes ``load``."""
    read_s: float = READ_S

    def __init__(self) -> None:
        """Raises NixlUnavailable, OSError (no descriptors, no memory)."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise NixlUnavailable("the package is not installed (pip install '.[nixl]' in the clone)")
        with ExitStack() as undo:
            fd = memfd_create("nixl staging")
            undo.callback(os.close, fd)
            os.ftruncate(fd, OUTGOING + INCOMING)
            seal_size(fd)
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(theirs)
            failed = undo.enter_context(ExitStack())
            failed.callback(self._socket.close)
            self._process = _start(theirs.fileno(), fd)
            failed.callback(self._kill)
            theirs.close()
            self.offer = self._wait_started()
            self._memory = memoryview(mmap.mmap(fd, OUTGOING + INCOMING))
            failed.pop_all()
        self._socket.setblocking(False)
        self.is_up = True
        self._decoder: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)
        self._poller: Poller | None = None
        self._orders: deque[bytes] = deque()
        self._numbers = itertools.count(1)
        self._outgoing, self._incoming = Extents(0, OUTGOING), Extents(OUTGOING, INCOMING)
        self._sources: dict[int, Source] = {}
        self._fetches: dict[int, Fetch] = {}
        """The fetches that are not over, by number."""
        self._failed: deque[tuple[float, int]] = deque()
        """When READs have failed, and where they had their extents."""
        self._waiting: dict[Callable[[], None], None] = {}
        """What to call when there may be room."""

    def _wait_started(self) -> bytes:
        self._socket.settimeout(START_S)
        try:
            packet = self._socket.recv(MOST_PACKET)
        except TimeoutError:
            raise NixlUnavailable(f"its process has not started within {START_S:g} s") from None
        news = msgspec.msgpack.decode(packet, type=News) if packet else None
        if not isinstance(news, Started):
            raise NixlUnavailable(news.why if isinstance(news, NotStarted) else "its process has ended at once")
        if len(news.offer) > MOST_OFFER:
            raise NixlUnavailable(f"its metadata has {len(news.offer)} bytes; at most {MOST_OFFER} are sent")
        return news.offer

    def watch(self, poller: Poller) -> None:
        """Use the pump's poller from now on."""
        self._poller = poller
        poller.watch(self._socket.fileno(), SOCKET, self._on_socket)

    def close(self) -> None:
        """End the process. The links have given back what they had. Idempotent."""
        self.is_up = False
        if self._socket.fileno() >= 0:
            if self._poller is not None:
                self._poller.forget(self._socket.fileno())
            self._socket.close()
            self._kill()

    # For the sending ends of links.

    def stage(self, length: int) -> Staged | None:
        """Return an extent for a payload; None: there is no room now, or no process."""
        begin = self._outgoing.take(STAMP + length) if self.is_up else None
        return None if begin is None else Staged(self, begin, length)

    # For the receiving ends.

    def load(self, offer: bytes, wake: Callable[[], None]) -> Source:
        """Get ready to read what the node of this offer stages."""
        source = Source(next(self._numbers), wake)
        if self.is_up:
            self._sources[source.number] = source
            self._order(Load(source.number, offer))
        return source

    def drop(self, source: Source) -> None:
        """Read nothing more from a source. Idempotent."""
        if self._sources.pop(source.number, None) is not None and self.is_up:
            self._order(Drop(source.number))

    def fetch(self, source: Source, begin: int, stamp: int, length: int, wake: Callable[[], None]) -> Fetch | None:
        """Begin to read what another node has staged; None: there is no room now. ``wake`` is called when there may be.

        Raises LinkBroken (longer than all incoming memory, no process).
        """
        if not self.is_up:
            raise LinkBroken("NIXL has ended on this node")
        if STAMP + length > INCOMING:
            raise LinkBroken(f"a record of {length} bytes, where {INCOMING - STAMP} can be fetched")
        while self._failed and self._failed[0][0] + _FAILED_S < time.monotonic():
            self._incoming.give(self._failed.popleft()[1])
        local = self._incoming.take(STAMP + length)
        if local is None:
            self._waiting[wake] = None
            return None
        number = next(self._numbers)
        fetch = self._fetches[number] = Fetch(self, local, self.view(local, length), wake)
        self._order(Read(number=number, source=source.number, remote=begin, local=local, length=length, stamp=stamp))
        return fetch

    # For extents.

    def view(self, begin: int, length: int) -> memoryview:
        """Return the payload of an extent."""
        return self._memory[begin + STAMP : begin + STAMP + length]

    def set_stamp(self, begin: int, stamp: bytes) -> None:
        """Set the stamp of an extent."""
        self._memory[begin : begin + len(stamp)] = stamp

    def give_outgoing(self, begin: int) -> None:
        self._outgoing.give(begin)

    def give_incoming(self, begin: int) -> None:
        self._incoming.give(begin)
        waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()

    # The process.

    def _order(self, order: Order) -> None:
        self._orders.append(msgspec.msgpack.encode(order))
        self._send()
        if len(self._orders) > MOST_ORDERS:
            self.give_up("it has stopped reading")

    def _send(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # ``_on_socket`` learns of its end
            while self._orders:
                self._socket.send(self._orders[0])
                self._orders.popleft()

    def _on_socket(self, _: int) -> None:
        try:
            while packet := self._socket.recv(MOST_PACKET):
                self._take_news(self._decoder.decode(packet))
        except BlockingIOError:
            self._send()
            return
        except ConnectionResetError:
            pass
        self._kill()
        self.give_up(_how_ended(self._process.returncode))

    def _take_news(self, news: News) -> None:
        match news:
            case Loaded(number):
                if (source := self._sources.get(number)) is not None:
                    source.is_loaded = True
                    source.wake()
            case NotLoaded(number, why):
                self._sources.pop(number, None)
                _log.warning("records of another node are not fetched with NIXL: %s", why)
            case Done(number):
                self._fetches.pop(number).end()
            case TakenBack(number):
                self._fetches.pop(number).end("the other node has taken the record back")
            case Failed(number, why):
                fetch = self._fetches.pop(number)
                self._failed.append((time.monotonic(), fetch.begin))
                fetch.end(why, gives=False)

    def give_up(self, why: str) -> None:
        """End the process, after which nothing writes into the memory any more; links go on with TCP. Idempotent."""
        if not self.is_up:
            return
        self.close()
        _log.error("NIXL has ended on this node (%s); links use TCP", why)
        fetches, waiting = list(self._fetches.values()), self._waiting
        self._fetches, self._waiting = {}, {}
        for fetch in fetches:
            fetch.end("NIXL has ended on this node", gives=False)
        for wake in waiting:
            wake()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _start(pump_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
    """Start the process. UCX's own variables (UCX_TLS, UCX_NET_DEVICES) hold for it."""
    arguments = map(str, (pump_fd, memory_fd, OUTGOING, os.getpid()))
    return subprocess.Popen(
        [sys.executable, "-m", "omni_actors.cluster.nixl_process", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,  # where UCX logs
        pass_fds=(pump_fd, memory_fd),
        start_new_session=True,
        env={"UCX_TLS": "^posix,sysv", **os.environ},  # a killed process would leave their shared memory behind
    )


def _how_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
