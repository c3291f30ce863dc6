"""How fast steps are made, and when the next request ends."""

from __future__ import annotations

import pytest

from omni_actors.stages.base import NEXT_END
from omni_actors.stages.diffusion.pace import Pace


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    """After one step of 2 s."""
    times = iter((10.0, 12.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    pace = Pace()
    with pace.measured():
        pass
    return pace


def test_the_request_with_the_fewest_steps_ends_next(pace: Pace) -> None:
    expected = {"running": 3.0, "waiting": 1.0, "steps_left": 95.0, "step_seconds": 2.0, NEXT_END: 10.0}
    assert pace.gauges([50, 5, 40], taking_part=3, waiting=1) == expected


def test_requests_that_take_turns_end_later(pace: Pace) -> None:
    assert pace.gauges([5, 5, 5, 5], taking_part=2, waiting=2)[NEXT_END] == 20.0


def test_without_a_request_or_a_measurement_the_next_end_is_not_known(pace: Pace) -> None:
    assert NEXT_END not in pace.gauges([], taking_part=0, waiting=0)
    assert NEXT_END not in Pace().gauges([5], taking_part=1, waiting=0)
