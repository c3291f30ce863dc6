"""The side that connects: attempts to reach another node's pump, until the link is open there.

Rule 1: an attempt that fails before the other side says that the link is open (``link.ALIVE``) is repeated, until the
link's deadline: that side may be starting, may have pushed this connection out in a flood, or does not expect the link
yet. Nothing was sent on the link so far, so nothing is lost. Pauses grow, and are random.
Rule 2: a side that does not know the secret ends the attempts at once.
Rule 3: once both sides are authenticated, the other side ends an attempt for which it does not open the link in time
(``accepting``, rule 2). So this side does not give it up while the link is being opened there. If the news of that end
is lost on the way, this side's kernel asks for it (``channel``, rule 4).
Rule 4: a time in which this process does not run (SIGSTOP, a machine that is paused) counts as one check's time
(``check_s``) at most. A link's deadline is that much later, so it still has its whole time. What has come meanwhile is
read before an attempt is given up. So this side's standstill is not taken for the other side's silence.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from omni_actors.cluster.channel import Channel, Tls, connect
from omni_actors.cluster.handshake import ROLE_OF_LINKS, Connector, HandshakeFailed
from omni_actors.cluster.opening import Opening
from omni_actors.cluster.poller import SOCKET, Poller
from omni_actors.cluster.sending import SendingLink

PAUSE_S: Final = (0.02, 1.0)
"""The first and the longest pause between two attempts."""


class _Dial:
    """A link that has no connection yet, and its latest attempt to get one.

    due: when to begin the next attempt, or during an attempt when to give that up. deadline: when to give up the link.
    """

    def __init__(self, link: SendingLink, now: float, deadline: float) -> None:
        self.link, self.due, self.deadline = link, now, deadline
        self.opening: Opening | None = None
        self.pause_s = PAUSE_S[0]
        self.error = ""


class Dialing:
    """The links that have no connection yet.

    on_open: called with a link and its connection, which it owns. on_failure: called with a link that gets none, and
    with the reason. check_s: at least so often, this looks how much time has passed (rule 4).
    """

    def __init__(
        self,
        poller: Poller,
        secret: bytes,
        on_open: Callable[[SendingLink, Channel], None],
        on_failure: Callable[[SendingLink, str], None],
        *,
        tls: Tls | None,
        handshake_s: float,
        check_s: float,
    ) -> None:
        self._poller, self._secret, self._on_open, self._on_failure = poller, secret, on_open, on_failure
        self._tls, self._handshake_s, self._check_s = tls, handshake_s, check_s
        self._dials: dict[SendingLink, _Dial] = {}
        self._checked = time.monotonic()
        """When this has last looked how much time has passed."""

    def begin(self, link: SendingLink, timeout_s: float) -> None:
        now = self._check(time.monotonic())
        dial = self._dials[link] = _Dial(link, now, now + timeout_s + self._check_s)
        self._try(dial, now)

    def cancel(self, link: SendingLink) -> None:
        """Do nothing more for a link. Idempotent."""
        if (dial := self._dials.pop(link, None)) is not None:
            self._drop(dial)

    def due(self) -> float | None:
        """Return when ``pass_deadlines`` is to be called."""
        if not self._dials:
            return None
        return min(self._checked + self._check_s, *(dial.due for dial in self._dials.values()))

    def pass_deadlines(self, now: float) -> None:
        self._check(now)
        for dial in [each for each in self._dials.values() if each.due <= now]:
            if dial.opening is not None:
                self._step(dial, dial.opening, 0)  # rule 4
            if dial.link not in self._dials or dial.due > now:
                continue
            if dial.opening is not None:
                was_cut_short = now >= dial.deadline and not dial.opening.authenticated
                self._fail(dial, dial.error if dial.error and was_cut_short else "no answer")
            elif now < dial.deadline:
                self._try(dial, now)
            else:
                self.cancel(dial.link)
                host, port = dial.link.address
                self._on_failure(dial.link, f"no connection to {host}:{port}: {dial.error}")

    def close(self) -> None:
        for dial in self._dials.values():
            self._drop(dial)

    def _check(self, now: float) -> float:
        """Put all deadlines off by a time in which this process did not run (rule 4). Returns the time."""
        late = now - self._checked - self._check_s
        if late > 0:
            for dial in self._dials.values():
                dial.due += late
                dial.deadline += late
        self._checked = max(self._checked, now)
        return self._checked

    def _try(self, dial: _Dial, now: float) -> None:
        try:
            connection = connect(dial.link.address)
        except OSError as error:
            self._fail(dial, str(error))
            return
        dial.due = min(now + self._handshake_s, dial.deadline)
        handshake = Connector(self._secret, ROLE_OF_LINKS, dial.link.link_id)
        host = dial.link.address[0]
        dial.opening = Opening(connection, handshake, tls=self._tls, host=host, deadline=dial.due)
        self._poller.watch(connection.fileno(), SOCKET, partial(self._step, dial, dial.opening))

    def _step(self, dial: _Dial, opening: Opening, _: int) -> None:
        try:
            channel = opening.step()
        except OSError as error:
            self._fail(dial, str(error))
        except HandshakeFailed as error:
            self.cancel(dial.link)
            self._on_failure(dial.link, str(error))
        else:
            if channel is not None:
                del self._dials[dial.link]
                self._on_open(dial.link, channel)
            elif opening.authenticated:
                dial.due = dial.deadline  # rule 3

    def _fail(self, dial: _Dial, why: str) -> None:
        """Give an attempt up, and plan the next one."""
        self._drop(dial)
        dial.error = why
        now = self._check(time.monotonic())
        dial.due = min(now + random.uniform(0.5, 1.0) * dial.pause_s, dial.deadline)
        dial.pause_s = min(2 * dial.pause_s, PAUSE_S[1])

    def _drop(self, dial: _Dial) -> None:
        if dial.opening is not None:
            self._poller.forget(dial.opening.fileno())
            dial.opening.close()
            dial.opening = None
