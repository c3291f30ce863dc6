"""Clients cannot use up the descriptors of a real server."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import psutil
import pytest

from omni_actors import OmniSystem, config
from omni_actors.protocol.messages import ControlMessage
from omni_actors.serve.http.descriptors import SPARE, DescriptorBudget
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.process import LocalSpawner
from omni_actors.system.workers import WORKER_DESCRIPTORS, descriptors, edge_specs, worker_specs
from tests.support.open_descriptors import open_descriptors

Start = Callable[..., AbstractContextManager[Any]]
UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"


def test_a_worker_restarts_however_many_connections_are_open(start: Start) -> None:
    """The server reserves descriptors for workers, and refuses clients above its limit."""
    with start(files=256) as server:
        old, process = server.pid_of("mind"), psutil.Process(server.process.pid)
        workers = len(process.children())
        with contextlib.ExitStack() as held:
            clients = [held.enter_context(socket.create_connection(("127.0.0.1", server.port), 60)) for _ in range(300)]
            for client in clients:
                with contextlib.suppress(ConnectionError):  # it may be refused before it has sent all
                    client.sendall(UPLOAD)
            assert select.select(clients, [], [], 60)[0], "those above the limit are closed: idle, or refused"
            server.wait(lambda: is_refused(server.port), "no connection to be idle")
            os.kill(old, signal.SIGKILL)
            server.wait(lambda: old not in (pids := pids_of(process)) and len(pids) == workers, "another worker")
        server.wait(lambda: server.http.get("/health").status_code == 200, "it to be ready")
        [mind] = server.http.get("/health").json()["stages"]["mind"]
        assert mind["restarts"] == 1
        body = {"model": "studio", "messages": [{"role": "user", "content": "hello"}]}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert "connections: this process may have only 256 descriptors" in server.stderr
        assert "cannot accept a connection" not in server.stderr


def is_refused(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 60) as late:
        late.settimeout(0.5)
        with contextlib.suppress(OSError):  # it waits, or it was reset
            return late.recv(12) == b"HTTP/1.1 503"
    return False


def pids_of(parent: psutil.Process) -> list[int]:
    return [child.pid for child in parent.children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_workers_use_no_more_descriptors_than_are_reserved(replicas: int) -> None:
    before = len(open_descriptors())
    async with OmniSystem.open("echo", **{"stages.second.replicas": replicas}) as system:
        taken = len(open_descriptors()) - before
        assert system.descriptors / 2 <= taken <= system.descriptors + SPARE / 8


@pytest.mark.parametrize("replicas", [1, 12])
async def test_the_reserve_has_room_for_a_worker_that_is_being_connected(replicas: int) -> None:
    """Its peers and itself are sent copies of the descriptors of each of its rings. None is sent yet at the peak."""
    pipeline = config.load("echo", {"stages.first.replicas": replicas})
    copies, before = list[int](), len(open_descriptors())

    def post(message: ControlMessage, fds: Sequence[int]) -> None:
        copies.extend(map(os.dup, fds))

    def close_copies() -> None:
        while copies:
            os.close(copies.pop())

    edges, specs = Edges(edge_specs(pipeline), LocalSpawner()), worker_specs(pipeline, {}, ["first", "second"])
    for spec in specs:
        close_copies()  # the others have been connected
        edges.connect_worker(spec, post, lambda reason: None)
    taken = len(open_descriptors()) - before
    assert taken <= descriptors(pipeline) - WORKER_DESCRIPTORS * len(specs)
    close_copies()
    for spec in specs:
        edges.disconnect_worker(spec.address)
    assert len(open_descriptors()) == before


def test_connections_get_the_descriptors_that_workers_do_not_need(caplog: pytest.LogCaptureFixture) -> None:
    assert DescriptorBudget(1000, 10).max_connections(500, reserved=100) == 500
    assert not caplog.records
    assert DescriptorBudget(256, 10).max_connections(500, reserved=100) == 256 - 10 - 100 - SPARE
    assert DescriptorBudget(50, 10).max_connections(500, reserved=100) == 1
    assert "this process may have only 256 descriptors" in caplog.text
