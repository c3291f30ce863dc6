"""A simulated agent, and the parent's side of it: the real leases (``cluster.lease``) on clocks that drift.

Rules
1. No worker runs without a lease. The agent asks for a renewal ``RENEWALS`` times a lease, and kills its workers when
   the lease ends by its own clock. It ends too if it gets none for the length of a lease.
2. The parent gives a node up when nothing was renewed for a lease, or when the connection breaks. From then on it takes
   nothing more from the node but the news that it is fenced. It lets the ends of the node's workers be known when that
   arrives, and otherwise at ``safe_at``.
3. An agent without workers has no lease, and asks for none. That spares most of the 100 agents' messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from omni_actors.cluster.lease import RENEWALS, GrantedLease, HeldLease
from omni_actors.errors import NODE_LOST
from omni_actors.stress.simulation.network import Network
from omni_actors.stress.simulation.remote_worker import RemoteWorker
from omni_actors.stress.simulation.worker import SimulatedWorker

LEASE_S = 10.0
LATER_S = 1e-6
"""A timer that is due at a time by another clock comes so much later, so that rounding does not repeat it for ever."""


class SimulatedAgent:
    """The agent of a node, and its connection to the parent.

    rate: how fast its clock runs. run: starts the task of a process. on_end: called when the agent ends, with whether
    it ends silently. on_lost: called when the parent gives the node up, with the reason.
    """

    def __init__(
        self,
        node: str,
        parent: str,
        *,
        rate: float,
        network: Network,
        descriptors: Callable[[str, int], tuple[int, ...]],
        run: Callable[[SimulatedWorker, SimulatedAgent], None],
        on_end: Callable[[SimulatedAgent, bool], None],
        on_lost: Callable[[SimulatedAgent, str], None],
    ) -> None:
        self.node, self._parent, self._rate, self._network = node, parent, rate, network
        self._descriptors, self._run, self._on_end, self._on_lost = descriptors, run, on_end, on_lost
        self.alive = True
        self.processes: list[SimulatedWorker] = []
        """The workers that were started here and are not reaped."""
        self._waiting: list[SimulatedWorker] = []
        """The workers that start when there is a lease."""
        self._held = HeldLease(LEASE_S)
        self._asks = False
        # the parent's side
        self.workers: list[RemoteWorker] = []
        self._granted: GrantedLease | None = None
        self.lost = self.fenced = False

    # the connection

    def to_agent(self, act: Callable[[], None]) -> None:
        """Do something here when this message arrives, if the agent lives then."""
        self._network.send(self._parent, self.node, lambda: act() if self.alive else None)

    def to_parent(self, act: Callable[[], None]) -> None:
        """Do something at the parent when this message arrives, if the node is not lost then."""
        self._network.send(self.node, self._parent, lambda: None if self.lost else act())

    def descriptors(self, generation: int) -> tuple[int, ...]:
        """Return copies of the descriptors of the node's ring of this generation."""
        return self._descriptors(self.node, generation)

    # on the node

    @property
    def _now(self) -> float:
        """The time by the node's clock, which began at another time than the parent's."""
        return 1e6 + self._rate * trio.current_time()

    def _begin(self) -> None:
        if not self._asks:
            self._asks = True
            self._ask()
            self._network.after(LATER_S + LEASE_S / self._rate, self._check_lease)

    def _ask(self) -> None:
        """Ask for a renewal, and plan the next one, unless there is nothing to have a lease for."""
        if not self.alive:
            return
        if not self.processes and self._granted is None:
            self._asks = False
            return
        self.to_parent(partial(self._renew, self._now))
        self._network.after(LEASE_S / RENEWALS / self._rate, self._ask)

    def _take_grant(self, asked_at: float) -> None:
        self._held.granted(asked_at)
        if not self._held.is_over(self._now):
            waiting, self._waiting = self._waiting, []
            for process in waiting:
                self._start(process)

    def _check_lease(self) -> None:
        """End when the lease is over; else look again when it would be."""
        if not self.alive or not self._asks:
            return
        if not self._held.is_over(self._now):
            self._network.after(LATER_S + (self._held.ends_at - self._now) / self._rate, self._check_lease)
        else:
            self._network.send(self.node, self._parent, self._take_fenced)
            self.end()

    def start(self, process: SimulatedWorker) -> None:
        """Start a process as soon as there is a lease."""
        if self._held.is_over(self._now):
            self._waiting.append(process)
        else:
            self._start(process)

    def _start(self, process: SimulatedWorker) -> None:
        self.processes.append(process)
        self._run(process, self)

    def end(self, *, silent: bool = False) -> None:
        """End the agent and all its workers, as SIGKILL does. silent: as a failure of power, which closes nothing."""
        self.alive = False
        for process in self.processes:
            process.kill()
        self._on_end(self, silent)

    # the parent's side

    def engage(self) -> None:
        """Give the agent a lease from now on, if it has none."""
        if self._granted is None:
            self._granted = GrantedLease(LEASE_S, trio.current_time())
            self._watch(self._granted)
            self.to_agent(self._begin)

    def _watch(self, granted: GrantedLease) -> None:
        """Give the node up when it is silent; else look again when it would be."""
        if self.lost or granted is not self._granted:
            return
        if not self.workers:
            self._granted = None
        elif granted.is_silent(trio.current_time()):
            self.lose(f"no renewal of its lease for {LEASE_S:g} s")
        else:
            self._network.after(LATER_S + granted.silent_at - trio.current_time(), partial(self._watch, granted))

    def _renew(self, asked_at: float) -> None:
        if self._granted is not None and self._granted.grant(trio.current_time()):
            self.to_agent(partial(self._take_grant, asked_at))

    def lose(self, why: str) -> None:
        """Give the node up. Its workers are over when it is fenced."""
        if self.lost:
            return
        self.lost = True
        self._on_lost(self, why)
        for worker in self.workers:
            worker.fail(f"{NODE_LOST}{self.node}: {why}")
        self._network.send(self._parent, self.node, self._disconnect)
        if self._granted is None:
            self._fence()
        else:
            self._granted.give_up()
            self._network.after(max(0.0, self._granted.safe_at - trio.current_time()), self._fence)

    def _disconnect(self) -> None:
        """Notice that the parent has closed the connection."""
        if self.alive:
            self.end()

    def _take_fenced(self) -> None:
        self.lose("its lease ended")
        self._fence()

    def _fence(self) -> None:
        """Let it be known that no worker of the node runs any more."""
        self.fenced = True
        for worker in self.workers:
            worker.be_gone()
