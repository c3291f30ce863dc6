"""Death at every step of creating, opening, claiming and removing a named ring. Run: python -m … STRIDE.

Rule 1: a step is an event of the interpreter: a call or return of a Python function or of one in C, so that every
system call has a step before it and one after it. A child kills itself at its n-th step, for each n up to the last.
Rule 2: this process forks the children, and observes what each leaves; it has one thread. The observations are
assertions, so it exits with code 1 if one fails. It prints how many children were killed in each role.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from ringbuf import Ring, RingNotFound
from ringbuf._names import PREFIX, SHM

CAPACITY = 4096
LABEL = f"death-{os.getpid()}"


def names() -> list[str]:
    return [entry for entry in os.listdir(SHM) if entry.startswith(PREFIX) and LABEL in entry]


def die_at(step: int) -> None:
    left = step

    def event(frame: FrameType, kind: str, argument: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(event)


def is_killed(step: int, work: Callable[[], object]) -> bool:
    """Return whether a child that does the work was killed at this step, before it came to the end."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            die_at(step)
            work()
            sys.setprofile(None)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def create() -> None:
    """A creator claims an end, closes the ring, and dies in any step: the sweep finds nothing that it cannot remove."""
    with Ring.create_named(LABEL, CAPACITY) as ring:
        ring.claim_producer()


def create_and_be_left(step: int) -> bool:
    killed = is_killed(step, create)
    Ring.sweep_named()
    assert not names()
    return killed


def open_and_claim() -> None:
    with Ring.open(LABEL) as ring:
        ring.claim_consumer()


def open_and_be_left(step: int) -> bool:
    """The creator lives on: after the opener's death the name is gone, or leads another opener to the ring."""
    with Ring.create_named(LABEL, CAPACITY) as ring:
        ring.claim_producer().send(b"kept")
        killed = is_killed(step, open_and_claim)
        Ring.sweep_named()
        if names():
            with Ring.open(LABEL) as other:
                assert bytes(other.claim_consumer().recv(timeout=0).data) == b"kept"
                assert not names()
        else:
            assert ring.peer_pids[1] is not None
    assert not names()
    return killed


def claim_last_and_be_left(step: int) -> bool:
    """The creator claims its end after the opener has claimed the other one, and removes the name, or dies first."""
    ready, go = os.pipe(), os.pipe()

    def creator() -> None:
        sys.setprofile(None)
        ring = Ring.create_named(LABEL, CAPACITY)
        os.write(ready[1], b"!")
        os.read(go[0], 1)
        die_at(step)
        ring.claim_producer()
        ring.close()

    opener = os.fork()
    if not opener:
        os.read(ready[0], 1)
        ring = Ring.open(LABEL)
        ring.claim_consumer()
        os.write(go[1], b"!")
        os.close(go[0])
        signal.pause()
    killed = is_killed(step, creator)
    os.kill(opener, signal.SIGKILL)
    os.waitpid(opener, 0)
    for fd in (*ready, *go):
        os.close(fd)
    Ring.sweep_named()
    assert not names()
    return killed


def sweep_and_be_left(step: int) -> bool:
    """A sweep that is killed leaves nothing that the next one does not remove."""
    assert is_killed(sys.maxsize, lambda: (Ring.create_named(LABEL, CAPACITY), os._exit(0))) is False
    killed = is_killed(step, Ring.sweep_named)
    Ring.sweep_named()
    assert not names()
    try:
        Ring.open(LABEL)
    except RingNotFound:
        return killed
    raise AssertionError("a dead creator's ring was opened")


ROLES = {
    "create": create_and_be_left,
    "open": open_and_be_left,
    "claim last": claim_last_and_be_left,
    "sweep": sweep_and_be_left,
}


def at_every_step(role: Callable[[int], bool], stride: int) -> int:
    """Return the number of steps at which a child was killed."""
    step = 1
    while role(step):
        step += stride
    return (step - 1) // stride


if __name__ == "__main__":
    print({name: at_every_step(role, int(sys.argv[1])) for name, role in ROLES.items()})
