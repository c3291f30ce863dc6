"""The pump: one thread that moves the records of all links of a process.

Rule 1: the pump's thread alone touches links, sockets and ring ends. Calls of other threads are run by it, one after
the other, between its turns; a turn is bounded, so a call waits a few milliseconds at most.
Rule 2: the thread sleeps in one ``epoll``, until a socket, a doorbell or a call, or until the next deadline. Each link
remembers whether its socket is ready, so that a link in use costs no change of what is watched.
Rule 3: what one connection does ends at most that connection.
Rule 4: a loss is reported once, by ``on_lost``, in the pump's thread. The link's end of the ring stays open until
``close``.
Rule 5: an order that lacks memory or descriptors fails alone: it raises that where it was called, and the caller then
closes the link. If the thread itself fails, every link is reported as lost, and every later call raises PumpStopped.
"""

from __future__ import annotations

import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from omni_actors.cluster.accepting import Accepting
from omni_actors.cluster.channel import Address, Channel, Tls
from omni_actors.cluster.dialing import Dialing
from omni_actors.cluster.handshake import Acceptor
from omni_actors.cluster.link import SIGNS, Link, LinkBroken, LinkStatistics
from omni_actors.cluster.nixl_links import FetchingLink, StagingLink
from omni_actors.cluster.poller import BELL, ENDED, READ, SOCKET, WRITE, Poller
from omni_actors.cluster.receiving import ReceivingLink
from omni_actors.cluster.sending import SendingLink
from omni_actors.cluster.transfers import Transfers
from omni_actors.errors import OmniError
from ringbuf import Consumer, Producer, RingError

T = TypeVar("T")


class PumpStopped(OmniError):
    """The pump was stopped, or its thread failed: ``__cause__`` is then the exception."""

    def __init__(self) -> None:
        super().__init__("the pump has stopped")


class Pump:
    """Moves records between the rings of this node and those of others. Thread-safe.

    secret: at least 16 bytes, the same on all nodes. host: this node's own IP address, at which it accepts links.
    on_lost: called as ``on_lost(link_id, why)`` in the pump's thread when a link breaks; must not wait. It may call the
    pump. silent_s: a link whose other side is silent for so long is lost, at the latest after 1.6 times as long; a
    shorter interruption only delays, up to about 12 s of the default 15 (TCP retransmits ever more seldom), and a time
    in which this process does not run is no silence of the other side (``sending``). transfers: carries large records
    with NIXL, and is closed by the pump.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        on_lost: Callable[[int, str], None],
        tls: Tls | None = None,
        *,
        transfers: Transfers | None = None,
        silent_s: float = 15.0,
        handshake_s: float = 5.0,
    ) -> None:
        """Raises OSError (not this node's address, no descriptors, no thread), ValueError (host, a short secret)."""
        self._on_lost, self._silent_s, self._sign_s = on_lost, silent_s, silent_s / SIGNS
        self._transfers = transfers
        with ExitStack() as undo:
            if transfers is not None:
                undo.callback(transfers.close)
            if transfers is not None and tls is not None:
                raise ValueError("links with TLS and NIXL: what NIXL carries is not encrypted")
            Acceptor(secret)  # checks it
            self._poller = Poller()
            undo.callback(self._poller.close)
            self._accepting = Accepting(self._poller, host, secret, self._arrive, tls=tls, handshake_s=handshake_s)
            undo.callback(self._accepting.close)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake_fd)
            opened = undo.pop_all()
        self._dialing = Dialing(
            self._poller, secret, self._open, self._lose, tls=tls, handshake_s=handshake_s, check_s=self._sign_s
        )
        self.address: Address = self._accepting.address
        """Where other nodes connect to."""
        self._links: dict[int, Link] = {}
        self._ready: dict[Link, None] = {}
        self._descriptors: dict[Link, tuple[int, int]] = {}
        """The socket and the doorbell of each open link."""
        self._next_sign = 0.0
        """When the next ALIVE is due, and silence is measured."""
        self._calls: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._calls_lock = threading.Lock()
        self._stopping = self._stopped = False
        self._cause: BaseException | None = None
        self._poller.watch(self._wake_fd, select.EPOLLIN, self._run_calls)
        if transfers is not None:
            transfers.watch(self._poller)
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # can't start new thread
            opened.close()
            raise OSError(str(error)) from error

    def send(self, link_id: int, consumer: Consumer, address: Address) -> None:
        """Connect to another node's pump, and carry the records out of a ring to the end that it has for ``link_id``.

        Returns at once; a link that is not open after 1.2 times ``silent_s`` is reported as a loss. A time in which
        this process does not run counts as a fifth of it at most (``dialing``, rule 4). The pump uses ``consumer``
        until ``close``. Raises ValueError (a link of this id exists, or no IP address), PumpStopped, OSError and
        MemoryError (rule 5).
        """
        self._call(lambda: self._begin_send(self._sending(link_id, consumer, address)))

    def receive(self, link_id: int, producer: Producer) -> None:
        """Accept one connection for ``link_id``, and put its records into a ring.

        The connection may come first: then it waits for this call for ``handshake_s``, and comes again. The pump uses
        ``producer`` until ``close``. Raises ValueError (a link of this id exists), PumpStopped, OSError and MemoryError
        (rule 5).
        """
        self._call(lambda: self._begin_receive(self._receiving(link_id, producer)))

    def close(self, link_id: int) -> None:
        """Cut a link, and close its end of the ring, whose other end gets RingClosed. Idempotent.

        When it returns, the pump does not touch the ring any more: the ring may be closed. The other node's pump
        reports the link as lost, unless it has closed it, too. Does nothing after ``stop``, which closed it.
        """
        try:
            self._call(lambda: self._close(link_id))
        except PumpStopped:
            self._thread.join()  # it may be closing its links now

    def statistics(self) -> dict[int, LinkStatistics]:
        """Return what each link has moved. Raises PumpStopped."""
        return self._call(lambda: {link.link_id: link.statistics() for link in self._links.values()})

    @property
    def has_failed(self) -> bool:
        """Whether its thread has failed (rule 5). Not after ``stop``."""
        return self._cause is not None

    def stop(self) -> None:
        """Close all links and the listener, and end the thread. Idempotent."""
        with suppress(PumpStopped):
            self._call(lambda: setattr(self, "_stopping", True))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the pump's thread, and return what it returns. Raises PumpStopped, and what it raises."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except (ValueError, OSError, MemoryError, RingError) as error:
                future.set_exception(error)

        with self._calls_lock:
            if self._stopped:
                raise PumpStopped from self._cause
            self._calls.append((run, future))
            os.eventfd_write(self._wake_fd, 1)
        return future.result()

    # From here on, in the pump's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold views of the rings' memory
            self._cause = error
            raise
        finally:
            self._shut_down()

    def _turn(self) -> None:
        due = self._due()
        if self._ready:
            self._poller.handle(0.0)
        else:
            self._poller.handle(None if due is None else max(0.0, due - time.monotonic()))
        for link in tuple(self._ready):
            self._move(link)
        if due is not None and (now := time.monotonic()) >= due:
            self._pass_deadlines(now)

    def _run_calls(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        while self._calls:
            self._calls[0][0]()
            self._calls.popleft()  # only now: if the call ends the thread, ``_shut_down`` answers it

    def _shut_down(self) -> None:
        with self._calls_lock:
            self._stopped = True
        for _, future in self._calls:
            if not future.done():
                future.set_exception(PumpStopped())
        lost = [link for link in self._links.values() if link.state in ("opening", "open")] if self._cause else []
        for link in self._links.values():
            link.close()
        if self._transfers is not None:
            self._transfers.close()
        self._dialing.close()
        self._accepting.close()
        self._poller.close()
        os.close(self._wake_fd)
        for link in lost:
            self._on_lost(link.link_id, f"the pump failed: {self._cause!r}")

    def _sending(self, link_id: int, consumer: Consumer, address: Address) -> SendingLink:
        if self._transfers is None:
            return SendingLink(link_id, consumer, address)
        return StagingLink(link_id, consumer, address, self._transfers)

    def _receiving(self, link_id: int, producer: Producer) -> ReceivingLink:
        if self._transfers is None:
            return ReceivingLink(link_id, producer)
        return FetchingLink(link_id, producer, self._transfers, partial(self._wake, link_id))

    def _wake(self, link_id: int) -> None:
        """Let a link move, if it is open."""
        link = self._links.get(link_id)
        if link is not None and link in self._descriptors:
            self._ready[link] = None

    def _begin_send(self, link: SendingLink) -> None:
        self._add(link)
        self._dialing.begin(link, self._silent_s)

    def _begin_receive(self, link: ReceivingLink) -> None:
        self._add(link)
        if (channel := self._accepting.take(link.link_id)) is not None:
            self._open(link, channel)

    def _add(self, link: Link) -> None:
        if link.link_id in self._links:
            raise ValueError(f"there is a link {link.link_id} already")
        self._links[link.link_id] = link

    def _arrive(self, link_id: int, channel: Channel) -> bool:
        """Begin to use a connection that was accepted. Returns False if its link is not expected yet."""
        if (link := self._links.get(link_id)) is None:
            return False
        if isinstance(link, ReceivingLink) and link.state == "opening":
            self._open(link, channel)
        else:  # a second connection for a link
            self._poller.forget(channel.fileno())
            channel.reset()
        return True

    def _open(self, link: Link, channel: Channel) -> None:
        """Begin to use an authenticated connection, whose descriptor is watched already, unless it is lost."""
        if not self._descriptors:  # the check of other links stays when it is
            self._next_sign = time.monotonic() + self._sign_s
        try:
            link.open(channel)
        except OSError:  # the other side has given this connection up, and makes another one
            link.state = "opening"
            self._poller.forget(channel.fileno())
            channel.reset()
            return
        socket_fd, bell_fd = self._descriptors[link] = channel.fileno(), link.bell()
        self._poller.change(socket_fd, SOCKET, partial(self._on_socket, link))
        self._poller.watch(bell_fd, BELL, partial(self._on_bell, link))
        if isinstance(link, ReceivingLink):
            channel.limit_silence(self._silent_s)
        self._ready[link] = None

    def _on_socket(self, link: Link, events: int) -> None:
        link.readable = link.readable or bool(events & READ)
        link.writable = link.writable or bool(events & WRITE)
        link.hung_up = link.hung_up or bool(events & ENDED)
        self._ready[link] = None

    def _on_bell(self, link: Link, _: int) -> None:
        self._ready[link] = None

    def _move(self, link: Link) -> None:
        try:
            more = link.step()
        except (LinkBroken, OSError) as error:
            self._lose(link, str(error))
        except RingError as error:
            self._lose(link, f"{type(error).__name__}: {error}")
        else:
            if not more:
                self._ready.pop(link, None)
            if link.state != "open":
                self._forget(link)

    def _lose(self, link: Link, why: str) -> None:
        self._forget(link)
        link.lose()
        self._on_lost(link.link_id, why)

    def _forget(self, link: Link) -> None:
        """Stop watching the descriptors of a link that moves nothing more."""
        self._ready.pop(link, None)
        for fd in self._descriptors.pop(link, ()):
            self._poller.forget(fd)
        if isinstance(link, SendingLink):
            self._dialing.cancel(link)

    def _close(self, link_id: int) -> None:
        if (link := self._links.pop(link_id, None)) is not None:
            self._forget(link)
            link.close()

    def _due(self) -> float | None:
        """Return when something has to happen next, whatever else does."""
        dues = [self._accepting.due(), self._dialing.due(), self._next_sign if self._descriptors else None]
        return min((due for due in dues if due is not None), default=None)

    def _pass_deadlines(self, now: float) -> None:
        self._accepting.pass_deadlines(now)
        self._dialing.pass_deadlines(now)
        if self._next_sign <= now:
            self._next_sign = now + self._sign_s
            for link in tuple(self._descriptors):
                try:
                    link.check_silence(self._sign_s)
                except (LinkBroken, OSError) as error:
                    self._lose(link, str(error))
