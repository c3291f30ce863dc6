"""A Ray cluster on this machine, in a process of its own: a head, and nodes that share the machine.

Rules
1. The process says in a line of JSON where the head is and which processes there are, and ends with its stdin. So the
   tests' own process does not load Ray.
2. All Rays of a test process have one secret, which is in its environment while one runs. So Ray reads and writes no
   file in the home directory, and no other Ray of the machine is used.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

STORE_BYTES = 80 << 20
END_S = 20.0
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
SECRET = secrets.token_hex(32)


class RayCluster(NamedTuple):
    """address: of the head. raylets: the process of each node, by its name. gcs: that of the head's control store.

    taken: the devices that another job holds, by node. Nodes but the head have the label "role=compute".
    """

    address: str
    raylets: dict[str, int]
    gcs: int
    taken: dict[str, list[str]]
    process: subprocess.Popen[bytes]

    def add(self, name: str, role: str = "compute") -> None:
        """Let a further node join, or one that has left come back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {role}\n".encode())
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{name} {role}\n".encode()

    def free(self) -> None:
        """Let the other job end that holds devices and CPUs."""
        self.add(FREE, "")


@contextmanager
def secret_of_ray() -> Iterator[None]:
    """Rule 2, for the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", SECRET)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@contextmanager
def ray_cluster(*nodes: str) -> Iterator[RayCluster]:
    """Run a Ray cluster with nodes of these names beside its head, "head".

    "g:3:1" is a node "g" that claims to have three CUDA devices, one of which another job holds. "g:3:1:2": that job
    holds two CPUs, too. Each node claims to have two.
    """
    command = [sys.executable, str(Path(__file__)), *nodes]
    with (
        secret_of_ray(),
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield RayCluster(**json.loads(process.stdout.readline()), process=process)
        finally:
            parts = psutil.Process(process.pid).children(recursive=True)
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            for part in [*parts, process]:  # a test may have killed what would have ended the others
                with suppress(psutil.NoSuchProcess):
                    part.kill()


FREE = "free"
HOLDERS: list[Any] = []
"""The actors of the other job, which live as long as this process refers to them."""


def hold_devices(address: str, node_id: str, count: int, cpus: int) -> list[str]:
    """Hold devices and CPUs of a node as another job does, as long as the cluster lasts. Return which devices."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Holder:
        def devices(self) -> list[str]:
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    HOLDERS.append(ray.remote(Holder).options(num_cpus=cpus, num_gpus=count, scheduling_strategy=there).remote())
    devices: list[str] = ray.get(HOLDERS[-1].devices.remote())
    return devices


def main() -> None:
    """Run the cluster until stdin ends. Each of its lines is the name and the role of a node to add, or "free"."""
    from ray.cluster_utils import Cluster

    def of_node(name: str, gpus: int = 0, role: str = "compute") -> dict[str, Any]:
        labels = {} if name == "head" else {"role": role}
        return {
            "num_cpus": 2,
            "num_gpus": gpus,
            "object_store_memory": STORE_BYTES,
            "node_name": name,
            "labels": labels,
        }

    told, sys.stdout = sys.stdout, sys.stderr
    cluster = Cluster(initialize_head=True, head_node_args={**of_node("head"), "include_dashboard": False})
    nodes, taken = {"head": cluster.head_node}, {}
    for argument in sys.argv[1:]:
        name, *numbers = argument.split(":")
        gpus, held, cpus = (*map(int, numbers), 0, 0, 0)[:3]
        nodes[name] = cluster.add_node(**of_node(name, gpus))
        taken[name] = hold_devices(cluster.address, nodes[name].node_id, held, cpus) if held or cpus else []
    raylets = {name: node.all_processes["raylet"][0].process.pid for name, node in nodes.items()}
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    print(
        json.dumps({"address": cluster.address, "raylets": raylets, "gcs": gcs, "taken": taken}), file=told, flush=True
    )
    for line in sys.stdin:
        name, _, role = line.strip("\n").partition(" ")
        if name == FREE:
            HOLDERS.clear()
        else:
            cluster.add_node(**of_node(name, role=role))
        print(line, end="", file=told, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
