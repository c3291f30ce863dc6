"""What the parent learns from the answers of living stages before stages start again, without workers."""

from __future__ import annotations

import pytest

from omni_actors.orchestrator.resumption import Resumption
from omni_actors.protocol.journal import JournalCorrupted
from omni_actors.protocol.messages import Decided

FIRST = Decided("a", 0, ((1,), (2,)))
MORE = Decided("a", 2, ((3,),))


@pytest.fixture
def resumption() -> Resumption:
    resumption = Resumption()
    resumption.add([FIRST])
    return resumption


def entries(resumption: Resumption, stage: str = "a") -> list[tuple[int, ...]]:
    return [entry for decided in resumption.entries(stage) for entry in decided.entries]


def test_an_answer_counts_when_all_of_it_has_arrived(resumption: Resumption) -> None:
    question = resumption.ask(["b", "c"])
    resumption.part_arrived("b", MORE)
    assert entries(resumption) == [(1,), (2,)]
    resumption.answered("b", question, {"a": 3})
    assert entries(resumption) == [(1,), (2,), (3,)]
    assert not resumption.complete
    resumption.answered("c", question, {"a": 1})
    assert resumption.complete
    assert [resumption.received("a", consumer) for consumer in "bcd"] == [3, 1, 0]


def test_an_answer_of_a_worker_that_died_before_its_end_is_void(resumption: Resumption) -> None:
    resumption.ask(["b"])
    resumption.part_arrived("b", MORE)
    resumption.forget("b")
    assert resumption.complete
    question = resumption.ask(["b"])  # the next incarnation
    resumption.answered("b", question, {"a": 2})
    assert entries(resumption) == [(1,), (2,)]


def test_an_answer_to_an_earlier_question_does_not_count(resumption: Resumption) -> None:
    """Its entries are right, but the stage may have received more from a worker that died since."""
    earlier, later = resumption.ask(["b", "c"]), resumption.ask(["b"])
    resumption.part_arrived("b", MORE)
    resumption.answered("b", earlier, {"a": 3})
    assert not resumption.complete
    assert entries(resumption) == [(1,), (2,), (3,)]
    assert resumption.received("a", "b") == 0
    resumption.part_arrived("b", Decided("a", 2, ((3,), (4,))))
    resumption.answered("b", later, {"a": 4})
    assert resumption.complete
    assert entries(resumption) == [(1,), (2,), (3,), (4,)]
    assert resumption.received("a", "b") == 4


def test_a_stage_whose_worker_dies_does_not_start(resumption: Resumption) -> None:
    resumption.stages.update(["a", "b"])
    resumption.forget("a")
    assert resumption.stages == {"b"}


def test_an_answer_with_a_gap_is_refused(resumption: Resumption) -> None:
    question = resumption.ask(["b"])
    resumption.part_arrived("b", Decided("a", 3, ((4,),)))
    with pytest.raises(JournalCorrupted, match="from 3 on, where 2 are known"):
        resumption.answered("b", question, {})
