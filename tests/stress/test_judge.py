"""The rules as a table: what may become of a request, a worker, a stage, and how answers differ."""

from __future__ import annotations

import math
import tracemalloc

import pytest

from omni_actors.config import Limits
from omni_actors.errors import Aborted, DeadlineExceeded, RequestError, StageAsleep, StageCrashed, WorkerExit
from omni_actors.outputs import Output
from omni_actors.stress import judge
from omni_actors.stress.judge import ClosedPeriods, ObservedDeath, Period, Rules, TrackedRequest
from omni_actors.stress.oracle import ExpectedAnswer, Oracle
from omni_actors.stress.schedule import OnFailure
from omni_actors.stress.workload import Template
from ringbuf import Tensor

TEMPLATE = Template(name="t", inputs={}, modalities=("text",), params={}, stages=("first", "second"))
EXIT = WorkerExit(9, "SIGKILL", None)
CRASHED = StageCrashed("second", 0, 1, EXIT)
CONVICTED = StageCrashed(
    stage="second",
    replica=0,
    generation=1,
    exit=EXIT,
    not_replayed="it could not be tried apart from other requests",
    retryable=False,
)


def piece(text: str, *, finished: bool = False) -> Output:
    return Output(
        request_id="r", stage="second", modality="text", delta=None, finished=finished, data={"text": text}, tensors={}
    )


ORACLE = Oracle()
ORACLE.add(piece("hello", finished=True))


def answer(*pieces: Output) -> ExpectedAnswer:
    made = ExpectedAnswer(ORACLE)
    for each in pieces:
        made.add(each)
    return made


def observed(*stages_and_times: tuple[str, float]) -> list[ObservedDeath]:
    return [
        ObservedDeath(stage=stage, replica=0, pid=pid, exit="pid 1 was killed", at=at)
        for pid, (stage, at) in enumerate(stages_and_times)
    ]


@pytest.mark.parametrize(
    ("text", "finished", "whole", "so_far"),
    [
        ("hello", True, None, None),
        ("hello", False, "lost", None),
        ("hel", False, "lost", None),
        ("", False, "lost", None),
        ("hellohello", True, "duplicated", "duplicated"),
        ("hullo", True, "corrupted", "corrupted"),
        ("hul", False, "lost", "corrupted"),
    ],
)
def test_damage_of_an_answer(text: str, finished: bool, whole: str | None, so_far: str | None) -> None:
    ours = answer(piece(text, finished=finished))
    for found, expected in ((ours.damage(complete=True), whole), (ours.damage(complete=False), so_far)):
        assert (found and found[0]) == expected


def test_chunk_boundaries_do_not_matter() -> None:
    assert answer(piece("he"), piece(""), piece("llo", finished=True)).damage(complete=True) is None


def test_a_stream_that_the_oracle_lacks_counts_as_duplicated() -> None:
    stray = Output(
        request_id="r", stage="first", modality="text", delta=None, finished=False, data={"text": "x"}, tensors={}
    )
    found = answer(piece("hello", finished=True), stray).damage(complete=True)
    assert found == ("duplicated", "text of 'first': 1 bytes, 0 expected")


@pytest.mark.parametrize(
    ("error", "on_failure", "deaths", "expected"),
    [
        (CRASHED, "fail", observed(("second", 5.0)), None),
        (CRASHED, "fail", observed(("first", 5.0)), None),
        (CRASHED, "fail", observed(), "disturbed"),
        (CRASHED, "fail", observed(("second", 0.5), ("second", 11.0)), "disturbed"),
        (CRASHED, "fail", observed(("other", 5.0)), "disturbed"),
        (StageCrashed("second", 0, 1, WorkerExit(0, "SIGKILL", None)), "fail", observed(("second", 11.0)), None),
        (StageCrashed("second", 0, 1, WorkerExit(0, "SIGKILL", None)), "fail", observed(("second", 0.5)), "disturbed"),
        (CRASHED, "replay", observed(("second", 5.0)), "lost"),
        (CRASHED, "replay", observed(("second", 5.0), ("first", 6.0)), "lost"),
        (CRASHED, "replay", observed(("second", 5.0), ("first", 6.0), ("second", 7.0)), "lost"),
        (CRASHED, "replay", observed(("second", 5.0), ("second", 6.0), ("second", 7.0)), None),
        (CONVICTED, "replay", observed(("second", 5.0)), "lost"),
        (CONVICTED, "replay", observed(("second", 0.5), ("second", 5.0)), None),
        (DeadlineExceeded(1.0), "replay", observed(("second", 5.0)), "lost"),
        (Aborted(), "replay", observed(), "lost"),
    ],
)
def test_a_request_may_fail_only_for_a_death_on_its_route(
    error: RequestError, on_failure: OnFailure, deaths: list[ObservedDeath], expected: str | None
) -> None:
    rules = Rules(2, frozenset({"first", "second"}))
    asked = TrackedRequest(
        "r", TEMPLATE, answer(), on_failure, submitted=1.0, outcome="failed", error=error, ended=10.0
    )
    found = judge.check_request(asked, deaths, set(), rules)
    assert (found and found.kind) == expected
    unable = judge.check_request(asked, deaths, set(), Rules(2, frozenset({"first"})))
    if expected == "lost" and error is CRASHED:
        assert unable is None, "a stage that cannot be replayed may fail its requests"


@pytest.mark.parametrize(
    ("error", "began", "ended", "stages", "expected"),
    [
        (StageAsleep("second"), 5.0, 6.0, ("second",), None),
        (StageAsleep("second"), 0.0, 1.5, ("second",), None),
        (StageAsleep("second"), 9.5, math.inf, ("second",), None),
        (StageAsleep("second"), 0.0, 0.5, ("second",), "lost"),
        (StageAsleep("second"), 10.5, 12.0, ("second",), "lost"),
        (StageAsleep("second"), 5.0, 6.0, ("first",), "lost"),
        (Aborted(), 5.0, 6.0, ("second",), None),
        (Aborted(), 0.0, 0.5, ("second",), "lost"),
        (Aborted(), 5.0, 6.0, ("other",), "lost"),
        (None, 0.0, 20.0, ("first", "second"), "disturbed"),
        (None, 2.0, 20.0, ("first", "second"), None),
        (None, 0.0, 9.0, ("first", "second"), None),
    ],
)
def test_a_control_explains_what_happens_in_its_time_only(
    error: RequestError | None, began: float, ended: float, stages: tuple[str, ...], expected: str | None
) -> None:
    """The request is submitted at 1.0 and ends at 10.0. Without an error it is answered."""
    times = [Period(stages, began, ended)]
    closures = {
        None: ClosedPeriods(paused=times),
        Aborted: ClosedPeriods(aborting=times),
        StageAsleep: ClosedPeriods(asleep=times),
    }
    asked = TrackedRequest(
        name="r",
        template=TEMPLATE,
        answer=answer() if error else answer(piece("hello", finished=True)),
        on_failure="replay",
        submitted=1.0,
        outcome="failed" if error else "completed",
        error=error,
        ended=10.0,
    )
    rules = Rules(2, frozenset(), closures[type(error) if error else None])
    found = judge.check_request(asked, [], set(), rules)
    assert (found and found.kind) == expected


def test_requests_with_no_outcome_and_with_two() -> None:
    rules = Rules(2, frozenset())
    open_one = TrackedRequest(name="r", template=TEMPLATE, answer=answer(), on_failure="fail", submitted=1.0)
    whole = answer(piece("hello", finished=True))
    twice = TrackedRequest(
        name="r",
        template=TEMPLATE,
        answer=whole,
        on_failure="fail",
        submitted=1.0,
        outcome="completed",
        second_outcome="an output of 'second'",
    )
    aborted = TrackedRequest(
        name="r",
        template=TEMPLATE,
        answer=answer(),
        on_failure="fail",
        submitted=1.0,
        aborted=True,
        outcome="failed",
        error=Aborted(),
    )
    found = [judge.check_request(each, [], set(), rules) for each in (open_one, twice, aborted)]
    assert [each and each.kind for each in found] == ["hung", "duplicated", None]


def test_deaths_are_explained_by_pid_or_by_number() -> None:
    deaths = observed(("second", 1.0), ("second", 2.0), ("first", 3.0))
    found, left = judge.check_deaths(deaths, {0}, {"second": 1})
    assert [violation.kind for violation in found] == ["disturbed"]
    assert left["second"] == 0
    assert judge.check_deaths(deaths, {0, 2}, {"second": 3}) == ([], {"second": 2})
    assert len(judge.check_deaths(deaths, set(), {})[0]) == 3


def test_the_bound_of_the_deaths_by_one_request() -> None:
    """The terms: the first death, the halves, one trial beside other requests, and what disturbs the search."""
    limits = Limits(max_requests=8, replays=2)
    assert judge.max_deaths_by_one_request(limits, "replay") == 1 + 3 + 1
    assert judge.max_deaths_by_one_request(limits, "replay", disturbances=2) == 1 + 3 + 1 + 2
    assert judge.max_deaths_by_one_request(Limits(max_requests=8, replays=10), "replay") == 1 + 10
    assert judge.max_deaths_by_one_request(limits, "fail", disturbances=2) == 1
    assert judge.max_deaths_by_one_request(Limits(replays=0), "replay") == 1


def test_an_answer_does_not_keep_its_outputs() -> None:
    """The harness lives in the process whose memory it measures."""
    sound = Tensor("int32", (250_000,), bytes(1_000_000))
    output = Output(
        request_id="r", stage="second", modality="audio", delta=None, finished=False, data={}, tensors={"audio": sound}
    )
    oracle = Oracle()
    for _ in range(10):
        oracle.add(output)
    ours = ExpectedAnswer(oracle)
    tracemalloc.start()
    try:
        for _ in range(10):
            ours.add(output)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ours.damage(complete=True) is None
    assert kept < 10_000
