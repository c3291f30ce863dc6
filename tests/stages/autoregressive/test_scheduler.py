"""The scheduler against a simple model of it: no forward, only counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.scheduler import Scheduler, Sequence

PREFILL = 4


def batch(rows: int = 3) -> tuple[Scheduler[Sequence], SlottedCache]:
    cache = SlottedCache(rows, 100, torch.float32, torch.device("cpu"))
    return Scheduler(cache, rows, PREFILL), cache


def sequence(prompt: int, ready: int) -> Sequence:
    made = Sequence()
    made.prefill_left, made.ready = prompt, ready
    return made


def step(batch: Scheduler[Sequence], cache: SlottedCache) -> list[Sequence]:
    """Do what an engine does in a step; return the sequences that were computed."""
    moved = []
    if piece := batch.next_prefill_chunk():
        row, count = piece
        cache.extend([row], count)
        batch.rows[row].prefill_left -= count
        batch.rows[row].ready -= count
        moved.append(batch.rows[row])
    for row in batch.decode_rows():
        cache.extend([row], 1)
        batch.rows[row].ready -= 1
        moved.append(batch.rows[row])
    return moved


def test_a_prompt_has_the_same_prefill_chunks_however_its_input_arrives() -> None:
    ours, _ = batch()
    late = sequence(prompt=10, ready=0)
    ours.add(late)
    cuts = []
    for _ in range(10):
        late.ready += 1
        if piece := ours.next_prefill_chunk():
            assert ours.busy
            cuts.append(piece[1])
            late.prefill_left -= piece[1]
            late.ready -= piece[1]
        else:
            assert not ours.busy
    assert cuts == [4, 4, 2]


def test_a_sequence_that_waits_for_input_delays_no_other() -> None:
    ours, cache = batch()
    starved, fed = sequence(8, 3), sequence(8, 8)
    ours.add(starved)
    ours.add(fed)
    assert step(ours, cache) == [fed]
    assert step(ours, cache) == [fed]
    assert step(ours, cache) == []
    starved.ready += 1
    assert step(ours, cache) == [starved]


def test_prompts_are_prefilled_in_order_of_arrival_although_rows_move() -> None:
    ours, cache = batch()
    first, second, third = (sequence(8, 8) for _ in range(3))
    for each in (first, second, third):
        ours.add(each)
    assert step(ours, cache) == [first]
    ours.remove(first)  # the last one, the third, takes its row
    assert ours.rows == [third, second]
    assert step(ours, cache) == [second]


def test_sequences_beyond_the_rows_wait_and_may_leave() -> None:
    ours, cache = batch(rows=1)
    first, second, third = (sequence(1, 1) for _ in range(3))
    for each in (first, second, third):
        ours.add(each)
    assert step(ours, cache) == [first]
    assert not ours.busy, "there is no row for the next one"
    ours.remove(second)
    ours.remove(second)
    ours.remove(first)
    assert ours.busy
    assert step(ours, cache) == [third]


@pytest.mark.parametrize("rows", [1, 3])
@given(st.data())
def test_busy_means_a_step_computes_a_position_and_rows_match_the_cache(rows: int, data: st.DataObject) -> None:
    ours, cache = batch(rows)
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 30))):
        act = data.draw(st.sampled_from(["add", "feed", "remove", "step"]))
        if act == "add":
            prompt = data.draw(st.integers(0, 9))
            live.append(sequence(prompt, data.draw(st.integers(0, prompt))))
            ours.add(live[-1])
        elif act == "feed" and live:
            data.draw(st.sampled_from(live)).ready += 1
        elif act == "remove" and live:
            ours.remove(live.pop(data.draw(st.integers(0, len(live) - 1))))
        elif act == "step":
            busy = ours.busy
            if sum(cache.lengths) < 80:
                assert bool(step(ours, cache)) == busy
        assert len(cache.lengths) == len(ours.rows) <= rows
        assert all(each in live for each in ours.rows)
