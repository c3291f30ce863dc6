"""Checks that a death is charged to a request only if no other request can have caused it (``orchestrator.trials``)."""

from __future__ import annotations

from collections.abc import Mapping

from omni_actors.errors import WorkerExit
from omni_actors.orchestrator.dispatch import Dispatcher
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.suspects import Suspects
from omni_actors.orchestrator.trials import died_by_itself
from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.simulation.worker import SimulatedWorker


class ChargeCheck:
    """Is told each death before the orchestrator decides which requests it may have been caused by, and looks then.

    living: the workers at their addresses, those included that have just died.
    """

    def __init__(
        self, suspects: Suspects, dispatcher: Dispatcher, living: Mapping[Address, SimulatedWorker], journal: Journal
    ) -> None:
        self._dispatcher, self._living, self._journal = dispatcher, living, journal
        self._find = suspects.worker_died
        suspects.worker_died = self._worker_died  # type: ignore[method-assign]

    def _worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        stage, running = address.stage, self._dispatcher.running()
        before = {each: _charge(each, stage) for each in running}
        held = [each for each in running if each.replay_state.is_held_by(address) and stage not in each.stats]
        counts = self._find(address, exit, failed_request)
        worker = self._living.get(address)
        if not died_by_itself(exit) or worker is None or worker.pid != exit.pid:
            return counts  # by a signal: it is charged to all; or what the worker did is not known
        at_work = [each for each in held if each.number in worker.at_work]
        named = {each.fingerprint for each in held if each.number == failed_request}
        charged = {each.fingerprint for each in running if _charge(each, stage) != before[each]}
        if charged and not charged <= named and {each.fingerprint for each in at_work} - charged:
            names = ", ".join(each.name for each in at_work)
            self._journal.violated("disturbed", f"the death of {worker} is charged to one of {names}")
        return counts


def _charge(request: Request, stage: str) -> tuple[bool, int]:
    """What is charged to a request of the deaths in a stage. A trial may have begun at once, which counts them."""
    return stage in request.deaths.to_charge, request.deaths.charged.get(stage, 0)
