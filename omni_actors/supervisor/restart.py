"""What follows the death of a worker: pure rules, after the supervisors of Erlang/OTP.

Rules
1. ``type`` selects the deaths that are followed by a restart: all (permanent), all except exit code 0 (transient), none
   (temporary). A replica that is not restarted has failed. A worker that ends because a part of its desired state was
   taken back is followed by another one in any case, and by rule 3 it does not count.
2. ``strategy`` selects the other workers that are restarted with the dead one: none (one_for_one), all workers of the
   downstream stages (rest_for_one), all workers (one_for_all). A temporary one among them is stopped, and has failed.
3. After more than ``intensity`` restarts within ``period_s`` a replica is given up. Failed starts count, and while no
   start succeeds they are not forgotten, however long each takes. Restarts caused by another worker's death do not
   count. Of the deaths that one request causes, only the first counts.
4. A replica that rule 3 gave up is tried again after ``retry_s``, with one worker. If that worker fails too, the time
   until the next try doubles. A worker that served for longer than ``period_s`` resets that time. A worker that ends
   before it is ready because another one died, or a part of its desired state was taken back, proves nothing: the
   replica is tried again after the delay of a restart.
5. No clock here: time is an argument, in seconds.
"""

from __future__ import annotations

import random

from omni_actors.config import Restart
from omni_actors.errors import WorkerExit


def restart_delay_s(policy: Restart, recent: int) -> float:
    """Return the seconds before the restart that follows ``recent`` others: exponential, with jitter."""
    bounded = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(recent, 64))
    return bounded * random.uniform(0.5, 1.0)


def retry_delay_s(policy: Restart, failed_tries: int) -> float | None:
    """Return the seconds until a replica that was given up is tried again; None: never."""
    return min(policy.retry_max_s, policy.retry_s * 2.0 ** min(failed_tries, 64)) if policy.retry_s else None


def why_never_restarted(policy: Restart, exit: WorkerExit) -> str | None:
    """Return why the policy's type excludes a restart after this death; None if it allows one."""
    if policy.type == "temporary" or (policy.type == "transient" and exit.exit_code == 0):
        return f"{exit}; it is {policy.type}"
    return None
