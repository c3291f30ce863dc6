"""The process that runs NIXL for a pump: other nodes read its outgoing memory, and it reads that of other nodes.

    pump ── Load, Read, Drop ──► this process ── UCX ──► the NIXL processes of other nodes
         ◄── Loaded, Done, … ──

NIXL has a process of its own for four reasons. A fault of NIXL or UCX, or a descriptor that crashes them, ends this
process, and not a server or an agent. UCX listens on all network interfaces and asks no secret of them; here it can
reach the staging memory, and no prompts, keys or weights. NIXL has to be asked whether a READ is done; here that
keeps no other thread awake. And its Python package logs to stdout and closes the log handlers of its process.

Rules
1. This process never writes into memory of another node: it reads (NIXL's READ), into its own incoming memory.
2. A READ counts only if the other node had not taken the extent back when it was over. So a second READ gets the
   extent's stamp, after the first one is complete: its owner clears the stamp before it uses the bytes again.
3. The pump keeps an extent of incoming memory until this process says that its READ is over. No READ is cancelled
   before, so none writes into an extent that is used again. The pump ends this process if a READ takes too long.
4. It ends with its pump's process: the kernel kills it (PDEATHSIG), and its socket ends. It ends by ``os._exit``.
5. While there is a READ, it asks NIXL about it, ever more seldom. Else it sleeps. NIXL's own thread serves other nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import select
import signal
import socket
import sys
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

STAMP: Final = 64
"""Bytes of an extent before its payload: a stamp of 8 bytes, and padding."""
MOST_PACKET: Final = 64 << 10
MOST_PEERS: Final = 1024
"""Nodes that stay loaded when no link uses them, because UCX closes no connection to a process that lives."""
_PAUSE_S: Final = (50e-6, 1e-3)
"""The first and the longest pause between two questions whether a READ is done."""
_WAKE_US: Final = 100_000
"""NIXL's thread waits for UCX's events. It looks so often besides, because UCX may miss one (NIXL's own caution)."""
_PR_SET_PDEATHSIG: Final = 1


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# pump -> process


class Load(_Message, frozen=True):
    """Get ready to read from another node. source: the pump's number for it. offer: what that node's process made."""

    source: int
    offer: bytes


class Drop(_Message, frozen=True):
    """Nothing more is read from this source."""

    source: int


class Read(_Message, frozen=True):
    """Read a payload of ``length`` bytes. remote, local: where the extents begin in the two staging memories."""

    number: int
    source: int
    remote: int
    local: int
    length: int
    stamp: int


# process -> pump


class Started(_Message, frozen=True):
    """The first message, if NIXL works. offer: what other nodes' processes load to read from this one."""

    offer: bytes


class NotStarted(_Message, frozen=True):
    """The first message, if NIXL does not work. why: in words."""

    why: str


class Loaded(_Message, frozen=True):
    """A source can be read from."""

    source: int


class NotLoaded(_Message, frozen=True):
    """A source cannot be read from."""

    source: int
    why: str


class Done(_Message, frozen=True):
    """The payload is in the incoming memory, as the other node wrote it."""

    number: int


class TakenBack(_Message, frozen=True):
    """The READ is over, and its payload is worth nothing: the other node has used the extent again, or may have."""

    number: int


class Failed(_Message, frozen=True):
    """The READ has failed. A network card may write into the incoming memory for a moment yet."""

    number: int
    why: str


Order: TypeAlias = Load | Drop | Read
News: TypeAlias = Started | NotStarted | Loaded | NotLoaded | Done | TakenBack | Failed


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """name: of the NIXL agent. base, size: its outgoing memory. metadata: NIXL's."""

    name: str
    base: int
    size: int
    metadata: bytes


class _Peer:
    """The NIXL agent of another node. reads: how many are under way."""

    def __init__(self, offer: _Offer) -> None:
        self.offer = offer
        self.reads = 0
        self.is_lost = False


class _Reading:
    """One order, and the READ that is under way for it: of the payload, then of the stamp."""

    def __init__(self, order: Read, peer: _Peer) -> None:
        self.order, self.peer = order, peer
        self.handle: Any = None
        self.has_payload = False


class _Process:
    """memory: the staging memory. outgoing: how many bytes of it, from the beginning, other nodes read."""

    def __init__(self, pump: socket.socket, memory: mmap.mmap, outgoing: int) -> None:
        """Raises ImportError (no package), and what NIXL raises."""
        import nixl_cu12._bindings as nixl  # of the extra "nixl". Its ``nixl_agent`` keeps a core busy (pthrDelay)

        self._nixl: Any = nixl
        self._errors = _errors_of(nixl)
        self._load_errors: tuple[type[Exception], ...] = (*self._errors, msgspec.MsgspecError, UnicodeDecodeError)
        self._pump, self._memory = pump, memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _WAKE_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        name = secrets.token_hex(8)
        self._agent: Any = nixl.nixlAgent(name, config)
        backend = self._agent.createBackend("UCX", {})
        offered = nixl.nixlRegDList(nixl.DRAM_SEG, [(self._base, outgoing, 0, "")])
        incoming = nixl.nixlRegDList(nixl.DRAM_SEG, [(self._base + outgoing, len(memory) - outgoing, 0, "")])
        self._agent.registerMem(offered, [backend])
        self._agent.registerMem(incoming, [backend])  # its keys stay here
        metadata = self._agent.getLocalPartialMD(offered, True, [backend])
        self.offer = msgspec.msgpack.encode(_Offer(name, self._base, outgoing, metadata))
        self._peers: dict[bytes, _Peer] = {}
        """The peers, by their offers."""
        self._sources: dict[int, _Peer] = {}
        self._readings: dict[int, _Reading] = {}

    def serve(self) -> None:
        """Do what the pump says until its socket ends."""
        decoder, pause = msgspec.msgpack.Decoder(Order), _PAUSE_S[0]
        while True:
            if select.select([self._pump], [], [], pause if self._readings else None)[0]:
                if not (packet := self._pump.recv(MOST_PACKET)):
                    return
                self._do(decoder.decode(packet))
                pause = _PAUSE_S[0]
            before = len(self._readings)
            for reading in tuple(self._readings.values()):
                self._go_on(reading)
            pause = _PAUSE_S[0] if len(self._readings) < before else min(1.5 * pause, _PAUSE_S[1])

    def _do(self, order: Order) -> None:
        match order:
            case Load():
                self._load(order)
            case Drop(source):
                self._sources.pop(source, None)
            case Read():
                self._begin(order)

    def _load(self, order: Load) -> None:
        if (peer := self._peers.get(order.offer)) is None:
            if len(self._peers) >= MOST_PEERS:
                self._forget_oldest()
            try:
                offer = msgspec.msgpack.decode(order.offer, type=_Offer)
                if (loaded := self._agent.loadRemoteMD(offer.metadata).decode()) != offer.name:
                    self._agent.invalidateRemoteMD(loaded)
                    raise msgspec.ValidationError(f"it has the metadata of {loaded}, and is called {offer.name}")
            except self._load_errors as error:
                self._tell(NotLoaded(order.source, _words(error)))
                return
            peer = self._peers[order.offer] = _Peer(offer)
        elif peer.is_lost:  # a READ of it is not over yet
            self._tell(NotLoaded(order.source, "the NIXL connection to it is lost"))
            return
        self._sources[order.source] = peer
        self._tell(Loaded(order.source))

    def _begin(self, order: Read) -> None:
        peer = self._sources.get(order.source)
        if peer is None or peer.is_lost:
            self._tell(Failed(order.number, "the NIXL connection to the other node is lost"))
        elif order.remote + STAMP + order.length > peer.offer.size:
            self._tell(
                Failed(order.number, f"an extent at {order.remote} with {order.length} bytes, beyond the memory")
            )
        else:
            reading = self._readings[order.number] = _Reading(order, peer)
            peer.reads += 1
            self._go_on(reading)

    def _go_on(self, reading: _Reading) -> None:
        """Begin or watch a READ, and begin the next one."""
        try:
            while reading.handle is None or self._agent.getXferStatus(reading.handle) == self._nixl.NIXL_SUCCESS:
                if reading.handle is not None:
                    self._agent.releaseXferReq(reading.handle)
                    reading.handle = None
                    if reading.has_payload:
                        self._end(reading, self._check_stamp(reading.order))
                        return
                    reading.has_payload = True
                self._post(reading)
        except self._errors as error:
            reading.peer.is_lost = True
            self._end(reading, Failed(reading.order.number, f"the READ failed: {_words(error)}"))

    def _post(self, reading: _Reading) -> None:
        nixl, order = self._nixl, reading.order
        offset, length = (0, 8) if reading.has_payload else (STAMP, order.length)
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(self._base + order.local + offset, length, 0)])
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(reading.peer.offer.base + order.remote + offset, length, 0)])
        reading.handle = self._agent.createXferReq(nixl.NIXL_READ, local, remote, reading.peer.offer.name, b"", [])
        self._agent.postXferReq(reading.handle, b"")

    def _check_stamp(self, order: Read) -> Done | TakenBack:
        found = int.from_bytes(self._memory[order.local : order.local + 8], "little")
        return Done(order.number) if found == order.stamp else TakenBack(order.number)

    def _end(self, reading: _Reading, news: Done | TakenBack | Failed) -> None:
        if reading.handle is not None:  # it has failed
            with contextlib.suppress(*self._errors):
                self._agent.releaseXferReq(reading.handle)
        del self._readings[reading.order.number]
        reading.peer.reads -= 1
        self._forget(reading.peer)
        self._tell(news)

    def _forget_oldest(self) -> None:
        """Forget the node that was loaded first, of those that no link uses."""
        used = set(self._sources.values())
        for peer in self._peers.values():
            if peer not in used and not peer.reads:
                peer.is_lost = True
                self._forget(peer)
                return

    def _forget(self, peer: _Peer) -> None:
        """Forget a lost node once no READ of it is under way, so that its next offer makes a new connection."""
        if peer.is_lost and not peer.reads and self._peers.pop(msgspec.msgpack.encode(peer.offer), None) is not None:
            with contextlib.suppress(*self._errors):  # it may be gone already
                self._agent.invalidateRemoteMD(peer.offer.name)

    def _tell(self, news: News) -> None:
        self._pump.send(msgspec.msgpack.encode(news))


def _errors_of(nixl: Any) -> tuple[type[Exception], ...]:
    return tuple(each for each in vars(nixl).values() if isinstance(each, type) and issubclass(each, Exception))


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def main(pump_fd: int, memory_fd: int, outgoing: int, parent: int) -> NoReturn:
    """Run the process. pump_fd: a socket of packets. memory_fd: the staging memory. parent: the pid of the pump's."""
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # the pump ends it
        signal.signal(stop_signal, lambda *_: None)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl took effect
        os._exit(0)
    pump = socket.socket(fileno=pump_fd)
    memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
    try:
        process = _Process(pump, memory, outgoing)
    except Exception as error:  # noqa: BLE001 - the pump reports it, whatever it is
        pump.send(msgspec.msgpack.encode(NotStarted(f"{type(error).__name__}: {error}"[:1000])))
        os._exit(1)
    pump.send(msgspec.msgpack.encode(Started(process.offer)))
    try:
        process.serve()
    except (OSError, msgspec.MsgspecError) as error:
        print(f"NIXL ends: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
