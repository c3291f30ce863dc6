"""A Ray cluster on this machine, in a process of its own: a head, and nodes that share the machine.

Rule: the process says in a line of JSON where the head is and which processes there are, and ends with its stdin. So
the tests' own process does not load Ray.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

STORE_BYTES = 80 << 20
END_S = 20.0
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}


class RayCluster(NamedTuple):
    """address: of the head. raylets: the process of each node, by its name. gcs: that of the head's control store."""

    address: str
    raylets: dict[str, int]
    gcs: int


@contextmanager
def ray_cluster(*nodes: str) -> Iterator[RayCluster]:
    """Run a Ray cluster with nodes of these names beside its head, "head"."""
    command = [sys.executable, str(Path(__file__)), *nodes]
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield RayCluster(**json.loads(process.stdout.readline()))
        finally:
            parts = psutil.Process(process.pid).children(recursive=True)
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            for part in [*parts, process]:  # a test may have killed what would have ended the others
                with suppress(psutil.NoSuchProcess):
                    part.kill()


def main() -> None:
    """Run the cluster until stdin ends."""
    from ray.cluster_utils import Cluster

    def of_node(name: str) -> dict[str, Any]:
        return {"num_cpus": 2, "object_store_memory": STORE_BYTES, "node_name": name}

    told, sys.stdout = sys.stdout, sys.stderr
    cluster = Cluster(initialize_head=True, head_node_args={**of_node("head"), "include_dashboard": False})
    nodes = {"head": cluster.head_node}
    for name in sys.argv[1:]:
        nodes[name] = cluster.add_node(**of_node(name))
    raylets = {name: node.all_processes["raylet"][0].process.pid for name, node in nodes.items()}
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    print(json.dumps({"address": cluster.address, "raylets": raylets, "gcs": gcs}), file=told, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
