"""The names of rings, for processes that inherit no descriptors from each other.

    ringbuf.PID_NAMESPACE.PID.START.MEMORY-DATA-SPACE.GENERATION.LABEL

Rule 1: a name is an empty POSIX shared memory object, and the text of the name is all that it contains: the creator's
pid and start time, the numbers of its three descriptors, and the ring's generation. So one system call publishes a
name, complete, and no contents have to be trusted. The memory itself stays a sealed memfd, which others open at
/proc/PID/fd.
Rule 2: the generation is random. No two rings ever have one name, so to remove a name never removes another ring's.
Rule 3: a name is stale when its creator is dead, or has the ring open no more, or when both ends have been claimed.
``sweep`` removes stale names. Whatever a process is killed in, its name is stale, or is still of use to others.
Rule 4: there is no semaphore. A process that is killed would keep it, the C library gives it for a moment a name that
no sweep can recognise, and it ends the process if a stranger has written into it. The claim decides (see ``_claim``).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import posix_ipc

from ringbuf._claim import claim_word_of, pid_of, read_claims
from ringbuf._errors import RingNameRefused, RingNameTaken, RingNotFound

PREFIX: Final = "ringbuf."
SHM: Final = "/dev/shm"
_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_NUMBER: Final = "(0|[1-9][0-9]{0,19})"
_NAME: Final = re.compile(
    rf"ringbuf\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}-{_NUMBER}-{_NUMBER}\.([0-9a-f]{{16}})\.({_LABEL.pattern})",
    re.ASCII,
)
_MEMORY: Final = "/memfd:ringbuf"
_BELL: Final = "pipe:["
"""How /proc shows a descriptor of a ring's memory, and of a named ring's doorbell."""
_PID_LIMIT: Final = 1 << 22
_START_LIMIT: Final = 1 << 42
_DESCRIPTOR_LIMIT: Final = 1 << 31


@dataclass(frozen=True, kw_only=True)
class RingName:
    """A parsed name. creator: the claim word of the process (``_claim``). fds: the creator's numbers, as ``Ring.fds``.

    pid_namespace: the inode of the creator's, in which its pid has a meaning.
    """

    pid_namespace: int
    creator: int
    fds: tuple[int, int, int]
    generation: int
    label: str

    @property
    def pid(self) -> int:
        return pid_of(self.creator)

    def __str__(self) -> str:
        start = self.creator // _PID_LIMIT
        fds = "-".join(map(str, self.fds))
        return f"{PREFIX}{self.pid_namespace}.{self.pid}.{start}.{fds}.{self.generation:016x}.{self.label}"


def parse_name(text: str) -> RingName | None:
    """Return the name that ``str`` writes so; None for any other text."""
    if (match := _NAME.fullmatch(text)) is None:
        return None
    namespace, pid, start, memory, data, space = map(int, match.groups()[:6])
    if not 0 < pid < _PID_LIMIT or start >= _START_LIMIT or max(memory, data, space) >= _DESCRIPTOR_LIMIT:
        return None
    return RingName(
        pid_namespace=namespace,
        creator=start * _PID_LIMIT + pid,
        fds=(memory, data, space),
        generation=int(match[7], 16),
        label=match[8],
    )


def check_label(label: str) -> None:
    """Raise ValueError unless the label is 1 to 64 letters, digits, "-" and "_" of ASCII."""
    if _LABEL.fullmatch(label) is None:
        raise ValueError(f"a label is 1 to 64 of A-Z, a-z, 0-9, '-' and '_', not {label!r}")


def publish(label: str, fds: tuple[int, int, int], generation: int) -> RingName:
    """Name a ring of this process. Raises RingNameTaken, OSError.

    Of two processes that publish one label at a time, each looks for the other after it has published: at most one
    succeeds.
    """
    creator = claim_word_of(os.getpid())
    assert creator is not None
    name = RingName(pid_namespace=_pid_namespace(), creator=creator, fds=fds, generation=generation, label=label)
    posix_ipc.SharedMemory(f"/{name}", posix_ipc.O_CREX, mode=0o600).close_fd()
    if others := [each for each in _labelled(label) if each != name]:
        remove(name)
        raise RingNameTaken(label, [each.pid for each in others])
    return name


def find(name: str) -> RingName:
    """Return the name of a living ring, by its label or its whole text.

    Raises RingNotFound, RingNameTaken (several rings have the label), RingNameRefused, ValueError (neither a label nor
    a name).
    """
    if name.startswith(PREFIX):
        if (parsed := parse_name(name)) is None:
            raise RingNameRefused(name, "its text is of another form")
        _check_entry(parsed)
        if is_stale(parsed):
            raise RingNotFound(name)
        return parsed
    check_label(name)
    found = _labelled(name)
    if not found:
        raise RingNotFound(name)
    if len(found) > 1:
        raise RingNameTaken(name, [each.pid for each in found])
    return found[0]


def open_descriptors(name: RingName) -> list[int]:
    """Open the three descriptors of another process's ring, which the caller checks (``Ring.attach``), and owns.

    Raises RingNotFound, PermissionError (a process that this one may not inspect).
    """
    with ExitStack() as opened:
        fds = []
        try:
            for number, kind in zip(name.fds, (_MEMORY, _BELL, _BELL), strict=True):
                with _file_of(name, number, kind) as path:
                    fds.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                opened.callback(os.close, fds[-1])
        except (FileNotFoundError, ProcessLookupError) as error:
            raise RingNotFound(str(name)) from error
        if not exists(name) or claim_word_of(name.pid) != name.creator:
            # The creator removes the name before it closes the descriptors: their numbers may mean other files now.
            raise RingNotFound(str(name))
        opened.pop_all()
    return fds


def is_stale(name: RingName) -> bool:
    """Return whether rule 3 applies. Of a process in another pid namespace, or one not to inspect, nothing is known."""
    if name.pid_namespace != _pid_namespace():
        return False
    if claim_word_of(name.pid) != name.creator:
        return True
    try:
        with _file_of(name, name.fds[0], _MEMORY) as path:
            found = read_claims(path)
    except PermissionError:
        return False
    except (FileNotFoundError, ProcessLookupError):
        return True
    return found is None or found[0] != name.generation or all(found[1:])


def sweep() -> list[str]:
    """Remove this user's stale names. Returns those that were removed. Raises OSError."""
    removed = []
    for name in _names():
        if is_stale(name):
            remove(name)
            removed.append(str(name))
    return removed


def exists(name: RingName) -> bool:
    """Return whether the ring still has the name."""
    return os.path.lexists(f"{SHM}/{name}")


def remove(name: RingName) -> None:
    """Remove a name. Does nothing if it is gone."""
    try:
        posix_ipc.unlink_shared_memory(f"/{name}")
    except posix_ipc.ExistentialError:
        return


def _names() -> list[RingName]:
    """Return this user's names."""
    with os.scandir(SHM) as entries:
        parsed = [parse_name(entry.name) for entry in entries]
    names = []
    for name in parsed:
        try:
            if name is not None:
                _check_entry(name)
                names.append(name)
        except (RingNameRefused, RingNotFound):
            continue
    return names


def _labelled(label: str) -> list[RingName]:
    return [name for name in _names() if name.label == label and not is_stale(name)]


def _check_entry(name: RingName) -> None:
    """Raise RingNotFound, or RingNameRefused unless the entry is this user's, and empty."""
    try:
        status = os.lstat(f"{SHM}/{name}")
    except FileNotFoundError as error:
        raise RingNotFound(str(name)) from error
    if status.st_uid != os.geteuid():
        raise RingNameRefused(str(name), f"it belongs to user {status.st_uid}")
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        raise RingNameRefused(str(name), "it is not an empty file")


@contextmanager
def _file_of(name: RingName, number: int, kind: str) -> Iterator[str]:
    """Yield a path of the file behind a creator's descriptor. Raises FileNotFoundError for one of another kind.

    The file is found without opening it, which might do something where it is a stranger's device, and stays the same
    while the creator closes descriptors and uses their numbers again.
    """
    found = os.open(f"/proc/{name.pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    with ExitStack() as closing:
        closing.callback(os.close, found)
        path = f"/proc/self/fd/{found}"
        if not os.readlink(path).startswith(kind):
            raise FileNotFoundError(path)
        yield path


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
