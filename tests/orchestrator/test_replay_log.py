"""Replays after one death become one log record."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from omni_actors.errors import StageCrashed, WorkerExit
from omni_actors.log_events import log
from omni_actors.orchestrator.replay_log import TOGETHER_S, ReplayLog
from omni_actors.orchestrator.request import Deaths

FIRST = StageCrashed("mind", 0, 1, WorkerExit(7, "SIGKILL", None))
SECOND = StageCrashed("mouth", 1, 4, WorkerExit(8, None, 3, node="n1"))


async def test_replays_are_counted_by_the_death_that_they_follow(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, log.name)
    replay_log = ReplayLog()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replay_log.run)
        await trio.testing.wait_all_tasks_blocked()
        replay_log.add(FIRST, 0.5, is_resumed=True, successor=0)
        await trio.sleep(TOGETHER_S / 2)
        replay_log.add(SECOND, 0.1, is_resumed=False, successor=2)
        replay_log.add(FIRST, 0.6, is_resumed=False, successor=0)
        await trio.sleep(2 * TOGETHER_S)
        assert [
            (r.event.stage, r.event.requests, r.event.resumed, r.event.replayed_after_s) for r in caplog.records
        ] == [
            ("mind", 2, 1, 0.6),
            ("mouth", 1, 0, 0.1),
        ]
        assert [r.event.node for r in caplog.records] == [None, "n1"]
        assert [(r.event.pid, r.event.signal, r.event.exit_code) for r in caplog.records] == [
            (7, "SIGKILL", None),
            (8, None, 3),
        ]
        assert caplog.messages[0] == (
            "2 requests were replayed (1 resumed) 0.60 s after the death of stage 'mind' (replica 0, generation 1)"
        )
        assert caplog.messages[1] == (
            "1 request was replayed 0.10 s after the death of stage 'mouth' (replica 1, generation 4), by replica 2"
        )
        assert [r.event.successors for r in caplog.records] == [(0,), (2,)]
        caplog.clear()
        replay_log.add(FIRST, 2.0, is_resumed=False, successor=None)
        nursery.cancel_scope.cancel()
    assert [record.event.requests for record in caplog.records] == [1], "also when the system closes"


async def test_requests_that_a_death_ends_are_counted_by_the_reason(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    replay_log = ReplayLog()
    used_up = StageCrashed("mind", 0, 1, FIRST.exit, not_replayed="it was replayed 2 times already", retryable=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replay_log.run)
        await trio.testing.wait_all_tasks_blocked()
        for crash in (FIRST, used_up, FIRST):
            replay_log.add_lost(crash)
            await trio.sleep(TOGETHER_S / 4)
        await trio.sleep(2 * TOGETHER_S)
        assert len(caplog.records) == 2
        nursery.cancel_scope.cancel()
    assert [(r.levelname, r.event.requests, r.event.reason, r.event.retryable) for r in caplog.records] == [
        ("ERROR", 2, None, True),
        ("ERROR", 1, "it was replayed 2 times already", False),
    ]
    of_mind = "after the death of stage 'mind' (replica 0, generation 1)"
    assert caplog.messages == [
        f'2 requests ended {of_mind}: submitted with on_failure="fail"',
        f"1 request ended {of_mind}: it was replayed 2 times already",
    ]


def test_a_replay_follows_the_latest_death_of_a_stage_that_starts_again() -> None:
    deaths = Deaths()
    deaths.add(FIRST, 10.0, None)
    deaths.add(SECOND, 12.0, None)  # it had finished, and is not needed
    found = deaths.cause(["mind"])
    assert (found.crash, found.noticed) == (FIRST, 10.0)
    assert deaths.cause(["mind", "mouth"]).crash == SECOND
    deaths.add(FIRST, 13.0, None)
    deaths.restarted(["mind"])
    assert deaths.cause(["mouth"]).crash == SECOND
    assert deaths.cause(["eye"]).crash == FIRST, "a living stage computes its outputs again"
