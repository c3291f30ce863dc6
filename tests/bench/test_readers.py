"""The benchmark of hostile clients runs, and each kind of client does what its name says."""

from __future__ import annotations

import subprocess
from typing import cast

import pytest
import trio

from bench import readers
from omni_actors.serve.http import connection
from tests.support.http_listener import listening

NO_PROCESS = cast("subprocess.Popen[str]", None)


@pytest.mark.slow
async def test_normal_clients_are_measured_alone_and_beside_every_kind_of_hostile_client() -> None:
    counts = dict.fromkeys(readers.HOSTILE, 1)
    # Less than HEAD_TIMEOUT_S: the server has closed no connection yet.
    phases, ends, counters = await readers.measure(
        "tone", (), counts, clients=1, seconds=8, alone_s=8, report=lambda line: None
    )
    assert [phase.answers > 0 and not phase.refused for phase in phases] == [True, True]
    assert all(phase.peaks["server"] > 0 < phase.peaks["workers"] for phase in phases)
    assert not ends
    assert counters['omni_requests_total{outcome="done"}'] >= sum(phase.answers for phase in phases)


async def test_slow_heads_and_idle_clients_last_until_the_server_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(readers, "DRIP_S", 0.01)
    async with listening() as running:
        server = readers.Server(NO_PROCESS, running.address[1], "model")
        with trio.fail_after(30):
            with monkeypatch.context() as patch:
                patch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
                assert await readers.slow_head(server) == "408"
            assert await readers.idle(server) == "404, closed"
