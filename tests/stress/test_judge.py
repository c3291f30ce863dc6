"""The rules as a table: what may become of a request, a worker, a stage, and how answers differ."""

from __future__ import annotations

import pytest

from omni_actors.errors import Aborted, DeadlineExceeded, RequestError, StageCrashed, WorkerExit
from omni_actors.generation import Output
from omni_actors.stress import judge
from omni_actors.stress.judge import Asked, Loss, Rules
from omni_actors.stress.oracle import Answer, damage, damage_so_far
from omni_actors.stress.schedule import OnFailure
from omni_actors.stress.workload import Template

TEMPLATE = Template("t", {}, ("text",), {}, ("first", "second"))
CRASHED = StageCrashed("second", 0, 1, WorkerExit(9, "SIGKILL", None))


def answer(text: str = "", *, finished: bool = False) -> Answer:
    made = Answer()
    made.add(Output("r", "second", "text", None, finished, {"text": text}, {}))
    return made


ORACLE = answer("hello", finished=True)


def deaths(*stages_and_times: tuple[str, float]) -> list[Loss]:
    return [Loss(stage, 0, pid, "pid 1 was killed", at) for pid, (stage, at) in enumerate(stages_and_times)]


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
def test_how_an_answer_differs(text: str, finished: bool, whole: str | None, so_far: str | None) -> None:
    ours = answer(text, finished=finished)
    for found, expected in ((damage(ours, ORACLE), whole), (damage_so_far(ours, ORACLE), so_far)):
        assert (found and found[0]) == expected


def test_how_text_was_cut_does_not_matter() -> None:
    pieces = Answer()
    for text, last in (("he", False), ("", False), ("llo", True)):
        pieces.add(Output("r", "second", "text", None, last, {"text": text}, {}))
    assert damage(pieces, ORACLE) is None


@pytest.mark.parametrize(
    ("error", "on_failure", "losses", "expected"),
    [
        (CRASHED, "fail", deaths(("second", 5.0)), None),
        (CRASHED, "fail", deaths(("first", 5.0)), None),
        (CRASHED, "fail", deaths(), "disturbed"),
        (CRASHED, "fail", deaths(("second", 0.5), ("second", 11.0)), "disturbed"),
        (CRASHED, "fail", deaths(("other", 5.0)), "disturbed"),
        (CRASHED, "replay", deaths(("second", 5.0)), "lost"),
        (CRASHED, "replay", deaths(("second", 5.0), ("first", 6.0)), "lost"),
        (CRASHED, "replay", deaths(("second", 5.0), ("first", 6.0), ("second", 7.0)), None),
        (DeadlineExceeded(1.0), "replay", deaths(("second", 5.0)), "lost"),
        (Aborted(), "replay", deaths(), "lost"),
    ],
)
def test_a_request_may_fail_by_what_touched_it_only(
    error: RequestError, on_failure: OnFailure, losses: list[Loss], expected: str | None
) -> None:
    rules = Rules(2, frozenset({"first", "second"}))
    asked = Asked("r", TEMPLATE, on_failure, submitted=1.0, outcome="failed", error=error, ended=10.0)
    found = judge.of_request(asked, ORACLE, losses, set(), rules)
    assert (found and found.kind) == expected
    unable = judge.of_request(asked, ORACLE, losses, set(), Rules(2, frozenset({"first"})))
    if expected == "lost" and error is CRASHED:
        assert unable is None, "a stage that cannot be replayed may fail its requests"


def test_an_end_that_is_none_or_two() -> None:
    rules = Rules(2, frozenset())
    open_one = Asked("r", TEMPLATE, "fail", 1.0)
    twice = Asked(
        "r", TEMPLATE, "fail", 1.0, answer=ORACLE, outcome="completed", second_outcome="an output of 'second'"
    )
    aborted = Asked("r", TEMPLATE, "fail", 1.0, aborted=True, outcome="failed", error=Aborted())
    found = [judge.of_request(each, ORACLE, [], set(), rules) for each in (open_one, twice, aborted)]
    assert [each and each.kind for each in found] == ["hung", "duplicated", None]


def test_deaths_are_explained_by_pid_or_by_count() -> None:
    losses = deaths(("second", 1.0), ("second", 2.0), ("first", 3.0))
    assert [v.kind for v in judge.of_losses(losses, {0}, {"second": 1})] == ["disturbed"]
    assert judge.of_losses(losses, {0, 2}, {"second": 1}) == []
    assert len(judge.of_losses(losses, set(), {})) == 3
