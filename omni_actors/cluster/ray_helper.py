"""The helper: a process that uses Ray for the parent. It finds nodes and starts agents on them, as Ray actors.

    parent ── orders, one JSON document a line ──► stdin    helper    stdout ── news, one a line ──► parent

Rules
1. This is the only module that imports Ray. Ray ends a process whose head node is gone for a minute; so it has one of
   its own, and the parent and the agents go on without it.
2. An agent is an actor that is not restarted (``max_restarts=0``): the parent decides what follows its end. It is
   detached, so that it outlives the helper. It ends with its control connection or its lease, and then its actor does,
   so that Ray gives its resources to the next one: the helper kills it, or it ends itself after ``EXIT_S``. So does an
   actor that is not told to run within ``UNUSED_S``, because its helper has ended.
3. An actor is scheduled on its node and on no other, with the GPUs that its workers are to have, and their CPUs as far
   as they are free. It is not left to wait in Ray for what another job holds. Ray gives it a nice value of 15, so that
   jobs leave the cores to Ray itself. It takes 0, for itself and its workers, where it may.
4. The helper ends when its stdin does. It kills the agents that it has started. Of a Ray that it has started, no
   process and no file is left. An order that Ray does not let it carry out costs no other agent.
5. A helper whose own node is no longer in Ray ends at the next agent that it is to start: it is connected with a Ray
   that is gone, though Ray may answer it. It kills no agent then.
6. It tells every ``LOOK_S`` which nodes Ray has, unless its own is not among them.
7. Ray starts a cluster of its own for a call without a connection. The helper forbids that: an agent may end, and be
   killed, when the helper has left Ray already.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec
import ray
from ray._private import auto_init_hook
from ray._private.state import actors, available_resources_per_node
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from omni_actors.cluster.agent import AgentSettings, run_in_main_thread
from omni_actors.cluster.joining import AgentFailed
from omni_actors.cluster.ray_messages import (
    AUTO,
    LOCAL,
    Ended,
    Failed,
    Found,
    Look,
    News,
    Obeyed,
    Order,
    RayNode,
    StartAgent,
    Started,
    StopAgent,
)
from omni_actors.config.devices import VISIBLE

NAMESPACE: Final = "omni_actors"
CONNECT_S: Final = 5.0
CLOSE_S: Final = 10.0
EXIT_S: Final = 5.0
UNUSED_S: Final = 120.0
LOOK_S: Final = 5.0
NODE_ID: Final = "ray.io/node-id"
"""A label that Ray gives to each node; its value is random."""
LOCAL_OPTIONS: Final[dict[str, Any]] = {
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "_system_config": {"worker_niceness": 0, "memory_monitor_refresh_ms": 0},
}
"""Options of a Ray that is started here: no data goes through its object store, and rule 3 needs no right. When memory
is short, Ray's monitor would kill the agent, and all workers with it, whichever of them has the memory."""

_news_lock = threading.Lock()
_news_fd = os.dup(1)


def tell(news: News) -> None:
    """Send news to the parent. Any thread may call it."""
    with _news_lock, os.fdopen(os.dup(_news_fd), "wb") as stdout:
        stdout.write(msgspec.json.encode(news) + b"\n")


def _labels(found: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" if value else name for name, value in sorted(found.items()) if name != NODE_ID)


class AgentActor:
    """A Ray actor that runs one agent (rule 2)."""

    def __init__(self) -> None:
        self._unused = _end_process_after(UNUSED_S)

    def run(self, settings: bytes) -> str | None:
        """Run an agent until its control connection ends. Return why it failed, or None."""
        self._unused.cancel()
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        os.environ[VISIBLE] = ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])  # Ray may leave it unset
        try:
            run_in_main_thread(msgspec.msgpack.decode(settings, type=AgentSettings))
        except AgentFailed as error:
            return str(error)
        finally:
            _end_process_after(EXIT_S)
        return None


def _end_process_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
    return timer


class Helper:
    """Starts and stops agents. address: of Ray's head, "auto" or "local"."""

    def __init__(self, address: str) -> None:
        auto_init_hook.enable_auto_connect = False  # rule 7
        self._actors: dict[int, Any] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        local = address == LOCAL
        self._directory: str | None = None
        """Where a Ray that is started here keeps its logs and sockets, until the end."""
        if local:
            self._directory = tempfile.mkdtemp(prefix="omni-actors-ray-", dir=os.environ.get("RAY_TMPDIR"))
        if ":" in address:  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        try:
            ray.init(
                address=address,  # "local" starts one, whatever the environment says
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(LOCAL_OPTIONS | {"_temp_dir": self._directory} if local else {}),
            )
        except BaseException:
            self.remove_directory()
            raise

    def start(self) -> None:
        """Tell which nodes there are, now and from now on."""
        tell(Started(self.nodes()))
        self._watcher.start()

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            with suppress(RayError, OSError, RuntimeError):  # Ray's head is gone for now, or the parent has ended
                found = self.nodes()
                if any(node.is_parents for node in found):
                    tell(Found(found))

    def nodes(self) -> list[RayNode]:
        """Return the nodes that are alive now."""
        list_nodes: Any = ray.nodes  # untyped
        mine = ray.get_runtime_context().get_node_id()
        list_free: Any = available_resources_per_node  # untyped
        listed = list_nodes()  # before the rest: a node that joins in between would have nothing free
        free = list_free()
        return [
            RayNode(
                node_id=node["NodeID"],
                name=node.get("NodeName") or node["NodeManagerAddress"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                free_cpus=max(0.0, free.get(node["NodeID"], {}).get("CPU", 0.0)),
                gpus=int(node["Resources"].get("GPU", 0)),
                free_gpus=max(0, int(free.get(node["NodeID"], {}).get("GPU", 0))),
                labels=_labels(node.get("Labels", {})),
                is_parents=node["NodeID"] == mine,
            )
            for node in listed
            if node["Alive"]
        ]

    def obey(self, order: Order) -> None:
        """Carry out one order. What becomes of an agent is told when it ends."""
        match order:
            case StartAgent():
                if (node := self._now(order.node)) is None:
                    tell(Ended(order.settings.number, certain=False, why="its node is not in Ray"))
                    return
                if node.free_gpus < order.gpus:
                    why = f"it needs {order.gpus:g} GPUs of its node, and Ray has {node.free_gpus} free there"
                    tell(Ended(order.settings.number, certain=False, why=why))
                    return
                options = {
                    "max_restarts": 0,
                    "max_concurrency": 1,
                    "lifetime": "detached",
                    "num_cpus": min(order.cpus, node.free_cpus),
                    "num_gpus": order.gpus,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
                }
                actor: Any = ray.remote(AgentActor).options(**options).remote()
                self._actors[order.settings.number] = actor
                future = actor.run.remote(msgspec.msgpack.encode(order.settings)).future()
                future.add_done_callback(partial(self._ended, order.settings.number))
            case StopAgent(number):
                if (actor := self._actors.pop(number, None)) is not None:
                    ray.kill(actor)
            case Look():
                tell(Found(self.nodes(), self._nodes_of_others()))

    def _nodes_of_others(self) -> list[str]:
        """Return the ids of nodes with agents of other helpers. One that was killed has left its agents behind."""
        list_actors: Any = actors  # untyped
        mine = ray.get_runtime_context().get_job_id()
        return [
            actor["Address"]["NodeID"]
            for actor in list_actors(actor_state_name="ALIVE").values()
            if actor["ActorClassName"] == AgentActor.__name__ and actor["JobID"] != mine
        ]

    def _now(self, node: RayNode) -> RayNode | None:
        """Return a node as it is now, or None if it is not in Ray. Ends the helper if its own is not (rule 5).

        A node that has left Ray and come back has a new id. One that has other labels or devices then is another node.
        """
        alive = self.nodes()
        if not any(each.is_parents for each in alive):
            self._end()
        same = [each for each in alive if each.node_id == node.node_id]
        kind = (node.name, node.address, node.labels, node.gpus)
        same += [each for each in alive if (each.name, each.address, each.labels, each.gpus) == kind]
        return next(iter(same), None)

    def _ended(self, number: int, future: Any) -> None:
        """Tell that an agent has ended, and let its actor end. Called in a thread of Ray, which must not wait."""
        if (actor := self._actors.pop(number, None)) is not None:
            threading.Thread(target=self._kill, args=(actor,), daemon=True).start()
        error = future.exception()
        why = future.result() if error is None else f"{type(error).__name__}: {error}"
        with suppress(BrokenPipeError):  # the parent has ended
            tell(Ended(number, certain=error is None, why=why or "its control connection has ended"))

    def _kill(self, actor: Any) -> None:
        with suppress(RayError):  # the helper has left Ray, and has killed all actors
            ray.kill(actor)

    def close(self) -> None:
        """Kill the agents, and leave Ray. Ray may wait for a head that is gone: then the process just ends."""
        last = threading.Timer(CLOSE_S, self._end)
        last.daemon = True
        last.start()
        for actor in list(self._actors.values()):
            ray.kill(actor)
        self._closing.set()
        self._watcher.join()
        ray.shutdown()
        self.remove_directory()

    def _end(self) -> None:
        self.remove_directory()
        os._exit(0)

    def remove_directory(self) -> None:
        """Remove the files of a Ray that was started here."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def main() -> None:
    """Run the helper. Its argument is Ray's address."""
    os.dup2(2, 1)  # what Ray prints is not for the parent
    try:
        helper = Helper(sys.argv[1])
    except (RayError, OSError, RuntimeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        if sys.argv[1] == AUTO and "Could not find any running Ray instance" in why:
            why = f'no Ray runs on this machine; "{LOCAL}" starts one'
        tell(Failed(why))
        sys.exit(1)
    try:
        helper.start()
        for line in sys.stdin.buffer:
            try:
                helper.obey(msgspec.json.decode(line, type=Order))
            except (RayError, OSError, RuntimeError) as error:
                tell(Obeyed(f"{type(error).__name__}: {error}"))
            else:
                tell(Obeyed())
    except BaseException:
        helper.remove_directory()
        raise
    helper.close()


if __name__ == "__main__":
    main()
