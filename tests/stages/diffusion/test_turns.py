"""Which requests take part in a denoising step: tables, and that no active request is left out for long."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_actors.stages.diffusion.turns import PATIENCE, Candidate, turn

NEW, BEGUN = False, True


def candidate(rows: int, begun: bool, *, left: int = 50, priority: int = 0, left_out: int = 0) -> Candidate:
    return Candidate(rows, begun, priority, left, left_out)


@pytest.mark.parametrize(
    ("candidates", "running", "left_out"),
    [
        ([], [], []),
        ([candidate(1, NEW)], [0], []),
        ([candidate(9, NEW)], [0], []),  # one runs, whatever rows it has
        ([candidate(2, BEGUN)] * 2 + [candidate(1, NEW, left=4)], [0, 1], [2]),
        ([candidate(2, BEGUN)] * 2 + [candidate(1, NEW, left=4, left_out=1)], [0, 1], [2]),
        ([candidate(2, BEGUN)] * 2 + [candidate(1, NEW, left=4, left_out=2)], [2, 0], [1]),
        # a request that has begun goes on, and the one with the most steps left makes room
        ([candidate(2, BEGUN, left=40), candidate(2, BEGUN, left=30), candidate(1, BEGUN, left=3)], [2, 1], [0]),
        # no row stays idle while some request fits
        ([candidate(1, BEGUN), candidate(2, NEW), candidate(2, NEW), candidate(1, NEW)], [0, 1, 3], [2]),
        ([candidate(1, NEW), candidate(1, NEW, priority=-1)] * 2, [1, 3, 0, 2], []),
        # the requests behind twice the batch are not active
        ([candidate(1, NEW)] * 9, [0, 1, 2, 3], [4, 5, 6]),
    ],
)
def test_a_batch_of_four_rows(candidates: list[Candidate], running: list[int], left_out: list[int]) -> None:
    assert turn(candidates, 4) == (running, left_out)


@pytest.mark.parametrize("max_batch", range(1, 9))
def test_no_active_request_is_left_out_of_more_than_two_steps(max_batch: int) -> None:
    chance = random.Random(max_batch)
    requests: list[Candidate] = []
    for _ in range(2000):
        if chance.random() < 0.4:
            rows, left = chance.choice((1, 2)), chance.choice((1, 4, 50))
            requests.append(candidate(rows, NEW, left=left, priority=chance.choice((0, 1))))
        running, left_out = turn(requests, max_batch)
        assert bool(running) == bool(requests)
        assert sum(requests[n].rows for n in running) <= max_batch or len(running) == 1
        for n in left_out:
            requests[n] = requests[n]._replace(left_out=requests[n].left_out + 1)
            assert requests[n].left_out <= PATIENCE
        for n in running:
            requests[n] = requests[n]._replace(left_out=0, has_begun=True, steps_left=requests[n].steps_left - 1)
        requests = [each for each in requests if each.steps_left]


ARRIVALS = st.lists(
    st.lists(
        st.builds(
            candidate,
            st.sampled_from((1, 2)),
            st.just(NEW),
            left=st.sampled_from((1, 2, 4, 30)),
            priority=st.integers(-1, 1),
        ),
        max_size=3,
    ),
    max_size=40,
)
"""The requests that arrive before each step."""


@given(st.integers(1, 5), ARRIVALS)
@example(
    1,  # the second request is overdue when one with a better priority arrives
    [
        [candidate(2, NEW), candidate(2, NEW, left=4, priority=1)],
        [],
        [candidate(1, NEW, left=4, priority=-1)],
        [],
        [],
    ],
)
def test_a_later_request_with_a_better_priority_takes_no_active_ones_place(
    max_batch: int, arrivals: list[list[Candidate]]
) -> None:
    requests: list[Candidate] = []
    active: set[int] = set()
    for arriving in arrivals:
        requests += arriving
        going_on = [n for n, each in enumerate(requests) if each.steps_left]
        running, left_out = ({going_on[n] for n in part} for part in turn([requests[n] for n in going_on], max_batch))
        assert active <= running | left_out, "an active request remains active"
        for n in left_out:
            requests[n] = requests[n]._replace(left_out=requests[n].left_out + 1)
            assert requests[n].left_out <= PATIENCE
        for n in running:
            requests[n] = requests[n]._replace(left_out=0, has_begun=True, steps_left=requests[n].steps_left - 1)
        active = {n for n in running | left_out if requests[n].steps_left}
