"""One simulated schedule: the whole system on simulated workers, in one thread and in virtual time, from one seed.

Rules
1. Everything follows from the seed: the pipeline, its requests, the faults, how long things take, and in which order
   trio runs the tasks that are ready. The same seed gives the same log. With an odd seed, the engines decide at random.
   With a seed that three divides, stages have standbys, generation is paused, and stages sleep. With a seed that five
   divides, replicas are added and removed. With nodes, workers run on the nodes of a simulated cluster, which are lost
   and cut off.
2. Faults and requests are injected between any two steps of any two tasks: at every ``await``.
3. Time is virtual (trio's mock clock): a deadline of 10 s passes as soon as no task has anything else to do.
4. After each schedule, the simulation checks that every request has one outcome, and the right one (``judge``); that
   only workers with an injected fault died; that hangs were detected in time; that every stage serves or was given up
   for a reason; that no step was repeated without need; that no request started in a standby; that no request waited
   while it could be dispatched; that a death was charged to no request beside others (``charges``); and that nothing is
   left behind.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import trio
import trio.testing
from trio._core import _run as trio_run

from omni_actors.cluster.lease import fenced_after_s
from omni_actors.orchestrator.trials import died_by_itself
from omni_actors.protocol.messages import Address, Start
from omni_actors.stress import judge
from omni_actors.stress.controls import Controls
from omni_actors.stress.health_watch import HealthWatch
from omni_actors.stress.simulation.agent import LEASE_S
from omni_actors.stress.simulation.charges import ChargeCheck
from omni_actors.stress.simulation.cluster import SimulatedCluster
from omni_actors.stress.simulation.controls import SimulatedControls
from omni_actors.stress.simulation.determinism import deterministic, report_unraisable
from omni_actors.stress.simulation.faults import DYING_S, FaultInjector
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.simulation.network import Network
from omni_actors.stress.simulation.node_faults import DELAY_S, DRIFT, NodeFaults, draw_nodes, on_nodes
from omni_actors.stress.simulation.requests import SimulatedClient
from omni_actors.stress.simulation.scaling import SimulatedScaling
from omni_actors.stress.simulation.scenarios import PATIENCE_S, SCENARIOS, SHUTDOWN_S, STEP_S, scenario
from omni_actors.stress.simulation.work import WORK
from omni_actors.supervisor.heartbeat import PARTS
from omni_actors.system import OmniSystem

MAX_STEPS, MAX_S = 100_000, 10 * PATIENCE_S
"""A schedule that takes more steps of tasks, or more virtual time, hangs."""
FENCED_S = fenced_after_s(LEASE_S)
"""The workers of a stage on a node that does not answer are over after so long."""
MAX_IDLE_WAITS = 1000
"""So does one that waits for I/O this often while no task takes a step."""
TICK_S = 1.0
CHECKPOINT_BYTES = 1 << 16
"""More than the memory of a checkpoint of any engine in a schedule."""


def simulate(seed: int, nodes: int = 0) -> Journal:
    """Run the schedule of this seed to its end.

    nodes: how many nodes there are, the parent's included; 0: one machine.
    """
    draw, journal = random.Random(seed), Journal(seed)
    WORK.clear()
    simulation = Simulation(draw, journal, nodes)
    with deterministic(draw), report_unraisable(journal.unexpected):
        before = set(os.listdir("/proc/self/fd"))
        try:
            trio.run(simulation.run, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[simulation])
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            journal.unexpected("the system", error)
        if not nodes:  # checkpoints do not travel, so steps are repeated
            simulation.check_work()
        simulation.check_left(set(os.listdir("/proc/self/fd")) - before)
    return journal


class Simulation(trio.abc.Instrument):
    """One schedule. As a trio instrument it counts the steps of tasks, and acts at the steps that it has drawn."""

    def __init__(self, draw: random.Random, journal: Journal, nodes: int) -> None:
        self._draw, self._journal = draw, journal
        self._next_act, self._idle_waits = 0, 0
        is_controlled, is_scaled = journal.seed % 3 == 0, journal.seed % 5 == 0
        self._workload = scenario(
            draw.randrange(SCENARIOS),
            deciding=journal.seed % 2 * journal.seed,
            standbys=is_controlled * (journal.seed + 1),
            scaling=is_scaled * (journal.seed + 1),
        )
        self._acts_left = draw.choice((2, 4, 6, 12))
        self._mean_gap = draw.choice((4, 20, 80))
        self._faults = FaultInjector(draw, journal)
        self._cluster = self._make_cluster(nodes) if nodes else None
        self._ends_early = draw.random() < 0.1
        self._client = SimulatedClient(draw, self._workload, self._faults.spawner, journal)
        self._control = SimulatedControls(draw, self._workload, journal)
        self._scaling = SimulatedScaling(draw, self._workload, journal)
        self._controls: Controls
        self._all_injected = trio.Event()
        self._scope = trio.CancelScope()
        self._omni: OmniSystem
        self._is_open = False
        """Whether the system is open, and not being closed."""
        self._kept_waiting = set[str]()
        """The requests that waited while they could be dispatched."""
        client, faults = self._client, self._faults
        self._acts: list[Callable[[], None]] = [
            *[client.submit_any] * 8,
            *[faults.kill] * 3,
            *[faults.kill_inside_turn] * 2,
            *(faults.kill_two, faults.hang, faults.stop_for_a_while, faults.raise_in_engine),
            *(client.abort_any, client.disconnect_any, client.submit_too_many),
            *(client.submit_poison, client.submit_invalid, client.submit_slow_reader),
            client.submit_with_deadline,
        ]
        if journal.seed % 2:
            self._acts += [faults.kill_with_message] * 4
        if is_controlled:
            self._acts += [*[self._control.pause] * 3, *[self._control.sleep] * 6]
        if is_scaled:
            self._acts += [self._scaling.scale] * 8
        if self._cluster is not None:
            node_faults = NodeFaults(draw, journal, self._cluster)
            acts = (node_faults.kill_agent, node_faults.lose_nodes, node_faults.cut_off, node_faults.cut_links)
            self._acts += [*acts] * 4
        journal.note(f"{self._workload.pipeline}")

    def _make_cluster(self, count: int) -> SimulatedCluster:
        draw, journal, faults = self._draw, self._journal, self._faults
        nodes = draw_nodes(draw, count)
        pipeline = on_nodes(draw, self._workload.pipeline)
        journal.note(f"{pipeline.cluster}")
        cluster = SimulatedCluster(
            pipeline,
            nodes,
            Network(draw.choice(DELAY_S)),
            behavior=faults.behavior,
            note=journal.note,
            explain=faults.blame_nodes,
            violated=lambda fact: journal.violated("duplicated", fact),
            rates=[draw.uniform(1 - DRIFT, 1 + DRIFT) for _ in nodes],
        )
        faults.use(cluster)
        return cluster

    # trio's instrument

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._journal.steps += 1
        self._idle_waits = 0
        if self._journal.steps == self._next_act:
            try:
                self._act()
            except Exception as error:  # noqa: BLE001 - trio removes an instrument that raises
                self._journal.unexpected("an injection", error)
                self._scope.cancel()
        elif self._journal.steps % MAX_STEPS == 0:
            self._abandon()

    def before_io_wait(self, timeout: float) -> None:
        self._idle_waits += 1
        if self._idle_waits % MAX_IDLE_WAITS == 0:
            self._abandon()
        if self._is_open and self._idle_waits == 1 and not trio.lowlevel.current_statistics().tasks_runnable:
            self._check_waiting()

    def _act(self) -> None:
        self._acts_left -= 1
        if self._acts_left < 0:
            self._journal.note("no more faults")
            self._faults.stop()
            self._all_injected.set()
            return
        self._draw.choice(self._acts)()
        self._next_act = self._journal.steps + 1 + int(self._draw.expovariate(1 / self._mean_gap))

    def _abandon(self) -> None:
        """Cancel everything, shielded scopes included: no task will ever act again, or one will act for ever."""
        self._scope.cancel()
        root = trio.lowlevel.current_root_task()
        tasks = [] if root is None else [root]
        for task in tasks:
            tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
            status: trio_run.CancelStatus | None = task._cancel_status
            while status is not None:
                status._scope.shield = False
                status = status._parent

    # the schedule

    async def run(self) -> None:
        """Open a system, wait until all faults are injected, check that it recovers, and close it."""
        self._scope.deadline = MAX_S
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._client.nursery = self._faults.nursery = nursery
                self._control.nursery = self._scaling.nursery = nursery
                stop_s = SHUTDOWN_S + DYING_S
                if self._cluster is not None:
                    self._cluster.nursery = nursery
                    nursery.start_soon(self._cluster.network.run)
                    stop_s += FENCED_S
                closed_s = await self._run_system()
                allowed_s = stop_s * len(self._workload.stages) + DYING_S
                if closed_s > allowed_s:
                    self._journal.violated("hung", f"closing took {closed_s:g} s; at most {allowed_s:g} s are allowed")
                with trio.move_on_after(PATIENCE_S):
                    while self._client.open or self._controls.in_force:  # noqa: ASYNC110 - the time is virtual
                        await trio.sleep(TICK_S)
                if self._controls.in_force:
                    self._journal.violated("hung", "a pause, a sleep or a change of replicas does not end")
                if self._cluster is not None and (left := self._cluster.close()):
                    self._journal.violated("leaked", f"workers run on nodes: {', '.join(map(str, left))}")
                nursery.cancel_scope.cancel()
        if self._scope.cancelled_caught:
            self._journal.violated("hung", f"no end after {self._journal.steps} steps, at {trio.current_time():g} s")
        self._client.check_outcomes()

    async def _run_system(self) -> float:
        """Run the system through the schedule. Returns the seconds that closing it took."""
        opening = OmniSystem.open(self._workload.pipeline, wait_ready=False, spawner=self._faults.spawner)
        async with opening as self._omni, trio.open_nursery() as watching:
            self._client.omni = self._omni
            self._controls = self._control.use(self._omni)
            self._scaling.use(self._omni, self._controls)
            self._client.closures = self._controls.closures
            self._faults.is_first = lambda address: not self._omni._supervisor.replicas[address].restarts
            self._faults.spawner.on_start = self._check_start
            self._client.watch = self._watch = HealthWatch(
                self._omni, trio.current_time, self._note_death, self._client.count_promotion
            )
            watching.start_soon(self._watch.run)
            self._is_open = True
            orchestrator = self._omni._orchestrator
            ChargeCheck(orchestrator._suspects, orchestrator._dispatcher, self._faults.spawner.living, self._journal)
            self._next_act = self._journal.steps + 1
            while not self._all_injected.is_set():  # noqa: ASYNC110 - so that there are steps when all tasks wait
                await trio.sleep(TICK_S)
            if not self._ends_early:
                await self._recover()
            self._check_system()
            watching.cancel_scope.cancel()
            for request in self._client.open:
                request.aborted = True  # closing the system aborts it
            self._is_open = False
            closing = trio.current_time()
        self._watch.look()  # a death that was reported meanwhile may be why a request has ended
        return trio.current_time() - closing

    def _note_death(self, death: judge.ObservedDeath) -> None:
        self._journal.note(f"{death.stage}.{death.replica}: {death.exit}")

    async def _recover(self) -> None:
        """Wait until the system has settled, send each stage a request, and wait again."""
        with trio.move_on_after(PATIENCE_S) as patience:
            await self._wait_settled()
            self._client.submit_probes()
            await self._wait_settled()
            while self._cluster is not None and self._cluster.is_cut_off:  # noqa: ASYNC110 - the time is virtual
                await trio.sleep(TICK_S)  # until then, workers do not know which requests have ended
            await trio.sleep(1.0 + STEP_S / PARTS)  # the last control messages arrive, at the latest before a ping
            await self._wait_settled()  # a lease or a link may have ended meanwhile, because of an earlier partition
        if patience.cancelled_caught:
            for worker in self._faults.spawner.living.values():
                if worker.hung:
                    self._journal.violated("hung", f"{worker}, which hangs since {worker.hung_at:.3f}, is not killed")
            for request in self._client.open:
                self._journal.violated("hung", f"{request.name} ({request.template.name}) has no outcome")

    async def _wait_settled(self) -> None:
        while self._client.open or not self._settled():  # noqa: ASYNC110 - the time is virtual
            await trio.sleep(TICK_S)

    def _settled(self) -> bool:
        return (
            not self._watch.unsettled
            and not self._controls.in_force
            and not any(
                worker.hung or worker.loses_pong or worker.frozen or not worker.alive
                for worker in self._faults.spawner.living.values()
            )
        )

    # checks

    def _check_system(self) -> None:
        """Check the open system. A schedule that ends early is not asked for what needs more time."""
        faults, pipeline = self._faults, self._workload.pipeline
        deaths = self._watch.deaths
        requested, scaled = self._client.requested_deaths(faults.explained), self._controls.closures.scaled
        found, _ = judge.check_deaths(deaths, faults.explained, requested, scaled)
        temporary = {name for name, each in pipeline.stages.items() if each.restart.type == "temporary"}
        given_up = self._watch.ever_given_up - faults.failed_at_start - temporary
        for violation in [*found, *judge.check_restarts(deaths, given_up, pipeline)]:
            self._journal.violated(violation.kind, violation.what)
        faults.check_hangs(self._controls.has_slept)
        if self._ends_early:
            return
        if self._omni.in_flight:
            self._journal.violated("leaked", f"{self._omni.in_flight} requests are still in flight")
        for fact in self._watch.unsettled:
            self._journal.violated("hung", fact)
        for worker in faults.spawner.living.values():
            if worker.loop is not None and (kept := worker.loop.requests):
                self._journal.violated("leaked", f"{worker} still has requests {sorted(kept)}")

    def _check_start(self, address: Address, message: Start) -> None:
        """Check that a request starts in none but the replicas that were ready first (``orchestrator.placement``).

        After a death that the worker's own work may have caused, a trial of suspects may use any replica. The watch
        knows such deaths of replicas that were removed since. A request that starts again does so a while after it was
        placed: scaling may have made its replica a standby meanwhile.
        """
        if message.replayed and address.stage in self._scaling.scaled:
            return
        replicas = self._omni._supervisor.replicas.values()
        if any(died_by_itself(death.exit) for each in replicas for death in each.history):
            return
        if any(death.by_engine and death.stage == address.stage for death in self._watch.deaths):
            return
        chosen = self._omni._supervisor.replicas[address]
        earlier = [
            each
            for each in replicas
            if each.address.stage == address.stage
            and each.accepts_work
            and each.incarnation.ready_at < chosen.incarnation.ready_at
        ]
        if len(earlier) >= self._omni._orchestrator.pools.wanted[address.stage]:
            self._journal.violated("disturbed", f"a request starts in the standby {address}")

    def _check_waiting(self) -> None:
        """Check that no request waits whose stages all are free, at a moment in which no task has anything to do.

        Suspects wait for their trials, and while generation is paused, new requests wait for its end.
        """
        orchestrator = self._omni._orchestrator
        dispatcher, wanted = orchestrator._dispatcher, orchestrator.pools.wanted
        reserved, suspects = dispatcher.trials.running, dispatcher.trials.group_of
        replicas = self._omni._supervisor.replicas.values()
        free = {each.address.stage for each in replicas if each.accepts_work and each.address not in reserved}
        for request in dispatcher.running():
            stages = request.replay_state.waiting
            if not stages or request in suspects or (dispatcher.dispatch_paused and request.number is None):
                continue
            if request.name not in self._kept_waiting and all(each in free and wanted[each] for each in stages):
                self._kept_waiting.add(request.name)
                self._journal.violated("hung", f"{request.name} waits for {', '.join(stages)}, which are free")

    def check_work(self) -> None:
        """Check that no step was made twice but for a death, where checkpoints are within their bounds."""
        if self._workload.pipeline.limits.retain_bytes >= CHECKPOINT_BYTES:
            for fact in WORK.repeated():
                self._journal.violated("duplicated", fact)

    def check_left(self, descriptors: set[str]) -> None:
        """Check that the closed system left nothing. descriptors: those that were not open before."""
        spawner = self._faults.spawner
        if descriptors:
            self._journal.violated("leaked", f"{len(descriptors)} descriptors are left")
        if spawner.living:
            self._journal.violated("leaked", f"workers are left: {', '.join(map(str, spawner.living.values()))}")
        if mapped := sum(not ring.closed for ring in spawner.all_rings()):
            self._journal.violated("leaked", f"{mapped} rings are still mapped")
