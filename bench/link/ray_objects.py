"""Ray's object store between the two nodes: an actor on the far one gets objects that the near one has put.

Rule 1: Ray runs on both namespaces as a cluster of its own, in a directory of its own. It is ended by ending the
processes that were started here, never with `ray stop`, which would end every Ray of the machine.
Rule 2: the driver is a process on the near node, so that this one stays where it is.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from bench.link.measure import ECHO_SIZES, WATCHDOG_S, Figures, fork
from tests.support.network import Namespace

SIZES = (64 << 10, 1 << 20, 8 << 20)
IN_FLIGHT = 8
PORT = 6399
STORE_BYTES = 512 << 20
AUTHENTICATION = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def why_no_ray() -> str | None:
    return None if importlib.util.find_spec("ray") else "Ray is not installed"


class RayObjects:
    """A Ray of two nodes, until the block is left."""

    name = "Ray objects"

    def __init__(self, nodes: tuple[Namespace, Namespace]) -> None:
        self._nodes = nodes

    def __enter__(self) -> RayObjects:
        self._folder = tempfile.mkdtemp(prefix="bench-link-ray-")
        near, far = self._nodes
        self._starters: list[subprocess.Popen[bytes]] = []
        try:
            self._start(near, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}")
            self._start(far, f"--address={near.address}:{PORT}", '--resources={"far": 1}')
            self._here, there = fork.Pipe()
            pids = [process.pid for process in self._starters]
            self._driver = fork.Process(target=_drive, args=(there, near, pids))
            self._driver.start()
            self._receive()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes = [each for starter in self._starters for each in _family(starter.pid)]
        if hasattr(self, "_driver"):
            self._driver.kill()
            self._driver.join()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, 10)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for starter in self._starters:
            starter.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def measure(self, seconds: float) -> Figures:
        self._here.send(seconds)
        return self._receive()

    def _receive(self) -> Figures:
        if not self._here.poll(WATCHDOG_S):
            raise TimeoutError("Ray did not answer")
        figures: Figures = self._here.recv()
        return figures

    def _start(self, node: Namespace, *options: str) -> None:
        command = [
            *(os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--block", "--num-cpus=1"),
            *(f"--node-ip-address={node.address}", f"--object-store-memory={STORE_BYTES}"),
            *("--disable-usage-stats", *options),
        ]
        environment = {**os.environ, **AUTHENTICATION}
        self._starters.append(
            subprocess.Popen(
                node.command(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
        )


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_s(pids: list[int]) -> float:
    """Return the CPU time of the living processes of both nodes, and of this one."""
    total = time.process_time()
    for process in {each for pid in pids for each in _family(pid)}:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _drive(parent: Connection, node: Namespace, pids: list[int]) -> None:
    os.environ.update(AUTHENTICATION)  # read by the import
    import ray

    with node.entered():
        deadline = time.monotonic() + WATCHDOG_S
        while True:
            try:
                ray.init(address=f"{node.address}:{PORT}", _node_ip_address=node.address, log_to_driver=False)
                if ray.cluster_resources().get("far"):
                    break
                ray.shutdown()
            except ConnectionError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError("Ray did not start")
            time.sleep(0.5)

        @ray.remote(resources={"far": 1}, num_cpus=0)
        class Far:
            def check(self, array: np.ndarray) -> int:  # type: ignore[type-arg]
                return int(array[-1])

            def echo(self, array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
                return array

        far = Far.remote()
        assert ray.get(far.check.remote(np.zeros(8, np.uint8)), timeout=WATCHDOG_S) == 0
        parent.send(None)
        while True:
            parent.send(_measure(ray, far, parent.recv(), pids))


def _measure(ray: Any, actor: Any, seconds: float, pids: list[int]) -> Figures:
    rates, costs, trips = {}, {}, {}
    for size in SIZES:
        array = np.zeros(size, np.uint8)
        cpu, begin, number = -_cpu_s(pids), time.monotonic(), 0
        waiting: list[Any] = []
        while time.monotonic() - begin < seconds or number < 2 * IN_FLIGHT:
            waiting.append(actor.check.remote(ray.put(array)))
            number += 1
            if len(waiting) == IN_FLIGHT:
                ray.get(waiting.pop(0), timeout=WATCHDOG_S)
        ray.get(waiting, timeout=WATCHDOG_S)
        amount = number * size
        rates[size] = amount / (time.monotonic() - begin)
        costs[size] = (cpu + _cpu_s(pids)) / (amount / 1e9)
    for size in ECHO_SIZES:
        array, times = np.zeros(size, np.uint8), []
        for _ in range(int(100 * seconds)):
            begin = time.perf_counter()
            ray.get(actor.echo.remote(array), timeout=WATCHDOG_S)
            times.append(time.perf_counter() - begin)
        trips[size] = statistics.median(times)
    return Figures(rates, costs, trips)
