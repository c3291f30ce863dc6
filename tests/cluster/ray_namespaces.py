"""A Ray cluster whose nodes are network namespaces, with a driver in one of them.

Rules
1. Each node is a `ray start --block` in its namespace. It ends all of its node's processes when one of them has ended.
2. A node is ended by ending the processes that it has started, never with `ray stop`, which would end every Ray of the
   machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.cluster.ray_cluster import ENVIRONMENT, STORE_BYTES, secret_of_ray
from tests.support.network import Namespace

PORT = 6397
START_S, END_S = 60.0, 20.0
RAYLET, GCS, AGENT, WORKER = "raylet", "gcs_server", "ray::AgentActor", "multiprocess.spawn"


class RayNodes:
    """A Ray whose first node is the head. The names of the nodes are those in Ray, too. cpus: of each node."""

    def __init__(self, nodes: Sequence[Namespace], folder: Path, *, cpus: int) -> None:
        self.nodes = {"head" if n == 0 else f"n{n}": node for n, node in enumerate(nodes)}
        self._folder, self._cpus = folder, cpus
        self._starters: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return f"{self.nodes['head'].address}:{PORT}"

    def start(self, name: str) -> None:
        """Start a node, and wait until Ray knows it. It must not run already."""
        node, ray = self.nodes[name], Path(sys.executable).with_name("ray")
        options = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        command = [
            *(str(ray), "start", "--block", "--disable-usage-stats", f"--num-cpus={self._cpus}", f"--node-name={name}"),
            *(f"--node-ip-address={node.address}", f"--object-store-memory={STORE_BYTES}"),
            *(options if name == "head" else [f"--address={self.address}"]),
        ]
        output = self._folder / f"{name}.log"
        with output.open("wb") as log:
            self._starters[name] = subprocess.Popen(
                node.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
            )
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in output.read_text():
            if self._starters[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the Ray node {name!r} has not started: {output.read_text()}")
            time.sleep(0.1)

    def process(self, name: str, what: str) -> psutil.Process:
        """Return a process of a node: RAYLET or GCS."""
        [process] = self._find(name, what)
        return process

    def node_of(self, pid: int) -> str:
        """Return the node of a process."""
        return next(name for name, node in self.nodes.items() if pid in node.pids())

    def pids(self) -> set[int]:
        """Return the processes of all nodes."""
        return {pid for node in self.nodes.values() for pid in node.pids()}

    def agents_and_workers(self) -> set[int]:
        """Return the agents and workers of all nodes. Not those that are children of this process."""
        return {pid for pid in self.pids() if _is_ours(pid)}

    def end(self, name: str) -> None:
        """End all that a node has started, or what is left of it."""
        if (starter := self._starters.pop(name, None)) is not None:
            starter.terminate()
            with suppress(subprocess.TimeoutExpired):
                starter.wait(END_S)
        self.kill(name)
        if starter is not None:
            starter.kill()
            starter.wait()

    def kill(self, name: str) -> None:
        """Kill all processes of Ray on a node, one directly after the other: agents, but not the parent's helper."""
        for pid in self.nodes[name].pids() - {os.getpid()}:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if str(self._folder) in " ".join(process.cmdline()) or process.name().startswith("ray::"):
                    process.kill()

    def restart_ended(self) -> list[str]:
        """Start each node again that has ended. Returns their names."""
        ended = [name for name in self.nodes if name not in self._starters or self._starters[name].poll() is not None]
        self.restart(ended)
        return ended

    def restart(self, names: Sequence[str]) -> None:
        """End nodes, and start them again."""
        for name in names:
            self.end(name)
        for name in names:
            self.start(name)

    def end_all(self) -> None:
        for name in reversed(list(self._starters)):
            self.end(name)

    def _find(self, name: str, what: str) -> list[psutil.Process]:
        found = []
        for pid in self.nodes[name].pids():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.name() == what:
                    found.append(process)
        return found


def _is_ours(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return AGENT in process.name() or WORKER in " ".join(process.cmdline())
    return False


@contextmanager
def ray_on(nodes: Sequence[Namespace], *, cpus: int = 2) -> Iterator[RayNodes]:
    """Run a Ray with a node in each namespace, each with ``cpus`` CPUs."""
    with (
        tempfile.TemporaryDirectory(prefix="omni-ray-", ignore_cleanup_errors=True) as folder,
        secret_of_ray(),
    ):
        cluster = RayNodes(nodes, Path(folder), cpus=cpus)
        try:
            for name in cluster.nodes:
                cluster.start(name)
            yield cluster
        finally:
            cluster.end_all()
