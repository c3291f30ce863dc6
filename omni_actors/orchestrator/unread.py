"""The outputs that clients do not have yet, in bytes: an account for each request, and their total.

Rules
1. A piece of output is charged from its arrival in this process until its reader has it. A caller of the library has a
   piece when it is returned. A reader that passes pieces on to a connection holds what it has read: until it asks for
   the next piece or, where it collects a whole answer, until it closes.
2. Window: a request with more than ``window_bytes`` whose reader passes pieces on is paused until the reader has
   brought it down to half of that. A whole answer has no window: its reader gives nothing back before the end. Nor has
   a caller of the library, who may read several answers in any order, each as slowly as it likes.
3. Pressure: from half of ``unread_bytes`` in total until a quarter of it, each request of a connection with more than
   ``SMALL_BYTES`` is paused, except the oldest whole answer that is incomplete and has more: it always runs. So whole
   answers complete one after the other, and never wait for each other's memory.
4. A request waits for its reader while it is paused, whole answers aside, and when it is complete and not read. The
   reader's rate is measured while it waits, from the beginning of that wait. A connection that reads less than
   ``read_bytes_s``, after ``GRACE_S``, is too slow. The piece that a stream holds counts as read; of a whole answer
   only what was sent does.
5. No I/O and no clock: ``now`` is an argument, in seconds of one clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from omni_actors.config import Limits

SMALL_BYTES = 64 * 1024
"""A request with no more than this takes no place once it is complete, and is not ended to make room."""
GRACE_S = 10.0
"""How long the rate of a connection is measured before it counts."""
ROOM_GRACE_S = 2.0
"""How long a request waits for its reader before it may be ended to make room for another one."""


@dataclass(eq=False)
class Account:
    """What the client of one request does not have yet. ``Unread`` alone writes here."""

    unread: int = 0
    """Bytes that have arrived and were not read."""
    held: int = 0
    """Bytes that were read and that the reader still passes on."""
    holds: bool = False
    """Whether the reader passes pieces on."""
    whole: bool = False
    """Whether the reader gives nothing back before the end."""
    sending: bool = False
    """Whether the reader waits for a connection at this moment."""
    paused: bool = False
    complete: bool = False
    """Whether nothing more will arrive."""
    waits_since: float | None = None
    """Since when the request waits for its reader."""
    given: int = 0
    """Bytes that the client got since then."""

    @property
    def charged(self) -> int:
        return self.unread + self.held

    def rate(self, now: float) -> float:
        """Bytes per second that the client got while the request waited for it."""
        return self.given / max(now - self.waits_since, 1e-3) if self.waits_since is not None else math.inf

    def waited_s(self, now: float) -> float:
        """How long the request has waited for its reader."""
        return 0.0 if self.waits_since is None else now - self.waits_since


class Unread:
    """The accounts of all requests, oldest first, and the decisions of the rules above."""

    def __init__(self, limits: Limits) -> None:
        self._window_bytes, self._limit_bytes = limits.window_bytes, limits.unread_bytes
        self._read_bytes_s = limits.read_bytes_s
        self._accounts: dict[Account, None] = {}
        self._pressed = False
        self.total = 0
        """Bytes charged to all accounts."""

    def open(self, account: Account) -> None:
        self._accounts[account] = None

    def close(self, account: Account, now: float) -> list[Account]:
        """Forget a request and its charge. Harmless for one that is closed."""
        self._accounts.pop(account, None)
        self.total -= account.charged
        account.unread = account.held = 0
        account.paused, account.waits_since = False, None
        return self._review(account, now)

    # What happens to an account. Each returns the accounts that are now to be paused, or to go on.

    def arrive(self, account: Account, size: int, now: float) -> list[Account]:
        """A piece has arrived."""
        account.unread += size
        self.total += size
        return self._review(account, now)

    def read(self, account: Account, size: int, now: float) -> list[Account]:
        """The reader takes a piece."""
        account.unread -= size
        if account.holds:
            account.held += size
        else:
            self._give(account, size)
        return self._review(account, now)

    def ask(self, account: Account, now: float) -> list[Account]:
        """The reader asks for the next piece: it has passed the last one on."""
        if account.whole or not account.held:
            return []
        return self.release(account, now)

    def release(self, account: Account, now: float) -> list[Account]:
        """The client has what the reader held."""
        held, account.held = account.held, 0
        self._give(account, held)
        return self._review(account, now)

    def deliver(self, account: Account, size: int, now: float) -> list[Account]:
        """The client has ``size`` bytes of what the reader holds."""
        size = min(size, account.held)
        account.held -= size
        self._give(account, size)
        return self._review(account, now)

    def complete(self, account: Account, now: float) -> list[Account]:
        """Nothing more will arrive."""
        account.complete = True
        return self._review(account, now)

    # What the accounts say.

    @property
    def paused(self) -> int:
        """How many requests are paused."""
        return sum(account.paused and not account.complete for account in self._accounts)

    @property
    def exceeded(self) -> bool:
        """Whether the total bound is passed: ``victim`` has to go."""
        return self.total > self._limit_bytes

    def takes_place(self, account: Account) -> bool:
        """Whether the request, which is complete, still counts against admission."""
        return account.charged > SMALL_BYTES

    def too_slow_at(self, account: Account) -> float:
        """When the account's connection is too slow, unless it reads more before."""
        if account.waits_since is None or not account.sending:
            return math.inf
        taken = account.given + (0 if account.whole else account.held)
        return account.waits_since + max(GRACE_S, taken / self._read_bytes_s)

    def slowest(self, now: float, grace_s: float = ROOM_GRACE_S) -> Account | None:
        """The request whose reader is the slowest, of those that have waited for it longer than ``grace_s``."""
        waiting = [
            account
            for account in self._accounts
            if account.charged > SMALL_BYTES and account.waits_since is not None and account.waited_s(now) >= grace_s
        ]
        return min(waiting, key=lambda account: (account.rate(now), -account.charged), default=None)

    def victim(self, now: float) -> Account:
        """The request to end where the total bound is passed: the slowest reader's, else the largest."""
        return self.slowest(now, 0.0) or max(self._accounts, key=lambda account: account.charged)

    # Inside.

    def _give(self, account: Account, size: int) -> None:
        account.given += size
        self.total -= size

    def _review(self, account: Account, now: float) -> list[Account]:
        """Apply rules 2 to 4 after a change of ``account``; the accounts whose ``paused`` has changed."""
        pressed = self.total > (self._limit_bytes // 4 if self._pressed else self._limit_bytes // 2)
        affected = list(self._accounts) if pressed or self._pressed else [account] * (account in self._accounts)
        self._pressed = pressed
        running = self._running() if pressed else None
        changed = []
        for each in affected:
            paused = self._is_to_pause(each, running)
            if paused != each.paused:
                each.paused = paused
                changed.append(each)
            waits = each.charged > 0 and (each.complete or (paused and not each.whole))
            if not waits:
                each.waits_since = None
            elif each.waits_since is None:
                each.waits_since, each.given = now, 0
        return changed

    def _running(self) -> Account | None:
        """The whole answer that is not paused under pressure."""
        incomplete = (each for each in self._accounts if each.whole and not each.complete)
        return next((each for each in incomplete if each.charged > SMALL_BYTES), None)

    def _is_to_pause(self, account: Account, running: Account | None) -> bool:
        if not (account.holds or account.whole):
            return False
        if account.whole:
            return self._pressed and account is not running and account.charged > SMALL_BYTES
        limit = self._window_bytes if account.holds else math.inf
        if self._pressed:
            limit = min(limit, SMALL_BYTES)
        return account.charged > (limit // 2 if account.paused else limit)
