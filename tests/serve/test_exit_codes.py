"""The exit codes of a server process: 0 after a signal, 1 when it cannot serve. A service manager restarts on them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.support.http_server import WATCHDOG_S, Server, Start, process_with_a_bug

MIND = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], emits: text}
"""
ENDLESS = ("-s", "stages.mind.options.fan_out=1000000", "-s", "stages.mind.options.step_s=0.01")
NO_RESTART = ("-s", "stages.mind.restart={intensity: 0, retry_s: 0}")
SYS_PIDFD_GETFD = 438


def of_replicas(server: Server, fact: str) -> list[Any]:
    return [replica[fact] for replica in server.http.get("/health").json()["stages"]["mind"]]


def kill_replica(server: Server, number: int) -> None:
    os.kill(of_replicas(server, "pid")[number], signal.SIGKILL)


@contextmanager
def listening_socket_of(server: Server) -> Iterator[socket.socket]:
    """A copy of the server's listening socket."""
    process = psutil.Process(server.process.pid)
    [fd] = [found.fd for found in process.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
    pidfd = os.pidfd_open(process.pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if copy < 0:
        pytest.skip(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
    with socket.socket(fileno=copy) as listener:
        yield listener


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_and_a_complete_drain_are_0(start: Start, number: signal.Signals) -> None:
    with start(config=MIND) as server:
        assert server.ends_by(number) == (0, "")


def test_a_signal_and_a_drain_that_ends_requests_are_0(start: Start) -> None:
    with start(*ENDLESS, "--drain-s", "0.2", config=MIND) as server, server.openai() as client:
        stream = client.chat.completions.create(
            model="studio", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        next(iter(stream))
        server.signal(signal.SIGTERM)
        assert server.wait_end() == 0
        stream.close()


def test_a_stage_without_a_replica_left_is_1(start: Start) -> None:
    replicas = ("-s", "stages.mind.replicas=2")
    with start("--exit-on-failed-stage", *NO_RESTART, *replicas, config=MIND) as server:
        server.wait(lambda: of_replicas(server, "state") == ["ready", "ready"], "both replicas")
        kill_replica(server, 0)
        server.wait(lambda: of_replicas(server, "state") == ["failed", "ready"], "the first death")
        assert server.status() == "ready", "a replica is left"
        kill_replica(server, 1)
        assert server.wait_end() == 1
        assert "Error: stage 'mind' (replica 1) failed" in server.stderr
        assert "SIGKILL" in server.stderr


def test_stages_that_do_not_load_in_time_are_1(start: Start) -> None:
    slow = ("-s", "start_timeout_s=0.5", "-s", "stages.mind.options.load_s=3600")
    with start(*slow, config=MIND, ready=False) as server:
        assert server.wait_end() == 1
        assert "Error: not ready within 0.5 s (start_timeout_s): mind.0 (" in server.stderr
        assert "Traceback" not in server.stderr


def test_a_stage_that_fails_after_the_signal_is_0(start: Start) -> None:
    """The server was asked to end, and it has drained."""
    options = ("--exit-on-failed-stage", *NO_RESTART, *ENDLESS, "--drain-s", "60")
    with start(*options, config=MIND) as server, server.openai() as client:
        stream = client.chat.completions.create(
            model="studio", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        next(iter(stream))
        pid = server.pid_of("mind")
        server.signal(signal.SIGTERM)
        server.wait_refusing()
        os.kill(pid, signal.SIGKILL)
        assert server.wait_end() == 0, server.stderr
        assert "was given up" in server.stderr
        stream.close()


def test_a_lost_socket_is_1(start: Start) -> None:
    with start(config=MIND) as server:
        with listening_socket_of(server) as listener:
            listener.shutdown(socket.SHUT_RDWR)
        assert server.wait_end() == 1
        assert f"Error: cannot listen on 127.0.0.1:{server.port}: its socket was lost" in server.stderr


def test_an_internal_error_is_1() -> None:
    with process_with_a_bug() as process:
        _, err = process.communicate(timeout=WATCHDOG_S)
    assert process.returncode == 1
    assert b"ZeroDivisionError: a bug" in err
