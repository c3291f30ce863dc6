"""The llm engine with several requests: none changes the answer to another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_actors.stages.base import CLIENT, Chunk, StageRequest
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import (
    CONTEXT,
    PROMPTS,
    Results,
    answer,
    answered,
    assert_empty,
    check,
    engine_running,
    opened,
    running,
    submit,
    user,
)
from tests.support.forwards import record_forwards

pytestmark = pytest.mark.usefixtures("clear_choices")


def test_requests_that_join_at_different_times_give_what_each_gives_alone(tiny: Path) -> None:
    with closing(opened(tiny, max_batch=8)) as engine:
        lengths = [30, 5, 17, 26, 9, 40, 1, 22, 33]
        alone = [answer(engine, p, max_tokens=n) for p, n in zip(PROMPTS, lengths, strict=True)]
        results = Results()
        for number, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
            submit(engine, number, prompt, max_tokens=length)
            for _ in range(number % 4):
                results.step(engine)
        results.run(engine)
        assert [(results.text(n), results.ends[n]) for n in range(len(PROMPTS))] == alone
        assert_empty(engine)


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}])
def test_a_seeded_sample_is_the_same_alone_and_in_a_batch(engine: LLMEngine, params: dict[str, Any]) -> None:
    params = {"temperature": 1.5, "max_tokens": 12, **params}
    prompts = PROMPTS[:5]
    alone = [answer(engine, prompt, seed=n, **params) for n, prompt in enumerate(prompts)]
    assert answer(engine, prompts[0], seed=99, **params) != alone[0]
    for n, prompt in enumerate(prompts):
        submit(engine, n, prompt, seed=n, **params)
    results = Results().run(engine)
    assert [(results.text(n), results.ends[n]) for n in range(len(prompts))] == alone


@pytest.mark.parametrize("context", [CONTEXT, 2])
def test_warming_up_runs_the_model_and_leaves_nothing(
    tiny: Path, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a context that holds no question."""
    with closing(opened(tiny, context=context)) as engine:
        forwards = record_forwards(engine, monkeypatch)
        engine.warm_up()
        assert_empty(engine)
        assert forwards[-1:] == ([] if context == 2 else [1]), "a prompt, then one more token"


def test_several_requests_that_end_in_one_step_do_not_change_the_others(tiny: Path) -> None:
    with closing(opened(tiny, max_batch=5, prefill_chunk=100)) as engine:
        lengths = [12, 11, 30, 9, 30]  # each joins a step after the one before, so 0, 1 and 3 end together
        expected = [answer(engine, prompt, max_tokens=n) for prompt, n in zip(PROMPTS, lengths, strict=False)]
        results = Results()
        for number, length in enumerate(lengths):
            submit(engine, number, PROMPTS[number], max_tokens=length)
            results.step(engine)
        while not results.ends:
            results.step(engine)
        assert list(results.ends) == [0, 1, 3]
        check(engine, {2, 4})
        results.run(engine)
        assert [(results.text(n), results.ends[n]) for n in range(5)] == expected


def test_requests_beyond_the_batch_wait_in_order(engine: LLMEngine) -> None:
    for n in range(5):
        submit(engine, n, PROMPTS[n], max_tokens=30 if n != 1 else 12)
    results, order = Results(), []
    while engine.busy:
        results.step(engine)
        assert len(engine._cache.lengths) <= 3
        order += [n for n in engine_running(engine) if n not in order]
    assert order == [0, 1, 2, 3, 4]
    assert list(results.ends) == [1, 0, 2, 3, 4]


Case = tuple[int, int, bool]
"""The number of the prompt, the number of tokens, and whether they are sampled."""
CASES = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 14), st.booleans())
SCHEDULE = st.lists(
    st.one_of(
        st.tuples(st.just("start"), CASES),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=24,
)
ALONE: dict[Case, tuple[str, Mapping[str, Any]]] = {}


def submit_case(engine: LLMEngine, request_id: int, case: Case) -> None:
    which, length, sampled = case
    submit(engine, request_id, PROMPTS[which], max_tokens=length, temperature=float(sampled), seed=which)


def alone(engine: LLMEngine, case: Case) -> tuple[str, Mapping[str, Any]]:
    if case not in ALONE:
        submit_case(engine, 0, case)
        results = Results().run(engine)
        ALONE[case] = (results.text(0), results.ends[0])
    return ALONE[case]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=SCHEDULE)
def test_any_schedule_of_joins_aborts_and_steps_gives_what_each_gives_alone(
    engine: LLMEngine, schedule: list[tuple[str, Any]]
) -> None:
    cases = [argument for act, argument in schedule if act == "start"]
    expected = [alone(engine, case) for case in cases]
    results, live, started = Results(), set[int](), 0
    for act, argument in schedule:
        if act == "start":
            submit_case(engine, started, argument)
            live.add(started)
            started += 1
        elif act == "abort" and live:
            gone = sorted(live)[argument % len(live)]
            engine.abort(gone)
            live.remove(gone)
        elif act == "step":
            for _ in range(argument):
                if engine.busy:
                    results.step(engine)
        live -= results.ends.keys()
        check(engine, live)
    results.run(engine)
    assert live <= results.ends.keys()
    for request_id, (text, end) in enumerate(expected):
        assert text.startswith(results.text(request_id))
        if request_id in results.ends:
            assert (results.text(request_id), results.ends[request_id]) == (text, end)
    assert_empty(engine)


@pytest.mark.parametrize("place", ["first row", "middle row", "last row", "prefilling", "waiting", "collecting"])
def test_abort_in_any_state_frees_the_request_and_changes_no_other(engine: LLMEngine, place: str) -> None:
    expected = {n: answered(engine, PROMPTS[n], 25) for n in (0, 1, 2, 6)}
    results = Results()
    rows = 3 if place in ("first row", "middle row", "last row", "waiting") else 2
    for n in range(rows):
        submit(engine, n, PROMPTS[n], max_tokens=25)
    while len(running(engine)) < rows:
        results.step(engine)
    submit(engine, 6, PROMPTS[6], max_tokens=25)
    if place == "prefilling":
        results.step(engine)
        assert len(running(engine)) < len(engine._scheduler.rows)
    if place == "collecting":
        engine.start(StageRequest(7, (CLIENT, "ear"), {}))
        engine.feed(7, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=user("hello")))
    victim = {"first row": 0, "middle row": 1, "last row": 2, "prefilling": 6, "waiting": 6, "collecting": 7}[place]
    engine.abort(victim)
    check(engine, {*range(rows), 6} - {victim})
    results.run(engine)
    assert victim not in results.ends
    for n in {*range(rows), 6} - {victim}:
        assert (results.text(n), results.ends[n]) == expected[n]


@pytest.mark.parametrize("victim", [0, 1])
def test_abort_while_another_prefills_moves_its_row_too(engine: LLMEngine, victim: int) -> None:
    expected = {n: answered(engine, PROMPTS[n], 25) for n in (0, 1, 6)}
    results = Results()
    for n in (0, 1):
        submit(engine, n, PROMPTS[n], max_tokens=25)
    while len(running(engine)) < 2:
        results.step(engine)
    submit(engine, 6, PROMPTS[6], max_tokens=25)
    results.step(engine)
    assert len(running(engine)) < len(engine._scheduler.rows)
    engine.abort(victim)
    check(engine, {0, 1, 6} - {victim})
    results.run(engine)
    for n in {0, 1, 6} - {victim}:
        assert (results.text(n), results.ends[n]) == expected[n]


def test_a_request_that_computes_nan_changes_no_other(engine: LLMEngine) -> None:
    expected = answer(engine, PROMPTS[1], max_tokens=30)
    results = Results()
    submit(engine, 1, PROMPTS[0], max_tokens=10)
    submit(engine, 2, PROMPTS[1], max_tokens=30)
    while len(running(engine)) < 2:
        results.step(engine)
    with torch.inference_mode():
        for store in (*engine._cache._keys, *engine._cache._values):
            store[0, :, : engine._cache.lengths[0]] = torch.nan
    results.run(engine)
    assert results.failed[1].code == "output_not_finite"
    assert (results.text(2), results.ends[2]) == expected
    assert answer(engine, PROMPTS[1], max_tokens=30) == expected


def test_waiting_requests_begin_in_order_of_priority(engine: LLMEngine) -> None:
    """Three have rows, and go on. Of the others the lowest number is first, then the earliest."""
    for number in range(3):
        submit(engine, number, PROMPTS[0], max_tokens=9, priority=9)
    results = Results()
    results.step(engine)
    assert len(engine._scheduler.rows) == 3
    for number, priority in ((3, 2), (4, 1), (5, 2), (6, -1)):
        submit(engine, number, PROMPTS[0], max_tokens=2, priority=priority)
    results.run(engine)
    assert list(results.pieces)[3:] == [6, 4, 3, 5]
