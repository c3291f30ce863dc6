"""The scheduler against a simple model of it: no forward, only counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.scheduler import ScheduledSequence, Scheduler

PREFILL = 4


def scheduler_of(rows: int = 3) -> tuple[Scheduler[ScheduledSequence], SlottedCache]:
    cache = SlottedCache(rows, 100, torch.float32, torch.device("cpu"))
    return Scheduler(cache, rows, PREFILL), cache


def sequence(prompt: int, ready: int) -> ScheduledSequence:
    made = ScheduledSequence()
    made.prefill_left, made.ready = prompt, ready
    return made


def step(scheduler: Scheduler[ScheduledSequence], cache: SlottedCache) -> list[ScheduledSequence]:
    """Do what an engine does in a step; return the sequences that were computed."""
    moved = []
    if chunk := next(scheduler.prefill_chunks(), None):
        row, count = chunk
        cache.extend([row], count)
        scheduler.rows[row].prefill_left -= count
        scheduler.rows[row].ready -= count
        moved.append(scheduler.rows[row])
    for row in scheduler.decode_rows():
        cache.extend([row], 1)
        scheduler.rows[row].ready -= 1
        moved.append(scheduler.rows[row])
    return moved


def test_a_prompt_has_the_same_prefill_chunks_however_its_input_arrives() -> None:
    scheduler, _ = scheduler_of()
    late = sequence(prompt=10, ready=0)
    scheduler.add(late)
    cuts = []
    for _ in range(10):
        late.ready += 1
        if chunk := scheduler.next_prefill_chunk():
            assert scheduler.busy
            cuts.append(chunk[1])
            late.prefill_left -= chunk[1]
            late.ready -= chunk[1]
        else:
            assert not scheduler.busy
    assert cuts == [4, 4, 2]


def test_a_sequence_that_waits_for_input_delays_no_other() -> None:
    scheduler, cache = scheduler_of()
    waiting, complete = sequence(8, 3), sequence(8, 8)
    scheduler.add(waiting)
    scheduler.add(complete)
    assert step(scheduler, cache) == [complete]
    assert step(scheduler, cache) == [complete]
    assert step(scheduler, cache) == []
    waiting.ready += 1
    assert step(scheduler, cache) == [waiting]


def test_prompts_are_prefilled_in_order_of_arrival_although_rows_move() -> None:
    scheduler, cache = scheduler_of()
    first, second, third = (sequence(8, 8) for _ in range(3))
    for each in (first, second, third):
        scheduler.add(each)
    assert step(scheduler, cache) == [first]
    scheduler.remove(first)  # the last one, the third, takes its row
    assert scheduler.rows == [third, second]
    assert step(scheduler, cache) == [second]


def test_sequences_beyond_the_rows_wait_and_may_leave() -> None:
    scheduler, cache = scheduler_of(rows=1)
    first, second, third = (sequence(1, 1) for _ in range(3))
    for each in (first, second, third):
        scheduler.add(each)
    assert step(scheduler, cache) == [first]
    assert not scheduler.busy, "there is no row for the next one"
    scheduler.remove(second)
    scheduler.remove(second)
    scheduler.remove(first)
    assert scheduler.busy
    assert step(scheduler, cache) == [third]


def urgent(prompt: int, priority: int) -> ScheduledSequence:
    made = sequence(prompt, prompt)
    made.priority = priority
    return made


def test_rows_are_given_by_priority_and_then_by_arrival() -> None:
    scheduler, cache = scheduler_of(rows=1)
    running = urgent(1, priority=5)
    scheduler.add(running)
    assert step(scheduler, cache) == [running]
    later, low, high, same = urgent(1, 0), urgent(1, 9), urgent(1, -1), urgent(1, 0)
    for each in (later, low, high, same):
        scheduler.add(each)
    assert step(scheduler, cache) == [], "what has the row keeps it"
    order = []
    for _ in range(4):
        scheduler.remove(scheduler.rows[0])
        order += step(scheduler, cache)
    assert order == [high, later, same, low]


def test_a_prefill_that_has_begun_goes_on_before_urgent_ones_and_those_come_by_priority() -> None:
    scheduler, cache = scheduler_of()
    begun = urgent(12, priority=5)
    scheduler.add(begun)
    assert step(scheduler, cache) == [begun]
    low, high = urgent(4, 1), urgent(4, 0)
    scheduler.add(low)
    scheduler.add(high)
    assert [step(scheduler, cache) for _ in range(4)] == [[begun], [begun], [high], [low]]


def test_a_pair_gets_rows_together_and_none_takes_its_place() -> None:
    scheduler, cache = scheduler_of(rows=2)
    running, first, second, later = (sequence(1, 1) for _ in range(4))
    scheduler.add(running)
    assert step(scheduler, cache) == [running]
    scheduler.add(first, second)
    scheduler.add(later)
    assert not scheduler.busy, "there is one row, and the pair needs two"
    assert step(scheduler, cache) == []
    scheduler.remove(running)
    assert [step(scheduler, cache) for _ in range(2)] == [[first], [second]]
    assert scheduler.rows == [first, second]
    scheduler.remove(second)
    assert step(scheduler, cache) == [later]
    assert scheduler.rows == [later]


def test_a_pair_is_prefilled_in_order_and_decodes_together() -> None:
    scheduler, cache = scheduler_of()
    long, short = sequence(8, 9), urgent(4, 0)
    scheduler.add(long, short)
    assert step(scheduler, cache) == [long]
    scheduler.add(urgent(4, -1))
    assert step(scheduler, cache) == [long]
    assert step(scheduler, cache) == [short], "a pair that has begun goes on before urgent sequences"
    assert scheduler.decode_rows() == [], "one of them lacks its input"
    short.ready = 1
    assert scheduler.decode_rows() == [0, 1]


@pytest.mark.parametrize("rows", [1, 3])
@given(st.data())
def test_busy_means_a_step_computes_a_position_and_rows_match_the_cache(rows: int, data: st.DataObject) -> None:
    scheduler, cache = scheduler_of(rows)
    live: list[ScheduledSequence] = []
    for _ in range(data.draw(st.integers(1, 30))):
        act = data.draw(st.sampled_from(["add", "feed", "remove", "step"]))
        if act == "add":
            made = []
            for _ in range(data.draw(st.integers(1, min(rows, 2)))):
                prompt = data.draw(st.integers(0, 9))
                made.append(sequence(prompt, data.draw(st.integers(0, prompt))))
            live += made
            scheduler.add(*made)
        elif act == "feed" and live:
            data.draw(st.sampled_from(live)).ready += 1
        elif act == "remove" and live:
            gone = live[data.draw(st.integers(0, len(live) - 1))].group
            scheduler.remove(gone[0])
            live = [each for each in live if each not in gone]
        elif act == "step":
            busy = scheduler.busy
            if sum(cache.lengths) < 80:
                assert bool(step(scheduler, cache)) == busy
        assert len(cache.lengths) == len(scheduler.rows) <= rows
        assert all(each in live for each in scheduler.rows)


def test_a_prompt_whose_chunk_does_not_fit_into_a_step_has_not_begun() -> None:
    scheduler, cache = scheduler_of()
    first, later, urgent = sequence(PREFILL, PREFILL), sequence(PREFILL, PREFILL), sequence(PREFILL, PREFILL)
    later.priority, urgent.priority = 1, -1
    scheduler.add(first)
    scheduler.add(later)
    for row, count in scheduler.prefill_chunks():
        assert scheduler.rows[row] is first
        cache.extend([row], count)
        first.prefill_left = first.ready = 0
    scheduler.add(urgent)
    row, _ = next(scheduler.prefill_chunks())
    assert scheduler.rows[row] is urgent
