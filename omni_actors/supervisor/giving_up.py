"""When the supervisor gives a replica up, and when it tries it again. No I/O, and no clock: time is an argument."""

from __future__ import annotations

from omni_actors.errors import WorkerExit
from omni_actors.supervisor import restart
from omni_actors.supervisor.replica import Replica


def why_given_up(replica: Replica, exit: WorkerExit, *, counts: bool) -> str | None:
    """Return why a replica is given up after a death; None if it is restarted. counts: against its intensity."""
    policy, incarnation = replica.policy, replica.incarnation
    if incarnation.stopped_with_another and policy.type == "temporary":
        return f"{exit}; it is temporary"
    if cannot_load(replica) and not incarnation.stopped_with_another:
        return incarnation.load_error
    if incarnation.ended_from_outside:
        return None if replica.failure is None else replica.failure.reason  # its try has proved nothing
    if never := restart.why_never_restarted(policy, exit):
        return never
    recent = len(replica.recent_restarts)
    if recent < policy.intensity or not counts:
        return None
    limit = f"intensity {policy.intensity} within {policy.period_s:g} s"
    return f"{incarnation.load_error or exit}; {recent} restarts were tried ({limit})"


def plan_retry(replica: Replica, exit: WorkerExit, now: float) -> None:
    """Set when a replica that was given up is tried again, with one worker. now: trio's clock."""
    policy, incarnation = replica.policy, replica.incarnation
    replica.retry_at = None
    if incarnation.ready.is_set() and now - incarnation.ready_at > policy.period_s:
        replica.failed_tries = 0
    if cannot_load(replica):
        replica.recent_restarts = (now,) * policy.intensity  # none is left for the next try
    if replica.failure is not None and incarnation.ended_from_outside:
        replica.retry_at = now + restart.restart_delay_s(policy, len(replica.recent_restarts))
        return
    is_reported = replica.added and cannot_load(replica)
    if is_reported or restart.why_never_restarted(policy, exit):
        return
    delay_s = restart.retry_delay_s(policy, replica.failed_tries)
    replica.retry_at = None if delay_s is None else now + delay_s
    replica.failed_tries += 1


def cannot_load(replica: Replica) -> bool:
    """Whether a replica's first worker failed to load: then it is not restarted at once."""
    return replica.incarnation.load_error is not None and replica.generation == replica.earlier + 1
