"""How workers end: the facts that errors, events and records of deaths carry."""

from __future__ import annotations

from dataclasses import dataclass

NODE_LOST, LINK_LOST = "NodeLost: ", "LinkLost: "
"""With these begin the reasons of workers that were ended because a node or a link between nodes was lost."""


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
        pid: Its process; None if no process was started.
        signal: Name of the signal that ended it, such as "SIGKILL"; None if it exited.
        exit_code: Its exit code; None if a signal ended it, or no process was started. A process has neither if the
            parent's program has lost its exit status: it ignores SIGCHLD, or reaps all of its children.
        stderr_tail: The last lines that it wrote to stderr.
        reason: Why the supervisor ended it ("no progress for 30 s (step_timeout_s)"), or why no process was started;
            None if it died by itself.
        node: The node on which it ran; None without a cluster.
    """

    pid: int | None
    signal: str | None
    exit_code: int | None
    stderr_tail: tuple[str, ...] = ()
    reason: str | None = None
    node: str | None = None

    @property
    def was_cut_off(self) -> bool:
        """Whether it was ended because its node was lost, or a link between nodes."""
        return self.reason is not None and self.reason.startswith((NODE_LOST, LINK_LOST))

    def __str__(self) -> str:
        if self.signal is None and self.exit_code is None:
            how = "ended, and its exit status is unknown"
        else:
            how = f"was killed by {self.signal}" if self.signal else f"exited with code {self.exit_code}"
        where = f" on node {self.node}" if self.node else ""
        what = f"pid {self.pid}{where} {how}" if self.pid is not None else "no process was started"
        return what + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Death:
    """The end of one incarnation.

    Attributes:
        generation: Generation number of the incarnation.
        at: When it ended, in Unix time.
        exit: How its worker ended.
    """

    generation: int
    at: float
    exit: WorkerExit
