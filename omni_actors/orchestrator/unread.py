"""Accounts for the output that clients do not have yet, in bytes, and decides which requests to pause or end.

Rules
1. A piece of output is charged from its arrival in the parent until its client has it. A caller of the library has a
   piece when it is returned. A piece that is read for a connection stays charged, as undelivered, until the reader
   asks for the next one or, if it collects the whole answer, until it closes (``ReaderKind``).
2. Window: a stream with more than ``window_bytes`` is paused until the charge is down to half of that. A whole answer
   has no window, since its reader frees nothing before the end. A caller of the library has none either: it may read
   several answers in any order, at any rate.
3. Pressure: it begins at half of ``unread_bytes`` in total and lasts until a quarter. During pressure, each stream and
   each whole answer with more than ``SMALL_BYTES`` is paused, except the unfinished whole answer that was the first to
   exceed them. So whole answers complete one after the other and never wait for each other's memory.
4. A request waits for its reader while it is paused (unless it is a whole answer), and while it has ended and is
   unread. The reader's rate is measured from the beginning of that wait. A connection that reads less than
   ``read_bytes_s`` on average, after ``RATE_GRACE_S``, is too slow. The undelivered piece of a stream counts as read;
   of a whole answer, only the part that was sent does.
5. A request that waits for its reader may be ended to make room for another one, unless its reader is paced: then it
   waits for the pace that the reader has chosen, whatever its client does. It still counts as slow for rule 4 and when
   the total is exceeded.
6. This module does no I/O and has no clock: ``now`` is an argument, in seconds of one clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from omni_actors.config import Limits

SMALL_BYTES = 64 * 1024
"""A request that has ended with no more than this takes no place, and is not ended to make room."""
RATE_GRACE_S = 10.0
"""The time for which the rate of a connection is measured before it may be too slow."""
ROOM_GRACE_S = 2.0
"""The time that a request waits for its reader before it may be ended to make room for another request."""


ReaderKind: TypeAlias = Literal["caller", "stream", "paced", "whole"]
"""How output passes from a request's reader to the client.

caller: the reader is a caller of the library, and so the client itself.
stream: the reader passes each piece to a connection before it asks for the next one.
paced: as stream, at a pace of the reader's own, which may be slower than what the connection accepts.
whole: the reader collects the whole answer before it passes anything to a connection.
"""


@dataclass(eq=False, slots=True)
class Account:
    """The output of one request that its client does not have yet.

    ``Unread`` alone writes here, except for ``reader`` and ``sending``, which the reader sets.
    """

    reader: ReaderKind = "caller"
    queued: int = 0
    """Bytes that arrived and that the reader has not read."""
    undelivered: int = 0
    """Bytes that the reader has read and its connection has not accepted."""
    sending: bool = False
    """Whether the reader is waiting for its connection."""
    paused: bool = False
    ended: bool = False
    """Whether no more output will arrive."""
    waiting_since: float | None = None
    """When the request began to wait for its reader."""
    delivered: int = 0
    """Bytes that the client received since then."""

    @property
    def charged(self) -> int:
        """Bytes of output that the client does not have yet."""
        return self.queued + self.undelivered

    def rate(self, now: float) -> float:
        """Return the bytes per second that the client received since the wait began; 0 if there is no wait."""
        return 0.0 if self.waiting_since is None else self.delivered / max(now - self.waiting_since, 1e-3)

    def waited_s(self, now: float) -> float:
        """Return for how many seconds the request has waited for its reader."""
        return 0.0 if self.waiting_since is None else now - self.waiting_since


class Unread:
    """The accounts of all requests, oldest first, and the decisions about them.

    The methods that change an account return the accounts whose ``paused`` has changed, for the caller to act on.
    The sum of all charges exceeds ``limits.unread_bytes`` only between ``arrive`` and the closing of ``victim``.
    """

    def __init__(self, limits: Limits) -> None:
        self._window_bytes, self._limit_bytes = limits.window_bytes, limits.unread_bytes
        self._read_bytes_s = limits.read_bytes_s
        self._accounts: dict[Account, None] = {}
        self._waiting: dict[Account, None] = {}
        """The accounts with more than ``SMALL_BYTES`` that wait for their reader."""
        self._places: dict[Account, None] = {}
        """The accounts with more than ``SMALL_BYTES`` that have ended."""
        self._large_answers: dict[Account, None] = {}
        """The accounts of unfinished whole answers with more than ``SMALL_BYTES``, in the order in which they grew so
        large."""
        self._under_pressure = False
        self._running: Account | None = None
        """The large whole answer that is not paused during pressure."""
        self.total = 0
        """Bytes that are charged to all accounts."""

    def open(self, account: Account) -> None:
        """Add the account of a new request."""
        self._accounts[account] = None

    def close(self, account: Account, now: float) -> list[Account]:
        """Remove an account and its charge. Does nothing to a closed account."""
        self._accounts.pop(account, None)
        self.total -= account.charged
        account.queued = account.undelivered = 0
        account.paused, account.waiting_since = False, None
        self._file(account)
        return self._review(account, now)

    # Changes of an account.

    def arrive(self, account: Account, size: int, now: float) -> list[Account]:
        """Charge a piece of ``size`` bytes that has arrived."""
        account.queued += size
        self.total += size
        return self._review(account, now)

    def read(self, account: Account, size: int, now: float) -> list[Account]:
        """Record that the reader takes a piece of ``size`` bytes."""
        account.queued -= size
        if account.reader == "caller":
            self._record_delivery(account, size)
        else:
            account.undelivered += size
        return self._review(account, now)

    def ask(self, account: Account, now: float) -> list[Account]:
        """Record that the reader asks for the next piece: a stream's connection has accepted the last one."""
        if account.reader == "whole" or not account.undelivered:
            return []
        return self.deliver(account, account.undelivered, now)

    def deliver(self, account: Account, size: int, now: float) -> list[Account]:
        """Record that the client has ``size`` of the undelivered bytes."""
        size = min(size, account.undelivered)
        account.undelivered -= size
        self._record_delivery(account, size)
        return self._review(account, now)

    def end(self, account: Account, now: float) -> list[Account]:
        """Record that no more output will arrive."""
        account.ended = True
        return self._review(account, now)

    # Queries.

    @property
    def paused(self) -> int:
        """The number of paused requests."""
        return sum(account.paused and not account.ended for account in self._accounts)

    @property
    def exceeded(self) -> bool:
        """Whether the total exceeds ``unread_bytes``, so that ``victim`` has to end."""
        return self.total > self._limit_bytes

    @property
    def places(self) -> int:
        """The number of requests that have ended and still count against admission."""
        return len(self._places)

    def too_slow_at(self, account: Account) -> float:
        """Return when the connection becomes too slow if it reads nothing more; infinity while no send waits for it."""
        if account.waiting_since is None or not account.sending:
            return math.inf
        taken = account.delivered + (0 if account.reader == "whole" else account.undelivered)
        return account.waiting_since + max(RATE_GRACE_S, taken / self._read_bytes_s)

    def slow(self, now: float) -> list[Account]:
        """Return the accounts to close to make room, the slowest reader's first: those that have waited long enough.

        That is ``ROOM_GRACE_S``. Paced readers are left out (rule 5).
        """
        waiting = [each for each in self._waiting if each.waited_s(now) >= ROOM_GRACE_S and each.reader != "paced"]
        return sorted(waiting, key=lambda account: _rank(account, now))

    def victim(self, now: float) -> Account:
        """Return the account to close when the total is exceeded: the slowest reader's, or else the largest."""
        if self._waiting:
            return min(self._waiting, key=lambda account: _rank(account, now))
        return max(self._accounts, key=lambda account: account.charged)

    # Internal.

    def _record_delivery(self, account: Account, size: int) -> None:
        account.delivered += size
        self.total -= size

    def _review(self, account: Account, now: float) -> list[Account]:
        """Apply rules 2 to 4 after a change of ``account``. Return the accounts whose ``paused`` has changed.

        It looks at the other accounts only when pressure begins or ends.
        """
        if account.reader == "whole" and not account.ended:
            _keep_if_large(self._large_answers, account)
        else:
            self._large_answers.pop(account, None)
        pressed = self.total > (self._limit_bytes // 4 if self._under_pressure else self._limit_bytes // 2)
        running = next(iter(self._large_answers), None) if pressed else None
        concerned = [account]
        if pressed != self._under_pressure:
            concerned = list(self._accounts)
        elif pressed:
            concerned = [each for each in dict.fromkeys((account, self._running, running)) if each is not None]
        self._under_pressure, self._running = pressed, running
        changed = []
        for each in concerned:
            if each not in self._accounts:
                continue
            paused = self._should_pause(each)
            if paused != each.paused:
                each.paused = paused
                changed.append(each)
            waits = each.charged > 0 and (each.ended or (paused and each.reader != "whole"))
            if not waits:
                each.waiting_since = None
            elif each.waiting_since is None:
                each.waiting_since, each.delivered = now, 0
            self._file(each)
        return changed

    def _file(self, account: Account) -> None:
        """Keep ``_waiting`` and ``_places`` true after a change of an account."""
        if account.waiting_since is not None:
            _keep_if_large(self._waiting, account)
        else:
            self._waiting.pop(account, None)
        if account.ended:
            _keep_if_large(self._places, account)
        else:
            self._places.pop(account, None)

    def _should_pause(self, account: Account) -> bool:
        if account.reader == "caller":
            return False
        if account.reader == "whole":
            return self._under_pressure and account is not self._running and account.charged > SMALL_BYTES
        limit = min(self._window_bytes, SMALL_BYTES) if self._under_pressure else self._window_bytes
        return account.charged > (limit // 2 if account.paused else limit)


def _rank(account: Account, now: float) -> tuple[float, int]:
    """Return what is least for the slowest reader; of several, for the one that has most to read."""
    return account.rate(now), -account.charged


def _keep_if_large(accounts: dict[Account, None], account: Account) -> None:
    if account.charged > SMALL_BYTES:
        accounts[account] = None
    else:
        accounts.pop(account, None)
